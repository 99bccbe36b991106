"""One self-contained HTML page from episode records: what succeeded, how surely, how fast, and what it looked like.

Reads records of ``vla eval`` and of ``vla run`` alike. The page loads nothing: films, plots and styles are inside, so
it can be mailed. The same figures stand beside it as JSON.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from vla_stack.errors import UserError
from vla_stack.evaluation import plots
from vla_stack.evaluation.metrics import paired_results
from vla_stack.evaluation.provenance import provenance
from vla_stack.rollout.records import EpisodeRecord, EvalResult, load_records, save_records
from vla_stack.statistics import paired_interval, success_interval

# Entries of the summary of ``vla run`` that the page shows, with their headings.
TIMING = {
    "delay_ticks_mean": "policy delay, mean, ticks",
    "delay_ticks_max": "policy delay, longest, ticks",
    "lateness_ms_p99_median": "lateness of a tick, 99th percentile, ms",
    "lateness_ms_max": "lateness of a tick, worst, ms",
    "overruns": "ticks missed",
    "stops": "episodes with a stop",
    "real_time_factor_min": "real-time factor, lowest",
}
PAGE = Path(__file__).with_name("report.html")


def write_report(
    results: Sequence[EvalResult],
    path: str | os.PathLike[str],
    title: str = "Evaluation",
    about: dict[str, Any] | None = None,
) -> Path:
    """Write the page, and the figures as JSON beside it.

    Args:
        results: At least one, each with at least one episode; films are taken from the paths in the records.
        path: The HTML file; the JSON gets the same stem.
        title: Heading.
        about: Further lines for the list of settings, e.g. ``{"policy": ...}``.

    Returns:
        Path of the page.
    """
    if not results or not all(r.episodes for r in results):
        raise ValueError("a report needs at least one result, each with at least one episode")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance()
    body = "\n".join(
        [
            _header(results, title, origin),
            _table(results),
            _plots(results),
            _comparisons(results),
            *map(_section, results),
            _footer(results, origin, about or {}),
        ]
    )
    page = Template(PAGE.read_text(encoding="utf-8")).substitute(title=escape(title), body=body)
    partial = path.with_suffix(".html.tmp")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    save_records([_relative(r, path.parent) for r in results], path.with_suffix(".json"), **origin, **(about or {}))
    return path


def write_run_report(run: str | os.PathLike[str], path: str | os.PathLike[str], title: str = "Robot run") -> Path:
    """Write the report of a directory of ``vla run``, or of any record file.

    Raises:
        UserError: There are no records, they are malformed, or nobody has judged an episode.
    """
    run = Path(run)
    about: dict[str, Any] = {}
    if (run / "summary.json").is_file():  # how well time was kept, which only a real clock can get wrong
        summary = json.loads((run / "summary.json").read_text())
        about = {text: f"{summary[key]:.3g}" for key, text in TIMING.items() if summary.get(key) is not None}
    results = load_records(run / "records.json" if run.is_dir() else run)
    if not any(r.episodes for r in results):
        raise UserError(f"{run}: none of its episodes was judged", "judge them as they end, see docs/running.md")
    return write_report([r for r in results if r.episodes], path, title, about)


def percent(x: float) -> str:
    return f"{100 * x:.0f} %"


def seconds(x: float) -> str:
    return "–" if math.isnan(x) else f"{x:.1f} s"


def points(x: float) -> str:
    """A difference of rates in percentage points, with its sign."""
    return f"{round(100 * x):+d}".replace("-", "−") if round(100 * x) else "0"


def _header(results: Sequence[EvalResult], title: str, origin: dict[str, Any]) -> str:
    straight = [r for r in results if not r.settings.get("instruct")]
    swapped = [r for r in results if r.settings.get("instruct")]
    cards = []
    if len(straight) == 1:
        (r,) = straight
        low, high = r.interval
        cards.append((percent(r.success_rate), f"success, 95 % interval {percent(low)} to {percent(high)}"))
        cards.append((seconds(r.seconds_to_success), "median time to success"))
        cards.append((percent(r.idle_fraction), "of ticks idle, waiting for the policy"))
    elif straight:
        worst = min(straight, key=lambda r: r.success_rate)
        cards.append((percent(_mean(straight)), f"mean success of {len(straight)} settings"))
        cards.append((percent(worst.success_rate), f"lowest: {plots.title(worst)}"))
    if swapped:
        cards.append((percent(_mean(swapped)), "reach the original target when told another one"))
    cards.append((str(sum(len(r.episodes) for r in results)), "episodes"))
    boxes = "".join(f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in cards)
    names = ", ".join(dict.fromkeys(r.name for r in results))
    return (
        f'<h1>{escape(title)}</h1><p class="dim">{escape(names)} · {origin["date"]}</p><div class="big">{boxes}</div>'
    )


def _mean(results: Sequence[EvalResult]) -> float:
    return sum(r.success_rate for r in results) / len(results)


def _table(results: Sequence[EvalResult]) -> str:
    head = [("environment", ""), ("setting", ""), ("success", ""), ("95 % interval", "n"), ("episodes", "n")]
    head += [("steps", "n"), ("time to success", "n"), ("idle", "n")]
    rows = []
    for r in results:
        low, high = r.interval
        rows.append(
            [
                escape(r.name),
                escape(r.label),
                meter(r.success_rate) + percent(r.success_rate),
                f"{percent(low)} – {percent(high)}",
                f"{r.successes} / {len(r.episodes)}",
                f"{sum(e.steps for e in r.episodes) / len(r.episodes):.1f}",
                seconds(r.seconds_to_success),
                percent(r.idle_fraction),
            ]
        )
    return "<h2>Success</h2>" + html_table(head, rows)


def _plots(results: Sequence[EvalResult]) -> str:
    return (
        f'<div class="plot">{plots.success_plot(results)}</div>'
        f'<h2>Time to success</h2><div class="plot">{plots.time_plot(results)}</div>'
    )


def _comparisons(results: Sequence[EvalResult]) -> str:
    """Settings of one environment against its first one, over the seeds that both saw."""
    first: dict[str, EvalResult] = {}
    rows = []
    for r in results:
        base = first.setdefault(r.name, r)
        a, b = paired_results(base, r)
        if base is r or not len(a):
            continue
        d = paired_interval(a, b)
        tone = ("good" if d.value > 0 else "bad") if d.is_clear else "dim"
        change = f'<span class="{tone}">{points(d.value)} points</span>'
        interval = f"{points(d.low)} to {points(d.high)}"
        rows.append([escape(r.name), escape(r.label), escape(base.label), change, interval, str(d.n)])
    if not rows:
        return ""
    head = [("environment", ""), ("setting", ""), ("against", ""), ("difference", "n"), ("95 % interval", "n")]
    note = '<p class="dim">Same seeds on both sides, so scenes and luck cancel.</p>'
    return "<h2>Differences</h2>" + note + html_table([*head, ("pairs", "n")], rows)


def _section(result: EvalResult) -> str:
    stages = plots.stage_plot(result)
    by_instruction = _instructions(result)
    figures = (
        f'<div class="pair"><div class="plot">{stages}</div><div>{by_instruction}</div></div>'
        if stages
        else by_instruction
    )
    return f"<h2>{escape(plots.title(result))}</h2>{figures}{films(result)}{note_lines(result)}{_episodes(result)}"


def _instructions(result: EvalResult) -> str:
    groups: dict[str, list[EpisodeRecord]] = {}
    for e in result.episodes:
        groups.setdefault(e.instruction, []).append(e)
    rows = []
    told = any(e.instruction != e.task for e in result.episodes)
    for text, episodes in sorted(groups.items()):
        wins = sum(e.success for e in episodes)
        low, high = success_interval(wins, len(episodes)).interval
        row = [escape(text), f"{wins} / {len(episodes)}", f"{percent(low)} – {percent(high)}"]
        if told:
            judged = [e.instructed_success for e in episodes if e.instructed_success is not None]
            row.append(f"{sum(judged)} / {len(judged)}" if judged else "–")
        rows.append(row)
    head = [("instruction", ""), ("original target reached" if told else "success", "n"), ("95 %", "n")]
    return html_table(head + ([("instructed target", "n")] if told else []), rows, wrap=True)


def films(result: EvalResult) -> str:
    """The films of a result, successes first; nothing where there are none."""
    shown = [e for e in result.episodes if e.video and Path(e.video).is_file()]
    figures = []
    for e in sorted(shown, key=lambda e: not e.success):
        data = base64.b64encode(Path(e.video).read_bytes()).decode()
        outcome = '<b class="good">success</b>' if e.success else '<b class="bad">failure</b>'
        figures.append(
            f'<figure><video src="data:video/mp4;base64,{data}" controls muted loop playsinline preload="auto"></video>'
            f"<figcaption>{outcome} · seed {e.seed} · {e.steps / result.rate_hz:.1f} s<br>“{escape(e.instruction)}”"
            "</figcaption></figure>"
        )
    return f'<h3>Episodes</h3><div class="films">{"".join(figures)}</div>' if figures else ""


def note_lines(result: EvalResult) -> str:
    """The notes of a result, a paragraph each."""
    return "".join(f'<p class="dim">{escape(note)}</p>' for note in result.notes)


def _episodes(result: EvalResult) -> str:
    rows = []
    for e in result.episodes:
        outcome = '<span class="good">success</span>' if e.success else '<span class="bad">failure</span>'
        stage = result.stages[e.stage - 1] if result.stages and e.stage > 0 else "–"
        rows.append([str(e.seed), escape(e.instruction), outcome, escape(stage), str(e.steps), str(e.idle_ticks)])
    head = [
        ("seed", ""),
        ("instruction", ""),
        ("outcome", ""),
        ("stage reached", ""),
        ("steps", "n"),
        ("idle ticks", "n"),
    ]
    return f"<details><summary>All {len(rows)} episodes</summary>{html_table(head, rows)}</details>"


def _footer(results: Sequence[EvalResult], origin: dict[str, Any], about: dict[str, Any]) -> str:
    lines: list[tuple[str, str]] = [(k, str(v)) for k, v in about.items()]
    lines += [("hardware", ", ".join(f"{v} {k}" if k == "cores" else str(v) for k, v in origin["hardware"].items()))]
    lines += [("versions", ", ".join(f"{k} {v}" for k, v in origin["versions"].items()))]
    if origin["revision"]:
        lines.append(("revision", origin["revision"]))
    for r in results:
        seeds = [e.seed for e in r.episodes]
        settings = ", ".join(f"{k} {v}" for k, v in r.settings.items() if v not in (None, "", {}))
        took = f"; took {r.wall_s:.1f} s" if r.wall_s else ""
        lines.append((plots.title(r), f"seeds {min(seeds)} to {max(seeds)}, {r.rate_hz:g} Hz; {settings}{took}"))
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in lines)
    return f"<h2>How this was made</h2><pre>{escape(origin['command'])}</pre><dl>{items}</dl>"


def html_table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], wrap: bool = False) -> str:
    """An HTML table; cells are HTML already, the second item of a heading is the class of its column."""
    top = "".join(f'<th class="{c}">{escape(h)}</th>' for h, c in head)
    first = " wrap" if wrap else ""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{c}{first if i == 0 else ""}">{x}</td>'
            for i, (x, (_, c)) in enumerate(zip(row, head, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def meter(share: float) -> str:
    """A share as a small bar."""
    return f'<span class="meter"><i style="width:{100 * share:.1f}%"></i></span>'


def _relative(result: EvalResult, folder: Path) -> EvalResult:
    """The result with film paths as seen from ``folder``, where they lie below it."""

    def short(video: str) -> str:
        return os.path.relpath(video, folder) if video else ""

    return replace(result, episodes=tuple(replace(e, video=short(e.video)) for e in result.episodes))
