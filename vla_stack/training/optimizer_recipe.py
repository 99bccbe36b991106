"""How an optimiser minimises, as data: part of every recipe whose method trains in the common loop."""

from __future__ import annotations

from dataclasses import dataclass

from vla_stack.training.recipe_tree import Natural, NotNegative, Positive, Share


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) under a cosine schedule with linear warm-up.

    Attributes:
        lr: Peak learning rate.
        betas: Decay rates of the first and second moment.
        eps: Denominator offset.
        weight_decay: Decoupled weight decay; matrices only, norms, biases and scalars are exempt.
        clip_norm: Largest global gradient norm; 0 does not clip.
        warmup_steps: Steps of linear warm-up from 0 to ``lr``.
        final_lr_ratio: Learning rate of the last step, as a fraction of ``lr``.
        backbone_lr_scale: Learning rate of a pretrained backbone (what is trained of modules named ``backbone``,
            adapters included), or of the native policy's encoders of pictures and words, as a fraction of ``lr``; 0
            leaves them as they are and computes no gradient of theirs.
        backbone_from_step: Steps before which the backbone's learning rate is 0, so that a new expert settles first.
        eight_bit: Keep the moments of large matrices in 8 bits (Dettmers et al., arXiv:2110.02861), a quarter of the
            memory; needs the package bitsandbytes.
    """

    lr: Positive = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 1e-4
    clip_norm: NotNegative = 1.0
    warmup_steps: Natural = 100
    final_lr_ratio: Share = 0.05
    backbone_lr_scale: NotNegative = 1.0
    backbone_from_step: Natural = 0
    eight_bit: bool = False
