"""Rollouts for an on-policy learner: whole episodes of the engine, and what the policy sampled at each decision.

An iteration's episodes begin with it and end in it. The noise of a decision follows from its episode's seed and the
control step alone, so they depend on neither the number of environments nor the workers, and a run that is stopped and
resumed between iterations meets the same episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vla_stack.methods.advantages import Experience
from vla_stack.methods.episodes_loop import FINAL
from vla_stack.methods.practice import Reward, chunks_of
from vla_stack.methods.reinflow.loss import Learner, observe
from vla_stack.policies.chain import standard_noise
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.transformer import PrefixContext
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.schema import OBS_STATE, Chunks, Continuation, Observation, PolicySpec


class _Decision(NamedTuple):
    context: PrefixContext
    inputs: Tensor
    state: Tensor
    chain: Tensor


@dataclass
class Explorer:
    """The policy with its chain's noise, as the engine asks it; remembers decisions by the seed of their noise."""

    policy: ChunkPolicy
    learner: Learner
    _decisions: dict[int, _Decision] = field(default_factory=dict)

    @property
    def spec(self) -> PolicySpec:
        return self.policy.spec

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """Commands of one chain an observation; plans are not continued."""
        network = self.learner.policy
        batch = self.policy.preprocess(observations)
        context, inputs = observe(network, batch)
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = standard_noise(torch.empty(len(seeds), network.horizon, network.noise_dim), sources)
        noise *= network.noise_scale
        chain = self.learner.act(context, inputs, noise.to(inputs.device), sources)
        for i, seed in enumerate(seeds):
            row = torch.tensor([i], device=inputs.device)
            self._decisions[seed] = _Decision(context.rows(row), inputs[row], batch[OBS_STATE][row], chain[row])
        return Chunks(self.policy.postprocessor(chain[:, -1, :, : network.action_dim]).float().numpy())

    def experience(self, records: Iterable[EpisodeRecord], reward: Reward) -> Experience:
        """What an iteration's episodes were, a row a decision; forgets the decisions.

        Args:
            records: Episodes, with :class:`~vla_stack.methods.episodes_loop.FinalObservation` among their recorders.
            reward: See :func:`~vla_stack.methods.practice.chunks_of`.
        """
        gamma, rows, last, rewards, executed = self.learner.config.gamma, [], [], [], []
        episodes = [record for record in records if (record.chunks != IDLE).any()]
        for record in episodes:
            for decision in chunks_of(record, reward, gamma):
                rows.append(self._decisions[decision.noise])
                rewards.append(decision.reward)
                executed.append(decision.executed)
                last.append(False)
            last[-1] = True
        self._decisions.clear()
        inputs = torch.cat([row.inputs for row in rows])
        counts = torch.tensor(executed, device=inputs.device)
        ends = torch.tensor(last, device=inputs.device)
        terminated = ends.clone()
        terminated[ends] = torch.tensor([record.terminated for record in episodes], device=inputs.device)
        final = torch.zeros_like(inputs)
        if truncated := [record.attached[FINAL] for record in episodes if not record.terminated]:
            final[ends & ~terminated] = observe(self.learner.policy, self.policy.preprocess(truncated))[1]
        return Experience(
            context=PrefixContext.joined([row.context for row in rows]),
            inputs=inputs,
            state=torch.cat([row.state for row in rows]),
            chain=torch.cat([row.chain for row in rows]),
            executed=counts,
            reward=torch.tensor(rewards, device=inputs.device),
            discount=torch.where(terminated, 0.0, gamma ** counts.float()),
            last=ends,
            final_inputs=final,
            success=torch.tensor([record.success for record in episodes], device=inputs.device),
            steps=int(counts.sum()),
        )
