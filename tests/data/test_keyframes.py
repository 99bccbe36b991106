"""Keyframes against a plain loop, and the column that training makes of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_stack.data.columns import Columns
from vla_stack.data.dataset import Dataset
from vla_stack.data.keyframes import KEYFRAME, add_keyframes, keyframe_offsets, next_keyframes
from vla_stack.schema import ACTION, OBS_STATE


def looked_up(commands, episode):
    """The definition, frame by frame."""
    closed = commands > (commands.min(0) + commands.max(0)) / 2
    out = []
    for i in range(len(commands)):
        j = i
        while j + 1 < len(commands) and episode[j + 1] == episode[i]:
            j += 1
            if (closed[j] != closed[j - 1]).any():
                break
        out.append(j)
    return out


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), min_size=1, max_size=60))
def test_the_next_change_of_a_gripper_or_the_end_of_the_episode(frames):
    commands = np.array([[a, b] for a, b, _ in frames], np.float32)
    episode = np.cumsum([last == 0 for *_, last in frames])
    assert next_keyframes(commands, episode).tolist() == looked_up(commands, episode)


def test_without_grippers_it_is_the_end_of_the_episode():
    assert next_keyframes(np.zeros((5, 0)), np.array([0, 0, 1, 1, 1])).tolist() == [1, 1, 4, 4, 4]
    assert next_keyframes(np.zeros((0, 1)), np.zeros(0, int)).tolist() == []


def toy(seed: int, frames: int) -> Dataset:
    rng = np.random.default_rng(seed)
    columns = Columns()
    columns[ACTION] = rng.normal(size=(frames, 3)).astype(np.float32)
    columns[OBS_STATE] = rng.normal(2.0, 3.0, size=(frames, 4)).astype(np.float32)
    columns["episode_index"] = np.arange(frames) // 7
    dataset = Dataset.__new__(Dataset)
    object.__setattr__(dataset, "columns", columns)
    return dataset


def test_a_target_is_where_the_robot_will_be_from_where_it_is():
    dataset, relative = toy(0, 21), np.array([True, True, False])
    rows = next_keyframes(dataset.columns[ACTION][:, 2:], dataset.columns["episode_index"])
    before = dataset.columns[ACTION].copy()
    goals = keyframe_offsets(dataset, [2], relative)
    np.testing.assert_array_equal(goals[:, 2], before[rows, 2])
    np.testing.assert_array_equal(goals[:, :2], before[rows, :2] - dataset.columns[OBS_STATE][:, :2])
    np.testing.assert_array_equal(dataset.columns[ACTION], before)


def test_all_datasets_share_one_scale(monkeypatch):
    monkeypatch.setattr("vla_stack.data.keyframes.BLOCK", 8)
    datasets, relative = [toy(1, 20), toy(2, 35)], np.array([True, False, False])
    raw = np.concatenate([keyframe_offsets(d, [2], relative) for d in datasets]).astype(np.float64)
    add_keyframes(datasets, [2], relative)
    whole = np.concatenate([d.columns[KEYFRAME] for d in datasets])
    np.testing.assert_allclose(whole, (raw - raw.mean(0)) / raw.std(0), atol=1e-5)
    assert whole.dtype == np.float32


def test_what_never_differs_stays_finite():
    dataset = toy(3, 14)
    dataset.columns[ACTION][:, 1] = 5.0
    add_keyframes([dataset], [2], np.zeros(3, bool))
    assert dataset.columns[KEYFRAME][:, 1] == pytest.approx(np.zeros(14), abs=1e-6)
