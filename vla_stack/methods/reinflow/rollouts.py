"""Rollouts for an on-policy learner: whole episodes of the engine, and what the policy sampled at each decision.

An iteration's episodes begin with it and end in it. The noise of a decision follows from its episode's seed and the
control step alone, so they depend on neither the number of environments nor the workers, and a run that is stopped and
resumed between iterations meets the same episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_stack.envs.making import observe as observation_of
from vla_stack.methods.advantages import Experience
from vla_stack.methods.reinflow.loss import Learner, observe
from vla_stack.policies.chain import standard_noise
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.transformer import PrefixContext
from vla_stack.rollout.plan import Episode, StepEvent
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.schema import OBS_STATE, Chunks, Continuation, Observation, PolicySpec

Reward = Literal["success", "task"]
FINAL = "final"  # name of :class:`FinalObservation` among a plan's recorders


class FinalObservation:
    """What an episode showed at its end, as its policy would see it: where a truncated one is bootstrapped."""

    def __init__(self, episode: Episode) -> None:
        self._robot = episode.plan.policy.robot
        self._last: StepEvent | None = None

    def step(self, event: StepEvent) -> None:
        self._last = event

    def result(self) -> Observation | None:
        if self._last is None:
            return None
        return observation_of(self._last.after.observation, self._robot, self._last.observation.task, self._last.k + 1)


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
            records: Episodes, with :class:`FinalObservation` among their recorders.
            reward: ``success`` is 1 in the step that succeeds and 0 otherwise, ``task`` the environment's own.
        """
        gamma, rows, last, rewards, executed = self.learner.config.gamma, [], [], [], []
        episodes = [record for record in records if (record.chunks != IDLE).any()]
        for record in episodes:
            paid = record.rewards.astype(np.float64)
            if reward == "success":
                paid = np.zeros(record.steps)
                paid[-1] = float(record.success)
            for chunk in dict.fromkeys(record.chunks[record.chunks != IDLE].tolist()):
                steps = np.flatnonzero(record.chunks == chunk)
                rows.append(self._decisions[int(record.noise[steps[0]])])
                rewards.append(float((paid[steps] * gamma ** np.arange(len(steps))).sum()))
                executed.append(len(steps))
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
