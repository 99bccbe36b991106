"""ReinFlow from a trained policy: roll out with a noisy chain, update, evaluate without the noise; again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vla_stack.methods.advantages import Experience
from vla_stack.methods.episodes_loop import EpisodesLoop
from vla_stack.methods.reinflow.loss import Learner, observe
from vla_stack.methods.reinflow.noise import fit_noise
from vla_stack.methods.reinflow.rollouts import Explorer
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.recipe import Recipe

NEVER = 2**32 - 1  # an iteration that no run comes to
WEIGHTS = f"{ckpt.STATE}/learner.safetensors"


class ReinFlowLoop(EpisodesLoop[Experience]):
    """See :class:`EpisodesLoop`; where ``method.fit_episodes`` asks for it, the noise is fitted to the policy first."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        super().__init__(recipe, run_dir)
        network = self.policy.policy
        config = base_config(network.config)
        steps = "num_steps" if hasattr(config, "num_steps") else "num_inference_steps"
        setattr(config, steps, self.method.denoising_steps)  # what the saved policy will be served with
        assert network.inference_steps == self.method.denoising_steps
        first = self.first()
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.learner = Learner(network, observe(network, first)[1].shape[-1], self.method).to(network.config.device)
        self.explorer: Explorer = Explorer(self.policy, self.learner)
        self.resume()

    def begin(self) -> None:
        if self.method.fit_episodes:
            low, high = fit_noise(self.learner, lambda: self.practise(self._seeds_of_fit()))
            self.learner.set_noise(low, high)

    def practise(self, seeds: Sequence[int]) -> Experience:
        """One episode a seed with the chain's noise, in the order of the seeds."""
        self.learner.schedule(self.iteration / max(1, self.method.iterations))
        return super().practise(seeds)

    def experience(self, records: Sequence[EpisodeRecord]) -> Experience:
        return self.explorer.experience(records, self.method.reward)

    def update(self, data: Experience, generator: torch.Generator) -> dict[str, float]:
        """Learn from an iteration's episodes."""
        return self.learner.update(data, generator, self.iteration < self.method.critic_warmup)

    def deployed(self) -> ChunkPolicy:
        """The policy without the noise."""
        return self.policy

    def networks(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.learner.named_parameters()

    def fill(self, directory: Path) -> None:
        tensors = {k: p.detach().contiguous() for k, p in self.learner.named_parameters() if not k.startswith("_")}
        save_file(tensors, directory / WEIGHTS)
        ckpt.save_state(directory, ckpt.state_of(self.learner, self.learner.optimizer, None))

    def load(self, checkpoint: Path) -> dict[str, Any]:
        state = ckpt.load_state(checkpoint, self.learner, self.learner.optimizer, None)
        weights = load_file(checkpoint / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self.learner.named_parameters():
                parameter.copy_(weights[name])
        self.learner.set_noise(*state.get("noise", self.learner.bounds))
        return state

    def facts(self) -> dict[str, Any]:
        return {"noise": list(self.learner.bounds)}

    def _seeds_of_fit(self) -> list[int]:
        """Scenes that no iteration meets."""
        entropy = np.random.SeedSequence((self.recipe.seed, NEVER))
        return [int(s) >> 1 for s in entropy.generate_state(self.method.fit_episodes)]
