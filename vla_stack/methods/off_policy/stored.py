"""Stored episodes, of a noisy scripted expert with its failures, or recorded: what offline learning begins with.

A dataset holds what the robot knew before each command, and not what it saw after an episode's last one. Where that was
a success nothing follows, so nothing is missing; of an episode that was cut off the last command is left out. A pause
between two frames (a hold is not recorded) ends an episode as a time limit does, and what follows is another one.

Our tasks also show how far the tool's target is ahead of the tool. Where a dataset does not hold that, it follows from
the commands; the first one of an episode is taken to begin at the tool, where a reset puts it to 0.1 mm and mrad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from sim.privileged import TARGET_DIMS
from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import open_frames
from vla_stack.data.labels import reach
from vla_stack.data.layout import ROBOT
from vla_stack.envs.from_vector import FromVector
from vla_stack.envs.making import is_benchmark, is_task, observe
from vla_stack.envs.vector import VectorEnv
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.collecting import StoredEpisode, plan_of
from vla_stack.methods.off_policy.deployed import Vector, in_range, measured, normalised
from vla_stack.methods.practice import judged, time_limit, unpaid
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.rollout.agents import ExpertAgent
from vla_stack.rollout.collect import COMMAND_SENT
from vla_stack.rollout.engine import Engine
from vla_stack.rollout.labelling import expert_maker
from vla_stack.rollout.plan import Start
from vla_stack.schema import ACTION, OBS_STATE, SUCCESS, Dim, Observation, RobotSpec
from vla_stack.training.recipe import TaskRecipe

if TYPE_CHECKING:
    from vla_stack.methods.off_policy.recipe import OffPolicy, Stored

LEAST_STD = 0.01  # of an entry that hardly moves
TRIES, MORE_TRIES = 10, 20  # attempts for each episode that is kept, and beyond: an expert that never succeeds ends
STORED = "stored"  # name of the recorder of an expert's episodes
RATE = 1e-3  # Hz by which rates may differ


def stored(
    path: Path, method: OffPolicy, task: TaskRecipe, root: Path | None, rows: VectorEnv, frozen: ChunkPolicy | None
) -> tuple[ReplayBuffer, tuple[Vector, Vector]]:
    """The episodes of a file, filled where it is missing, normalised; and mean and deviation [o] of that.

    Args:
        path: The file.
        method: Options.
        task: The task itself.
        root: Dataset to fill it from; None has the task's expert recorded.
        rows: The task, see :func:`~vla_stack.methods.off_policy.collecting.rows_of`; one that is read is reset.
        frozen: The encoder of what is observed; None: the state alone is.

    Raises:
        UserError: The episodes cannot be had, see :func:`record` and :func:`read`.
    """
    if not path.exists():
        store = record(method, task, rows, frozen) if root is None else read(method, task, root, rows, frozen)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(store.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    state = load_file(path)
    obs, action = (state[f"column.{name}"].shape[1] for name in ("obs", "action"))
    store = ReplayBuffer(len(state["column.reward"]), obs, action, 1, method.gamma, _tail(method))
    store.load_state_dict(state)
    seen = store.columns["obs"][store.rows()]
    if not len(seen):  # an environment without an expert is observed as it is
        return store, (np.zeros(obs, np.float32), np.ones(obs, np.float32))
    scale = seen.mean(0), np.maximum(seen.std(0), LEAST_STD)
    for name in ("obs", "next_obs"):
        store.columns[name][:] = normalised(store.columns[name], *scale)
    return store, scale


def success_rate(store: ReplayBuffer) -> float:
    """Share of the stored episodes that succeeded, where success ends them."""
    rows = store.rows()
    ends = store.columns["terminated"][rows], store.columns["truncated"][rows]
    return float(ends[0].sum() / max(1, (ends[0] | ends[1]).sum()))


def _tail(method: OffPolicy) -> float:
    """Return of what follows where an episode is cut off: an endless failure."""
    return unpaid(method.reward) / (1.0 - method.gamma)


def _filled(episodes: Sequence[Transition], method: OffPolicy) -> ReplayBuffer:
    """A buffer of episodes, each of which has a row a control step."""
    widths = episodes[0].obs.shape[1], episodes[0].action.shape[1]
    store = ReplayBuffer(sum(len(e.reward) for e in episodes), *widths, 1, method.gamma, _tail(method))
    for episode in episodes:
        for i in range(len(episode.reward)):
            store.add(episode.rows(slice(i, i + 1)))
    return store


def _empty(method: OffPolicy, rows: VectorEnv, robot: RobotSpec, frozen: ChunkPolicy | None) -> ReplayBuffer:
    """A buffer of no episodes of a task, which is begun to see how much it shows."""
    first = rows.reset([0], [0])[0]
    shown = observe(first.observation, robot, first.info.get("task", ""), 0)
    width = measured([shown], frozen).shape[1]
    return ReplayBuffer(0, width, len(robot.action), 1, method.gamma, _tail(method))


# Of the scripted expert -----------------------------------------------------------------------------------------------


def record(method: OffPolicy, task: TaskRecipe, rows: VectorEnv, frozen: ChunkPolicy | None) -> ReplayBuffer:
    """Episodes of the expert, with Monte-Carlo returns; not normalised.

    Raises:
        UserError: The environment has no expert, or it hardly ever succeeds where failures are not kept.
    """
    robot = rows.robot
    assert robot is not None  # `rows_of` has seen to it
    offline: Stored = method.offline
    if not offline.episodes:
        return _empty(method, rows, robot, frozen)
    make = _expert_of(task.id)
    plan = plan_of(
        replace(task, id=judged(task.id, method.judge)),
        method,
        robot,
        lambda episode: ExpertAgent(episode, make, offline.noise[episode.start.number]),
        {STORED: partial(StoredEpisode, reward=method.reward, frozen=frozen)},
    )
    episodes: list[Transition] = []
    attempts = TRIES * offline.episodes + MORE_TRIES
    with Engine(plan, 1) as engine, tqdm(total=offline.episodes, desc="expert", unit=" episodes") as bar:
        for attempt in range(attempts):
            seed = int(np.random.SeedSequence((offline.seed, attempt)).generate_state(1)[0]) >> 1
            (ended,) = engine.run(None, [Start(seed, len(episodes) % len(offline.noise))])
            if ended.success or offline.failures:
                episodes.append(ended.attached[STORED])
                bar.update()
            if len(episodes) == offline.episodes:
                return _filled(episodes, method)
    raise UserError(
        f"the expert of {task.id} succeeded in {len(episodes)} of {attempts} episodes of {time_limit(rows.row(0))} "
        f"steps, 'method.offline.episodes' is {offline.episodes}",
        "set method.offline.failures=true, a larger task.options.max_episode_steps, or less noise",
    )


def _expert_of(env_id: str) -> Callable[..., Any]:
    """Makes the expert of a task from its environment."""
    if not is_task(env_id) and not is_benchmark(env_id):
        raise UserError(f"there is no scripted expert for {env_id}", "give data.root=DIR, episodes of it")
    return expert_maker(env_id)


# Of a dataset ---------------------------------------------------------------------------------------------------------


def read(method: OffPolicy, task: TaskRecipe, root: Path, rows: VectorEnv, frozen: ChunkPolicy | None) -> ReplayBuffer:
    """Episodes of a dataset, with Monte-Carlo returns, as the task would have given them; not
    normalised.

    A frame is a control step: ``observation.state``, and its command in [-1, 1], the one that was sent where a dataset
    tells it from the label. Absolute tool targets become moves of the target where the environment takes those: a
    gripper that is switched at once then takes as many steps as the environment needs. Success ends an episode and is
    paid as ``method.reward`` says. Taken are the first ``method.offline.episodes`` of those with the task's
    instructions; a larger number takes all.

    Raises:
        UserError: There is no such dataset, it does not fit the environment, or no episode was a success.
    """
    dataset, env = open_dataset(root), rows.row(0).unwrapped
    moves = _check(task.id, env, dataset, frozen)
    chosen = _choose(task.id, env, dataset, method.offline)
    sizes = {c.name: (c.height, c.width) for c in env.spec_robot.cameras} if frozen is not None else {}
    pictures: dict[str, NDArray[np.uint8]] = open_frames(dataset, list(sizes), sizes=sizes) if sizes else {}
    last = reach(dataset, np.ones(dataset.num_frames, bool)) == 1  # frames that the next one does not go on from
    episodes: list[Transition] = []
    for episode in tqdm(chosen, desc="recorded", unit=" episodes"):
        for first, end, success in _pieces(dataset, episode, last):
            obs, actions = _seen(env, dataset, pictures, frozen, slice(first, end), moves)
            if not (np.isfinite(obs).all() and np.isfinite(actions).all()):
                raise UserError(
                    f"{dataset.root}: episode {episode} holds numbers that are not finite", "leave it out of a copy"
                )
            episodes.append(_transitions(obs, actions, success, unpaid(method.reward)))
    return _filled(episodes, method)


def _check(name: str, task: Any, dataset: Dataset, frozen: ChunkPolicy | None) -> bool:
    """Refuse a dataset whose numbers are not the environment's; whether its targets have to become moves."""
    root = dataset.root
    if isinstance(task, FromVector):
        raise UserError(f"{name} is observed by what no dataset holds", "use a task of sim, or method.features")
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
                f"{root / ROBOT}: entry {i} of {key} is {here}, of {len(a)}; in {name} it is {there}, of {len(b)}",
                "record the same task with `vla collect --privileged`" if frozen is None else "record it with cameras",
            )
        if (width := dataset.columns[key].reshape(dataset.num_frames, -1).shape[1]) != len(have):
            raise UserError(f"{root}: '{key}' has {width} entries, {ROBOT} names {len(have)}", "restore it from a copy")
    if abs(dataset.fps - wanted.rate_hz) > RATE:
        raise UserError(
            f"{root} was recorded at {dataset.fps:g} Hz, {name} is controlled at {wanted.rate_hz:g} Hz",
            f"set task.options.control_hz={dataset.fps:g}",
        )
    if SUCCESS not in dataset.columns:
        raise UserError(f"{root} has no column '{SUCCESS}': nobody recorded what succeeded", "record it with `vla`")
    return moves


def _has_target(state: tuple[Dim, ...]) -> bool:
    return TARGET_DIMS[0].name in {d.name for d in state}


def _entries(dims: tuple[Dim, ...]) -> list[str]:
    return [f"{d.name} in {d.unit}" for d in dims]


def _choose(name: str, task: Any, dataset: Dataset, asked: Stored) -> list[int]:
    """Episodes that were asked for, in order; says how many."""
    root = dataset.root
    known = getattr(task, "task_variants", (task.task,))
    told = [dataset.tasks[i] for i in dataset.columns["task_index"][dataset.episode_from]]
    alike = [e for e, instruction in enumerate(told) if instruction in known]
    if not alike:
        raise UserError(
            f"{root} was recorded with '{told[0]}', {name} asks for '{known[0]}'",
            "give another dataset or task",
        )
    won = {e for e in alike if dataset.columns[SUCCESS][dataset.episode_from[e] : dataset.episode_to[e]].any()}
    chosen = [e for e in alike if asked.failures or e in won][: asked.episodes]
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
    task: Any,
    dataset: Dataset,
    pictures: dict[str, NDArray[np.uint8]],
    frozen: ChunkPolicy | None,
    rows: slice,
    moves: bool,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Observations [T, o] and actions [T, a] in [-1, 1] of consecutive frames."""
    columns = dataset.columns
    states, recorded = columns[OBS_STATE][rows], columns.get(COMMAND_SENT, columns[ACTION])[rows]
    tools = states[:, : len(task.spec_robot.action)].astype(np.float64)
    actions, commands = _executed(task, recorded, tools[0], moves)
    target = states.shape[1] < len(task.spec_robot.state)  # it is shown, and not recorded
    obs = []
    for i, row in enumerate(range(rows.start, rows.stop)):
        state: NDArray[Any] = states[i]
        if target:
            state = np.concatenate([state, commands[i] - tools[i]])
        images = {name: frames[row] for name, frames in pictures.items()}
        shown = Observation(state.astype(np.float32), images, dataset.tasks[columns["task_index"][row]])
        obs.append(measured([shown], frozen))
    return np.concatenate(obs), actions


def _executed(
    task: Any, recorded: NDArray[np.float32], start: NDArray[np.float64], moves: bool
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Commands [T, a] as the environment takes them, in [-1, 1]; the target [T, a] that stood before each.

    Args:
        task: The environment.
        recorded: As the dataset has them.
        start: The target before the first, [a].
        moves: Whether targets have to become moves.
    """
    robot = task.spec_robot
    if getattr(task, "control_mode", "") != "ee_delta" or not hasattr(task, "tool_command"):
        targets = np.clip(recorded, robot.action_low, robot.action_high).astype(np.float64)
        return in_range(robot, recorded), np.concatenate([start[None], targets[:-1]])
    from sim.arm import DELTA_RATE  # on demand: other environments do without MuJoCo

    step, (low, high) = DELTA_RATE * robot.dt, task.arm.tool_range
    actions, commands = np.empty_like(recorded), np.empty(recorded.shape)
    for i, command in enumerate(recorded):
        commands[i] = start
        move = (np.clip(command, low, high) - start) / step if moves else command
        actions[i] = np.clip(move, -1.0, 1.0)
        start = np.clip(start + actions[i].astype(np.float64) * step, low, high)  # as ``ArmEnv`` does
    return actions, commands


def _transitions(obs: Vector, actions: Vector, success: bool, failure: int) -> Transition:
    """Steps of an episode of T frames: T where it succeeded, else T - 1, for of the last nobody knows what followed.

    ``failure`` is what a step without success pays; a success pays one more.
    """
    length = len(obs) if success else len(obs) - 1
    last, zero = np.arange(length) == length - 1, np.zeros(length, np.int64)
    after = np.concatenate([obs[1:], obs[-1:]])[:length]  # of a success nothing counts that follows it
    reward = (failure + (last & success)).astype(np.float32)
    ends = last & success, last & (not success)
    return Transition(obs[:length], actions[:length], reward, *ends, after, zero, zero, zero + int(Source.OFFLINE))
