"""Press the named one of three buttons; another one pressed ends the episode."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import library, objects, skills
from sim.sentences import name_thing, order
from sim.slots import Thing
from sim.tabletop import Tabletop, Wish
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=40,
        rewards={
            "above": 0.2,  # the tool is above the named button, closed
            "touched": 0.3,  # a finger is on it
            "pressed": 0.5,  # it is PRESSED deep: success
        },
    )


BUTTONS = 3
BASE, CAP = (0.034, 0.010), (0.022, 0.011)  # m, radius and half height
TRAVEL, PRESSED = 0.012, 0.007  # m
TIP = 0.009  # m, from the tool's point down to the fingertips
STEEL = (0.35, 0.38, 0.43)
NEW_COLOURS = ("turquoise", "pink")  # that no button has in training


def button_name(i: int) -> str:
    return f"button_{i}"


class Press(Tabletop):
    name = "press"
    config = default_config()
    variants = ({"object": "button"}, {"object": "switch"})  # round, and square: never seen in training
    count = 1  # something else on the table, for relations
    gap = 0.115

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"press the {variant['object']}"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        for i in range(BUTTONS):
            body = spec.worldbody.add_body(name=f"{button_name(i)}_base", mocap=True)
            objects.add_geom(body, f"{button_name(i)}_base", "cylinder", [*BASE, 0], STEEL, z=BASE[1])
            cap = body.add_body(name=button_name(i), pos=[0, 0, 2 * BASE[1] + TRAVEL - CAP[1]])
            cap.add_joint(
                name=button_name(i), type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[0, 0, -1], range=[0.0, TRAVEL],
                limited=mujoco.mjtLimited.mjLIMITED_TRUE, stiffness=150.0, damping=2.0,
            )  # fmt: skip
            for shape in ("cylinder", "box"):
                size = [CAP[0], CAP[1], 0] if shape == "cylinder" else [CAP[0] * 0.9, CAP[0] * 0.9, CAP[1]]
                objects.add_geom(cap, f"{button_name(i)}_{shape}", shape, size, (1, 1, 1), mass=0.02)
            spec.add_exclude(bodyname1=body.name, bodyname2=cap.name)

    def draw_variant(self, rng: np.random.Generator) -> int:
        return int(self.split == "unseen-objects")

    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        first, *others = (str(c) for c in rng.permutation([c for c in library.PALETTE if c not in NEW_COLOURS]))
        if self.split == "unseen-compositions":
            first = str(rng.choice(NEW_COLOURS))
        kind = self.variant["object"]
        self.buttons = tuple(Thing(kind, c) for c in (first, *others[: BUTTONS - 1]))
        return (Thing(str(rng.choice(library.SEEN)), others[BUTTONS]),)

    def furnish(self, rng: np.random.Generator) -> None:
        super().furnish(rng)
        for i, button in enumerate(self.buttons):
            for shape in ("cylinder", "box"):
                geom = self.model.geom(f"{button_name(i)}_{shape}")
                shown = (shape == "box") == (button.kind == "switch")
                geom.rgba = [*library.PALETTE[button.colour], float(shown)]
                geom.contype = geom.conaffinity = int(shown)

    def lay_out(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        spots = objects.spread(rng, BUTTONS + 1, *self.area, self.gap)
        self.button_spots = spots[:BUTTONS]
        return spots[BUTTONS:], rng.uniform(-0.7, 0.7, 1)

    def place(self, rng: np.random.Generator) -> None:
        super().place(rng)
        for i, spot in enumerate(self.button_spots):
            objects.lay(self, f"{button_name(i)}_base", spot)

    def wishes(self, rng: np.random.Generator) -> list[Wish]:
        return [(i, "", -1) for i in range(BUTTONS)]

    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        scene, spots = (*self.buttons, *self.things), np.vstack([self.button_spots, self.spots])
        return order(rng, "press", self.split, name_thing(rng, scene, spots, wish[0], self.split).words)

    @property
    def target(self) -> str:
        return button_name(self.wish[0])

    def depth(self, i: int) -> float:
        """How far a button is pressed, metres."""
        return float(self.data.joint(button_name(i)).qpos[0])

    def progress(self) -> tuple[bool, ...]:
        offset = self.tool[:2] - self.position(self.target)[:2]
        above = bool(np.hypot(*offset) < CAP[0] and self.tool[4] < 0.3)
        return above, self.touched(self.target), self.depth(self.wish[0]) > PRESSED

    def failed(self) -> bool:
        return any(self.depth(i) > PRESSED for i in range(BUTTONS) if i != self.wish[0])

    @property
    def named(self) -> dict[str, tuple[str, str]]:
        buttons = {button_name(i): (button.kind, button.colour) for i, button in enumerate(self.buttons)}
        return buttons | super().named

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, *map(button_name, range(BUTTONS)))

    def expert_goal(self) -> ToolGoal:
        button = self.position(self.target)
        top = 2 * BASE[1] + TRAVEL
        goal = np.array([*button[:2], top - TRAVEL + TIP])
        return skills.over(self, goal, self.tool[3], 0.0, clearance=0.05)
