"""The loop: a run that was cut, anywhere, ends as the uncut one does, bit for bit."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_fakes import KEY, MadeUp, tiny_parts

from vla_stack.errors import UserError
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.build import preprocessed, to_device, with_float_images
from vla_stack.training.ema import Ema
from vla_stack.training.log import Window
from vla_stack.training.loop import Outcome, Rate, Trainer
from vla_stack.training.optimizer import learning_rate, of_backbone
from vla_stack.training.placement import Distributed, Local
from vla_stack.training.recipe import Recipe


class Killed(BaseException):
    """Stands for kill -9 inside one process; tools/bench/crash.py does it with the real one."""


def trained(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with other settings of its method."""
    return replace(recipe, method=replace(recipe.method, **changes))


def run(recipe: Recipe, run_dir: Path, resume: bool = False, **kwargs: Any) -> Outcome:
    run_dir.mkdir(exist_ok=True)
    checkpoint = ckpt.latest(run_dir / "checkpoints") if resume else None
    parts = tiny_parts(recipe, checkpoint, **kwargs)
    return Trainer(recipe, parts, Local("cpu"), run_dir, checkpoint).run()


def weights(checkpoint: Path) -> dict[str, bytes]:
    """Bytes of all tensors of a checkpoint: averaged and raw weights, optimiser."""
    return {str(p.relative_to(checkpoint)): p.read_bytes() for p in sorted(checkpoint.rglob("*.safetensors"))}


def losses(run_dir: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records]


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("cut", [1, 5, 8, 11])
def test_a_run_killed_in_a_step_resumes_bit_exactly(tmp_path: Path, recipe: Recipe, ema: float, cut: int) -> None:
    recipe = trained(recipe, ema=ema)
    whole = run(recipe, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", killing(Trainer.update, cut))
        with pytest.raises(Killed):
            run(recipe, tmp_path / "cut")
    resumed = run(recipe, tmp_path / "cut", resume=True)
    assert weights(resumed.checkpoint) == weights(whole.checkpoint)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert len(weights(whole.checkpoint)) == (4 if ema else 3)  # with the tokenizer


def test_encoders_without_a_learning_rate_stay_as_they_are(tmp_path: Path, recipe: Recipe) -> None:
    recipe = trained(recipe, optimizer=replace(recipe.method.optimizer, backbone_lr_scale=0.0))
    before = {name: p.detach().clone() for name, p in tiny_parts(recipe).policy.named_parameters()}
    parts = tiny_parts(recipe)
    Trainer(recipe, parts, Local("cpu"), tmp_path).run()
    for name, p in parts.policy.named_parameters():
        assert torch.equal(p, before[name]) == of_backbone(name), name
        assert p.grad is None


def test_a_policy_that_is_all_encoders_is_refused_without_a_learning_rate(tmp_path: Path, recipe: Recipe) -> None:
    recipe = trained(recipe, optimizer=replace(recipe.method.optimizer, backbone_lr_scale=0.0))
    parts = tiny_parts(recipe)
    for name, p in parts.policy.named_parameters():
        p.requires_grad_(of_backbone(name))
    with pytest.raises(UserError, match="nothing of this policy is left to train -- set it above 0"):
        Trainer(recipe, parts, Local("cpu"), tmp_path)


def killing(update: Any, step: int) -> Any:
    def wrapped(self: Trainer, *args: Any) -> None:
        update(self, *args)
        if self.step == step:
            raise Killed

    return wrapped


def test_training_changes_the_weights_and_seeds_matter(tmp_path: Path, recipe: Recipe) -> None:
    first = weights(run(recipe, tmp_path / "a").checkpoint)
    assert first == weights(run(recipe, tmp_path / "b").checkpoint)
    assert first != weights(run(replace(recipe, seed=1), tmp_path / "c").checkpoint)


def test_evaluation_between_steps_does_not_change_the_run(tmp_path: Path, recipe: Recipe) -> None:
    recipe = replace(recipe, eval=replace(recipe.eval, every=3, envs=("any",)))
    seen = []

    def evaluate(policy_dir: Path, step: int) -> dict[str, float]:
        seen.append((step, (policy_dir / "config.json").is_file()))
        torch.rand(100), np.random.rand(100)  # noqa: NPY002
        return {"success": 0.5}

    (tmp_path / "a").mkdir()
    with_eval = Trainer(recipe, tiny_parts(recipe), Local("cpu"), tmp_path / "a").run(evaluate)
    without = run(recipe, tmp_path / "b")
    assert seen == [(3, True), (6, True), (9, True), (12, True)]
    assert weights(with_eval.checkpoint) == weights(without.checkpoint)
    assert '"eval/success": 0.5' in (tmp_path / "a/metrics.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_the_step_and_saves(tmp_path: Path, recipe: Recipe, number: int) -> None:
    whole = run(recipe, tmp_path / "whole")
    update = Trainer.update

    def interrupted(self: Trainer, *args: Any) -> None:
        if self.step == 5:
            os.kill(os.getpid(), number)
        update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        outcome = run(recipe, tmp_path / "cut")
    assert (outcome.step, outcome.stopped, outcome.checkpoint.name) == (6, True, "000006")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert weights(run(recipe, tmp_path / "cut", resume=True).checkpoint) == weights(whole.checkpoint)


def test_a_loss_that_is_not_finite_stops_the_run_and_spoils_no_checkpoint(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(UserError, match=r"loss is nan at step 7"):
        run(recipe, tmp_path / "a", poison=6)
    last = ckpt.latest(tmp_path / "a/checkpoints")
    assert last is not None and last.name == "000004"
    assert all(t.isfinite().all() for t in load_file(last / "pretrained_model/model.safetensors").values())


def test_a_torn_metrics_file_is_mended_on_resume(tmp_path: Path, recipe: Recipe) -> None:
    run(trained(recipe, steps=8), tmp_path / "a")
    with (tmp_path / "a/metrics.jsonl").open("a") as f:
        f.write('{"step": 10, "loss": 1.0}\n{"step": 12, "lo')
    run(recipe, tmp_path / "a", resume=True)
    assert [step for step, _ in losses(tmp_path / "a")] == [2, 4, 6, 8, 10, 12]


def test_gradients_of_accumulated_passes_are_averaged(recipe: Recipe, tmp_path: Path) -> None:
    gradients = []
    for accumulate in (1, 2):
        r = trained(recipe, accumulate=accumulate, optimizer=replace(recipe.method.optimizer, clip_norm=0.0))
        parts = tiny_parts(r)
        parts.loss = lambda policy, batch, generator: (policy.prefix.state(batch["observation.state"]).mean(), {})
        parts.loader = SameBatch(4)
        trainer = Trainer(r, parts, Local("cpu"), tmp_path)
        trainer.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
        trainer.update(iter(parts.loader), Window(), Rate(4))
        gradients.append(parts.policy.prefix.state.weight.grad.clone())
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-5) and gradients[0].abs().sum() > 0


class SameBatch(MadeUp):
    def __iter__(self) -> Any:
        batch = next(super().__iter__())
        while True:
            yield dict(batch)


def test_bf16_trains(tmp_path: Path, recipe: Recipe) -> None:
    outcome = run(replace(recipe, precision="bf16"), tmp_path / "a")
    tensors = load_file(outcome.checkpoint / "pretrained_model/model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_learning_rate_warms_up_peaks_and_ends_at_its_ratio(recipe: Recipe) -> None:
    optimizer = replace(recipe.method.optimizer, lr=2.0, warmup_steps=10, final_lr_ratio=0.1)
    training = trained(recipe, steps=101, optimizer=optimizer).method
    rates = [learning_rate(step, training) for step in range(training.steps)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[55] == pytest.approx(0.2 + 1.8 / 2)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_average_follows_its_recurrence_and_swaps_without_copies() -> None:
    parameter = torch.nn.Parameter(torch.tensor([0.0]))
    ema = Ema([parameter], decay=0.5)
    expected = 0.0
    for step in range(5):
        with torch.no_grad():
            parameter.fill_(float(step + 1))
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * (step + 1)
    with ema.applied():
        assert parameter.item() == pytest.approx(expected, rel=1e-6)
    assert parameter.item() == 5.0
    assert not math.isclose(expected, 5.0)


def test_images_become_float_channels_last_on_the_device() -> None:
    image = np.arange(2 * 3 * 5 * 3, dtype=np.uint8).reshape(2, 3, 5, 3)
    recorded = to_device({KEY: image, "task": ["a", "b"]}, torch.device("cpu"))
    assert recorded[KEY].dtype == torch.uint8 and recorded[KEY].shape == image.shape
    batch = with_float_images(recorded)
    assert batch[KEY].shape == (2, 3, 3, 5) and batch[KEY].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch[KEY].permute(0, 2, 3, 1) * 255, torch.from_numpy(image).float())


def test_columns_that_a_processor_drops_are_put_back(recipe: Recipe) -> None:
    parts = tiny_parts(recipe)
    raw = to_device(next(iter(parts.loader)), torch.device("cpu"))
    batch = preprocessed(raw, parts.preprocess)
    assert "weight" not in parts.preprocess(raw)
    assert torch.equal(batch["weight"], raw["weight"])
    assert "observation.language.tokens" in batch


def test_processes_wait_for_the_first_one_while_it_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    """For days: where nothing else is said, torch ends those that wait after 30 minutes, on GPUs after 10."""
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    placement = Distributed("cpu")
    try:
        group = torch.distributed.group.WORLD
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout >= timedelta(days=1)
        placement.barrier()
    finally:
        placement.close()
