"""What an evaluation leaves behind: one record an episode, one result a setting.

The JSON form is shared with ``vla run`` (docs/reference.md), so a report does not care whether an episode was
simulated under the virtual clock or driven on a robot.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.statistics import success_interval

IDLE = -1


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode.

    Attributes:
        seed: Environment seed; together with the actions it replays the episode.
        instruction: What the policy was told.
        task: What success refers to; differs from ``instruction`` where the wrong one was instructed.
        success: The environment's own predicate.
        steps: Control ticks until success, failure or the step limit, idle ticks included.
        idle_ticks: Ticks on which the policy had no action ready and the robot held.
        stage: How many of the result's ``stages`` were reached, in order; -1 where the environment has none.
        instructed_success: Whether what the policy was told was achieved; None where the environment cannot tell.
        video: Path of an mp4 beside the record file; empty without one.
        alarm_step: Control step from which a failure monitor would have waited for help; None where it would not.
        actions: float32 [steps, A], commands as sent (SI units); empty for records read from disk.
        chunks: int32 [steps], request id of the chunk that each action came from, ``IDLE`` while holding.
        noise: int64 [steps], seed of the policy's noise in that chunk, 0 while holding.
        number: Tells several rollouts of one start apart.
        rewards: float32 [steps], the environment's own.
        terminated: Whether the task ended, done or failed for good; a time limit or a stop alone is no such end.
        outcome: What the agent kept; not written to files.
        attached: What recorders kept, by their names; not written to files.
    """

    seed: int
    instruction: str
    task: str
    success: bool
    steps: int
    idle_ticks: int = 0
    stage: int = -1
    instructed_success: bool | None = None
    video: str = ""
    alarm_step: int | None = None
    actions: NDArray[np.float32] = field(
        default_factory=lambda: np.empty((0, 0), np.float32), repr=False, compare=False
    )
    chunks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    noise: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    number: int = 0
    rewards: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32), repr=False, compare=False)
    terminated: bool = False
    outcome: Any = field(default=None, repr=False, compare=False)
    attached: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        d: dict[str, Any] = {
            "seed": self.seed,
            "success": self.success,
            "steps": self.steps,
            "idle_ticks": self.idle_ticks,
            "stage": self.stage,
            "instruction": self.instruction,
            "task": self.task,
        }
        if self.instructed_success is not None:
            d["instructed_success"] = self.instructed_success
        if self.video:
            d["video"] = self.video
        if self.alarm_step is not None:
            d["alarm_step"] = self.alarm_step
        return d

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> EpisodeRecord:
        """Inverse of :meth:`to_json`; raises KeyError or TypeError on a malformed record."""
        return cls(
            seed=int(d["seed"]),
            instruction=str(d["instruction"]),
            task=str(d.get("task", d["instruction"])),
            success=bool(d["success"]),
            steps=int(d["steps"]),
            idle_ticks=int(d.get("idle_ticks", 0)),
            stage=int(d.get("stage", -1)),
            instructed_success=d.get("instructed_success"),
            video=str(d.get("video") or ""),
            alarm_step=d.get("alarm_step"),
        )


@dataclass(frozen=True)
class EvalResult:
    """All episodes of one setting.

    Attributes:
        name: Environment id or robot, e.g. ``sim/pick-v0``.
        label: What distinguishes this setting from others on the same environment, e.g. ``naive, 100 ms``.
        rate_hz: Control rate; turns steps into seconds.
        episodes: Records in the order of their seeds.
        stages: Names of the environment's stages, in order; empty without any.
        settings: Everything needed to repeat it: policy, mode, latency, seed, environment options.
        wall_s: Time it took, seconds.
        discontinuity: Roughness of the commands where one chunk follows another, relative to that within chunks
            (``metrics.boundary_discontinuity``); NaN where there is none or it was not computed.
        notes: What a reader of the report should know, a sentence each.
    """

    name: str
    label: str
    rate_hz: float
    episodes: tuple[EpisodeRecord, ...]
    stages: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    discontinuity: float = math.nan
    notes: tuple[str, ...] = ()

    @property
    def outcomes(self) -> NDArray[np.bool_]:
        """bool [N]: success of each episode, in the order of the seeds."""
        return np.array([e.success for e in self.episodes], bool)

    @property
    def successes(self) -> int:
        return int(self.outcomes.sum())

    @property
    def success_rate(self) -> float:
        return self.successes / max(len(self.episodes), 1)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the success rate, over starts."""
        return success_interval(self.successes, len(self.episodes)).interval

    @property
    def seconds_to_success(self) -> float:
        """Median over the successful episodes; NaN without any."""
        steps = [e.steps for e in self.episodes if e.success]
        return float(np.median(steps)) / self.rate_hz if steps else float("nan")

    @property
    def idle_fraction(self) -> float:
        """Ticks spent holding for want of an action, as a fraction of all ticks."""
        return sum(e.idle_ticks for e in self.episodes) / max(sum(e.steps for e in self.episodes), 1)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval if self.episodes else (0.0, 1.0)
        seconds = self.seconds_to_success
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {
            "name": self.name,
            "label": self.label,
            "rate_hz": self.rate_hz,
            "stages": list(self.stages),
            "settings": self.settings,
            "wall_s": round(self.wall_s, 3),
            **notes,
            "summary": {
                "episodes": len(self.episodes),
                "successes": self.successes,
                "success_rate": self.success_rate,
                "interval_95": [low, high],
                "median_seconds_to_success": None if np.isnan(seconds) else seconds,
                "idle_fraction": self.idle_fraction,
                "boundary_discontinuity": self.discontinuity if math.isfinite(self.discontinuity) else None,
            },
            "episodes": [e.to_json() for e in self.episodes],
        }

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> EvalResult:
        """Inverse of :meth:`to_json`, the summary aside; raises KeyError or TypeError on a malformed record.

        Episodes that nobody judged, whose success is null, say nothing of success: a note counts them.
        """
        judged = [e for e in d["episodes"] if e["success"] is not None]
        unknown = len(d["episodes"]) - len(judged)
        left_out = (f"Nobody judged {unknown} further episodes; they are left out.",) if unknown else ()
        return cls(
            name=str(d["name"]),
            label=str(d.get("label", "")),
            rate_hz=float(d["rate_hz"]),
            episodes=tuple(EpisodeRecord.from_json(e) for e in judged),
            stages=tuple(d.get("stages", ())),
            settings=dict(d.get("settings", {})),
            wall_s=float(d.get("wall_s", 0.0)),
            discontinuity=float(d.get("summary", {}).get("boundary_discontinuity") or math.nan),
            notes=(*map(str, d.get("notes", ())), *left_out),
        )


def load_records(path: str | os.PathLike[str]) -> list[EvalResult]:
    """Read what ``vla eval --out`` or ``vla run`` wrote; videos are resolved beside the file.

    Args:
        path: A JSON file with one result, or with a list of them under ``results``.

    Raises:
        UserError: The file is missing, not JSON, or lacks a field.
    """
    path = Path(path)
    try:
        d = json.loads(path.read_text())
        results = [EvalResult.from_json(r) for r in (d["results"] if "results" in d else [d])]
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})", "run `vla eval` or `vla run --record` first") from e
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path}: not a record of episodes ({e!r})", "see docs/reference.md for the format") from e
    return [_resolve_videos(r, path.parent) for r in results]


def _resolve_videos(result: EvalResult, folder: Path) -> EvalResult:
    episodes = tuple(replace(e, video=str(folder / e.video)) if e.video else e for e in result.episodes)
    return replace(result, episodes=episodes)


def save_records(results: Sequence[EvalResult], path: str | os.PathLike[str], **about: Any) -> None:
    """Write results as one JSON file, complete or not at all.

    Args:
        results: What to write.
        path: The file.
        **about: Further top-level entries, e.g. ``command`` and ``hardware``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".tmp")
    partial.write_text(json.dumps(about | {"results": [r.to_json() for r in results]}, indent=1) + "\n")
    os.replace(partial, path)
