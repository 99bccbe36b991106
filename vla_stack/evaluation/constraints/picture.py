"""An episode's costs, tick by tick, over its stages: which moment cost what."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from vla_stack.evaluation.constraints.score import external, segment, stage_costs, tick_costs
from vla_stack.evaluation.constraints.spec import Spec
from vla_stack.evaluation.constraints.trace import Trace
from vla_stack.evaluation.plots import PALETTE


def explain(spec: Spec, trace: Trace) -> str:
    """A table: stages, ticks, and what each cost of it came to."""
    lines = []
    for stage, found in zip(spec.stages, stage_costs(spec, trace), strict=True):
        state = f"{found.ticks} ticks" if found.reached else "not reached"
        lines.append(f"{stage.name:<14}{state:>12}   C = {found.cost:.3f}")
        for cost, part in zip(stage.costs, found.parts, strict=True):
            names = ", ".join(str(v) for v in cost.arguments.values())
            lines.append(f"    {cost.type}({names}) {cost.reduce}, {cost.group:<10} {part:>8.3f}")
    lines.append(f"R_ext = {external(stage_costs(spec, trace)):.4f}")
    return "\n".join(lines)


def draw(spec: Spec, trace: Trace, title: str = "") -> str:
    """An SVG: one row a cost, its value in each tick, in colour where its stage is current; contacts in red."""
    from matplotlib.figure import Figure

    at = segment(spec, trace)
    began = np.concatenate([np.minimum(at[:1], 0), at[:-1]])
    rows = [(i, stage, cost) for i, stage in enumerate(spec.stages) for cost in stage.costs]
    figure = Figure(figsize=(8.0, 0.9 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for (i, stage, cost), ax in zip(rows, axes, strict=True):
        ticks, inside = tick_costs(cost, trace), began == i
        ax.plot(trace.time, ticks, color="#999999", linewidth=0.8)
        ax.fill_between(trace.time, np.where(inside, ticks, np.nan), step="mid", color=PALETTE[i % 6], alpha=0.7)
        for t in trace.time[trace.contact]:
            ax.axvspan(t - trace.dt / 2, t + trace.dt / 2, color="#d62728", alpha=0.25, linewidth=0)
        for t in trace.time[np.flatnonzero(np.diff(at)) + 1]:
            ax.axvline(t, color="#444444", linewidth=0.6, linestyle=":")
        ax.set_ylabel(f"{stage.name}\n{cost.type}", fontsize=7, rotation=0, ha="right", va="center")
        ax.tick_params(labelsize=6)
    axes[-1].set_xlabel("time in the episode, s")
    if title:
        figure.suptitle(title, fontsize=9)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def save(spec: Spec, trace: Trace, path: Path, title: str = "") -> None:
    """Write :func:`draw` to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(spec, trace, title))
