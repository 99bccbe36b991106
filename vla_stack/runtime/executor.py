"""Decides, tick by tick, what to ask the policy for and what to send to the robot.

Convention: o_k is captured at the start of control step k, then a_k is dispatched. ``chunk.actions[i]`` is due at
``origin + i``; the measured delay is d = k_next - origin, counted in steps, never latency divided by the period.

Modes:
    sync: Execute ``execute`` actions, hold still, ask, wait. The plan's time stops while the robot waits: a reply is
        laid down from the step at which it arrives, so that nothing of it is skipped and ``k - k_obs - index`` is the
        number of steps waited. One that comes within half a step is acted on in that step (``control.py``).
    naive: Ask ahead and keep moving. A reply takes over at its own steps; its first d actions are too late and are
        dropped. Nothing makes old and new agree at the seam. Where the robot has held since the observation, as it has
        for the first chunk, nobody has done these d, and to leave them out would be a leap: it goes the chunk's way
        from the beginning, faster, until it is where it is due. What is no target but a move is done in full, late.
    ensemble: As naive, but every step executes the average of all chunks that plan it (ACT).
    rtc, rtc_identity, bid, prefix: As naive, but the request carries the plan, and the policy samples a chunk that
        continues it (``policies/continuation.py``). A chunk that comes later than it was made for is faded in;
        it is dropped if it lies further from the plan than the robot can go meanwhile and there is time for another.
    future_state: The new chunk starts where it will probably take over, and the policy is shown the state that the plan
        leads to by then, with the pictures of now (VLASH, arXiv:2512.01031). Nothing is dropped.

The trigger, deadlines and acceptance rules keep one request in flight and d <= s <= H - d (Black et al. 2025,
arXiv:2506.07339, for s and d). This file knows no clock, socket or robot; the evaluation under the virtual clock and
the robot's control process run it unchanged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.delay import DelayEstimator
from vla_stack.runtime.dispatch import Dispatch, Request, State
from vla_stack.runtime.merging import CROSSFADE_STEPS, blender, merge_rule
from vla_stack.runtime.timeline import MergeReport, Timeline, merge
from vla_stack.schema import CONTINUE, ActionChunk, Continuation, PolicySpec, RobotSpec

AGE_CAP_S = 1.0  # asynchronous motion rests on no older observation by default, whatever the horizon
MODES = ("sync", "naive", "ensemble", *CONTINUE, "future_state")
CATCH_UP = 1.5  # times its own speed at which a chunk is executed that came late to a robot that stood still
DEADLINE_CAP_S = 8.0  # resends slow down, one to the next, to at most this


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """How chunks become motion.

    Attributes:
        mode: One of :data:`MODES`, see the module.
        execute: s_min, control steps between the origins of two requests (at least); by default the policy's
            own ``n_action_steps``, or half a chunk. A chunk that says itself how much of it to execute
            (:attr:`~vla_stack.schema.ActionChunk.execute`) is followed where nothing is set here.
        merge: Rule of :func:`~vla_stack.runtime.merging.merge_rule` where two chunks plan the same steps; by default
            the mode's own, which is ``ensemble`` or ``replace``. ``sync`` has nothing to merge.
        margin: Spare control steps, beyond the predicted delay, at which a request is due in any case.
        max_age_s: Oldest observation an action may rest on, seconds; by default the chunk's length, at most 1 s or
            what ``execute`` asks for; in ``sync``, where the robot stands still meanwhile, that length and the longest
            HOLD.
        hold_s: HOLD becomes STOP after this many seconds; by default 0.5 s, in ``sync``, which waits by design, 5 s.
            Waiting for the first chunk after a reset never becomes STOP: the robot has not moved yet.
        timeout_s: Shortest time after which an unanswered request is sent anew, seconds.
        interpolate: Commands a control step, those in between on the way from an action to the next, for robots that
            take commands at any time. The plan knows the next action, so that nothing comes later for it.
        seed: Seeds of the policy's noise follow from this, the epoch and the request's step in it.
    """

    mode: str = "naive"
    execute: int | None = None
    merge: str = ""
    margin: int = 1
    max_age_s: float | None = None
    hold_s: float | None = None
    timeout_s: float = 1.0
    interpolate: int = 1
    seed: int = 0


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
    still: int | None = 0  # control step since which the robot has held; None while it moves
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
        cap_s = max(AGE_CAP_S, (c.execute or 0) * robot.dt)  # who asks for a longer part of a chunk means it
        age_s = (chunk_s + hold_s if sync else min(chunk_s, cap_s)) if c.max_age_s is None else c.max_age_s
        self.execute = default_execute(policy) if c.execute is None else c.execute
        self.max_hold = _ticks(hold_s, robot)
        self.max_age = _ticks(age_s, robot)
        own = "ensemble" if c.mode == "ensemble" else "replace"
        self._rule = merge_rule(own if sync or not c.merge else c.merge, robot)
        self._fade, self._blend = merge_rule("crossfade", robot), blender(robot)
        self._reach = np.array([d.max_rate for d in robot.action]) * robot.dt * CROSSFADE_STEPS
        self._zeroed = robot.rate_mask
        if robot.action_kind == "delta":
            self._zeroed |= ~robot.gripper_mask
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
        self._now = _Progress(Timeline.empty(k, self._dims), still=k)

    def rearm(self, k: int) -> None:
        """Leave STOP: forget the plan and ask anew. The robot holds until a fresh chunk arrives."""
        self._now = _Progress(Timeline.empty(k, self._dims), still=k, command=self._now.command)

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
                self.delay.observe(k - request.k_obs)
            self.counters["resends"] += 1
            self._now.resends += 1
        elif not self._due(k):
            return None
        self._rid += 1
        self.counters["requests"] += 1
        ahead, deadline = self._ahead(k), k + self._patience(k)
        self._now.request = Request(
            self._rid,
            self.epoch,
            k + ahead,
            k,
            self._noise_seed(k),
            deadline,
            self._continuation(k),
            self._now.timeline.since(k + ahead - 1).actions[0] if ahead else None,
        )
        return self._now.request

    def deliver(self, chunk: ActionChunk, k_next: int) -> MergeReport:
        """Take a reply. ``k_next`` is the first control step that has not been dispatched."""
        if reason := self._refusal(chunk, k_next):
            self.counters[f"rejected.{reason}"] += 1
            return MergeReport(False, reason, delay=k_next - chunk.k_obs)
        delay = k_next - chunk.k_obs
        (self.delay.observe if self._now.moved else self.delay.observe_first)(delay)
        execute = chunk.execute if chunk.execute and self.config.execute is None else self.execute
        if self.config.mode == "sync":
            chunk = replace(chunk, actions=chunk.actions[:execute])
        waited = self._now.still is not None and self._now.still <= chunk.k_obs == chunk.origin
        if self.config.mode == "sync" or (waited and self.robot.action_kind != "absolute"):
            chunk = replace(chunk, origin=k_next)
        elif waited:
            chunk = replace(chunk, actions=chunk.actions[catching_up(len(chunk.actions), delay)])
        rule, continued = self._rule, self._continued()
        self._now.request, self._now.resends = None, 0
        if continued is not None and delay > continued.delay:
            self.counters["later than conditioned"] += 1
            rule = self._fade
            if self._jumps(chunk, k_next) and self._left(k_next) > self.delay.predict():
                self.counters["rejected.jump"] += 1  # the plan lasts until the next reply; else fading beats waiting
                return MergeReport(False, "jump", delay=delay)
        self._now.timeline, report = merge(self._now.timeline, chunk, k_next, rule, self.robot.gripper_mask)
        self._now.origin, self._now.execute = chunk.origin, execute
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
        plan, row = self._now.timeline, self._usable(k)
        if self._now.state is not State.STOP and row is not None:
            self._now.state, self._now.held, self._now.moved, self._now.still = State.RUN, 0, True, None
            self._now.command = plan.actions[row].copy()
            self.counters["run"] += 1
            source = int(plan.rid[row]), int(plan.index[row]), int(plan.k_obs[row])
            following = self._usable(k + 1)
            next_action = None if following is None else plan.actions[following].copy()
            return Dispatch(self._now.command.copy(), State.RUN, *source, next_action)
        if self._now.still is None:
            self._now.still = k
        return self._starve(elapsed)

    def waits(self, k: int) -> bool:
        """Whether the robot would hold at control step ``k`` until the reply to what was asked, as ``sync`` has it."""
        asked = self.config.mode == "sync" and self._now.request is not None and self._now.state is not State.STOP
        return asked and self._usable(k) is None

    def planned(self, k: int) -> NDArray[np.float32]:
        """The plan's actions [m, A] from control step ``k`` on, which stand until another chunk comes."""
        plan = self._now.timeline.since(k)
        return plan.actions if plan.start == k else plan.actions[:0]

    def _usable(self, k: int) -> int | None:
        """Row of the plan's action for control step ``k``; None where there is none or what it rests on is too old."""
        plan, row = self._now.timeline, self._now.timeline.row(k)
        return row if row is not None and k - int(plan.k_obs[row]) <= self.max_age else None

    def _starve(self, elapsed: int) -> Dispatch:
        if self._now.state is not State.STOP:
            self._now.held += elapsed if self._now.moved else 0
            self._now.state = State.STOP if self._now.held > self.max_hold else State.HOLD
        self.counters[self._now.state.value] += 1
        if self._now.state is State.STOP or self._now.command is None:
            return Dispatch(None, self._now.state)
        held = self._now.command.copy()
        held[self._zeroed] = 0.0
        return Dispatch(held, State.HOLD)

    def _due(self, k: int) -> bool:
        left = self._left(k)
        if self._now.origin is None or left <= 0:
            return True
        if self.config.mode == "sync":
            return False
        delay = self.delay.predict()
        return (
            k + self._ahead(k) - self._now.origin >= max(self._now.execute, delay) or left <= delay + self.config.margin
        )

    def _ahead(self, k: int) -> int:
        """Control steps from the observation to the first action wanted: the delay to come, where there is a plan."""
        if self.config.mode != "future_state" or self._now.origin is None:
            return 0
        return min(self.delay.predict(), self._left(k))

    def _continuation(self, k: int) -> Continuation | None:
        """The plan from control step ``k`` on, for a policy that is to continue it; None where there is none."""
        plan = self._now.timeline.since(k)
        actions = plan.actions[: self._horizon] if plan.start == k else plan.actions[:0]
        if self.config.mode not in CONTINUE or not len(actions):
            return None
        longest = len(actions) if self.config.mode != "prefix" else min(len(actions), self.policy.d_train_max)
        delay = min(self.delay.predict(), longest)
        execute = max(self._horizon - len(actions), delay)  # the old chunk began that many steps ago
        return Continuation(self.config.mode, actions, delay, min(execute, self._horizon - delay))

    def _jumps(self, chunk: ActionChunk, k_next: int) -> bool:
        """Whether a chunk lies further from the plan at ``k_next`` than the robot can go while one fades into it."""
        row = self._now.timeline.row(k_next)
        if row is None:
            return False
        old, new = self._now.timeline.actions[row : row + 1], chunk.actions[k_next - chunk.origin :][:1]
        way = np.abs(self._blend(old, new, np.ones(1, np.float32)) - old)[0]
        return bool((way > self._reach)[~self.robot.gripper_mask].any())

    def _continued(self) -> Continuation | None:
        return self._now.request.continuation if self._now.request else None

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


def default_execute(policy: PolicySpec) -> int:
    """Actions that a policy executes of a chunk by its own choice, or half of it."""
    steps = policy.extras.get("n_action_steps")
    return steps if isinstance(steps, int) and 1 <= steps <= policy.horizon else max(1, policy.horizon // 2)


def _ticks(seconds: float, robot: RobotSpec) -> int:
    return max(1, int(np.floor(seconds * robot.rate_hz + 1e-6)))


def catching_up(horizon: int, late: int) -> NDArray[np.int64]:
    """Which action of a chunk is due at each of its steps, int [horizon], where nobody did the first ``late`` of them.

    On a conveyor what comes later than it was meant misses; on a table what leaps does. At one and a half times the
    speed neither did much (measured with pictures at 10 Hz and poses at 20 Hz).
    """
    steps = np.arange(horizon)
    return np.where(steps < late, steps, np.minimum((CATCH_UP * (steps - late) + 1).astype(int), steps))


def _check(robot: RobotSpec, policy: PolicySpec, c: ExecutorConfig) -> None:
    if c.mode not in MODES:
        raise UserError(f"execution mode '{c.mode}' does not exist", f"use one of {', '.join(MODES)}")
    if c.mode in CONTINUE and c.mode not in policy.extras.get("continues", ()):
        able = ", ".join(policy.extras.get("continues", ())) or "none"
        why = ": it was not trained with max_delay" if c.mode == "prefix" and able != "none" else ""
        remedy = f"its modes are {able}; or, where its graph computes it: vla serve --backend torch"
        raise UserError(f"the policy cannot continue a plan in mode '{c.mode}'{why}", remedy)
    if c.mode == "future_state" and robot.action_kind != "absolute":
        raise UserError("mode 'future_state' needs absolute actions", f"{robot.name} takes {robot.action_kind} ones")
    if c.interpolate < 1:
        raise UserError(f"interpolate={c.interpolate} commands a control step", "give 1 or more")
    if c.interpolate > 1 and robot.action_kind != "absolute":
        raise UserError("interpolating needs absolute actions", f"{robot.name} takes {robot.action_kind} ones")
    if c.execute is not None and not 1 <= c.execute <= policy.horizon:
        raise UserError(f"execute={c.execute} is outside [1, {policy.horizon}], the policy's horizon")
    if len(robot.action) != len(policy.robot.action):
        raise UserError(
            f"{robot.name} takes {len(robot.action)} action values, the policy gives {len(policy.robot.action)}",
            "serve a policy that was trained for this robot",
        )
