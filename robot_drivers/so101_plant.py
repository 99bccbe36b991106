"""An SO-101-like arm of MuJoCo behind six servos' registers, on the monotonic clock.

What the servos' registers say becomes gains, torque limits and goals of the model's actuators; what the model does
becomes their readings. A hand can take the arm and move it, as one moves a leader, or a follower while calibrating it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_drivers.feetech_servo import TICKS, Servo
from sim.arm import Arm

STALL_NM = 2.94
PER_RAD = TICKS / (2 * np.pi)
HAND_RATE = 4.0  # rad/s
CATCH_UP_S = 0.5  # more than this after a stall is skipped
MAX_HORN = 300  # ticks
TOOTH = TICKS // 25  # of a horn, whose spline has 25 teeth

# Seconds since the hand took the arm -> where it wants it, [J+1] joint and finger angles in radians.
Hand = Callable[[float], NDArray[np.float64]]


class Plant:
    """One arm and, for a follower, the scene of a task.

    Args:
        arm: ``sim.so101.SO101``.
        model: With the arm's joints first.
        data: Of the model.
        rng: How the servos' horns were mounted.

    Attributes:
        servos: One a joint, ids from 1.
        hand: Who holds the arm, None where nobody does.
        range: [J+1, 2] of the joints and the finger, radians.
        push_nm: Torque from outside on each joint [J+1], N m.
        skipped_s: Real time that was not simulated because the process was stalled.
        limp_s: For how long a servo had no torque while no hand held the arm: a real one would have fallen.
    """

    def __init__(self, arm: Arm, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        self.arm, self._model, self._data = arm, model, data
        self._n = len(arm.joints) + arm.fingers
        self.servos = [Servo(i + 1, int(rng.integers(-MAX_HORN, MAX_HORN))) for i in range(self._n)]
        self.range = model.jnt_range[: self._n].copy()
        self._gain, self._bias = model.actuator_gainprm[: self._n].copy(), model.actuator_biasprm[: self._n].copy()
        self._pads = [model.geom(name).id for name in ("pad_left", "pad_right")]
        self._hand: Hand | None = None
        self._hand_s = 0.0
        self._horns = [servo.horn for servo in self.servos]
        self.push_nm = np.zeros(self._n)
        self.skipped_s = self.limp_s = 0.0
        self._now_ns = 0
        self._frozen_at: dict[int, float] = {}
        self._measure(0.0)
        for servo in self.servos:
            servo.hold()

    @property
    def angles(self) -> NDArray[np.float64]:
        """Joint and finger angles [J+1], radians."""
        return self._data.qpos[: self._n].copy()

    def take(self, hand: Hand | None) -> None:
        """Put the arm into a hand, or let go of it. A hand moves it through the table, which spares asking for care."""
        self._model.geom_contype[self._pads] = self._model.geom_conaffinity[self._pads] = int(hand is None)
        self._hand, self._hand_s = hand, 0.0
        for servo in self.servos:
            servo.hold()

    @property
    def middle(self) -> NDArray[np.float64]:
        """Middle of each range [J+1], radians."""
        return self.range.mean(axis=1)

    def goals(self) -> NDArray[np.float64]:
        """What the servos are told to do [J+1]: joints in radians, opening ratio of the gripper."""
        goals = [(s.goal(0.0) - TICKS / 2 - s.horn) / PER_RAD for s in self.servos]
        return np.append(goals[:-1], self.arm.opening(np.array(goals[-1:])))

    def told(self, command: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the arm has to be told [J+1] for it to do ``command``, with horns as they are now; units of both as
        of :meth:`goals`."""
        off = [(servo.horn - horn) / PER_RAD for servo, horn in zip(self.servos, self._horns, strict=True)]
        finger = self.arm.finger(float(command[-1])) + off[-1]
        return np.append(command[:-1] + off[:-1], self.arm.opening(np.array([finger])))

    def push(self, i: int) -> None:
        """Push joint ``i`` away from where its servo wants it, harder than it can hold."""
        self.push_nm[i] = 1.5 * STALL_NM

    def mend(self) -> None:
        """All joints move again, nothing pushes, nothing is hot, all horns are where they were calibrated."""
        self._frozen_at.clear()
        self.push_nm[:] = 0.0
        for servo in self.servos:
            servo.frozen, servo.heat_c = False, 0.0
        if self._horns != [servo.horn for servo in self.servos]:
            for servo, horn in zip(self.servos, self._horns, strict=True):
                servo.horn = horn
            self.carried()

    def freeze(self, i: int) -> None:
        """Joint ``i`` stays where it is whatever it is told, and raises no alarm."""
        self._frozen_at[i] = float(self._data.qpos[i])
        self.servos[i].frozen = True

    def remount(self, i: int) -> None:
        """Put the horn of joint ``i`` back one tooth off: it is 14 degrees below what it reports and is told."""
        self.servos[i].horn += TOOTH
        self.carried()

    def carried(self) -> None:
        """Somebody has put the arm elsewhere: the servos hold what they measure there."""
        self._measure(0.0)
        for servo in self.servos:
            servo.hold()

    def advance(self, now_ns: int) -> None:
        """Simulate up to a monotonic time."""
        dt = self._model.opt.timestep
        behind = (now_ns - self._now_ns) * 1e-9
        if behind > CATCH_UP_S:
            self.skipped_s += 0.0 if self._now_ns == 0 else behind - dt
            self._now_ns = now_ns - round(dt * 1e9)
        steps = int((now_ns - self._now_ns) * 1e-9 / dt)
        if steps > 0:
            self._drive(steps * dt)
            if self._hand is None and not self._frozen_at:
                mujoco.mj_step(self._model, self._data, steps)
            else:
                for _ in range(steps):
                    self._constrain(dt)
                    mujoco.mj_step(self._model, self._data)
            self._measure(steps * dt)
            if self._hand is None and not all(servo["torque_enable"] for servo in self.servos):
                self.limp_s += steps * dt
            self._now_ns += round(steps * dt * 1e9)

    def calibrate(self) -> dict[str, dict[str, int]]:
        """Write a perfect calibration into the servos; returns it in the form of LeRobot's calibration files."""
        out = {}
        for name, servo, (low, high) in zip((*self.arm.joints, "gripper"), self.servos, self.range, strict=True):
            homing = TICKS // 2 + servo.horn - (TICKS // 2 - 1)
            ends = [round(TICKS // 2 - 1 + x * PER_RAD) for x in (low, high)]
            if name == "wrist_roll":  # which LeRobot takes to turn without end
                ends = [0, TICKS - 1]
            servo.calibrate(homing, *ends)
            out[name] = {
                "id": servo["id"], "drive_mode": 0, "homing_offset": homing, "range_min": ends[0], "range_max": ends[1]
            }  # fmt: skip
        self.carried()
        return out

    def _drive(self, dt: float) -> None:
        """Bring what the registers ask for the next ``dt`` seconds to the actuators."""
        m, d = self._model, self._data
        for i, servo in enumerate(self.servos):
            if not servo.changed:
                continue
            servo.changed = False  # until its goal says that it is still on its way
            goal = (servo.goal(dt) - TICKS / 2 - servo.horn) / PER_RAD
            torque = 0.0 if self._hand else servo.torque
            d.ctrl[i] = min(max(goal, self.range[i, 0]), self.range[i, 1])
            scale = servo.stiffness if torque else 0.0
            m.actuator_gainprm[i], m.actuator_biasprm[i] = scale * self._gain[i], scale * self._bias[i]
            m.actuator_forcerange[i] = -STALL_NM * torque, STALL_NM * torque
        d.qfrc_applied[: self._n] = self.push_nm

    def _constrain(self, dt: float) -> None:
        """Move what a hand holds, hold what is frozen."""
        d = self._data
        if self._hand is not None:
            self._hand_s += dt
            q, reach = d.qpos[: self._n], HAND_RATE * dt
            q += np.clip(np.clip(self._hand(self._hand_s), *self.range.T) - q, -reach, reach)
            d.qvel[: self._n] = 0.0
        for i, q_frozen in self._frozen_at.items():
            d.qpos[i], d.qvel[i] = q_frozen, 0.0

    def _measure(self, dt: float) -> None:
        d = self._data
        for i, servo in enumerate(self.servos):
            ticks = TICKS / 2 + servo.horn + d.qpos[i] * PER_RAD
            load = 0.0 if servo.frozen else float(d.actuator_force[i]) / STALL_NM
            servo.measure(ticks, d.qvel[i] * PER_RAD, load, dt)


def resting(angles: NDArray[np.float64]) -> Hand:
    """A hand that brings the arm to one pose and keeps it there."""
    return lambda _: angles


def sweeping(plant: Plant) -> Hand:
    """A hand that moves each joint, the roll excepted, to both ends of its range and back to the middle, for ever.

    Who samples too seldom to see a joint at its end sees it there another time.
    """
    middle = plant.middle
    marks: list[tuple[float, int, float]] = []  # from this time on joint i is to be at this angle
    t = 0.0
    for i, (low, high) in enumerate(plant.range):
        if i != plant.arm.joints.index("wrist_roll"):
            quarter = (high - low) / 2 / HAND_RATE + 0.05
            marks += [(t, i, low), (t + quarter, i, high), (t + 3 * quarter, i, middle[i])]
            t += 4 * quarter
    period = t

    def where(t: float) -> NDArray[np.float64]:
        out = middle.copy()
        for since, i, angle in marks:
            if t % period >= since:
                out[i] = angle
        return out

    return where


def leading(expert: Callable[[], Any], plant: Plant, period_s: float = 0.1) -> Hand:
    """A hand that moves the arm as ``expert`` commands: [J+1], joints in radians and opening ratio."""
    state: dict[str, Any] = {"at": -1.0, "goal": plant.angles}

    def where(t: float) -> NDArray[np.float64]:
        if t >= state["at"] + period_s:
            action = expert()
            state["at"], state["goal"] = t, np.append(action[:-1], plant.arm.finger(float(action[-1])))
        return np.asarray(state["goal"], np.float64)

    return where
