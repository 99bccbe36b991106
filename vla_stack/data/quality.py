"""What is odd about each episode of a dataset, beside the other episodes: one number a kind of flaw, larger is worse.

Nothing here says that an episode teaches badly; it says which ones a person should look at first. All but ``freeze`` is
computed from the small columns; pictures are decoded for that one alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from vla_stack.data.chunks import ActionChunks
from vla_stack.data.dataset import CHUNK, CHUNK_STEPS, Dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import open_frames
from vla_stack.data.layout import ROBOT
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, OBS_STATE

MOVES = 0.05  # of a fast step (95th percentile) of its dimension; from here on a step is motion
BLOCK = 32  # pictures that are compared at a time
FROZEN = 2  # of 255: the most that a pixel of a picture that was repeated changes, by coding
POINTS = 16  # of a trajectory that is compared with others
SAME = 0.02  # standard deviations: trajectories that are as near are one recording
NEIGHBOURS, SAMPLED, HORIZON = 8, 4000, 8  # for the spread of labels: frames looked at in all, steps of a chunk
CONSISTENT = 1.4826  # of the median absolute deviation, to the standard deviation of normal values

# Kind of flaw -> what it is, and the least that counts as a deviation: where all episodes are alike, a trifle is none.
KINDS = {
    "jerk": ("roughness of the commands: their third difference, in standard deviations of a step", 0.1),
    "spike": ("largest jump of state or command, in 99th percentiles of their second difference", 1.0),
    "idle": ("seconds at the start and the end in which nothing moves", 0.2),
    "stall": ("longest standstill between, seconds", 0.2),
    "freeze": ("longest time that a camera repeats a picture while the robot moves, seconds", 0.1),
    "duplicate": ("1 where an earlier episode of the same task is the same motion", 0.1),
    "label_spread": ("chunks beside those of the nearest states of other episodes, in standard deviations", 0.05),
    "branch_gap": ("chunk labels beside the actions that were recorded, in standard deviations", 0.05),
    "policy_error": ("open-loop error of the policy, in those of standing still", 0.05),
}


@dataclass(frozen=True)
class Quality:
    """Scores of E episodes.

    Attributes:
        scores: Kind of flaw, of :data:`KINDS` -> [E].
        copy_of: int [E], the earlier episode that an episode repeats; -1 for none.
    """

    scores: dict[str, Float[NDArray, " e"]]
    copy_of: Int[NDArray, " e"]

    @property
    def deviations(self) -> Float[NDArray, "k e"]:
        """How far above the median each score lies, at least 0, in standard deviations by the median absolute
        deviation, which a few odd episodes do not move."""
        return np.stack([_deviations(values, KINDS[kind][1]) for kind, values in self.scores.items()])

    @property
    def score(self) -> Float[NDArray, " e"]:
        """Of each episode the deviation of its worst flaw."""
        return self.deviations.max(0)

    @property
    def why(self) -> list[str]:
        """Its name; empty where nothing is above the median."""
        names, deviations = list(self.scores), self.deviations
        return [names[k] if deviations[k, e] > 0 else "" for e, k in enumerate(deviations.argmax(0))]

    def best(self, count: int) -> list[int]:
        """The ``count`` episodes with the lowest scores, in recording order."""
        return sorted(np.argsort(self.score, kind="stable")[:count].tolist())


def quality(dataset: Dataset, progress: bool = True, policy_error: Float[NDArray, " e"] | None = None) -> Quality:
    """Score every episode.

    Args:
        dataset: An open dataset.
        progress: Show a bar while pictures are decoded.
        policy_error: Error of a policy in each episode, where there is one to ask.

    Raises:
        UserError: It has no actions, or its videos cannot be decoded.
    """
    if ACTION not in dataset.columns:
        raise UserError(f"{dataset.root} has no column '{ACTION}'", "quality is of demonstrations")
    action = dataset.columns[ACTION].reshape(dataset.num_frames, -1).astype(np.float64)
    state = dataset.columns.get(OBS_STATE, action).reshape(dataset.num_frames, -1).astype(np.float64)
    moving = _moving(dataset, state)
    idle, stall = _standstill(dataset, moving)
    copy_of = _copies(dataset, np.concatenate([_standardised(state), _standardised(action)], 1))
    command = _smooth(dataset, action, ACTION)
    measured = _smooth(dataset, state, OBS_STATE) if OBS_STATE in dataset.columns else command
    scores = {
        "jerk": _jerk(dataset, command),
        "spike": np.maximum(_spike(dataset, command), _spike(dataset, measured)),
        "idle": idle,
        "stall": stall,
    }
    if dataset.cameras:
        scores["freeze"] = _freeze(dataset, moving, progress)
    scores |= {"duplicate": (copy_of >= 0).astype(float), "label_spread": _label_spread(dataset, state)}
    if CHUNK in dataset.columns and (dataset.columns[CHUNK_STEPS] > 0).any():
        scores["branch_gap"] = _branch_gap(dataset)
    if policy_error is not None:
        scores["policy_error"] = policy_error
    return Quality(scores, copy_of)


def _spans(dataset: Dataset) -> Iterator[tuple[int, int, int]]:
    """Episode, its first row, and one past its last."""
    for e, (a, b) in enumerate(zip(dataset.episode_from.tolist(), dataset.episode_to.tolist(), strict=True)):
        yield e, a, b


def _deviations(values: Float[NDArray, " e"], least: float) -> Float[NDArray, " e"]:
    above = values - np.median(values)
    return np.maximum(above, 0.0) / max(CONSISTENT * float(np.median(np.abs(above))), least)


def _standardised(values: Float[NDArray, "n d"]) -> Float[NDArray, "n d"]:
    """In standard deviations of each dimension that varies."""
    std = values.std(0)
    return (values - values.mean(0))[:, std > 1e-9] / std[std > 1e-9]


def _smooth(dataset: Dataset, values: Float[NDArray, "n d"], key: str) -> Float[NDArray, "n s"]:
    """Dimensions of a column that are not switched: a gripper jumps, and that is no flaw."""
    if not (dataset.root / ROBOT).is_file():
        return values
    robot = read_robot_spec(dataset.root)
    dims = robot.action if key == ACTION else robot.state
    return values[:, [d.kind != "gripper" for d in dims]]


def _steps(
    dataset: Dataset, values: Float[NDArray, "n d"], order: int
) -> tuple[Float[NDArray, "m d"], Int[NDArray, " m"]]:
    """Differences of an order within episodes, and whose they are."""
    steps = np.diff(values, order, axis=0)
    episode = dataset.columns["episode_index"]
    inside = episode[order:] == episode[: len(episode) - order]
    return steps[inside], episode[order:][inside]


def _jerk(dataset: Dataset, values: Float[NDArray, "n d"]) -> Float[NDArray, " e"]:
    """Root mean square of the third difference."""
    jerk, episode = _steps(dataset, values, 3)
    if not len(jerk):
        return np.zeros(dataset.num_episodes)
    scale = _steps(dataset, values, 1)[0].std(0)
    square = np.square(jerk / np.where(scale > 0, scale, np.inf)).sum(1) / max(1, np.count_nonzero(scale))
    count = np.bincount(episode, minlength=dataset.num_episodes)
    return np.sqrt(np.bincount(episode, square, dataset.num_episodes) / np.maximum(count, 1))


def _spike(dataset: Dataset, values: Float[NDArray, "n d"]) -> Float[NDArray, " e"]:
    """Largest second difference."""
    out = np.zeros(dataset.num_episodes)
    jumps, episode = _steps(dataset, values, 2)
    if not len(jumps):
        return out
    jumps = np.abs(jumps)
    usual = np.quantile(jumps, 0.99, axis=0)
    varies = usual > 0
    np.maximum.at(out, episode, (jumps[:, varies] / usual[varies]).max(1, initial=0.0))
    return out


def _moving(dataset: Dataset, state: Float[NDArray, "n d"]) -> Bool[NDArray, " n"]:
    """Whether the state of a frame differs from that before it; true of an episode's first frame if of its second."""
    steps, _ = _steps(dataset, state, 1)
    fast = np.quantile(np.abs(steps), 0.95, axis=0) if len(steps) else np.zeros(state.shape[1])
    out = np.zeros(dataset.num_frames, bool)
    out[1:] = (np.abs(np.diff(state, axis=0)) > MOVES * np.maximum(fast, 1e-9)).any(1)
    longer = dataset.episode_to - dataset.episode_from > 1
    out[dataset.episode_from] = False
    out[dataset.episode_from[longer]] = out[dataset.episode_from[longer] + 1]
    return out


def _standstill(dataset: Dataset, moving: Bool[NDArray, " n"]) -> tuple[Float[NDArray, " e"], Float[NDArray, " e"]]:
    """Seconds of standstill at the two ends together, and the longest between."""
    idle, stall = np.zeros((2, dataset.num_episodes))
    for e, a, b in _spans(dataset):
        moves = np.flatnonzero(moving[a:b])
        idle[e] = b - a - (moves[-1] - moves[0] + 1 if len(moves) else 0)
        stall[e] = np.diff(moves).max(initial=1) - 1
    return idle / dataset.fps, stall / dataset.fps


def _freeze(dataset: Dataset, moving: Bool[NDArray, " n"], progress: bool) -> Float[NDArray, " e"]:
    """Longest repetition of a picture while the robot moves, seconds."""
    out = np.zeros(dataset.num_episodes)
    for pictures in open_frames(dataset, list(dataset.cameras), progress=progress).values():
        for e, a, b in _spans(dataset):
            same = moving[a + 1 : b].copy()
            for at in range(0, len(same), BLOCK):  # an episode of large pictures at once would be gigabytes
                film = pictures[a + at : min(a + at + BLOCK + 1, b)].astype(np.int16)
                same[at : at + BLOCK] &= np.abs(np.diff(film, axis=0)).max((1, 2, 3), initial=0) <= FROZEN
            changes = np.flatnonzero(~np.concatenate([[False], same, [False]]))
            out[e] = max(out[e], np.diff(changes).max() - 1)
    return out / dataset.fps


def _copies(dataset: Dataset, values: Float[NDArray, "n d"]) -> Int[NDArray, " e"]:
    """Of each episode the first earlier one with the same task, about the same length, and the same motion; -1."""
    paths = np.empty((dataset.num_episodes, POINTS * values.shape[1]), np.float32)
    for e, a, b in _spans(dataset):
        at = np.linspace(a, b - 1, POINTS)
        low = np.floor(at).astype(int)
        part = (at - low)[:, None]
        paths[e] = (values[low] * (1 - part) + values[np.minimum(low + 1, b - 1)] * part).ravel()
    lengths = (dataset.episode_to - dataset.episode_from).astype(float)
    task = dataset.columns["task_index"][dataset.episode_from]
    out = np.full(dataset.num_episodes, -1)
    for e in range(1, dataset.num_episodes):
        alike = np.flatnonzero((task[:e] == task[e]) & (np.abs(lengths[:e] / lengths[e] - 1) < 0.1))
        near = np.sqrt(((paths[alike] - paths[e]) ** 2).mean(1)) < SAME
        if near.any():
            out[e] = alike[near.argmax()]
    return out


def _label_spread(dataset: Dataset, state: Float[NDArray, "n d"]) -> Float[NDArray, " e"]:
    """Distance of chunks from the mean chunk of the nearest states of other episodes with the same task.

    What the state does not tell, pictures may: where a thing lies, for one. It is a bound of what is irreducible from
    above, and comparable between episodes.
    """
    frames = np.unique(np.linspace(0, dataset.num_frames - 1, min(SAMPLED, dataset.num_frames)).astype(int))
    labels = ActionChunks(dataset, min(HORIZON, _label_steps(dataset)))
    chunks = labels.take(frames).astype(np.float64)
    std = dataset.columns[ACTION].reshape(dataset.num_frames, -1).std(0)
    if not (std > 1e-9).any():
        return np.zeros(dataset.num_episodes)
    chunks = (chunks[..., std > 1e-9] / std[std > 1e-9]).reshape(len(frames), -1)
    points = _standardised(state)[frames]
    episode, task = dataset.columns["episode_index"][frames], dataset.columns["task_index"][frames]
    apart = np.full(len(frames), np.nan)
    for kind in np.unique(task):
        rows = np.flatnonzero(task == kind)
        x = points[rows]
        squares = (x**2).sum(1)
        for part in np.array_split(rows, -(-len(rows) // 500)):
            distance = squares - 2 * points[part] @ x.T  # and a constant of the row
            distance[episode[part][:, None] == episode[rows]] = np.inf
            count = min(NEIGHBOURS, len(rows))
            nearest = np.argpartition(distance, count - 1, axis=1)[:, :count]
            known = np.isfinite(np.take_along_axis(distance, nearest, 1))
            total = (chunks[rows[nearest]] * known[..., None]).sum(1)
            of = np.maximum(known.sum(1), 1)[:, None]
            off = np.sqrt(((chunks[part] - total / of) ** 2).mean(1))
            apart[part] = np.where(known.any(1), off, np.nan)
    known = ~np.isnan(apart)
    frames_of = np.bincount(episode[known], minlength=dataset.num_episodes)
    return np.bincount(episode[known], apart[known], dataset.num_episodes) / np.maximum(frames_of, 1)


def _label_steps(dataset: Dataset) -> int:
    """Steps of the dataset's chunk labels; many where it has none."""
    if CHUNK not in dataset.columns:
        return HORIZON
    return dataset.columns[CHUNK].shape[1] // dataset.columns[ACTION].reshape(dataset.num_frames, -1).shape[1]


def _branch_gap(dataset: Dataset) -> Float[NDArray, " e"]:
    """Root mean square of chunk labels minus recorded actions, over the steps that both have."""
    action = dataset.columns[ACTION].reshape(dataset.num_frames, -1).astype(np.float64)
    std = action.std(0)
    labels = dataset.columns[CHUNK].reshape(dataset.num_frames, -1, action.shape[1])
    out, count = np.zeros((2, dataset.num_episodes))
    rows, episode = np.arange(dataset.num_frames), dataset.columns["episode_index"]
    for step in range(labels.shape[1]):
        both = np.flatnonzero((dataset.columns[CHUNK_STEPS] > step) & (rows + step < dataset.frame_end))
        off = (labels[both, step] - action[both + step])[:, std > 1e-9] / std[std > 1e-9]
        out += np.bincount(episode[both], (off**2).mean(1), dataset.num_episodes)
        count += np.bincount(episode[both], minlength=dataset.num_episodes)
    return np.sqrt(out / np.maximum(count, 1))


def table(found: Quality, shown: int = 10) -> str:
    """The worst episodes as text, above the median of all."""
    names = list(found.scores)
    lines = [f"  {name:<14}{KINDS[name][0]}" for name in names]
    lines += ["", f"{'episode':>9}{'score':>8}  {'why':<14}" + "".join(f"{name:>14}" for name in names)]
    for e in np.argsort(-found.score, kind="stable")[:shown]:
        row = "".join(f"{values[e]:>14.3g}" for values in found.scores.values())
        copy = f"  repeats episode {found.copy_of[e]}" if found.copy_of[e] >= 0 else ""
        lines.append(f"{e:>9}{found.score[e]:>8.1f}  {found.why[e]:<14}{row}{copy}")
    middle = "".join(f"{np.median(values):>14.3g}" for values in found.scores.values())
    lines.append(f"{'median':>9}{np.median(found.score):>8.1f}  {'':<14}{middle}")
    return "\n".join(lines)
