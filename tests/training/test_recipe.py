"""Recipes: what is written is what is run, and a slip names the key it was meant to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_stack.errors import UserError
from vla_stack.training.recipe import Recipe, load


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text("name: a\ndata: {root: data/a}\noptimizer: {lr: 1e-3}\n")
    return path


def test_overrides_reach_nested_keys_and_take_the_field_type(path: Path) -> None:
    recipe = load(path, ["optimizer.lr=3e-4", "policy.options.chunk_size=8", "data.root=[a, b]", "data.episodes=3"])
    assert recipe.optimizer.lr == 3e-4
    assert recipe.policy.options == {"chunk_size": 8}
    assert recipe.data.root == ("a", "b")
    assert recipe.data.episodes == (3,)


def test_later_overrides_win(path: Path) -> None:
    assert load(path, ["steps=5", "steps=7"]).steps == 7


def test_resolved_recipe_reads_back_equal(path: Path) -> None:
    recipe = load(path, ["precision=bf16", "data.cameras=[front]", "optimizer.betas=[0.9, 0.99]", "ema=0"])
    path.write_text(recipe.to_yaml())
    assert load(path) == recipe


def test_defaults_are_those_of_the_dataclass(path: Path) -> None:
    assert load(path).steps == Recipe().steps


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.lr=1", "unknown key 'optimiser' -- the nearest valid key is 'optimizer'"),
        ("optimizer.lrr=1", "unknown key 'optimizer.lrr' -- the nearest valid key is 'optimizer.lr'"),
        ("steps=many", "'steps' is 'many', expected a whole number"),
        ("steps=0", "'steps' is 0, expected more than 0"),
        ("steps", "override 'steps' is not of the form key=value"),
        ("seed=true", "'seed' is True, expected a whole number"),
        ("optimizer=3", "'optimizer' needs keys below it"),
        ("name.x=1", "'name' is a value, it has no keys"),
        ("precision=fp16", "'precision' is 'fp16', expected one of fp32, bf16"),
        ("optimizer.betas=[1]", "'optimizer.betas' is [1], expected 2 values"),
        ("optimizer.lr=fast", "'optimizer.lr' is 'fast', expected a number"),
        ("ema=1.0", "'ema' is 1.0"),
        ("data.root=[]", "'data.root' is missing"),
        ("eval.every=10", "'eval.envs' is empty"),
    ],
)
def test_a_slip_is_one_line_that_names_the_key(path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(path, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_key_of_the_file_names_the_file(path: Path) -> None:
    path.write_text("setps: 3\n")
    with pytest.raises(UserError, match=r"a\.yaml: unknown key 'setps' -- the nearest valid key is 'steps'"):
        load(path)


def test_a_missing_or_broken_file_is_named(path: Path) -> None:
    with pytest.raises(UserError, match="nowhere.yaml"):
        load(path.with_name("nowhere.yaml"))
    path.write_text("a: [1\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load(path)
