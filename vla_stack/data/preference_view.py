"""``vla data view`` of a folder of preferences: a pair in Rerun, winner and loser on one time line."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vla_stack.data.preferences import ROLLOUTS, TICK, read_pairs, read_rollout, read_scores
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, OBS_IMAGES


def view_pair(root: Path, number: int, save: Path | None = None) -> int:
    """Show a pair, or write it to a file.

    Args:
        root: Folder of an iteration, see ``data.preferences``.
        number: Which pair.
        save: ``.rrd`` file to write instead of opening the viewer.

    Returns:
        Ticks shown.

    Raises:
        UserError: There is no such pair, or Rerun is not installed.
    """
    try:
        import rerun as rr
    except ModuleNotFoundError:
        raise UserError("`vla data view` needs the package 'rerun-sdk'", 'pip install "vla-stack[viz]"') from None
    pairs, scores = read_pairs(root), {s.id: s for s in read_scores(root)}
    if not 0 <= number < len(pairs):
        raise UserError(f"{root} has no pair {number}", f"it has {len(pairs)}")
    pair, shown = pairs[number], 0
    recording = rr.RecordingStream("vla_preferences", recording_id=f"{root.name}-{number}")
    recording.spawn() if save is None else recording.save(save)
    for side, name in (("winner", pair.winner), ("loser", pair.loser)):
        rollout = read_rollout(root / ROLLOUTS / f"{name}.safetensors")
        judged = scores[name]
        text = f"{name}: {judged.score:.3f} {judged.components}; {rollout.facts.task}; stages {judged.stages}"
        recording.log(side, rr.TextDocument(text), static=True)
        points = {k.removeprefix("points/"): v for k, v in rollout.trace.items() if k.startswith("points/")}
        for entity, way in points.items():
            recording.log(f"{side}/way/{entity}", rr.LineStrips3D([way.astype(np.float32)]), static=True)
        for t in range(rollout.facts.steps):
            recording.set_time("tick", sequence=t)
            for entity, way in points.items():
                recording.log(
                    f"{side}/points/{entity}", rr.Points3D(way[t : t + 1].astype(np.float32), labels=[entity])
                )
            recording.log(f"{side}/contact", rr.Scalars(float(rollout.trace["contact"][t])))
        for i, tick in enumerate(rollout.decisions[TICK]):
            recording.set_time("tick", sequence=int(tick))
            for key, value in rollout.decisions.items():
                if key.startswith(OBS_IMAGES):
                    picture = rr.Image(value[i]).compress()
                    recording.log(f"{side}/cameras/{key.removeprefix(OBS_IMAGES).strip('.')}", picture)
            planned = rollout.decisions[ACTION][i, :, :3].astype(np.float32)
            recording.log(f"{side}/plan", rr.LineStrips3D([planned]))
        shown += rollout.facts.steps
    recording.flush()
    return shown
