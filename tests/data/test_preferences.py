"""Preferences on disk: pairs only within a start, how many, and batches of what was executed."""

from __future__ import annotations

import numpy as np
import pytest

from vla_stack import cli
from vla_stack.data.preferences import (
    Facts,
    PairLoader,
    Rollout,
    Scored,
    make_pairs,
    read_pairs,
    read_rollout,
    read_scores,
    rollout_files,
    write_preferences,
    write_rollout,
)
from vla_stack.errors import UserError

LENGTHS = {(1, 0): 3, (1, 1): 2, (2, 0): 1, (2, 1): 4}


def scored(seed: int, number: int, score: float, success: bool = True, task: str = "pick") -> Scored:
    return Scored(f"{seed:010d}-{number:03d}", task, seed, success, score, {"self": 0.0}, [{"name": "a", "cost": 1.0}])


ROWS = [scored(s, n, float(n + 10 * s), n > 1) for s in (1, 2) for n in range(5)]


def test_m_best_against_m_worst_of_each_start_and_never_across():
    """Test 11 of the specification, section 6."""
    for m in (1, 2):
        pairs = make_pairs(ROWS, m=m)
        assert len(pairs) == 2 * m * m
        assert all(p.winner[:10] == p.loser[:10] == f"{p.seed:010d}" for p in pairs)
        assert all(p.margin > 0 for p in pairs)
    assert make_pairs(ROWS, m=1)[0].winner.endswith("004") and make_pairs(ROWS, m=1)[0].loser.endswith("000")
    assert len(make_pairs(ROWS, m=9)) == 2 * 4  # never a rollout on both sides


def test_other_instructions_are_other_starts():
    mixed = [scored(1, 0, 0.0, task="pick"), scored(1, 1, 1.0, task="place")]
    assert make_pairs(mixed) == []


def test_ties_and_small_margins_are_dropped():
    tied = [scored(1, n, 5.0) for n in range(4)]
    assert make_pairs(tied) == []
    assert make_pairs(ROWS, delta=4.0) == [] and len(make_pairs(ROWS, delta=3.9)) == 2
    failed = [scored(1, n, float(n), success=False) for n in range(3)]
    assert len(make_pairs(failed)) == 1 and make_pairs(failed, winner_succeeds=True) == []


def test_controls():
    random = make_pairs(ROWS, "random", seed=1)
    assert len(random) == 2 and all(int(p.winner[-3:]) > 1 >= int(p.loser[-3:]) for p in random)
    assert random == make_pairs(ROWS, "random", seed=1)
    alone = make_pairs(ROWS, "success")
    assert len(alone) == 6 and all(p.winner == p.loser for p in alone)
    sides = {make_pairs(ROWS, "shuffled", seed=s)[0].winner[-3:] for s in range(20)}
    assert sides == {"004", "000"}


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for (seed, number), n in LENGTHS.items():
        decisions = {
            "observation.state": rng.normal(size=(n, 2)).astype(np.float32),
            "action": rng.normal(size=(n, 4, 3)).astype(np.float32),
            "executed": np.array([2] * (n - 1) + [1]),
            "noise_seed": np.arange(n),
            "tick": 2 * np.arange(n),
            "observation.images.front": rng.integers(0, 255, (n, 8, 8, 3), dtype=np.uint8),
        }
        facts = Facts("pick", "sim/pick-v0", seed, number, number == 0, 2 * n - 1, False)
        ticks = facts.steps
        trace = {"time": np.arange(ticks), "contact": np.zeros(ticks, bool), "points/ee": np.zeros((ticks, 3))}
        write_rollout(tmp_path, Rollout(facts, decisions, trace))
    rows = [scored(seed, number, float(number)) for seed, number in LENGTHS]
    write_preferences(tmp_path, rows, make_pairs(rows))
    return tmp_path


def test_what_is_written_is_read(root):
    rollout = read_rollout(rollout_files(root)[1])
    assert rollout.facts.id == "0000000001-001" and rollout.trace["time"].tolist() == [0, 1, 2]
    assert rollout.decisions["tick"].tolist() == [0, 2]
    assert read_rollout(rollout_files(root)[1], ("trace",)).decisions == {}
    assert [p.seed for p in read_pairs(root)] == [1, 2] and read_scores(root)[0].stages == [{"name": "a", "cost": 1.0}]


def test_a_batch_has_a_row_a_decision_and_pads_what_was_not_executed(root):
    loader = PairLoader(root, 2, seed=0)
    batch = next(iter(loader))
    assert sorted(batch["pair"].tolist()) == [0] * 5 + [1] * 5
    for pair in (0, 1):
        for side in (0, 1):
            rows = (batch["pair"] == pair) & (batch["side"] == side)
            assert batch["decision"][rows].tolist() == list(range(rows.sum()))
            assert (~batch["action_is_pad"][rows]).sum(1).tolist() == [2] * (rows.sum() - 1) + [1]
    assert "noise_seed" not in batch and len(batch["task"]) == 10


def test_order_is_shuffled_and_resumes(root):
    loader = PairLoader(root, 1, seed=0)
    steps = iter(loader)
    first = [len(next(steps)["task"]) for _ in range(3)]
    state = loader.state_dict()
    after = [next(steps)["observation.state"] for _ in range(3)]
    again = PairLoader(root, 1, seed=0)
    again.load_state_dict(state)
    for a, b in zip(after, iter(again), strict=False):
        assert np.array_equal(a, b["observation.state"])
    assert len(first) == 3


def test_a_pair_is_shown_in_rerun(root, tmp_path, capsys):
    assert cli.main(["data", "view", str(root), "--episode", "1", "--save", str(tmp_path / "pair.rrd")]) == 0
    assert "8 frames of pair 1" in capsys.readouterr().out and (tmp_path / "pair.rrd").stat().st_size > 1000
    assert cli.main(["data", "view", str(root), "--episode", "2", "--save", str(tmp_path / "x.rrd")]) == 1
    assert "no pair 2" in capsys.readouterr().err


def test_damage_is_told(root, tmp_path):
    path = rollout_files(root)[0]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="is no rollout"):
        read_rollout(path)
    write_preferences(root, [], [])
    with pytest.raises(UserError, match="no pairs"):
        PairLoader(root, 1, 0)
    with pytest.raises(UserError, match="cannot be read"):
        read_pairs(root / "nowhere")
