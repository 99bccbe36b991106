"""Preferences on disk: rollouts, what each is worth, and pairs of a better and a worse one *from the same start*.

    ROOT/rollouts/<id>.safetensors   one a rollout: its decisions and its trace, its facts as JSON in the header
    ROOT/scores.parquet              one row a rollout: success, score and its components, stage costs as JSON
    ROOT/pairs.parquet               winner, loser, instruction, seed of the start, margin

A decision is an executed chunk: what the policy observed, the chunk that it sampled, how many steps of it were
executed, the seed of its noise. A file is there whole or not at all, so that rolling out can stop anywhere and go on.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vla_stack.errors import UserError
from vla_stack.schema import ACTION, ACTION_IS_PAD

ROLLOUTS, SCORES, PAIRS = "rollouts", "scores.parquet", "pairs.parquet"
EXECUTED, NOISE_SEED, TICK = "executed", "noise_seed", "tick"  # columns of decisions beside observation and action
WINNER, LOSER = 0, 1
Arrays = dict[str, NDArray[Any]]
How = Literal["best_worst", "random", "shuffled", "success"]


@dataclass(frozen=True)
class Facts:
    """Which rollout this is and how it ended.

    Attributes:
        task: The instruction.
        env: Environment id.
        seed: Of the start: rollouts of one task and seed began in the same state.
        number: Which rollout of that start.
        success: Whether the task was done.
        steps: Control ticks.
        collided: Whether something forbidden was touched.
    """

    task: str
    env: str
    seed: int
    number: int
    success: bool
    steps: int
    collided: bool

    @property
    def id(self) -> str:
        return f"{self.seed:010d}-{self.number:03d}"


@dataclass(frozen=True)
class Rollout:
    """One episode of a policy.

    Attributes:
        facts: What it is.
        decisions: Columns [n, ...]: observations, ``action`` [n, H, A] commands as sampled, ``executed`` [n],
            ``noise_seed`` [n], ``tick`` [n]; ``chain`` [n, K+1, H, D] where the sampler kept it.
        trace: What happened, as ``vla_stack.evaluation.constraints.trace.Trace`` keeps it.
    """

    facts: Facts
    decisions: Arrays
    trace: Arrays


@dataclass(frozen=True)
class Scored:
    """What a rollout is worth; ``components`` and ``stages`` say why."""

    id: str
    task: str
    seed: int
    success: bool
    score: float
    components: dict[str, float]
    stages: list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Ids of a better and a worse rollout of one start, and by how much it is better."""

    winner: str
    loser: str
    task: str
    seed: int
    margin: float


def rollout_path(root: Path, seed: int, number: int) -> Path:
    """Where a rollout lies."""
    return root / ROLLOUTS / f"{seed:010d}-{number:03d}.safetensors"


def write_rollout(root: Path, rollout: Rollout) -> Path:
    """Write a rollout whole or not at all."""
    f = rollout.facts
    path = rollout_path(root, f.seed, f.number)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"decision/{k}": v for k, v in rollout.decisions.items()} | {
        f"trace/{k}": v for k, v in rollout.trace.items()
    }
    partial = path.with_suffix(".partial")
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, partial, {"facts": json.dumps(asdict(f))})
    os.replace(partial, path)
    return path


def read_rollout(path: Path, parts: Sequence[str] = ("decision", "trace")) -> Rollout:
    """Read a rollout, or only its decisions or its trace.

    Raises:
        UserError: The file is missing, damaged, or no rollout.
    """
    path = path if path.suffix else path.with_suffix(".safetensors")
    try:
        with safe_open(path, "numpy") as file:
            facts = Facts(**json.loads((file.metadata() or {})["facts"]))
            names = [k for k in file.keys() if k.partition("/")[0] in parts]
            arrays = {k: file.get_tensor(k) for k in names}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is no rollout ({type(e).__name__}: {e})", "rolling out again writes it anew") from None

    def of(kind: str) -> Arrays:
        return {k.partition("/")[2]: v for k, v in arrays.items() if k.startswith(f"{kind}/")}

    return Rollout(facts, of("decision"), of("trace"))


def rollout_files(root: Path) -> list[Path]:
    """All rollouts of a folder, in the order of starts and numbers."""
    return sorted((root / ROLLOUTS).glob("*.safetensors"))


def make_pairs(
    scored: Sequence[Scored],
    how: How = "best_worst",
    m: int = 1,
    delta: float = 0.0,
    winner_succeeds: bool = False,
    seed: int = 0,
) -> list[Pair]:
    """Pairs within each start, never across (the partition function of the preference model cancels only there).

    Args:
        scored: All rollouts of an iteration.
        how: ``best_worst``: the m best against the m worst, m^2 pairs a start (m = 1 in the paper); ``random``: a
            random success against a random failure; ``shuffled``: best against worst with sides by chance, which must
            not help; ``success``: every success with itself, for imitation of successes alone.
        m: See there.
        delta: Least margin; what is equal is never a pair.
        winner_succeeds: Drop pairs whose winner failed.
        seed: Of what is random.
    """
    groups: dict[tuple[str, int], list[Scored]] = defaultdict(list)
    for row in scored:
        groups[row.task, row.seed].append(row)
    rng, out = np.random.default_rng(seed), []
    for group in groups.values():
        ranked = sorted(group, key=lambda row: (-row.score, row.id))
        won, lost = [r for r in ranked if r.success], [r for r in ranked if not r.success]
        if how == "success":
            out += [Pair(r.id, r.id, r.task, r.seed, 0.0) for r in won]
            continue
        if how == "random":
            chosen = [(won[rng.integers(len(won))], lost[rng.integers(len(lost))])] if won and lost else []
        else:
            n = min(m, len(ranked) // 2)
            chosen = [(a, b) for a in ranked[:n] for b in ranked[len(ranked) - n :]]
            chosen = [(a, b) for a, b in chosen if a.score - b.score > max(delta, 0.0)]
            chosen = [(a, b) for a, b in chosen if a.success or not winner_succeeds]
        for a, b in chosen:
            if how == "shuffled" and rng.random() < 0.5:
                a, b = b, a
            out.append(Pair(a.id, b.id, a.task, a.seed, a.score - b.score))
    return out


def write_preferences(root: Path, scored: Sequence[Scored], pairs: Sequence[Pair]) -> None:
    """Write scores and pairs."""
    rows = [{**asdict(s), "components": json.dumps(s.components), "stages": json.dumps(s.stages)} for s in scored]
    _write_table(root / SCORES, rows)
    _write_table(root / PAIRS, [asdict(p) for p in pairs])


def read_scores(root: Path) -> list[Scored]:
    """Scores of a folder's rollouts; raises :class:`UserError` where there are none."""
    rows = _read_table(root / SCORES)
    return [Scored(**{**r, "components": json.loads(r["components"]), "stages": json.loads(r["stages"])}) for r in rows]


def read_pairs(root: Path) -> list[Pair]:
    """Pairs of a folder; raises :class:`UserError` where there are none."""
    return [Pair(**row) for row in _read_table(root / PAIRS)]


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    os.replace(partial, path)


def _read_table(path: Path) -> list[dict[str, Any]]:
    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{path} cannot be read ({e})", "an iteration of `vla train grape_*` writes it") from None


class PairLoader:
    """Endless batches of pairs, shuffled anew each time all have been seen; its position is JSON.

    A batch has a row a decision, winners' and losers' alike: observations, ``action`` [n, H, A], ``action_is_pad``
    [n, H] on what was not executed, ``task``, and which ``pair``, ``side`` and ``decision`` it is.

    Args:
        root: Folder of the iteration.
        batch_size: Pairs in a batch.
        seed: Of the order.

    Raises:
        UserError: There is no pair.
    """

    def __init__(self, root: Path, batch_size: int, seed: int) -> None:
        self.root, self.pairs, self._size, self._seed = root, read_pairs(root), batch_size, seed
        if not self.pairs:
            raise UserError(f"{root} has no pairs: all rollouts of every start are worth the same", "roll out more")
        self._position = 0
        self._rollouts: dict[str, Rollout] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            chosen = [self._pair(self._position + i) for i in range(self._size)]
            self._position += self._size
            yield self.batch(chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])

    def batch(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """The rows of some pairs."""
        sides = [(i, side, p.loser if side else p.winner) for i, p in enumerate(pairs) for side in (WINNER, LOSER)]
        rollouts = [self._rollout(name) for _, _, name in sides]
        lengths = [len(r.decisions[ACTION]) for r in rollouts]
        columns = [k for k in rollouts[0].decisions if k not in (EXECUTED, NOISE_SEED, TICK)]
        out: dict[str, Any] = {k: np.concatenate([r.decisions[k] for r in rollouts]) for k in columns}
        executed = np.concatenate([r.decisions[EXECUTED] for r in rollouts])
        out[ACTION_IS_PAD] = np.arange(out[ACTION].shape[1]) >= executed[:, None]
        out["task"] = [r.facts.task for r, n in zip(rollouts, lengths, strict=True) for _ in range(n)]
        out["pair"] = np.repeat([i for i, _, _ in sides], lengths)
        out["side"] = np.repeat([side for _, side, _ in sides], lengths)
        out["decision"] = np.concatenate([np.arange(n) for n in lengths])
        return out

    def _pair(self, i: int) -> Pair:
        epoch, at = divmod(i, len(self.pairs))
        return self.pairs[np.random.default_rng((self._seed, epoch)).permutation(len(self.pairs))[at]]

    def _rollout(self, name: str) -> Rollout:
        if name not in self._rollouts:
            self._rollouts[name] = read_rollout(self.root / ROLLOUTS / f"{name}.safetensors", ("decision",))
        return self._rollouts[name]
