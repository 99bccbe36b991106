"""Co-training on image-text pairs, so that a pretrained backbone keeps what it knows (pi0.5, 2025; section IV-C)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vla_stack.data.loader import ChunkLoader, check_kind
from vla_stack.data.text_pairs import TextPairLoader
from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig, PreTrainedPolicy
from vla_stack.policies.backbone_text import image_text_pairs
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.processor_text import TokenizerStep
from vla_stack.training.mixture import Mixture
from vla_stack.training.recipe import TextPairsRecipe

IMAGES, TOKENS, LABELS = "text_pairs.images", "text_pairs.input_ids", "text_pairs.labels"
Loss = Callable[[PreTrainedPolicy, dict[str, Any], torch.Generator], tuple[Tensor, dict[str, Any]]]


class PairedLoader:
    """Batches of demonstrations, each with a batch of image-text pairs beside it.

    Adds ``text_pairs.images`` uint8 [p, s, s, 3], ``text_pairs.input_ids`` and ``text_pairs.labels`` int64 [p, n].

    Args:
        demonstrations: Loader of demonstrations.
        pairs: Loader of image-text pairs.
        tokenize: Prompts and answers to token ids and labels.
    """

    def __init__(
        self,
        demonstrations: ChunkLoader | Mixture,
        pairs: TextPairLoader,
        tokenize: Callable[[list[str], list[str]], tuple[Tensor, Tensor]],
    ) -> None:
        self.demonstrations, self._pairs, self._tokenize = demonstrations, pairs, tokenize

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch, pairs in zip(self.demonstrations, self._pairs, strict=True):
            tokens, labels = self._tokenize(pairs["prompts"], pairs["answers"])
            yield {**batch, IMAGES: pairs["images"], TOKENS: tokens.numpy(), LABELS: labels.numpy()}

    def state_dict(self) -> dict[str, Any]:
        return {"demonstrations": self.demonstrations.state_dict(), "text_pairs": self._pairs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(state, self.state_dict())
        self.demonstrations.load_state_dict(state["demonstrations"])
        self._pairs.load_state_dict(state["text_pairs"])


def with_pairs(
    recipe: TextPairsRecipe,
    demonstrations: ChunkLoader | Mixture,
    config: PreTrainedConfig,
    preprocessor: Any,
    seed: int,
) -> PairedLoader:
    """A loader of demonstrations with the recipe's image-text pairs beside them.

    Raises:
        UserError: The policy has no language head to train, or the pairs cannot be read.
    """
    base = base_config(config)
    if not isinstance(base, VlaConfig) or not base.backbone:
        raise UserError("'data.text_pairs' is set and the policy has no backbone", "set policy.options.backbone")
    if not base.keep_language_head:
        raise UserError(
            "'data.text_pairs' is set and the policy has no language head", "set policy.options.keep_language_head=true"
        )
    assert base.backbone_config is not None
    backbone = base.backbone_config
    content = next(step.content for step in preprocessor.steps if isinstance(step, TokenizerStep))
    pairs = TextPairLoader(recipe.root, recipe.batch_size, backbone["vision_config"]["image_size"], seed)
    return PairedLoader(demonstrations, pairs, lambda asked, said: image_text_pairs(content, backbone, asked, said))


def co_trained(loss: Loss, weight: float) -> Loss:
    """A method's loss plus ``weight`` times the cross entropy of the batch's image-text pairs, logged by itself."""

    def total(
        policy: PreTrainedPolicy, batch: dict[str, Any], generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Any]]:
        value, metrics = loss(policy, batch, generator)
        language = policy.language_loss(batch[IMAGES], batch[TOKENS], batch[LABELS])
        return value + weight * language, {**metrics, "language_loss": language.detach()}

    return total
