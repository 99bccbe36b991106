"""What a policy takes from its training data when LeRobot's own tools train it.

Our training loop hands the statistics of relative actions and the robot's description over itself. LeRobot's loop knows
neither: it passes its metadata of the dataset, from which both are read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.lerobot_units import dimension_names
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.schema import ACTION, OBS_STATE


def relative_mask(config: VlaConfig, action_dim: int) -> NDArray[np.bool_]:
    """Bool [A]: dimensions learnt relative to the state, by the same rule as LeRobot's processor step."""
    names = config.action_feature_names or [""] * action_dim
    absolute = [any(part.lower() in name.lower() for part in config.relative_exclude_joints) for name in names]
    return ~np.array(absolute, bool) & config.use_relative_actions


def relative_action_stats(
    action: NDArray[np.float32],
    state: NDArray[np.float32],
    episode: NDArray[np.int64],
    horizon: int,
    mask: NDArray[np.bool_],
) -> dict[str, NDArray[np.float32]]:
    """Statistics of ``action[i + h] - mask * state[i]`` over all i, h < horizon within one episode.

    LeRobot's own helper skips every chunk that reaches past its episode's end; a task of 15 steps has no other.

    Args:
        action: float32 [N, A], rows in recording order.
        state: float32 [N, S].
        episode: int [N], episode of each row.
        horizon: Actions per chunk.
        mask: bool [A], dimensions that are relative.
    """
    anchor = state[:, : action.shape[1]] * mask
    rows = [
        (action[h:] - anchor[: len(anchor) - h])[episode[h:] == episode[: len(episode) - h]]
        for h in range(min(horizon, len(action)))
    ]
    x = np.concatenate(rows).astype(np.float64)
    stats = {"mean": x.mean(0), "std": x.std(0), "min": x.min(0), "max": x.max(0)}
    stats |= {name: np.quantile(x, q, axis=0) for name, q in (("q01", 0.01), ("q99", 0.99))}
    return {name: value.astype(np.float32) for name, value in stats.items()} | {"count": np.array([len(x)])}


def describe(config: VlaConfig, meta: Any) -> None:
    """Set ``robot`` and ``action_feature_names`` of a configuration from LeRobot's metadata of a dataset."""
    if (robot := Path(meta.root) / "meta" / "robot.json").is_file():
        config.robot = json.loads(robot.read_text())
        if config.robot["action_kind"] == "delta":
            config.use_relative_actions = False  # they are relative already
    config.action_feature_names = dimension_names(meta.features[ACTION])


def adopt_dataset(config: VlaConfig, meta: Any) -> None:
    """Fill a configuration, and in memory the statistics, from LeRobot's metadata of a dataset.

    LeRobot's training reads ``meta.stats`` once more after it has made the policy, for new processors and to override
    those of a checkpoint. It is therefore replaced there, which is the one place that serves both.

    Args:
        config: See :func:`describe`.
        meta: ``LeRobotDatasetMetadata``.
    """
    describe(config, meta)
    if not config.use_relative_actions:
        return
    import pyarrow.parquet as pq  # no server needs it

    columns = [ACTION, OBS_STATE, "episode_index"]
    tables = [pq.read_table(path, columns=columns) for path in sorted((Path(meta.root) / "data").rglob("*.parquet"))]
    action, state, episode = (np.concatenate([np.stack(t[c].to_numpy()) for t in tables]) for c in columns)
    mask = relative_mask(config, action.shape[1])
    meta.stats = {**meta.stats, ACTION: relative_action_stats(action, state, episode, config.chunk_size, mask)}
