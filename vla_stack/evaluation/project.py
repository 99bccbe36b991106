"""What lies in a project's folders: evaluations, robot runs, comparisons, trainings, recordings, each with its date."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from vla_stack.data.layout import INFO, read_info
from vla_stack.data.sidecar import read_facts
from vla_stack.errors import UserError
from vla_stack.evaluation.compare import Comparison
from vla_stack.evaluation.metrics import paired_results
from vla_stack.rollout.records import EvalResult, load_records
from vla_stack.statistics import Estimate, holm, paired_interval

RECIPE, METRICS, REVISION = "recipe.yaml", "metrics.jsonl", "revision.txt"  # of a run directory
REPORT, RECORDS, COMPARISON = "report.json", "records.json", "comparison.json"
PASSED_BY = ("checkpoints", "tb", "videos")  # large, and nothing to find in them
WORLD = ("randomisation", "max_episode_steps", "visuals", "split")  # options that change what there is to be done
UNLIKE = ("output_dir", "name")  # keys of a recipe that differ without meaning


@dataclass(frozen=True)
class Evaluation:
    """One setting of an evaluation or a robot run; ``policy`` is what its file says of that."""

    path: Path
    date: str
    policy: str
    result: EvalResult


@dataclass(frozen=True)
class Training:
    """A run directory: its recipe as flat keys, and the last value of each of its metrics."""

    path: Path
    date: str
    recipe: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Recording:
    """A dataset and what its sidecar says: how episodes ended, and how many frames of them a human drove."""

    path: Path
    date: str
    episodes: int
    frames: int
    human_frames: int
    outcomes: dict[str, int]


@dataclass(frozen=True)
class Change:
    """The same setting twice: success of the later minus that of the earlier on the starts that both had."""

    before: Evaluation
    after: Evaluation
    difference: Estimate
    p: float


@dataclass
class Project:
    """Everything that was found, each kind in the order of its dates; ``odd`` names files that could not be read."""

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[tuple[Path, str, Comparison]] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


def find(folders: Sequence[Path]) -> Project:
    """Look through folders and everything below them.

    Raises:
        UserError: One is no folder, or there is nothing in any of them.
    """
    project, seen = Project(), set[Path]()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder", "name folders of evaluations, comparisons, runs or datasets")
        for path in _below(folder):
            if path.resolve() in seen:
                continue  # one folder lies in another, or is named twice
            seen.add(path.resolve())
            try:
                _read(path, project)
            except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                project.odd.append(f"{path}: {e}")
    for kind in (project.evaluations, project.trainings, project.recordings):
        kind.sort(key=lambda item: _in_order(item.date, item.path))
    project.comparisons.sort(key=lambda item: _in_order(item[1], item[0]))
    if not (project.evaluations or project.comparisons or project.trainings or project.recordings):
        where = ", ".join(map(str, folders))
        raise UserError(f"{where}: nothing of `vla eval`, `run`, `compare`, `train` or `collect`", "name other folders")
    return project


def changes(evaluations: Sequence[Evaluation]) -> list[Change]:
    """Each setting beside the one before it on the same environment, in pairs of common starts; p-values by Holm.

    Before a real robot no two starts are the same, whatever their numbers: `vla compare` is for that.
    """
    latest: dict[tuple[Any, ...], Evaluation] = {}
    found = []
    for after in evaluations:
        settings = after.result.settings
        if settings.get("robot", "sim") != "sim":
            continue
        options = settings.get("env_options", {})
        key = (after.result.name, after.result.label, *(str(options.get(name)) for name in WORLD))
        before, latest[key] = latest.get(key), after
        if before is None:
            continue
        a, b = paired_results(before.result, after.result)
        if len(a):
            p = _sign_test(int((b & ~a).sum()), int((a & ~b).sum()))
            found.append(Change(before, after, paired_interval(a, b), p))
    return [replace(c, p=p) for c, p in zip(found, holm([c.p for c in found]), strict=True)]


def differing(trainings: Sequence[Training]) -> dict[str, list[Any]]:
    """Keys of the recipes that are not alike in all runs, each with the value of every run; None where it has none."""
    keys = dict.fromkeys(key for t in trainings for key in t.recipe)
    values = {key: [t.recipe.get(key) for t in trainings] for key in keys if key.split(".")[0] not in UNLIKE}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _sign_test(won: int, lost: int) -> float:
    """Exact two-sided sign test of the starts that one alone won."""
    n, k = won + lost, min(won, lost)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in PASSED_BY and not f.startswith("."))
        here = Path(root)
        yield from (here / name for name in (REPORT, RECORDS, COMPARISON, RECIPE) if name in files)
        if (here / INFO).is_file():
            yield here / INFO
            folders[:] = []


def _read(path: Path, project: Project) -> None:
    match path.name:
        case "recipe.yaml":
            project.trainings.append(_training(path.parent))
        case "comparison.json":
            d = json.loads(path.read_text())
            comparison = Comparison(tuple(d["policies"]), float(d["margin"]), float(d["alpha"]), d["about"])
            comparison.resume(path)
            project.comparisons.append((path, str(d.get("date") or _written(path)), comparison))
        case "info.json":
            project.recordings.append(_recording(path.parents[len(Path(INFO).parts) - 1]))
        case _:
            d = json.loads(path.read_text())
            date, policy = str(d.get("date") or _written(path)), str(d.get("policy", ""))
            for result in load_records(path):
                version = str(result.settings.get("model_version", ""))[:12]
                if result.episodes:
                    project.evaluations.append(Evaluation(path, date, policy or version, result))


def _training(folder: Path) -> Training:
    metrics: dict[str, float] = {}
    if (folder / METRICS).is_file():
        for line in (folder / METRICS).read_text().splitlines():
            try:
                metrics |= {k: float(v) for k, v in json.loads(line).items() if isinstance(v, int | float)}
            except ValueError:
                continue  # a killed run may have torn its last line
    started = _written(folder / RECIPE)
    if (folder / REVISION).is_file() and (lines := (folder / REVISION).read_text().split("\n", 1)[0].split()):
        started = f"{datetime.fromisoformat(lines[0]).astimezone(UTC):%Y-%m-%d %H:%M:%S UTC}"
    return Training(folder, started, _flat(yaml.safe_load((folder / RECIPE).read_text())), metrics)


def _recording(root: Path) -> Recording:
    info, facts = read_info(root), read_facts(root)
    outcomes: dict[str, int] = {}
    for row in facts.values():
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    human = sum(row["human_frames"] for row in facts.values())
    return Recording(root, _written(root / INFO), info["total_episodes"], info["total_frames"], human, outcomes)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}.{key}".lstrip(".")).items()}


def _written(path: Path) -> str:
    return f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d %H:%M:%S UTC}"


def _in_order(date: str, path: Path) -> tuple[str, int, str]:
    """Key to sort by: of what has one date the file that was written first comes first."""
    return date, path.stat().st_mtime_ns, str(path)
