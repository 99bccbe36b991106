"""Where the gripper was in a dataset, counted on a grid seen from above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import open_dataset
from vla_stack.data.layout import INFO, read_info
from vla_stack.schema import OBS_STATE, RobotSpec

CELLS = (24, 36)  # along x and y


def heat(root: Path, robot: RobotSpec) -> dict[str, Any]:
    """Counts of tool positions in a dataset.

    Returns:
        ``frames``; ``x`` and ``y``: the range that is shown, metres; ``counts``: [24][36] frames a cell, x by y.
        Without a tool position in the robot's state only ``frames``, 0.
    """
    index = {d.name: i for i, d in enumerate(robot.state)}
    if not {"tcp_x.pos", "tcp_y.pos"} <= index.keys():
        return {"frames": 0}
    axes = [index["tcp_x.pos"], index["tcp_y.pos"]]
    bounds = [(robot.state[i].low, robot.state[i].high) for i in axes]
    points: NDArray[np.float64] = np.zeros((0, 2))
    if (root / INFO).exists() and read_info(root)["total_episodes"]:
        points = np.asarray(open_dataset(root).columns[OBS_STATE], np.float64)[:, axes]
    if not np.isfinite(bounds).all():
        if not len(points):
            return {"frames": 0}
        bounds = [(float(p.min()) - 0.05, float(p.max()) + 0.05) for p in points.T]
    counts, _, _ = np.histogram2d(points[:, 0], points[:, 1], CELLS, bounds)
    return {
        "frames": len(points),
        "x": list(bounds[0]),
        "y": list(bounds[1]),
        "counts": counts.astype(int).tolist(),
    }
