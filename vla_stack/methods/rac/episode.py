"""Episodes of a policy under an operator, in lockstep virtual time, and many of them with batched inference.

An episode runs the robot's own executor and the intervention machine that the operator's page drives, so the labels,
the flush at a takeover and what is recorded follow the same rules as on a robot.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from sim.scene import Scene as Poses
from vla_stack.intervention import Control, Intervention, Mode, Phase, Refused, Segment
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.operator import HOLD_S, SimulatedOperator
from vla_stack.methods.rac.scene import Attempts, Scene, Subtasks
from vla_stack.runtime.driver import Status
from vla_stack.runtime.executor import Executor, ExecutorConfig
from vla_stack.runtime.rewind import Rewinder
from vla_stack.schema import ActionChunk, Chunks, Observation, PolicySpec, RobotSpec

RESET_S = 5.0  # s of a person's time for each reset


@dataclass(frozen=True)
class Frame:
    """A recorded tick: observation, the action that was sent, labels of ``vla_stack.intervention``."""

    observation: Observation
    action: NDArray[np.float32]
    joints: NDArray[np.float32]
    labels: dict[str, Any]
    subtask: int
    features: NDArray[np.float32]


@dataclass
class RolledOut:
    """What came of an episode.

    Attributes:
        seed: Environment seed.
        phase: How it ended.
        success: Whether the task was done.
        frames: What is recorded.
        stage: Stages reached.
        ticks: Control ticks, holds included.
        takeovers: Interventions.
        attempts: Attempts at each sub-task, by whoever acted.
        recoveries: Recoveries after failed attempts, see ``scene.Attempts``.
        sent: float32 [ticks, A], every command that the driver received.
        log: (tick, event) of everything that the operator did.
        refusals: Why an auto-rewind was refused or ended.
    """

    seed: int
    phase: Phase = Phase.RESET
    success: bool = False
    frames: list[Frame] = field(default_factory=list)
    stage: int = 0
    ticks: int = 0
    takeovers: int = 0
    attempts: list[int] = field(default_factory=list)
    recoveries: int = 0
    sent: list[NDArray[np.float32]] = field(default_factory=list)
    log: list[tuple[int, str]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def count(self, segment: Segment) -> int:
        """Recorded frames of a segment type."""
        return sum(f.labels["segment_type"] == segment for f in self.frames)

    @property
    def human_frames(self) -> int:
        return sum(f.labels["control_source"] == Control.HUMAN for f in self.frames)

    def supervision_s(self, dt: float) -> float:
        """Seconds of a person's time: watching, acting and resetting."""
        return self.ticks * dt + RESET_S


Query = tuple[Observation, int]
Running = Generator[Query, NDArray[np.float32], RolledOut]


def roll(
    env: gym.Env,
    robot: RobotSpec,
    seed: int,
    mode: Mode,
    limit: int,
    policy: PolicySpec | None = None,
    executor: ExecutorConfig | None = None,
    operator: SimulatedOperator | None = None,
    familiar: FamiliarStates | None = None,
) -> Running:
    """One episode as a coroutine: yields (observation, seed) where a chunk is wanted and is sent its actions.

    Args:
        env: A task of ``sim`` in control mode ee_abs, without a time limit of its own.
        robot: What is observed and recorded.
        seed: Environment seed; with the tick also the policy's.
        mode: ``teleop`` for demonstrations, which need no policy.
        limit: Ticks after which the policy has failed, or a demonstration is discarded.
        policy: What acts in phase AUTO.
        executor: How its chunks are executed.
        operator: Who intervenes, if anybody.
        familiar: For counting recoveries.
    """
    raw, _ = env.reset(seed=seed)
    task: Any = env.unwrapped
    out, machine, subtasks, attempts = RolledOut(seed), Intervention(mode), Subtasks(), Attempts(robot.dt)
    plan = Executor(robot, policy, executor) if policy else None
    if plan:
        plan.reset(0, seed)
    period = round(1e9 * robot.dt)
    command = task.tool_command.astype(np.float32)
    step = np.array([d.max_rate * robot.dt if np.isfinite(d.max_rate) else np.inf for d in robot.action])
    machine.apply("start", 0)
    if mode == "teleop" and operator:
        operator.human.engage(task.tool_command)
        machine.apply("engage", 0)
    k, auto, held = 0, 0, 0
    scene, poses = Scene.of(env), Poses(task)
    rewinder = Rewinder(robot) if operator and operator.config.rewind else None
    while True:
        now = Observation(np.asarray(raw["agent_pos"], np.float32), raw.get("pixels", {}), task.task, k, k * period)
        status: Status = {"objects": poses.objects(), "hazards": poses.hazards()} if rewinder else {}
        if rewinder:
            rewinder.observe(k * period, now, status)
        features, before = scene.features, machine.phase
        subtask = subtasks.update(scene)
        if familiar and subtask < Subtasks.DONE:
            attempts.update(scene, subtask, familiar.start_score(features, subtask) <= 1.0)
        target = None
        if operator:
            decision = operator.step(k, machine.phase, scene, task.tool_command)
            for event in decision.events:
                if event == "rewind" and rewinder and (why := rewinder.plan(k * period, now)):
                    out.refusals.append(why)
                    event = "engage"
                machine.apply(event, k)
                out.log.append((k, event))
            target = decision.command
        if machine.phase.ended:
            break
        if plan and before is not Phase.AUTO and machine.phase is Phase.AUTO:
            plan.reset(k, seed + 7919 * k)  # after a hold nothing of an older chunk is executed
        if machine.phase is Phase.AUTO and auto >= limit or machine.phase is Phase.TELEOP and k >= limit:
            machine.apply("fail", k)
            break
        if machine.policy_may_act:
            assert plan is not None
            if (request := plan.plan(k)) is not None:
                actions = yield now, request.seed
                chunk = ActionChunk(actions, request.origin, request.k_obs, rid=request.rid, epoch=request.epoch)
                plan.deliver(chunk, k)
            dispatch = plan.dispatch(k)
            command = command if dispatch.action is None else dispatch.action
            auto += 1
        elif rewinder and operator and machine.control_source is Control.AUTO_REWIND:
            waypoint, why = rewinder.next(now, status, command)
            if waypoint is None:  # the hand goes on from where it has led to, one tick later
                out.refusals.append(why)
                machine.apply("engage", k)
                operator.human.engage(task.tool_command)
            command = command if waypoint is None else waypoint
        elif machine.human_may_act and target is not None:
            limited = np.clip(target, command - step, command + step)
            command = np.clip(limited, robot.action_low, robot.action_high).astype(np.float32)
        if machine.recording:
            labels = machine.labels(k)
        raw, _, _, _, info = env.step(command)
        out.sent.append(command.copy())
        if machine.recording:
            out.frames.append(
                Frame(now, command.copy(), task.joint_command, labels, min(subtask, Subtasks.DONE - 1), features)
            )
        out.stage = max(out.stage, int(info["stage"]))
        k += 1
        scene = Scene.of(env)
        out.success = bool(info["is_success"])
        held = held + 1 if out.success else 0
        by_hand = machine.phase in (Phase.TELEOP, Phase.CORRECTION)
        if held > (round(HOLD_S / robot.dt) if by_hand else 0):
            subtasks.update(scene)
            _finish(machine, out, k)
            break
    out.phase, out.ticks, out.takeovers = machine.phase, k, machine.takeovers
    out.attempts, out.recoveries = attempts.attempts, attempts.recoveries
    return out


def _finish(machine: Intervention, out: RolledOut, k: int) -> None:
    """The task is done: end the episode, whoever has done it.

    What was done while a takeover was held, before anybody moved, the policy has done.
    """
    events = {Phase.RECOVERY: ("discard",), Phase.CORRECTION: ("subtask_done",)}.get(machine.phase, ("success",))
    if machine.phase is Phase.HOLD and machine.resumes in (Phase.RECOVERY, Phase.CORRECTION):
        events = ("discard",)
        try:
            machine.apply("cancel", k)
        except Refused:  # somebody has moved: the success is nobody's alone
            pass
        else:
            out.log.append((k, "cancel"))
            events = ("success",)
    for event in events:
        machine.apply(event, k)
        out.log.append((k, event))


def run_batch(
    start: Callable[[int, gym.Env], Running],
    envs: Sequence[gym.Env],
    infer: Callable[[Sequence[Observation], Sequence[int]], Chunks] | None,
    episodes: Sequence[int],
) -> Iterator[RolledOut]:
    """Run episodes, as many at a time as there are environments, and give them back in their order.

    Args:
        start: (episode, environment) -> its coroutine.
        envs: Environments.
        infer: The policy; None where nobody asks for chunks.
        episodes: Numbers of the episodes.
    """
    for first in range(0, len(episodes), len(envs)):
        group = episodes[first : first + len(envs)]
        running = {i: start(episode, env) for i, (episode, env) in enumerate(zip(group, envs, strict=False))}
        done: dict[int, RolledOut] = {}
        wanted = {i: _advance(episode, None, done, i) for i, episode in running.items()}
        while len(done) < len(group):
            asking = [i for i in running if i not in done]
            queries = [wanted[i] for i in asking]
            assert infer is not None
            chunks = infer([q[0] for q in queries if q], [q[1] for q in queries if q])
            for row, i in enumerate(asking):
                wanted[i] = _advance(running[i], chunks.actions[row], done, i)
        yield from (done[i] for i in sorted(done))


def _advance(episode: Running, reply: NDArray[np.float32] | None, done: dict[int, RolledOut], i: int) -> Query | None:
    try:
        return next(episode) if reply is None else episode.send(reply)
    except StopIteration as end:
        done[i] = end.value
        return None
