"""Values of recorded frames: what they are worth, that no head values what it has seen, and what is drawn by them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_live_loop import Robot
from test_reinflow_loop import make_start

from vla_stack import cli
from vla_stack.data import valued
from vla_stack.data.dataset import open_dataset
from vla_stack.errors import UserError
from vla_stack.methods.progress import fit
from vla_stack.methods.progress.recipe import Progress
from vla_stack.methods.progress.value import FAILED, Bins, ValueHead, advantages, steps_left, train
from vla_stack.training.recipe import make


def test_returns_are_minus_the_share_of_the_usual_time_that_is_left():
    success = np.array([0, 0, 1, 0, 0, 0, 0], bool)
    first, end = np.array([0, 3]), np.array([3, 7])
    left = steps_left(success, first, end)
    assert left.tolist() == [2, 1, 0] + [np.inf] * 4
    bins = Bins(4, horizon=4.0)
    assert bins.of(left).tolist() == [2, 1, 0] + [4] * 4 and bins.of(np.array([400.0])).tolist() == [3]
    assert bins.returns.tolist() == pytest.approx([-0.125, -0.375, -0.625, -0.875, FAILED])


def test_an_advantage_is_what_a_step_gains_beyond_its_own_time():
    left = np.array([2.0, 1, 0, np.inf, np.inf])
    first, end, T = np.array([0, 3]), np.array([3, 5]), 4.0
    usual = -np.array([3, 2, 1, 0, 0]) / T  # one step more than is left, after whose action it is over
    usual[3:] = (-0.5, -1.0)
    found = advantages(usual, left, first, end, 1, T)
    assert found.tolist() == pytest.approx([0, 0, 0, -0.5 - 1 / T, FAILED - 1 / T + 1.0])
    two = advantages(usual, left, first, end, 2, T)
    assert two[0] == pytest.approx(usual[2] - 2 / T - usual[0]) and two[2] == pytest.approx(0.0)
    assert two[3] == pytest.approx(FAILED - 2 / T + 0.5)


def test_a_head_tells_how_much_is_left_and_that_it_will_fail():
    bins = Bins(8, 8.0)
    left = np.array([0.0, 2, 4, 6, np.inf] * 40)
    seen = torch.zeros(len(left), 5)
    seen[torch.arange(len(left)), torch.arange(len(left)) % 5] = 1.0
    torch.manual_seed(0)
    head = ValueHead(5, 16, bins)
    train(seen, bins.of(left), head, 300, 64, 1e-2, 0)
    value, success, done = (x.detach().numpy() for x in head.told(seen[:5]))
    assert value == pytest.approx([-0.5 / 8, -2.5 / 8, -4.5 / 8, -6.5 / 8, FAILED], abs=0.05)
    assert success == pytest.approx([1, 1, 1, 1, 0], abs=0.05) and done == pytest.approx([1, 0, 0, 0, 0], abs=0.05)


def test_no_head_values_an_episode_that_it_has_seen(monkeypatch):
    """What is told of an episode does not change with what that episode's end is said to be."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(40, 3, generator=generator)
    first, end = np.arange(0, 40, 10), np.arange(10, 50, 10)
    left = np.concatenate([np.arange(9.0, -1, -1)] * 4)
    other = left.copy()
    other[:10] = np.inf
    method = Progress(steps=20, batch_size=8, folds=4)
    a, b = (fit.crossed(seen, Bins(4, 10.0), x, first, end, method, 0) for x in (left, other))
    assert (a[0][:10] == b[0][:10]).all() and (a[0][10:] != b[0][10:]).any()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A policy on states, and episodes of its robot, of which every second one succeeds."""
    root = tmp_path_factory.mktemp("given")
    keys = (f"policy={make_start(root / 'start')}",)
    robot = Robot(keys, root / "data")
    for i in range(6):
        robot.live(i % 2 == 0, n=6 + i)
    robot.close()
    return (*keys, f"data.root={root / 'data'}"), root / "data"


def test_frames_are_drawn_by_the_worth_that_a_run_found(given, tmp_path):
    keys, data = given
    run = tmp_path / "values"
    small = ("method.steps=20", "method.batch_size=8", "method.folds=3", "threads=1", "device=cpu")
    assert cli.main(["train", "progress", *keys, *small, f"output_dir={run}"]) == 0
    facts, dataset = json.loads((run / "progress.json").read_text()), open_dataset(data)
    assert (
        facts["ahead"] == 3 and set(facts["held_out"]) == {"auc", "time", "done_f1"} and (run / "progress.png").exists()
    )
    found = valued.frames_of(run, dataset)
    assert all(len(found[name]) == dataset.num_frames for name in ("value", "advantage", "success", "done"))
    drawn, advantage = valued.by_worth(dataset, run), found["advantage"]
    gains = advantage >= 0
    assert 0 < gains.sum() < len(drawn)
    np.testing.assert_allclose(drawn[gains], found["success"][gains])  # luck is worth no more
    lost = np.exp(advantage[~gains] / valued.LOST)
    np.testing.assert_allclose(drawn[~gains], found["success"][~gains] * lost, rtol=1e-5)
    assert cli.main(["train", "--resume", str(run)]) == 0  # there is nothing to do
    assert cli.main(["train", "--resume", str(run), "method.steps=30"]) == 1  # those values are not these
    assert facts["how"]["steps"] == 20
    with pytest.raises(UserError, match="holds no values"):
        valued.frames_of(tmp_path, dataset)
    (tmp_path / "other").mkdir()
    robot = Robot(keys, tmp_path / "other" / "data")
    robot.live(True)
    robot.close()
    with pytest.raises(UserError, match="values other episodes"):
        valued.frames_of(run, open_dataset(tmp_path / "other" / "data"))


def test_what_is_missing_is_said(given):
    keys, _ = given
    for gone, message in ((0, "'policy.pretrained' is missing"), (1, "'data.root' is missing")):
        tree = {"method": {"name": "progress"}}
        for i, key in enumerate(keys):
            name, _, value = key.partition("=")
            if i != gone:
                tree |= {"policy": {"pretrained": value}} if name == "policy" else {"data": {"root": [value]}}
        with pytest.raises(UserError, match=message):
            make(tree, "progress")
