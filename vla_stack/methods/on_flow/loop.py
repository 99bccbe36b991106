"""Off-policy learning around a frozen flow policy: practise, keep the decisions, update, evaluate as deployed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_stack.methods.episodes_loop import EpisodesLoop
from vla_stack.methods.off_policy import learner as learners
from vla_stack.methods.on_flow.decisions import joined
from vla_stack.methods.on_flow.learner import FlowLearner, means
from vla_stack.methods.on_flow.rollouts import Explorer, Lived, demonstrations
from vla_stack.methods.practice import check_no_history, check_resumed
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.schema import PolicySpec
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import plain

DEMONSTRATIONS = "demonstrations.safetensors"  # in the run's folder: what the policy makes of them takes minutes


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint notes."""
    facts: dict[str, Any] = json.loads((checkpoint / ckpt.STATE / "state.json").read_text())
    return facts


class FlowLoop(EpisodesLoop[Lived]):
    """See :class:`EpisodesLoop`."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        super().__init__(recipe, run_dir)
        base, r = self.policy.policy.requires_grad_(False).eval(), self.method
        steps = int(self.policy.spec.extras["n_action_steps"])
        check_no_history(recipe.policy.pretrained, self.policy.spec.history)
        if self.saved is not None:
            keys = self.experience_keys()
            check_resumed(keys, facts_of(self.saved).get("experience", keys))  # older checkpoints do not say
        first = self.first()
        with torch.no_grad():
            seen = base.observed(base.encode(first), first).shape[-1]
        self.learner: FlowLearner = r.learner(base, seen, steps, None, recipe.seed)
        self.explorer: Explorer = Explorer(self._around(self.learner.explorer()))
        if r.remembers and recipe.data.root:
            root = Path(recipe.data.root[0])
            about = f"{self.policy.spec.model_version} {r}"
            self.learner.offline = demonstrations(
                *(self.explorer, root, recipe.data.episodes, steps, r.reward, r.gamma), run_dir / DEMONSTRATIONS, about
            )
        self.resume()

    def practise(self, seeds: Sequence[int]) -> Lived:
        """One episode a seed, in the order of the seeds; in the warm-up the base acts as it is."""
        self.explorer.alone = not self.learnt
        return super().practise(seeds)

    def experience(self, records: Sequence[EpisodeRecord]) -> Lived:
        return self.explorer.experience(records, self.method.reward, self.method.gamma)

    def update(self, data: Lived, generator: torch.Generator) -> dict[str, float]:
        """Keep the decisions, and learn from all there are, once for each; of the warm-up's once it is over."""
        self.learner.store = joined([self.learner.store, data.decisions])
        now, warmup = self.iteration + 1, self.method.warmup
        if now < warmup or not len(self.learner.store):
            return {}
        kept = len(self.learner.store) if now == warmup else data.count
        return means([self.learner.update() for _ in range(self.updates(kept))])

    def updates(self, kept: int) -> int:
        """How many to do for so many decisions more."""
        return kept

    @property
    def learnt(self) -> bool:
        """Whether there has been anything to learn from."""
        return self.iteration >= self.method.warmup and len(self.learner.store) > 0

    def deployed(self) -> ChunkPolicy:
        return self._around(self.learner.network(self.learnt))

    def networks(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.learner.agent.named_parameters()

    def fill(self, directory: Path) -> None:
        learners.save(self.learner, directory / ckpt.STATE)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        learners.load(self.learner, checkpoint / ckpt.STATE)
        return facts_of(checkpoint)

    def facts(self) -> dict[str, Any]:
        return {"experience": self.experience_keys()}

    def experience_keys(self) -> dict[str, Any]:
        """What decides what kept decisions, their rewards and their discounts are, as JSON has it."""
        method, spec = dataclasses.asdict(self.method), self.policy.spec
        own = ("name", "reward", "judge", "gamma", "samples", "magnitude")
        task, steps = dataclasses.asdict(self.recipe.task), int(spec.extras["n_action_steps"])
        about: dict[str, Any] = {"task": task, "policy.pretrained": spec.model_version, "n_action_steps": steps}
        experience: dict[str, Any] = plain(about | {key: method[key] for key in own if key in method})
        return experience

    def _around(self, network: Any) -> ChunkPolicy:
        """A policy around the base, with the base's processors."""
        spec = self.policy.spec
        extras = {**spec.extras, "type": network.config.type, "continues": []}
        around = PolicySpec(spec.robot, spec.horizon, extras=extras)
        return ChunkPolicy(network.eval(), self.policy.preprocessor, self.policy.postprocessor, around)
