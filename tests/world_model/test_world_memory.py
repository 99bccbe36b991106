"""Which frames are remembered, and what a pose looks like to the network."""

from __future__ import annotations

import numpy as np
import torch

from vla_stack.world_model.memory import Memory, history_chunks
from vla_stack.world_model.poses import Adapter, PoseScale, executed_poses, rotation6

GOLDEN = {
    0: [0, 0, 0, 0], 1: [0, 0, 0, 0], 2: [0, 0, 0, 1], 3: [0, 0, 1, 2], 4: [0, 1, 2, 3], 5: [0, 2, 3, 4],
    6: [0, 3, 4, 5], 7: [0, 4, 5, 6], 8: [0, 5, 6, 7], 9: [0, 6, 7, 8], 10: [0, 7, 8, 9], 11: [0, 8, 9, 10],
    12: [0, 9, 10, 11], 13: [0, 10, 11, 12], 14: [0, 11, 12, 13],
}  # fmt: skip


def test_what_is_remembered() -> None:
    memory: Memory[int] = Memory(0, history=4)
    for n in range(15):
        assert history_chunks(n, 4) == GOLDEN[n] == memory.history()
        assert memory.current == n == memory.chunks
        memory.push(n + 1)
    assert Memory("first", 3).history() == ["first"] * 3  # before any chunk the first frame stands in
    assert Memory("first", 0).history() == []


def test_positions_are_scaled_by_percentiles_and_clipped() -> None:
    poses = np.random.default_rng(0).normal(size=(1000, 5)).astype(np.float32)
    scale = PoseScale.of(poses)
    low, high = (torch.tensor(v) for v in (scale.low, scale.high))
    torch.testing.assert_close(scale.position(low), -torch.ones(3))
    torch.testing.assert_close(scale.position(high), torch.ones(3))
    assert (scale.position(low - 1) == -1).all() and (scale.position(high + 1) == 1).all()
    assert scale.tokens(torch.zeros(2, 3, 5), torch.zeros(2, 3)).shape == (2, 3, 11)


def test_rotation_has_no_jump_at_half_a_turn() -> None:
    yaw = torch.tensor([np.pi - 1e-4, -np.pi + 1e-4])
    columns = rotation6(yaw)
    assert (columns[0] - columns[1]).abs().max() < 1e-3
    a, b = columns[:, :3], columns[:, 3:]
    torch.testing.assert_close((a * b).sum(-1), torch.zeros(2))
    torch.testing.assert_close(torch.linalg.cross(a, b)[:, 2], -torch.ones(2))  # the tool points down


def test_the_opening_is_commanded_and_the_rest_measured() -> None:
    states = np.arange(24, dtype=np.float32).reshape(4, 6)
    commands = -np.ones((4, 5), np.float32) * np.arange(4)[:, None].astype(np.float32)
    poses = executed_poses(states, commands, np.array([0, 2]))
    np.testing.assert_array_equal(poses[:, :4], states[:, :4])
    np.testing.assert_array_equal(poses[:, 4], [states[0, 4], -0.0, states[2, 4], -2.0])


def test_an_untrained_adapter_expects_to_be_where_it_was_sent() -> None:
    adapter, commands = Adapter(4), torch.rand(2, 3, 5)
    assert torch.equal(adapter(torch.rand(2, 5), torch.rand(2, 5), commands), commands)
