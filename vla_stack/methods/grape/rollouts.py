"""Rollouts of a policy for preferences: several from each start, with everything that scoring and training need.

Episodes are those of an evaluation, so what is learnt from is what is measured. The noise of rollout n of a start
follows from (seed, tick, n) alone: a start can be rolled out again, whoever shares its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.data.preferences import EXECUTED, NOISE_SEED, TICK, Arrays, Facts, Rollout
from vla_stack.evaluation.constraints.trace import TraceRecorder
from vla_stack.policies.chain import sample_chain, standard_noise
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.ray_cluster import Where
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Episode, Plan, Start, StepEvent
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import ACTION, OBS_STATE, Chunks, Continuation, Observation, PolicySpec, image_key
from vla_stack.training.recipe import TaskRecipe

TRACE, COLLIDED = "trace", "collided"


class CollisionRecorder:
    """Whether something forbidden was touched."""

    def __init__(self, episode: Episode) -> None:
        self._collided = False

    def step(self, event: StepEvent) -> None:
        self._collided |= bool(event.after.info.get("cost", 0.0))

    def result(self) -> bool:
        return self._collided


@dataclass
class Sampler:
    """The policy, as the engine asks it, which remembers its decisions by the seed of their noise.

    Args:
        policy: The policy.
        sigma: Noise that is injected after each step of its flow, whose chain is then remembered; 0: as deployed.
        remember: Keep decisions until :meth:`taken`.
    """

    policy: ChunkPolicy
    sigma: float = 0.0
    remember: bool = True
    _decisions: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def spec(self) -> PolicySpec:
        return self.policy.spec

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """As of any policy; plans are not continued."""
        replies, execute = self._sample(observations, seeds)
        if self.remember:
            cameras = [c.name for c in self.spec.robot.cameras]
            for observation, seed, reply in zip(observations, seeds, replies, strict=True):
                pictures = {image_key(c): observation.images[c] for c in cameras}
                known = {OBS_STATE: observation.state, TICK: observation.step, **pictures}
                self._decisions[seed] = {**known, **reply, NOISE_SEED: seed}
        return Chunks(np.stack([reply[ACTION] for reply in replies]), execute)

    def taken(self, record: EpisodeRecord) -> Arrays:
        """The decisions of an episode that was executed, in their order, and how many actions of each were."""
        used = {c: int(record.noise[record.chunks == c][0]) for c in dict.fromkeys(record.chunks.tolist()) if c != IDLE}
        kept = [self._decisions.pop(seed) for seed in used.values()]
        decisions: Arrays = {k: np.stack([np.asarray(d[k]) for d in kept]) for k in kept[0]}
        return decisions | {EXECUTED: np.array([(record.chunks == c).sum() for c in used], np.int64)}

    def _sample(
        self, observations: Sequence[Observation], seeds: Sequence[int]
    ) -> tuple[list[Arrays], tuple[int, ...] | None]:
        """For each observation ``action`` [H, A], commands, and ``chain`` [K+1, H, D] where there is one.

        Also how many of the actions are to be executed, where the policy says so; a chain's policy does not.
        """
        if not self.sigma:
            chunks = self.policy.infer(observations, seeds)
            return [{ACTION: a} for a in chunks.actions], chunks.execute
        network = self.policy.policy
        with torch.inference_mode():
            batch = self.policy.preprocess(observations)
            context = network.encode(batch)
            generators = [torch.Generator().manual_seed(s) for s in seeds]
            shape = (network.horizon, network.noise_dim)
            noise = standard_noise(torch.empty(len(seeds), *shape, device=network.config.device), generators)
            noise *= network.noise_scale  # as the policy is deployed
            std = torch.full((1, network.inference_steps, 1, 1), self.sigma, device=noise.device)
            chain = sample_chain(network, context, noise, std, generators)
            commands = self.policy.postprocessor(chain[:, -1, :, : network.action_dim]).float().numpy()
        return [{ACTION: a, "chain": c} for a, c in zip(commands, chain.numpy(force=True), strict=True)], None


def roll_out(
    sampler: Sampler,
    task: TaskRecipe,
    starts: Sequence[Start],
    executor: ExecutorConfig,
    num_envs: int,
    workers: int = 0,
    rollouts: Where = "local",
) -> Iterator[tuple[Rollout, EpisodeRecord]]:
    """Roll out every start; in the order in which they end.

    Args:
        sampler: The policy. Where it remembers, rollouts hold decisions and traces; else their facts alone.
        task: Environment, of ``sim`` where traces are wanted.
        starts: What to roll out.
        executor: As the policy is deployed.
        num_envs, workers, rollouts: See :func:`vla_stack.rollout.engine.run`.
    """
    recorders: dict[str, Any] = {COLLIDED: CollisionRecorder}
    if sampler.remember:
        recorders[TRACE] = TraceRecorder
    plan = Plan(task.id, task.options, sampler.spec, PolicyAgent, recorders, executor)
    for record in run(sampler, plan, starts, num_envs, workers, rollouts):
        collided = record.attached[COLLIDED]
        facts = Facts(record.task, task.id, record.seed, record.number, record.success, record.steps, collided)
        if sampler.remember:
            yield Rollout(facts, sampler.taken(record), record.attached[TRACE].to_arrays()), record
        else:
            yield Rollout(facts, {}, {}), record


def stacked(rollout: Rollout) -> dict[str, NDArray[Any] | list[str]]:
    """A rollout's decisions as a batch of the policy's preprocessor."""
    d = rollout.decisions
    out: dict[str, Any] = {k: v for k, v in d.items() if k not in (EXECUTED, NOISE_SEED, TICK)}
    n = len(d[ACTION])
    return {
        **out,
        "action_is_pad": np.arange(d[ACTION].shape[1]) >= d[EXECUTED][:, None],
        "task": [rollout.facts.task] * n,
        "pair": np.zeros(n, np.int64),
        "side": np.zeros(n, np.int64),
        "decision": np.arange(n),
    }
