"""Auto-rewind: back along the way the robot came, as executed and limited actions, or a clear reason why not.

What was measured in the last ten seconds is smoothed, reversed and resampled by its own shortest duration: the length
of a piece of the way is the time that it takes at the speed limits, so going through it at rate one or less keeps every
limit, whatever the pieces are. The rate itself rises and falls with bounded slope. Grippers stay as they are.

It is refused where going back would not undo what was done: a gripper switched, an object moved, something touched
that does not spring back, a waypoint at which the robot's model would touch what it does not touch here (RaC
specification, section 3). What is known of the scene stands in the driver's status.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_stack.runtime.driver import Status
from vla_stack.runtime.familiar import Familiar
from vla_stack.schema import Observation, RobotSpec

FloatArray = NDArray[np.float64]
HAZARDS = {
    "held_object_contact": "a held object touches something",
    "deformable_contact": "something soft was touched",
    "shared_object": "both arms hold one object",
    "inserted_off_axis": "an inserted part would be pulled out at an angle",
    "workspace_entered": "somebody has entered the workspace",
}


@dataclass(frozen=True)
class RewindConfig:
    """Limits of auto-rewind, SI units.

    Attributes:
        window_s: How far back is remembered.
        rate_fraction: Of each dimension's largest rate.
        tip_speed: Of the tool, m/s.
        reach: Of an arm whose commands are joints, m: each joint moves the tip by at most this times its angle.
        ramp_s: From rest to full rate.
        smooth_s: Width of the low-pass filter.
        tracking_error: Of a dimension, rad or m, beyond which rewinding stops.
        max_force: At the tool, N, where the robot measures it.
        gripper_change: Of the opening ratio, beyond which a gripper was switched.
        object_shift, object_turn: Of an object, m and rad, beyond which it was moved.
    """

    window_s: float = 10.0
    rate_fraction: float = 0.3
    tip_speed: float = 0.10
    reach: float = 1.0
    ramp_s: float = 0.3
    smooth_s: float = 0.3
    tracking_error: float = 0.05
    max_force: float = 20.0
    gripper_change: float = 0.05
    object_shift: float = 0.01
    object_turn: float = np.deg2rad(5.0)


@dataclass(frozen=True, slots=True)
class TimeStep:
    """What was measured at one tick: ``measured`` float [A]; object -> [x y z qw qx qy qz], None: not known."""

    t_ns: int
    measured: FloatArray
    objects: dict[str, FloatArray] | None
    hazards: tuple[str, ...]


class Rewinder:
    """Remembers, plans and walks back.

    Args:
        robot: What is driven; its actions must be absolute, and positions.
        config: Limits.
        familiar: Where demonstrations were; the way ends at the newest such state. None: at the oldest remembered.
        touching: What would touch what with the robot at an action [A] (``Kinematics.touching``); None: not predicted.
    """

    def __init__(
        self,
        robot: RobotSpec,
        config: RewindConfig | None = None,
        familiar: Familiar | None = None,
        touching: Callable[[FloatArray], frozenset[str]] | None = None,
    ) -> None:
        self._touching = touching
        self._robot, self.config, self._familiar = robot, config or RewindConfig(), familiar
        self._arm = ~robot.gripper_mask
        self._metres = np.array([d.unit == "m" for d in robot.action]) & self._arm
        self._joints = np.array([d.unit == "rad" for d in robot.action]) & self._arm
        self._turns = np.array([d.kind == "angle" for d in robot.action])
        self._rate = self.config.rate_fraction * np.minimum([d.max_rate for d in robot.action], 1.0)
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new episode."""
        self._ring: deque[TimeStep] = deque()
        self._way: FloatArray | None = None  # [N, A], newest first; where to go
        self._clock: FloatArray | None = None  # [N], seconds at full rate from the start of the way
        self._at = self._speed = 0.0  # on that clock
        self._scene: TimeStep | None = None

    def observe(self, now_ns: int, obs: Observation, status: Status) -> None:
        """Remember a tick."""
        objects = status.get("objects")
        poses = None if objects is None else {name: np.array(pose, np.float64) for name, pose in objects.items()}
        measured = obs.state[: len(self._arm)].astype(np.float64)
        self._ring.append(TimeStep(now_ns, measured, poses, tuple(status.get("hazards", ()))))
        while now_ns - self._ring[0].t_ns > self.config.window_s * 1e9:
            self._ring.popleft()

    def unfamiliarity(self, obs: Observation) -> float | None:
        """Distance of the robot's state to demonstrations over the threshold; None where none are known."""
        if self._familiar is None:
            return None
        return float(self._familiar.distance(obs.state[None, : len(self._arm)])[0])

    def plan(self, now_ns: int, obs: Observation) -> str:
        """Lay out the way back from here; why there is none, or ''."""
        self._way = self._clock = None
        self._at = self._speed = 0.0
        if self._robot.action_kind != "absolute":
            return "the robot takes relative commands"
        if self._robot.rate_mask.any():
            return "the robot is commanded in velocities: nothing brings it back to where it was"
        steps = list(self._ring)[::-1]
        if self._familiar is not None:
            near = self._familiar.near(np.array([m.measured for m in steps]))
            if not near.any():
                return "nothing familiar within the last seconds"
            if near[0]:
                return "the robot is where demonstrations were"
            steps = steps[: int(np.argmax(near)) + 1]
        if refusal := self._refusal(steps):
            return refusal
        way = _smooth(self._unwound(np.array([m.measured for m in steps])), self.config.smooth_s * self._robot.rate_hz)
        if len(way) < 2 or self._seconds(np.diff(way, axis=0)).sum() < self._robot.dt:
            return "the robot has not moved"
        if collision := self._collision(way):
            return f"on the way back would touch: {collision}"
        self._way, self._scene = way, steps[0]
        return ""

    def next(
        self, obs: Observation, status: Status, last: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32] | None, str]:
        """The command of this tick, float32 [A], or None and why rewinding ends.

        Args:
            obs: Of this tick.
            status: The driver's.
            last: float32 [A], the command sent last.
        """
        if self._way is None:
            return None, "nothing is planned"
        if why := self._disturbance(obs, status, last):
            self._way = None
            return None, f"rewinding ended: {why}"
        if self._clock is None:  # from the last command, so that the first step keeps the limits too
            start = np.where(self._turns, _nearest(last.astype(np.float64), self._way[0]), last)
            self._way = np.concatenate([start[None], self._way])
            self._clock = np.concatenate([[0.0], np.cumsum(self._seconds(np.diff(self._way, axis=0)))])
        left = self._clock[-1] - self._at
        if left <= 1e-9:
            self._way = None
            return None, "rewound to a familiar state" if self._familiar else "rewound as far as is remembered"
        dt, slope = self._robot.dt, 1.0 / self.config.ramp_s
        self._speed = min(self._speed + slope * dt, 1.0, np.sqrt(2 * slope * left) + slope * dt / 2)
        self._at = min(self._at + self._speed * dt, float(self._clock[-1]))
        command = np.array([np.interp(self._at, self._clock, column) for column in self._way.T])
        return np.where(self._arm, command, last).astype(np.float32), ""

    def _seconds(self, steps: FloatArray) -> FloatArray:
        """Shortest time [N] of steps [N, A] within all speed limits."""
        c, steps = self.config, np.abs(steps)
        by_rate = (steps[:, self._arm] / self._rate[self._arm]).max(axis=1, initial=0.0)
        if self._metres.any():
            tip = np.linalg.norm(steps[:, self._metres], axis=1)
        else:
            tip = steps[:, self._joints].sum(axis=1) * c.reach
        return np.maximum(by_rate, tip / c.tip_speed)

    def _refusal(self, steps: list[TimeStep]) -> str:
        c, now = self.config, steps[0]
        grippers = np.array([m.measured[~self._arm] for m in steps])
        if np.ptp(grippers, axis=0).max(initial=0.0) > c.gripper_change:
            return "a gripper was switched"
        for step in steps:
            if step.objects is None or now.objects is None or step.objects.keys() != now.objects.keys():
                return "it is not known where the objects are"
            if moved := self._moved(step.objects, now.objects):
                return f"{moved} was moved"
            for hazard in step.hazards:
                return HAZARDS.get(hazard, hazard)
        return ""

    def _collision(self, way: FloatArray) -> str:
        """What would touch along a way [N, A] that does not at its start; '' where nothing would."""
        if self._touching is None:
            return ""
        here = self._touching(way[0])
        return next((min(new) for waypoint in way[1:] if (new := self._touching(waypoint) - here)), "")

    def _disturbance(self, obs: Observation, status: Status, last: NDArray[np.float32]) -> str:
        c, now = self.config, self._ring[-1]
        error = last - obs.state[: len(last)]
        error = np.where(self._turns, (error + np.pi) % (2 * np.pi) - np.pi, error)
        if (np.abs(error[self._arm]) > c.tracking_error).any():
            return "the robot does not follow"
        if status.get("force", 0.0) > c.max_force:
            return f"{status['force']:.0f} N at the tool"
        if now.hazards:
            return HAZARDS.get(now.hazards[0], now.hazards[0])
        if now.objects is None or self._scene is None or self._scene.objects is None:
            return "it is not known where the objects are"
        moved = self._moved(self._scene.objects, now.objects)
        return f"{moved} was moved" if moved else ""

    def _moved(self, before: dict[str, FloatArray], after: dict[str, FloatArray]) -> str:
        for name, a in before.items():
            b = after[name]
            turn = 2 * np.arccos(np.clip(abs(a[3:] @ b[3:]), 0.0, 1.0))
            if np.linalg.norm(a[:3] - b[:3]) > self.config.object_shift or turn > self.config.object_turn:
                return name
        return ""

    def _unwound(self, way: FloatArray) -> FloatArray:
        return np.where(self._turns, np.unwrap(way, axis=0), way)


def _nearest(angle: FloatArray, to: FloatArray) -> FloatArray:
    return to + (angle - to + np.pi) % (2 * np.pi) - np.pi


def _smooth(way: FloatArray, width: float) -> FloatArray:
    """Low-pass along the first axis by a Hann window ``width`` ticks wide; the ends stay where they are."""
    half = int(width / 2)
    if half < 1 or len(way) < 3:
        return way
    window = np.hanning(2 * half + 3)[1:-1]
    # mirrored through the end points, so that the filter leaves them in place
    head, tail = 2 * way[0] - way[half:0:-1], 2 * way[-1] - way[-2 : -half - 2 : -1]
    padded = np.concatenate([head, way, tail])
    if len(padded) != len(way) + 2 * half:
        return way
    return np.stack([np.convolve(column, window / window.sum(), "valid") for column in padded.T], axis=1)
