"""Where a joint-space robot's tool is, and which joint motion moves it: forward and differential inverse kinematics.

A model is MJCF whose joints carry the names of the robot's action dimensions (``joint_1`` for ``joint_1.pos``) and
whose site ``tcp`` is the tool.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec

FloatArray = NDArray[np.float64]
MODELS = {"arm7": "arm7.xml", "so101": "so101.xml"}  # name -> file in sim/assets
SITE = "tcp"
DAMPING = 0.05  # lambda_0 at a singularity: 1 m/s then asks for 1 / (2 * 0.05) = 10 rad/s at most
NEAR_SINGULAR = 0.08  # smallest singular value (m per rad) below which damping sets in
LOOK_AHEAD_S = 0.1  # a joint that would meet its limit within this time slows down


class Kinematics:
    """Kinematics of one robot's action dimensions.

    Args:
        model: Name in :data:`MODELS`, or an MJCF file.
        robot: Its joints; dimensions that the model does not have (a gripper) are left alone.

    Raises:
        UserError: There is no such model, or it shares no joint with the robot.
    """

    def __init__(self, model: str, robot: RobotSpec) -> None:
        path = Path(str(files("sim") / "assets" / MODELS[model])) if model in MODELS else Path(model)
        if not path.is_file():
            raise UserError(f"there is no kinematic model '{model}'", f"use {', '.join(MODELS)} or an MJCF file")
        try:
            self._model = mujoco.MjModel.from_xml_path(str(path))
        except ValueError as e:
            raise UserError(f"{path}: {e}", "give an MJCF file that MuJoCo loads") from e
        self._data = mujoco.MjData(self._model)
        self._site = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_SITE, SITE)
        names = [d.name.removesuffix(".pos") for d in robot.action]
        ids = [mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_JOINT, name) for name in names]
        hinge = [i >= 0 and d.unit == "rad" for i, d in zip(ids, robot.action, strict=True)]
        self.joints = np.flatnonzero(hinge)  # indices into an action
        if self._site < 0 or not len(self.joints):
            raise UserError(f"{path}: no site '{SITE}' or no joint of {robot.name}", "name them as the robot does")
        self._qpos = self._model.jnt_qposadr[[ids[j] for j in self.joints]]
        self._dofs = self._model.jnt_dofadr[[ids[j] for j in self.joints]]
        ranges = self._model.jnt_range[[ids[j] for j in self.joints]]
        self._low = np.maximum(robot.action_low[self.joints], ranges[:, 0])
        self._high = np.minimum(robot.action_high[self.joints], ranges[:, 1])
        rates = np.array([robot.action[j].max_rate for j in self.joints])
        self._rates = np.where(np.isfinite(rates), rates, 2.0)
        self._jacobian = np.zeros((6, self._model.nv))

    def tool(self, action: NDArray[np.floating]) -> FloatArray:
        """Position [3] of the tool in metres, base frame, for joint angles in an action [A], radians."""
        self._data.qpos[self._qpos] = np.asarray(action)[self.joints]
        mujoco.mj_kinematics(self._model, self._data)
        return np.array(self._data.site_xpos[self._site])

    def touching(self, action: NDArray[np.floating]) -> frozenset[str]:
        """Which bodies of the model would touch which ("hand, table") at joint angles in an action [A], radians."""
        self.tool(action)
        mujoco.mj_collision(self._model, self._data)
        return frozenset(
            ", ".join(sorted(self._model.geom(g).name or f"geom {g}" for g in contact.geom))
            for contact in self._data.contact
        )

    def jacobian(self, action: NDArray[np.floating]) -> FloatArray:
        """[6, J]: tool velocity (m/s) and angular velocity (rad/s), base frame, per joint velocity (rad/s)."""
        self.tool(action)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_jacSite(self._model, self._data, self._jacobian[:3], self._jacobian[3:], self._site)
        return self._jacobian[:, self._dofs]

    def joint_velocity(self, action: NDArray[np.floating], twist: NDArray[np.floating]) -> FloatArray:
        """Velocity [A] in rad/s that moves the tool with ``twist``, as nearly as limits and singularities allow.

        Damped least squares, dq = J^T (J J^T + l^2 I)^-1 v, with damping that sets in near a singularity, l^2 = l_0^2
        (1 - (s/e)^2) for a smallest singular value s < e (Chiaverini, Siciliano and Egeland 1994, eq. 15). A joint that
        nears its limit is slowed down and the others make up for it. If a joint were too fast, all are slowed alike,
        which keeps the tool's direction.

        Args:
            action: float [A], where the robot is.
            twist: float [3] (velocity; the tool turns as it likes) or [6] (and angular velocity), base frame.
        """
        full = self.jacobian(action)[: len(twist)]
        q = np.asarray(action, np.float64)[self.joints]
        low, high = np.minimum((self._low - q) / LOOK_AHEAD_S, 0.0), np.maximum((self._high - q) / LOOK_AHEAD_S, 0.0)
        free = np.ones(len(q), bool)
        dq: FloatArray = np.zeros(len(q))
        for _ in range(len(q)):
            rest = np.asarray(twist, np.float64) - full @ np.where(free, 0.0, dq)
            dq = np.where(free, _damped(full * free, rest), dq)
            blocked = free & ((dq > high) | (dq < low))
            if not blocked.any():
                break
            free, dq = free & ~blocked, np.clip(dq, low, high)
        dq = dq / max(1.0, float((np.abs(dq) / self._rates).max()))
        out = np.zeros(np.shape(action))
        out[self.joints] = dq
        return out


def _damped(jacobian: FloatArray, twist: FloatArray) -> FloatArray:
    """Damped least-squares solution [J] of ``jacobian`` [R, J] dq = ``twist`` [R]."""
    u, s, vt = np.linalg.svd(jacobian, full_matrices=False)
    s = s[: np.count_nonzero(jacobian.any(axis=0))]  # a joint that is taken out makes no singularity
    if not len(s):
        return np.zeros(jacobian.shape[1])
    damping = DAMPING**2 * max(0.0, 1.0 - (s[-1] / NEAR_SINGULAR) ** 2)
    solved: FloatArray = vt[: len(s)].T @ (s / (s**2 + damping + 1e-12) * (u[:, : len(s)].T @ twist))
    return solved
