"""Plots of a report as inline SVG that takes its text and line colours from the page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_stack.rollout.records import EvalResult

# Okabe and Ito's palette: told apart with any colour vision, and on white as on black.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_INK = "#010203"  # stands for the page's own text colour


def success_plot(results: Sequence[EvalResult]) -> str:
    """Success of each setting with its Wilson interval."""
    figure, axes = _figure(0.5 * len(results) + 0.9)
    for row, r in enumerate(results):
        low, high = r.interval
        colour = PALETTE[row % len(PALETTE)]
        axes.plot([100 * low, 100 * high], [row, row], color=colour, linewidth=5, alpha=0.35, solid_capstyle="round")
        axes.plot(100 * r.success_rate, row, "o", color=colour, markersize=8)
    axes.set_yticks(range(len(results)), [title(r) for r in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("success, %, with 95 % interval")
    axes.grid(axis="x")
    return _svg(figure)


def time_plot(results: Sequence[EvalResult]) -> str:
    """Share of episodes that have succeeded by a time: speed and reliability in one line."""
    figure, axes = _figure(3.0)
    for row, r in enumerate(results):
        steps = np.sort([e.steps for e in r.episodes if e.success]) / r.rate_hz
        end = max(e.steps for e in r.episodes) / r.rate_hz
        x = np.concatenate([[0.0], steps, [end]])
        y = 100 * np.concatenate([[0], np.arange(1, len(steps) + 1), [len(steps)]]) / len(r.episodes)
        axes.step(x, y, where="post", color=PALETTE[row % len(PALETTE)], linewidth=2, label=title(r))
    axes.set_xlabel("time in the episode, s")
    axes.set_ylabel("succeeded, %")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.grid()
    axes.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _svg(figure)


def stage_plot(result: EvalResult) -> str:
    """How many episodes reached each stage; empty text where the environment has no stages."""
    if not result.stages:
        return ""
    reached = np.array([e.stage for e in result.episodes])
    share = [100 * float((reached > i).mean()) for i in range(len(result.stages))]
    figure, axes = _figure(0.36 * len(share) + 0.7, width=5.2)
    axes.barh(range(len(share)), share, color=PALETTE[0], height=0.6)
    for i, s in enumerate(share):
        axes.text(s + 1, i, f"{s:.0f} %", va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(share)), result.stages)
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xlabel("episodes that reached the stage, %")
    return _svg(figure)


def error_plot(figures: Mapping[str, Any]) -> str:
    """Open-loop error by step of the chunk, of each target with its interval, and of each dimension in thin lines.

    Args:
        figures: Of each target :meth:`vla_stack.evaluation.open_loop.Errors.to_json`.
    """
    figure, axes = _figure(3.2)
    for number, (target, found) in enumerate(figures.items()):
        rows = [row for row in found["relative"]["by_step"] if row["mean"] is not None]
        steps, means = [row["step"] for row in rows], [row["mean"] for row in rows]
        low, high = ([row["mean"] if row[k] is None else row[k] for row in rows] for k in ("low", "high"))
        colour = PALETTE[number]
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, means, color=colour, linewidth=2, label=target)
    moving = [d for d in found["dimensions"] if d["standing_still"] > 0]
    for number, dimension in enumerate(moving):
        values = [
            (r["step"], r["mean"] / dimension["standing_still"]) for r in dimension["by_step"] if r["mean"] is not None
        ]
        style = ("--", ":", "-.")[number // 4 % 3]
        colour = PALETTE[2 + number % 4]
        axes.plot(*zip(*values, strict=True), style, color=colour, linewidth=0.9, label=dimension["name"])
    axes.axhline(1.0, color=_INK, linewidth=0.8, alpha=0.5)
    axes.set_xlabel("step of the chunk; 1 on the other axis is as far off as standing still")
    axes.set_ylabel("relative error")
    axes.set_ylim(bottom=0)
    axes.grid()
    axes.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return _svg(figure)


def quality_plot(deviations: Mapping[str, Sequence[float]]) -> str:
    """How far above the median episodes lie in each kind of flaw, the worst of each by its number.

    Args:
        deviations: Kind of flaw -> robust standard deviations of each episode.
    """
    figure, axes = _figure(0.5 * len(deviations) + 0.9)
    for row, values in enumerate(map(np.asarray, deviations.values())):
        axes.plot(values, np.full(len(values), row), "|", color=PALETTE[row % len(PALETTE)], markersize=12, alpha=0.5)
        if (worst := values.max()) > 0:
            axes.text(worst, row - 0.32, str(values.argmax()), fontsize=8, ha="center", color=_INK)
    axes.set_yticks(range(len(deviations)), list(deviations))
    axes.set_ylim(len(deviations) - 0.4, -0.7)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel("robust standard deviations above the median; numbers are episodes")
    axes.grid(axis="x")
    return _svg(figure)


def title(result: EvalResult) -> str:
    return f"{result.name}  {result.label}".strip()


def _figure(height: float, width: float = 7.6) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {k: _INK for k in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with rc_context(style | {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "grid.alpha": 0.2}):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def _svg(figure: Any) -> str:
    """SVG without a size or colours of its own; text stays text, in the page's font."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return svg.replace(_INK, "currentColor")
