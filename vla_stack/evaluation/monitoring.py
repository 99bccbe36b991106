"""Fits a failure monitor to a policy's successful rollouts, and says of rollouts when it would have called for help."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.rollout.records import IDLE, EpisodeRecord, EvalResult
from vla_stack.runtime.monitor import LATE, NEIGHBOURS, ON_ROBOT, STALL, Bank, Decided, Monitor, Scorer, Watch
from vla_stack.schema import Chunks, Continuation, Observation
from vla_stack.statistics import Estimate, success_interval

BIN_S = 0.5
FEATURE_AXES = 16  # of the principal ones
MAX_POINTS = 4000
SHORTEST_BIN = 5  # decisions, fewer give no band of their own
FOLDS = 20
LEAST = 2 * (NEIGHBOURS + 1)  # successes; points near to one's own are others'
EARLY_S = 1.0  # before the end, for an alarm that leaves time to do something


class Listening:
    """A policy that remembers its decisions until :meth:`taken` asks for an episode's.

    Which decisions are an episode's is known by the seed of their noise, which the engine draws from start and step.

    Args:
        policy: The policy.
        features: (observations) -> float [B, d]; None where it has none.
    """

    def __init__(
        self, policy: ChunkPolicy, features: Callable[[Sequence[Observation]], NDArray[np.float32]] | None = None
    ) -> None:
        self.policy, self.spec, self._features = policy, policy.spec, features
        self._kept: dict[int, Decided] = {}

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """The policy's own chunks."""
        features = self._features(observations) if self._features else [None] * len(observations)
        chunks = self.policy.infer(observations, seeds, *([continuations] if continuations else []))
        for o, seed, f, actions in zip(observations, seeds, features, chunks.actions, strict=True):
            self._kept[seed] = Decided(o.step, o.state, actions, o.step, f)
        return chunks

    def taken(self, record: EpisodeRecord) -> list[Decided]:
        """Decisions that an episode executed, in order, and no longer here."""
        running = record.chunks != IDLE
        seeds, first = np.unique(record.noise[running], return_index=True)
        used = np.flatnonzero(running)[first]
        found = [(k, self._kept.pop(int(seed))) for seed, k in zip(seeds, used, strict=True) if int(seed) in self._kept]
        return [replace(decided, used=int(k)) for k, decided in sorted(found, key=lambda item: item[0])]


def policy_features(policy: Any) -> Callable[[Sequence[Observation]], NDArray[np.float32]] | None:
    """What gives the features of a loaded policy; None where it has none, as exported ones do not."""
    import torch  # whoever has a loaded policy has it

    from vla_stack.policies.contract import FlowPolicy

    flow = policy.policy
    if not isinstance(flow, FlowPolicy):
        return None

    def features(observations: Sequence[Observation]) -> NDArray[np.float32]:
        with torch.inference_mode():
            batch = policy.recall(observations)
            found: torch.Tensor = flow.features(flow.encode(policy.preprocess(observations) | batch))
            return found.float().cpu().numpy()

    return features


@dataclass(frozen=True)
class Watched:
    """An episode and its decisions."""

    decisions: list[Decided]
    steps: int
    success: bool


def watched(listening: Listening, record: EpisodeRecord) -> Watched:
    """An episode of the engine with what the policy decided in it."""
    return Watched(listening.taken(record), record.steps, record.success)


def fit(episodes: Sequence[Watched], dt: float, alpha: float, policy: str = "", **about: Any) -> Monitor:
    """A monitor from successful episodes; others among them are left out.

    All of them make banks and bands. Each of n episodes is judged by banks and bands of those that are not in its fold
    (cross-conformal prediction). Of each score its largest excess gets a rank among all episodes, and the episode the
    highest of its ranks; every score's limit lies at the rank that ceil((n + 1)(1 - alpha)) episodes do not pass, so
    that all scores are as rarely passed and none has to make room for the tails of another.

    Args:
        episodes: In the order of their starts.
        dt: Seconds a control step.
        alpha: Nominal rate of false alarms.
        policy: Hash of the weights.
        **about: Plain values for the file.

    Raises:
        UserError: There are too few successes for so small a rate.
    """
    good = [e for e in episodes if e.success and e.decisions]
    rank = math.ceil((len(good) + 1) * (1 - alpha))
    if rank > len(good) or len(good) < LEAST:
        raise UserError(
            f"{len(good)} successful episodes are too few for a rate of false alarms of {alpha:g}",
            f"it takes {max(math.ceil(1 / alpha - 1), LEAST)}: give more --episodes, or a larger --alpha",
        )
    largest: list[tuple[int, NDArray[np.float64]]] = []
    for fold in range(FOLDS):
        judge = _plain([e for i, e in enumerate(good) if i % FOLDS != fold], dt, alpha)
        scorer = Scorer(judge.dt, judge.step, judge.familiar, judge.left_s, judge.features)
        largest += [(i, _largest(judge, _table(scorer, good[i], None))) for i in range(fold, len(good), FOLDS)]
    worst = np.array([row for _, row in sorted(largest, key=lambda item: item[0])])
    limits = _limits(worst[:, :ON_ROBOT], rank), _limits(worst, rank)
    return replace(_plain(good, dt, alpha), policy=policy, about=about, thresholds=limits)


def _limits(worst: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
    """Of the largest excesses [n, J] of n episodes, limits [J] of which ``rank`` episodes or more pass none."""
    ranks = (worst[:, None] > worst).sum(1)
    level = np.sort(ranks.max(1))[rank - 1]
    limits = np.maximum(np.where(ranks <= level, worst, -np.inf).max(0), 1e-6)
    return limits * (1 + 1e-5)  # many last equally long: rounding in a file must not make alarms of them


def _plain(good: Sequence[Watched], dt: float, alpha: float) -> Monitor:
    """Banks and bands of successful episodes, each scored against the others; thresholds are 1."""
    whose = np.repeat(np.arange(len(good)), [len(e.decisions) for e in good])
    decisions = [d for e in good for d in e.decisions]
    left_s = np.array([(e.steps - d.step) * dt for e in good for d in e.decisions])
    if len(decisions) > MAX_POINTS:
        kept = np.sort(np.random.default_rng(0).choice(len(decisions), MAX_POINTS, replace=False))
        decisions, whose, left_s = [decisions[i] for i in kept], whose[kept], left_s[kept]
    familiar = _bank(np.stack([d.point for d in decisions]), None)
    seen = [d.features for d in decisions if d.features is not None]
    features = _bank(np.stack(seen).astype(np.float64), FEATURE_AXES) if len(seen) == len(decisions) else None
    step = np.concatenate([np.abs(np.diff(d.actions, axis=0)) for d in decisions]).mean(0).astype(np.float64)
    step = np.maximum(step, 1e-3 * max(step.max(), 1e-6))
    scorer = Scorer(dt, step, familiar, left_s, features)
    tables = [_table(scorer, e, whose == i) for i, e in enumerate(good)]
    centre, width = _band(tables, dt)
    ones = np.ones(len(centre))
    plain = Monitor("", dt, step, familiar, left_s, features, BIN_S, centre, width, (ones[:ON_ROBOT], ones), alpha)
    reach = np.quantile([_largest(plain, t) for t in tables], 1 - alpha, axis=0)  # no score's tails drown another's
    return replace(plain, width=width * np.maximum(reach, 0.1)[:, None])


def alarm_step(monitor: Monitor, decisions: Sequence[Decided]) -> int | None:
    """Control step from which a monitored robot would have waited for help; None where it would not."""
    watch = Watch(monitor)
    for d in decisions:
        if watch.decided(d):
            return d.used if d.used >= 0 else d.step
    return None


def monitored(monitor: Monitor, listening: Listening, result: EvalResult) -> EvalResult:
    """A result whose episodes say when the monitor would have called for help; notes say how often it was right."""
    episodes = tuple(replace(e, alarm_step=alarm_step(monitor, listening.taken(e))) for e in result.episodes)
    return replace(result, episodes=episodes, notes=(*result.notes, sentence(judged(episodes, monitor.dt), monitor)))


def sentence(alarms: Alarms, monitor: Monitor) -> str:
    """What :func:`judged` found, for people."""

    def rate(e: Estimate) -> str:
        return f"{e.value:.0%} of {e.n} (95 % interval {e.low:.0%} to {e.high:.0%})" if e.n else "none to judge by"

    return (
        f"monitor: alarms in successes {rate(alarms.false)}, nominal {monitor.alpha:.0%}; "
        f"failures called at least {EARLY_S:g} s before their end {rate(alarms.early)}"
    )


@dataclass(frozen=True)
class Alarms:
    """How a monitor did on episodes.

    Attributes:
        false: Alarms among successes, a rate with its interval over starts.
        early: Failures called at least :data:`EARLY_S` before their end, the same.
    """

    false: Estimate
    early: Estimate


def judged(records: Sequence[EpisodeRecord], dt: float) -> Alarms:
    """Alarms of records against their outcomes."""
    won = [r.alarm_step is not None for r in records if r.success]
    early = [r.alarm_step is not None and (r.steps - r.alarm_step) * dt >= EARLY_S for r in records if not r.success]
    return Alarms(success_interval(sum(won), len(won)), success_interval(sum(early), len(early)))


def table(monitor: Monitor, episode: Watched) -> NDArray[np.float64]:
    """Excess of each score over the band's centre, in widths [T, J], for plots and for who asks which score it was."""
    scorer = Scorer(monitor.dt, monitor.step, monitor.familiar, monitor.left_s, monitor.features)
    rows = [monitor.excess(row[1:], int(row[0])) for row in _table(scorer, episode, None)]
    return np.array(rows).reshape(len(rows), -1)


def _bank(raw: NDArray[np.float64], axes: int | None) -> Bank:
    """Whitened: each dimension by its spread, or the principal ``axes`` by theirs."""
    mean, spread = raw.mean(0), raw.std(0)
    if axes is None:
        matrix = np.diag(1 / np.maximum(spread, 1e-3 * max(spread.max(), 1e-6)))
    else:
        _, values, vectors = np.linalg.svd(raw - mean, full_matrices=False)
        n = min(axes, int((values > 1e-3 * values[0]).sum()))
        matrix = vectors[:n].T * (np.sqrt(len(raw)) / values[:n])
    return Bank((raw - mean) @ matrix, mean, matrix)


def _table(scorer: Scorer, episode: Watched, own: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Control step and scores of each decision, [T, 1 + J]."""
    scorer.begin(own)
    return np.array([[d.step, *scorer.scores(d)] for d in episode.decisions])


def _band(tables: Sequence[NDArray[np.float64]], dt: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and spread of each score in each bin of time, [J, B] both; bins with too little go on as the one before."""
    rows = np.concatenate(tables)
    bins = (rows[:, 0] * dt / BIN_S).astype(int)
    floor = 0.1 * rows[:, 1:].std(0) + 1e-9
    centre: list[NDArray[np.float64]] = []
    width: list[NDArray[np.float64]] = []
    for b in range(bins.max() + 1):
        here = rows[bins == b, 1:]
        if len(here) < SHORTEST_BIN:
            if not centre:
                centre, width = [rows[:, 1:].mean(0)], [rows[:, 1:].std(0) + floor]
                continue
            centre.append(centre[-1])
            width.append(width[-1])
            continue
        centre.append(here.mean(0))
        width.append(here.std(0) + floor)
    centres, widths = np.array(centre).T, np.array(width).T
    # Times have one limit each: what is slow in the end are the slow successes, and a band would let all be as slow.
    centres[[STALL, LATE]], widths[[STALL, LATE]] = 0.0, 1.0
    return centres, widths


def _largest(monitor: Monitor, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Largest excess of each score in an episode [J]."""
    return np.max([monitor.excess(row[1:], int(row[0])) for row in rows], axis=0)
