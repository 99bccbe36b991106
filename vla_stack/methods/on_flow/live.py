"""Learning beside a robot: it acts and records, the learner reads what was recorded, and what it learnt is served.

Three programs that wait for no other, each of which may be killed and started again:

    vla serve --policy RUN --follow               the run's newest checkpoint, between a robot's episodes
    vla run --record episodic --root DATA         acts; or a console, where a person may take over
    vla train rl_robot method.live=DATA output_dir=RUN

An episode counts once it is committed, so what is learnt from is what the disk holds, and a run that was stopped goes
on with the episode after the last one of its checkpoint. As in HIL-SERL (Luo et al., arXiv:2410.21845) what a person
did is kept with the demonstrations as well, which are half of each batch; where somebody takes over, the policy has
failed (RLIF, :func:`~vla_stack.methods.on_flow.rollouts.recorded_episode`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset
from vla_stack.data.labels import content_uid
from vla_stack.data.layout import read_info
from vla_stack.errors import UserError
from vla_stack.methods.on_flow.decisions import joined
from vla_stack.methods.on_flow.loop import FlowLoop
from vla_stack.methods.on_flow.rollouts import Lived, Recorded, by_hand, open_recorded, recorded_episode
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.schema import ACTION, OBS_STATE, Observation
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.recipe import Recipe
from vla_stack.training.stop import Stop

POLL_S = 0.5
COMMIT_S = 30.0  # that a dataset may be between two states, while its writer commits
NICE = 10  # below whoever drives a robot on the same computer


class Stopped(Exception):
    """Somebody asked for it while nothing was to be done."""


class LiveLoop(FlowLoop):
    """See :class:`~vla_stack.methods.episodes_loop.EpisodesLoop`; what it practises is what a robot does."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self._live, self._stop, self._over = Path(recipe.method.live), Stop(), False  # type: ignore[attr-defined]
        self.consumed = 0  # recorded episodes that were learnt from, the first ones
        self._dataset: Dataset | None = None  # as it was last
        self._newest: int | None = None  # what is in the last of them, and of those that were read
        self._read_last: int | None = None
        super().__init__(recipe, run_dir)

    def run(self) -> Path:
        os.nice(NICE)
        with self._stop:
            try:
                return super().run()
            except Stopped:
                self._over = True
                self.save()
                print(f"stopped after {self.iteration} iterations: vla train --resume {self.run_dir}", flush=True)
                return ckpt.path(self.run_dir / "checkpoints", self.iteration)

    def first(self) -> dict[str, object]:
        """A preprocessed batch of an observation in the dark."""
        robot = self.policy.spec.robot
        images: dict[str, NDArray[np.uint8]] = {
            c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in robot.cameras
        }
        return self.policy.preprocess([Observation(np.zeros(len(robot.state), np.float32), images, "")])

    def resume(self) -> None:
        super().resume()
        if not self.consumed:
            return
        dataset = self._wait(self.consumed)
        if self._newest is not None and self._uid(dataset, self.consumed - 1) != self._newest:
            raise UserError(
                f"{self._live} is not what the run has learnt from: its episode {self.consumed - 1} is another one",
                "give method.live the dataset that it began with, or start a new run with an output_dir of its own",
            )
        self._remember([self._read(dataset, i) for i in range(self.consumed) if by_hand(dataset, i).any()])

    def practise(self, seeds: Sequence[int]) -> Lived:
        """As many recorded episodes as there are seeds, once they are there."""
        first = self.consumed
        dataset = self._wait(first + len(seeds))
        found = [self._read(dataset, i) for i in range(first, first + len(seeds))]
        self._remember(found)
        self._read_last = self._uid(dataset, first + len(seeds) - 1)
        success = torch.tensor([episode.success for episode in found])
        lived = Lived(joined(episode.decisions for episode in found), success, sum(episode.steps for episode in found))
        if not lived.count:
            steps = self.policy.spec.extras["n_action_steps"]
            print(
                f"{self._live}: nothing can be learnt from episodes {first} to {first + len(seeds) - 1}: each is"
                f" shorter than {steps} actions, or misses a tick at least once in {steps}: see the robot's log",
                flush=True,
            )
        return lived

    def update(self, data: Lived, generator: torch.Generator) -> dict[str, float]:
        self.consumed += len(data.success)
        self._newest = self._read_last
        return super().update(data, generator)

    def facts(self) -> dict[str, object]:
        """How many episodes are behind it: an iteration may have had another number of them than it has now."""
        return super().facts() | {"episodes": self.consumed, "newest": self._newest}

    def load(self, checkpoint: Path) -> dict[str, Any]:
        state = super().load(checkpoint)
        self.consumed = state.get("episodes", state["step"] * self.method.episodes)  # older checkpoints do not say
        self._newest = state.get("newest")
        return state

    def updates(self, kept: int) -> int:
        """As many as in practice, where a chunk is one decision; here one of each of its frames is kept."""
        return max(1, kept // int(self.policy.spec.extras["n_action_steps"]))

    def evaluate(self) -> dict[str, object]:
        """Nothing: the robot's own episodes tell."""
        return {}

    def deployed(self) -> ChunkPolicy:
        """The policy that the robot tries next, and in the end the one that was learnt."""
        over = self._over or self.iteration == self.method.iterations
        return self._around(self.learner.network(self.learnt, explores=self.learnt and not over))

    def _read(self, dataset: Dataset, number: int) -> Recorded:
        r, steps = self.method, int(self.policy.spec.extras["n_action_steps"])
        return recorded_episode(self.explorer, dataset, number, steps, r.reward, r.gamma)

    def _remember(self, episodes: Sequence[Recorded]) -> None:
        """Keep what a person did with the demonstrations."""
        theirs = [episode.decisions.some(episode.human) for episode in episodes if episode.human.any()]
        if theirs:
            self.learner.offline = joined([*filter(None, (self.learner.offline,)), *theirs])

    def _uid(self, dataset: Dataset, number: int) -> int:
        rows = slice(int(dataset.episode_from[number]), int(dataset.episode_to[number]))
        return int(content_uid(dataset.columns[OBS_STATE][rows], dataset.columns[ACTION][rows]))

    def _wait(self, wanted: int) -> Dataset:
        """The robot's dataset, once it holds ``wanted`` episodes.

        Raises:
            Stopped: Before that.
            UserError: The dataset is damaged, or does not fit the policy.
        """
        told, failing_since = -1, 0.0
        while not self._stop.asked:
            if (held := _held(self._live)) >= wanted:
                try:
                    self._dataset = open_recorded(self.policy, self._live, self._dataset)
                    return self._dataset
                except UserError:  # a commit changes several files
                    failing_since = failing_since or time.monotonic()
                    if time.monotonic() - failing_since > COMMIT_S:
                        raise
            elif held != told:
                told = held
                print(f"waiting for episode {wanted} of {self._live}, it holds {held}", flush=True)
            time.sleep(POLL_S)
        raise Stopped


def _held(root: Path) -> int:
    """Episodes of a dataset, 0 where there is none yet."""
    try:
        return int(read_info(root)["total_episodes"])
    except UserError:
        return 0
