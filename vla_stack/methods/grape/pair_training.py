"""Training on preference pairs: the one training loop, with a frozen reference and pairs in place of demonstrations."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vla_stack.data.preferences import PairLoader, Rollout
from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig, PreTrainedPolicy
from vla_stack.methods.grape import loss as grape
from vla_stack.methods.grape.likelihood import score, shared_draws
from vla_stack.methods.grape.rollouts import stacked
from vla_stack.policies.chunk_policy import ROBOT, load_policy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.reading import read_config, read_policy, read_processors
from vla_stack.schema import ACTION, RobotSpec
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.build import (
    Parts,
    preprocessed,
    to_device,
    with_float_images,
    with_options,
    without_base_weights,
)
from vla_stack.training.checkpoint import PRETRAINED, trainable
from vla_stack.training.loop import Trainer
from vla_stack.training.placement import native_precision, place, use_threads
from vla_stack.training.policies import restore, to_train
from vla_stack.training.recipe import Recipe
from vla_stack.training.run_dir import write_recipe

if TYPE_CHECKING:
    from vla_stack.methods.grape.recipe import Grape

SMALL_BETA = 1e-2  # of calibration: sigma(-z) stays 1/2


def train_on_pairs(recipe: Recipe, pairs: Path, run: Path, start: Path, beta: float) -> Path:
    """Train a policy on a folder's pairs against itself as it was; continues what an earlier call left.

    Args:
        recipe: How; its method is a :class:`Grape`.
        pairs: Folder of ``data.preferences``.
        run: Run directory.
        start: Policy directory that training starts from: the reference.
        beta: See :mod:`vla_stack.methods.grape.loss`.

    Returns:
        The policy directory.

    Raises:
        UserError: There are no pairs, or the policy cannot be trained on them.
    """
    m: Grape = recipe.method
    placement = place(recipe.device)
    precision = native_precision(placement.device) if recipe.precision == "auto" else recipe.precision
    policy_recipe = replace(recipe.policy, pretrained=str(start))
    recipe = replace(recipe, policy=policy_recipe, precision=precision)
    use_threads(recipe.threads)
    checkpoint = ckpt.latest(run / "checkpoints")
    config = _config(recipe, checkpoint / PRETRAINED if checkpoint else start, placement.device)
    first = _start(recipe, start, placement.device)
    reference = grape.Reference(trainable(first))
    if checkpoint is None:
        policy, (pre, post) = first, read_processors(start, config, str(placement.device))
    else:
        policy, pre, post = restore(checkpoint, config, policy_recipe)
    given: dict[str, Any] = {"preference": m.preference, "proximal": m.proximal, "sft": m.sft}
    given |= {"aggregate": m.aggregate, "window": m.window}
    given |= {"draws": m.draws, "micro": m.micro} | ({"sigma": m.sigma} if m.sigma else {})
    loss = functools.partial(grape.loss, reference=reference, beta=beta, **given)
    loader = PairLoader(pairs, m.batch_size, recipe.seed * 1000 + placement.rank)
    robot = RobotSpec.from_json(json.loads((start / ROBOT).read_text())) if (start / ROBOT).is_file() else None
    parts = Parts(policy, pre, post, loader, loss, robot, bool(recipe.policy.lora.rank))
    write_recipe(recipe, run)
    outcome = Trainer(recipe, parts, placement, run, checkpoint).run()
    if outcome.stopped:
        raise KeyboardInterrupt  # a signal ended the training; it continues from there
    return outcome.checkpoint / PRETRAINED


def calibrate(recipe: Recipe, pairs: Path, run: Path, start: Path) -> float:
    """beta for these pairs: the gap that the recipe's ``calibration`` updates at a tiny beta open, see
    ``loss.calibrated_beta``.
    """
    path = run / "beta.json"
    if not path.is_file():
        updates = recipe.method.calibration
        often = {"steps": updates, "log_every": max(1, updates // 5), "save_every": updates}
        pilot = replace(recipe.method, preference=1.0, proximal=0.0, sft=0.0, **often)
        train_on_pairs(replace(recipe, method=pilot), pairs, run, start, SMALL_BETA)
        log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        gap = [row["gap"] for row in log if "gap" in row][-1]
        path.write_text(json.dumps({"gap": gap, "beta": grape.calibrated_beta(gap)}))
    return float(json.loads(path.read_text())["beta"])


def self_scores(policy_dir: Path, rollouts: list[Rollout], draws: int = 8, sigma: float = 0.1) -> list[float]:
    """R_self of each rollout: mean over its decisions of the log-probability under a policy (eq. 10), or, for a flow
    without recorded chains, of what stands for it; noise is the same for equal decisions of all rollouts.

    Raises:
        UserError: The policy's head has no likelihood.
    """
    policy = load_policy(policy_dir)
    floats, out = not isinstance(base_config(policy.policy.config), VlaConfig), []
    with torch.inference_mode():
        for rollout in rollouts:
            raw = to_device(stacked(rollout), torch.device("cpu"))
            raw = with_float_images(raw) if floats else raw
            batch = preprocessed(raw, policy.preprocessor)
            generator = torch.Generator().manual_seed(0)
            noise = shared_draws(policy.policy, batch[ACTION], batch["pair"], batch["decision"], draws, generator)
            out.append(float(score(policy.policy, batch, noise, sigma=sigma).log_prob.mean()))
    if not np.isfinite(out).all():
        raise UserError(f"{policy_dir}: the log-probability of a rollout is not finite")
    return out


def _start(recipe: Recipe, start: Path, device: torch.device) -> PreTrainedPolicy:
    torch.manual_seed(recipe.seed)  # of the adapters' first factors
    return to_train(read_policy(start, _config(recipe, start, device)).to(device), recipe.policy.lora)


def _config(recipe: Recipe, source: Path, device: torch.device) -> PreTrainedConfig:
    """The configuration of a policy directory, features and all, with the recipe's options."""
    options = without_base_weights(recipe.policy.options)
    config = with_options(read_config(source, device.type), {**options, "device": device.type, "push_to_hub": False})
    config.pretrained_path = Path(source)
    return config
