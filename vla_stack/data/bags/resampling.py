"""A recording at a fixed rate: at each tick the newest sample of every source, never one of the future."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.bags.files import Bag
from vla_stack.data.bags.mapping import BagMap
from vla_stack.data.bags.series import Recording, Series
from vla_stack.errors import UserError

MAX_TICKS = 5_000_000  # of one recording; 46 hours at 30 Hz
MIN_FRAMES = 2  # of an episode


@dataclass(frozen=True)
class Ticks:
    """What a dataset is told of a recording; ``T`` ticks.

    Attributes:
        stamps: int64 [T], ns.
        state: float32 [T, S], in the order of ``state_names``.
        action: float32 [T, A], in the order of ``action_names``, with which ``state_names`` begins.
        rows: Camera -> int64 [T], place of the picture among the messages of its topic.
        tasks: T instructions.
        episodes: First tick and one past the last, of each episode.
        ages: Source -> largest age of a sample that is used, seconds.
        state_names: Joints of ``state``.
        action_names: Joints of ``action``.
    """

    stamps: NDArray[np.int64]
    state: NDArray[np.float32]
    action: NDArray[np.float32]
    rows: dict[str, NDArray[np.int64]]
    tasks: list[str]
    episodes: list[tuple[int, int]]
    ages: dict[str, float]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]


def resample(bag: Bag, how: BagMap, recording: Recording) -> Ticks:
    """Everything but the pictures at the ticks of a dataset.

    The first tick is the first moment at which every source has a sample; the last one is that of the measurement or
    picture that ends first.

    Raises:
        UserError: A joint is missing or not finite, or the sources have no time in common.
    """
    commanded = [name for series in recording.action for name in series.names]
    measured = [name for series in recording.state for name in series.names]
    action_names = how.joints or tuple(commanded)
    state_names = how.joints or (*action_names, *(name for name in measured if name not in action_names))
    for topic, wanted, there in ((how.action, action_names, commanded), (how.state, state_names, measured)):
        if missing := [name for name in wanted if name not in there]:
            hint = f"its joints are {', '.join(there)}; say which to take: --joints"
            raise UserError(f"{bag.path}: '{topic}' has no joint '{missing[0]}'", hint)
    state = [series for series in recording.state if set(series.names) & set(state_names)]
    action = [series for series in recording.action if set(series.names) & set(action_names)]
    seen = [*state, *recording.cameras.values()]  # what goes stale; a command and an instruction hold
    all_sources = [*seen, *action, *([recording.tasks] if recording.tasks else [])]
    stamps = _stamps(bag, how, all_sources, seen)
    episodes = _episodes(how, seen, recording.splits, stamps)
    used = np.zeros(len(stamps), bool)
    for first, end in episodes:
        used[first:end] = True
    sources = {"state": state, "action": action, **{name: [s] for name, s in recording.cameras.items()}}
    return Ticks(
        stamps,
        _positions(bag, how, how.state, state, state_names, stamps),
        _positions(bag, how, how.action, action, action_names, stamps),
        {name: np.frombuffer(s.rows, np.int64)[s.newest(stamps)] for name, s in recording.cameras.items()},
        _tasks(how, recording.tasks, stamps),
        episodes,
        {n: max(float(_ages(s, stamps)[used].max(initial=0.0)) for s in group) for n, group in sources.items()},
        *(tuple(state_names), tuple(action_names)),
    )


def _stamps(bag: Bag, how: BagMap, sources: list[Series], seen: list[Series]) -> NDArray[np.int64]:
    """Times of the ticks, ns."""
    start, end = max(s.stamps[0] for s in sources), min(s.stamps[-1] for s in seen)
    if end < start:
        raise UserError(
            f"{bag.path}: there is no moment at which all topics have a message",
            "their clocks may differ: --log-time takes the recorder's",
        )
    count = int((end - start) * how.rate_hz / 1e9) + 1
    if count > MAX_TICKS:
        hours = (end - start) / 3.6e12
        raise UserError(f"{bag.path} covers {hours:.0f} hours", "correct its stamps, --log-time, or split it")
    stamps = start + np.rint(np.arange(count) * (1e9 / how.rate_hz)).astype(np.int64)
    return stamps[stamps <= end]


def _ages(series: Series, stamps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Age of the sample at each tick, seconds."""
    return np.asarray((stamps - series.at(series.newest(stamps))) * 1e-9, np.float64)


def _positions(
    bag: Bag, how: BagMap, topic: str, group: list[Series], names: tuple[str, ...], stamps: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Joint positions [T, len(names)] at the ticks, grippers as opening ratios."""
    out = np.empty((len(stamps), len(names)), np.float32)
    for series in group:
        values = np.frombuffer(series.values, np.float64).reshape(-1, len(series.names))[series.newest(stamps)]
        for column, name in enumerate(series.names):
            if name in names:
                x = values[:, column]
                if name in how.grippers:
                    closed, opened = how.grippers[name]
                    x = np.clip((x - closed) / (opened - closed), 0.0, 1.0)
                out[:, names.index(name)] = x
    bad = np.argwhere(~np.isfinite(out))
    if len(bad):
        tick, column = bad[0]
        raise UserError(
            f"{bag.path}: joint '{names[column]}' of '{topic}' is {out[tick, column]} at {stamps[tick] * 1e-9:.3f} s",
            "cut that part out, or take the other joints: --joints",
        )
    return out


def _tasks(how: BagMap, series: Series | None, stamps: NDArray[np.int64]) -> list[str]:
    if series is None:
        return [how.task] * len(stamps)
    return [series.values[i] for i in series.newest(stamps)]


def _episodes(how: BagMap, seen: list[Series], splits: list[int], stamps: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of ticks without a gap and of one part of the recording."""
    fresh = np.ones(len(stamps), bool)
    if how.split_gap:
        for series in seen:
            fresh &= _ages(series, stamps) <= how.split_gap
    part = np.searchsorted(np.sort(np.array(splits, np.int64)), stamps, side="right")
    ends = np.flatnonzero((np.diff(part) != 0) | (np.diff(fresh.astype(np.int8)) != 0)) + 1
    bounds = [0, *ends.tolist(), len(stamps)]
    return [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if fresh[a] and b - a >= MIN_FRAMES]
