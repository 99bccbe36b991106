"""A MuJoCo task that behaves like hardware: time passes whether or not anybody commands it.

The physics runs in its own process on the monotonic clock. Control step k lasts from t_k = t_0 + k h to t_{k+1}. The
reading of step k carries the time t_k and is published then. A command that answers it takes effect at once if it comes
within the first ``LATCH`` of the step; otherwise the last command goes on, and the late one takes effect with the next
step. Without a command for three steps the arm holds its measured position. If a step takes longer than h to compute,
whole steps of real time are skipped and the real-time factor falls below one: such an episode measures the computer.
"""

from __future__ import annotations

import inspect
import multiprocessing as mp
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError, check_options
from vla_stack.registry import TASKS
from vla_stack.runtime.driver import Capabilities, Guard, Status
from vla_stack.runtime.link import Link, Message, ObservationSlots, ignored_interrupts
from vla_stack.schema import Observation, RobotSpec

LATCH = 0.6  # of a step; the rest is for computing it
WATCHDOG_STEPS = 3
START_TIMEOUT_S = 60.0
RESET_TIMEOUT_S = 30.0
FIRST_READING_S = 10.0
NEVER = 10**9  # control steps after which a task that a person drives gives up: who drives has their own limit


def _like(robot: RobotSpec) -> dict[str, Any]:
    from vla_stack.envs.making import sim_options  # gymnasium, which a driver of another robot does not need

    return sim_options(robot)


class SimulatedRobot:
    """An :class:`~vla_stack.runtime.driver.EpisodicDriver` for the tasks of ``sim``.

    Args:
        task: Name in ``sim.TASKS``, e.g. ``pick``, or ``module:Class``.
        cameras: Names of cameras; one name, or several with commas between them, will do as well.
        **env_kwargs: For ``gymnasium.make``, e.g. ``image_size=64``, ``randomisation=1``, ``max_episode_steps=200``.
    """

    capabilities = Capabilities(
        guard=Guard.DEVICE,
        simulated=True,
        task="pick",
        like=_like,
        unlimited={"max_episode_steps": NEVER},
        by_hand={"control_hz": 20.0, "image_size": 128},
    )

    def __init__(self, task: str = "pick", cameras: str | Sequence[str] | None = None, **env_kwargs: Any) -> None:
        self._task, self._env_kwargs = task, env_kwargs
        if cameras is not None:
            names = cameras.split(",") if isinstance(cameras, str) else cameras
            self._env_kwargs = {**env_kwargs, "cameras": tuple(str(name).strip() for name in names)}
        self._process: mp.process.BaseProcess | None = None
        self._link: Link | None = None
        self._slots: ObservationSlots | None = None
        self._spec: RobotSpec | None = None
        self._stages: tuple[str, ...] = ()
        self._joints: tuple[str, ...] = ()
        self._episode = 0
        self._note: Message | None = None  # newest reading
        self._step_read = -1

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("the simulated robot has no description before connect()")
        return self._spec

    @property
    def stages(self) -> tuple[str, ...]:
        return self._stages

    @property
    def joints(self) -> tuple[str, ...]:
        return self._joints

    @property
    def joint_command(self) -> NDArray[np.float32] | None:
        joints = (self._note or {}).get("joint_command")
        return None if joints is None else np.frombuffer(joints, np.float32)

    def connect(self) -> None:
        if self._process is not None:
            return
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_simulate, args=(theirs, self._task, self._env_kwargs), daemon=True, name="simulated-robot"
        )
        with ignored_interrupts(), _main_left_out():
            self._process.start()
        theirs.close()
        self._link = Link(ours)
        ready = self._wait("ready", START_TIMEOUT_S)
        self._spec, self._stages = RobotSpec.from_json(ready["spec"]), tuple(ready["stages"])
        self._joints = tuple(ready["joints"])
        self._slots = ObservationSlots(self._spec)
        self._link.send("slots", name=self._slots.name)

    def reset(self, seed: int) -> str:
        self._episode += 1
        self._keep(None)
        self._step_read = -1
        self._connection.send("reset", seed=seed, episode=self._episode)
        return str(self._wait("started", RESET_TIMEOUT_S)["task"])

    def read(self) -> Observation:
        """The newest reading; waits up to half a step for one that has not been read yet, longer for the first.

        Raises:
            UserError: The simulator's process is gone, or there was no :meth:`reset` yet.
        """
        assert self._slots is not None
        # The first reading of an episode is on its way, and later than that on a busy computer.
        first = self._note is None and self._episode > 0
        wait_until = time.monotonic() + (FIRST_READING_S if first else 0.5 * self.spec.dt)
        self._take(0.0)
        while (self._note is None or self._note["step"] <= self._step_read) and time.monotonic() < wait_until:
            self._take(wait_until - time.monotonic())
        if self._note is None:
            raise UserError("the simulated robot has no reading", "call reset(seed) first")
        self._step_read = self._note["step"]
        return self._slots.get(self._note)

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        sent = np.clip(np.asarray(action, np.float32), self.spec.action_low, self.spec.action_high)
        self._connection.post("command", step=self._step_read, action=sent.tobytes())
        return sent

    def hold(self) -> None:
        self._connection.post("hold")

    def stop(self) -> None:
        self._connection.post("hold")  # an arm with brakes would engage them; standing still is what this one has

    def status(self) -> Status:
        return Status(**(self._note or {}).get("status", {"is_success": False, "done": False}))

    def disconnect(self) -> None:
        if self._process is None or self._link is None:
            return
        self._link.close()  # the simulator ends when it reads the end of the pipe
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._slots is not None:
            self._note = None
            self._slots.close()
        self._process = self._link = self._slots = None

    @property
    def _connection(self) -> Link:
        if self._link is None:
            raise RuntimeError("the simulated robot is not connected")
        return self._link

    def _take(self, timeout_s: float) -> list[Message]:
        """Take what has arrived: keep the newest reading, give all older slots back, return other messages."""
        others = []
        for message in self._receive(timeout_s):
            if message["kind"] != "reading":
                others.append(message)
            elif message["episode"] != self._episode:
                self._connection.post("free", slot=message["slot"])
            else:
                self._keep(message)
        return others

    def _keep(self, note: Message | None) -> None:
        """Make ``note`` the newest reading and give the slot of the one before back."""
        if self._note is not None:
            self._connection.post("free", slot=self._note["slot"])
        self._note = note

    def _wait(self, kind: str, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for message in self._take(left):
                if message["kind"] == "failed":
                    raise UserError(f"the simulated robot: {message['error']}")
                if message["kind"] == kind:
                    return message
        raise UserError(f"the simulated robot did not answer '{kind}' within {timeout_s:g} s")

    def _receive(self, timeout_s: float) -> list[Message]:
        try:
            return self._connection.receive(timeout_s)
        except EOFError:
            code = self._process.exitcode if self._process else None
            raise UserError(f"the simulator's process ended (exit code {code})") from None


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Processes that start in here do not import the program that starts them: some take half a minute to import."""
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


def _simulate(connection: Connection, task: str, env_kwargs: dict[str, Any]) -> None:
    """Main function of the simulator's process."""
    link = Link(connection)
    try:
        env = _make(task, env_kwargs)
    except ModuleNotFoundError as e:
        link.send("failed", error=f"needs the package '{e.name}' -- pip install \"vla-stack[robot]\"")
        return
    except Exception as e:
        link.send("failed", error=str(e))
        return
    try:
        _Simulator(link, env).serve()
    except EOFError:
        pass  # whoever started this process is gone, and so is the need for it
    except Exception as e:
        link.send("failed", error=f"{type(e).__name__}: {e}")
        raise
    finally:
        env.close()


def _make(task: str, env_kwargs: dict[str, Any]) -> Any:
    import gymnasium as gym

    import sim

    env_id = sim.TASKS[task].id
    known = [*inspect.signature(TASKS.get(task)).parameters, "max_episode_steps", "disable_env_checker"]
    check_options(f"task '{task}'", env_kwargs, known)
    try:
        return gym.make(env_id, **env_kwargs)
    except (TypeError, ValueError) as e:  # of a value that is none of its option's
        given = ", ".join(f"{name}={value!r}" for name, value in env_kwargs.items())
        raise UserError(f"task '{task}' cannot be made with {given}: {e}", f"its options are {', '.join(known)}") from e


class _Simulator:
    """The physics, its clock and what it was last told."""

    def __init__(self, link: Link, env: Any) -> None:
        self._link, self._env = link, env
        spec: RobotSpec = env.unwrapped.spec_robot
        self._spec, self._dt_ns = spec, round(1e9 / spec.rate_hz)
        self._slots: ObservationSlots | None = None
        self._unread: list[Message] = []
        joints = [f"joint_{i + 1}.pos" for i in range(len(env.unwrapped.arm.joints))]  # as `vla collect` names them
        link.send("ready", spec=spec.to_json(), stages=list(env.unwrapped.stages), joints=joints)
        self._slots = ObservationSlots(spec, self._next("slots")["name"])

    def serve(self) -> None:
        """Run episodes until the other side hangs up."""
        request = self._next("reset")
        while True:
            request = self._episode(request["seed"], request["episode"])

    def _episode(self, seed: int, episode: int) -> Message:
        """Run one episode, and stand still after its end, until the next reset; returns that."""
        from sim.scene import Scene  # in the simulator's process alone

        obs, info = self._env.reset(seed=seed)
        scene = Scene(self._env.unwrapped)
        self._link.send("started", task=info["task"])
        still = target = self._spec.standstill(obs["agent_pos"])
        t_k = time.monotonic_ns()
        step = quiet = skipped = 0
        done = False
        while True:
            status = {"is_success": info["is_success"], "stage": info["stage"], "done": done}
            status["real_time_factor"] = (step + 1) / (step + 1 + skipped)
            status |= {"objects": scene.objects(), "hazards": scene.hazards()}
            about = {"episode": episode, "status": status, "joint_command": self._env.unwrapped.joint_command.tobytes()}
            self._publish(obs, info["task"], step, t_k, about)
            commands = self._commands(step, t_k + int(LATCH * self._dt_ns))
            quiet = 0 if commands else quiet + 1
            for command in commands:
                if command["kind"] == "reset":
                    return command
                target = still if command["kind"] == "hold" else np.frombuffer(command["action"], np.float32)
            if quiet == WATCHDOG_STEPS:
                target = still
            if not done:
                obs, _, terminated, truncated, info = self._env.step(target)
                still, done = self._spec.standstill(obs["agent_pos"]), terminated or truncated
            late = max(0, time.monotonic_ns() - t_k - self._dt_ns) // self._dt_ns
            skipped += late
            step, t_k = step + 1, t_k + (1 + late) * self._dt_ns
            time.sleep(max(0, t_k - time.monotonic_ns()) * 1e-9)

    def _publish(self, obs: dict[str, Any], task: str, step: int, t_ns: int, about: Message) -> None:
        assert self._slots is not None
        reading = Observation(obs["agent_pos"], obs.get("pixels", {}), task, step, t_ns)
        if (note := self._slots.put(reading)) is not None and not self._link.post("reading", **note, **about):
            self._slots.free(note["slot"])

    def _commands(self, step: int, until_ns: int) -> list[Message]:
        """What arrives by ``until_ns``, or earlier if it answers the reading of ``step``."""
        commands: list[Message] = []
        while not any(c["kind"] != "command" or c["step"] >= step for c in commands):
            left = (until_ns - time.monotonic_ns()) * 1e-9
            if left <= 0:
                break
            commands += self._receive(left)
        return commands

    def _next(self, kind: str) -> Message:
        while True:
            messages = self._receive(timeout_s=3600.0)
            for i, message in enumerate(messages):
                if message["kind"] == kind:
                    self._unread = messages[i + 1 :]
                    return message

    def _receive(self, timeout_s: float) -> list[Message]:
        messages, self._unread = self._unread or self._link.receive(timeout_s), []
        for message in messages:
            if message["kind"] == "free" and self._slots is not None:
                self._slots.free(message["slot"])
        return [m for m in messages if m["kind"] != "free"]
