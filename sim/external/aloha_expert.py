"""A scripted expert for gym-aloha's cube transfer: key poses by closed-form inverse kinematics, joined in joint space.

The plan depends on where the cube starts and on the time; as its actions are absolute targets, they lead back to the
plan from wherever noise has taken the arms. The forearm stays unrolled, since the package's position servo of that
joint is far weaker than its friction: each arm works in the vertical plane through its base and its goal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.external.benchmark import BenchmarkExpert

if TYPE_CHECKING:
    from sim.external.aloha import AlohaEnv

# ViperX 300, metres: height of the shoulder, elbow seen from there at zero angle (forward, up), forearm, wrist to tip.
SHOULDER, ELBOW, FOREARM, HAND = 0.127, (0.0596, 0.3), 0.3, 0.215
BASE = {"left": np.array([-0.469, 0.5]), "right": np.array([0.469, 0.5])}
HEADING = {"left": 1.0, "right": -1.0}  # sign of x towards the other arm

PITCH = 1.05  # rad, how far the right hand points down
MEET = np.array([0.02, 0.5, 0.27])  # m, where the cube changes hands
OPEN, CLOSED = 1.0, 0.0
NOISE = 0.1  # rad, at noise=1
LEFT_FREE, RIGHT_FREE = 3.2, 1.8  # s, until when an arm may be pushed about: a grasp that is shaken is lost


class TransferExpert(BenchmarkExpert):
    """The right hand picks the cube up, the left one takes it; made after a reset, for that episode."""

    def __init__(self, env: AlohaEnv, noise: float, seed: int) -> None:
        gripper = np.array([d.kind == "gripper" for d in env.spec_robot.action])
        super().__init__(np.where(gripper, 0.0, NOISE), noise, seed)
        self._dt, self._step = env.spec_robot.dt, 0
        start = env.measure()
        self._left, self._right = plan(env.data.qpos[-7:-4].copy(), start[:7], start[7:])

    def act(self) -> NDArray[np.float32]:
        self._step += 1
        t = self._step * self._dt
        return np.concatenate([at(self._left, t), at(self._right, t)]).astype(np.float32)

    def perturb(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        noisy, t = super().perturb(action), self._step * self._dt
        return np.where(t < np.repeat([LEFT_FREE, RIGHT_FREE], 7), noisy, action)


Plan = list[tuple[float, NDArray[np.float64]]]  # seconds, targets [7] of one arm


def plan(cube: NDArray[np.float64], left: NDArray[np.float64], right: NDArray[np.float64]) -> tuple[Plan, Plan]:
    """Key poses of both arms.

    Args:
        cube: Position [3], metres.
        left: Where the left arm starts, as in the state [7].
        right: Where the right arm starts.
    """
    above, low = cube + (0.0, 0.0, 0.10), cube + (0.0, 0.0, -0.005)
    # The arm stands at an angle to the cube; this roll brings the fingers back in line with its sides.
    across = (cube[:2] - BASE["right"]) * HEADING["right"]
    square = float(np.arctan2(across[1], across[0] * np.sin(PITCH)))
    take = MEET + (-0.015, 0.0, 0.0)
    ready = take + (-0.13, 0.0, 0.0)
    turned = np.pi / 2  # the fingers of the left hand close from above and below, those of the right from the sides
    return [
        (0.0, left),
        (1.8, left),
        (3.2, pose("left", ready, 0.0, OPEN, turned)),
        (4.2, pose("left", take, 0.0, OPEN, turned)),
        (4.4, pose("left", take, 0.0, OPEN, turned)),
        (4.8, pose("left", take, 0.0, CLOSED, turned)),
    ], [
        (0.0, right),
        (1.2, pose("right", above, PITCH, OPEN, square)),
        (1.8, pose("right", low, PITCH, OPEN, square)),
        (2.1, pose("right", low, PITCH, OPEN, square)),
        (2.4, pose("right", low, PITCH, CLOSED, square)),
        (3.6, pose("right", MEET, PITCH, CLOSED, square)),
    ]


def at(poses: Plan, t: float) -> NDArray[np.float64]:
    """Targets [7] at ``t`` seconds, on straight lines between key poses."""
    times = [time for time, _ in poses]
    return np.array([np.interp(t, times, column) for column in np.stack([p for _, p in poses]).T])


def pose(side: str, tip: NDArray[np.float64], pitch: float, gripper: float, roll: float = 0.0) -> NDArray[np.float64]:
    """Targets [7] that bring the fingertips of an arm to a point.

    Args:
        side: ``left`` or ``right``.
        tip: Position [3], metres, world frame.
        pitch: How far the hand points down, rad.
        gripper: Opening ratio.
        roll: Turn of the wrist about the hand's axis, rad.
    """
    out = (tip[:2] - BASE[side]) * HEADING[side]
    forward, up = np.hypot(*out) - HAND * np.cos(pitch), tip[2] + HAND * np.sin(pitch) - SHOULDER
    upper, reach = np.hypot(*ELBOW), np.hypot(forward, up)
    # The triangle of upper arm, forearm and the line from shoulder to wrist, elbow up; angles above the horizontal.
    inner = np.arccos(np.clip((upper**2 + reach**2 - FOREARM**2) / (2 * upper * reach), -1.0, 1.0))
    arm = np.arctan2(up, forward) + inner
    fore = np.arctan2(up - upper * np.sin(arm), forward - upper * np.cos(arm))
    shoulder = np.arctan2(ELBOW[1], ELBOW[0]) - arm
    return np.array([np.arctan2(out[1], out[0]), shoulder, -fore - shoulder, 0.0, pitch + fore, roll, gripper])
