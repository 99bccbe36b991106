"""What a policy without cameras has to be told: where the things are that its instruction speaks of.

For experiments on algorithms alone. No robot measures these numbers and no instruction is needed to use them, so a
policy that was trained on them says nothing about seeing or about language.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mujoco
import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Dim

if TYPE_CHECKING:
    from sim.env import ArmEnv

SYMMETRY = np.pi / 2  # whatever is grasped or filled here is square seen from above
ROLES = ("object", "goal")

DIMS: tuple[Dim, ...] = (
    *(
        dim
        for role in ROLES
        for dim in (
            *(Dim(f"{role}_{entry}", "m") for entry in ("dx", "dy", "dz")),
            *(Dim(f"{role}_{entry}", "1") for entry in ("yaw_sin", "yaw_cos")),
        )
    ),
    Dim("goal_joint", "m"),
)

# How far the commanded tool target is ahead of the tool: a delta moves that target, which no measurement tells.
TARGET_DIMS: tuple[Dim, ...] = (
    *(Dim(f"target_{entry}", "m") for entry in ("dx", "dy", "dz")),
    Dim("target_dyaw", "rad"),
    Dim("target_dgripper", "ratio"),
)


def measure(env: ArmEnv) -> NDArray[np.float64]:
    """The entries :data:`DIMS`, float [11].

    For the object that is to be moved and for its goal (``ArmEnv.subjects``): position relative to the tool along the
    axes of the world, and sine and cosine of the world yaw. Then how far the goal's own joint is open, 0 without one.
    """
    tool, subjects = env.tool[:3], env.subjects
    rows = []
    for body in subjects:
        yaw = env.yaw(body, SYMMETRY)
        rows += [*(env.position(body) - tool), np.sin(yaw), np.cos(yaw)]
    joint = int(env.model.body(subjects[1]).jntadr[0])
    slides = joint >= 0 and env.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE.value  # a free joint is the pose
    rows.append(env.data.qpos[env.model.jnt_qposadr[joint]] if slides else 0.0)
    return np.array(rows)
