"""An SO-101, leader and cameras included, that is software; LeRobot's unmodified drivers find no difference.

One process runs physics and buses on the monotonic clock, another renders and serves the cameras: as LeRobot's ``zmq``
cameras, one port each. Whoever started them sees the scene through :class:`Emulator`: it lays it out anew, judges
success from the state of the objects, moves the arms by hand and breaks things.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import select
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from robot_drivers.emulated_cameras import serve_cameras
from robot_drivers.feetech_bus import FeetechBus
from robot_drivers.lekiwi_base import LeKiwiBase
from vla_stack.errors import UserError
from vla_stack.runtime.link import Link, Message, ignored_interrupts

WAKE_S = 0.01  # longest time between two looks at the physics
ANSWER_S = 300.0
ID = "emulated"  # of both arms, for LeRobot's calibration files
FAULTS = ("loss", "corruption", "latency", "unplug", "power", "freeze", "overload", "heat", "tooth", "camera")


class Emulator:
    """The handle of an emulated SO-101; a context manager.

    Args:
        folder: Ports and calibration files go here.
        task: A task of ``sim`` for this arm.
        leader: Whether there is a leader arm too.
        calibrated: Whether servos and calibration files agree already; otherwise ``lerobot-calibrate`` has work to do.
        fps: Of the cameras.
        image_size: Of the cameras, pixels; 0 for no cameras.
        seed: Of latency, faults and how the horns are mounted.
        base: The follower is a LeKiwi's, with a base on its bus that drives.

    Attributes:
        ports: ``follower`` (and ``leader``) -> path for ``--robot.port``.
        cameras: Camera -> its options for LeRobot.
    """

    def __init__(
        self,
        folder: Path,
        task: str = "so101_pick",
        leader: bool = False,
        calibrated: bool = True,
        fps: float = 30.0,
        image_size: int = 64,
        seed: int = 0,
        base: bool = False,
    ) -> None:
        self.folder = folder.resolve()
        self._options = {"task": task, "leader": leader, "calibrated": calibrated, "seed": seed, "base": base}
        self._options |= {"fps": fps, "image_size": image_size, "folder": str(self.folder)}
        self.ports = {name: self.folder / name for name in ("follower", *(("leader",) if leader else ()))}
        self.cameras: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Emulator:
        """Start the processes.

        Raises:
            UserError: There is no such task, or it is not for this arm.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        self._link = Link(ours)
        self._process = context.Process(target=_main, args=(theirs, self._options), name="so101")
        with ignored_interrupts():
            self._process.start()
        theirs.close()
        try:
            ready = self._wait("ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for name, port in ready["cameras"].items():
            size, fps = self._options["image_size"], round(float(str(self._options["fps"])))
            self.cameras[name] = {"type": "zmq", "server_address": "127.0.0.1", "port": port, "camera_name": name}
            self.cameras[name] |= {"width": size, "height": size, "fps": fps, "timeout_ms": 500}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()  # the emulator ends when it reads the end of the pipe
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def device(self, name: str = "follower") -> dict[str, Any]:
        """Fields of LeRobot's config for an arm: port, id, calibration folder."""
        return {"port": str(self.ports[name]), "id": ID, "calibration_dir": str(self.folder / f"{name}_calibration")}

    def reset(self, seed: int, variant: Mapping[str, str] | None = None) -> str:
        """Lay the scene out anew and bring the arm to its start; returns the instruction once cameras have shown it."""
        return str(self._ask("reset", seed=seed, variant=dict(variant or {}))["instruction"])

    def status(self) -> Message:
        """How things are.

        ``success`` since the reset, ``success_s``, ``stage``; of each arm ``angles`` [J+1], ``bus`` counters, and
        ``limp_s``, for how long it has been without torque, in which a real one falls; of the base ``path_m`` and
        ``velocity`` (m/s, m/s, rad/s).
        """
        return self._ask("status")

    def written(self, arm: str = "follower") -> list[tuple[int, int, int, bytes, int]]:
        """Writes that the servos of an arm have obeyed, see :class:`~robot_drivers.feetech_bus.FeetechBus`."""
        return [(t, i, at, data, position) for t, i, at, data, position in self._ask("written", arm=arm)["written"]]

    def hand(self, arm: str, motion: str, angles: list[float] | None = None) -> None:
        """Take an arm: to a ``pose`` (``angles`` [J+1] rad), ``middle``, ``sweep``, ``expert``; or let ``go``."""
        self._ask("hand", arm=arm, motion=motion, angles=angles or [])

    def advice(self) -> list[float]:
        """What somebody who sees the scene would tell the follower now [J+1]: joints in radians, opening ratio."""
        return [float(x) for x in self._ask("advice")["command"]]

    def inject(self, fault: str, value: Any = None, arm: str = "follower") -> None:
        """Break something; :meth:`mend` repairs all of it.

        ``loss`` and ``corruption`` (probability of a frame), ``latency`` (s), ``unplug`` (the port), ``power`` (of the
        servos), ``freeze`` and ``heat`` (number of a joint), ``overload`` (number of a joint that is pushed against),
        ``tooth`` (number of a joint whose horn was put back one tooth off), ``camera`` (name of one that is unplugged).

        Raises:
            UserError: There is no such fault.
        """
        if fault not in FAULTS:
            raise UserError(f"there is no fault '{fault}'", f"choose one of {', '.join(FAULTS)}")
        self._ask("inject", fault=fault, value=value, arm=arm)

    def mend(self) -> None:
        """Take all faults away: plug in, switch on, let go."""
        self._ask("mend")

    def _ask(self, kind: str, **fields: Any) -> Message:
        self._link.send(kind, **fields)
        return self._wait("done")

    def _wait(self, kind: str) -> Message:
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                messages = self._link.receive(left)
            except EOFError:
                raise UserError("the emulator's process is gone") from None
            for message in messages:
                if message["kind"] == "failed":
                    raise UserError(message["error"])
                if message["kind"] == kind:
                    return message
        raise UserError(f"the emulator did not answer within {ANSWER_S:g} s")


def _main(connection: Connection, options: dict[str, Any]) -> None:
    """Main function of the emulator's process."""
    with contextlib.suppress(OSError, AttributeError):  # not every user may, not every system can
        # A servo's processor does nothing else, and drivers give up after 50 ms: go before all that is not real time.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(3))
    link = Link(connection)
    running: _Running | None = None
    try:
        running = _Running(link, options)
        running.serve()
    except EOFError:
        pass  # whoever started this process is gone
    except UserError as e:
        link.send("failed", error=str(e))
    finally:
        if running is not None:
            running.close()


class _Running:
    """Physics, buses and what is broken, in the emulator's own process."""

    def __init__(self, link: Link, options: dict[str, Any]) -> None:
        import gymnasium as gym
        import mujoco

        import sim
        from robot_drivers.so101_plant import Plant
        from sim.so101 import SO101

        self._link = link
        self._buses: dict[str, FeetechBus] = {}
        self._cameras: Link | None = None
        task = options["task"]
        if task not in sim.TASKS or sim.TASKS[task].arm is not SO101:
            raise UserError(
                f"there is no task '{task}' for the SO-101",
                f"choose one of {', '.join(n for n, t in sim.TASKS.items() if t.arm is SO101)}",
            )
        env: Any = gym.make(sim.TASKS[task].id, cameras=()).unwrapped
        self._env, self._expert = env, sim.make_expert(env)
        env.reset(seed=options["seed"])
        rng = np.random.default_rng(options["seed"])
        self._plants = {"follower": Plant(SO101, env.model, env.data, rng)}
        if options["leader"]:
            model = mujoco.MjModel.from_xml_path(SO101.xml)
            self._plants["leader"] = Plant(SO101, model, mujoco.MjData(model), rng)
        self._base = LeKiwiBase() if options["base"] else None
        folder = Path(options["folder"])
        for i, (name, plant) in enumerate(self._plants.items()):
            calibration = folder / f"{name}_calibration"
            calibration.mkdir(exist_ok=True)
            base = self._base if name == "follower" else None
            if options["calibrated"]:
                motors = plant.calibrate()
                if base is not None:
                    motors = {f"arm_{joint}": values for joint, values in motors.items()} | base.calibration()
                (calibration / f"{ID}.json").write_text(json.dumps(motors, indent=1))
            servos = plant.servos + (base.servos if base is not None else [])
            self._buses[name] = FeetechBus(servos, folder / name, options["seed"] + i)
            self._buses[name].plug()
        self._began_ns, self._success_s, self._stage, self._judged_ns = time.monotonic_ns(), -1.0, 0, 0
        ports: dict[str, int] = {}
        self._picture_ns, self._period_ns = time.monotonic_ns(), round(1e9 / options["fps"])
        if options["image_size"]:
            context = mp.get_context("spawn")
            ours, theirs = context.Pipe()
            self._cameras = Link(ours)
            self._camera_process = context.Process(
                target=serve_cameras, args=(theirs, task, options["image_size"]), name="so101-cameras"
            )
            self._camera_process.start()
            theirs.close()
            while not ports:
                for message in self._cameras.receive(ANSWER_S):
                    ports = message["ports"]
        link.send("ready", cameras=ports)

    def serve(self) -> None:
        """Until the other side hangs up."""
        while True:
            now = time.monotonic_ns()
            for plant in self._plants.values():
                plant.advance(now)
            if self._base is not None:
                self._base.advance(now)
            for bus in self._buses.values():
                bus.receive()
            while any(bus.due_ns is not None for bus in self._buses.values()):  # a millisecond or two
                self._sleep()
                for bus in self._buses.values():
                    bus.send()
            self._judge(now)
            self._show(now)
            for message in self._link.receive():
                self._obey(message)
            self._sleep()

    def close(self) -> None:
        for bus in self._buses.values():
            bus.unplug()
        if self._cameras is not None:
            self._cameras.close()
            self._camera_process.join(5.0)

    def _sleep(self) -> None:
        """Until the next answer is due; where none is, until something comes, but not for long."""
        due = [bus.due_ns for bus in self._buses.values() if bus.due_ns is not None]
        if due:
            time.sleep(max(0, min(due) - time.monotonic_ns()) * 1e-9)
            return
        ends: list[int] = [end for bus in self._buses.values() if (end := bus.fileno()) is not None]
        select.select([*ends, self._link.fileno()], [], [], WAKE_S)

    def _judge(self, now: int) -> None:
        if now - self._judged_ns < WAKE_S * 1e9:
            return
        self._judged_ns = now
        passed = self._env.progress()
        while self._stage < len(passed) and (passed[-1] or passed[self._stage]):
            self._stage += 1
        if passed[-1] and self._success_s < 0:
            self._success_s = (now - self._began_ns) * 1e-9

    def _show(self, now: int) -> None:
        if self._cameras is None or now < self._picture_ns:
            return
        self._picture_ns = max(self._picture_ns + self._period_ns, now)
        self._cameras.post("state", state=self._env.get_state().tobytes(), t_ns=now)

    def _obey(self, message: Message) -> None:
        answer: Message = {}
        try:
            if message["kind"] == "reset":
                answer = {"instruction": self._reset(message["seed"], message["variant"])}
            elif message["kind"] == "status":
                answer = {"success": self._success_s >= 0, "success_s": self._success_s, "stage": self._stage}
                answer |= {"angles": {name: plant.angles.tolist() for name, plant in self._plants.items()}}
                answer |= {"limp_s": {name: plant.limp_s for name, plant in self._plants.items()}}
                answer |= {"skipped_s": self._plants["follower"].skipped_s}
                if self._base is not None:
                    answer |= {"path_m": self._base.path_m, "velocity": self._base.velocity.tolist()}
                answer |= {"bus": {name: dict(bus.counters) for name, bus in self._buses.items()}}
            elif message["kind"] == "advice":
                answer = {"command": self._plants["follower"].told(self._command()).tolist()}
            elif message["kind"] == "written":
                answer = {"written": list(self._buses[message["arm"]].written)}
            elif message["kind"] == "hand":
                self._take(**{k: v for k, v in message.items() if k != "kind"})
            elif message["kind"] == "inject":
                self._break(message["fault"], message["value"], message["arm"])
            elif message["kind"] == "mend":
                self._mend()
        except (KeyError, ValueError, IndexError, TypeError, UserError) as e:
            self._link.send("failed", error=f"{message['kind']}: {type(e).__name__}: {e}")
            return
        self._link.send("done", **answer)

    def _reset(self, seed: int, variant: dict[str, str]) -> str:
        _, info = self._env.reset(seed=seed, options={"variant": variant} if variant else {})
        self._plants["follower"].carried()
        if self._cameras is not None:  # or whoever starts now sees what was there before
            self._cameras.send("state", state=self._env.get_state().tobytes(), t_ns=time.monotonic_ns(), confirm=True)
            while not any(message["kind"] == "shown" for message in self._cameras.receive(ANSWER_S)):
                pass
        self._began_ns, self._success_s, self._stage = time.monotonic_ns(), -1.0, 0
        return str(info["task"])

    def _take(self, arm: str, motion: str, angles: list[float]) -> None:
        from robot_drivers.so101_plant import leading, resting, sweeping

        plant = self._plants[arm]
        if motion == "pose":
            plant.take(resting(np.array(angles, np.float64)))
        elif motion == "middle":
            plant.take(resting(plant.middle))
        elif motion == "sweep":
            plant.take(sweeping(plant))
        elif motion == "expert":
            plant.take(leading(self._command, plant))
        elif motion == "go":
            plant.take(None)
        else:
            raise ValueError(f"there is no motion '{motion}'")

    def _command(self) -> Any:
        """What the expert commands in the follower's scene, judged from what the follower was told last."""
        self._env.set_command(self._plants["follower"].goals())
        return self._expert.act()

    def _break(self, fault: str, value: Any, arm: str) -> None:
        bus, plant = self._buses[arm], self._plants[arm]
        if fault in ("loss", "corruption"):
            setattr(bus.line, fault, float(value))
        elif fault == "latency":
            bus.line.latency_s = float(value)
        elif fault == "unplug":
            bus.unplug()
        elif fault == "power":
            bus.powered = False
            for servo in bus.servos:
                servo.power_cycle()
        elif fault == "freeze":
            plant.freeze(int(value))
        elif fault == "overload":
            plant.push(int(value))
        elif fault == "tooth":
            plant.remount(int(value))
        elif fault == "heat":
            plant.servos[int(value)].heat_c = 60.0
        elif self._cameras is not None:
            self._cameras.send("unplug", camera=str(value))

    def _mend(self) -> None:
        for bus, plant in zip(self._buses.values(), self._plants.values(), strict=True):
            bus.line = type(bus.line)()
            bus.powered = True
            bus.plug()
            plant.mend()
        if self._cameras is not None:
            self._cameras.send("plug")
