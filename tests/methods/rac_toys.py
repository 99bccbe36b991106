"""Drives one operated episode in an environment that the test holds, as the engine does in its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vla_stack.envs import EnvStep
from vla_stack.methods.rac.episode import OperatedAgent, RolledOut
from vla_stack.methods.rac.operator import SimulatedOperator
from vla_stack.rollout.episode import run_episode
from vla_stack.rollout.plan import Episode, Plan, Query, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, PolicySpec


def play(
    env: Any,
    seed: int,
    mode: str,
    limit: int,
    infer: Callable[..., Chunks] | None = None,
    operator: SimulatedOperator | None = None,
    familiar: Any = None,
    horizon: int = 8,
    execute: int | None = None,
) -> RolledOut:
    raw, info = env.reset(seed=seed)
    agent = partial(OperatedAgent, mode=mode, limit=limit, operator=operator, familiar=familiar)
    how = ExecutorConfig(mode="sync", execute=execute)
    plan = Plan("test", {}, PolicySpec(env.spec_robot, horizon), agent, executor=how, linger=None)
    running = run_episode(Episode(env, env.spec_robot, Start(seed), plan, EnvStep(raw, 0.0, False, False, info)))
    answer: Any = None
    while True:
        try:
            wanted = running.send(answer)
        except StopIteration as end:
            return end.value.outcome
        if isinstance(wanted, Query):
            assert infer is not None
            answer = infer([wanted.observation], [wanted.seed]).row(0)
        else:
            answer = EnvStep(*env.step(wanted.command))
