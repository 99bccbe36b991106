"""``meta/rac_episodes.parquet``: what is known of an episode beyond its frames, keyed by ``episode_uid``.

Written before the episode itself becomes part of the dataset, so a row without an episode is one that was discarded, or
that a crash kept out and the next commit of the same uid replaces.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from vla_stack.data.dataset import read_parquet
from vla_stack.data.digests import write_parquet
from vla_stack.data.layout import SIDECAR


@dataclass(frozen=True)
class EpisodeFacts:
    """One row, as far as the recorder's caller knows it.

    Attributes:
        outcome: The phase in which it ended, e.g. ``end_intervened``; of a clip, why it was kept.
        mode: ``teleop``, ``rac`` or ``hg_dagger``; ``run`` where a policy drove unsupervised.
        iteration: Iteration of the loop that it was recorded in; 0 for demonstrations.
        supervision_s: Seconds that a person spent on it, watching and resetting included.
        discard_reason: Why it was not kept.
        seed: Environment seed, or -1.
    """

    outcome: str = ""
    mode: str = "teleop"
    iteration: int = 0
    supervision_s: float = 0.0
    discard_reason: str = ""
    seed: int = -1


_TYPES = {
    "episode_uid": pa.int64(),
    "outcome": pa.string(),
    "mode": pa.string(),
    "iteration": pa.int64(),
    "n_recoveries": pa.int64(),
    "human_frames": pa.int64(),
    "supervision_s": pa.float64(),
    "discard_reason": pa.string(),
    "seed": pa.int64(),
}


def read_facts(root: Path) -> dict[int, dict[str, Any]]:
    """Rows by uid; empty where there is no sidecar."""
    if not (root / SIDECAR).exists():
        return {}
    return {row["episode_uid"]: row for row in read_parquet(root / SIDECAR).to_pylist()}


def facts_row(facts: EpisodeFacts, uid: int, n_recoveries: int, human_frames: int) -> dict[str, Any]:
    """The row of an episode."""
    return {**asdict(facts), "episode_uid": uid, "n_recoveries": n_recoveries, "human_frames": human_frames}


def write_facts(root: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows, replacing those of the same uid; atomic and durable."""
    merged = read_facts(root) | {row["episode_uid"]: row for row in rows}
    columns = {name: pa.array([row[name] for row in merged.values()], kind) for name, kind in _TYPES.items()}
    write_parquet(root, SIDECAR, pa.table(columns))
