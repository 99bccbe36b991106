"""Open-loop error: what a policy would have commanded in recorded states, beside what was commanded there.

It moves nothing, so it is cheap and the first thing to look at. It is no success rate: a policy meets states of its own
making, and several ways may be right where one was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from vla_stack.data.chunks import ActionChunks
from vla_stack.data.dataset import CHUNK, Dataset
from vla_stack.data.labels import reach
from vla_stack.envs.making import check_fit
from vla_stack.errors import UserError
from vla_stack.evaluation.recorded import observations, recorded_robot
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.runtime.executor import default_execute
from vla_stack.schema import ACTION, OBS_STATE, Dim
from vla_stack.statistics import Estimate, mean_interval

OVER = "episodes"
BATCH = 32  # observations that a policy is asked about at once
SUBTASK = "subtask_index"  # a column of labels: stages reached so far
RECORDED, LABELS = "recorded actions", "chunk labels"


@dataclass(frozen=True)
class Errors:
    """Absolute errors of a policy's chunks, from one target.

    Attributes:
        dims: The action's dimensions, A.
        episode: int [N], episode of each chunk.
        groups: What the chunks are told apart by -> name of each chunk's group [N].
        error: |predicted - target| float [N, H, A], in the units of ``dims``; NaN past the end of what was recorded.
        still: The error of standing still, mean over all chunks and steps, [A]; 0 where nothing ever moves.
    """

    dims: tuple[Dim, ...]
    episode: Int[NDArray, " n"]
    groups: dict[str, NDArray[np.str_]]
    error: Float[NDArray, "n h a"]
    still: Float[NDArray, " a"]

    @property
    def relative(self) -> Float[NDArray, "n h"]:
        """Errors in units of those of standing still, their mean over the dimensions that move: 1 is no better."""
        moves = self.still > 0
        return (self.error[..., moves] / self.still[moves]).mean(-1)

    def mean(self, values: NDArray[np.floating], chunks: NDArray[np.bool_] | None = None) -> Estimate | None:
        """Mean over episodes of an episode's mean of ``values`` [N, ...]; None where none is known.

        Args:
            values: NaN counts for nothing.
            chunks: Those that count, bool [N]; all where it is not given.
        """
        values = values.reshape(len(self.episode), -1)
        known = ~np.isnan(values) & (True if chunks is None else chunks[:, None])
        rows = np.broadcast_to(self.episode[:, None], values.shape)[known]
        if not len(rows):
            return None
        count = np.bincount(rows)
        total = np.bincount(rows, values[known])
        return mean_interval(total[count > 0] / count[count > 0], OVER)

    def to_json(self) -> dict[str, Any]:
        """All figures as plain JSON; steps count from 1, as executed actions do."""
        horizon, relative = self.error.shape[1], self.relative

        def figures(values: Float[NDArray, "n h"]) -> dict[str, Any]:
            steps = [{"step": h + 1, **plain(self.mean(values[:, h]))} for h in range(horizon)]
            return {"all": plain(self.mean(values)), "by_step": steps}

        def of_group(chunks: NDArray[np.bool_]) -> dict[str, Any]:
            by_dimension = [plain(self.mean(self.error[..., i], chunks)) for i in range(len(self.dims))]
            return {"relative": plain(self.mean(relative, chunks)), "dimensions": by_dimension}

        return {
            "chunks": len(self.episode),
            "relative": figures(relative),
            "dimensions": [
                {"name": d.name, "unit": d.unit, "standing_still": float(self.still[i]), **figures(self.error[..., i])}
                for i, d in enumerate(self.dims)
            ],
            "by": {
                kind: {str(name): of_group(names == name) for name in np.unique(names)}
                for kind, names in self.groups.items()
            },
            "episodes": [
                {
                    "episode": int(e),
                    "relative": float(np.nanmean(relative[self.episode == e])),
                    "dimensions": np.nanmean(self.error[self.episode == e], axis=(0, 1)).tolist(),
                }
                for e in np.unique(self.episode)
            ],
        }


def open_loop(
    policy: ChunkPolicy,
    dataset: Dataset,
    episodes: int = 100,
    every: int | None = None,
    seed: int = 0,
    on_chunks: Callable[[int], Any] | None = None,
    among: Sequence[int] | None = None,
) -> dict[str, Errors]:
    """Errors of a policy's chunks in the states of a dataset that it was not trained on.

    The noise of a chunk follows from the seed, the episode and the frame, whatever is asked beside it.

    Args:
        policy: The policy.
        dataset: An open dataset.
        episodes: How many to look at, at most; they lie evenly over the dataset.
        every: Frames between two chunks, as if so many actions were executed; None for the policy's own choice.
        seed: Of the noise.
        on_chunks: Called with the number of chunks after each batch.
        among: Indices of the episodes to take them from; all by default.

    Returns:
        By target: :data:`RECORDED`, the series of recorded actions up to a gap in time, and :data:`LABELS` where the
        dataset has them.

    Raises:
        UserError: The dataset's robot does not fit the policy, or it has no actions.
    """
    if ACTION not in dataset.columns:
        raise UserError(f"{dataset.root} has no column '{ACTION}': there is nothing to compare with")
    robot = recorded_robot(dataset)
    check_fit(robot, policy.spec.robot, str(dataset.root))
    asked: list[int] = []
    predicted: list[Float[NDArray, "b h a"]] = []
    known = range(dataset.num_episodes) if among is None else among
    chosen = [known[i] for i in spread(len(known), episodes)]
    stream = observations(dataset, policy.spec, chosen, every or default_execute(policy.spec))
    for batch in batched(stream, BATCH):
        rows, seen = zip(*batch, strict=True)
        predicted.append(policy.infer(list(seen), [noise_seed(dataset, row, seed) for row in rows]).actions)
        asked += rows
        if on_chunks is not None:
            on_chunks(len(rows))
    frames, chunks = np.array(asked, np.int64), np.concatenate(predicted)
    states = dataset.columns.get(OBS_STATE, np.zeros((dataset.num_frames, 0), np.float32))[frames]
    width = chunks.shape[-1] - states.shape[-1]  # what is not measured stands at 0
    still = np.stack([robot.standstill(np.pad(state, (0, max(0, width)))) for state in states])
    dims = robot.action if robot.name == policy.spec.robot.name else policy.spec.robot.action
    out = {}
    for target, source in targets(dataset).items():
        labels = ActionChunks(source, chunks.shape[1], np.ones(dataset.num_frames, bool))  # a series ends at a gap
        steps = np.arange(chunks.shape[1])
        # Past the chunk's end, or what was executed meanwhile: the policy's own, and no label.
        unknown = ((steps >= labels.steps[frames, None]) | (steps < labels.given[frames, None]))[..., None]
        wanted = np.where(unknown, np.nan, labels.take(frames).astype(np.float64))
        moved = np.nanmean(np.abs(wanted - still[:, None]), axis=(0, 1))
        if not moved.any():
            raise UserError(f"{dataset.root}: nothing moves in these episodes", "record some motion first")
        episode = dataset.columns["episode_index"][frames]
        out[target] = Errors(dims, episode, groups(dataset, frames), np.abs(chunks - wanted), moved)
    return out


def targets(dataset: Dataset) -> dict[str, Dataset]:
    """What a policy's chunks can be compared with, each as a dataset that has no other.

    Labelled frames of which none is the control step after another, as of a collection of random ones or of those in
    which a policy asked, are no series of actions.
    """
    recorded = {RECORDED: replace(dataset, columns=dataset.columns.without(CHUNK))}
    if CHUNK not in dataset.columns:
        return recorded
    series = (reach(dataset, np.ones(dataset.num_frames, bool)) > 1).any()
    return {**(recorded if series else {}), LABELS: dataset}


def groups(dataset: Dataset, frames: Int[NDArray, " n"]) -> dict[str, NDArray[np.str_]]:
    """What frames are told apart by: task, and stage where it is labelled, else the quarter of the episode."""
    columns, episode = dataset.columns, dataset.columns["episode_index"][frames]
    out = {"task": np.array(dataset.tasks)[columns["task_index"][frames]]}
    if SUBTASK in columns and (columns[SUBTASK] > 0).any():
        return out | {"stage": np.array([f"stage {i}" for i in columns[SUBTASK][frames]])}
    first, end = dataset.episode_from[episode], dataset.episode_to[episode]
    return out | {"part": np.array([f"quarter {i + 1}" for i in (frames - first) * 4 // (end - first)])}


def spread(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``count`` indices, evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(int)).tolist()


def noise_seed(dataset: Dataset, row: int, seed: int) -> int:
    """Seed of one chunk's noise."""
    place = (int(dataset.columns[name][row]) for name in ("episode_index", "frame_index"))
    return int(np.random.SeedSequence((seed, *place)).generate_state(1)[0])


def plain(estimate: Estimate | None) -> dict[str, Any]:
    """An estimate as JSON; bounds that nothing is known of are null."""
    if estimate is None:
        return {"mean": None, "low": None, "high": None, "episodes": 0}
    low, high = (x if math.isfinite(x) else None for x in estimate.interval)
    return {"mean": estimate.value, "low": low, "high": high, "episodes": estimate.n}


def table(found: dict[str, Errors], worst: int = 3) -> str:
    """The errors as text: by step and dimension, then by group, then the worst episodes."""
    lines = []
    for target, errors in found.items():
        horizon, figures = errors.error.shape[1], errors.to_json()
        shown = sorted({0, horizon // 4, horizon // 2, horizon - 1})
        names = [f"{d.name}, {d.unit}" for d in errors.dims]
        width = (
            max(map(len, ["relative, by task", *names, *(n for group in figures["by"].values() for n in group)])) + 2
        )
        heads = "".join(f"{f'step {h + 1}':>10}" for h in shown)
        lines += ["", f"mean absolute error from {target}, {figures['chunks']} chunks of {horizon} steps"]
        lines.append(f"{'':<{width}}{heads}{'all':>10}   95 % interval        standing still")
        for name, row in zip(names, figures["dimensions"], strict=True):
            lines.append(f"{name:<{width}}{_by_step(row, shown)}{_all(row['all'])}   {_number(row['standing_still'])}")
        lines.append(
            f"{'relative':<{width}}{_by_step(figures['relative'], shown)}{_all(figures['relative']['all'])}   1"
        )
        for kind, group in figures["by"].items():
            lines.append(f"relative, by {kind}")
            for name, row in group.items():
                mean = row["relative"]
                lines.append(f"{name:<{width}}{'':>{10 * len(shown)}}{_all(mean)}   {mean['episodes']} episodes")
        last = sorted(figures["episodes"], key=lambda e: -e["relative"])[:worst]
        lines.append("largest, relative: " + ", ".join(f"episode {e['episode']} {e['relative']:.2f}" for e in last))
    return "\n".join(lines)


def _by_step(row: dict[str, Any], shown: Sequence[int]) -> str:
    return "".join(f"{_number(row['by_step'][h]['mean']):>10}" for h in shown)


def _all(row: dict[str, Any]) -> str:
    span = f"{_number(row['low'])} – {_number(row['high'])}"
    return f"{_number(row['mean']):>10}   {span:<18}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
