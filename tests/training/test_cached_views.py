"""Image tokens of frozen encoders, computed once for a few views of every frame."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vla_stack.errors import UserError
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import IMAGE_TOKENS
from vla_stack.training import cached_views
from vla_stack.training.build import build, preprocessed, to_device
from vla_stack.training.recipe import Recipe, load
from vla_stack.training.train import train

FROZEN = ("method.optimizer.backbone_lr_scale=0", "data.cached_views=2")
CPU = torch.device("cpu")


@pytest.fixture
def own(tmp_path: Path, dataset: Path) -> Path:
    """A dataset of the test's own, whose views no other test has made."""
    return Path(shutil.copytree(dataset, tmp_path / "arm"))


def frozen(recipe_file: Path, root: Path, *more: str) -> Recipe:
    return load(recipe_file, [f"data.root={root}", *FROZEN, *more])


def parts_of(recipe: Recipe):  # type: ignore[no-untyped-def]
    return build(recipe, recipe.method.loss(), CPU)


def test_tokens_are_those_of_the_pictures(recipe_file: Path, own: Path) -> None:
    recipe = frozen(recipe_file, own, "data.augmentation.strength=0")
    cached = parts_of(recipe)
    plain = parts_of(replace(recipe, data=replace(recipe.data, cached_views=0)))
    plain.policy.load_state_dict(cached.policy.state_dict())
    for _, one, other in zip(range(3), cached.loader, plain.loader, strict=False):
        batch, seen = (preprocessed(to_device(raw, CPU), cached.preprocess) for raw in (one, other))
        assert not [key for key in batch if key.startswith("observation.images.")]
        expected = plain.policy.eval().image_tokens(seen).to(torch.bfloat16)
        torch.testing.assert_close(batch[IMAGE_TOKENS], expected, rtol=0.02, atol=0.02)
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        losses = [cached.loss(cached.policy, b, g)[0] for b, g in zip((batch, seen), generators, strict=True)]
        torch.testing.assert_close(*losses, rtol=0.02, atol=0.0)


def test_views_differ_and_are_made_once(recipe_file: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = frozen(recipe_file, own)
    first = next(iter(parts_of(recipe).loader))[IMAGE_TOKENS]
    (file,) = own.with_name("arm.frames").glob("views-*.i16")
    one, two = np.fromfile(file, np.int16).reshape(2, -1)
    assert (one != two).mean() > 0.5

    def never(self: VlaPolicy, batch: dict) -> torch.Tensor:
        assert len(batch["task"]) == 1  # whose shape is asked for
        return made(self, batch)

    made = VlaPolicy.image_tokens
    monkeypatch.setattr(VlaPolicy, "image_tokens", never)
    np.testing.assert_array_equal(next(iter(parts_of(recipe).loader))[IMAGE_TOKENS], first)


def test_what_was_interrupted_is_continued(recipe_file: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_views, "BLOCK", 2)
    monkeypatch.setattr(cached_views, "SAVE", 2)
    recipe, made, calls, dies = frozen(recipe_file, own), VlaPolicy.image_tokens, [], [True]

    def counted(self: VlaPolicy, batch: dict) -> torch.Tensor:
        calls.append(len(batch["task"]))
        if dies and len(calls) == 6:  # the first one asks for the shape
            raise RuntimeError
        return made(self, batch)

    monkeypatch.setattr(VlaPolicy, "image_tokens", counted)
    with pytest.raises(RuntimeError):
        parts_of(recipe)
    (file,) = own.with_name("arm.frames").glob("views-*.i16")
    calls.clear()
    dies.clear()
    parts_of(recipe)
    rest, continued = len(calls), file.read_bytes()
    file.unlink()
    calls.clear()
    parts_of(recipe)
    assert len(calls) - rest == 4 and file.read_bytes() == continued


def test_a_run_on_two_datasets_is_resumed_as_if_it_had_not_stopped(
    recipe_file: Path, own: Path, tmp_path: Path
) -> None:
    twin = shutil.copytree(own, tmp_path / "twin")
    recipe = frozen(recipe_file, own, f"data.root=[{own},{twin}]", "data.augmentation.shift=1")
    loss = recipe.method.loss()
    whole = train(recipe, loss, tmp_path / "whole")
    shorter = replace(recipe, method=replace(recipe.method, save_every=3))
    part = train(shorter, loss, tmp_path / "part")
    shutil.rmtree(part)  # the last checkpoint: as if it had been killed before
    again = train(shorter, loss, tmp_path / "part")
    one, two = (load_file(path / "pretrained_model" / "model.safetensors") for path in (whole, again))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_deleted_file_is_not_taken_for_done(recipe_file: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = frozen(recipe_file, own)
    parts_of(recipe)
    (file,) = own.with_name("arm.frames").glob("views-*.i16")
    whole, made, calls = file.read_bytes(), VlaPolicy.image_tokens, []
    file.unlink()

    def dies(self: VlaPolicy, batch: dict) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:  # before the first block is noted
            raise RuntimeError
        return made(self, batch)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(VlaPolicy, "image_tokens", dies)
        parts_of(recipe)
    parts_of(recipe)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method.optimizer.backbone_lr_scale=1", "what reads pictures is trained"),
        ("policy.options.history=2", "for the native VLA of one robot, without a history"),
    ],
)
def test_what_has_no_fixed_tokens_is_refused(change: str, message: str, recipe_file: Path, own: Path) -> None:
    with pytest.raises(UserError, match=message):
        parts_of(frozen(recipe_file, own, change))


def test_a_full_disk_is_named_before_anything_is_encoded(
    recipe_file: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = frozen(recipe_file, own)
    parts_of(replace(recipe, data=replace(recipe.data, cached_views=0)))  # pictures are decoded
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1}))
    with pytest.raises(UserError, match="2 views need .* GB"):
        parts_of(recipe)
