"""Shapes and weights of a world model: what its recipe holds of them and its directory keeps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vla_stack.training.recipe_tree import Count, Natural, NotNegative, Positive, Share

PARTS = ("vae", "dynamics", "heads")  # of a world model, in the order in which they are trained


@dataclass(frozen=True)
class VaeConfig:
    """Shape and loss of the autoencoder.

    Attributes:
        channels: Channels of a latent.
        stem: Pixels that one position of the first level is wide.
        widths: Channels of each level; every further level halves height and width.
        ssim: Weight of 1 - SSIM in the loss.
        kl: Weight of the KL divergence from N(0, 1).
        object_weight: What an object's pixel counts in the loss, where others count 1. Things to be grasped cover few
            pixels, and their colour is what a policy is told.
    """

    channels: Count = 8
    stem: Count = 2
    widths: tuple[Count, ...] = (32, 64, 128)
    ssim: NotNegative = 0.1
    kl: NotNegative = 1e-4
    object_weight: NotNegative = 5.0


@dataclass(frozen=True)
class DynamicsConfig:
    """Shape, training noise and sampler.

    Attributes:
        history: Remembered frames, K; 0 forgets.
        future: Frames of a chunk, H.
        width: Width of a token.
        blocks: Transformer blocks.
        heads: Attention heads.
        patch: Latent positions that a token is wide.
        members: Output heads, each trained on a random half of the clips; where they disagree the model is guessing.
        conditioning: ``per_frame`` poses; their ``mean``; all of them ``flat`` in every frame; ``none``. The latter
            three are controls.
        sigma_mean, sigma_std: ln(sigma) of training is normal with these.
        history_noise: Noise on a remembered frame is this times |N(0, 1)|, for each frame anew.
        anchor_noise: Noise on the anchor is uniform up to this.
        dropout: Share of clips trained without poses, for guidance.
        held: Share of clips of which only some future poses are known, the rest being held: steps shorter than a chunk.
        steps, sigma_max, sigma_min: Sampler.
        guidance: Scale of classifier-free guidance at the last frame; 1 is none.
    """

    history: Natural = 4
    future: Count = 4
    width: Count = 192
    blocks: Count = 6
    heads: Count = 6
    patch: Count = 2
    members: Count = 3
    conditioning: Literal["per_frame", "mean", "flat", "none"] = "per_frame"
    sigma_mean: float = 0.3
    sigma_std: NotNegative = 1.4
    history_noise: NotNegative = 0.3
    anchor_noise: NotNegative = 0.2
    dropout: Share = 0.05
    held: Share = 0.25
    steps: Count = 5
    sigma_max: Positive = 20.0
    sigma_min: Positive = 0.01
    guidance: NotNegative = 1.0

    @property
    def frames(self) -> int:
        """All frames, F = K + 1 + H."""
        return self.history + 1 + self.future


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes.

    Attributes:
        width: Features of a picture.
        judges: Success heads, each with its own random start.
        window: Frames of a training sequence.
        rollout: Frames of the imagined rollouts that such sequences are cut from and limits are taken from: those of an
            episode, as pictures and doubt of its end are others than of its beginning.
    """

    width: Count = 192
    judges: Count = 3
    window: Count = 12
    rollout: Count = 40


@dataclass(frozen=True)
class SvdConfig:
    """Which weights to begin with, and the architecture.

    Attributes:
        pretrained: Directory, or hub id, with ``unet`` and ``vae``; empty: random weights.
        unet, vae: Arguments of diffusers' classes; a saved world model has those of its weights.
        gradient_checkpointing: Compute activations again in the backward pass rather than keeping them.
        fps, motion, augmentation: Micro-conditions of the pretrained model, the same in training and sampling.
    """

    pretrained: str = ""
    unet: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)
    gradient_checkpointing: bool = True
    fps: float = 7.0
    motion: float = 127.0
    augmentation: float = 0.0
