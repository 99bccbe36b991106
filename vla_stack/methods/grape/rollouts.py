"""Rollouts of a policy for preferences: several from each start, with everything that scoring and training need.

Episodes are those of an evaluation (``evaluation.episode``), so what is learnt from is what is measured. The noise of
rollout n of a start follows from (seed, tick, n) alone: a start can be rolled out again, whoever shares its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.data.preferences import EXECUTED, NOISE_SEED, TICK, Arrays, Facts, Rollout
from vla_stack.envs.making import make_env, options_for
from vla_stack.evaluation.constraints.trace import Traced
from vla_stack.policies.chain import sample_chain, standard_noise
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.rollout.episode import Episode, EpisodeConfig, Query, run_episode
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import ACTION, OBS_STATE, Observation, image_key

Start = tuple[int, int]  # seed of the start, number of the rollout


class Watched(gym.Wrapper):
    """Remembers whether something forbidden was touched since the last reset."""

    collided = False

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.collided = False
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        out = self.env.step(action)
        self.collided |= bool(out[-1].get("cost", 0.0))
        return out


@dataclass
class Sampler:
    """Chunks with their randomness; with ``sigma`` by the noisy chain, which is kept, else as deployed."""

    policy: ChunkPolicy
    sigma: float = 0.0

    def __call__(self, observations: Sequence[Observation], seeds: Sequence[int]) -> list[Arrays]:
        """For each observation ``action`` [H, A], commands, and ``chain`` [K+1, H, D] where there is one."""
        if not self.sigma:
            return [{ACTION: a} for a in self.policy.infer(observations, seeds).actions]
        network = self.policy.policy
        with torch.inference_mode():
            batch = self.policy.preprocess(observations)
            context = network.encode(batch)
            generators = [torch.Generator().manual_seed(s) for s in seeds]
            shape = (network.horizon, network.noise_dim)
            noise = standard_noise(torch.empty(len(seeds), *shape, device=network.config.device), generators)
            std = torch.full((1, network.inference_steps, 1, 1), self.sigma, device=noise.device)
            chain = sample_chain(network, context, noise, std, generators)
            commands = self.policy.postprocessor(chain[:, -1, :, : network.action_dim]).float().numpy()
        return [{ACTION: a, "chain": c} for a, c in zip(commands, chain.numpy(force=True), strict=True)]


@dataclass
class _Running:
    """An episode under way in its environment."""

    env: Watched
    start: Start
    episode: Episode
    query: Query
    decisions: list[dict[str, Any]] = field(default_factory=list)


def roll_out(
    sampler: Sampler, env_id: str, starts: Sequence[Start], executor: ExecutorConfig, num_envs: int, traced: bool = True
) -> Iterator[tuple[Rollout, EpisodeRecord]]:
    """Roll out every start; in the order in which they end.

    Args:
        sampler: The policy.
        env_id: Environment, of ``sim`` where traces are wanted.
        starts: What to roll out.
        executor: As the policy is deployed.
        num_envs: Episodes at a time.
        traced: Keep traces, and decisions; without, rollouts hold their facts alone.
    """
    spec = sampler.policy.spec
    options = options_for(env_id, spec)
    config = EpisodeConfig(env_id, options, spec, executor)
    waiting = list(reversed(starts))
    made = [make_env(env_id, spec, options) for _ in range(min(num_envs, len(starts)))]
    free = [Watched(Traced(env) if traced else env) for env in made]
    running: list[_Running] = []
    while waiting or running:
        while free and waiting:
            env, start = free.pop(), waiting.pop()
            episode = run_episode(env, config, start[0])
            running.append(_Running(env, start, episode, next(episode)))
        seeds = [_noise_seed(r.query.seed, r.start[1]) for r in running]
        replies = sampler([r.query.observation for r in running], seeds)
        still = []
        for r, seed, reply in zip(running, seeds, replies, strict=True):
            if traced:
                r.decisions.append({**_observed(r.query.observation, spec.robot.cameras), **reply, NOISE_SEED: seed})
            try:
                r.query = r.episode.send((reply[ACTION], 0))
                still.append(r)
            except StopIteration as end:
                yield _finished(r, end.value, env_id, traced), end.value
                free.append(r.env)
        running = still
    for used in made:
        used.close()


def _observed(observation: Observation, cameras: Sequence[Any]) -> dict[str, Any]:
    pictures = {image_key(c.name): observation.images[c.name] for c in cameras}
    return {OBS_STATE: observation.state, TICK: observation.step, **pictures}


def _finished(r: _Running, record: EpisodeRecord, env_id: str, traced: bool) -> Rollout:
    facts = Facts(record.task, env_id, r.start[0], r.start[1], record.success, record.steps, r.env.collided)
    if not traced:
        return Rollout(facts, {}, {})
    used = [c for c in dict.fromkeys(record.chunks.tolist()) if c != IDLE]  # in the order of the requests
    kept = r.decisions[: len(used)]
    decisions: Arrays = {k: np.stack([np.asarray(d[k]) for d in kept]) for k in kept[0]}
    decisions[EXECUTED] = np.array([(record.chunks == c).sum() for c in used], np.int64)
    inner: Any = r.env.env
    return Rollout(facts, decisions, inner.trace().to_arrays())


def _noise_seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(2))


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
