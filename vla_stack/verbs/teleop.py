"""``vla teleop``: drive a robot by hand, through its safety envelope, and record demonstrations."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robot_drivers.teleop import Intent, Teleop, make_teleop, next_command
from robot_drivers.teleop_keyboard import whole_lines
from robot_drivers.teleop_replay import Replay
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.registry import TELEOPERATORS
from vla_stack.runtime.clock import Clock, RealClock
from vla_stack.runtime.driver import Driver, EpisodicDriver, SelfChecking
from vla_stack.runtime.executor import State
from vla_stack.runtime.limits import check_limits, make_envelope
from vla_stack.runtime.link import ignored_interrupts
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import Observation, RobotSpec
from vla_stack.verbs.robot_arguments import (
    add_robot_arguments,
    driver_maker,
    key_values,
    robot_limits,
    robot_safety,
)
from vla_stack.verbs.run import wait_for_scene

HELP = "Drive a robot by hand, through its safety envelope, and record demonstrations."
EXAMPLES = (
    "vla teleop --robot sim --task pick --teleop keyboard --root data/mine --episodes 10",
    "vla teleop --robot sim --task pick --teleop gamepad",
    "vla teleop --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm --task 'pick the cube' \\\n"
    "      --teleop.type=so101_leader --teleop.port=/dev/ttyACM1 --teleop.id=hand --root data/mine --seconds 20",
)
REARM_S = 1.0  # between a STOP and the Enter that re-arms: one that was on its way meant something else
NEAR = {"rad": 0.2, "m": 0.1}  # by unit: so near the robot a leader must come before the robot follows it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_robot_arguments(parser)
    add = parser.add_argument
    add(
        "--teleop",
        default="keyboard",
        help=f"{', '.join(TELEOPERATORS.built_in())} or module:Class (default: %(default)s)",
    )
    add("--teleop-arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the teleoperator")
    add("--kinematics", default="", help="model for moving the tool of a robot in joint space, e.g. so101")
    add("--root", type=Path, help="record into this LeRobotDataset (created, or appended to)")
    add("--episodes", type=int, default=1, help="how many (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the first simulated scene (default: %(default)s)")
    add("--seconds", type=float, help="longest episode (default: until it is ended by hand or by the task)")
    add("--dry-run", action="store_true", help="print commands, send none")


def main(args: argparse.Namespace) -> int:
    driver: Driver = driver_maker(args, args.dry_run)()
    driver.connect()
    try:
        if limits := robot_limits(args):
            check_limits(limits, driver.spec)
        safety = robot_safety(args)
        kinematics = args.kinematics or safety.kinematics
        teleop = make_teleop(args.teleop, driver.spec, kinematics, **key_values(args.teleop_arg, "--teleop-arg"))
        teleop.connect()
        try:
            return _episodes(args, driver, teleop, make_envelope(driver.spec, safety))
        finally:
            teleop.disconnect()
    finally:
        driver.disconnect()


def _episodes(args: argparse.Namespace, driver: Driver, teleop: Teleop, envelope: SafetyEnvelope) -> int:
    recorder = EpisodeRecorder(args.root, driver.spec) if args.root else None
    print(f"{driver.spec.name} at {driver.spec.rate_hz:g} Hz. {teleop.HELP}", flush=True)
    max_ticks = None if args.seconds is None else round(args.seconds * driver.spec.rate_hz)
    saved, running = 0, False
    try:
        for i in range(args.episodes):
            if args.robot != "sim":  # the robot holds meanwhile: a hand in the scene is no part of a demonstration
                with whole_lines():
                    wait_for_scene(f"episode {i + 1} of {args.episodes}: set the scene, then press Enter ")
            running = True
            end = Episode(driver, teleop, envelope, RealClock(), recorder).run(args.seed + i, max_ticks)
            running = False
            with ignored_interrupts():  # an episode that is over is saved, whoever loses patience meanwhile
                saved += _keep(end, recorder)
            verdict = "discarded" if end.event == "discard" else "success" if end.success else "no success"
            print(f"[{i + 1}/{args.episodes}] {verdict}, {end.ticks} steps, {end.line()}", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted" + ("; the episode that was running is not recorded" if running else ""))
    finally:
        if recorder is not None:
            recorder.close()
    if args.root:
        print(f"{saved} episodes recorded in {args.root}. Next: vla data check {args.root}")
    return 0


def _keep(end: Episode, recorder: EpisodeRecorder | None) -> bool:
    """Save what was recorded, or forget it where the hand said so; whether it was saved."""
    if recorder is None:
        return False
    if not end.recorded or end.event == "discard":
        recorder.discard_episode()
        return False
    recorder.save_episode(success=end.success)
    return True


class Episode:
    """One episode by hand: the control loop of a teleoperator. At most one step late; never a burst of steps.

    A hand that says where to be (a leader arm) is followed once it has been near the robot, and after a STOP once Enter
    has been pressed too: such a hand is always somewhere, whether anybody means it or not. One that says how fast to
    move re-arms a stopped robot by letting go. A recorded episode is followed from wherever the robot stands, and not
    beyond a STOP.

    Attributes:
        event: How it was ended by hand; empty where the task or the time ended it.
        success: As the hand said, or as the task did.
        ticks: Control steps.
        recorded: Frames given to the recorder.
    """

    def __init__(
        self,
        driver: Driver,
        teleop: Teleop,
        envelope: SafetyEnvelope,
        clock: Clock,
        recorder: EpisodeRecorder | None = None,
    ) -> None:
        self._driver, self._teleop, self._envelope, self._clock = driver, teleop, envelope, clock
        self._recorder = recorder
        self._dims, self._replays = len(driver.spec.action), isinstance(teleop, Replay)
        self._met = False  # the leader has been near the robot since it was last disengaged or the robot stopped
        self.event, self.success, self.ticks, self.recorded = "", False, 0, 0
        self.states: Counter[str] = Counter()
        self.late_ns: list[int] = []

    def run(self, seed: int, max_ticks: int | None = None) -> Episode:
        episodic = self._driver if isinstance(self._driver, EpisodicDriver) else None
        if episodic is not None:
            print(f"seed {seed}: {episodic.reset(seed)}", flush=True)
        checking = self._driver if isinstance(self._driver, SelfChecking) else None
        dt_ns = round(1e9 / self._driver.spec.rate_hz)
        obs = self._driver.read()
        last = np.asarray(obs.state[: self._dims], np.float64)
        self._envelope.reset(last)
        self._met = False
        t_k, state, stopped_ns = obs.t_capture_ns, State.HOLD, 0
        while max_ticks is None or self.ticks < max_ticks:
            self._clock.sleep_until_ns(t_k)
            self.late_ns.append(self._clock.now_ns() - t_k)
            if self.ticks:
                obs = self._driver.read()
            intent = self._teleop.read(last)
            leads, now = intent.target is not None, self._clock.now_ns()
            rearm = not intent.engaged
            if leads and state is State.STOP:
                rearm = intent.event == "success" and now - stopped_ns > REARM_S * 1e9
                intent = intent._replace(event="" if intent.event == "success" else intent.event)
            if intent.event or (episodic is not None and episodic.status()["done"]):
                self.event = intent.event
                break
            fault = checking.fault if checking else None
            stopped = state is State.STOP
            if stopped and fault is None and rearm:
                self._envelope.reset(obs.state[: self._dims])
                stopped = False
            if fault and fault.stop:
                self._envelope.stop(fault.kind)
            if leads:
                intent = intent._replace(engaged=intent.engaged and not stopped)
                intent = intent._replace(engaged=self._follows(intent, obs))
            command = next_command(last, intent, self._driver.spec)
            age_s = (now - obs.t_capture_ns) * 1e-9
            verdict = self._envelope.filter(command, age_s, fault.kind if fault else "")
            if verdict.state is not state and verdict.state is State.STOP:
                stopped_ns = now
                why = fault.why if fault else ", ".join(verdict.changes)
                print(
                    f"STOP at step {self.ticks}: {why}{'; Enter goes on' if leads and not self._replays else ''}",
                    flush=True,
                )
                self._driver.stop()
            state = verdict.state
            if verdict.command is not None:
                last = self._driver.write(verdict.command).astype(np.float64)
                if self._recorder is not None and (self.recorded or state is State.RUN):  # from the first motion on
                    self._recorder.add_frame(obs, last.astype(np.float32))
                    self.recorded += 1
            else:
                last = np.asarray(obs.state[: self._dims], np.float64)
            self.states[state.value] += 1
            self.ticks += 1
            t_k = max(t_k + dt_ns, self._clock.now_ns() - dt_ns)
        self._driver.hold()
        done = bool(episodic is not None and episodic.status()["is_success"])
        self.success = self.event == "success" or done
        return self

    def _follows(self, intent: Intent, obs: Observation) -> bool:
        """Whether an engaged leader is followed; about once a second the operator is told why it is not."""
        if not intent.engaged or self._met or self._replays or intent.target is None:
            self._met = intent.engaged
            return self._met
        spec = self._driver.spec
        why = _apart(intent.target, obs.state[: self._dims], spec)
        self._met = not why
        if why and self.ticks % max(1, round(spec.rate_hz)) == 0:
            print(f"waiting for the leader: {why}", flush=True)
        return self._met

    def line(self) -> str:
        """How it went, for people."""
        late = np.array(self.late_ns or [0]) * 1e-6
        held = self.states["hold"] + self.states["stop"]
        return f"stood still for {held}, late by {np.median(late):.1f} ms (99 %: {np.quantile(late, 0.99):.1f} ms)"


def _apart(target: NDArray[np.float64], at: NDArray[np.float32], robot: RobotSpec) -> str:
    """In which dimension a target [A] is too far from the robot to be followed; '' where it is near.

    Grippers and dimensions in other units than those of :data:`NEAR` do not count, nor do relative commands.
    """
    if robot.action_kind != "absolute":
        return ""
    endless = [d.kind == "angle" and d.low == -np.inf and d.high == np.inf for d in robot.action]
    away = np.abs(target - at)
    away = np.where(endless, np.abs((away + np.pi) % (2 * np.pi) - np.pi), away)
    near = np.array([np.inf if d.kind == "gripper" else NEAR.get(d.unit, np.inf) for d in robot.action])
    i = int(np.argmax(away / near))
    dim = robot.action[i]
    return "" if away[i] <= near[i] else f"{dim.name} is {away[i]:.2f} {dim.unit} from the robot's, {near[i]:g} at most"
