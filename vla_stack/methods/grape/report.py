"""One page about a run of GRAPE: before and after, the pairs and what made them, costs of every stage, films."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_stack.data.preferences import Scored, read_pairs, read_scores
from vla_stack.envs.making import options_for
from vla_stack.evaluation.report import PAGE, html_table, note_lines
from vla_stack.evaluation.video import film
from vla_stack.rollout.records import EpisodeRecord, EvalResult
from vla_stack.schema import PolicySpec
from vla_stack.statistics import STARTS, mean_interval, paired_interval, success_interval

if TYPE_CHECKING:
    from vla_stack.methods.grape.loop import GrapeLoop

SHOWN = 40  # pairs that the page lists


def write_grape_report(loop: GrapeLoop) -> Path:
    """Write ``report.html`` into the run's folder; films are of starts on which the policies differ.

    Returns:
        Its path.
    """
    records = loop.folder.records()
    title = f"{loop.recipe.name}: {loop.method.objective} on {loop.recipe.task.id}"
    policy = escape(loop.recipe.policy.pretrained)
    parts = [
        f'<h1>{escape(title)}</h1><p class="dim">{policy} · iteration {len(records) - 1}</p>',
        _iterations(records),
        _change(records),
        *(_pairs(loop.folder.path(r["iteration"]), r["iteration"]) for r in records[1:]),
        _films(loop, records),
    ]
    path = loop.folder.run_dir / "report.html"
    page = Template(PAGE.read_text(encoding="utf-8")).substitute(title=escape(title), body="\n".join(parts))
    partial = path.with_suffix(".tmp")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def _iterations(records: Sequence[dict[str, Any]]) -> str:
    head = [("iteration", ""), ("pairs", "n"), ("success", "n"), ("95 %", "n"), ("episodes with a collision", "n")]
    head += [("95 %", "n"), ("steps", "n"), ("steps of successes", "n")]
    rows = []
    for r in records:
        n, won, hit = len(r["success"]), sum(r["success"]), sum(r["collided"])
        steps = [s for s, ok in zip(r["steps"], r["success"], strict=True) if ok]
        rows.append(
            [
                str(r["iteration"]),
                str(r["pairs"]),
                f"{won / n:.0%}",
                _interval(won, n),
                f"{hit / n:.0%}",
                _interval(hit, n),
                f"{np.mean(r['steps']):.1f}",
                f"{np.mean(steps):.1f}" if steps else "–",
            ]
        )
    return "<h2>Iterations</h2>" + html_table(head, rows)


def _interval(k: int, n: int) -> str:
    low, high = success_interval(k, n).interval
    return f"{low:.0%} – {high:.0%}"


def _change(records: Sequence[dict[str, Any]]) -> str:
    """Last iteration against the policy that it began with, on the same starts."""
    if len(records) < 2:
        return ""
    rows = []
    for name, key in (("success", "success"), ("episodes with a collision", "collided"), ("steps", "steps")):
        before, after = (np.asarray(records[i][key], float) for i in (0, -1))
        d = mean_interval(after - before, STARTS) if key == "steps" else paired_interval(before, after)
        rows.append([name, f"{d.value:+.2f}", f"{d.low:+.2f} to {d.high:+.2f}", "yes" if d.is_clear else "no"])
    note = '<p class="dim">Same starts.</p>'
    head = [("", ""), ("change", "n"), ("95 % interval", "n"), ("excludes 0", "")]
    return "<h2>Before and after</h2>" + note + html_table(head, rows)


def _pairs(root: Path, k: int) -> str:
    scored, pairs = {s.id: s for s in read_scores(root)}, read_pairs(root)
    if not pairs:
        return f"<h2>Iteration {k}: no pairs</h2>"
    better, worse = [scored[p.winner] for p in pairs], [scored[p.loser] for p in pairs]
    rows = []
    for i, stage in enumerate(better[0].stages):
        cells = [_mean_cost(side, i) for side in (better, worse)]
        reached = [f"{np.mean([s.stages[i]['reached'] for s in side]):.0%}" for side in (better, worse)]
        rows.append([escape(stage["name"]), cells[0], cells[1], reached[0], reached[1]])
    head = [
        ("stage", ""),
        ("cost of winners", "n"),
        ("of losers", "n"),
        ("reached by winners", "n"),
        ("by losers", "n"),
    ]
    listed = [
        [p.winner, p.loser, f"{p.margin:.3f}", _components(a), _components(b), escape(p.task)]
        for p, a, b in list(zip(pairs, better, worse, strict=True))[:SHOWN]
    ]
    columns = [("winner", ""), ("loser", ""), ("margin", "n"), ("self, external, success", ""), ("of the loser", "")]
    details = f"<details><summary>{len(pairs)} pairs, {len(listed)} shown</summary>"
    table = html_table([*columns, ("instruction", "")], listed)
    return f"<h2>Iteration {k}: costs of its pairs</h2>{html_table(head, rows)}{details}{table}</details>"


def _mean_cost(side: Sequence[Scored], stage: int) -> str:
    return f"{np.mean([s.stages[stage]['cost'] for s in side]):.3f}"


def _components(s: Scored) -> str:
    c = s.components
    return f"{c['self']:.2f}, {c['external']:.3f}, {c['success']:.0f}"


def _films(loop: GrapeLoop, records: Sequence[dict[str, Any]]) -> str:
    """The same starts before and after: first those with a collision or a failure that has gone."""
    if not loop.method.films or len(records) < 2:
        return ""

    def gain(i: int) -> int:
        a, b = records[0], records[-1]
        return (b["success"][i] - a["success"][i]) + (a["collided"][i] - b["collided"][i])

    chosen = sorted(range(len(records[0]["success"])), key=lambda i: (-gain(i), i))[: loop.method.films]
    seeds = sorted(loop.recipe.eval.seed + i for i in chosen)
    figures: dict[int, str] = {}  # before and after of a start, side by side
    notes = ""
    for name, k in (("before", 0), ("after", len(records) - 1)):
        policy = loop.load(loop.policy_dir(k))
        episodes = loop.episodes(policy, seeds)
        collided = {f.seed: f.collided for f, _ in episodes}
        filmed = _filmed(loop, policy.spec, [record for _, record in episodes], name)
        notes += note_lines(filmed)
        for e in [e for e in filmed.episodes if e.video]:
            data = base64.b64encode(Path(e.video).read_bytes()).decode()
            outcome = "success" if e.success else "failure"
            touched = ", touches the wall" if collided[e.seed] else ""
            figures[e.seed] = figures.get(e.seed, "") + (
                f'<figure><video src="data:video/mp4;base64,{data}" controls muted loop playsinline></video>'
                f"<figcaption><b>{name}</b>: {outcome}{touched} · start {e.seed}, {e.steps} steps</figcaption></figure>"
            )
    note = '<p class="dim">Chosen for the largest change, so they are no measure of it; the table above is.</p>'
    shown = f'{note}<div class="films">{"".join(figures.values())}</div>' if figures else ""
    return f"<h2>Films</h2>{shown}{notes}" if shown or notes else ""


def _filmed(loop: GrapeLoop, spec: PolicySpec, episodes: Sequence[EpisodeRecord], label: str) -> EvalResult:
    """The episodes of a policy with films, made in the environment that it was evaluated in."""
    env = loop.recipe.task.id
    settings = {"env_options": options_for(env, spec, loop.recipe.task.options)}
    result = EvalResult(env, label, spec.robot.rate_hz, tuple(episodes), settings=settings)
    return film(result, loop.folder.run_dir / "films", len(episodes))
