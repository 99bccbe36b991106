"""Chunk labels of perturbed episodes, by branching a clean expert from every state that is visited.

Where commands are perturbed (Laskey et al., "DART", 2017), the clean label of the next frame answers noise that nobody
could foresee, so the series of labels is no chunk that an expert would execute: from its second step on it scatters.
What a chunk policy is to learn is what the expert would do from this state if nobody disturbed it.

Success ends an episode, so that a series of actions never says what comes after it. Where actions are targets, a branch
does: it holds the last one. A policy that is not taught so goes on: pushing a cube that has to rest in its zone, from
pictures, it pushed each one through, 0 of 20 scenes. After 300 more steps on the same 650 episodes it was 3 of 20
without the hold and 18 with it, one training seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium as gym

LONGEST = 500  # control steps that the expert has, without pictures


class Branches:
    """The clean expert's chunk from each state of an episode.

    It rolls out in a twin of the environment, so that the episode's own is only read. The expert must have no memory,
    as those of ``sim`` and MetaWorld promise, and both environments ``get_state`` and ``set_state``.

    Args:
        twin: The same task without cameras, so that a step is physics alone.
        make_expert: From an environment that has been reset to its clean expert; with ``noise`` and ``seed`` to its
            perturbed one.
        horizon: Steps of a chunk, H.
    """

    def __init__(self, twin: gym.Env, make_expert: Callable[..., Any], horizon: int) -> None:
        self._twin: Any = twin.unwrapped  # its wrapper's time limit is the episode's, not the branch's
        # A move that is repeated moves on.
        self._holds = twin.unwrapped.spec_robot.action_kind == "absolute"  # type: ignore[attr-defined]
        self._make_expert, self._horizon = make_expert, horizon

    def begin(self, seed: int) -> None:
        """Begin the episode of an environment seed."""
        self._twin.reset(seed=seed)
        self._expert = self._make_expert(self._twin)
        self._actions: deque[NDArray[np.float32]] = deque()
        self._states: deque[NDArray[np.float64]] = deque()  # before each of the actions, and after the last
        self._ended = self._succeeded = False

    def chunk(self, env: gym.Env, given: Sequence[NDArray[np.float32]] = ()) -> tuple[NDArray[np.float32], int]:
        """What the expert would do from where an environment stands.

        Where the episode followed the branch, as it does at every step without noise, the branch is only prolonged:
        the expert would do the same again.

        Args:
            env: The episode's environment, after :meth:`begin` with its seed.
            given: Actions [A] that somebody else takes first. The chunk begins with them, and goes on with what the
                expert would do after them.

        Returns:
            float32 [H, A], the last action repeated once the branch has ended (success, or a failure for good), and
            how many of them are to be learnt: all, where it ended with success and its actions are targets, else those
            that were acted.
        """
        state = env.unwrapped.get_state()  # type: ignore[attr-defined]
        if not len(given) and len(self._states) > 1 and np.array_equal(state, self._states[1]):
            self._states.popleft()
            self._actions.popleft()
        else:
            self._twin.set_state(state)
            self._states, self._actions, self._ended, self._succeeded = deque([state]), deque(), False, False
        while len(self._actions) < self._horizon and not self._ended:
            n = len(self._actions)
            action = given[n] if n < len(given) else self._expert.act()
            _, _, terminated, _, info = self._twin.step(action)
            self._succeeded = bool(info["is_success"])
            self._ended = bool(terminated or self._succeeded)
            self._actions.append(action)
            self._states.append(self._twin.get_state())
        acted = len(self._actions)
        chunk = np.stack([self._actions[min(i, acted - 1)] for i in range(self._horizon)])
        if len(given):
            self._states.clear()  # it was not the expert's
        return chunk, self._horizon if self._succeeded and self._holds else acted

    def drive(self, seed: int, **how: float) -> list[NDArray[np.float64]]:
        """An episode of the perturbed expert, without pictures; :meth:`begin` has to follow before :meth:`chunk`.

        Args:
            seed: Of environment and perturbation.
            how: ``noise`` and ``errors`` of ``sim.Expert``.

        Returns:
            The state before each of its steps until it succeeds; none where it does not.
        """
        self._twin.reset(seed=seed)
        expert = self._make_expert(self._twin, seed=seed, **how)
        states: list[NDArray[np.float64]] = []
        while len(states) < LONGEST:
            states.append(self._twin.get_state())
            _, _, terminated, _, info = self._twin.step(expert.perturb(expert.act()))
            if info["is_success"]:
                return states
            if terminated:
                break
        return []

    def mended(self, states: Sequence[NDArray[np.float64]]) -> int:
        """From how many states of an episode, in order, the expert still does the task: all those before it was lost.

        What is lost stays lost, so that few of them are tried: first the last one, and then between two halves.
        """
        kept, lost = 0, len(states)
        at = lost - 1
        while kept < lost:
            if self._succeeds(states[at]):
                kept = at + 1
            else:
                lost = at
            at = (kept + lost) // 2
        return kept

    def _succeeds(self, state: NDArray[np.float64]) -> bool:
        """Whether the expert does the task from a state."""
        self._twin.set_state(state)
        self._states.clear()
        for _ in range(LONGEST):
            _, _, terminated, _, info = self._twin.step(self._expert.act())
            if terminated or info["is_success"]:
                return bool(info["is_success"])
        return False

    def close(self) -> None:
        self._twin.close()
