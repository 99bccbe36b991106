"""The one training loop, for every method and policy.

Random numbers are a function of (seed, step, rank): all generators are seeded anew before each step, the global ones
too, because LeRobot's policies draw noise and dropout from them. A resumed run therefore needs no generator state, and
nothing that happens between two steps (an evaluation, a checkpoint) can change what the next one computes.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vla_stack.data.loader import reseeded
from vla_stack.errors import UserError
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.augmentation import Augmentation, augmented
from vla_stack.training.build import Batch, Loader, Loss, Objective, preprocessed, to_device, with_float_images
from vla_stack.training.ema import Ema
from vla_stack.training.log import Log, Window
from vla_stack.training.mixture import Mixture
from vla_stack.training.optimizer import backbone_scale, freeze_backbone, learning_rate, make_optimizer
from vla_stack.training.placement import Distributed, Local, gathered
from vla_stack.training.recipe import Recipe, Training
from vla_stack.training.stop import Stop
from vla_stack.training.text_pairs import PairedLoader
from vla_stack.training.validation import HeldOut, without_dropout

Evaluate = Callable[[Path, int], dict[str, float]]  # (policy directory, step) -> metrics


class Trained(Protocol):
    """What the loop turns: :class:`vla_stack.training.build.Parts`, or a stage of a world model."""

    @property
    def policy(self) -> Any: ...
    @property
    def loader(self) -> Loader: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def preprocess(self) -> Callable[[Batch], Batch]: ...
    @property
    def float_images(self) -> bool: ...
    @property
    def augmentation(self) -> Augmentation: ...
    def save_pretrained(self, directory: Path) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: optimiser steps done, last checkpoint, and whether a signal cut it short."""

    step: int
    checkpoint: Path
    stopped: bool


class Trainer:
    """State of one run: parts, optimiser, average and position.

    Args:
        recipe: The run.
        parts: Policy, processors, loader and loss, already built from the recipe.
        placement: Device and processes.
        run_dir: Run directory.
        resume: Checkpoint to continue from; ``parts.policy`` must have been loaded from it.
    """

    def __init__(
        self, recipe: Recipe, parts: Trained, placement: Local | Distributed, run_dir: Path, resume: Path | None = None
    ) -> None:
        self.recipe, self.parts, self.placement, self.run_dir = recipe, parts, placement, run_dir
        self.training: Training = recipe.method
        self.step = 0
        self.policy = parts.policy.to(placement.device).train()
        freeze_backbone(self.policy, self.training.optimizer)
        # Of a pretrained model some parameters may have no part in a loss, a language model's output head, say.
        config = base_config(self.policy.config) if placement.world > 1 else None
        native = isinstance(config, VlaConfig) and not config.backbone
        self.objective = placement.prepare(Objective(self.policy, parts.loss), all_used=native)
        self.parameters = list(ckpt.trainable(self.policy).values())
        self.optimizer = make_optimizer(self.policy, self.training.optimizer)
        self.ema = Ema(self.parameters, self.training.ema) if self.training.ema else None
        if resume is not None:
            state = ckpt.load_state(resume, self.policy, self.optimizer, self.ema)
            self.step = state["step"]
            if len(loaders := state["loader"]) != placement.world and not recipe.sharded:
                message = f"{resume} is of a run in {len(loaders)} processes, this is one in {placement.world}"
                raise UserError(message, "resume with as many; processes= and torchrun say how many")
            position = loaders[placement.rank % len(loaders)]
            if placement.rank >= len(loaders):  # a process that there was not: its order of the data is its own
                position = reseeded(position, parts.loader.state_dict())
            parts.loader.load_state_dict(position)
        self.generator = torch.Generator(placement.device)
        self.checkpoint: Path | None = resume

    def run(self, evaluate: Evaluate | None = None, held_out: HeldOut | None = None) -> Outcome:
        """Train to the recipe's last step or to the first signal; the last thing done is a checkpoint.

        Args:
            evaluate: Called with a checkpoint's policy directory every ``eval.every`` steps; its metrics are
                logged as ``eval/<name>``.
            held_out: Batches whose loss is logged as ``validation/<name>`` with each checkpoint.

        Raises:
            UserError: The loss or gradient is not finite; the last checkpoint stays what it was.
        """
        t, every, window, batches = self.training, self.recipe.eval.every, Window(), iter(self.parts.loader)
        rate = Rate(t.batch_size * t.accumulate * self.placement.world)
        stopped = False
        shown = Log(self.run_dir, t.steps, self.step, t.wandb, self.recipe.name, enabled=self.placement.is_main)
        with Stop() as stop, shown as log:
            while self.step < t.steps and not stopped:
                self.update(batches, window, rate)
                log.advance()
                stopped = self.placement.any(stop.asked)
                last = stopped or self.step == t.steps
                evaluating = evaluate is not None and every > 0 and self.step % every == 0
                saving = last or evaluating or self.step % t.save_every == 0
                if last or saving or self.step % t.log_every == 0:
                    window.check()
                    log.record(self.step, window.means() | rate.read() | samples(self.parts.loader))
                if saving and held_out is not None and (self.placement.is_main or self.placement.shards > 1):
                    log.record(self.step, {f"validation/{k}": v for k, v in self.validate(held_out).items()})
                if saving:
                    self.checkpoint = self.save()
                if evaluating and evaluate and self.placement.is_main:
                    metrics = evaluate(ckpt.path(self.run_dir / "checkpoints", self.step) / ckpt.PRETRAINED, self.step)
                    log.record(self.step, {f"eval/{k}": v for k, v in metrics.items()})
                if saving:
                    self.placement.barrier()
                    rate.restart()
        assert self.checkpoint is not None  # resumed from, or just written
        return Outcome(self.step, self.checkpoint, stopped and self.step < t.steps)

    def update(self, batches: Iterator[dict[str, Any]], window: Window, rate: Rate) -> None:
        """One optimiser step."""
        t, device = self.training, self.placement.device
        self._seed_everything(self.recipe.seed, self.step, self.placement.rank)
        lr = learning_rate(self.step, t)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * backbone_scale(self.step, t.optimizer) if group["backbone"] else lr
        for micro in range(t.accumulate):
            with rate.loading():
                raw = augmented(to_device(next(batches), device), self.parts.augmentation, self.generator)
                batch = self.prepared(raw)
            more = micro + 1 < t.accumulate
            with self.placement.accumulating(self.objective) if more else nullcontext():
                with self.autocast():
                    loss, metrics = self.objective(batch, self.generator)
                self.placement.backward(loss / t.accumulate)
            window.add(self.step + 1, {"loss": loss, **metrics})
        norm = self._clip(t.optimizer.clip_norm or math.inf)
        window.add(self.step + 1, {"grad_norm": norm, "lr": lr})
        if device.type == "cpu":  # elsewhere reading the value would stall the device
            window.check()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.step)
        self.step += 1
        rate.step()

    def save(self) -> Path:
        """Write a checkpoint (rank 0 does; the other ranks give the position of their loaders, and their parts)."""
        loaders = self.placement.gather(self.parts.loader.state_dict())
        main, root = self.placement.is_main, self.run_dir / "checkpoints"
        state = ckpt.state_of(self.policy, self.optimizer, self.ema, keep=main)

        def fill(directory: Path) -> None:
            self.parts.save_pretrained(directory / ckpt.PRETRAINED)
            ckpt.save_state(directory, state)

        with self.averaged(), self.placement.plain(self.objective):
            if main:
                ckpt.commit(root, self.step, fill, {"loader": loaders}, self.training.keep)
        return ckpt.path(root, self.step)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the policy has the weights that a checkpoint serves."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def validate(self, held_out: HeldOut) -> dict[str, float]:
        """Mean loss on held-out batches, of the weights that a checkpoint serves.

        Pictures are not augmented, nothing is dropped, and the noise of a batch follows from its number alone: two
        checks differ by the weights.
        """
        means = Window()
        with self.averaged(), self.placement.beside(self.objective), without_dropout(self.policy):
            for number, raw in enumerate(held_out):
                self._seed_everything(number)
                batch = self.prepared(to_device(raw, self.placement.device))
                with torch.no_grad(), self.autocast():
                    loss, metrics = held_out.loss(self.policy, batch, self.generator)
                means.add(self.step, {"loss": loss, **metrics})
        return means.means()

    def prepared(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A batch on the device as the loss takes it."""
        return preprocessed(with_float_images(raw) if self.parts.float_images else raw, self.parts.preprocess)

    def autocast(self) -> AbstractContextManager[Any]:
        """The recipe's precision."""
        kind = self.placement.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.recipe.precision == "bf16")

    def _clip(self, longest: float) -> Tensor:
        """Scale the gradient to a norm of at most ``longest``; returns the norm that it had."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        # Reading the norm would stall a device; a CPU is spared a pass through the gradients in most steps.
        if self.placement.device.type != "cpu" or gathered(norm) > longest:
            nn.utils.clip_grads_with_norm_(self.parameters, longest, norm)
        return gathered(norm)

    def _seed_everything(self, *words_of: int) -> None:
        words = np.random.SeedSequence(words_of).generate_state(2)
        seed = int(words[0]) << 31 | int(words[1]) >> 1  # 63 bits
        self.generator.manual_seed(seed)
        if self.placement.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:  # those of all devices; where there is none, a note for each is written, for a millisecond
            torch.manual_seed(seed)
        np.random.seed(words[0])  # noqa: NPY002  the legacy global generator, for whoever reads it
        random.seed(seed)


def samples(loader: Loader) -> dict[str, float]:
    """Rows that this process has drawn so far from each dataset of a mixture."""
    loader = loader.demonstrations if isinstance(loader, PairedLoader) else loader
    drawn = loader.samples if isinstance(loader, Mixture) else {}
    return {f"samples/{name}": n for name, n in drawn.items()}


class Rate:
    """Samples per second since the last reading, and the share of that time spent waiting for data."""

    def __init__(self, samples_per_step: int) -> None:
        self._samples = samples_per_step
        self.restart()

    def restart(self) -> None:
        self._begin, self._steps, self._loading = time.perf_counter(), 0, 0.0

    @contextmanager
    def loading(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._loading += time.perf_counter() - begin

    def step(self) -> None:
        self._steps += 1

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._begin
        rates = {"samples_per_s": self._steps * self._samples / seconds, "data_share": self._loading / seconds}
        self.restart()
        return rates
