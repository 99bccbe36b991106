"""The native embodiment ``native/arm7``: its description, limits and inverse kinematics."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim.privileged import DIMS as PRIVILEGED
from vla_stack.schema import Camera, Dim, RobotSpec

ControlMode = Literal["ee_abs", "joint_abs", "ee_delta"]

ARM_XML = str(files("sim") / "assets" / "arm7.xml")
NUM_JOINTS = 7
JOINTS = tuple(f"joint_{i + 1}" for i in range(NUM_JOINTS))
FINGER_TRAVEL = 0.04  # m, each finger
CAMERAS = ("front", "wrist")

# Tool down in the middle of the table, elbow up: where the arm starts and what its null space is drawn towards.
POSTURE = np.array([0.0, 0.05, 0.0, -2.35, 0.0, 2.40, np.pi / 4])
MAX_JOINT_RATE = 2.5  # rad/s, the slowest joint of a comparable arm

# Rates leave the scripted experts a margin of about 1.3.
TOOL = (
    Dim("tcp_x.pos", "m", 0.25, 0.66, 0.65),
    Dim("tcp_y.pos", "m", -0.32, 0.32, 0.65),
    Dim("tcp_z.pos", "m", 0.005, 0.36, 0.65),
    Dim("tcp_yaw.pos", "rad", -1.5, 1.5, 2.5, "angle"),
)
GRIPPER = Dim("gripper.pos", "ratio", 0.0, 1.0, np.inf, "gripper")
# [2, 5] smallest and largest tool target with gripper.
TOOL_RANGE = np.array([(d.low, d.high) for d in (*TOOL, GRIPPER)]).T
# What one unit of an ``ee_delta`` action moves, per second: m, m, m, rad, ratio.
DELTA_RATE = np.array([0.6, 0.6, 0.6, 2.0, 5.0])


def robot_spec(
    mode: ControlMode, cameras: tuple[str, ...], image_size: int, rate_hz: float, privileged: bool = False
) -> RobotSpec:
    """What the arm measures and accepts in a control mode; ``state`` begins with what ``action`` commands.

    With ``privileged`` it ends with :data:`sim.privileged.DIMS`, which no arm measures.
    """
    model = _kinematic_model()
    limits = [(float(low), float(high)) for low, high in model.jnt_range[:NUM_JOINTS]]
    named = zip(JOINTS, limits, strict=True)
    joints = tuple(Dim(f"{n}.pos", "rad", low, high, MAX_JOINT_RATE) for n, (low, high) in named)
    action: tuple[Dim, ...] = (*TOOL, GRIPPER)
    state = (*action, *joints)
    if mode == "joint_abs":
        action, state = (*joints, GRIPPER), (*joints, GRIPPER, *TOOL)
    elif mode == "ee_delta":
        action = tuple(Dim(d.name, "1", -1.0, 1.0) for d in action)
    state += PRIVILEGED if privileged else ()
    views = tuple(Camera(c, image_size, image_size) for c in cameras)
    return RobotSpec("native/arm7", state, action, views, rate_hz, "delta" if mode == "ee_delta" else "absolute")


def tool_yaw(xmat: NDArray) -> float:
    """Yaw in radians of a downward-pointing tool from its world rotation matrix, flat [9]."""
    return float(np.arctan2(xmat[3], xmat[0]))


def wrap_angle(x: float) -> float:
    """The equal angle in [-pi, pi)."""
    return float((x + np.pi) % (2 * np.pi) - np.pi)


class InverseKinematics:
    """Damped least squares for a tool that points down, with the null space drawn towards :data:`POSTURE`.

    Each iteration takes dq = J^T (J J^T + l^2 I)^-1 e + (I - J^# J) k (q0 - q), see Buss, "Introduction to Inverse
    Kinematics with Jacobian Transpose, Pseudoinverse and Damped Least Squares methods" (2004), eq. 11 and section 7.
    """

    ITERATIONS = 20
    DAMPING = 0.02
    POSTURE_GAIN = 0.1
    TOLERANCE = 1e-4  # m and rad

    def __init__(self) -> None:
        self._model = _kinematic_model()
        self._data = mujoco.MjData(self._model)
        self._tcp = self._model.site("tcp").id
        self._low, self._high = self._model.jnt_range[:NUM_JOINTS].T
        self._jac = np.zeros((6, self._model.nv))

    def solve(self, tool: NDArray, start: NDArray) -> NDArray[np.float64]:
        """Joint angles [7] in radians that bring the tool to ``tool`` = (x, y, z, yaw) in the world frame.

        Args:
            tool: float [>=4], metres and radians.
            start: float [7], joint angles to begin from; the solution on the same branch is returned. A target out of
                reach yields the closest pose that the iterations found.
        """
        q = np.array(start, np.float64)
        for _ in range(self.ITERATIONS):
            error, jac = self._error(tool, q)
            null = POSTURE - q
            jjt = jac @ jac.T + self.DAMPING**2 * np.eye(6)
            # One solve serves both terms: J^#(e - J k n) + k n.
            dq = jac.T @ np.linalg.solve(jjt, error - jac @ (self.POSTURE_GAIN * null)) + self.POSTURE_GAIN * null
            q = np.clip(q + dq, self._low, self._high)
            if np.abs(error).max() < self.TOLERANCE:
                break
        return q

    def forward(self, q: NDArray) -> NDArray[np.float64]:
        """Tool pose (x, y, z, yaw) for joint angles [7]."""
        self._data.qpos[:NUM_JOINTS] = q
        mujoco.mj_kinematics(self._model, self._data)
        return np.append(self._data.site_xpos[self._tcp], tool_yaw(self._data.site_xmat[self._tcp]))

    def _error(self, tool: NDArray, q: NDArray) -> tuple[NDArray, NDArray]:
        d = self._data
        d.qpos[:NUM_JOINTS] = q
        mujoco.mj_kinematics(self._model, d)
        mujoco.mj_comPos(self._model, d)
        mujoco.mj_jacSite(self._model, d, self._jac[:3], self._jac[3:], self._tcp)
        r = d.site_xmat[self._tcp].reshape(3, 3)
        c, s = np.cos(tool[3]), np.sin(tool[3])
        goal = np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])
        # Half the sum of the cross products of matching axes is the rotation vector, to first order. (Written out:
        # numpy's cross product takes longer than the rest of an iteration.)
        outer = r @ goal.T
        twist = outer - outer.T
        rotation = 0.5 * np.array([twist[1, 2], twist[2, 0], twist[0, 1]])
        error = np.concatenate([tool[:3] - d.site_xpos[self._tcp], rotation])
        return error, self._jac[:, :NUM_JOINTS]


@cache
def _kinematic_model() -> mujoco.MjModel:
    """The arm alone, without a task's objects; read only."""
    return mujoco.MjModel.from_xml_path(ARM_XML)
