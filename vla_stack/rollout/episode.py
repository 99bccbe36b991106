"""One simulated episode under the virtual clock, written as a coroutine.

The episode runs the robot's own :class:`~vla_stack.runtime.executor.Executor`. Where that asks for a chunk, the
coroutine yields the observation and is sent the chunk; when the policy computed it costs nothing, when it *arrives* is
an input of the experiment. So any number of episodes advance, each in its own time, to the point where they need the
policy, and are answered in one batch, and the outcome depends on neither their number nor the machine's speed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.making import observe, robot_of
from vla_stack.errors import UserError
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.runtime.executor import Executor, ExecutorConfig, Request, State
from vla_stack.schema import ActionChunk, Continuation, Observation, PolicySpec, RobotSpec

Instruct = Literal["swap"] | None


@dataclass(frozen=True)
class EpisodeConfig:
    """What all episodes of one evaluation share.

    Attributes:
        env_id: Gymnasium id.
        env_options: Keyword arguments of the environment beyond those that follow from the policy.
        policy: What the policy consumes and produces.
        executor: The timeline's rules.
        latency: A reply to the request of tick k is there before tick ``k + latency.ticks()`` is dispatched.
        instruct: ``swap`` tells the policy another of the task's instructions than the one that success refers to.
    """

    env_id: str
    env_options: dict[str, Any]
    policy: PolicySpec
    executor: ExecutorConfig
    latency: Latency = Latency()
    instruct: Instruct = None


@dataclass(frozen=True, slots=True)
class Query:
    """A chunk is wanted for this observation, with this seed for the policy's noise."""

    observation: Observation
    seed: int
    continuation: Continuation | None = None


Reply = tuple[NDArray[np.float32], int]  # float32 [H, A], and how many of them to execute (0: as configured)
Episode = Generator[Query, Reply, EpisodeRecord]


def run_episode(env: gym.Env, config: EpisodeConfig, seed: int) -> Episode:
    """One episode: yields a :class:`Query` where a chunk is wanted, is sent a ``Reply``, returns the record.

    Args:
        env: Made by :func:`~vla_stack.envs.making.make_env`.
        config: The evaluation.
        seed: Seeds the scene and, with the tick, the policy's noise.
    """
    raw, info = env.reset(seed=seed)
    task = instruction_of(env)
    told = task if config.instruct is None else other_instruction(env, task, seed)
    robot, timeline = robot_of(env, config.policy), _start(env, config, seed)
    arrivals: list[tuple[int, ActionChunk]] = []
    actions: list[NDArray[np.float32]] = []
    chunks: list[int] = []
    stage, ended = int(info.get("stage", -1)), False
    achieved = getattr(env.unwrapped, "achieved", None)  # (instruction) -> bool, where the environment can tell
    obeyed = None if achieved is None else False
    command = standstill(raw, robot)
    k = 0
    while not ended:
        if (request := timeline.plan(k)) is not None:
            observation = observe(raw, config.policy.robot, told, k).expecting(request.state)
            reply = yield Query(observation, request.seed, request.continuation)
            arrivals.append((k + config.latency.ticks(robot.rate_hz, (seed, k)), _chunk(request, reply)))
        for _, chunk in [arrival for arrival in arrivals if arrival[0] <= k]:
            timeline.deliver(chunk, k)
        arrivals = [arrival for arrival in arrivals if arrival[0] > k]
        dispatch = timeline.dispatch(k)
        if dispatch.state is State.STOP:
            break  # a stopped robot waits for a person, and here there is none
        command = command if dispatch.action is None else dispatch.action
        raw, _, terminated, truncated, info = env.step(command)
        actions.append(np.asarray(command, np.float32))
        chunks.append(dispatch.chunk_rid if dispatch.state is State.RUN else IDLE)
        stage = max(stage, int(info.get("stage", -1)))
        obeyed = obeyed if achieved is None else obeyed or bool(achieved(told))
        if "is_success" not in info:
            raise UserError(f"{config.env_id} does not report 'is_success'", "wrap it to say when its task is done")
        ended = bool(terminated or truncated or info["is_success"])
        k += 1
    return EpisodeRecord(
        seed=seed,
        instruction=told,
        task=task,
        success=bool(info.get("is_success")),
        steps=k,
        idle_ticks=chunks.count(IDLE),
        stage=stage,
        instructed_success=obeyed,
        actions=np.array(actions, np.float32).reshape(k, len(robot.action)),
        chunks=np.array(chunks, np.int32),
    )


def instruction_of(env: gym.Env) -> str:
    """The instruction of the running episode, under the names that LeRobot looks for."""
    for name in ("task_description", "task"):
        if isinstance(text := getattr(env.unwrapped, name, None), str):
            return text
    return ""


def other_instruction(env: gym.Env, task: str, seed: int) -> str:
    """Another instruction of the same task, chosen by ``seed``: the one that would be wrong to follow.

    Raises:
        UserError: The environment has no other instruction.
    """
    others = sorted(set(getattr(env.unwrapped, "task_variants", ())) - {task})
    if not others:
        raise UserError(f"the environment has one instruction only ('{task}')", "leave out --swap-instruction")
    return others[np.random.default_rng(seed).integers(len(others))]


def standstill(raw: dict[str, Any], robot: RobotSpec) -> NDArray[np.float32]:
    """The command that keeps a robot where it is measured: what is sent before the first chunk has arrived.

    The gripper of a delta robot holds what is measured where it is commanded in that unit, else mid-range.
    """
    measured = np.asarray(raw["agent_pos"], np.float32)[: len(robot.action)].copy()
    if robot.action_kind == "delta":
        same = np.array([a.unit == s.unit for a, s in zip(robot.action, robot.state, strict=False)])
        measured[~(robot.gripper_mask & same)] = 0.0
    return np.clip(measured, robot.action_low, robot.action_high)


def _start(env: gym.Env, config: EpisodeConfig, seed: int) -> Executor:
    executor = Executor(robot_of(env, config.policy), config.policy, config.executor)
    executor.reset(0, seed)
    # A robot knows its delay from the episodes before; a fresh executor an episode makes episodes independent.
    executor.delay.observe(config.latency.usual_ticks(executor.robot.rate_hz))
    return executor


def _chunk(request: Request, reply: Reply) -> ActionChunk:
    actions, execute = reply
    return ActionChunk(actions, request.origin, request.k_obs, rid=request.rid, epoch=request.epoch, execute=execute)
