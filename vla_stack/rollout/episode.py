"""One episode under the virtual clock, written as a coroutine.

It yields a :class:`~vla_stack.rollout.plan.Query` where its agent wants a chunk of the policy and is sent the reply; it
yields a :class:`~vla_stack.rollout.plan.Decision` where its environment has to be stepped and is sent what came of it.
So any number of episodes advance, each in its own time, to the point where they need one of the two, and are answered
in one batch; the outcome depends on neither their number nor the machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.making import observe
from vla_stack.envs.vector import EnvStep
from vla_stack.errors import UserError
from vla_stack.rollout.plan import Decision, Episode, Query, Reply, StepEvent
from vla_stack.rollout.records import IDLE, EpisodeRecord

Running = Generator[Query | Decision, Reply | EnvStep, EpisodeRecord]


def run_episode(episode: Episode, on_step: Callable[[StepEvent], None] | None = None) -> Running:
    """One episode, whose environment has just been reset.

    Args:
        episode: The episode.
        on_step: Called after each control step, as the plan's recorders are.

    Raises:
        UserError: The environment does not report success, or another instruction is asked for and it has none.
    """
    plan, robot, now = episode.plan, episode.robot, episode.first
    env = getattr(episode.env, "unwrapped", episode.env)
    task = instruction_of(env)
    told = task if plan.instruct is None else other_instruction(env, task, episode.start.seed)
    agent = plan.agent(episode)
    recorders = {name: make(episode) for name, make in plan.recorders.items()}
    watching = [recorder.step for recorder in recorders.values()] + ([on_step] if on_step else [])
    events: list[tuple[NDArray[np.float32], int, int, float]] = []  # command, chunk, noise, reward
    stage, success, left = int(now.info.get("stage", -1)), False, plan.linger
    achieved = getattr(env, "achieved", None)  # (instruction) -> bool, where the environment can tell
    obeyed = None if achieved is None else False
    terminated = False
    while True:
        k = len(events)
        observation = observe(now.observation, plan.policy.robot, told, k)
        decision = yield from agent.act(k, observation, now)
        if decision is None:
            break
        now = yield decision  # type: ignore[assignment]  # a decision is answered by what came of it
        event = StepEvent(k, observation, decision, now)
        for watch in watching:
            watch(event)
        events.append((np.asarray(decision.command, np.float32), decision.chunk, decision.noise, now.reward))
        if "is_success" not in now.info:
            raise UserError(f"{plan.env_id} does not report 'is_success'", "wrap it to say when its task is done")
        stage = max(stage, int(now.info.get("stage", -1)))
        obeyed = obeyed if achieved is None else obeyed or bool(achieved(told))
        success, terminated = success or bool(now.info["is_success"]), terminated or now.terminated
        if now.truncated:
            break
        if left is not None and (terminated or success):
            if not left:
                break
            left -= 1
    commands, chunks, noise, rewards = zip(*events, strict=True) if events else ((), (), (), ())
    return EpisodeRecord(
        seed=episode.start.seed,
        number=episode.start.number,
        instruction=told,
        task=task,
        success=success,
        steps=len(events),
        idle_ticks=chunks.count(IDLE),
        stage=stage,
        instructed_success=obeyed,
        actions=np.array(commands, np.float32).reshape(len(events), len(robot.action)),
        chunks=np.array(chunks, np.int32),
        noise=np.array(noise, np.int64),
        rewards=np.array(rewards, np.float32),
        terminated=terminated,
        outcome=agent.result(),
        attached={name: recorder.result() for name, recorder in recorders.items()},
    )


def instruction_of(env: Any) -> str:
    """The instruction of the running episode, under the names that LeRobot looks for."""
    for name in ("task_description", "task"):
        if isinstance(text := getattr(env, name, None), str):
            return text
    return ""


def other_instruction(env: Any, task: str, seed: int) -> str:
    """Another instruction of the same task, chosen by ``seed``: the one that would be wrong to follow.

    Raises:
        UserError: The environment has no other instruction.
    """
    others = sorted(set(getattr(env, "task_variants", ())) - {task})
    if not others:
        raise UserError(f"the environment has one instruction only ('{task}')", "leave out --swap-instruction")
    return others[np.random.default_rng(seed).integers(len(others))]
