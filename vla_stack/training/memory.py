"""What a training run will hold in device memory, before it starts.

Parameters, gradients, AdamW's two moments and the average are counted from the policy. Activations are a formula for
transformers under bfloat16 autocast with fused attention, in the manner of Korthikanti et al. 2022 ("Reducing
Activation Recomputation in Large Transformer Models", section 4), with terms for adapters and for keys and values that
the expert reads. Not counted: the CUDA context (about 0.5 GB), workspaces and fragmentation; allow a fifth on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.training.checkpoint import trainable
from vla_stack.training.placement import large_layers
from vla_stack.training.recipe import Recipe

HALF = 2  # bytes of bfloat16


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose.

    Attributes:
        parameters: Weights and buffers, each in its own type.
        gradients: Of trained weights.
        optimizer: AdamW's two moments and step counts.
        average: The moving average of trained weights.
        evaluation: Weights once more, of the checkpoint that is evaluated while training; with ``eval.every``.
        activations: Kept for the backward pass of one batch; 0 where no formula is known.
    """

    parameters: int
    gradients: int
    optimizer: int
    average: int
    evaluation: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))

    def report(self, capacity: int | None = None) -> str:
        """One line for a person.

        Args:
            capacity: Bytes of the device; what to do is said where they are too few.
        """
        names = ("weights", "gradients", "optimizer", "average", "evaluation", "activations")
        parts = ", ".join(f"{name} {_size(n)}" for name, n in zip(names, astuple(self), strict=True) if n)
        line = f"memory: about {_size(self.total)} ({parts})" + ("" if self.activations else " and activations")
        if capacity is None or self.total <= capacity:
            return line
        remedy = (
            "lower method.batch_size and raise method.accumulate, or set policy.options.gradient_checkpointing=true"
        )
        if self.total - self.evaluation <= capacity:
            remedy = "set eval.every=0 and evaluate the checkpoints later"
        return f"{line}, the device has {_size(capacity)}: {remedy}"


def estimate(policy: nn.Module, recipe: Recipe, shards: int = 1) -> Memory:
    """Memory of one process of a run.

    Args:
        policy: The policy, built and frozen as it will be trained.
        recipe: The run.
        shards: Processes that share what is trained. Each has its part, and whole what computes at the moment: two
            large layers, as one is gathered while the one before computes, and all small ones; gradients likewise.
    """
    trained = list(trainable(policy).values())
    weights = _bytes(trained)
    training = recipe.method
    gathered = 0
    if shards > 1:
        large = sorted(_bytes(layer.parameters()) for layer in large_layers(policy))
        gathered = weights - sum(large) + sum(large[-2:])
        weights //= shards
    kept = activations(policy, getattr(training, "draws", 1)) * training.batch_size
    if kept:  # autocast's copies of trained matrices are kept as well
        kept += sum(HALF * p.numel() for p in trained if p.ndim >= 2)
    parameters = _bytes(policy.parameters()) + _bytes(policy.buffers())
    if shards > 1:
        parameters += weights - _bytes(trained) + gathered
    return Memory(
        parameters=parameters,
        gradients=weights + gathered,
        optimizer=2 * (_eighth(trained) // shards if training.optimizer.eight_bit else weights) + 4 * len(trained),
        average=weights if training.ema else 0,
        evaluation=parameters if recipe.eval.every else 0,
        activations=kept,
    )


def activations(policy: nn.Module, draws: int) -> int:
    """Bytes that the backward pass needs for one sample; 0 for policies other than the native one on a backbone."""
    if not isinstance(policy, VlaPolicy) or not policy.config.backbone:
        return 0
    config, prefix = policy.config, policy.prefix
    text, vision = prefix.backbone.config.text_config, prefix.backbone.config.vision_config
    cameras = len(config.camera_keys)
    patches = cameras * (vision.image_size // vision.patch_size) ** 2
    own = (prefix.state is not None) + (prefix.embodiment is not None)
    tokens = cameras * prefix.family.tokens_per_image + own + config.max_tokens
    geometry = prefix.geometry

    heads = geometry.heads * geometry.head_dim
    keys_values = 2 * geometry.kv_heads * geometry.head_dim * HALF * tokens
    layer = tokens * decoder_layer(text.hidden_size, text.intermediate_size, heads, config.train_backbone)
    total = 0
    # A frozen backbone keeps nothing, unless a learnt token stands among its inputs.
    if config.train_backbone != "expert_only" or own:
        kept = tokens * text.hidden_size * HALF + keys_values if config.gradient_checkpointing else layer
        total += (geometry.layers - 1) * kept + (layer if config.gradient_checkpointing else 0)
    if config.train_backbone != "expert_only" and not config.freeze_vision:
        layer = patches * encoder_layer(vision.hidden_size, vision.intermediate_size)
        kept = patches * vision.hidden_size * HALF if config.gradient_checkpointing else layer
        total += vision.num_hidden_layers * kept
    expert = expert_layer(config.expert_width, heads)
    # Each draw has its copy of the prefix's keys and values, and its attention one with the action's own appended.
    return total + geometry.layers * draws * (policy.horizon * expert + (2 if draws > 1 else 1) * keys_values)


def decoder_layer(width: int, hidden: int, heads: int, mode: str) -> int:
    """Bytes a token of a gated decoder layer: two norms in float32, attention with keys and values spread over all
    heads, the gated product. Trained layers keep their input, of which adapters make a copy each."""
    norms = 2 * 4 * width
    inputs = {"expert_only": 0, "full": 2 * width + heads, "lora": 5 * width + heads}[mode] * HALF
    return norms + inputs + 4 * heads * HALF + (4 if mode != "expert_only" else 3) * hidden * HALF


def encoder_layer(width: int, hidden: int) -> int:
    """Bytes a patch of a vision encoder's layer: two norms, attention, two linear layers around a GELU."""
    return 2 * (4 + HALF) * width + 5 * width * HALF + 2 * hidden * HALF


def expert_layer(width: int, heads: int) -> int:
    """Bytes an action token of an expert's layer: float32 sums and norms with scale and gate, attention, a network four
    times as wide."""
    return 2 * (4 + 4 + HALF) * width + 2 * (4 + HALF) * width + 3 * heads * HALF + 2 * 4 * width * HALF


def capacity(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _eighth(trained: Iterable[Tensor]) -> int:
    """Bytes of one moment in 8 bits, with a scale for each block of 256; small tensors stay in 32 bits."""
    return sum(p.numel() + p.numel() // 64 if p.numel() >= 4096 else 4 * p.numel() for p in trained)


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


def _bytes(tensors: Iterable[Any]) -> int:
    """Bytes of tensors, each counted once however many names it has."""
    unique: dict[int, Tensor] = {id(t): t for t in tensors}
    return sum(t.numel() * t.element_size() for t in unique.values())
