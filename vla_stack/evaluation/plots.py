"""Plots of a report as inline SVG that takes its text and line colours from the page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
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
