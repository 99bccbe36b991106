"""The last thing between a policy and the motors: every command is brought inside the robot's limits or refused.

Runs in the control process and knows nothing of policies or networks. Commands outside a limit are moved to its edge
and still obeyed; commands that make no sense (not finite, far outside) or that rest on a sensor that has gone quiet are
refused: the robot holds, and after several in a row it stops until somebody re-arms it.

All limits are per control step. With u = command - previous command, h = 1/rate:
    position      low <= command <= high, narrowed by a workspace box
    velocity      |u| <= max_rate h
    acceleration  |u - u_prev| <= max_acceleration h^2, and u small enough to brake before a position limit
    tool          the whole way to rest, braking from this command on, stays inside a box for the tool's position
An angle without position limits may be commanded at any turn; it moves along the shorter arc.

Standing still is the last command; of a dimension that is itself a velocity or a force it is zero, reached in equal
steps within half a second, or later where its own limits are slower. What is called its velocity above is then its
acceleration, and what is called its acceleration its jerk.

What is measured when the robot is armed may lie outside. A first step within the limits then brings it inside, whatever
was commanded; a robot that is further away is not armed, as each command on its way would lie outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.dispatch import State
from vla_stack.schema import RobotSpec

FloatArray = NDArray[np.float64]
TOOL_MARGIN = 1e-4  # m inside the tool's box that commands are kept to, for rounding on the way to rest
ENTER = 0.05  # of its range that a dimension may be beyond its limits when the robot is armed
ENTER_STEPS = 4  # of Newton's method, from outside the tool's box to its edge
INSIDE = "move it inside (`vla robot release` lets go of it)"
DIFFERENCE = 1e-4  # of an action, for the derivative of the tool's position
REST_S = 0.5  # from any commanded velocity or force to zero


@dataclass(frozen=True)
class SafetyConfig:
    """What may be tightened beyond the robot's own description.

    Attributes:
        workspace: Action dimension -> (low, high), in the dimension's unit, e.g. a box for ``tcp_x.pos``.
        max_rate: Action dimension -> largest velocity, in unit/s.
        max_acceleration: Action dimension -> largest change of velocity per second, in unit/s^2.
        tool_box: ``x``, ``y``, ``z`` -> (low, high) of the tool in the robot's base frame, metres; for robots that are
            commanded in joint space.
        kinematics: Model that says where the tool is, see ``vla_stack.runtime.kinematics``; with ``tool_box``.
        soft_start_s: The largest velocity grows from nothing to its limit over this time after arming.
        max_sensor_age_s: Age of the newest observation beyond which commands are refused; by default 5 control steps.
        max_refusals: Refusals in a row after which the robot stops.
        robot: Name of the one robot that they are for; empty for any.
    """

    workspace: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    max_rate: Mapping[str, float] = field(default_factory=dict)
    max_acceleration: Mapping[str, float] = field(default_factory=dict)
    tool_box: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kinematics: str = ""
    soft_start_s: float = 0.0
    max_sensor_age_s: float | None = None
    max_refusals: int = 5
    robot: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is sent, and why it is not what was asked for.

    Attributes:
        command: float32 [A], inside every limit; None where the robot must stop.
        state: RUN, HOLD (refused, stand still) or STOP.
        changes: Names of the limits that were applied, or the reason of a refusal, or where the robot is that it cannot
            be armed there; empty where nothing was changed.
    """

    command: NDArray[np.float32] | None
    state: State
    changes: tuple[str, ...] = ()


class SafetyEnvelope:
    """Limits of one robot; stateful, as velocities are relative to what was sent last.

    Args:
        robot: Its ``action`` dimensions give position limits and rates.
        config: Tighter limits.
        tool: Where an action [A] puts the tool, float [3] in metres; needed for ``config.tool_box``.

    Raises:
        UserError: ``config`` names an unknown dimension or leaves no room to move.
    """

    def __init__(
        self,
        robot: RobotSpec,
        config: SafetyConfig | None = None,
        tool: Callable[[FloatArray], FloatArray] | None = None,
    ) -> None:
        self.robot, self.config = robot, config or SafetyConfig()
        self.counters: Counter[str] = Counter()
        names = [d.name for d in robot.action]
        low, high = _box(robot, self.config.workspace)
        self._low, self._high = _inwards(low, high)
        self._range = high - low
        self._rates = robot.rate_mask
        for i in np.flatnonzero(self._rates & ((low > 0.0) | (high < 0.0))):
            raise UserError(f"limits of {names[i]} leave out zero", "the robot could not stand still")
        self._turns = np.array([d.kind == "angle" for d in robot.action]) & np.isinf(low) & np.isinf(high)
        self._turns &= ~self._rates
        rates = _by_name(self.config.max_rate, names, np.inf, "max_rate")
        self._step = np.minimum(rates, [d.max_rate for d in robot.action]) * robot.dt
        acceleration = _by_name(self.config.max_acceleration, names, np.inf, "max_acceleration")
        self._brake = acceleration * robot.dt**2
        # Deltas are relative to where the robot is, all but the gripper's: they hold at 0 and need no previous command.
        self._relative = ~robot.gripper_mask if robot.action_kind == "delta" else np.zeros(len(names), bool)
        if self._relative.any() and np.isfinite(self._brake[self._relative]).any():
            raise UserError("max_acceleration applies to absolute commands only", f"{robot.name} takes deltas")
        self._tool = tool if self.config.tool_box else None
        self._tool_low, self._tool_high = _tool_box(self.config, robot, tool)
        self._ramp = max(1, round(self.config.soft_start_s * robot.rate_hz))  # control steps
        self._armed_for = 0
        age = self.config.max_sensor_age_s
        self._max_age = 5 * robot.dt if age is None else age
        self._last: FloatArray | None = None
        self._u: FloatArray = np.zeros(len(names))
        self._slope: FloatArray = np.zeros(len(names))  # per control step, of velocities on their way to rest
        self._refusals = 0
        self._stopped = self._entering = False

    def limits(self, i: int) -> tuple[float, float, float, float]:
        """Of action dimension ``i``: low, high, largest velocity and largest acceleration, per second."""
        dt = self.robot.dt
        return float(self._low[i]), float(self._high[i]), float(self._step[i] / dt), float(self._brake[i] / dt**2)

    def reset(self, measured: NDArray[np.floating]) -> None:
        """Begin from rest at ``measured`` [A] (where the robot is, in the action's dimensions) and leave STOP."""
        if not np.isfinite(measured).all():
            raise UserError("the robot's measured position is not finite", "check its sensors before arming it")
        self._last = np.asarray(measured, np.float64).copy()
        self._last[self._relative | self._rates] = 0.0
        self._u, self._slope = np.zeros_like(self._last), np.zeros_like(self._last)
        self._refusals, self._armed_for, self._stopped, self._entering = 0, 0, False, True

    def stop(self, reason: str) -> None:
        """Stop from the next :meth:`filter` on, until :meth:`reset`: an emergency stop, an overloaded motor."""
        self.counters[reason] += not self._stopped
        self._stopped = True

    def filter(self, command: NDArray[np.floating] | None, sensor_age_s: float = 0.0, trouble: str = "") -> Verdict:
        """Decide what is sent at this control step.

        Args:
            command: float [A] from the executor; None asks to stand still.
            sensor_age_s: Age of the newest observation, seconds.
            trouble: What is wrong with the robot at the moment, in a word; it then stands still.
        """
        if self._last is None:
            raise RuntimeError("SafetyEnvelope.reset(measured) comes before the first command")
        if self._stopped:
            self.counters["stop"] += 1
            return Verdict(None, State.STOP, ("stopped",))
        if self._entering and (away := self._away()):
            entered = self._enter()
            if entered is None:
                self.counters["outside"] += 1
                self._stopped = True
                return Verdict(None, State.STOP, (away,))
            if reason := trouble or ("stale" if sensor_age_s > self._max_age else ""):  # it waits where it is
                self._u = np.zeros_like(self._u)
                self.counters[reason] += 1
                return Verdict(self._last.astype(np.float32), State.HOLD, (reason,))
            self._last, self._u = entered.astype(np.float64), entered - self._last
            self._entering = bool(self._away())
            return Verdict(entered, State.HOLD if command is None else State.RUN, ("outside",))
        self._entering = False
        self._armed_for += 1
        reason = trouble or self._refusal(command, sensor_age_s)
        if trouble:  # it passes or the driver stops the robot: no fault of whoever commands
            self.counters[trouble] += 1
        elif reason:
            self.counters[reason] += 1
            self._refusals += 1
            if self._refusals >= self.config.max_refusals:
                self._stopped = True
                return Verdict(None, State.STOP, (reason,))
        elif command is not None:
            self._refusals = 0
        if command is None or reason:
            target = self._rest()
        else:
            target, self._slope = np.asarray(command, np.float64), np.zeros_like(self._slope)
        sent, changes = self._limit(target)
        if reason:
            return Verdict(sent, State.HOLD, (reason,))
        self.counters.update(changes)
        return Verdict(sent, State.HOLD if command is None else State.RUN, changes)

    def _rest(self) -> FloatArray:
        """Where to stand still: at the last command; velocities and forces on their way from there to zero."""
        assert self._last is not None
        size = np.abs(self._last)
        self._slope = np.maximum(self._slope, size / max(1, round(REST_S * self.robot.rate_hz)))
        step = np.minimum(self._slope, _braking(size, self._brake))  # so that a limited jerk does not lead past zero
        return np.where(self._rates, self._last - np.clip(self._last, -step, step), self._last)

    def _refusal(self, command: NDArray[np.floating] | None, sensor_age_s: float) -> str:
        if command is None:
            return ""
        if sensor_age_s > self._max_age:
            return "stale"
        if np.shape(command) != self._low.shape:
            return "shape"
        if not np.isfinite(command).all():
            return "not finite"
        # Further outside than the whole range is wide: wrong unit or wrong robot, not a policy that is a little off.
        outside = np.maximum(self._low - command, command - self._high)
        return "far outside" if (outside > self._range).any() else ""

    def _limit(self, target: FloatArray) -> tuple[NDArray[np.float32], tuple[str, ...]]:
        assert self._last is not None
        last, brake, changes = self._last, self._brake, []

        def bound(x: FloatArray, low: FloatArray, high: FloatArray, name: str) -> FloatArray:
            y = np.minimum(np.maximum(x, low), high)
            if (y != x).any():
                changes.append(name)
            return y

        target = np.where(self._turns, last + _shorter_arc(target - last), target)
        u = bound(target, self._low, self._high, "position") - last
        step = self._step * min(1.0, self._armed_for / self._ramp)
        u = bound(u, -step, step, "velocity")
        if np.isfinite(brake).any():
            u = bound(u, -_braking(last - self._low, brake), _braking(self._high - last, brake), "acceleration")
            u = bound(u, self._u - brake, self._u + brake, "acceleration")
            inside = (last >= self._low) & (last <= self._high)  # braking to a limit must not end one rounding past it
            u = np.where(inside, np.clip(u, self._low - last, self._high - last), u)
        if self._tool is not None and not self._stays_in_box(u):
            changes.append("tool")
            rest = self._braked(self._u)  # the way to rest that the last command was checked for
            inside_box = next((v for s in (0.5, 0.25, 0.125) if self._stays_in_box(v := rest + s * (u - rest))), rest)
            u = np.where(self._rates, u, inside_box)  # wheels move no arm, and an arm must not keep them turning
        sent = _round(last, u)
        self._u = sent - last
        self._last = np.where(self._relative, 0.0, sent)
        return sent, tuple(dict.fromkeys(changes))

    def _braked(self, u: FloatArray) -> FloatArray:
        """The step after ``u`` where every dimension brakes as hard as it may."""
        return np.sign(u) * np.maximum(np.abs(u) - self._brake, 0.0)

    def _stays_in_box(self, u: FloatArray) -> bool:
        """Whether the tool stays in its box if ``u`` is made and everything brakes from then on."""
        assert self._last is not None
        q = self._last
        while u.any():
            q = q + u
            if self._outside(q) > 0.0:
                return False
            u = self._braked(u)
        return True

    def _away(self) -> str:
        """Where the robot is that no command may be; empty inside the envelope."""
        assert self._last is not None
        beyond = np.maximum(self._low - self._last, self._last - self._high)
        if (beyond > 0.0).any():
            i = int(np.argmax(beyond))
            dim = self.robot.action[i]
            return f"{dim.name} is {beyond[i]:.3g} {dim.unit} outside its limits: {INSIDE}, or widen them"
        if self._tool is not None and (by := self._outside(self._last)) > 0.0:
            return f"the tool is {1000 * by:.1f} mm outside its box: {INSIDE}, or widen the box"
        return ""

    def _enter(self) -> NDArray[np.float32] | None:
        """The next command on a robot's way inside, from rest; None where it is too far outside.

        A dimension beyond its limits may take several steps for a small share of its range, each small enough to end in
        one: an arm that rests on its stops reads a little more than they are. All else is one step.
        """
        last = self._last
        assert last is not None
        q = np.clip(last, self._low, self._high)
        for _ in range(ENTER_STEPS):
            if self._tool is None or self._outside(q) == 0.0:
                break
            at = self._tool(q)
            way = np.clip(at, self._tool_low + TOOL_MARGIN, self._tool_high - TOOL_MARGIN) - at
            jacobian = np.stack([(self._tool(q + d) - at) / DIFFERENCE for d in DIFFERENCE * np.eye(len(q))], axis=1)
            q = np.clip(q + np.linalg.pinv(jacobian) @ way, self._low, self._high)
        sent = q.astype(np.float32)
        way, step = sent - last, np.minimum(self._step, self._brake)
        inside = bool((sent >= self._low).all() and (sent <= self._high).all())
        inside &= self._tool is None or self._outside(sent.astype(np.float64)) == 0.0
        beyond = (last < self._low) | (last > self._high)
        reach = np.where(beyond & np.isfinite(self._high - self._low), ENTER * (self._high - self._low), 0.0)
        if not inside or (np.abs(way) > np.maximum(step, reach)).any():
            return None
        return sent if (np.abs(way) <= step).all() else (last + np.clip(way, -step, step)).astype(np.float32)

    def _outside(self, q: FloatArray) -> float:
        """How far outside its box the tool is at ``q``, metres; 0 inside."""
        assert self._tool is not None
        at = self._tool(q)
        return float(max(0.0, (self._tool_low - at).max(), (at - self._tool_high).max()))


def _round(last: FloatArray, u: FloatArray) -> NDArray[np.float32]:
    """``last + u`` in float32, rounded towards ``last`` so that no bit of rounding crosses a limit."""
    exact = last + u
    sent = exact.astype(np.float32)
    beyond = np.where(u > 0, sent > exact, sent < exact)
    return np.where(beyond, np.nextafter(sent, last.astype(np.float32)), sent)


def _braking(room: FloatArray, a: FloatArray) -> FloatArray:
    """Largest step u after which steps u-a, u-2a, ... still end within ``room`` (the braking distance, in steps)."""
    room = np.maximum(room, 0.0)
    with np.errstate(invalid="ignore"):
        m = np.floor((np.sqrt(1 + 8 * room / a) - 1) / 2)
        u = (room + a * m * (m + 1) / 2) / (m + 1)
    return np.where(np.isfinite(a) & np.isfinite(room), u, np.inf)


def _shorter_arc(angle: FloatArray) -> FloatArray:
    return (angle + np.pi) % (2 * np.pi) - np.pi


def _inwards(low: FloatArray, high: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The widest float32 box inside [low, high], as float64."""
    a, b = low.astype(np.float32), high.astype(np.float32)
    a = np.where(a < low, np.nextafter(a, np.float32(np.inf)), a)
    b = np.where(b > high, np.nextafter(b, np.float32(-np.inf)), b)
    return a.astype(np.float64), b.astype(np.float64)


def _by_name(given: Mapping[str, float], names: list[str], default: float, what: str) -> FloatArray:
    for name in given:
        if name not in names:
            raise UserError(f"{what}: the robot has no action dimension '{name}'", f"it has {', '.join(names)}")
    return np.array([given.get(n, default) for n in names], np.float64)


def _tool_box(
    config: SafetyConfig, robot: RobotSpec, tool: Callable[[FloatArray], FloatArray] | None
) -> tuple[FloatArray, FloatArray]:
    box = dict(config.tool_box)
    if set(box) - set("xyz"):
        raise UserError(f"tool_box: there is no axis '{min(set(box) - set('xyz'))}'", "the axes are x, y and z")
    if box and (tool is None or robot.action_kind == "delta"):
        raise UserError("a tool_box needs a kinematic model and absolute commands", "name a model under kinematics")
    low, high = np.array([box.get(axis, (-np.inf, np.inf)) for axis in "xyz"], np.float64).T
    if (low + 2 * TOOL_MARGIN > high).any():
        raise UserError("tool_box leaves the tool no room", "give low and high of an axis in metres, low first")
    return low + TOOL_MARGIN, high - TOOL_MARGIN


def _box(robot: RobotSpec, workspace: Mapping[str, tuple[float, float]]) -> tuple[FloatArray, FloatArray]:
    names = [d.name for d in robot.action]
    low = _by_name({k: v[0] for k, v in workspace.items()}, names, -np.inf, "workspace")
    high = _by_name({k: v[1] for k, v in workspace.items()}, names, np.inf, "workspace")
    low = np.maximum(low, [d.low for d in robot.action])
    high = np.minimum(high, [d.high for d in robot.action])
    for i in np.flatnonzero(low > high):
        raise UserError(f"workspace leaves {names[i]} no room: {low[i]:g} > {high[i]:g}")
    return low, high
