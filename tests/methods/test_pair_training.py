"""Training on pairs of a LeRobot VLA with adapters: the reference is the weights without them; it resumes; it saves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_vla import ACTIONS, SIZE, STATES
from tiny_vlas import CHUNK, make_vla, save_vla

from vla_stack.data.preferences import Facts, Rollout, Scored, make_pairs, write_preferences, write_rollout
from vla_stack.methods.grape.pair_training import calibrate, self_scores, train_on_pairs
from vla_stack.methods.grape.recipe import Grape
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import ACTION, OBS_STATE, image_key
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import LoraRecipe, PolicyRecipe, Recipe

RECIPE = Recipe(
    policy=PolicyRecipe(lora=LoraRecipe(rank=2, train="(?!)")),
    method=Grape(
        **{"draws": 1, "micro": 4, "steps": 2, "batch_size": 1, "log_every": 1, "save_every": 1, "calibration": 2},
        optimizer=OptimizerRecipe(lr=1e-3, warmup_steps=1),
    ),
    threads=1,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Pairs of two starts, of random decisions."""
    out, rng, scored = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0), []
    for seed in (1, 2):
        for number in (0, 1):
            n = 2 + number
            decisions = {
                OBS_STATE: rng.normal(size=(n, STATES)).astype(np.float32),
                ACTION: rng.normal(size=(n, CHUNK, ACTIONS)).astype(np.float32),
                "executed": np.full(n, 4),
                "noise_seed": np.arange(n),
                "tick": 4 * np.arange(n),
                **{image_key(c): rng.integers(0, 256, (n, SIZE, SIZE, 3), dtype=np.uint8) for c in ("front", "wrist")},
            }
            facts = Facts("pick up the cube", "sim/pick-v0", seed, number, number == 0, 4 * n, False)
            write_rollout(out, Rollout(facts, decisions, {}))
            scored.append(Scored(facts.id, facts.task, seed, facts.success, -float(number), {}, []))
    write_preferences(out, scored, make_pairs(scored))
    return out


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smolvla")
    return save_vla(make_vla("smolvla", folder), folder / "policy")


def log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_adapters_are_trained_against_the_weights_without_them(root, start, tmp_path):
    run = tmp_path / "run"
    one = train_on_pairs(replace(RECIPE, method=replace(RECIPE.method, steps=1)), root, run, start, beta=50.0)
    assert log(run)[0]["tpo"] == pytest.approx(math.log(2), rel=1e-4)
    assert (one / "lora.safetensors").is_file()
    two = train_on_pairs(RECIPE, root, run, start, beta=50.0)  # continues: the reference is still the start
    straight = train_on_pairs(RECIPE, root, tmp_path / "straight", start, beta=50.0)
    assert log(run)[1]["tpo"] == pytest.approx(log(tmp_path / "straight")[1]["tpo"], rel=1e-5)
    assert log(run)[1]["tpo"] != pytest.approx(math.log(2), rel=1e-6)
    for a in ("model.safetensors", "lora.safetensors"):
        assert (two / a).read_bytes() == (straight / a).read_bytes()
    load_policy(two)  # a plain policy directory


def test_beta_and_self_scores(root, start, tmp_path):
    from vla_stack.data.preferences import read_rollout, rollout_files

    beta = calibrate(RECIPE, root, tmp_path / "pilot", start)
    assert beta > 0 and calibrate(RECIPE, root, tmp_path / "pilot", start) == beta
    scores = self_scores(start, [read_rollout(p) for p in rollout_files(root)], draws=2)
    assert len(scores) == 4 and all(s < 0 for s in scores)
