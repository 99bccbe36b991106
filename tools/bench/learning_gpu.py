"""Learning that is small, on a GPU: steps of the generalist's imitation, updates of actor and critics.

    python tools/bench/learning_gpu.py                  # writes docs/results/learning_gpu.json
    python tools/bench/learning_gpu.py --only rl --out FILE
    python tools/bench/learning_gpu.py --smoke          # the same code on a CPU, tiny, nothing written

Times are medians, GB are 10^9 bytes; data is random and on the device.

generalist: a step of imitation on the policy that ships as ``generalist`` (two pictures of 128 pixels): loss, backward
pass, clipping and AdamW, in bfloat16 by autocast.
rl: one update as WSRL, RLPD and EXPO publish it: 20 steps of 10 critics of three layers of 256 with layer norm, 256
rows each, then one step of the actor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.methods.replay_buffer import Batch
from vla_stack.methods.sac import Sac, SacRecipe
from vla_stack.policies.directory import resolve_policy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.reading import read_config, read_processors
from vla_stack.schema import ACTION, ACTION_IS_PAD, OBS_STATE, TASK
from vla_stack.training.build import preprocessed
from vla_stack.training.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]
from gpu_bench import Figures, run  # noqa: E402

from results import Check  # noqa: E402

BATCHES = (64, 512)
UPDATE = {"critic": (256, 256, 256), "actor": (256, 256, 256), "num_critics": 10, "layer_norm": True}
UTD, ROWS, OBSERVED, CHUNK = 20, 256, 160, 60  # prefix features and state; a chunk of 12 steps of 5
BOUND_MS = 50.0


def generalist(figures: Figures, smoke: bool) -> None:
    """Steps of the shipped generalist's imitation at each size of batch."""
    for size in (2,) if smoke else BATCHES:
        with figures.row("generalist", f"batch {size}") as row:
            row |= train_steps(figures, size, smoke)


def train_steps(figures: Figures, size: int, smoke: bool) -> dict[str, float]:
    """Figures of one batch size."""
    policy, batch = prepared("generalist", size, figures.device)
    method = Imitation()
    optimizer, loss_of = make_optimizer(policy, method.optimizer), method.loss()
    trained = [p for p in policy.parameters() if p.requires_grad]
    generator = torch.Generator(figures.device).manual_seed(0)

    def step() -> None:
        with torch.autocast(figures.device.type, torch.bfloat16):
            loss, _ = loss_of(policy, batch, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, method.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    milliseconds = figures.median_ms(step, 1 if smoke else 30)
    return {"step_ms": milliseconds, "samples_per_s": 1e3 * size / milliseconds, "peak_gb": figures.peak_gb()}


def prepared(name: str, size: int, device: torch.device) -> tuple[PreTrainedPolicy, dict[str, Any]]:
    """A shipped policy to be trained, and a batch of random samples."""
    path = resolve_policy(name)
    config = read_config(path, device.type)
    pre, _ = read_processors(path, config, device.type)
    policy = VlaPolicy.from_pretrained(path, config=config).to(device).train()
    pictures = {
        key: torch.randint(256, (size, *config.input_features[key].shape[1:], 3), dtype=torch.uint8, device=device)
        for key in config.camera_keys
    }
    steps, dims = config.chunk_size, config.action_feature.shape[0]
    sample = {
        **pictures,
        OBS_STATE: torch.rand(size, *config.robot_state_feature.shape, device=device),
        ACTION: torch.rand(size, steps, dims, device=device),
        ACTION_IS_PAD: torch.zeros(size, steps, dtype=torch.bool, device=device),
        TASK: ["put the red cube on the blue plate"] * size,
    }
    return policy, preprocessed(sample, pre)


def rl(figures: Figures, smoke: bool) -> None:
    """One update of an actor and an ensemble of critics, at the size that is published."""
    utd, rows = (2, 4) if smoke else (UTD, ROWS)
    with figures.row("rl", "update") as row:
        agent = Sac(SacRecipe(**UPDATE, batch=rows, utd=utd), OBSERVED, CHUNK, device=figures.device.type)  # type: ignore[arg-type]
        n = utd * rows

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=figures.device)

        ones, index = torch.ones(n, device=figures.device), torch.arange(n, device=figures.device)
        batch = Batch(noise(n, OBSERVED), noise(n, CHUNK).tanh(), noise(n), noise(n, OBSERVED), 0.9 * ones, ones, index)
        row["ms"] = figures.median_ms(lambda: agent.update(batch, utd), 1 if smoke else 30)
        row |= {"critic_steps_per_s": 1e3 * utd / row["ms"], "peak_gb": figures.peak_gb()}


def checks(figures: Figures) -> Sequence[Check]:
    """The figures that a reader asks for."""
    found = figures.check(f"update, 10 critics of 3 x 256, {UTD} steps, ms", "rl", "update", "ms", BOUND_MS)
    for size in BATCHES:
        name = f"generalist, imitation at batch {size}, samples/s"
        found += figures.check(name, "generalist", f"batch {size}", "samples_per_s")
    return found


def main(arguments: list[str]) -> int:
    sections = {"rl": rl, "generalist": generalist}
    return run("learning_gpu", __doc__, sections, checks, arguments, seconds=120)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        sys.exit(str(e))
