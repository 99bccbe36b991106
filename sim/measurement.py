"""Everything that a constraint may speak of, read from the simulator: points by role, contacts, forces, joints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sim.env import ArmEnv

Floats = NDArray[np.float64]


class Measurement:
    """What is measured of a task at a tick.

    ``ee`` is the tool, ``obj.target`` what the instruction moves, ``goal.target`` where to, ``obstacle.<name>`` what
    must not be touched, and ``obj.<name>`` every other keypoint of the task.

    Args:
        env: The task.
    """

    def __init__(self, env: ArmEnv) -> None:
        self._env, self._hazards = env, getattr(env, "obstacles", ())
        self._geoms = {env.model.geom(i).name for i in range(env.model.ngeom)}
        pad = env.model.geom("pad_left").id
        hand = env.model.body_weldid[env.model.body_parentid[env.model.geom_bodyid[pad]]]
        inside = np.zeros(env.model.nbody, bool)  # the hand, and what hangs on it
        for body in range(env.model.nbody):
            inside[body] = body == hand or (body > 0 and inside[env.model.body_parentid[body]])
        self._gripper = inside[env.model.geom_bodyid]

    def points(self) -> dict[str, Floats]:
        """Positions [3], metres, world frame."""
        return {self._role(name): np.asarray(p, np.float64) for name, p in self._env.keypoints().items()}

    def held(self) -> dict[str, bool]:
        """Whether both pads touch it, for what has a geom of its own name."""
        names = [n for n in self._env.keypoints() if n in self._geoms and n not in self._hazards]
        return {self._role(n): self._env.grasped(n) for n in names}

    def pose(self) -> Floats:
        """Pose [7] of the tool: x, y, z (m), then its quaternion w, x, y, z."""
        quaternion, site = np.empty(4), self._env.data.site("tcp")
        mujoco.mju_mat2Quat(quaternion, site.xmat)
        return np.concatenate([site.xpos, quaternion])

    def joints(self) -> Floats:
        """Measured joint angles [J], radians."""
        return self._env.data.qpos[: len(self._env.arm.joints)].copy()

    def joint_range(self) -> Floats:
        """Their limits [J, 2]."""
        return self._env.model.jnt_range[: len(self._env.arm.joints)].copy()

    def wrench(self) -> Floats:
        """Force (N) and torque about the tool (N m), [6], that contacts exert on the gripper; squeezing cancels."""
        model, data = self._env.model, self._env.data
        total, tool = np.zeros(6), data.site("tcp").xpos
        contacts: Any = data.contact
        for i in range(data.ncon):
            first, second = self._gripper[contacts.geom[i]]
            if first == second:
                continue
            local = np.empty(6)
            mujoco.mj_contactForce(model, data, i, local)  # of the first geom on the second, in the contact's frame
            frame = contacts.frame[i].reshape(3, 3)
            sign = 1.0 if second else -1.0
            force, torque = sign * frame.T @ local[:3], sign * frame.T @ local[3:]
            total += np.concatenate([force, torque + np.cross(contacts.pos[i] - tool, force)])
        return total

    def _role(self, name: str) -> str:
        moved, goal = self._env.subjects
        if name == "tcp":
            return "ee"
        if name in self._hazards:
            return f"obstacle.{name}"
        return "obj.target" if name == moved else "goal.target" if name == goal else f"obj.{name}"
