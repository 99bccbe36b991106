"""Rollouts for an on-policy learner: whole episodes in several environments at once, one batch a decision.

An iteration's episodes begin with it and end in it, so that they depend on its seeds and generator alone: a run that is
stopped and resumed between iterations meets the same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.envs.making import observe as observation_of
from vla_stack.methods.advantages import Experience
from vla_stack.methods.reinflow.loss import Learner, observe
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.transformer import PrefixContext
from vla_stack.schema import OBS_STATE, Observation

Reward = Literal["success", "task"]


@dataclass
class _Episode:
    """One that runs: where its decisions lie among all, and what they earned."""

    observation: Observation
    rows: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    terminated: bool = False
    over: bool = False
    success: bool = False


class Rollouts:
    """Environments and the policy that acts in them.

    Args:
        policy: The policy, with its processors; the learner's own network.
        learner: Noise and options.
        envs: Environments that advance at the same time.
        reward: ``success`` is 1 in the step that succeeds and 0 otherwise, ``task`` the environment's own.
    """

    def __init__(self, policy: ChunkPolicy, learner: Learner, envs: Sequence[gym.Env], reward: Reward) -> None:
        self._policy, self._learner, self._envs, self._reward = policy, learner, envs, reward
        self._execute = policy.spec.extras["n_action_steps"]

    def live(self, seeds: Sequence[int], generator: torch.Generator, explore: bool = True) -> Experience:
        """One episode a seed.

        Args:
            seeds: Of the environments.
            generator: Source of all noise.
            explore: With the chain's noise; without, as the policy is deployed.
        """
        contexts: list[PrefixContext] = []
        inputs: list[Tensor] = []
        states: list[Tensor] = []
        chains: list[Tensor] = []
        episodes: list[_Episode] = []
        running: dict[gym.Env, _Episode] = {}
        left, count = list(reversed(seeds)), 0
        for env in self._envs:
            self._begin(env, left, running, episodes)
        while running:
            acting = list(running.items())
            batch = self._policy.preprocess([e.observation for _, e in acting])
            context, seen = observe(self._learner.policy, batch)
            chain = self._learner.act(context, seen, self._noise(len(acting), generator), generator, explore)
            commands = self._policy.postprocessor(chain[:, -1, :, : self._learner.policy.action_dim]).float().numpy()
            contexts.append(context)
            inputs.append(seen)
            states.append(batch[OBS_STATE])
            chains.append(chain)
            for row, (env, episode) in enumerate(acting):
                episode.rows.append(count + row)
                self._execute_chunk(env, episode, commands[row])
                if episode.over:
                    del running[env]
                    self._begin(env, left, running, episodes)
            count += len(acting)
        order = torch.tensor([row for e in episodes for row in e.rows])
        tensors = (torch.cat(x)[order] for x in (inputs, states, chains))
        return self._experience(episodes, PrefixContext.joined(contexts).rows(order), *tensors)

    def _begin(self, env: gym.Env, left: list[int], running: dict[gym.Env, _Episode], episodes: list[_Episode]) -> None:
        if left:
            raw, info = env.reset(seed=left.pop())
            running[env] = _Episode(observation_of(raw, self._policy.spec.robot, info["task"], 0))
            episodes.append(running[env])

    def _noise(self, n: int, generator: torch.Generator) -> Tensor:
        policy = self._learner.policy
        noise = torch.randn(n, policy.horizon, policy.noise_dim, generator=generator)
        return (noise * getattr(policy.config, "noise_scale", 1.0)).to(policy.config.device)

    def _execute_chunk(self, env: gym.Env, episode: _Episode, commands: NDArray[np.float32]) -> None:
        """Carry out a chunk, or as much of it as the episode has room for."""
        total, discount = 0.0, 1.0
        for k in range(self._execute):
            raw, own, episode.terminated, truncated, info = env.step(commands[k])
            success = bool(info["is_success"])
            total += discount * (float(success) if self._reward == "success" else float(own))
            discount *= self._learner.config.gamma
            episode.success |= success
            episode.over = episode.terminated or truncated
            if episode.over:
                break
        step = episode.observation.step + k + 1
        episode.observation = observation_of(raw, self._policy.spec.robot, info["task"], step)
        episode.executed.append(k + 1)
        episode.reward.append(total)

    def _experience(
        self, episodes: list[_Episode], context: PrefixContext, inputs: Tensor, state: Tensor, chain: Tensor
    ) -> Experience:
        device = inputs.device
        ends = [(e, i + 1 == len(e.rows)) for e in episodes for i in range(len(e.rows))]
        executed = torch.tensor([k for e in episodes for k in e.executed], device=device)
        last = torch.tensor([end for _, end in ends], device=device)
        terminated = torch.tensor([end and e.terminated for e, end in ends], device=device)
        final = torch.zeros_like(inputs)
        truncated = [e.observation for e in episodes if not e.terminated]
        if truncated:
            final[last & ~terminated] = observe(self._learner.policy, self._policy.preprocess(truncated))[1]
        return Experience(
            context=context,
            inputs=inputs,
            state=state,
            chain=chain,
            executed=executed,
            reward=torch.tensor([r for e in episodes for r in e.reward], device=device),
            follow=torch.where(terminated, 0.0, self._learner.config.gamma ** executed.float()),
            last=last,
            final_inputs=final,
            success=torch.tensor([e.success for e in episodes], device=device),
            steps=int(executed.sum()),
        )
