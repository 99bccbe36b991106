"""What may stop a robot from going back the way it came: where things are, and whether a held one touches another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sim.env import ArmEnv


class Scene:
    """One episode's; make a new one after each reset.

    Args:
        env: As reset.
    """

    def __init__(self, env: ArmEnv) -> None:
        model, self._data = env.model, env.data
        self._pads = [model.geom(name).id for name in ("pad_left", "pad_right")]
        self._body = model.geom_bodyid.copy()
        arm = model.body_rootid[self._body[self._pads[0]]]
        self._arm = model.body_rootid == arm  # bool [bodies]
        movable = [b for b in range(1, model.nbody) if model.body_jntnum[b] and not self._arm[b]]
        self._movable = {model.body(b).name: b for b in movable}

    def objects(self) -> dict[str, list[float]]:
        """Pose of every body that can move and is not the arm's: [x y z qw qx qy qz], world frame, metres."""
        d = self._data
        return {name: [*d.xpos[b].tolist(), *d.xquat[b].tolist()] for name, b in self._movable.items()}

    def hazards(self) -> list[str]:
        """``held_object_contact`` while something between both pads touches anything but the arm, else nothing."""
        geoms = self._data.contact.geom
        bodies = self._body[geoms]
        held = [set(bodies[(geoms == pad).any(axis=1)].ravel().tolist()) for pad in self._pads]
        for body in held[0] & held[1]:
            others = bodies[(bodies == body).any(axis=1)].ravel()
            if not self._arm[body] and np.any((others != body) & ~self._arm[others]):
                return ["held_object_contact"]
        return []
