"""``vla teleop``: drive a robot by hand, through its safety envelope, and record demonstrations.

The hand is a client of the robot node, as a console's page is: the control process drives, holds, stops and records.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from robot_drivers.teleop import Teleop, make_teleop
from robot_drivers.teleop_clutch import Clutch
from robot_drivers.teleop_keyboard import whole_lines
from vla_stack.console.recording import Recording
from vla_stack.data.sidecar import EpisodeFacts
from vla_stack.errors import UserError
from vla_stack.intervention import Phase
from vla_stack.registry import TELEOPERATORS
from vla_stack.runtime.episode_log import Episode
from vla_stack.runtime.frames import Frame
from vla_stack.runtime.link import ignored_interrupts
from vla_stack.runtime.node import Operator, RobotNode
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.verbs.arguments import count, positive, whole
from vla_stack.verbs.holding import leave_holding
from vla_stack.verbs.robot_arguments import (
    add_robot_arguments,
    capabilities,
    driver_maker,
    key_values,
    recorded_options,
    robot_safety,
)
from vla_stack.verbs.terminal import wait_for_scene

HELP = "Drive a robot by hand, through its safety envelope, and record demonstrations."
EXAMPLES = (
    "vla teleop --robot sim --task pick --teleop keyboard --root data/mine --episodes 10",
    "vla teleop --robot sim --task pick --teleop gamepad",
    "vla teleop --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm --task 'pick the cube' \\\n"
    "      --teleop.type=so101_leader --teleop.port=/dev/ttyACM1 --teleop.id=hand --root data/mine --seconds 20",
)
LOOK_S = 1 / 30  # longest time between two looks at the hand
START_TIMEOUT_S = 60.0  # of the answer to a start, which comes when the robot has been brought to its own
ACQUIRE_S = 0.5  # between two attempts to have the lease again, which a computer that stalls for a second loses
START_S = 0.05  # between two attempts to start an episode, which the control process begins when it is ready


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
    add("--episodes", type=count, default=1, help="how many (default: %(default)s)")
    add("--seed", type=whole, default=0, help="of the first simulated scene (default: %(default)s)")
    add("--seconds", type=positive, help="longest episode (default: until it is ended by hand or by the task)")
    add("--dry-run", action="store_true", help="print commands, send none")


def main(args: argparse.Namespace) -> int:
    can, interrupted = capabilities(args), False
    options = {**can.unlimited, **recorded_options(args, args.root)}
    with tempfile.TemporaryDirectory(prefix="vla-teleop-") as folder:
        operator = Operator(f"ipc://{folder}/operator")
        make = driver_maker(args, args.dry_run, **options)
        with RobotNode(None, make, safety=(safety := robot_safety(args)), operator=operator) as node:
            kinematics = args.kinematics or safety.kinematics
            teleop = make_teleop(args.teleop, node.robot, kinematics, **key_values(args.teleop_arg, "--teleop-arg"))
            teleop.connect()
            session = TeleopSession(node, operator.endpoint, teleop, args.root)
            print(f"{node.robot.name} at {node.robot.rate_hz:g} Hz. {teleop.HELP}\n{node.guard.value}", flush=True)
            try:
                interrupted = _episodes(args, session)
            finally:
                teleop.disconnect()
                saved = session.close()
    if args.root:
        print(f"{saved} episodes recorded in {args.root}. Next: vla data check {args.root}")
    if not args.dry_run:
        leave_holding(args, interrupted)
    return 0


def _episodes(args: argparse.Namespace, session: TeleopSession) -> bool:
    """Drive them; whether Ctrl-C ended that."""
    running = False
    try:
        for i in range(args.episodes):
            if not capabilities(args).simulated:  # it holds meanwhile: a hand in the scene is no part of the episode
                with whole_lines():
                    wait_for_scene(f"episode {i + 1} of {args.episodes}: set the scene, then press Enter ")
            running = True
            episode = session.drive(args.seed + i, args.seconds)
            running = False
            with ignored_interrupts():  # an episode that is over is saved, whoever loses patience meanwhile
                verdict = session.keep(args.seed + i, episode)
            print(f"[{i + 1}/{args.episodes}] {verdict}, {_line(episode.summary)}", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted" + ("; the episode that was running is not recorded" if running else ""))
        return True
    return False


class TeleopSession:
    """A teleoperator on a robot node, episode after episode, and their recording.

    Args:
        node: With an operator and no policy; entered.
        endpoint: Of the operator's channels.
        teleop: Connected.
        root: Dataset to record into, if any.
    """

    def __init__(self, node: RobotNode, endpoint: str, teleop: Teleop, root: Path | None) -> None:
        self._node, self._client = node, OperatorClient(endpoint, pictures=False)
        self._clutch = Clutch(teleop, node.robot, lambda text: print(text, flush=True))
        self._recording = Recording(root, node.robot, node.joints, self._recorded, undo_s=0.0) if root else None
        self._before = self._recording.status()["episodes"] if self._recording else 0
        self._saved, self._error = 0, ""

    def drive(self, seed: int, seconds: float | None = None) -> Episode:
        """One episode, until the hand, the task or the time ends it; Ctrl-C ends it and is raised again.

        Raises:
            UserError: As :meth:`RobotNode.run_episode` does.
        """
        ended: dict[str, Any] = {}
        max_ticks = None if seconds is None else round(seconds * self._node.robot.rate_hz)
        on_frame = self._frame if self._recording else None

        def run() -> None:
            try:
                ended["episode"] = self._node.run_episode(seed, max_ticks, on_frame=on_frame, mode="teleop")
            except BaseException as e:
                ended["error"] = e

        thread = threading.Thread(target=run, name="episode")
        thread.start()
        try:
            self._start(thread)
            self._steer(thread)
        except UserError:  # the node does not answer: it may know better why
            if "error" not in ended:
                raise
        finally:
            if thread.is_alive():
                self._node.abort()
            thread.join()
        if "error" in ended:
            raise ended["error"]
        episode: Episode = ended["episode"]
        return episode

    def keep(self, seed: int, episode: Episode) -> str:
        """Save what was recorded, or forget it where the hand said so; the verdict in a word."""
        operator = episode.summary["operator"]
        discarded = operator["phase"] == Phase.END_DISCARDED
        success = operator["why"] == "success" or (operator["why"] != "fail" and bool(episode.summary["success"]))
        if self._recording is not None:
            facts = EpisodeFacts(str(operator["phase"]), "teleop", 0, episode.summary["duration_s"], seed=seed)
            self._recording.end(success and not discarded, not discarded, facts)
        return "discarded" if discarded else "success" if success else "no success"

    def close(self) -> int:
        """Finish writing; how many episodes this session has added.

        Raises:
            UserError: Not all of it could be written.
        """
        self._client.close()
        if self._recording is None:
            return 0
        with ignored_interrupts():
            self._recording.close()
        if self._error:
            raise UserError(f"not everything was recorded: {self._error}")
        return self._saved

    def _start(self, thread: threading.Thread) -> None:
        """Take the lease and start the episode as soon as there is one."""
        self._clutch.begin()
        while thread.is_alive() and not self._client.call("acquire", START_TIMEOUT_S).ok:
            time.sleep(START_S)
        while thread.is_alive() and not self._client.call("start", START_TIMEOUT_S).ok:
            self._client.teleop()
            time.sleep(START_S)

    def _steer(self, thread: threading.Thread) -> None:
        client, period = self._client, min(LOOK_S, self._node.robot.dt)
        due, seen, begun = time.monotonic(), client.state.get("tick", -1), False
        asked = due
        while thread.is_alive():
            due = max(due + period, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                client.poll(round(1000 * left) + 1)
            state = client.state
            if "action" not in state or (state["tick"] == seen and not begun):
                continue  # of the episode before
            if not begun and self._node.stages:
                print(state.get("instruction", ""), flush=True)
            begun = True
            if state["lease"] == "" and due - asked > ACQUIRE_S:
                asked = due
                client.event("acquire")
            said = self._clutch.step(state, time.monotonic())
            client.teleop(said.velocity, said.target, engaged=said.engaged)
            for event in said.events:
                if event == "estop":
                    client.estop()
                else:
                    client.event(event)
            for reply in list(client.replies):
                if not client.replies[reply].ok:
                    print(client.replies[reply].error, flush=True)
                del client.replies[reply]

    def _frame(self, frame: Frame) -> None:
        assert self._recording is not None
        self._recording.frame(frame.obs, frame.action, frame.joint_command, frame.labels)

    def _recorded(self, status: dict[str, Any]) -> None:
        """On the recording's thread."""
        self._saved, self._error = status["episodes"] - getattr(self, "_before", 0), status["error"]


def _line(summary: dict[str, Any]) -> str:
    """How it went, for people."""
    ticks, late = summary["ticks"], summary["lateness_ms"]
    return (
        f"{summary['steps']} steps, stood still for {ticks.get('hold', 0) + ticks.get('stop', 0)}, late by "
        f"{late['p50']:.1f} ms (99 %: {late['p99']:.1f} ms)"
    )
