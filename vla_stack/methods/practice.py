"""Where a method that rolls out practises, where it is evaluated, and what a step there pays.

A policy may practise in the task itself, in the task with a world model's judges saying what success is, or in a world
model that imagines the task. Experts act, and evaluations are made, in the task itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium.wrappers import TimeLimit

from vla_stack.envs.making import IMAGINED
from vla_stack.envs.vector import EnvStep
from vla_stack.errors import UserError
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.training.recipe import Recipe, TaskRecipe

LIMIT = "max_episode_steps"

Reward = Literal["step", "success", "task"]


def is_imagined(task: TaskRecipe) -> bool:
    """Whether a world model is the environment."""
    return task.id.startswith(IMAGINED)


def simulated(task: TaskRecipe) -> TaskRecipe:
    """The task itself: of an imagined one, what its world model learnt from, at that rate.

    Raises:
        UserError: There is no such world model, or it is of no task of ``sim``.
    """
    if not is_imagined(task):
        return task
    from vla_stack.world_model.world_backend import shared, task_of  # on demand: it imports torch

    model = shared(task.id.removeprefix(IMAGINED))
    limit = {LIMIT: task.options[LIMIT]} if LIMIT in task.options else {}
    return TaskRecipe(task_of(model).id, {"control_hz": model.robot.rate_hz, **limit})


def judged(env_id: str, judge: str) -> str:
    """Id of an environment in which a world model says what success is; the same id where ``judge`` is empty."""
    return f"judged:{judge}@{env_id}" if judge else env_id


def time_limit(env: Any) -> int | None:
    """Control steps after which a gymnasium environment cuts an episode off; None where it never does."""
    while env is not None and not isinstance(env, TimeLimit):
        env = getattr(env, "env", None)
    return None if env is None else env._max_episode_steps


def check_evaluated_where_it_practises(recipe: Recipe) -> None:
    """Raise a :class:`UserError` where a recipe names other environments to evaluate in, which nothing would."""
    if set(recipe.eval.envs) - {recipe.task.id}:
        what = f"'eval.envs' is {list(recipe.eval.envs)}, method '{recipe.method.name}' evaluates in its task"
        raise UserError(what, "leave it out; `vla eval --env` evaluates the policy elsewhere")


def check_no_history(name: str, history: Sequence[int]) -> None:
    """Raise a :class:`UserError` where a policy reads earlier observations, which a method keeps none of.

    Args:
        name: Of the policy, as the recipe has it.
        history: The policy's ``spec.history``.
    """
    if history:
        raise UserError(f"{name} reads earlier observations, which are not kept", "train it with history=0")


def check_resumed(experience: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Refuse to go on with a run whose stored experience is of something else.

    Args:
        experience: Keys that decide what experience is, as JSON has them.
        before: The same of the run's last checkpoint.

    Raises:
        UserError: It is.
    """
    for key, value in experience.items():
        if value != before.get(key):
            raise UserError(
                f"the run that is to go on has {key}={before.get(key)}, not {value}",
                "start a new run, with an output_dir of its own",
            )


def paid(reward: Reward, after: EnvStep) -> tuple[float, bool, bool]:
    """Reward, terminated and truncated of a control step; never both of the latter.

    Success ends an episode. What ended otherwise has failed for good: that is cut off, so that a failure never looks
    like relief.

    Args:
        reward: ``step``: -1 until success; ``success``: 1 at success; ``task``: the environment's own.
        after: What came of the step.
    """
    if reward == "task":
        return after.reward, after.terminated, after.truncated and not after.terminated
    success = bool(after.info["is_success"])
    return float(success) - (reward == "step"), success, (after.truncated or after.terminated) and not success


def ended(record: EpisodeRecord, reward: Reward) -> bool:
    """Whether nothing is paid after an episode: by the task's own reward after a failure for good as well."""
    return record.success or (reward == "task" and record.terminated)


def unpaid(reward: Reward) -> int:
    """What an endless failure goes on earning a step."""
    return -1 if reward == "step" else 0


class ChunkOf(NamedTuple):
    """A chunk of an episode.

    Attributes:
        noise: Seed of its noise.
        reward: Discounted sum over the steps that were executed.
        executed: How many these are.
    """

    noise: int
    reward: float
    executed: int


def chunks_of(record: EpisodeRecord, reward: Reward, gamma: float) -> Iterator[ChunkOf]:
    """The chunks of an episode, in order, each paid for its executed steps.

    Args:
        record: The episode.
        reward: As in :func:`paid`.
        gamma: Discount of a step.
    """
    if reward == "task":
        paid = record.rewards.astype(np.float64)
    else:
        paid = np.full(record.steps, float(unpaid(reward)))
        paid[-1] += float(record.success)
    for chunk in dict.fromkeys(record.chunks[record.chunks != IDLE].tolist()):
        steps = np.flatnonzero(record.chunks == chunk)
        earned = float((paid[steps] * gamma ** np.arange(len(steps))).sum())
        yield ChunkOf(int(record.noise[steps[0]]), earned, len(steps))
