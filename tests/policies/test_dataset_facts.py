"""Statistics of chunk-relative actions, and what stock LeRobot training passes."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_vla import ACTIONS, ROBOT, STATES, make_config

from vla_stack.lerobot_units import dimension_names
from vla_stack.policies.dataset_facts import adopt_dataset, relative_action_stats, relative_mask
from vla_stack.schema import ACTION, OBS_STATE


def episodes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = (5, 1, 12)
    n = sum(lengths)
    action, state = (rng.normal(size=(n, d)).astype(np.float32) for d in (ACTIONS, STATES))
    return action, state, np.repeat(np.arange(3), lengths)


def by_hand(horizon: int, mask: np.ndarray) -> np.ndarray:
    action, state, episode = episodes()
    return np.array(
        [
            action[i + h] - mask * state[i, :ACTIONS]
            for i in range(len(action))
            for h in range(horizon)
            if i + h < len(action) and episode[i + h] == episode[i]
        ]
    )


def test_the_gripper_stays_absolute():
    assert relative_mask(make_config(), ACTIONS).tolist() == [True] * 4 + [False]
    assert not relative_mask(make_config(use_relative_actions=False), ACTIONS).any()


def test_relative_statistics_cover_every_real_pair():
    mask = np.array([True] * 4 + [False])
    stats = relative_action_stats(*episodes(), 8, mask)
    rows = by_hand(8, mask)
    assert stats["count"] == len(rows)
    np.testing.assert_allclose(stats["mean"], rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(stats["std"], rows.std(0), atol=1e-6)
    np.testing.assert_array_equal(stats["min"], rows.min(0))
    np.testing.assert_allclose(stats["q99"], np.quantile(rows, 0.99, axis=0), atol=1e-6)
    longer, all_of_it = (relative_action_stats(*episodes(), h, mask) for h in (1000, len(episodes()[0])))
    assert longer["count"] == all_of_it["count"]  # a chunk may be longer than the whole dataset


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["x", "y"], ["x", "y"]),
        ({"motors": ["x", "y"]}, ["x", "y"]),
        ({"gripper": 1, "delta_x": 0}, ["delta_x", "gripper"]),
        ({"motors": ["x"]}, None),
        (None, None),
    ],
)
def test_names_of_dimensions_in_every_form_that_lerobot_writes(names, found):
    assert dimension_names({"names": names, "shape": (2,)}) == found


def test_lerobot_metadata_is_adopted(tmp_path):
    action, state, episode = episodes()
    table = pa.table({ACTION: list(action), OBS_STATE: list(state), "episode_index": episode})
    (tmp_path / "data" / "chunk-000").mkdir(parents=True)
    (tmp_path / "meta").mkdir()
    for i, part in enumerate((table.slice(0, 6), table.slice(6))):
        pq.write_table(part, tmp_path / "data" / "chunk-000" / f"file-{i:03d}.parquet")
    (tmp_path / "meta" / "robot.json").write_text(json.dumps(ROBOT.to_json()))
    names = [d.name for d in ROBOT.action]
    plain = {ACTION: {"mean": action.mean(0)}, OBS_STATE: {"mean": state.mean(0)}}
    meta = SimpleNamespace(root=tmp_path, features={ACTION: {"names": names, "shape": (ACTIONS,)}}, stats=plain)
    config = make_config(robot=None, action_feature_names=None)
    adopt_dataset(config, meta)
    assert config.robot == ROBOT.to_json() and config.action_feature_names == names
    mask = np.array([True] * 4 + [False])
    np.testing.assert_allclose(meta.stats[ACTION]["mean"], by_hand(8, mask).mean(0), atol=1e-6)
    assert meta.stats[OBS_STATE] is plain[OBS_STATE]
    assert set(plain[ACTION]) == {"mean"}  # the caller's dictionary is not written to
