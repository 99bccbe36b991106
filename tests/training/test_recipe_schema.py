"""One schema: how many keys it has, what of it is documented, and that all that is shipped fits it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.registry import METHODS
from vla_stack.training.recipe import Recipe, load, make
from vla_stack.training.recipe_tree import RENAMED, Key, keys_of, with_overrides
from vla_stack.training.recipes import find_recipe

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "vla_stack" / "configs").glob("*.yaml"))
SHIPPED = sorted((ROOT / "vla_stack/assets").rglob("recipe.yaml"))
TOP = {"task", "policy", "method", "data", "eval", "output_dir", "seed", "device"}
MORE = {"name", "threads", "precision", "processes", "sharded"}


def all_keys() -> dict[str, Key]:
    """Every leaf key of every method's recipes."""
    of_methods = [key for name in METHODS.built_in() for key in keys_of(METHODS.get(name), "method.")]
    return {key.name: key for key in [*keys_of(Recipe), *of_methods] if key.name != "method"}


def test_the_schema_is_small_and_says_what_each_key_is() -> None:
    keys = all_keys()
    assert len(keys) <= 200
    assert {name.split(".")[0] for name in keys} == TOP | MORE
    assert [name for name, key in keys.items() if not key.text] == []


@pytest.mark.parametrize("name", METHODS.built_in())
def test_a_method_is_registered_by_its_name(name: str) -> None:
    method = METHODS.get(name)
    assert method().name == name
    assert method.__doc__ and method.check_recipe and method.run


@pytest.mark.parametrize("path", [*CONFIGS, *SHIPPED], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_builds_and_reads_back_equal(path: Path, tmp_path: Path) -> None:
    records_its_own = "name: rac" in path.read_text()
    recipe = load(path, [] if records_its_own or "sources:" in path.read_text() else ["data.root=somewhere"])
    again = tmp_path / "recipe.yaml"
    again.write_text(recipe.to_yaml())
    assert load(again) == recipe
    assert path.read_text().startswith("# ") or path in SHIPPED  # what `vla train --list` shows


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["steps=5"], "'steps' is no longer a key -- it is now method.steps"),
        (["optimizer.lr=1"], "'optimizer' is no longer a key -- it is now method.optimizer"),
        (["loop=rac"], "'loop' is no longer a key -- it is now method.name"),
        (["world_model=tiny"], "it is now method=world_model with method.start"),
        (["eval_seed=3"], "it is now eval.seed"),
        (["train.steps=3"], "'train' is no longer a key -- it is now the recipe itself: train.policy is policy"),
        (["method=reinflow", "method.decay=0.9"], "'method.decay' is no longer a key -- it is now method.gae_lambda"),
    ],
)
def test_a_key_of_old_recipes_is_answered_with_the_new_one(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        make(with_overrides({}, overrides), "old.yaml")
    assert str(error.value).startswith("old.yaml: ") and says in str(error.value) and "\n" not in str(error.value)


def test_no_key_that_is_answered_as_old_is_one() -> None:
    top = {name.split(".")[0] for name in all_keys()}
    assert not RENAMED.keys() & (top | all_keys().keys())
    known = {".".join(name.split(".")[:n]) for name in all_keys() for n in (1, 2, 3)}
    named = [name for new in RENAMED.values() for name in re.findall(r"\b(?:method|eval)\.\w+", new)]
    assert named and [name for name in named if name not in known] == []


def test_methods_and_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in [*METHODS.built_in(), *(path.stem for path in CONFIGS)]:
        (line,) = [line for line in printed.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 3


def test_keys_are_explained_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grape", "--explain"]) == 0
    printed = capsys.readouterr().out
    for line in ("method.beta = 0.0", "method.weights.external = 1.0", "eval.seed = 10000", "data.sources[].root = "):
        assert f"  {line}" in printed
    assert main(["train", "rl_wsrl", "--explain"]) == 0
    assert "method.sac.utd = 4" in capsys.readouterr().out


def test_recipes_go_by_name_and_methods_too(capsys: pytest.CaptureFixture[str]) -> None:
    tree, source = find_recipe("pick", ["method.steps=3"])
    assert source.endswith("configs/pick.yaml") and tree["method"]["steps"] == 3
    tree, _ = find_recipe("imitation", ["data.root=x", "method.steps=3"])
    assert make(tree, "x").method.steps == 3 and make(tree, "x").name == "imitation"
    tree, _ = find_recipe("pick", ["method=own_loss"])  # the other keys of the section stay
    assert tree["method"]["name"] == "own_loss" and tree["method"]["batch_size"] == 64
    assert main(["train", "pikc"]) == 1
    assert "there is no recipe or method 'pikc' -- did you mean 'pick'?" in capsys.readouterr().err
    assert main(["train", "seed=3"]) == 1
    assert "no recipe given" in capsys.readouterr().err
