"""Success of a policy with everything that a report says of it: what ``vla eval`` and every training call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vla_stack import envs
from vla_stack.envs.making import IMAGINED, nameless
from vla_stack.evaluation.metrics import boundary_discontinuity
from vla_stack.ray_cluster import Where
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import ChunkPolicy, run
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.plan import Episode, Instruct, Plan, Start, StepEvent
from vla_stack.rollout.records import EpisodeRecord, EvalResult
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import RobotSpec

OnEpisode = Callable[[EpisodeRecord], None]
GUARDS = "guards"


class GuardRecorder:
    """Which guards of a world model did not believe an episode any longer, a tuple of names."""

    def __init__(self, episode: Episode) -> None:
        self._tripped: tuple[str, ...] = ()

    def step(self, event: StepEvent) -> None:
        self._tripped = event.after.info.get(GUARDS, ())

    def result(self) -> tuple[str, ...]:
        return self._tripped


def evaluate(
    policy: ChunkPolicy,
    env_id: str,
    episodes: int = 100,
    seed: int = 1000,
    executor: ExecutorConfig | None = None,
    latency: Latency = Latency(),
    instruct: Instruct = None,
    num_envs: int = 8,
    workers: int = 0,
    rollouts: Where = "local",
    env_options: dict[str, Any] | None = None,
    on_episode: OnEpisode | None = None,
) -> EvalResult:
    """Roll a policy out under the virtual clock.

    Episode i has seed ``seed + i`` whatever the number of environments, and the policy's noise follows from that seed
    and the tick, so two policies, or two latencies, meet the same scenes with the same luck.

    Args:
        policy: What is evaluated.
        env_id: See :func:`vla_stack.envs.make`.
        episodes: Number of episodes.
        seed: Seed of the first.
        executor: Timeline rules; by default asynchronous, executing half the policy's horizon.
        latency: Time between a request and the first tick that its reply can serve.
        instruct: ``swap`` tells the policy another instruction than the one that success refers to.
        num_envs, workers, rollouts: See :func:`vla_stack.rollout.engine.run`.
        env_options: Further keyword arguments of the environment.
        on_episode: Called with each record as it is finished, in no fixed order.

    Raises:
        UserError: The environment does not exist or does not fit the policy, or workers keep dying.
    """
    began = time.perf_counter()
    executor = executor or ExecutorConfig()
    options = envs.options_for(env_id, policy.spec, env_options)
    watched: dict[str, Any] = {GUARDS: GuardRecorder} if env_id.startswith(IMAGINED) else {}
    plan = Plan(
        env_id, options, policy.spec, PolicyAgent, watched, executor=executor, latency=latency, instruct=instruct
    )
    one = envs.make(env_id, 1, policy.spec, options)  # fails here, once, rather than in every worker
    robot, stages = one.robot or policy.spec.robot, one.stages
    one.close()
    records = []
    for record in run(policy, plan, [Start(seed + i) for i in range(episodes)], num_envs, workers, rollouts):
        records.append(record)
        if on_episode is not None:
            on_episode(record)
    result = EvalResult(
        name=env_id,
        label=describe(executor, latency, instruct),
        rate_hz=robot.rate_hz,
        episodes=tuple(sorted(records, key=lambda r: r.seed)),
        stages=stages,
        settings={
            "mode": executor.mode,
            "execute": executor.execute,
            "latency_s": latency.mean_s,
            "jitter": latency.jitter,
            "instruct": instruct,
            "seed": seed,
            "num_envs": num_envs,
            "env_options": options,
            "model_version": policy.spec.model_version,
        },
        wall_s=time.perf_counter() - began,
        notes=(*_units(policy.spec.robot, robot), *_cut(records)),
    )
    return replace(result, discontinuity=boundary_discontinuity(result, robot))


def _cut(records: Sequence[EpisodeRecord]) -> tuple[str, ...]:
    """How many imagined episodes guards have ended, and what the others came to: a rate alone hides it."""
    cut = [r for r in records if r.attached.get(GUARDS)]
    if not cut:
        return ()
    names = ", ".join(sorted({name for r in cut for name in r.attached[GUARDS]}))
    won, others = sum(r.success for r in records), len(records) - len(cut)
    return (
        f"Guards ({names}) ended {len(cut)} of {len(records)} imagined episodes, which count as failures; "
        f"of the other {others}, {won} succeeded.",
    )


def _units(policy: RobotSpec, env: RobotSpec) -> tuple[str, ...]:
    """Which units the numbers of a policy were taken to be in, where it does not say."""
    if not nameless(policy):
        return ()
    units = ", ".join(dict.fromkeys(dim.unit for dim in (*env.state, *env.action) if dim.unit))
    return (f"The policy says nothing of its units; its numbers were taken as the environment's: {units or 'none'}.",)


def describe(executor: ExecutorConfig, latency: Latency, instruct: Instruct) -> str:
    """A setting in a few words, e.g. ``naive, 100 ms``, with the executed steps where they are not the policy's own."""
    steps = f", {executor.execute} steps" if executor.execute else ""
    swap = ", wrong instruction" if instruct == "swap" else ""
    return f"{executor.mode}, {latency}{steps}{swap}"
