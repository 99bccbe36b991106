"""What happens where an old and a new chunk plan the same control steps.

Every rule is a function of the two plans over the steps that are still to come. Positions are blended linearly, angles
that can turn on without end along the shorter arc (between its stops a joint has one way only); a gripper is never
blended, it follows the newer plan (half a grasp is no grasp). No embodiment here commands an orientation by more than
one such angle: one that does needs a blend on the sphere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.timeline import MergeRule, Timeline
from vla_stack.schema import RobotSpec

ENSEMBLE_DECAY = 0.01  # m of ACT's temporal ensembling
CROSSFADE_STEPS = 4

Blend = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]


def merge_rule(name: str, robot: RobotSpec) -> MergeRule:
    """The rule of a name.

    Args:
        name: ``replace``: the newest chunk wins wherever it plans. ``append``: what is planned stays, the newest chunk
            continues it. ``crossfade``: the newest takes over within a few steps. ``ensemble``: the average of all
            chunks that plan a step, older ones heavier (ACT).
        robot: Says how the entries of an action may be blended.

    Raises:
        UserError: There is no such rule.
    """
    rules: dict[str, MergeRule] = {
        "replace": lambda old, new: new,
        "append": append,
        "crossfade": lambda old, new: crossfade(old, new, blender(robot)),
        "ensemble": lambda old, new: ensemble(old, new, blender(robot)),
    }
    if name not in rules:
        raise UserError(f"merge rule '{name}' does not exist", f"use one of {', '.join(rules)}")
    return rules[name]


def append(old: Timeline, new: Timeline) -> Timeline:
    """What is planned stays; the newest chunk only continues it."""
    if not len(old.actions):
        return new
    return old.followed_by(new.since(old.end)) if new.end > old.end else old


def crossfade(old: Timeline, new: Timeline, blend: Blend, steps: int = CROSSFADE_STEPS) -> Timeline:
    """From the old plan to the new one within ``steps`` control steps; for chunks that do not agree at the seam."""
    n = min(steps, len(old.actions), len(new.actions))
    share = (np.arange(1, n + 1) / (steps + 1)).astype(np.float32)
    return _with_head(new, blend(old.actions[:n], new.actions[:n], share))


def ensemble(old: Timeline, new: Timeline, blend: Blend, decay: float = ENSEMBLE_DECAY) -> Timeline:
    """Weighted average of all chunks, ``exp(-decay * j)`` for the j-th oldest (Zhao et al. 2023, arXiv:2304.13705).

    A row's votes are the chunks that it already averages, so the average is carried on without keeping them.
    """
    n = min(len(old.actions), len(new.actions))
    votes = old.votes[:n]
    before = -np.expm1(-decay * votes) / -np.expm1(-decay)  # sum of the weights of j = 0 ... votes - 1
    weight = np.exp(-decay * votes)
    share = (weight / (before + weight)).astype(np.float32)
    merged = _with_head(new, blend(old.actions[:n], new.actions[:n], share))
    merged = replace(merged, votes=np.concatenate([votes + 1, new.votes[n:]]))
    return merged if old.end <= new.end else merged.followed_by(old.since(new.end))


def blender(robot: RobotSpec) -> Blend:
    """Function of two plans, float32 [n, A] each, and the share of the second, [n], that blends them entry by entry."""
    gripper = robot.gripper_mask
    angle = np.array([d.kind == "angle" for d in robot.action], bool)
    angle &= np.isinf(robot.action_low) & np.isinf(robot.action_high)

    def blend(
        old: Float[np.ndarray, "n a"], new: Float[np.ndarray, "n a"], share: Float[np.ndarray, " n"]
    ) -> NDArray[np.float32]:
        way = new - old
        way[:, angle] = np.remainder(way[:, angle] + np.pi, 2 * np.pi) - np.pi
        out = old + share[:, None] * way
        out[:, gripper] = new[:, gripper]
        return out.astype(np.float32)

    return blend


def _with_head(plan: Timeline, head: NDArray[np.float32]) -> Timeline:
    """A plan whose first actions are others."""
    return replace(plan, actions=np.concatenate([head, plan.actions[len(head) :]]))
