"""Recipes: what is written is what is run, and a slip names the key it was meant to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from vla_stack.errors import UserError
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import load
from vla_stack.training.recipe_tree import build
from vla_stack.training.train import pairings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text("name: a\ndata: {root: data/a}\nmethod: {optimizer: {lr: 1e-3}}\n")
    return path


def test_overrides_reach_nested_keys_and_take_the_field_type(path: Path) -> None:
    recipe = load(
        path, ["method.optimizer.lr=3e-4", "policy.options.chunk_size=8", "data.root=[a, b]", "data.episodes=3"]
    )
    assert recipe.method.optimizer.lr == 3e-4
    assert recipe.policy.options == {"chunk_size": 8}
    assert recipe.data.root == ("a", "b")
    assert recipe.data.episodes == (3,)


def test_later_overrides_win(path: Path) -> None:
    assert load(path, ["method.steps=5", "method.steps=7"]).method.steps == 7


def test_resolved_recipe_reads_back_equal(path: Path) -> None:
    recipe = load(
        path, ["precision=bf16", "data.cameras=[front]", "method.optimizer.betas=[0.9, 0.99]", "method.ema=0"]
    )
    path.write_text(recipe.to_yaml())
    assert load(path) == recipe


def test_defaults_are_those_of_the_dataclass(path: Path) -> None:
    assert load(path).method == Imitation(optimizer=OptimizerRecipe(lr=1e-3))


@dataclass(frozen=True)
class Inner:
    size: int = 1
    rate: float = 1.0
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Middle:
    inner: Inner = field(default_factory=lambda: Inner(size=2, rate=2.0))
    other: Inner = Inner(size=3)
    maybe: Inner | None = None
    several: tuple[Inner, ...] = (Inner(size=4, rate=4.0),)
    count: int = 5


@dataclass(frozen=True)
class Outer:
    middle: Middle = field(default_factory=lambda: Middle(inner=Inner(size=6, tags=("a",)), count=7))


def test_a_key_leaves_the_others_at_the_default_of_the_field_that_it_lies_in() -> None:
    assert build(Middle, {"inner": {"rate": 9}}, "test") == Middle(inner=Inner(size=2, rate=9.0))
    assert build(Middle, {"other": {"rate": 9}}, "test") == Middle(other=Inner(size=3, rate=9.0))
    assert build(Middle, {"maybe": {"rate": 9}}, "test") == Middle(maybe=Inner(rate=9.0))
    assert build(Middle, {"several": [{"rate": 9}]}, "test") == Middle(several=(Inner(rate=9.0),))  # a list is whole
    for nothing in ({}, {"inner": None}, {"inner": {}}):
        assert build(Middle, nothing, "test") == Middle()
    deep = build(Outer, {"middle": {"inner": {"rate": 9}}}, "test")
    assert deep == Outer(Middle(inner=Inner(size=6, rate=9.0, tags=("a",)), count=7))
    assert build(Outer, {}, "test") == Outer()
    with pytest.raises(UserError, match=r"test: unknown key 'middle.inner.rat' -- the nearest .* 'middle.inner.rate'"):
        build(Outer, {"middle": {"inner": {"rat": 9}}}, "test")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("metod.steps=1", "unknown key 'metod' -- the nearest valid key is 'method'"),
        ("method.optimiser.lr=1", "unknown key 'method.optimiser' -- the nearest valid key is 'method.optimizer'"),
        ("method.optimizer.lrr=1", "'method.optimizer.lrr' -- the nearest valid key is 'method.optimizer.lr'"),
        ("method.steps=many", "'method.steps' is 'many', expected a whole number"),
        ("method.steps=0", "'method.steps' is 0, expected at least 1"),
        ("method.steps", "override 'method.steps' is not of the form key=value"),
        ("seed=true", "'seed' is True, expected a whole number"),
        ("seed=-1", "'seed' is -1, expected at least 0"),
        ("method.optimizer=3", "'method.optimizer' needs keys below it"),
        ("method=3", "'method' needs keys below it"),
        ("name.x=1", "'name' is a value, it has no keys"),
        ("precision=fp16", "'precision' is 'fp16', expected one of auto, fp32, bf16"),
        ("method.optimizer.betas=[1]", "'method.optimizer.betas' is [1], expected 2 values"),
        ("method.optimizer.lr=fast", "'method.optimizer.lr' is 'fast', expected a number"),
        ("method.optimizer.lr=0", "'method.optimizer.lr' is 0.0, expected more than 0"),
        ("method.ema=1.0", "'method.ema' is 1.0, expected a number in [0, 1)"),
        ("data.root=[]", "'data.root' is missing"),
        ("data.augmentation.camera_shift={front: -1}", "'data.augmentation.camera_shift.front' is -1, expected at"),
        ("eval.every=10", "'eval.envs' is empty"),
    ],
)
def test_a_slip_is_one_line_that_names_the_key(path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(path, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


SOURCES = """
sources:
  - {root: a, weight: 2, embodiment: one, cameras: {front: top}, episodes: [0, 1]}
  - {root: b, weight: 0.5, embodiment: two}
"""


def test_sources_read_back_equal(path: Path) -> None:
    path.write_text(yaml.safe_dump({"data": yaml.safe_load(SOURCES) | {"text_pairs": {"root": "pairs"}}}))
    recipe = load(path)
    first, second = recipe.data.sources
    assert first.cameras == {"front": "top"} and first.episodes == (0, 1) and second.weight == 0.5
    path.write_text(recipe.to_yaml())
    assert load(path) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{root: a, weight: 0}", "'data.sources[0].weight' is 0.0, expected more than 0"),
        ("{root: a, weight: -1}", "'data.sources[0].weight' is -1.0, expected more than 0"),
        ("{root: a}", "'data.sources[0].weight' is missing and others have one -- weigh all or none"),
        ("{weight: 1}", "'data.sources[0].root' is missing"),
        (
            "{root: a, wieght: 1}",
            "unknown key 'data.sources[0].wieght' -- the nearest valid key is 'data.sources",
        ),
        ("{root: a, weight: 1, cameras: [front]}", "'data.sources[0].cameras' is ['front'], expected a mapping"),
    ],
)
def test_a_slip_in_a_source_names_it(path: Path, change: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(path, ["data.root=[]", f"data.sources=[{change}, {{root: b, weight: 1}}]"])
    assert message in str(error.value)


def test_sources_and_root_are_two_ways_of_which_one_is_taken(path: Path) -> None:
    for override in ("data.root=c", "data.episodes=3", "data.cameras=[front]"):
        key = override.split("=")[0]
        with pytest.raises(UserError, match=f"both 'data.sources' and '{key}' are set -- set '{key[5:]}' of"):
            load(path, ["data.root=[]", "data.sources=[{root: a}]", override])


def test_an_evaluation_names_the_robot_or_takes_all() -> None:
    assert pairings(["sim/pick-v0"], []) == [(None, "sim/pick-v0")]
    pairs = pairings(["sim/pick-v0", "b@my.module:my/env-v0"], ["a", "b"])
    assert pairs == [("a", "sim/pick-v0"), ("b", "sim/pick-v0"), ("b", "my.module:my/env-v0")]
    with pytest.raises(UserError, match="the policy has no embodiment 'c' -- it has a, b"):
        pairings(["c@sim/pick-v0"], ["a", "b"])


def test_an_unknown_key_of_the_file_names_the_file(path: Path) -> None:
    path.write_text("polisy: 3\n")
    with pytest.raises(UserError, match=r"a\.yaml: unknown key 'polisy' -- the nearest valid key is 'policy'"):
        load(path)


def test_a_missing_or_broken_file_is_named(path: Path) -> None:
    with pytest.raises(UserError, match="nowhere.yaml"):
        load(path.with_name("nowhere.yaml"))
    path.write_text("a: [1\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load(path)
