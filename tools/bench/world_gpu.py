"""World models on a GPU: imagined frames per second, training step time, peak memory.

    python tools/bench/world_gpu.py                 # writes docs/results/world_gpu.json
    python tools/bench/world_gpu.py --only svd --out FILE
    python tools/bench/world_gpu.py --smoke         # the same code on a CPU, tiny models, nothing written

tiny is recipe ``world_model_tiny`` at 64 pixels, svd is recipe ``world_model_svd`` at 192, both with two
cameras. Weights are random: neither time nor memory depends on them, and no download is needed.

A frame counts once, whatever the number of cameras: frames per second are rollouts times frames of a chunk, over the
median time of a chunk. A chunk is sampled with the recipe's steps and decoded to uint8 pictures, on the GPU; nothing is
compiled. The code imagines in float32 (of which torch lets convolutions use TF32); for svd a row says what bfloat16 by
autocast would give. *through the backend* is all that the imagined environment does for it: adapter, judges, probe,
guards, inverse kinematics, pictures on the CPU.

Training is of the dynamics, in the recipe's precision: a micro-batch is loss and backward pass, a step adds clipping
and AdamW. Autoencoder and heads lie on the GPU as in a run; the average of the weights does not, and is not estimated.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sim.arm import ARM7
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec
from vla_stack.training.memory import estimate
from vla_stack.training.optimizer import make_optimizer
from vla_stack.training.placement import native_precision
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe import load as load_recipe
from vla_stack.world_model import sight
from vla_stack.world_model.dynamics import loss
from vla_stack.world_model.model import FEATURES, End, WorldConfig, WorldModel
from vla_stack.world_model.poses import POSE, PoseScale

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]
from gpu_bench import GB, Figures, run  # noqa: E402

from results import Check  # noqa: E402

CAMERAS, TASK = ("front", "wrist"), "pick up the red cube"
ROLLOUTS = {"tiny": (1, 16, 64), "svd": (1, 4)}
PIXELS = {"tiny": 64, "svd": 192}
RECORDED = 2000  # (pose, command) pairs that a trained model compares with
# Stable Video Diffusion's autoencoder; its UNet is what diffusers makes without arguments.
SVD_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "layers_per_block": 2,
    "sample_size": 768,
}
SMALL = {
    "tiny": [
        *(
            f"method.{key}"
            for key in ("vae.stem=2", "vae.widths=[8]", "dynamics.width=8", "dynamics.blocks=1", "dynamics.heads=2")
        )
    ],
    "svd": [
        *(
            f"method.{key}"
            for key in ("train_dynamics.batch_size=1", "dynamics.steps=2", "dynamics.history=2", "dynamics.future=2")
        )
    ],
}
SMALL_UNET = {
    "down_block_types": ["CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"],
    "up_block_types": ["UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"],
    "block_out_channels": [32, 32],
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24,
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "num_attention_heads": [2, 2],
}
SMALL_VAE = {"block_out_channels": [32, 32], "down_block_types": ["DownEncoderBlock2D"] * 2, "sample_size": 16}


def robot(size: int) -> RobotSpec:
    """The simulated arm with two square cameras of ``size`` pixels."""
    return ARM7.spec("ee_abs", CAMERAS, size, 10.0)


def make(kind: str, smoke: bool, device: torch.device) -> tuple[Recipe, WorldModel]:
    """A recipe, and a world model of its shape."""
    path = ROOT / "vla_stack" / "configs" / f"world_model_{kind}.yaml"
    recipe = load_recipe(path, ["data.root=none", *(SMALL[kind] if smoke else [])])
    start, shapes = recipe.method.start, recipe.method.shapes()
    svd = dataclasses.replace(
        shapes.svd, pretrained="", unet=SMALL_UNET if smoke else {}, vae=SMALL_VAE if smoke else SVD_VAE
    )
    config = WorldConfig(
        env=recipe.task.id,
        tasks=(TASK,),
        poses=PoseScale((0.3, -0.3, 0.0), (0.7, 0.3, 0.4)),
        vae=shapes.vae,
        dynamics=shapes.dynamics,
        heads=shapes.heads,
        svd=svd if start == "svd" else None,
        calibration=sight.simulated(robot(PIXELS[kind])) if start == "tiny" else None,
    )
    with device:  # a billion weights are drawn on the GPU in no time
        model = WorldModel(config, robot(16 if smoke else PIXELS[kind]))
        model.bank = torch.randn(RECORDED, FEATURES)
    return recipe, model.to(device).eval()  # some of diffusers' tensors are made on the CPU all the same


def poses(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Tool poses float32 [*, 5] above the table."""
    return rng.uniform((0.4, -0.2, 0.1, -0.5, 0), (0.6, 0.2, 0.3, 0.5, 1), (*shape, POSE)).astype(np.float32)


def imagined(figures: Figures, section: str, kind: str, smoke: bool, autocasts: tuple[bool, ...]) -> Any:
    """Rows of imagination; the recipe and the model, None where they could not be made."""
    made = None
    with figures.row(section, "weights") as row:
        made = make(kind, smoke, figures.device)
        for part in ("vae", "dynamics", "heads"):
            row[f"{part}_parameters_m"] = sum(p.numel() for p in getattr(made[1], part).parameters()) / 1e6
        row["dynamics"] = dataclasses.asdict(made[0].method.shapes().dynamics)
    if made is None:
        return None
    for autocast in autocasts:
        for n in (2,) if smoke else ROLLOUTS[kind]:
            with figures.row(section, f"{'bfloat16' if autocast else 'float32'}, rollouts {n}") as row:
                row |= imagine(figures, made[1], n, autocast, 1 if smoke else 10)
    return made


def imagine(figures: Figures, model: WorldModel, rollouts: int, autocast: bool, repeats: int) -> dict[str, float]:
    """Figures of one chunk of some rollouts, pictures included."""
    rng, size, device = np.random.default_rng(0), model.robot.cameras[0].height, figures.device
    pictures = rng.integers(0, 256, (rollouts, len(CAMERAS), size, size, 3), np.uint8)
    memories = model.begin(pictures, poses(rng, rollouts))
    ahead = torch.from_numpy(poses(rng, rollouts, model.horizon)).to(device)
    precision = torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext()

    @torch.no_grad()
    def chunk() -> None:
        noise = torch.randn(rollouts, *model.noise_shape(), device=device)
        with precision:
            latents, _ = model.chunk(memories, ahead, noise)
            seen = model.vae.pictures(latents)
        assert seen.shape == (rollouts, model.horizon, len(CAMERAS), size, size, 3)
        for memory, z, pose in zip(memories, latents.float(), ahead, strict=True):
            memory.push(End(z[-1].clone(), pose[-1]))

    return frames_per_s(figures, chunk, rollouts * model.horizon, repeats)


def dreamed(figures: Figures, model: WorldModel, rollouts: int, repeats: int) -> dict[str, float]:
    """The same through the imagined environment's backend."""
    from vla_stack.world_model.world_backend import Start, WorldBackend  # the arm's kinematics need MuJoCo

    rng, size = np.random.default_rng(0), model.robot.cameras[0].height

    class Starts:
        """Random first frames."""

        def start(self, seed: int, options: dict[str, Any]) -> Start:
            state = np.concatenate([poses(rng), np.zeros(len(ARM7.joints), np.float32)])
            return Start({c: rng.integers(0, 256, (size, size, 3), np.uint8) for c in CAMERAS}, state, TASK)

        def close(self) -> None: ...

    backend = WorldBackend(model, Starts(), rollouts, 1000)
    commands = [backend.begin(row, row, {})[0].state[:POSE] for row in range(rollouts)]

    def chunk() -> None:  # small moves, as a controller would send them
        steps = rng.normal(0, 0.01, (rollouts, model.horizon, POSE))
        chunks = (np.stack(commands)[:, None] + steps).astype(np.float32)
        for k in range(model.horizon):
            backend.advance(range(rollouts), chunks[:, k], [*chunks[:, k + 1 :]])

    return frames_per_s(figures, chunk, rollouts * model.horizon, repeats)


def frames_per_s(figures: Figures, chunk: Any, frames: int, repeats: int) -> dict[str, float]:
    """Figures of a call that makes some frames."""
    ms = figures.median_ms(chunk, repeats)
    return {"chunk_ms": ms, "frames": frames, "frames_per_s": 1e3 * frames / ms, "peak_gb": figures.peak_gb()}


def train(figures: Figures, recipe: Recipe, model: WorldModel, batch_size: int, repeats: int) -> dict[str, float | str]:
    """Figures of the dynamics' training."""
    device, shape = figures.device, recipe.method.shapes().dynamics
    precision = native_precision(device) if recipe.precision == "auto" else recipe.precision
    training = dataclasses.replace(recipe.method.training("dynamics"), batch_size=batch_size)
    stage = dataclasses.replace(recipe, method=training, precision=precision)
    dynamics = model.dynamics.requires_grad_(True).train()
    for other in (model.vae, model.heads):
        other.requires_grad_(False)
    optimizer, trained = make_optimizer(dynamics, training.optimizer), list(dynamics.parameters())
    generator = torch.Generator(device).manual_seed(0)
    clips = (batch_size, shape.frames, *model.noise_shape()[1:])
    latents = torch.randn(clips, generator=generator, device=device)
    told = torch.from_numpy(poses(np.random.default_rng(0), batch_size, shape.frames)).to(device)
    tokens = model.tokens(told, torch.zeros(batch_size, shape.frames, device=device))
    valid = torch.ones(batch_size, shape.future + 1, dtype=torch.bool, device=device)
    size = model.robot.cameras[0].height
    pictures = (batch_size, 1 + (shape.history > 0), len(CAMERAS), size, size, 3)
    sources = torch.randint(0, 256, pictures, dtype=torch.uint8, generator=generator, device=device)

    def micro() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            value, _ = loss(dynamics, latents, tokens, valid, generator, model.look(sources, told))
        value.backward()

    def step() -> None:
        micro()
        torch.nn.utils.clip_grad_norm_(trained, training.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    row: dict[str, float | str] = {"batch_size": batch_size, "precision": precision}
    row["step_ms"] = figures.median_ms(step, repeats)
    row["peak_gb"] = figures.peak_gb()
    row["micro_batch_ms"] = figures.median_ms(micro, repeats)
    memory = estimate(dynamics, stage)
    row["estimated_gb"] = (memory.total - memory.average) / GB
    row["estimate"] = memory.report()  # the line that a run prints, which says whether activations are in it
    return row


def section(figures: Figures, kind: str, smoke: bool) -> None:
    """All figures of one of the two models."""
    made = imagined(figures, kind, kind, smoke, (False, True) if kind == "svd" else (False,))
    if made is None:
        return
    recipe, model = made
    if kind == "tiny":
        for n in (2,) if smoke else ROLLOUTS[kind]:
            with figures.row(kind, f"through the backend, rollouts {n}") as row:
                row |= dreamed(figures, model, n, 1 if smoke else 10)
    batch_size = recipe.method.train_dynamics.batch_size
    for n in (1, batch_size) if kind == "svd" and not smoke else (batch_size,):
        with figures.row(kind, f"training, batch {n}") as row:
            row |= train(figures, recipe, model, n, 1 if smoke else 10)
        model.zero_grad()


def tiny(figures: Figures, smoke: bool) -> None:
    """The model that the package ships."""
    section(figures, "tiny", smoke)


def svd(figures: Figures, smoke: bool) -> None:
    """The model at full scale."""
    section(figures, "svd", smoke)


def checks(figures: Figures) -> list[Check]:
    """The figures that a reader asks for."""
    found = []
    for kind, rows in figures.sections.items():
        for name in rows:
            found += figures.check(f"{kind}, {name}, frames/s", kind, name, "frames_per_s")
            found += figures.check(f"{kind}, {name}, step, ms", kind, name, "step_ms")
            bound = 80.0 if (kind, name.split(",")[0]) == ("svd", "training") else None  # what its recipe promises
            found += figures.check(f"{kind}, {name}, peak memory, GB", kind, name, "peak_gb", bound)
    return found


def main(arguments: list[str]) -> int:
    return run("world_gpu", __doc__, {"tiny": tiny, "svd": svd}, checks, arguments, seconds=140)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        sys.exit(str(e))
