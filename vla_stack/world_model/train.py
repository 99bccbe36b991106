"""Training of a world model: autoencoder, dynamics and heads, one stage after another.

Every stage is a run of the project's training loop in a folder of its own, so each resumes bit-exactly from its last
checkpoint. ``<run>/model`` is the world model as far as it is trained; ``<run>/strips`` shows what it imagines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sim.registry import TASKS
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.augmentation import NONE, Augmentation
from vla_stack.training.loop import Evaluate, Loader, Trainer
from vla_stack.training.memory import capacity, estimate
from vla_stack.training.placement import Local, native_precision, use_threads
from vla_stack.training.recipe import Recipe
from vla_stack.world_model import sight
from vla_stack.world_model.clips import HELD_OUT, ClipLoader, FrameLoader, Recording, encode_all, open_recording
from vla_stack.world_model.config import PARTS
from vla_stack.world_model.dynamics import loss as dynamics_loss
from vla_stack.world_model.heads_data import FOLLOWED, HeadsLoader, calibrate, imagine_rollouts
from vla_stack.world_model.model import WorldConfig, WorldModel, resolve
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.quality import measure, write_strip
from vla_stack.world_model.sight import Calibration
from vla_stack.world_model.vae import object_mask, psnr

if TYPE_CHECKING:
    from vla_stack.world_model.recipe import World

WEIGHTS = "model.safetensors"
STANDARD = 2000  # frames from which the latents' scale is taken
CLEAR = 24.0  # dB of coloured things, from which on one can tell what they do
EVAL_CLIPS = 24  # held-out rollouts that the dynamics is measured on while it is trained


@dataclass
class StageParts:
    """What the training loop turns: a module and its loss (the loop knows it as a policy)."""

    policy: nn.Module
    loader: Loader
    loss: Callable[[Any, dict[str, Any], torch.Generator], tuple[Tensor, dict[str, Any]]]
    float_images: bool = False
    augmentation: Augmentation = NONE

    @staticmethod
    def preprocess(batch: dict[str, Any]) -> dict[str, Any]:
        """Batches are as the loss takes them."""
        return batch

    def save_pretrained(self, directory: Path) -> None:
        """Write the module's weights."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.policy.state_dict().items()}, directory / WEIGHTS)


def _check_recording(recording: Recording, recipe: Recipe) -> None:
    """Raise a :class:`UserError` where there is too little to learn from or to measure on."""
    starts = np.unique(recording.start)
    if len(starts) < HELD_OUT:
        raise UserError(
            f"{recipe.data.root[0]} has {len(starts)} episodes, of which every {HELD_OUT}th is kept for validation",
            f"record at least {HELD_OUT}, better hundreds: vla collect --mixed",
        )
    known = next((task.instructions for task in TASKS.values() if task.id == recipe.task.id), recording.tasks)
    if not set(known) & set(recording.tasks):
        raise UserError(
            f"{recipe.data.root[0]} was recorded with '{recording.tasks[0]}', {recipe.task.id} asks for '{known[0]}'",
            "set task to that of the data, or task='' for a real robot",
        )
    if not recording.success.any():
        print(
            f"{recipe.data.root[0]}: no episode succeeds, or none says so: judges will learn that nothing ever does. "
            "Record outcomes: vla collect --mixed, or the verdicts of vla console and vla run --record",
            flush=True,
        )
    shortest = recipe.method.shapes().dynamics.future + 1
    for kind, chosen in (("training", ~recording.held_out), ("held-out", recording.held_out)):
        longest = (recording.end - recording.start)[chosen].max()
        if longest < shortest:
            raise UserError(
                f"the longest {kind} episode of {recipe.data.root[0]} has {longest} frames",
                f"a chunk needs {shortest} (method.dynamics.future + 1), and every {HELD_OUT}th episode is held out",
            )


def _calibration(recipe: Recipe, robot: RobotSpec) -> Calibration | None:
    """What a recipe says of its cameras."""
    if recipe.method.calibration == "auto":
        if recipe.method.start != "tiny" or all(task.id != recipe.task.id for task in TASKS.values()):
            return None
        try:
            return sight.simulated(robot)
        except KeyError:  # cameras of its own
            return None
    if recipe.method.calibration == "none":
        return None
    if recipe.method.start == "svd":
        raise UserError(
            "Stable Video Diffusion has no place for what is looked up", "set method.calibration=none, or auto"
        )
    return sight.read(recipe.method.calibration, robot)


class WorldTraining:
    """One run: the model, its data, its stages.

    Args:
        recipe: The run.
        run_dir: Its folder.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.recipe, self.run_dir = recipe, run_dir
        method: World = recipe.method
        self.method, self.shapes = method, method.shapes()
        self.placement = Local(recipe.device)
        device = self.placement.device
        self.precision = native_precision(device) if recipe.precision == "auto" else recipe.precision
        use_threads(recipe.threads)
        self.recording: Recording = open_recording(recipe.data.root[0], recipe.data.cameras or ())
        _check_recording(self.recording, recipe)
        torch.manual_seed(recipe.seed)
        config = WorldConfig(
            env=recipe.task.id,
            tasks=self.recording.tasks,
            poses=PoseScale.of(self.recording.poses[~self.recording.held_out]),
            vae=self.shapes.vae,
            dynamics=self.shapes.dynamics,
            heads=self.shapes.heads,
            svd=self.shapes.svd if method.start == "svd" else None,
            calibration=_calibration(recipe, self.recording.robot),
            kinematics=self.recording.kinematics,
        )
        self.model = WorldModel(config, self.recording.robot).to(device)
        if method.vae_from:
            _take_autoencoder(self.model, method.vae_from)

    def run(self) -> None:
        """All stages; raises :class:`KeyboardInterrupt` where a signal stopped one."""
        for stage in PARTS:
            if stage == "vae" and (self.method.vae_from or self.method.start == "svd"):
                continue
            module, done = getattr(self.model, stage), self._done(stage)
            self._train(stage, module)
            module.eval().requires_grad_(False)
            getattr(self, f"_after_{stage}", lambda: None)()
            if self._done(stage) > done or stage == PARTS[-1]:  # what was trained before is saved as a whole
                self.model.save(self.run_dir / "model", PARTS[PARTS.index(stage) + 1 :])

    def _done(self, stage: str) -> int:
        """Steps up to the stage's last checkpoint."""
        checkpoint = ckpt.latest(self.run_dir / stage / "checkpoints")
        return 0 if checkpoint is None else int(checkpoint.name)

    def _train(self, stage: str, module: nn.Module) -> None:
        """Train one stage to its end, from its last checkpoint."""
        training, folder = self.method.training(stage), self.run_dir / stage
        recipe = replace(self.recipe, name=f"{self.recipe.name}-{stage}", method=training, precision=self.precision)
        checkpoint, done = ckpt.latest(folder / "checkpoints"), self._done(stage)
        if checkpoint is not None:
            module.load_state_dict(load_file(checkpoint / ckpt.PRETRAINED / WEIGHTS))
        if done >= training.steps:
            return
        for later in PARTS[PARTS.index(stage) + 1 :]:
            if self._done(later):
                raise UserError(
                    f"{self.run_dir}: '{stage}' is to go on at step {done}, and '{later}' has learnt from it as it is",
                    f"remove {self.run_dir / later} to train that again",
                )
        folder.mkdir(parents=True, exist_ok=True)
        millions = sum(p.numel() for p in module.parameters()) / 1e6
        memory = estimate(module, recipe).report(capacity(self.placement.device))
        print(
            f"{stage}: {millions:.2f} M parameters, step {done} of {training.steps} -> {folder}\n{memory}", flush=True
        )
        parts = getattr(self, f"_{stage}")()
        evaluate: Evaluate | None = self._measure if stage == "dynamics" and recipe.eval.every else None
        outcome = Trainer(recipe, parts, self.placement, folder, checkpoint).run(evaluate)
        module.load_state_dict(load_file(outcome.checkpoint / ckpt.PRETRAINED / WEIGHTS))  # the average
        if outcome.stopped:
            raise KeyboardInterrupt

    # Stages ---------------------------------------------------------------------------------------------------------

    def _vae(self) -> StageParts:
        loader = FrameLoader(self.recording, self.method.train_vae.batch_size, self.recipe.seed)
        return StageParts(self.model.vae, loader, lambda vae, batch, g: vae.loss(batch["pictures"], g))

    def _after_vae(self) -> None:
        rng = np.random.default_rng(self.recipe.seed)
        frames = rng.choice(np.flatnonzero(~self.recording.held_out), STANDARD)
        views = rng.integers(len(self.recording.pictures), size=STANDARD)
        pictures = list(self.recording.pictures.values())
        some = np.stack([pictures[v][f] for v, f in zip(views, frames, strict=True)])
        self.model.vae.standardise(torch.from_numpy(some).to(self.placement.device))
        self._report_autoencoder(rng)

    @torch.no_grad()
    def _report_autoencoder(self, rng: np.random.Generator) -> None:
        """Say how well held-out pictures survive it: no later stage can do better, and hours are about to follow."""
        _, seen = self._unseen(rng)
        again = self.model.vae.pictures(self.model.vae.encode(seen))
        error = ((again.float() - seen.float()) / 127.5).square().mean(-1)
        whole, things = float(psnr(error.mean())), float(psnr(error[object_mask(seen) > 0].mean()))
        print(f"vae: held-out pictures {whole:.1f} dB, coloured things {things:.1f} dB", flush=True)
        if things < CLEAR:
            print(
                f"vae: below {CLEAR:.0f} dB things are blurred for everything that follows; "
                "train it longer (method.train_vae.steps) or compress less (method.vae.stem=2)",
                flush=True,
            )

    def _unseen(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], Tensor]:
        """Some held-out frames [N], and their pictures uint8 [N, V, H, W, 3]."""
        known = np.flatnonzero(self.recording.held_out)
        frames = rng.choice(known, min(STANDARD // 10, len(known)), replace=False)
        return frames, torch.from_numpy(self.recording.stacked(frames)).to(self.placement.device)

    def _dynamics(self) -> StageParts:
        config, stage = self.shapes.dynamics, self.method.train_dynamics
        loader = ClipLoader(
            self.recording,
            self.latents(),
            config.history,
            config.future,
            stage.batch_size,
            self.recipe.seed,
            config.held,
        )

        def loss(dynamics: Any, batch: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
            tokens = self.model.tokens(batch["poses"], batch["time"])
            sight = self.model.look(batch["sources"], batch["poses"])
            return dynamics_loss(dynamics, batch["latents"], tokens, batch["valid"], generator, sight)

        return StageParts(self.model.dynamics, loader, loss)

    def latents(self) -> Tensor:
        """Of the whole recording, kept beside the run: they cost minutes on a CPU."""
        path = self.run_dir / "latents.safetensors"
        if path.exists():
            stored = load_file(path)
            if len(stored["latents"]) == len(self.recording.end) and torch.equal(
                stored["scale"], self.model.vae.scale.cpu()
            ):
                return stored["latents"]
        print(f"encoding {len(self.recording.end)} frames", flush=True)
        latents = encode_all(self.model.vae, self.recording, self.placement.device)
        _write(path, {"latents": latents, "scale": self.model.vae.scale.cpu().clone()})
        return latents

    def _measure(self, directory: Path, step: int) -> dict[str, float]:
        """Free-running quality of a checkpoint on held-out episodes, and a strip of pictures."""
        dynamics, live = self.model.dynamics, {k: v.clone() for k, v in self.model.dynamics.state_dict().items()}
        dynamics.load_state_dict(load_file(directory / WEIGHTS))
        dynamics.eval()
        try:
            write_strip(self.model, self.recording, self.run_dir / "strips" / f"{step:06d}.png")
            table = measure(self.model, self.recording, EVAL_CLIPS, (1, self.model.horizon, 2 * self.model.horizon))
        finally:
            dynamics.load_state_dict(live)
            dynamics.train()
        return {
            f"{arm}_k{k}": float(np.nanmean([row["psnr_moving"][arm] for row in table if row["k"] == k]))
            for arm in ("model", "copy_last")
            for k in sorted({row["k"] for row in table})
        }

    def _heads(self) -> StageParts:
        path = self.run_dir / "generated.safetensors"
        by = torch.stack([p.cpu().double().abs().sum() for p in self.model.dynamics.parameters()])
        if not path.exists() or not torch.equal(load_file(path)["by"], by):
            print(f"imagining {self.method.generated} rollouts for the judges", flush=True)
            rollouts = imagine_rollouts(self.model, self.recording, self.method.generated, self.recipe.seed)
            _write(path, rollouts | {"by": by})
        loader = HeadsLoader(
            self.model,
            self.recording,
            self.latents(),
            load_file(path),
            self.method.train_heads.batch_size,
            self.recipe.seed,
        )
        return StageParts(self.model.heads, loader, lambda heads, batch, _: heads.loss(batch))

    def _after_heads(self) -> None:
        limits, bank = calibrate(self.model, self.recording, self.method.generated, self.recipe.seed)
        self.model.config = replace(self.model.config, limits=limits)
        self.model.bank = bank
        self._report_heads()

    @torch.no_grad()
    def _report_heads(self) -> None:
        """Say how long rollouts are trusted, and whether it is the probe that cannot tell."""
        frames, pictures = self._unseen(np.random.default_rng(self.recipe.seed))
        error = np.linalg.norm(
            self.model.heads.probe(pictures).cpu().numpy()[:, :3] - self.recording.measured[frames, :3], axis=1
        ).mean()
        chunks = self.model.config.limits.chunks
        told = f"the probe errs by {100 * error:.1f} cm on recorded pictures"
        print(f"heads: {told}; rollouts are trusted for {chunks:g} chunks", flush=True)
        if error > FOLLOWED:
            print(
                f"heads: above {100 * FOLLOWED:.0f} cm there it is not the rollouts that are wrong; "
                "train the heads longer (method.train_heads.steps)",
                flush=True,
            )


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial)
    os.replace(partial, path)


def _take_autoencoder(model: WorldModel, name: str) -> None:
    """The autoencoder of another world model, whatever that one's dynamics are.

    Raises:
        UserError: There is none, or it is of another shape.
    """
    path = resolve(name) / "vae.safetensors"
    try:
        model.vae.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    except (OSError, RuntimeError, SafetensorError) as e:
        why = " ".join(str(e).split())[:200]
        raise UserError(
            f"{path} does not fit this recipe ({why})", "set 'method.vae' as it was trained, or copy it again"
        ) from None
