"""Episodes of a policy under an operator, in lockstep virtual time, and many of them with batched inference.

An episode runs the robot's own executor and the intervention machine that the operator's page drives, so the labels,
the flush at a takeover and what is recorded follow the same rules as on a robot.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.scene import Scene as Poses
from vla_stack.envs import EnvStep
from vla_stack.intervention import Control, Intervention, Mode, Phase, Refused, Segment
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.operator import HOLD_S, SimulatedOperator
from vla_stack.methods.rac.scene import Attempts, Scene, Subtasks
from vla_stack.rollout.agents import arrived
from vla_stack.rollout.plan import Decision, Episode, Query, Reply
from vla_stack.runtime.driver import Status
from vla_stack.runtime.executor import Executor
from vla_stack.runtime.rewind import Rewinder
from vla_stack.schema import Observation

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


class OperatedAgent:
    """A policy under an operator, in lockstep virtual time; what came of it is its :meth:`result`.

    Args:
        episode: Of a task of ``sim`` in control mode ee_abs, without a time limit of its own.
        mode: ``teleop`` for demonstrations, which need no policy.
        limit: Ticks after which the policy has failed, or a demonstration is discarded.
        operator: Who intervenes, if anybody.
        familiar: For counting recoveries.
    """

    def __init__(
        self,
        episode: Episode,
        mode: Mode,
        limit: int,
        operator: SimulatedOperator | None = None,
        familiar: FamiliarStates | None = None,
    ) -> None:
        robot, seed = episode.robot, episode.start.seed
        self._robot, self._seed, self._limit, self._operator, self._familiar = robot, seed, limit, operator, familiar
        self._env, self._task = episode.env, episode.env.unwrapped
        self.out, self.machine = RolledOut(seed), Intervention(mode)
        self._subtasks, self._attempts = Subtasks(), Attempts(robot.dt)
        self._executor = None if mode == "teleop" else Executor(robot, episode.plan.policy, episode.plan.executor)
        if self._executor:
            self._executor.reset(0, seed)
        self._command = self._task.tool_command.astype(np.float32)
        rates = [d.max_rate * robot.dt if np.isfinite(d.max_rate) else np.inf for d in robot.action]
        self._step = np.array(rates)
        self.machine.apply("start", 0)
        if mode == "teleop" and operator:
            operator.human.engage(self._task.tool_command)
            self.machine.apply("engage", 0)
        self._auto = self._held = 0
        self._scene, self._poses = Scene.of(self._env), Poses(self._task)
        self._rewinder = Rewinder(robot) if operator and operator.config.rewind else None
        self._sent: _Sent | None = None

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if self._sent is not None and self._done(k, self._sent, now):
            return None
        machine, scene, task = self.machine, self._scene, self._task
        seen = Observation(
            np.asarray(now.observation["agent_pos"], np.float32),
            now.observation.get("pixels", {}),
            task.task,
            k,
            k * self._period,
        )
        status = self._watch(k, seen)
        before, subtask = machine.phase, self._subtasks.update(scene)
        if self._familiar and subtask < scene.over:
            starting = self._familiar.start_score(scene.features, subtask) <= 1.0
            self._attempts.update(scene, subtask, starting)
        target = self._intervene(k, seen, status) if self._operator else None
        if machine.phase.ended:
            return None
        if self._executor and before is not Phase.AUTO and machine.phase is Phase.AUTO:
            self._executor.reset(k, self._seed + 7919 * k)  # after a hold nothing of an older chunk is executed
        late = machine.phase is Phase.AUTO and self._auto >= self._limit
        if late or machine.phase is Phase.TELEOP and k >= self._limit:
            machine.apply("fail", k)
            return None
        if machine.policy_may_act:
            yield from self._let_policy_act(k, seen)
        elif self._rewinder and machine.control_source is Control.AUTO_REWIND:
            self._rewind(k, seen, status)
        elif machine.human_may_act and target is not None:
            limited = np.clip(target, self._command - self._step, self._command + self._step)
            self._command = np.clip(limited, self._robot.action_low, self._robot.action_high).astype(np.float32)
        labels = machine.labels(k) if machine.recording else None
        self._sent = _Sent(seen, self._command.copy(), labels, min(subtask, scene.over - 1), scene.features)
        return Decision(self._sent.command)

    def result(self) -> RolledOut:
        out, machine = self.out, self.machine
        out.phase, out.takeovers = machine.phase, machine.takeovers
        out.ticks, out.attempts, out.recoveries = len(out.sent), self._attempts.attempts, self._attempts.recoveries
        return out

    @property
    def _period(self) -> int:
        return round(1e9 * self._robot.dt)

    def _watch(self, k: int, seen: Observation) -> Status:
        """What a rewind needs to know of the scene."""
        if self._rewinder is None:
            return {}
        status: Status = {"objects": self._poses.objects(), "hazards": self._poses.hazards()}
        self._rewinder.observe(k * self._period, seen, status)
        return status

    def _intervene(self, k: int, seen: Observation, status: Status) -> NDArray[np.float64] | None:
        """Let the operator do what it does at this tick; where it wants the tool."""
        assert self._operator is not None
        decision = self._operator.step(k, self.machine.phase, self._scene, self._task.tool_command)
        for event in decision.events:
            if event == "rewind" and self._rewinder and (why := self._rewinder.plan(k * self._period, seen)):
                self.out.refusals.append(why)
                event = "engage"
            self.machine.apply(event, k)
            self.out.log.append((k, event))
        return decision.command

    def _let_policy_act(self, k: int, seen: Observation) -> Generator[Query, Reply, None]:
        assert self._executor is not None
        if (request := self._executor.plan(k)) is not None:
            reply = yield Query(seen, request.seed)
            self._executor.deliver(arrived(request, reply), k)
        dispatch = self._executor.dispatch(k)
        self._command = self._command if dispatch.action is None else dispatch.action
        self._auto += 1

    def _rewind(self, k: int, seen: Observation, status: Status) -> None:
        assert self._rewinder is not None and self._operator is not None
        waypoint, why = self._rewinder.next(seen, status, self._command)
        if waypoint is None:  # the hand goes on from where it has led to, one tick later
            self.out.refusals.append(why)
            self.machine.apply("engage", k)
            self._operator.human.engage(self._task.tool_command)
        self._command = self._command if waypoint is None else waypoint

    def _done(self, k: int, sent: _Sent, now: EnvStep) -> bool:
        """Take in what the last command did, before tick ``k``; whether the task has been done for long enough."""
        out, machine = self.out, self.machine
        out.sent.append(sent.command)
        if sent.labels is not None:
            joints = self._task.joint_command
            out.frames.append(Frame(sent.seen, sent.command, joints, sent.labels, sent.subtask, sent.features))
        out.stage = max(out.stage, int(now.info["stage"]))
        self._scene = Scene.of(self._env)
        out.success = bool(now.info["is_success"])
        self._held = self._held + 1 if out.success else 0
        by_hand = machine.phase in (Phase.TELEOP, Phase.CORRECTION)
        if self._held <= (round(HOLD_S / self._robot.dt) if by_hand else 0):
            return False
        self._subtasks.update(self._scene)
        _finish(machine, out, k)
        return True


class _Sent(NamedTuple):
    """What was done in the last tick, whose outcome is not known yet."""

    seen: Observation
    command: NDArray[np.float32]
    labels: dict[str, Any] | None
    subtask: int
    features: NDArray[np.float32]


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
