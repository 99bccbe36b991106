"""Stored episodes of a recorded dataset: what offline learning begins with where people, or policies, have acted.

A dataset holds what the robot knew before each command, and not what it saw after an episode's last one. Where that was
a success nothing follows, so nothing is missing; of an episode that was cut off the last command is left out. A pause
between two frames (a hold is not recorded) ends an episode as a time limit does, and what follows is another one.

Our tasks also show how far the tool's target is ahead of the tool. Where a dataset does not hold that, it follows from
the commands; the first one of an episode is taken to begin at the tool, where a reset puts it to 0.1 mm and mrad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from sim.privileged import TARGET_DIMS
from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import open_frames
from vla_stack.data.labels import reach
from vla_stack.data.layout import ROBOT
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.state_env import StateEnv, Vector, measure
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.rollout.collect import COMMAND_SENT
from vla_stack.schema import ACTION, OBS_STATE, SUCCESS, Dim

RATE = 1e-3  # Hz by which rates may differ


def read(env: StateEnv, root: Path, episodes: int, failures: bool, gamma: float) -> ReplayBuffer:
    """Episodes of a dataset, with Monte-Carlo returns, as ``env`` would have given them; not normalised.

    A frame is a control step: ``observation.state``, and its command in [-1, 1], the one that was sent where a dataset
    tells it from the label. Absolute tool targets become moves of the target where the environment takes those: a
    gripper that is switched at once then takes as many steps as the environment needs. Success ends an episode and is
    paid as ``env.reward`` says.

    Args:
        env: The environment that will be learnt in; it is reset.
        root: Dataset folder.
        episodes: The first so many of those with the environment's instructions; a larger number takes all.
        failures: Whether those without success are among them.
        gamma: Discount of a control step.

    Raises:
        UserError: There is no such dataset, it does not fit the environment, or no episode was a success.
    """
    dataset = open_dataset(root)
    moves = _check(env, dataset)
    chosen = _choose(env, dataset, episodes, failures)
    features = None
    pictures: dict[str, NDArray[np.uint8]] = {}
    if env.recipe.features:
        from vla_stack.methods.off_policy.frozen_features import (
            frozen_features,  # on demand: policies take seconds to import
        )

        features = frozen_features(env.recipe.features)
        sizes = {c.name: (c.height, c.width) for c in _task(env).spec_robot.cameras}
        pictures = open_frames(dataset, list(sizes), sizes=sizes)
    last = reach(dataset, np.ones(dataset.num_frames, bool)) == 1  # frames that the next one does not go on from
    steps: list[Transition] = []
    for episode in tqdm(chosen, desc="recorded", unit=" episodes"):
        for first, end, success in _pieces(dataset, episode, last):
            obs, actions = _seen(env, dataset, pictures, features, slice(first, end), moves)
            if not (np.isfinite(obs).all() and np.isfinite(actions).all()):
                raise UserError(
                    f"{root}: episode {episode} holds numbers that are not finite", "leave it out of a copy"
                )
            steps += _transitions(obs, actions, success, env.recipe.tail)
    tail = env.recipe.tail / (1.0 - gamma)
    store = ReplayBuffer(len(steps), env.obs_dim, env.action_dim, 1, gamma, tail)
    for step in steps:
        store.add(step)
    return store


def _task(env: StateEnv) -> Any:
    return env.env.unwrapped


def _check(env: StateEnv, dataset: Dataset) -> bool:
    """Refuse a dataset whose numbers are not the environment's; whether its targets have to become moves."""
    task, root, r = _task(env), dataset.root, env.recipe
    if r.reward == "own":
        raise UserError(
            f"method.reward=own, and {root} tells success alone", "set method.reward=step or method.reward=success"
        )
    if not hasattr(task, "spec_robot"):
        raise UserError(f"{r.id} is observed by what no dataset holds", "use a task of sim, or method.features")
    ours = hasattr(task, "tool_command")
    if ours and task.control_mode == "joint_abs":
        raise UserError("task.options.control_mode=joint_abs does not go with 'data.root'", "use ee_delta or ee_abs")
    robot, wanted = read_robot_spec(root), task.spec_robot
    moves = ours and task.control_mode == "ee_delta" and robot.action_kind == "absolute"
    action = wanted.state[: len(wanted.action)] if moves else wanted.action  # a state begins with what is commanded
    state = wanted.state
    if not _has_target(robot.state):
        state = tuple(d for d in state if d not in TARGET_DIMS)
    for key, have, want in ((OBS_STATE, robot.state, state), (ACTION, robot.action, action)):
        a, b = _entries(have), _entries(want)
        if a != b:
            i = next(i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1])
            here, there = (", ".join(x[i : i + 1]) or "missing" for x in (a, b))
            raise UserError(
                f"{root / ROBOT}: entry {i} of {key} is {here}, of {len(a)}; in {r.id} it is {there}, of {len(b)}",
                "record the same task with `vla collect --privileged`" if not r.features else "record it with cameras",
            )
        if (width := dataset.columns[key].reshape(dataset.num_frames, -1).shape[1]) != len(have):
            raise UserError(f"{root}: '{key}' has {width} entries, {ROBOT} names {len(have)}", "restore it from a copy")
    if abs(dataset.fps - wanted.rate_hz) > RATE:
        raise UserError(
            f"{root} was recorded at {dataset.fps:g} Hz, {r.id} is controlled at {wanted.rate_hz:g} Hz",
            f"set task.options.control_hz={dataset.fps:g}",
        )
    if SUCCESS not in dataset.columns:
        raise UserError(f"{root} has no column '{SUCCESS}': nobody recorded what succeeded", "record it with `vla`")
    return moves


def _has_target(state: tuple[Dim, ...]) -> bool:
    return TARGET_DIMS[0].name in {d.name for d in state}


def _entries(dims: tuple[Dim, ...]) -> list[str]:
    return [f"{d.name} in {d.unit}" for d in dims]


def _choose(env: StateEnv, dataset: Dataset, episodes: int, failures: bool) -> list[int]:
    """Episodes that were asked for, in order; says how many."""
    task, root = _task(env), dataset.root
    known = getattr(task, "task_variants", (task.task,))
    told = [dataset.tasks[i] for i in dataset.columns["task_index"][dataset.episode_from]]
    alike = [e for e, instruction in enumerate(told) if instruction in known]
    if not alike:
        raise UserError(
            f"{root} was recorded with '{told[0]}', {env.recipe.id} asks for '{known[0]}'",
            "give another dataset or task",
        )
    won = {e for e in alike if dataset.columns[SUCCESS][dataset.episode_from[e] : dataset.episode_to[e]].any()}
    chosen = [e for e in alike if failures or e in won][:episodes]
    if not won.intersection(chosen):
        raise UserError(
            f"{root}: none of the {len(chosen)} episodes that are taken was a success",
            "record some, or take more with method.offline.episodes",
        )
    print(f"{root}: {len(chosen)} of {dataset.num_episodes} episodes, {len(won.intersection(chosen))} succeeded")
    return chosen


def _pieces(dataset: Dataset, episode: int, last: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """First frame, end and success of each part of an episode that was recorded without a pause, as far as success."""
    first, end = int(dataset.episode_from[episode]), int(dataset.episode_to[episode])
    success = np.flatnonzero(dataset.columns[SUCCESS][first:end])
    if len(success):
        end = first + int(success[0]) + 1
    for stop in sorted({*(np.flatnonzero(last[first:end]) + first + 1).tolist(), end}):
        yield first, stop, bool(len(success)) and stop == end
        first = stop


def _seen(
    env: StateEnv,
    dataset: Dataset,
    pictures: dict[str, NDArray[np.uint8]],
    features: Callable[[Any, str], Vector] | None,
    rows: slice,
    moves: bool,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Observations [T, o] and actions [T, a] in [-1, 1] of consecutive frames."""
    columns = dataset.columns
    states, recorded = columns[OBS_STATE][rows], columns.get(COMMAND_SENT, columns[ACTION])[rows]
    tools = states[:, : env.action_dim].astype(np.float64)
    actions, commands = _executed(env, recorded, tools[0], moves)
    target = states.shape[1] < len(_task(env).spec_robot.state)  # it is shown, and not recorded
    obs = []
    for i, row in enumerate(range(rows.start, rows.stop)):
        state: NDArray[Any] = states[i]
        if target:
            state = np.concatenate([state, commands[i] - tools[i]])
        raw = {"agent_pos": state, "pixels": {name: frames[row] for name, frames in pictures.items()}}
        obs.append(measure(raw, dataset.tasks[columns["task_index"][row]], features))
    return np.stack(obs), actions


def _executed(
    env: StateEnv, recorded: NDArray[np.float32], start: NDArray[np.float64], moves: bool
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Commands [T, a] as the environment takes them, in [-1, 1]; the target [T, a] that stood before each.

    Args:
        env: The environment.
        recorded: As the dataset has them.
        start: The target before the first, [a].
        moves: Whether targets have to become moves.
    """
    task, space = _task(env), env.env.action_space
    middle, half = (space.high + space.low) / 2, (space.high - space.low) / 2  # type: ignore[attr-defined]
    if getattr(task, "control_mode", "") != "ee_delta" or not hasattr(task, "tool_command"):
        actions = np.clip((recorded - middle) / half, -1.0, 1.0).astype(np.float32)
        targets = np.clip(recorded, space.low, space.high).astype(np.float64)  # type: ignore[attr-defined]
        return actions, np.concatenate([start[None], targets[:-1]])
    from sim.arm import DELTA_RATE  # on demand: other environments do without MuJoCo

    step, (low, high) = DELTA_RATE * task.spec_robot.dt, task.arm.tool_range
    actions, commands = np.empty_like(recorded), np.empty(recorded.shape)
    for i, command in enumerate(recorded):
        commands[i] = start
        move = (np.clip(command, low, high) - start) / step if moves else command
        actions[i] = np.clip(move, -1.0, 1.0)
        start = np.clip(start + actions[i].astype(np.float64) * step, low, high)  # as ``ArmEnv`` does
    return actions, commands


def _transitions(
    obs: NDArray[np.float32], actions: NDArray[np.float32], success: bool, tail: int
) -> Iterator[Transition]:
    """Steps of an episode of T frames: T where it succeeded, else T - 1, for of the last nobody knows what followed.

    ``tail`` is what a step without success pays; a success pays one more.
    """
    length = len(obs) if success else len(obs) - 1
    zero = np.zeros(1, np.int64)
    for i in range(length):
        last = np.array([i == length - 1])
        ends = last & success, last & (not success)
        reward = np.full(1, tail + float(ends[0][0]), np.float32)
        after = obs[min(i + 1, len(obs) - 1)]  # of a success nothing counts that follows it
        yield Transition(
            obs[i][None], actions[i][None], reward, *ends, after[None], zero, zero, zero + int(Source.OFFLINE)
        )
