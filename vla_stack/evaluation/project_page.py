"""One page of a project: what changed between its runs, what that did to success, and how it looked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from vla_stack.evaluation import plots
from vla_stack.evaluation.compare import sentences
from vla_stack.evaluation.project import Change, Evaluation, Project, Recording, Training, changes, differing
from vla_stack.evaluation.provenance import provenance
from vla_stack.evaluation.report import PAGE, films, html_table, meter, note_lines, percent, points, seconds

MAX_FILMS = 4  # of a setting: the page is mailed
LAST = ("loss", "validation/loss", "seconds")  # of metrics, beside successes


def write_project(project: Project, path: Path, title: str) -> Path:
    """Write the page; returns its path."""
    body = "\n".join(
        [
            _header(project, title),
            _changes(changes(project.evaluations), path),
            _comparisons(project),
            _trainings(project.trainings),
            _evaluations(project.evaluations),
            _recordings(project.recordings),
            _films(project.evaluations),
            _odd(project.odd),
        ]
    )
    page = Template(PAGE.read_text(encoding="utf-8")).substitute(title=escape(title), body=body)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".html.tmp")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def _header(project: Project, title: str) -> str:
    counts = {
        "evaluated settings": len(project.evaluations),
        "comparisons": len(project.comparisons),
        "trainings": len(project.trainings),
        "datasets": len(project.recordings),
        "human frames": sum(r.human_frames for r in project.recordings),
    }
    boxes = "".join(f"<div><b>{n}</b><span>{escape(what)}</span></div>" for what, n in counts.items() if n)
    return f'<h1>{escape(title)}</h1><p class="dim">{provenance()["date"]}</p><div class="big">{boxes}</div>'


def _changes(found: Sequence[Change], path: Path) -> str:
    if not found:
        return ""
    head = [("environment, setting", ""), ("before", ""), ("after", ""), ("difference", "n"), ("95 % interval", "n")]
    rows = []
    for c in found:
        d = c.difference
        tone = ("good" if d.value > 0 else "bad") if d.is_clear else "dim"
        rows.append(
            [
                escape(plots.title(c.after.result)),
                _which(c.before),
                _which(c.after),
                f'<span class="{tone}">{points(d.value)} points</span>',
                f"{points(d.low)} to {points(d.high)}",
                str(d.n),
                f"{c.p:.2g}",
            ]
        )
    note = (
        '<p class="dim">Each evaluation beside the one before it of the same setting, on the starts that both had. '
        "p is of the sign test, corrected for all rows (Holm).</p>"
    )
    return "<h2>What changed in success</h2>" + note + html_table([*head, ("pairs", "n"), ("p", "n")], rows)


def _which(e: Evaluation) -> str:
    return f'{percent(e.result.success_rate)}<br><span class="dim">{escape(e.policy or str(e.path.parent))}</span>'


def _comparisons(project: Project) -> str:
    if not project.comparisons:
        return ""
    parts = []
    for path, date, comparison in project.comparisons:
        text = escape("\n".join(sentences(comparison)))
        parts.append(f"<h3>{escape(str(path.parent))}</h3><p class='dim'>{escape(date)}</p><pre>{text}</pre>")
    return "<h2>Comparisons</h2>" + "".join(parts)


def _trainings(trainings: Sequence[Training]) -> str:
    if not trainings:
        return ""
    names = [escape(t.path.name) for t in trainings]
    metrics = [k for t in trainings for k in t.metrics if k in LAST or k.endswith("success")]
    shown: dict[str, list[Any]] = {"begun": [t.date for t in trainings]}
    shown |= {k: [t.metrics.get(k) for t in trainings] for k in dict.fromkeys(["step", *metrics])}
    head = [("", ""), *((name, "") for name in names)]
    table = html_table(head, [[escape(key), *map(_cell, row)] for key, row in shown.items()])
    unlike = differing(trainings)
    text = '<p class="dim">One run, or all with the same recipe.</p>'
    if unlike:
        text = html_table(head, [[escape(key), *map(_cell, row)] for key, row in unlike.items()])
    return f"<h2>Trainings</h2>{table}<h3>Keys of the recipes that differ</h3>{text}"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return ""
    head = [("date", ""), ("environment, setting", ""), ("policy", ""), ("success", ""), ("95 % interval", "n")]
    rows = []
    for e in evaluations:
        low, high = e.result.interval
        rows.append(
            [
                escape(e.date),
                escape(plots.title(e.result)),
                escape(e.policy),
                meter(e.result.success_rate) + percent(e.result.success_rate),
                f"{percent(low)} – {percent(high)}",
                f"{e.result.successes} / {len(e.result.episodes)}",
                seconds(e.result.seconds_to_success),
            ]
        )
    notes = "".join(note_lines(e.result) for e in evaluations)
    return "<h2>Evaluations</h2>" + html_table([*head, ("episodes", "n"), ("time", "n")], rows) + notes


def _recordings(recordings: Sequence[Recording]) -> str:
    if not recordings:
        return ""
    head = [("dataset", ""), ("written", ""), *((what, "n") for what in ("episodes", "frames", "human frames"))]
    head.append(("ended as", ""))
    rows = []
    for r in recordings:
        ended = ", ".join(f"{n} {what or 'unlabelled'}" for what, n in sorted(r.outcomes.items()))
        numbers = [str(n) for n in (r.episodes, r.frames, r.human_frames)]
        rows.append([escape(str(r.path)), escape(r.date), *numbers, escape(ended or "–")])
    return "<h2>Recordings and interventions</h2>" + html_table(head, rows)


def _films(evaluations: Sequence[Evaluation]) -> str:
    """Of the newest evaluation of each setting that has any, failures first."""
    newest = {(e.result.name, e.result.label): e for e in evaluations if any(x.video for x in e.result.episodes)}
    parts = []
    for e in newest.values():
        filmed = [x for x in e.result.episodes if x.video and Path(x.video).is_file()]
        chosen = sorted(filmed, key=lambda x: x.success)[:MAX_FILMS]
        if chosen:
            shown = films(replace(e.result, episodes=tuple(chosen)))
            parts.append(f"<h3>{escape(plots.title(e.result))}, {escape(e.policy)}</h3>{shown}")
    return "<h2>Films</h2>" + "".join(parts) if parts else ""


def _odd(odd: Sequence[str]) -> str:
    if not odd:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in odd)
    return f"<details><summary>{len(odd)} files could not be read</summary><ul>{items}</ul></details>"
