"""The robot's process of a console: a robot node with an operator, episode after episode, and the recording of them.

Apart from the gateway's, so that writing an episode never holds up a page, and a busy page never holds up the robot.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from robot_drivers import Driver
from vla_stack.console.recording import Recording
from vla_stack.data.dataset import open_dataset
from vla_stack.data.labels import SEGMENT_TYPE
from vla_stack.data.layout import INFO, read_info
from vla_stack.data.sidecar import EpisodeFacts
from vla_stack.errors import UserError
from vla_stack.intervention import Mode, Phase, Segment
from vla_stack.runtime.episode_log import Episode
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.familiar import Familiar
from vla_stack.runtime.frames import Frame
from vla_stack.runtime.link import Link
from vla_stack.runtime.monitor import Monitor, Watch
from vla_stack.runtime.node import Operator, RobotNode
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import ACTION, OBS_STATE, ActionChunk


@dataclass(frozen=True)
class RobotConfig:
    """What a console drives and where it records.

    Attributes:
        make_driver: Builds the driver, in the control process; picklable.
        safety: Limits beyond the robot's own.
        mode: ``teleop``, ``rac`` or ``hg_dagger``.
        server: Endpoint of the policy server; None in mode ``teleop``.
        endpoint: Of the operator channels.
        root: Dataset to record into.
        demos: Dataset of the demonstrations that familiar states are taken from.
        executor: How the policy's chunks become motion.
        seed: Of the first episode; the next one takes the next.
        seconds: Longest time that the policy, or a demonstration, may take.
        iteration: Of the loop, for the sidecar.
        quota: Human frames that this iteration is to have; 0 where none is set.
        monitor: What holds the robot and calls the operator when the policy is about to fail.
    """

    make_driver: Callable[[], Driver]
    safety: SafetyConfig
    mode: Mode
    server: str | None
    endpoint: str
    root: Path
    demos: Path
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    seed: int = 0
    seconds: float = 60.0
    iteration: int = 0
    quota: int = 0
    monitor: Monitor | None = None


def robot_process(connection: Connection, config: RobotConfig) -> None:
    """Main function: says ``ready`` or ``failed`` over the pipe, then drives until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the gateway, which closes the pipe
    link = Link(connection)
    try:
        _run(link, config)
    except UserError as e:
        link.send("failed", error=str(e))
    except EOFError:
        pass


def _run(link: Link, config: RobotConfig) -> None:
    recording: Recording | None = None

    def on_event(name: str, _: dict[str, Any]) -> str | None:
        return recording.decide(name) if recording is not None and name != "reset" else None

    operator = Operator(config.endpoint, on_event=on_event, familiar=familiar_states(config.demos))
    with RobotNode(config.server, config.make_driver, config.executor, config.safety, operator=operator) as node:
        told = partial(_tell, node, config.quota)
        recording = Recording(config.root, node.robot, node.joints, told, iteration=config.iteration)
        try:
            ended = threading.Event()
            threading.Thread(target=_wait_for_end, args=(link, node, ended), name="parent", daemon=True).start()
            link.send("ready", robot=node.robot.to_json(), stages=list(node.stages), guard=node.guard.name)
            _episodes(node, recording, config, ended)
        finally:
            recording.close()


def _episodes(node: RobotNode, recording: Recording, config: RobotConfig, ended: threading.Event) -> None:
    max_ticks = round(config.seconds * node.robot.rate_hz)

    watch = None
    if config.monitor is not None:
        config.monitor.check(node.model_version, node.robot)
        watch = Watch(config.monitor)

    def on_chunk(chunk: ActionChunk) -> None:
        if watch is not None and (why := watch.chunk(chunk)):
            node.call_for_help(why)

    def on_frame(frame: Frame) -> None:
        recording.frame(frame.obs, frame.action, frame.joint_command, frame.labels)

    for seed in itertools.count(config.seed):
        if watch is not None:
            watch.begin()
        seen = watch.observation if watch else None
        episode = node.run_episode(seed, max_ticks, seen, on_frame, config.mode, on_chunk if watch else None)
        facts = EpisodeFacts(
            *(str(episode.summary["operator"]["phase"]), config.mode, config.iteration, episode.summary["duration_s"]),
            seed=seed,
        )
        success = succeeded(episode)
        # A demonstration that failed teaches nothing good; the operator may keep it all the same.
        kept = Phase(facts.outcome).ended and facts.outcome != Phase.END_DISCARDED
        recording.end(success, kept and (success or config.mode != "teleop"), facts)
        if ended.is_set():
            return


def succeeded(episode: Episode) -> bool:
    """Whether an episode ended well: the operator's word, or the robot's own knowledge where it has any."""
    said = episode.summary["operator"]["why"]
    return said == "success" or (said != "fail" and bool(episode.summary["success"]))


def familiar_states(root: Path) -> Familiar | None:
    """Where the demonstrations of a dataset were; None where there are fewer than two."""
    if not (root / INFO).exists() or read_info(root)["total_episodes"] == 0:  # of a session in which nothing was kept
        return None
    dataset = open_dataset(root)
    states, kinds = dataset.columns[OBS_STATE], dataset.columns.get(SEGMENT_TYPE)
    dims = dataset.columns[ACTION].shape[1]  # the first entries of the state measure what is commanded
    spans = zip(dataset.episode_from, dataset.episode_to, strict=True)
    demos = [np.asarray(states[a:b, :dims]) for a, b in spans if kinds is None or (kinds[a:b] == Segment.DEMO).all()]
    return Familiar.of(demos) if len(demos) >= 2 else None


def _tell(node: RobotNode, quota: int, status: dict[str, Any]) -> None:
    node.tell(recording={**status, "quota": quota})


def _wait_for_end(link: Link, node: RobotNode, ended: threading.Event) -> None:
    with contextlib.suppress(EOFError):
        while True:
            link.receive(3600.0)
    ended.set()
    while True:  # again and again, as an episode that only begins now would not notice
        node.abort()
        time.sleep(0.2)
