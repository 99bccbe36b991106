"""Checkpoints of the authors of mixtures of horizons (``Timsty1/MixtureOfHorizons``), made into policy directories.

Theirs are openpi's pi0 or pi0.5 in PyTorch with a gate beside it: ``gate_out_proj`` are the scores, and
``gate_noise_layer`` their noise. Positions of the suffix count the prefix's padding there (``padded_positions``), and
pi0.5 was trained without the state in its text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import FeatureType, PolicyFeature, make_policy_config
from vla_stack.policies.configuration_moh import HORIZONS, MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.weights import load_weights, read_weights
from vla_stack.schema import ACTION, OBS_STATE, image_key

GATE = {"gate_out_proj": "gate.score", "gate_noise_layer": "gate.spread"}
KINDS = {"time_mlp_in.weight": "pi05", "action_time_mlp_in.weight": "pi0"}
STATE_IN_TEXT = "pi05_prepare_state_tokenizer_processor_step"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")  # those that their PyTorch code reads, in this order


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of theirs.

    Attributes:
        weights: ``model.safetensors`` in their names.
        stats: openpi's ``norm_stats.json``, beside it under ``assets/``.
        horizons: Branch lengths of its training; the file does not record them.
        cameras: Names of the cameras, in the order of their training.
        options: Further fields of the base's configuration.
    """

    weights: Path
    stats: Path
    horizons: tuple[int, ...] = HORIZONS
    cameras: Sequence[str] = CAMERAS
    options: dict[str, Any] | None = None


def import_checkpoint(checkpoint: Checkpoint, out: Path) -> MohPolicy:
    """Write the policy directory, and return the policy.

    Raises:
        UserError: The weights are a pickle, none of theirs, or of their one-step policy; the statistics cannot be read.
    """
    if checkpoint.weights.suffix != ".safetensors":
        convert = "load it with weights_only=True, then safetensors.torch.save_model of the model it is loaded into"
        raise UserError(f"{checkpoint.weights} is no safetensors file", f"convert it where you trust it: {convert}")
    weights = read_weights(checkpoint.weights)
    kind = _kind(weights, checkpoint.weights)
    stats = read_stats(checkpoint.stats)
    policy = MohPolicy(_config(kind, checkpoint, weights, stats), blank=True)
    own = {f"{mine}.{p}": weights.pop(f"{theirs}.{p}") for theirs, mine in GATE.items() for p in ("weight", "bias")}
    base = {f"base.{name}": value for name, value in policy.base.rename(weights).items()}
    load_weights(policy, own | base, checkpoint.weights)
    pre, post = make_moh_pre_post_processors(policy.config, stats)
    if kind == "pi05":
        pre.steps = [_new_line() if _registered(step) == STATE_IN_TEXT else step for step in pre.steps]
    for part in (policy, pre, post):
        part.save_pretrained(out)
    return policy.eval()


def read_stats(file: Path) -> dict[str, dict[str, Tensor]]:
    """Statistics of state and action from openpi's ``norm_stats.json``.

    Raises:
        UserError: It is missing or something else.
    """
    try:
        tree = json.loads(file.read_text())["norm_stats"]
        found = {OBS_STATE: tree["state"], ACTION: tree["actions"]}
        return {
            key: {n: torch.tensor(of[n], dtype=torch.float32) for n in ("mean", "std", "q01", "q99") if of.get(n)}
            for key, of in found.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{file} holds no statistics of openpi: {e}", "give its norm_stats.json, under assets/"
        ) from None


def _kind(weights: dict[str, Tensor], file: Path) -> str:
    if "action_query_embedding" in weights:
        raise UserError(f"{file} is a one-step policy (pi_reg)", "only their flow policies, pi0 and pi05, are imported")
    missing = [f"{name}.{part}" for name in GATE for part in ("weight", "bias") if f"{name}.{part}" not in weights]
    kind = next((kind for name, kind in KINDS.items() if name in weights), None)
    if missing or kind is None:
        lacks = missing[0] if missing else " and ".join(KINDS)
        raise UserError(f"{file} is no mixture of horizons of its authors: it lacks {lacks}", "check which file it is")
    return kind


def _config(kind: str, checkpoint: Checkpoint, weights: dict[str, Tensor], stats: dict[str, Any]) -> MohConfig:
    size, dims = _image_size(weights), weights["action_in_proj.weight"].shape[1]
    pictures = {image_key(c): PolicyFeature(FeatureType.VISUAL, (3, size, size)) for c in checkpoint.cameras}
    state, action = (len(stats[key]["mean"]) for key in (OBS_STATE, ACTION))
    longest = checkpoint.horizons[-1]
    base = make_policy_config(
        kind,
        device="cpu",
        push_to_hub=False,
        input_features=pictures | {OBS_STATE: PolicyFeature(FeatureType.STATE, (state,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (action,))},
        chunk_size=longest,
        max_state_dim=dims,
        max_action_dim=dims,
        image_resolution=(size, size),
        **{"n_action_steps": min(5, longest), **(checkpoint.options or {})},
    )
    return MohConfig(base=base, horizons=checkpoint.horizons, device="cpu", push_to_hub=False, padded_positions=True)


def _image_size(weights: dict[str, Tensor]) -> int:
    """Height and width of the pictures whose patches the vision tower has positions for."""
    parts = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.embeddings."
    patches, patch = (weights[f"{parts}{n}.weight"] for n in ("position_embedding", "patch_embedding"))
    return math.isqrt(len(patches)) * patch.shape[-1]


def _registered(step: Any) -> str | None:
    return getattr(type(step), "_registry_name", None)


def _new_line() -> Any:
    from lerobot.policies.pi0.processor_pi0 import Pi0NewLineProcessor

    return Pi0NewLineProcessor()
