"""Changes to whole datasets: label columns for old ones, corrected labels, several made one, some episodes of one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vla_stack.data import stats as statistics
from vla_stack.data.building import built
from vla_stack.data.chunks import without_chunks
from vla_stack.data.dataset import (
    CHUNK,
    CHUNK_GIVEN,
    CHUNK_STEPS,
    Dataset,
    open_dataset,
    read_episode_rows,
    read_parquet,
)
from vla_stack.data.digests import write_json, write_parquet
from vla_stack.data.features import INDEX_FEATURES, NUMERIC, Features, arrow_column, read_robot_spec
from vla_stack.data.integrity import count_frames
from vla_stack.data.labels import (
    CONTROL_SOURCE,
    EPISODE_UID,
    INTERVENTION,
    SEGMENT_INDEX,
    SEGMENT_TYPE,
    arms,
    content_uids,
    demo_labels,
    label_columns,
)
from vla_stack.data.layout import INFO, STATS, read_info, read_json
from vla_stack.data.sidecar import EpisodeFacts, facts_row, read_facts, write_facts
from vla_stack.data.store import Episode, EpisodeStore, check_same, clear_staging, locked
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.schema import CAPTURE_TIME, RobotSpec

CHUNKS = (CHUNK, CHUNK_STEPS, CHUNK_GIVEN)
SCRIPTED = "command.sent"  # a column of `vla collect`, whose demonstrators are scripts


def backfill(root: Path) -> list[str]:
    """Give a dataset of demonstrations the label columns, as all-demonstration; run again after a crash.

    Returns:
        The columns that were added; none where it has them all.

    Raises:
        UserError: The dataset does not describe its robot, or cannot be opened.
    """
    read_info(root)  # a folder that is no dataset is left as it is
    with locked(root):
        dataset, robot = open_dataset(root), read_robot_spec(root)
        missing = [name for name in label_columns(robot) if name not in dataset.features]
        if missing:
            features = with_labels(dataset.features, robot)
            columns = _demo_columns(dataset, robot)
            for path in dict.fromkeys(dataset.data_file(e) for e in range(dataset.num_episodes)):
                table = read_parquet(path)
                rows = table["index"].to_numpy()
                write_parquet(
                    root,
                    path.relative_to(root).as_posix(),
                    _completed(table, features, {k: v[rows] for k, v in columns.items()}),
                )
            _add_row_stats(root, dataset, {name: columns[name] for name in missing})
            update_stats(root, {name: columns[name] for name in missing})
            write_json(root, INFO, read_info(root) | {"features": features})
            write_facts(root, [facts_row(EpisodeFacts(), int(u), 0, 0) for u in np.unique(columns[EPISODE_UID])])
    clear_staging(root)
    return missing


def relabel(root: Path, episode: int, frames: range, segment: Segment) -> int:
    """Correct the segment type of some frames of an episode; what follows from it is corrected as well.

    Args:
        root: Dataset folder.
        episode: Index of the episode.
        frames: Frames of that episode.
        segment: What they are.

    Returns:
        How many frames have changed.

    Raises:
        UserError: There is no such episode, frame or column.
    """
    read_info(root)  # a folder that is no dataset is left as it is
    with locked(root):
        dataset = open_dataset(root)
        if SEGMENT_TYPE not in dataset.columns:
            raise UserError(f"{root} has no column '{SEGMENT_TYPE}'", f"run `vla data backfill {root}` first")
        if not 0 <= episode < dataset.num_episodes:
            raise UserError(f"{root} has no episode {episode}", f"it has 0 … {dataset.num_episodes - 1}")
        a, b = int(dataset.episode_from[episode]), int(dataset.episode_to[episode])
        if not 0 <= frames.start < frames.stop <= b - a:
            raise UserError(f"episode {episode} has frames 0:{b - a}, not {frames.start}:{frames.stop}")
        kind, source = dataset.columns[SEGMENT_TYPE][a:b].copy(), dataset.columns[CONTROL_SOURCE][a:b].copy()
        parted = np.diff(dataset.columns[SEGMENT_INDEX][a:b]) != 0
        parted[max(0, frames.start - 1) : frames.stop] = False  # segments that touch what was named may become one
        changed = int((kind[frames.start : frames.stop] != segment).sum())
        kind[frames.start : frames.stop] = segment
        policy = kind == Segment.AUTONOMOUS
        source[policy] = Control.POLICY
        source[~policy & (source == Control.POLICY)] = Control.HUMAN
        human = np.isin(kind, (Segment.RECOVERY, Segment.CORRECTION))
        values: dict[str, NDArray[Any]] = {
            SEGMENT_TYPE: kind,
            CONTROL_SOURCE: source,
            INTERVENTION: human,
            SEGMENT_INDEX: np.append(0, np.cumsum(parted | (np.diff(kind) != 0))),
        }
        if arms(read_robot_spec(root)) == 1:  # which arm a person moved is not known otherwise
            values["intervention_mask"] = human
        path, whole = dataset.data_file(episode), {}
        table = read_parquet(path)
        rows = np.flatnonzero(table["episode_index"].to_numpy() == episode)
        for name, new in values.items():
            column = table[name].to_numpy().copy()
            column[rows] = new
            table = table.set_column(table.column_names.index(name), name, arrow_column(column, dataset.features[name]))
            whole[name] = np.concatenate([dataset.columns[name][:a], new, dataset.columns[name][b:]])
        write_parquet(root, path.relative_to(root).as_posix(), table)
        update_stats(root, whole)
        uid, facts = int(dataset.columns[EPISODE_UID][a]), read_facts(root)
        if uid in facts:
            recoveries = len(np.unique(values[SEGMENT_INDEX][kind == Segment.RECOVERY]))
            people = int((source == Control.HUMAN).sum())
            write_facts(root, [facts[uid] | {"n_recoveries": recoveries, "human_frames": people}])
    clear_staging(root)
    return changed


def merge(roots: Sequence[Path], target: Path) -> int:
    """Write the episodes of several datasets of one robot into a new one.

    Label columns, and chunk labels (empty ones), are added to those without where another one has them. The new one is
    there with all its episodes or not at all.

    Returns:
        Episodes written.

    Raises:
        UserError: The datasets differ in robot, rate or columns, the target exists, two of them hold the same episode,
            or a source packs several episodes into a video file.
    """
    _require_free(target, "merge")
    datasets = [open_dataset(root) for root in roots]
    robot = read_robot_spec(roots[0])
    labelled = any(SEGMENT_TYPE in d.features for d in datasets)
    chunked = {key: d.features[key] for d in datasets for key in CHUNKS if key in d.features}

    def completed(features: Features, spec: RobotSpec) -> Features:
        return with_chunks(with_labels(features, spec) if labelled else features, chunked)

    features = completed(datasets[0].features, robot)
    for dataset in datasets:
        spec, remedy = read_robot_spec(dataset.root), "record them alike, or merge only those that are"
        own = completed(dataset.features, spec)
        check_same(roots[0], robot, spec, features, own, str(dataset.root), remedy)
        if dataset.fps != robot.rate_hz:
            raise UserError(f"{dataset.root} has {dataset.fps:g} fps, {roots[0]} {robot.rate_hz:g}", remedy)
    fills = [_demo_columns(d, robot) if labelled and SEGMENT_TYPE not in d.features else {} for d in datasets]
    for dataset, fill in zip(datasets, fills, strict=True):
        if lacking := chunked.keys() - dataset.features.keys():
            empty = without_chunks(dataset.num_frames, chunked[CHUNK]["shape"][0])
            fill.update({key: empty[key] for key in lacking})
    _require_distinct(datasets)
    _write(target, robot, features, [(d, range(d.num_episodes), fill) for d, fill in zip(datasets, fills, strict=True)])
    return sum(d.num_episodes for d in datasets)


def select(root: Path, episodes: Sequence[int], target: Path) -> int:
    """Write some episodes of a dataset into a new one, which is there with all of them or not at all.

    Returns:
        Episodes written.

    Raises:
        UserError: There is no such episode, the target exists, or a video file holds several episodes.
    """
    _require_free(target, "select")
    dataset, robot = open_dataset(root), read_robot_spec(root)
    if odd := [e for e in episodes if not 0 <= e < dataset.num_episodes]:
        raise UserError(f"{root} has no episode {odd[0]}", f"it has 0 … {dataset.num_episodes - 1}")
    _write(target, robot, dataset.features, [(dataset, episodes, {})])
    return len(episodes)


def check_select(root: Path, target: Path) -> None:
    """Whether :func:`select` can write episodes of a dataset, before it is worked out which; it raises what that does.

    Raises:
        UserError: As :func:`select`.
    """
    _require_free(target, "select")
    dataset, _ = open_dataset(root), read_robot_spec(root)
    for e, row in enumerate(read_episode_rows(root, with_stats=True)):
        _check_videos(dataset, e, row)


def _require_free(target: Path, verb: str) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists", f"{verb} into a new folder")


def _require_distinct(datasets: Sequence[Dataset]) -> None:
    """Raise :class:`UserError` where two datasets hold an episode of one uid or of the same motion: it is learnt twice,
    and judged by what was learnt from itself."""
    seen: dict[int, Dataset] = {}
    for dataset in datasets:
        named = [dataset.columns[EPISODE_UID][dataset.episode_from]] if EPISODE_UID in dataset.columns else []
        for uids in (content_uids(dataset), *named):
            for e, uid in enumerate(uids.tolist()):
                if (other := seen.setdefault(uid, dataset)) is not dataset:
                    what = f"episode {e} of {dataset.root} is in more than one of the datasets, also in {other.root}"
                    raise UserError(what, "name each once")


def _write(
    target: Path,
    robot: RobotSpec,
    features: Features,
    sources: Sequence[tuple[Dataset, Sequence[int], dict[str, NDArray[Any]]]],
) -> None:
    """A new dataset of some episodes of others; with the columns that each of those lacks."""
    rows = [read_episode_rows(dataset.root, with_stats=True) for dataset, _, _ in sources]
    for (dataset, episodes, _), of in zip(sources, rows, strict=True):
        for e in episodes:
            _check_videos(dataset, e, of[e])
    with built(target, "merging") as work:
        store = EpisodeStore(work, robot, features)
        for (dataset, episodes, fill), of in zip(sources, rows, strict=True):
            facts = read_facts(dataset.root)
            for e in episodes:
                store.commit(_episode(dataset, e, features, fill, of[e], facts, store.staging))


def with_labels(features: Features, robot: RobotSpec) -> Features:
    """Features of a dataset and the label columns, in the order in which a recorder writes them."""
    labels = {name: column.feature() for name, column in label_columns(robot).items()}
    head = {k: v for k, v in features.items() if k not in INDEX_FEATURES and k not in labels}
    return head | labels | {k: features[k] for k in INDEX_FEATURES}


def with_chunks(features: Features, like: Features) -> Features:
    """Features of a dataset and the columns of chunk labels that others have."""
    head = {k: v for k, v in features.items() if k not in INDEX_FEATURES}
    return head | {k: v for k, v in like.items() if k not in head} | {k: features[k] for k in INDEX_FEATURES}


def _demo_columns(dataset: Dataset, robot: RobotSpec) -> dict[str, NDArray[Any]]:
    """Label columns of a dataset of demonstrations, [N] or [N, n]; those that it has stay."""
    n, columns = dataset.num_frames, dataset.columns
    seconds = columns.get(CAPTURE_TIME, columns["timestamp"])
    constant = demo_labels(robot, 0, scripted=SCRIPTED in columns)
    out = {name: np.repeat(np.asarray(value)[None], n, 0) for name, value in constant.items()}
    out["t_capture_ns"] = np.round(seconds * 1e9).astype(np.int64)
    out[EPISODE_UID] = content_uids(dataset)[columns["episode_index"]]
    return {name: columns.get(name, out[name]) for name in label_columns(robot)}


def _completed(table: pa.Table, features: Features, columns: dict[str, NDArray[Any]]) -> pa.Table:
    """The table with further columns, in the order of the features."""
    for name, values in columns.items():
        if name not in table.column_names:
            dtype = np.dtype(features[name]["dtype"])
            table = table.append_column(name, arrow_column(values.astype(dtype), features[name]))
    return table.select([k for k, ft in features.items() if ft["dtype"] != "video"])


def _episode(
    dataset: Dataset,
    e: int,
    features: Features,
    fill: dict[str, NDArray[Any]],
    row: dict[str, Any],
    facts: dict[int, dict[str, Any]],
    staging: Path,
) -> Episode:
    """An episode of a dataset on its way into another one."""
    a, b = int(dataset.episode_from[e]), int(dataset.episode_to[e])
    table = read_parquet(dataset.data_file(e))
    table = table.filter(pc.equal(table["episode_index"], e)).combine_chunks()
    table = _completed(table, features, {k: v[a:b] for k, v in fill.items()})
    used, local = np.unique(table["task_index"].to_numpy(), return_inverse=True)
    numbers = {"episode_index": np.zeros(b - a, np.int64), "index": np.arange(b - a), "task_index": local}
    for name, values in numbers.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    columns = {k: v[a:b] for k, v in (dataset.columns | fill).items()}
    numeric = [k for k, ft in features.items() if ft["dtype"] in NUMERIC]
    stats = {k: statistics.column_stats(columns[k]) for k in numeric}
    for name, value in row.items():
        if name.startswith("stats/") and (key := name.split("/")[1]) not in numeric:
            stats.setdefault(key, {})[name.split("/")[2]] = np.asarray(value)
    videos = {}
    for key in (k for k, ft in features.items() if ft["dtype"] == "video"):
        videos[key] = staging / f"merge-{key}.mp4"
        shutil.copyfile(dataset.video_file(e, key), videos[key])
    uid = int(columns[EPISODE_UID][0]) if EPISODE_UID in columns else None
    known = None if uid is None else facts.get(uid) or facts_row(EpisodeFacts(), uid, 0, 0)
    return Episode(table, videos, stats, tuple(dataset.tasks[i] for i in used), known)


def _check_videos(dataset: Dataset, e: int, row: dict[str, Any]) -> None:
    """Raise :class:`UserError` where an episode's video is not there, or is not its alone."""
    for key in (k for k, ft in dataset.features.items() if ft["dtype"] == "video"):
        source = dataset.video_file(e, key)
        frames = count_frames(source)
        if frames < row["length"]:
            what = f"{source} holds {frames} frames, {row['length']} are needed"
            raise UserError(what, f"run `vla data check {dataset.root}`")
        if row[f"videos/{key}/from_timestamp"] != 0.0 or frames != row["length"]:
            remedy = "merge with `lerobot-edit-dataset --operation.type merge`, or merge before you compact"
            raise UserError(f"{source} holds several episodes", remedy)


def _add_row_stats(root: Path, dataset: Dataset, columns: dict[str, NDArray[Any]]) -> None:
    """Statistics of new columns in the rows of ``meta/episodes``, whose files must all have the same columns."""
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        table = read_parquet(path)
        spans = [(dataset.episode_from[e], dataset.episode_to[e]) for e in table["episode_index"].to_pylist()]
        for key, values in columns.items():
            rows = [statistics.column_stats(values[a:b]) for a, b in spans]
            for name in rows[0] if f"stats/{key}/count" not in table.column_names else ():
                kind = pa.list_(pa.int64() if name == "count" else pa.float64())
                table = table.append_column(f"stats/{key}/{name}", pa.array([r[name].tolist() for r in rows], kind))
        write_parquet(root, path.relative_to(root).as_posix(), table)


def update_stats(root: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Statistics of some columns, over the whole dataset."""
    entries = statistics.to_json({name: statistics.column_stats(values) for name, values in columns.items()})
    old = read_json(root / STATS) if (root / STATS).exists() else {}
    write_json(root, STATS, old | entries)
