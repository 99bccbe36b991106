"""The native VLA's prefix, trained from scratch: tokens of each camera, of the instruction and of the state."""

from __future__ import annotations

from typing import Any

import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.embodiment import OBS_EMBODIMENT
from vla_stack.policies.expert import Geometry
from vla_stack.policies.text import TextEncoder
from vla_stack.policies.transformer import PrefixContext, PrefixTransformer
from vla_stack.policies.vision import ImageEncoder, to_float
from vla_stack.schema import OBS_IMAGES, OBS_STATE, SchemaError


class ScratchPrefix(nn.Module):
    """Preset ``tiny``: small encoders without pretraining, and a transformer over their tokens.

    Args:
        config: The policy's configuration, with features filled in.
    """

    def __init__(self, config: VlaConfig) -> None:
        super().__init__()
        assert config.robot_state_feature is not None
        self.config = config
        heads = (config.heads, config.head_dim)
        self.text = TextEncoder(config.vocabulary, config.max_words, config.width, *heads)
        self.vision = nn.ModuleDict(
            {
                module_name(key): ImageEncoder(
                    config.input_features[key].shape[-2:],
                    config.vision_channels,
                    config.vision_maps,
                    config.tokens_per_camera,
                    config.width,
                )
                for key in config.camera_keys
            }
        )
        self.state = nn.Linear(config.robot_state_feature.shape[0], config.width)
        self.embodiment = nn.Embedding(len(config.embodiments), config.width) if config.embodiments else None
        self.transformer = PrefixTransformer(config.depth, config.width, *heads)
        self.geometry = Geometry(config.depth, *heads, kv_heads=config.heads)

    def forward(self, batch: dict[str, Any]) -> PrefixContext:
        """Prefix of a preprocessed batch.

        Raises:
            SchemaError: A camera is missing or has another size than the policy was trained with.
        """
        words, word_mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        text, instruction = self.text(words, word_mask)
        images, seen = self._images(batch, instruction)
        # A state far outside the training data says no more than "outside": the bound keeps one odd joint from
        # drowning the rest.
        state = self.state(batch[OBS_STATE].clamp(-5.0, 5.0))[:, None]
        own = [state] if self.embodiment is None else [state, self.embodiment(batch[OBS_EMBODIMENT])[:, None]]
        tokens = torch.cat((*images, *own, text), dim=1)
        always = word_mask.new_ones(tokens.shape[0], len(own))
        return self.transformer(tokens, torch.cat((*seen, always, word_mask), dim=1))

    def _images(self, batch: dict[str, Any], instruction: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens of each camera and whether they are seen; a camera that no sample of the batch has gives none."""
        tokens, seen = [], []
        for key in self.config.camera_keys:
            lacking = batch.get(f"{key}_is_pad")  # [b], of embodiments without this camera
            if lacking is not None and key not in batch:
                continue
            tokens.append(self.vision[module_name(key)](to_float(self._image(batch, key)), instruction))
            mask = torch.ones(tokens[-1].shape[:2], dtype=torch.bool, device=tokens[-1].device)
            seen.append(mask if lacking is None else mask & ~lacking[:, None])
        return tokens, seen

    def _image(self, batch: dict[str, Any], key: str) -> Tensor:
        image, camera = batch.get(key), key.removeprefix(OBS_IMAGES + ".")
        if image is None:
            have = sorted(k.removeprefix(OBS_IMAGES + ".") for k in batch if k.startswith(OBS_IMAGES + "."))
            raise SchemaError(f"camera '{camera}' is missing; the batch has {have}")
        height, width = self.config.input_features[key].shape[-2:]
        size = tuple(image.shape[1:3] if image.dtype == torch.uint8 else image.shape[2:])
        if size != (height, width):
            raise SchemaError(f"camera '{camera}' is {size[0]}x{size[1]}, the policy was trained with {height}x{width}")
        return image


def module_name(key: str) -> str:
    """Feature key of a camera as a module name, which may hold no dot."""
    return key.removeprefix(OBS_IMAGES + ".").replace(".", "_")
