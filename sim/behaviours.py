"""What an arm does in data for world models: more than an expert's successes, or a model learns to repair failures."""

from __future__ import annotations

from typing import Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from sim.expert import HIGH, LOW, MISS, Expert

Kind = Literal["expert", "clumsy", "beside", "drops", "waypoints", "look_away"]
SHARES: dict[Kind, float] = {
    "expert": 0.30,
    "clumsy": 0.25,
    "beside": 0.15,
    "drops": 0.08,
    "waypoints": 0.14,
    "look_away": 0.08,
}
SEGMENT = 12  # control steps for which a clumsy expert is wrong in one way
BESIDE = (0.012, 0.045)  # m from where it should be: from what still succeeds to what cannot
HOLDS = (2, 8)  # control steps with the gripper closed, after which it opens
DROPS = 4  # control steps for which it does
# Levels of noise on what is executed (`Expert.perturb`), one of them an episode. Policies do not move as smoothly as
# experts: what they command has to lie within the data, and where such commands lead has to be learnt.
SHAKES: dict[Kind, tuple[float, ...]] = {
    "expert": (0.0, 0.3, 0.6),
    "clumsy": (0.0, 0.6, 1.5),
    "beside": (0.0, 0.3, 0.6),
    "drops": (0.0, 0.3, 0.6),
}
HOVER = 0.14  # m above the table, from where the wrist camera sees a cube
AWAY = 9  # control steps out of sight: more than two chunks of a world model


def deal(seed: int) -> Kind:
    """The behaviour of an episode, in the shares of :data:`SHARES`; a function of its seed alone."""
    kinds = list(SHARES)
    return kinds[np.random.default_rng([seed, 1]).choice(len(kinds), p=list(SHARES.values()))]


class Behaviour:
    """Acts in a ``sim`` environment in one of several ways; used as an :class:`~sim.expert.Expert` is.

    - ``expert``: the expert, with little or no noise on its commands.
    - ``clumsy``: the expert, but every 12 steps off in another direction, and sometimes with the wrong gripper. It
      misses, drops and knocks things over, and sometimes succeeds. Its noise is larger.
    - ``beside``: the expert, off to one side all the time. It does as if it succeeded, and mostly does not: what it
      closes its gripper on is not in it.
    - ``drops``: the expert, but once its gripper was closed for some steps it opens it, wherever it is.
    - ``waypoints``: random tool poses, half of them at an object.
    - ``look_away``: over an object, far from it, and back: what is there again was there all the time.

    Args:
        env: A ``sim`` environment.
        kind: Which.
        seed: Seed of everything random.
        beside: How far to one side, metres, from and to.
    """

    def __init__(self, env: gym.Env, kind: Kind, seed: int = 0, beside: tuple[float, float] = BESIDE) -> None:
        shake = float(np.random.default_rng([seed, 3]).choice(SHAKES.get(kind, (0.0,))))
        self._env, self._expert, self._kind = env.unwrapped, Expert(env, shake, seed), kind
        self._rng = np.random.default_rng([seed, 2])
        self._beside, self._step, self._until = beside, 0, 0
        self._offset: NDArray[np.float64] = np.zeros(3)
        self._goal: NDArray[np.float64] = np.zeros(3)
        self._yaw, self._gripper, self._flip = 0.0, 1.0, False
        self._closed, self._holds = 0, int(self._rng.integers(*HOLDS))  # steps; of a row, and until it drops
        self.subject = str(self._rng.choice(sorted(set(self._env.keypoints()) - {"tcp"})))  # type: ignore[attr-defined]

    def act(self) -> NDArray[np.float32]:
        """The next action, in the environment's control mode."""
        if self._kind == "expert":
            return self._expert.act()
        if self._step == self._until:
            self._plan()
        self._step += 1
        if self._kind in ("waypoints", "look_away"):
            return self._expert.towards(self._goal, self._yaw, self._gripper)
        goal = self._env.expert_goal()  # type: ignore[attr-defined]
        gripper = 1.0 - goal.gripper if self._flip else goal.gripper
        if self._kind == "drops":
            self._closed = self._closed + 1 if gripper < 0.5 or self._closed > self._holds else 0
            if self._closed > self._holds:
                gripper = 1.0
            if self._closed > self._holds + DROPS:
                self._closed, self._holds = 0, int(self._rng.integers(*HOLDS))
        return self._expert.towards(goal.position + self._offset, goal.yaw, gripper)

    def perturb(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is executed instead of ``action``."""
        return self._expert.perturb(action)

    def _plan(self) -> None:
        """What to do until the next plan."""
        rng = self._rng
        if self._kind in ("beside", "drops"):
            self._until = -1  # once for all
            if self._kind == "beside":
                around, away = rng.uniform(0, 2 * np.pi), rng.uniform(*self._beside)
                self._offset = away * np.array([np.cos(around), np.sin(around), 0.0])
            return
        if self._kind == "clumsy":
            self._until += SEGMENT
            self._offset = np.append(rng.normal(0.0, MISS, 2), rng.normal(0.0, MISS / 2))
            self._flip = bool(rng.random() < 0.15)
            return
        here = self._env.keypoints()[self.subject]  # type: ignore[attr-defined]
        self._yaw = float(rng.uniform(-0.8, 0.8))
        if self._kind == "look_away":
            away = (self._until // AWAY) % 2 == 1
            aside = np.array([rng.uniform(0.32, 0.36), -0.28 * np.sign(here[1] or 1.0), rng.uniform(0.2, 0.3)])
            self._goal = aside if away else np.array([*here[:2], HOVER])
            self._until += AWAY
            return
        self._until += int(rng.integers(5, 13))
        self._goal = rng.uniform(LOW, HIGH)
        self._gripper = float(rng.random() < 0.6)
        if rng.random() < 0.5:
            self.subject = str(rng.choice(sorted(set(self._env.keypoints()) - {"tcp"})))  # type: ignore[attr-defined]
            self._goal = self._env.keypoints()[self.subject] + rng.normal(0.0, 0.015, 3)  # type: ignore[attr-defined]
            self._goal[2] = max(self._goal[2], LOW[2])


def make_behaviour(env: gym.Env, kind: Kind, seed: int = 0) -> Behaviour:
    """A :class:`Behaviour` for an environment that was just reset."""
    return Behaviour(env, kind, seed)
