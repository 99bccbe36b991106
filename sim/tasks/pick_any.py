"""Pick up the thing that the sentence names, from among others of the library."""

from __future__ import annotations

import numpy as np

from sim.sentences import name_thing, order
from sim.tabletop import Tabletop, Wish
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=50,
        rewards={
            "reached": 0.2,  # the tool is where it takes hold of the named thing
            "grasped": 0.3,  # both pads hold it
            "lifted": 0.5,  # it is LIFT above the table, held: success
        },
    )


LIFT = 0.10  # m


class PickAny(Tabletop):
    name = "pick_any"
    config = default_config()

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"pick up the {variant['object']}"

    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        return order(rng, "lift", self.split, name_thing(rng, self.things, self.spots, wish[0], self.split).words)

    def progress(self) -> tuple[bool, ...]:
        return self.reached, self.held, self.held and self.position(self.target)[2] > LIFT

    def expert_goal(self) -> ToolGoal:
        if self.held:
            rise = LIFT + 0.03 - self.position(self.target)[2]
            return ToolGoal(self.tool[:3] + [0.0, 0.0, rise], self.tool[3], 0.0)
        return self.take()
