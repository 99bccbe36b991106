"""What a recipe's optimiser is: AdamW, its groups of parameters, and its learning rate at every step."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import nn

from vla_stack.errors import UserError
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import Training

# What `backbone_lr_scale` is about: a pretrained backbone, or the native policy's encoders of pictures and words.
BACKBONE = {"backbone", "vision", "text"}


def freeze_backbone(policy: nn.Module, recipe: OptimizerRecipe) -> None:
    """Compute no gradients of what reads pictures and words, where its learning rate is 0.

    Raises:
        UserError: Nothing would be left to train.
    """
    if recipe.backbone_lr_scale > 0.0:
        return
    for name, p in policy.named_parameters():
        p.requires_grad_(p.requires_grad and not of_backbone(name))
    if not ckpt.trainable(policy):
        message = "with method.optimizer.backbone_lr_scale=0 nothing of this policy is left to train"
        raise UserError(message, "set it above 0")


def make_optimizer(policy: nn.Module, recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; only matrices decay, and what reads pictures and words has its own groups.

    Raises:
        UserError: Moments in 8 bits are wanted, and bitsandbytes is not installed.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    parameters = ckpt.trainable(policy)
    for name, p in parameters.items():
        groups.setdefault((of_backbone(name), p.ndim >= 2), []).append(p)
    fused = next(iter(parameters.values())).device.type in ("cpu", "cuda")
    options = [
        {"params": params, "backbone": backbone, "weight_decay": recipe.weight_decay if matrix else 0.0}
        for (backbone, matrix), params in groups.items()
    ]
    if recipe.eight_bit:
        return _bitsandbytes().optim.AdamW8bit(options, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    return torch.optim.AdamW(options, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def of_backbone(name: str) -> bool:
    """Whether a parameter is one that ``backbone_lr_scale`` is about."""
    return not BACKBONE.isdisjoint(name.split("."))


def _bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError:
        raise UserError(
            "optimizer.eight_bit=true needs bitsandbytes, which is not installed",
            "pip install bitsandbytes, or set optimizer.eight_bit=false",
        ) from None


def backbone_scale(step: int, recipe: OptimizerRecipe) -> float:
    """What the backbone's learning rate is a multiple of, at optimiser step ``step``."""
    return recipe.backbone_lr_scale if step >= recipe.backbone_from_step else 0.0


def learning_rate(step: int, training: Training) -> float:
    """Learning rate of optimiser step ``step`` (counted from 0): linear warm-up, then half a cosine.

    The schedule is a function of the step, so there is no state of it to lose.
    """
    o = training.optimizer
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    progress = (step - o.warmup_steps) / max(1, training.steps - 1 - o.warmup_steps)
    return o.lr * (o.final_lr_ratio + (1 - o.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
