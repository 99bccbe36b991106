"""What the parts of ``world_model.py`` cost, in minutes of one core, before they are run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from world_training import Settings, unfinished

# Seconds of one core of an EPYC of AVX2; others differ by a factor of two.
SECONDS = {
    "episode": 0.4,  # recorded, two cameras of 64 px in software
    "vae": 0.1,  # a step of 8 pictures
    "clip": 0.022,  # of a step of the dynamics
    "encode": 0.1,  # an episode
    "heads": 0.42,  # a step
    "imagined": 0.5,  # an episode of ten chunks
    "simulated": 1.2,
    "measured": 0.5,  # a clip of the quality table
    "tuning": 0.6,  # a step
    "critics": 0.4,
}


def minutes(settings: Settings, part: str, arm: str, runs: Sequence[str]) -> float:
    """Of one cell; ``runs`` are the trainings that it has to do first."""
    s, of = settings, SECONDS
    cost = 0.0
    for run in runs:
        hue, full = run.startswith("hue-"), "full" in run
        episodes = s.hue_episodes if hue else s.episodes
        steps = s.hue_dynamics if hue else s.dynamics
        cost += steps * s.batch * of["clip"] + episodes * of["encode"] + full * s.vae * of["vae"]
        if full and not hue:
            cost += s.heads * of["heads"] + 2 * s.generated * of["imagined"]
    match part:
        case "quality":
            cost += s.clips * of["measured"]
        case "control":
            cost += 2 * s.clips * of["measured"]
        case "memory":
            cost += s.hue_episodes / 10 * of["imagined"]
        case "improvement":
            cost += s.tested * of["simulated"]
            cost += (arm != "unchanged") * s.tuning * of["tuning"] + (arm in ("real", "simulated")) * s.improved * of[
                "simulated"
            ]
            tries = {"imagined": 4, "relabelled": 4, "planned": 20, "critics": 10}.get(arm, 0)
            cost += tries * s.improved * of["imagined"] + (arm == "critics") * s.critics * of["critics"]
    return cost / 60


def plan(settings: Settings, out: Path, cells: Sequence[Any]) -> str:
    """A line for each cell that is still to be done, in order."""
    lines, total, planned = [], 0.0, set()
    for hue, episodes in ((False, settings.episodes), (True, settings.hue_episodes)):
        if (
            any((c.part == "memory") == hue for c in cells)
            and not (out / f"{'hues' if hue else 'data'}.finished").exists()
        ):
            total += (cost := episodes * SECONDS["episode"] / 60)
            lines.append(f"  {'hues' if hue else 'data'}: {cost:.0f}")
    for cell in cells:
        if (out / "cells" / f"{cell.name}.json").exists():
            continue
        runs = [r for r in unfinished(out, cell.part, cell.arm, cell.seed) if r not in planned]
        planned.update(runs)
        total += (cost := minutes(settings, cell.part, cell.arm, runs))
        lines.append(f"  {cell.name}: {cost:.0f}" + (f" (trains {', '.join(runs)})" if runs else ""))
    return "\n".join([f"about {total:.0f} minutes of one core are left:", *lines])
