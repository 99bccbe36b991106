"""Push the cube into the zone of the named colour."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=60,
        rewards={
            "reached": 0.2,  # the tool is low behind the cube
            "moving": 0.3,  # 8 cm of the way are left
            "pushed": 0.5,  # the cube rests within INSIDE of the zone's centre: success
        },
        start=(0.36, 0.0, 0.16),
    )


ZONE_RADIUS = 0.055  # m
INSIDE = 0.04  # m
PUSH_HEIGHT = 0.018  # m
# Half open, the fingers touch the cube at two points and it stays between them. Pushed by closed fingers, at one point,
# it turns away from under them: that asks for corrections finer than a pixel.
FORK = 0.45
CONTACT = objects.CUBE + 0.010  # m, tool to cube centre while pushing
RUN_UP = 0.02  # m, how far behind the contact point the tool comes down
PUSH = 0.018  # m a control step: a faster push kicks the cube past its zone
YAW = 1.4  # rad, as far as the tool turns
ASIDE = 0.025  # m, beside the line of the push: from further out the tool goes round


def zone_name(colour: str) -> str:
    return f"zone_{colour}"


class Push(ArmEnv):
    name = "push"
    config = default_config()
    variants = tuple({"colour": c} for c in objects.COLOURS)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"push the cube to the {variant['colour']} zone"

    @property
    def zone(self) -> NDArray[np.float64]:
        return self.position(zone_name(self.variant["colour"]))[:2]

    @property
    def subjects(self) -> tuple[str, str]:
        return "cube", zone_name(self.variant["colour"])

    def build(self, spec: mujoco.MjSpec) -> None:
        objects.add_cube(spec, "cube", (0.45, 0.30, 0.60))
        for colour, rgb in objects.COLOURS.items():
            zone = spec.worldbody.add_body(name=zone_name(colour), mocap=True)
            soft = (0.35 + 0.65 * rgb[0], 0.35 + 0.65 * rgb[1], 0.35 + 0.65 * rgb[2])
            objects.add_mark(zone, zone_name(colour), "cylinder", [ZONE_RADIUS, 0.0005, 0], soft, z=0.0005)

    def place(self, rng: np.random.Generator) -> None:
        for colour, y in zip(rng.permutation(list(objects.COLOURS)), (-0.15, 0.0, 0.15), strict=True):
            dx, dy = rng.uniform(-0.02, 0.02, 2)
            objects.lay(self, zone_name(str(colour)), (0.56 + dx - abs(y) / 4, y + dy))
        objects.lay(self, "cube", rng.uniform((0.40, -0.06), (0.44, 0.06)), objects.CUBE, rng.uniform(-0.6, 0.6))

    def progress(self) -> tuple[bool, ...]:
        cube = self.position("cube")[:2]
        behind, aside = self._behind()
        left = float(np.hypot(*(self.zone - cube)))
        resting = bool(np.hypot(*self.data.joint("cube").qvel[:2]) < 0.05)
        resting &= bool(self.position("cube")[2] < objects.CUBE + 0.01)  # nobody carries it
        reached = 0.0 < behind < 0.08 and abs(aside) < 0.02 and self.tool[2] < 0.04
        return reached, left < 0.08, left < INSIDE and resting

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, "cube", *map(zone_name, objects.COLOURS))

    def expert_goal(self) -> ToolGoal:
        cube = self.position("cube")[:2]
        along = self.zone - cube
        left = float(np.hypot(*along))
        along = along / max(left, 1e-6)
        # The fingers stand across the way of the push; front and back are alike, so half a turn is never needed.
        turn = float(np.arctan2(along[1], along[0])) - self.tool[3]
        yaw = float(np.clip(self.tool[3] + turn - np.pi * np.round(turn / np.pi), -YAW, YAW))
        behind, aside = self._behind()
        if left < 0.4 * INSIDE:
            return ToolGoal(self.tool[:3], self.tool[3], FORK)
        if self.tool[2] < objects.CUBE + 0.012 and behind > 0.5 * objects.CUBE and abs(aside) < ASIDE:
            goal = cube + along * (max(min(left, PUSH), behind - CONTACT) - behind)
            return ToolGoal(np.array([*goal, PUSH_HEIGHT]), yaw, FORK)
        start = cube - along * (CONTACT + RUN_UP)
        return skills.over(self, np.array([*start, PUSH_HEIGHT]), yaw, FORK, clearance=0.06)

    def _behind(self) -> tuple[float, float]:
        """How far the tool is behind the cube, seen from the zone, and how far beside that line; metres."""
        cube = self.position("cube")[:2]
        along = (self.zone - cube) / max(float(np.hypot(*(self.zone - cube))), 1e-6)
        rel = self.tool[:2] - cube
        return float(-rel @ along), float(rel @ np.array([-along[1], along[0]]))
