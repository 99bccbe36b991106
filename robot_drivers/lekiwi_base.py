"""The emulated base of a LeKiwi: three omniwheels, servos in velocity mode beside the arm's on its bus.

A wheel drives on at the velocity that it was told last, as a real one does: nothing but a command stops it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from robot_drivers.feetech_servo import TICKS, Servo

WHEELS = ("base_left_wheel", "base_back_wheel", "base_right_wheel")
FIRST_ID = 7
WHEEL_M, BASE_M = 0.05, 0.125  # radii of a wheel and of the base
LAG_S = 0.02  # in which a wheel makes up 63 % of a change of its velocity
PER_RAD = TICKS / (2 * np.pi)
VELOCITY_MODE = 1
MAX_DT_S = 0.5


class LeKiwiBase:
    """Three wheels on the monotonic clock.

    Attributes:
        servos: One a wheel.
        path_m: How far the middle of the base has come, m.
    """

    def __init__(self) -> None:
        self.servos = [Servo(FIRST_ID + i) for i in range(len(WHEELS))]
        self.path_m = 0.0
        self._angle, self._velocity = np.zeros(3), np.zeros(3)  # ticks, ticks/s
        self._now_ns = 0
        mounted = np.radians(np.array([240, 0, 120]) - 90)  # as LeRobot has them
        self._to_body = np.linalg.inv(np.stack([np.cos(mounted), np.sin(mounted), np.full(3, BASE_M)], axis=1))

    @property
    def velocity(self) -> NDArray[np.float64]:
        """Forward and sideways, m/s, and turning, rad/s."""
        body: NDArray[np.float64] = self._to_body @ (self._velocity / PER_RAD * WHEEL_M)
        return body

    def calibration(self) -> dict[str, dict[str, int]]:
        """In the form of LeRobot's calibration files."""
        return {
            name: {"id": s["id"], "drive_mode": 0, "homing_offset": 0, "range_min": 0, "range_max": TICKS - 1}
            for name, s in zip(WHEELS, self.servos, strict=True)
        }

    def advance(self, now_ns: int) -> None:
        """Roll up to a monotonic time."""
        dt = min((now_ns - self._now_ns) * 1e-9, MAX_DT_S) if self._now_ns else 0.0
        self._now_ns = now_ns
        driven = [s["goal_velocity"] if s.torque and s["mode"] == VELOCITY_MODE else 0 for s in self.servos]
        self._velocity += (np.array(driven) - self._velocity) * (1 - np.exp(-dt / LAG_S))
        self._angle += self._velocity * dt
        self.path_m += float(np.hypot(*self.velocity[:2])) * dt
        for servo, angle, velocity in zip(self.servos, self._angle, self._velocity, strict=True):
            servo.measure(float(angle), float(velocity), 0.0, dt)
