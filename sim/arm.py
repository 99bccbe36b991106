"""Arms: what one measures and accepts, its limits, its inverse kinematics; and ``native/arm7``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.privileged import DIMS as PRIVILEGED
from sim.privileged import TARGET_DIMS
from vla_stack.schema import Camera, Dim, RobotSpec

ControlMode = Literal["ee_abs", "joint_abs", "ee_delta"]

CAMERAS = ("front", "wrist")
GRIPPER = Dim("gripper.pos", "ratio", 0.0, 1.0, np.inf, "gripper")
# What one unit of an ``ee_delta`` action moves, per second: m, m, m, rad, ratio.
DELTA_RATE = np.array([0.6, 0.6, 0.6, 2.0, 5.0])


@dataclass(frozen=True)
class Arm:
    """An arm with a tool that points down and a gripper. Its joints, then its fingers, are the model's first joints.

    Attributes:
        name: Embodiment, e.g. ``native/arm7``.
        xml: Model file with the table, the cameras, a site ``tcp`` and the pads ``pad_left`` and ``pad_right``.
        joints: Names of the joints.
        joint_kind: ``Dim.kind`` of a joint.
        max_joint_rate: Fastest that joint targets move, rad/s.
        posture: Joint angles [J] in radians that the null space is drawn towards, and where searches begin.
        tool: Tool target: x, y, z in metres and yaw in radians.
        fingers: Joints of the gripper.
        closed: Position of a finger's joint where the gripper is closed, metres or radians.
        opened: Where it is open.
        control_mode: What it is commanded in unless an environment is told otherwise.
        measures_tool: Whether ``joint_abs`` states end with the tool's pose.
        interpolates: Whether targets move in a straight line over a control step; otherwise the drives jump to them.
    """

    name: str
    xml: str
    joints: tuple[str, ...]
    joint_kind: Literal["position", "angle"]
    max_joint_rate: float
    posture: tuple[float, ...]
    tool: tuple[Dim, Dim, Dim, Dim]
    fingers: int
    closed: float
    opened: float
    control_mode: ControlMode
    measures_tool: bool
    interpolates: bool

    @property
    def tool_range(self) -> NDArray[np.float64]:
        """[2, 5] smallest and largest tool target with gripper."""
        return np.array([(d.low, d.high) for d in (*self.tool, GRIPPER)]).T

    def finger(self, opening: float) -> float:
        """Position of the finger joints for an opening ratio."""
        return self.closed + opening * (self.opened - self.closed)

    def opening(self, qpos: NDArray) -> float:
        """Opening ratio for the finger joints' positions [F]."""
        return float((qpos.mean() - self.closed) / (self.opened - self.closed))

    def spec(
        self,
        mode: ControlMode,
        cameras: tuple[str, ...],
        image_size: int,
        rate_hz: float,
        privileged: bool = False,
        tool_target: bool = False,
    ) -> RobotSpec:
        """What the arm measures and accepts in a control mode; ``state`` begins with what ``action`` commands.

        With ``privileged`` follow :data:`sim.privileged.DIMS`, which no arm measures; with ``tool_target``
        :data:`sim.privileged.TARGET_DIMS`.
        """
        limits = [(float(low), float(high)) for low, high in _kinematic_model(self.xml).jnt_range[: len(self.joints)]]
        joints = tuple(
            Dim(f"{n}.pos", "rad", low, high, self.max_joint_rate, self.joint_kind)
            for n, (low, high) in zip(self.joints, limits, strict=True)
        )
        action: tuple[Dim, ...] = (*self.tool, GRIPPER)
        state = (*action, *joints)
        if mode == "joint_abs":
            action = (*joints, GRIPPER)
            state = (*action, *self.tool) if self.measures_tool else action
        elif mode == "ee_delta":
            action = tuple(Dim(d.name, "1", -1.0, 1.0) for d in action)
        state += PRIVILEGED if privileged else ()
        state += TARGET_DIMS if tool_target else ()
        views = tuple(Camera(c, image_size, image_size) for c in cameras)
        return RobotSpec(self.name, state, action, views, rate_hz, "delta" if mode == "ee_delta" else "absolute")


ARM7 = Arm(
    name="native/arm7",
    xml=str(files("sim") / "assets" / "arm7.xml"),
    joints=tuple(f"joint_{i + 1}" for i in range(7)),
    joint_kind="position",
    max_joint_rate=2.5,  # the slowest joint of a comparable arm
    # Tool down in the middle of the table, elbow up.
    posture=(0.0, 0.05, 0.0, -2.35, 0.0, 2.40, np.pi / 4),
    # Rates leave the scripted experts a margin of about 1.3.
    tool=(
        Dim("tcp_x.pos", "m", 0.25, 0.66, 0.65),
        Dim("tcp_y.pos", "m", -0.32, 0.32, 0.65),
        Dim("tcp_z.pos", "m", 0.005, 0.36, 0.65),
        Dim("tcp_yaw.pos", "rad", -1.5, 1.5, 2.5, "angle"),
    ),
    fingers=2,
    closed=0.0,
    opened=0.04,  # m, each finger
    control_mode="ee_abs",
    measures_tool=True,
    interpolates=True,
)


def tool_yaw(xmat: NDArray) -> float:
    """Yaw in radians of a downward-pointing tool from its world rotation matrix, flat [9]."""
    return float(np.arctan2(xmat[3], xmat[0]))


def wrap_angle(x: float) -> float:
    """The equal angle in [-pi, pi)."""
    return float((x + np.pi) % (2 * np.pi) - np.pi)


class InverseKinematics:
    """Damped least squares for a tool that points down, with the null space drawn towards the arm's posture.

    Each iteration takes dq = J^T (J J^T + l^2 I)^-1 e + (I - J^# J) k (q0 - q), see Buss, "Introduction to Inverse
    Kinematics with Jacobian Transpose, Pseudoinverse and Damped Least Squares methods" (2004), eq. 11 and section 7.

    Args:
        model: With a site ``tcp``; its first joints are the arm's.
        posture: Joint angles [J] in radians that the null space is drawn towards.
    """

    ITERATIONS = 20
    DAMPING = 0.02
    POSTURE_GAIN = 0.1
    TOLERANCE = 1e-4  # m and rad

    def __init__(self, model: mujoco.MjModel, posture: ArrayLike) -> None:
        self._model = model
        self._data = mujoco.MjData(self._model)
        self._tcp = self._model.site("tcp").id
        self._posture = np.asarray(posture, np.float64)
        self.joints = len(self._posture)
        # Without a null space (six coordinates need six joints) the damping would let the posture pull at the tool.
        self._gain = self.POSTURE_GAIN if self.joints > 6 else 0.0
        self._low, self._high = self._model.jnt_range[: self.joints].T
        self._jac = np.zeros((6, self._model.nv))

    @classmethod
    def of(cls, arm: Arm) -> InverseKinematics:
        """Of an arm."""
        return cls(_kinematic_model(arm.xml), arm.posture)

    def solve(self, tool: NDArray, start: NDArray) -> NDArray[np.float64]:
        """Joint angles [J] in radians that bring the tool to ``tool`` = (x, y, z, yaw) in the world frame.

        Args:
            tool: float [>=4], metres and radians.
            start: float [J], joint angles to begin from; the solution on the same branch is returned. A target out of
                reach yields the closest pose that the iterations found.
        """
        q = np.array(start, np.float64)
        for _ in range(self.ITERATIONS):
            error, jac = self._error(tool, q)
            null = self._gain * (self._posture - q)
            jjt = jac @ jac.T + self.DAMPING**2 * np.eye(6)
            # One solve serves both terms: J^#(e - J k n) + k n.
            dq = jac.T @ np.linalg.solve(jjt, error - jac @ null) + null
            q = np.clip(q + dq, self._low, self._high)
            if np.abs(error).max() < self.TOLERANCE:
                break
        return q

    def forward(self, q: NDArray) -> NDArray[np.float64]:
        """Tool pose (x, y, z, yaw) for joint angles [J]."""
        self._data.qpos[: self.joints] = q
        mujoco.mj_kinematics(self._model, self._data)
        return np.append(self._data.site_xpos[self._tcp], tool_yaw(self._data.site_xmat[self._tcp]))

    def _error(self, tool: NDArray, q: NDArray) -> tuple[NDArray, NDArray]:
        d = self._data
        d.qpos[: self.joints] = q
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
        return error, self._jac[:, : self.joints]


def camera_pose(arm: Arm, name: str) -> tuple[Literal["base", "tool"], tuple[float, ...], tuple[float, ...], float]:
    """Where a camera of an arm with a downward-pointing tool is, and what it sees.

    Returns:
        Whether it is fixed to the ``base`` or to the ``tool``; its position in metres in that frame, which is at the
        tool's point and turned about the vertical by its direction; its rotation [9], columns pointing right, up and
        back in the picture; and its field of view in radians.
    """
    model = _kinematic_model(arm.xml)
    data = mujoco.MjData(model)
    data.qpos[: len(arm.joints)] = arm.posture
    mujoco.mj_forward(model, data)
    camera, tool = model.camera(name).id, model.site("tcp").id
    position, rotation = data.cam_xpos[camera], data.cam_xmat[camera].reshape(3, 3)
    fixed = model.cam_bodyid[camera] == 0
    if not fixed:
        yaw = tool_yaw(data.site_xmat[tool])
        back = np.array([[np.cos(yaw), np.sin(yaw), 0.0], [-np.sin(yaw), np.cos(yaw), 0.0], [0.0, 0.0, 1.0]])
        position, rotation = back @ (position - data.site_xpos[tool]), back @ rotation
    fov = float(np.radians(model.cam_fovy[camera]))
    return "base" if fixed else "tool", tuple(map(float, position)), tuple(map(float, rotation.flat)), fov


@cache
def _kinematic_model(xml: str) -> mujoco.MjModel:
    """The arm alone, without a task's objects; read only."""
    return mujoco.MjModel.from_xml_path(xml)
