"""A policy in splits: each changes one thing that it meets, beside the same starts with the change taken out.

What a start is follows from its seed alone (:class:`sim.env.ArmEnv` draws the same whatever is randomised), so outcomes
come in pairs, and so does the interval of a difference. The matched arm of all splits of an environment
is the environment as it is, which is run once.

A task has splits of its own as well: what its class names in ``splits``, options that make it another one to a policy,
with things or words that training never had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vla_stack.data.layout import read_json, write_json
from vla_stack.envs.making import is_task
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import OnEpisode, evaluate
from vla_stack.evaluation.pictures import CHANGES, Changed
from vla_stack.registry import TASKS
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.plan import Instruct
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import Estimate, paired_interval, success_interval


@dataclass(frozen=True)
class Split:
    """A named change of what a policy meets.

    Attributes:
        options: Of the environment.
        pictures: Change of the pictures, one of :data:`~vla_stack.evaluation.pictures.CHANGES`; empty: none.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    pictures: str = ""


def varied(**widths: float) -> Split:
    """A split of our simulator that varies something, see :class:`sim.randomisation.Level`."""
    return Split({"randomisation": widths})


SEEN = "seen"
WORLD: dict[str, Split] = {
    "camera": varied(camera_shift=0.02, camera_turn=0.035),
    "light": varied(light=0.5, light_shift=0.6),
    "texture": varied(texture=0.6),
    "background": varied(background=0.7),
    "distractors": varied(distractors=6),
    "start-pose": varied(start=0.06),
    "dynamics": varied(mass=0.7, friction=0.35, delay=0.08),
}
PICTURES: dict[str, Split] = {name: Split(pictures=name) for name in CHANGES}
SPLITS: dict[str, Split] = {SEEN: Split(), **WORLD, **PICTURES}
SUITES: dict[str, tuple[str, ...]] = {  # each has the splits of a task's own besides
    "shifts": (SEEN, *WORLD, "sensor-noise"),
    "pictures": (SEEN, *PICTURES),
    "all": tuple(SPLITS),
}


def splits_of(env_id: str, names: Sequence[str], own: bool) -> dict[str, Split]:
    """Splits of an environment.

    Args:
        env_id: See :func:`vla_stack.envs.make`.
        names: Which, of ``SPLITS`` or of the task's own.
        own: Whether to add all of the task's own.

    Raises:
        UserError: The environment has no split of a name; of those that vary the world only tasks of ours have any.
    """
    task = TASKS.get(env_id if ":" in env_id else env_id.split("/")[1].rpartition("-v")[0]) if is_task(env_id) else None
    offered = {} if task is None else {name: Split(options) for name, options in task.splits.items()}
    known = (SPLITS if task is not None else {SEEN: SPLITS[SEEN], **PICTURES}) | offered
    for name in names:
        if name not in known:
            raise UserError(f"{env_id} has no split '{name}'", f"it has {', '.join(known)}")
    return {name: known[name] for name in dict.fromkeys((*names, *(offered if own else ())))}


@dataclass(frozen=True)
class Row:
    """A split of an environment beside its matched arm.

    Attributes:
        env: The environment's id.
        split: Name of the split.
        success: Outcome of each start, in the order of the seeds.
        matched: The same of the same starts without the change.
    """

    env: str
    split: str
    success: tuple[bool, ...]
    matched: tuple[bool, ...]

    @property
    def rates(self) -> tuple[Estimate, Estimate]:
        """Success with the change, and without."""
        first, second = (success_interval(sum(arm), len(arm)) for arm in (self.success, self.matched))
        return first, second

    @property
    def difference(self) -> Estimate:
        """What the change does to success, in pairs."""
        return paired_interval(self.matched, self.success)

    def to_json(self) -> dict[str, Any]:
        """Outcomes, rates with their intervals, and the paired difference with its own."""
        success, matched = self.rates
        figures = {"success": success, "matched": matched, "difference": self.difference}
        outcomes = {"success": self.success, "matched": self.matched}
        about = {"env": self.env, "split": self.split}
        return about | {name: asdict(figure) for name, figure in figures.items()} | {"outcomes": outcomes}


@dataclass(frozen=True)
class Terms:
    """What an outcome depends on besides the policy, the environment and its pictures.

    Attributes:
        episodes: Starts of each split.
        seed: Of the first.
        executor: Rules of the timeline.
        latency: Of the policy.
        options: Of all environments.
        instruct: See :func:`~vla_stack.evaluation.evaluate.evaluate`.
        continued: How the policy continues plans, where a mode leaves it open.
    """

    episodes: int
    seed: int
    executor: ExecutorConfig = ExecutorConfig()
    latency: Latency = Latency()
    options: Mapping[str, Any] = field(default_factory=dict)
    instruct: Instruct = None
    continued: str = ""


Progress = Callable[[str], AbstractContextManager[OnEpisode]]


def run_suite(
    policy: ChunkPolicy,
    splits: Mapping[str, Mapping[str, Split]],
    terms: Terms,
    folder: Path,
    progress: Progress,
    **how: Any,
) -> list[Row]:
    """A row for each split of each environment.

    Outcomes of a split are kept in a file of its own, so a command that was stopped goes on where it was: what is there
    of the same policy under the same terms is not run again.

    Args:
        policy: The policy.
        splits: Environment id -> name -> split, see :func:`splits_of`.
        terms: How all are run.
        folder: Of the files.
        progress: Makes, from the title of a split that is run, a context with what each finished episode is told to.
        how: Arguments of :func:`~vla_stack.evaluation.evaluate.evaluate` on which no outcome depends: ``num_envs``, ...

    Raises:
        UserError: An environment does not exist or does not fit the policy.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def outcomes(env_id: str, name: str, split: Split) -> tuple[bool, ...]:
        title, options = f"{env_id} {name}", {**terms.options, **split.options}
        same = (policy.spec.model_version, policy.spec.normalisation, policy.spec.extras)
        about = [*same, env_id, options, split.pictures]
        key = json.loads(json.dumps([*about, {**asdict(terms), "options": None}]))
        file = folder / f"{title.translate(dict.fromkeys(map(ord, ' /:'), '_'))}.json"
        if file.is_file() and (kept := read_json(file))["of"] == key:
            return tuple(kept["success"])
        seen: ChunkPolicy = Changed(policy, CHANGES[split.pictures]) if split.pictures else policy
        fixed = (terms.episodes, terms.seed, terms.executor, terms.latency, terms.instruct)
        with progress(title) as on_episode:
            result = evaluate(seen, env_id, *fixed, env_options=options, on_episode=on_episode, **how)
        success = tuple(bool(x) for x in result.outcomes)
        write_json(file, {"of": key, "success": success})
        return success

    rows = []
    for env_id, named in splits.items():
        matched = outcomes(env_id, SEEN, SPLITS[SEEN])
        rows += [Row(env_id, n, matched if n == SEEN else outcomes(env_id, n, s), matched) for n, s in named.items()]
    return rows


def table(rows: Sequence[Row]) -> str:
    """One aligned line a row; ``*`` marks a difference whose interval leaves out zero."""
    names = [f"{row.env}  {row.split}" for row in rows]
    width = max(map(len, names))
    lines = [f"\n{'':<{width}}  success   95 % interval   matched   difference, in pairs"]
    for name, row in zip(names, rows, strict=True):
        success, matched = row.rates
        interval = f"{success.low:.0%} – {success.high:.0%}"
        line = f"{name:<{width}}  {success.value:>7.0%}   {interval:<13}"
        if row.split != SEEN:
            d = row.difference
            points = f"{100 * d.value:+.0f} ({100 * d.low:+.0f} to {100 * d.high:+.0f}) points{' *' * d.is_clear}"
            line += f"   {matched.value:>7.0%}   {points}"
        lines.append(line)
    return "\n".join(lines)
