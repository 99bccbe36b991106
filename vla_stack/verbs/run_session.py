"""Who watches the episodes of one ``vla run``: film, log, recording, monitor, and the person at the terminal."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_stack.data.layout import INFO, read_info
from vla_stack.errors import UserError
from vla_stack.runtime.dispatch import NO_ACTION, State
from vla_stack.runtime.episode_log import Episode
from vla_stack.runtime.film import Film
from vla_stack.runtime.frames import Frame
from vla_stack.runtime.link import ignored_interrupts
from vla_stack.runtime.monitor import Watch
from vla_stack.runtime.node import RobotNode
from vla_stack.runtime.starvation import Starvation
from vla_stack.schema import ActionChunk, Observation, RobotSpec
from vla_stack.verbs.robot_arguments import capabilities
from vla_stack.verbs.terminal import Keys, ask_success, at_terminal

if TYPE_CHECKING:  # they need further packages
    from vla_stack.console.run_recording import RunRecording
    from vla_stack.runtime.run_log import RunLog


class Session:
    """Who watches the episodes of one command: film, log and recording, and the person at the terminal.

    Args:
        args: Of the command.
        keys: The person's.
        asks: Whether a stopped robot waits for the person.
    """

    log: RunLog | None = None
    recording: RunRecording | None = None
    watch: Watch | None = None

    def __init__(self, args: argparse.Namespace, keys: Keys, asks: bool) -> None:
        self._args, self._keys, self._asks = args, keys, asks
        self._alarms = 0  # of the running episode, as is
        self._said: bool | None = None  # of the running episode's success, by the person
        self._starvation = Starvation(args.mode)

    def drive(self, node: RobotNode, i: int) -> dict[str, Any]:
        """Drive episode ``i``; returns its record."""
        args, log, recording = self._args, self.log, self.recording
        film = Film() if i < args.record_video else None
        max_ticks = None if args.seconds is None else round(args.seconds * node.robot.rate_hz)
        watchers: list[Callable[[Observation], object]] = []
        if film is not None:
            watchers.append(film.add)
        if log is not None:
            watchers.append(log.observation)
        if recording is not None:
            recording.begin(args.seed + i)
            watchers.append(lambda _: self._look(node))
        takers = [log.chunk] if log else []
        if self.watch is not None:
            self.watch.begin()
            self._alarms = 0
            watchers.append(self.watch.observation)
            takers.append(lambda chunk: self._judge(node, chunk))

        def on_observation(obs: Observation) -> None:
            for watch in watchers:
                watch(obs)

        writers = ([log.frame] if log else []) + ([recording.frame] if recording else [])

        def on_frame(frame: Frame) -> None:
            for write in writers:
                write(frame)

        def on_chunk(chunk: ActionChunk) -> None:
            for take in takers:
                take(chunk)

        if log is not None:
            log.begin_episode(f"episode {i}, seed {args.seed + i}")
        self._said = None
        self._starvation.begin(node.counters)
        with self._keys.one_by_one() if recording else contextlib.nullcontext():
            episode: Episode = node.run_episode(
                args.seed + i,
                max_ticks,
                on_observation if watchers else None,
                on_frame if writers else None,
                on_chunk=on_chunk if takers else None,
            )
        self._starvation.note(State.STOP.value)
        record = dict(episode.summary)
        if self.watch is not None:
            record["alarms"] = self._alarms
        name = f"{i:03d}.mp4"
        if film is not None and film.write(args.out / name, node.robot.rate_hz):
            record["video"] = name
        record["success"] = self._judged(record["success"])
        if recording is not None:
            with ignored_interrupts():  # an episode that is over is saved, whoever loses patience meanwhile
                record["recorded"] = recording.end(bool(record["success"]))
        if log is not None:
            version = node.model_version[:12]  # the server may change policies as one begins
            log.event(f"episode {i} ended: {outcome(record['success'])}, policy {version}")
        return record

    def tell(self, tick: int, state: str, why: str) -> None:
        """Let the person know of a stop, the log of every change of state, and the recording of what is odd."""
        # Who holds for another reason, as for a person who was called, lacks no action.
        self._starvation.note(State.STOP.value if state == "hold" and why != NO_ACTION else state)
        if state == "stop":
            print(f"STOP at step {tick}: {why}", flush=True)
            if self._asks:
                self._keys.forget()  # Enter re-arms the robot, if it was pressed in the knowledge of this stop
        if self.log is not None:
            self.log.event(f"step {tick}: {state}" + f", {why}" * bool(why), warn=state == "stop")
        # sync holds at every chunk, and any mode before its first
        if self.recording is not None and (state == "stop" or (state == "hold" and self._args.mode != "sync")):
            self.recording.event(f"{state}: {why}")

    def beat(self, counters: Counter[str]) -> None:
        """Let the person know, and the log, where the policy does not keep up; from time to time while that lasts."""
        if (line := self._starvation.look(counters)) is None:
            return
        print(line, flush=True)
        if self.log is not None:
            self.log.event(line, warn=True)

    def close(self) -> None:
        """Finish what is written, and say where it is."""
        if self.recording is not None:
            with ignored_interrupts():
                self.recording.close()
            print(_recorded_line(self.recording))
        if self.log is not None:
            self.log.close()
            print(_log_line(self.log))

    def _look(self, node: RobotNode) -> None:
        """Take the keys of a recording."""
        assert self.recording is not None
        for key in self._keys.take():
            if key == "k":
                self.recording.keep()
            elif key in ("y", "n"):
                self._said = key == "y"
                node.abort()

    def _judge(self, node: RobotNode, chunk: ActionChunk) -> None:
        """Ask the monitor about a chunk; the robot holds where it calls for help."""
        assert self.watch is not None
        if not (why := self.watch.chunk(chunk)):
            return
        self._alarms += 1
        print(f"step {chunk.k_obs}: {why}" + "; Enter lets the policy go on" * self._asks, flush=True)
        if self._asks:
            self._keys.forget()
        node.call_for_help(why)
        if self.log is not None:
            self.log.event(f"step {chunk.k_obs}: {why}", warn=True)
        if self.recording is not None:
            self.recording.event(why)

    def _judged(self, known: bool) -> bool | None:
        """Success of an episode: the person's word, the simulation's, or what the person answers now; None: unknown."""
        if self._said is not None:
            return self._said
        if self._args.dry_run:  # nothing has moved that could have succeeded
            return None
        if capabilities(self._args).simulated:
            return known
        return ask_success() if self.recording is not None or at_terminal() else None


def outcome(success: bool | None) -> str:
    """In a word."""
    return {True: "success", False: "failure", None: "not judged"}[success]


def recording_opener(args: argparse.Namespace) -> Callable[[RobotNode], RunRecording] | None:
    """What opens the recording once the robot is known; its packages are imported before anything is started."""
    if (args.record is None) != (args.root is None):
        raise UserError("--record and --root need each other", "for example --record episodic --root data/runs")
    if args.record is None:
        return None
    from vla_stack.console.run_recording import RunRecording

    return lambda node: RunRecording(args.root, node.robot, node.joints, args.record, args.last)


def first_seed(args: argparse.Namespace) -> int:
    """What was given; otherwise a recording that goes on takes up after its last episode.

    The same seeds again would be the same scenes in simulation, and the same noise of the policy anywhere.
    """
    if args.seed is not None:
        return int(args.seed)
    if not args.root or not (args.root / INFO).exists():
        return 0
    from vla_stack.data.sidecar import read_facts  # pyarrow, which only a recording needs

    used = (row["seed"] + 1 for row in read_facts(args.root).values())  # more than are kept, where clips alone are
    return max(int(read_info(args.root)["total_episodes"]), *used, 0)


def _recorded_line(recording: RunRecording) -> str:
    counts, what = recording.counts, "episodes" if recording.keeping == "episodic" else "clips"
    lost = f", {counts['lost_frames']} frames lost" * bool(counts["lost_frames"])
    return f"{counts['episodes']} {what} recorded in {recording.root}, {counts['frames']} frames{lost}"


def log_opener(path: Path | None) -> Callable[[RobotSpec], RunLog] | None:
    """What opens the log once the robot is known; checked, and its packages imported, before anything is started."""
    if path is None:
        return None
    from vla_stack.runtime import run_log

    run_log.check_new(path)
    return lambda robot: run_log.RunLog(path, robot)


def _log_line(log: RunLog) -> str:
    lost = f", {log.lost} lost" * bool(log.lost) + f"; it ends early: {log.error}" * bool(log.error)
    return f"log: {log.path}, {log.written} messages{lost}"
