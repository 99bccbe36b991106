"""A comparison stops when it knows, goes on where it stopped, and counts no start twice."""

import json

import pytest

from vla_stack.errors import UserError
from vla_stack.evaluation.compare import Comparison, sentences

RATE = {"good": lambda s: s % 10 != 0, "fair": lambda s: s % 2 == 0, "bad": lambda s: s % 10 == 0}


class Player:
    def __init__(self):
        self.played = []

    def __call__(self, comparison, name, starts):
        for start in reversed(starts):  # in an order of its own, as episodes end
            self.played.append((name, start))
            comparison.note(name, start, RATE[name](start))


def run(comparison, budget=200, block=10):
    player = Player()
    comparison.run(player, range(budget), block, lambda used: None)
    return player


def test_it_stops_when_one_is_better():
    comparison = Comparison(("good", "bad"))
    player = run(comparison)
    assert len(player.played) == len(set(player.played)) < 60
    (line,) = sentences(comparison)
    assert line.startswith("good better, p ") and "bad minus good -80 points" in line
    assert comparison.playing() == [] and run(comparison).played == []


def test_it_stops_when_none_is_better_by_the_margin():
    RATE["again"] = RATE["fair"]
    comparison = Comparison(("fair", "again"), margin=0.2)
    run(comparison)
    assert sentences(comparison)[0].startswith("no difference larger than 20 points between fair and again")


def test_a_decided_policy_plays_no_longer():
    RATE["again"] = RATE["good"]
    comparison = Comparison(("good", "again", "bad"))
    played = [name for name, _ in run(comparison).played]
    assert played.count("bad") < played.count("good") == played.count("again")
    place = comparison.to_json()["policies"]
    assert place["bad"]["ranks"] == [3, 3] and place["good"]["ranks"] == [1, 2]
    assert "rank" in "\n".join(sentences(comparison))


def test_a_budget_that_is_used_up_is_continued(tmp_path):
    path = tmp_path / "comparison.json"
    first = Comparison(("good", "fair"), about={"env": "x"})
    run(first, budget=10)
    assert sentences(first)[0].startswith("not enough to tell good from fair")
    first.save(path)
    second = Comparison(("good", "fair"), about={"env": "x"})
    second.resume(path)
    assert min(start for _, start in run(second).played) == 10
    assert sentences(second)[0].startswith("good better")


def test_an_interrupted_block_counts_up_to_its_first_hole():
    comparison = Comparison(("good", "bad"))
    run(comparison, budget=5)
    comparison.note("good", 5, True)
    comparison.note("bad", 7, False)
    comparison.note("good", 7, True)
    (test,) = comparison.tests().values()
    assert test.starts == 5
    player = Player()
    comparison.run(player, range(10), 10, lambda used: None)
    assert ("good", 5) not in player.played and ("bad", 5) in player.played


def test_another_comparison_is_not_continued(tmp_path):
    path = tmp_path / "comparison.json"
    comparison = Comparison(("good", "bad"), about={"env": "x"})
    run(comparison)
    comparison.save(path)
    with pytest.raises(UserError, match="another env"):
        Comparison(("good", "bad"), about={"env": "y"}).resume(path)
    with pytest.raises(UserError, match="another margin"):
        Comparison(("good", "bad"), margin=0.2, about={"env": "x"}).resume(path)
    path.write_text("{")
    with pytest.raises(UserError, match="not a comparison"):
        comparison.resume(path)


def test_the_file_says_everything(tmp_path):
    comparison = Comparison(("good", "bad"))
    run(comparison)
    comparison.save(tmp_path / "c.json")
    found = json.loads((tmp_path / "c.json").read_text())
    (pair,) = found["pairs"]
    assert pair["verdict"] == "first" and pair["low"] <= pair["difference"] <= pair["high"]
    assert {"revision", "command", "alpha", "outcomes"} <= found.keys()
