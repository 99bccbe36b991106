"""Decides, tick by tick, what to ask the policy for and what to send to the robot.

Convention: o_k is captured at the start of control step k, then a_k is dispatched. ``chunk.actions[i]`` is due at
``origin + i``; the measured delay is d = k_next - origin, counted in steps, never latency divided by the period.

Modes:
    sync: Execute ``execute`` actions, hold still, ask, wait. The plan's time stops while the robot waits: a reply is
        laid down from the step at which it arrives, so that nothing of it is skipped and ``k - k_obs - index`` is the
        number of steps waited.
    naive: Ask ahead and keep moving. A reply takes over at its own steps; its first d actions are too late and are
        dropped. Nothing makes old and new agree at the seam.

With no delay both dispatch the same. The trigger, deadlines and acceptance rules keep one request in flight and
d <= s <= H - d (Black et al. 2025, arXiv:2506.07339, for s and d). This file knows no clock, socket or robot; the
evaluation under the virtual clock and the robot's control process run it unchanged.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.timeline import MERGE_RULES, MergeReport, Timeline, merge
from vla_stack.schema import ActionChunk, PolicySpec, RobotSpec

AGE_CAP_S = 2.0  # asynchronous motion rests on no older observation by default, whatever the horizon
DEADLINE_CAP_S = 8.0  # resends slow down, one to the next, to at most this


class State(Enum):
    """RUN: the plan is followed. HOLD: nothing to follow, stand still. STOP: safe stop until somebody re-arms."""

    RUN = "run"
    HOLD = "hold"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """How chunks become motion.

    Attributes:
        mode: ``sync`` or ``naive``, see the module.
        execute: s_min, control steps between the origins of two requests (at least); by default the policy's
            own ``n_action_steps``, or half a chunk. A chunk that says itself how much of it to execute
            (:attr:`~vla_stack.schema.ActionChunk.execute`) is followed where nothing is set here.
        merge: Name in :data:`~vla_stack.runtime.timeline.MERGE_RULES`; ``sync`` has nothing to merge.
        margin: Spare control steps, beyond the predicted delay, at which a request is due in any case.
        max_age_s: Oldest observation an action may rest on, seconds; by default the chunk's length, at most 2 s, in
            ``sync``, where the robot stands still meanwhile, that length and the longest HOLD.
        hold_s: HOLD becomes STOP after this many seconds; by default 0.5 s, in ``sync``, which waits by design, 5 s.
            Waiting for the first chunk after a reset never becomes STOP: the robot has not moved yet.
        timeout_s: Shortest time after which an unanswered request is sent anew, seconds.
        seed: Seeds of the policy's noise follow from this, the epoch and the request's step in it.
    """

    mode: Literal["sync", "naive"] = "naive"
    execute: int | None = None
    merge: str = "replace"
    margin: int = 1
    max_age_s: float | None = None
    hold_s: float | None = None
    timeout_s: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """Ask the policy, with the observation of control step ``k_obs``; answer with a chunk of the same rid and epoch."""

    rid: int
    epoch: int
    origin: int
    k_obs: int
    seed: int
    deadline: int  # control step at which the executor gives up on this request


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What to send at one control step.

    Attributes:
        action: float32 [A] command; in HOLD the last command (zeros, gripper kept, where actions are deltas), or None
            before the first; None in STOP.
        state: RUN, HOLD or STOP.
        chunk_rid: Request id of the chunk behind the action, -1 if none.
        index: Position of the action in that chunk, -1 if none.
        k_obs: Control step of the observation behind the action, -1 if none.
    """

    action: NDArray[np.float32] | None
    state: State
    chunk_rid: int = -1
    index: int = -1
    k_obs: int = -1


class DelayEstimator:
    """Predicts the delay as the largest of the last ``window`` counted ones (RTC, Algorithm 1's delay buffer).

    A maximum over the window, not over all time: one slow reply is forgotten after ``window`` replies. First replies,
    for which a server may have had to warm up, only stand in until there is another.
    """

    def __init__(self, window: int = 10) -> None:
        self._seen: deque[int] = deque(maxlen=window)
        self._first = 0

    def observe_first(self, delay: int) -> None:
        """Note the counted delay of an epoch's first reply."""
        self._first = delay

    def observe(self, delay: int) -> None:
        """Add a counted delay; for a request that was given up, the steps waited, a lower bound."""
        self._seen.append(delay)

    def predict(self) -> int:
        """Delay to plan for, control steps; 0 while nothing is known."""
        return max(self._seen, default=self._first)


@dataclass(slots=True)
class _Progress:
    """How far an executor is since its last reset or re-arming."""

    timeline: Timeline
    origin: int | None = None  # of the last chunk accepted, where it was laid down
    execute: int = 0  # actions of that chunk to execute before the next request
    request: Request | None = None  # the one in flight
    resends: int = 0
    held: int = 0  # control steps since the plan ran out
    moved: bool = False
    command: NDArray[np.float32] | None = None  # the last one
    state: State = State.HOLD


class Executor:
    """One robot's plan, and the rules by which it is filled and followed.

    At each control step k: :meth:`plan` once and :meth:`deliver` for what has arrived, then :meth:`dispatch`.

    Args:
        robot: The embodiment that is driven.
        policy: What the server promises.
        config: See :class:`ExecutorConfig`.

    Raises:
        UserError: The configuration does not fit the policy's horizon, or names an unknown mode or rule.
    """

    def __init__(self, robot: RobotSpec, policy: PolicySpec, config: ExecutorConfig | None = None) -> None:
        self.robot, self.policy, self.config = robot, policy, config or ExecutorConfig()
        _check(self.robot, self.policy, self.config)
        c, self._dims, self._horizon = self.config, len(robot.action), policy.horizon
        sync, chunk_s = c.mode == "sync", policy.horizon * robot.dt
        hold_s = (5.0 if sync else 0.5) if c.hold_s is None else c.hold_s
        age_s = (chunk_s + hold_s if sync else min(chunk_s, AGE_CAP_S)) if c.max_age_s is None else c.max_age_s
        self.execute = _default_execute(policy) if c.execute is None else c.execute
        self.max_hold = _ticks(hold_s, robot)
        self.max_age = _ticks(age_s, robot)
        self.delay = DelayEstimator()
        self.counters: Counter[str] = Counter()
        self.epoch = 0
        self._rid, self._noise = 0, (c.seed, 0)
        self._first_tick = 0
        self._last_tick: int | None = None
        self._now = _Progress(Timeline.empty(0, self._dims))

    @property
    def state(self) -> State:
        """State after the last :meth:`dispatch`."""
        return self._now.state

    def reset(self, k: int, seed: int | None = None) -> None:
        """Begin a new epoch at control step ``k``; from here on older chunks are refused.

        Args:
            k: First control step of the epoch, not dispatched yet. Steps may restart at 0.
            seed: Of the policy's noise in this epoch, whatever came before; by default from the configuration.
        """
        self.epoch += 1
        self._noise = (self.config.seed, self.epoch) if seed is None else (seed, 0)
        self._first_tick, self._last_tick = k, None
        self._now = _Progress(Timeline.empty(k, self._dims))

    def rearm(self, k: int) -> None:
        """Leave STOP: forget the plan and ask anew. The robot holds until a fresh chunk arrives."""
        self._now = _Progress(Timeline.empty(k, self._dims), command=self._now.command)

    def forget_request(self) -> None:
        """The request in flight will not be answered, e.g. because the server restarted: ask anew at the next step."""
        self._now.request = None

    def plan(self, k: int) -> Request | None:
        """Whether to ask the policy now; call after o_k is captured and before a_k is dispatched."""
        if self._now.state is State.STOP:
            return None
        if (request := self._now.request) is not None:
            if k < request.deadline:
                return None
            if self._now.moved:
                self.delay.observe(k - request.origin)
            self.counters["resends"] += 1
            self._now.resends += 1
        elif not self._due(k):
            return None
        self._rid += 1
        self.counters["requests"] += 1
        self._now.request = Request(self._rid, self.epoch, k, k, self._noise_seed(k), k + self._patience(k))
        return self._now.request

    def deliver(self, chunk: ActionChunk, k_next: int) -> MergeReport:
        """Take a reply. ``k_next`` is the first control step that has not been dispatched."""
        if reason := self._refusal(chunk, k_next):
            self.counters[f"rejected.{reason}"] += 1
            return MergeReport(False, reason, delay=k_next - chunk.origin)
        delay = k_next - chunk.origin
        (self.delay.observe if self._now.moved else self.delay.observe_first)(delay)
        execute = chunk.execute if chunk.execute and self.config.execute is None else self.execute
        if self.config.mode == "sync":
            chunk = replace(chunk, origin=k_next, actions=chunk.actions[:execute])
        rule = MERGE_RULES["replace" if self.config.mode == "sync" else self.config.merge]
        self._now.timeline, report = merge(self._now.timeline, chunk, k_next, rule, self.robot.gripper_mask)
        self._now.origin, self._now.execute = chunk.origin, execute
        self._now.request, self._now.resends = None, 0
        self.counters["accepted"] += 1
        return replace(report, delay=delay)

    def dispatch(self, k: int) -> Dispatch:
        """The command of control step ``k``. Steps strictly increase within an epoch; a missed one is not made up for.

        Raises:
            ValueError: ``k`` has been dispatched already.
        """
        if self._last_tick is not None and k <= self._last_tick:
            raise ValueError(f"control step {k} was dispatched already; the last one was {self._last_tick}")
        elapsed = 1 if self._last_tick is None else k - self._last_tick
        self._last_tick = k
        plan, row = self._now.timeline, self._now.timeline.row(k)
        if self._now.state is not State.STOP and row is not None and k - int(plan.k_obs[row]) <= self.max_age:
            self._now.state, self._now.held, self._now.moved = State.RUN, 0, True
            self._now.command = plan.actions[row].copy()
            self.counters["run"] += 1
            source = int(plan.rid[row]), int(plan.index[row]), int(plan.k_obs[row])
            return Dispatch(self._now.command.copy(), State.RUN, *source)
        return self._starve(elapsed)

    def _starve(self, elapsed: int) -> Dispatch:
        if self._now.state is not State.STOP:
            self._now.held += elapsed if self._now.moved else 0
            self._now.state = State.STOP if self._now.held > self.max_hold else State.HOLD
        self.counters[self._now.state.value] += 1
        if self._now.state is State.STOP or self._now.command is None:
            return Dispatch(None, self._now.state)
        held = self._now.command.copy()
        if self.robot.action_kind == "delta":
            held[~self.robot.gripper_mask] = 0.0
        return Dispatch(held, State.HOLD)

    def _due(self, k: int) -> bool:
        left = self._left(k)
        if self._now.origin is None or left <= 0:
            return True
        if self.config.mode == "sync":
            return False
        delay = self.delay.predict()
        return k - self._now.origin >= max(self._now.execute, delay) or left <= delay + self.config.margin

    def _left(self, k: int) -> int:
        """Control steps from ``k`` on for which there is an action that is not too old."""
        plan = self._now.timeline.since(k)
        return int((plan.start + np.arange(len(plan.actions)) - plan.k_obs <= self.max_age).sum())

    def _patience(self, k: int) -> int:
        """Control steps to wait for a reply: until one before the plan runs out, or, without a plan, ``timeout_s``.

        Never less than twice the usual delay, and doubled by each resend: a policy that is slower than the deadline
        would otherwise never be heard, each of its replies arriving just after it had been given up.
        """
        left = self._left(k)
        patience = max(left - 1 if left else _ticks(self.config.timeout_s, self.robot), 2 * self.delay.predict() + 1)
        return min(patience << min(self._now.resends, 16), _ticks(DEADLINE_CAP_S, self.robot))

    def _refusal(self, chunk: ActionChunk, k_next: int) -> str:
        request = self._now.request
        if chunk.epoch != self.epoch:
            return "epoch"
        if self._now.state is State.STOP:
            return "stopped"
        if request is None or chunk.rid != request.rid:
            return "not asked"
        if chunk.actions.shape != (self._horizon, self._dims):
            return "shape"
        if not 0 <= chunk.execute <= self._horizon:
            return "execute"
        if chunk.origin != request.origin or chunk.k_obs != request.k_obs:
            return "origin"
        if not np.isfinite(chunk.actions).all():
            return "not finite"
        past_end = self.config.mode != "sync" and k_next >= chunk.end
        return "too late" if past_end or k_next - chunk.k_obs > self.max_age else ""

    def _noise_seed(self, k: int) -> int:
        return int(np.random.SeedSequence((*self._noise, k - self._first_tick)).generate_state(1)[0])


def _default_execute(policy: PolicySpec) -> int:
    steps = policy.extras.get("n_action_steps")
    return steps if isinstance(steps, int) and 1 <= steps <= policy.horizon else max(1, policy.horizon // 2)


def _ticks(seconds: float, robot: RobotSpec) -> int:
    return max(1, int(np.floor(seconds * robot.rate_hz + 1e-6)))


def _check(robot: RobotSpec, policy: PolicySpec, c: ExecutorConfig) -> None:
    if c.mode not in ("sync", "naive"):
        raise UserError(f"execution mode '{c.mode}' does not exist", "use sync or naive")
    if c.merge not in MERGE_RULES:
        raise UserError(f"merge rule '{c.merge}' does not exist", f"use one of {', '.join(MERGE_RULES)}")
    if c.execute is not None and not 1 <= c.execute <= policy.horizon:
        raise UserError(f"execute={c.execute} is outside [1, {policy.horizon}], the policy's horizon")
    if len(robot.action) != len(policy.robot.action):
        raise UserError(
            f"{robot.name} takes {len(robot.action)} action values, the policy gives {len(policy.robot.action)}",
            "serve a policy that was trained for this robot",
        )
