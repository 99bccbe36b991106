"""The native VLA's prefix, trained from scratch: tokens of each camera, of the instruction and of the state."""

from __future__ import annotations

from typing import Any

import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.embodiment import OBS_EMBODIMENT
from vla_stack.policies.expert import Geometry
from vla_stack.policies.past import PAST_TOKENS, PastEncoder
from vla_stack.policies.processor_text import frozen_step
from vla_stack.policies.sentence_encoder import width
from vla_stack.policies.text import DEPTH, TextEncoder
from vla_stack.policies.transformer import PrefixContext, PrefixTransformer
from vla_stack.policies.vision import ImageEncoder, to_float
from vla_stack.schema import IMAGE_TOKENS, OBS_IMAGES, OBS_STATE, PAST_AGE, SchemaError, camera_name, past_key


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
        longest = config.max_words if config.text == "hash" else config.max_tokens
        if frozen := config.text == "frozen":
            config.text_width = config.text_width or width(frozen_step(config).graph)
        self.text = TextEncoder(
            0 if frozen else config.vocabulary, config.text_width, longest, config.width, *heads, DEPTH[config.text]
        )
        self.vision = nn.ModuleDict(
            {
                module_name(key): ImageEncoder(
                    config.input_features[key].shape[-2:],
                    config.vision_channels,
                    config.vision_maps,
                    config.tokens_per_camera,
                    config.width,
                    config.vision_stem,
                    config.vision_pointers,
                )
                for key in config.camera_keys
            }
        )
        self.state = nn.Linear(config.robot_state_feature.shape[0], config.width)
        self.past = PastEncoder(config.width) if config.history else None
        self.embodiment = nn.Embedding(len(config.embodiments), config.width) if config.embodiments else None
        self.transformer = PrefixTransformer(config.depth, config.width, *heads)
        self.geometry = Geometry(config.depth, *heads, kv_heads=config.heads)

    def forward(self, batch: dict[str, Any]) -> PrefixContext:
        """Prefix of a preprocessed batch.

        Raises:
            SchemaError: A camera is missing or has another size than the policy was trained with.
            UserError: The policy has a history, and whoever asks it remembers none.
        """
        words, word_mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        text, word_mask, instruction = read_text(self.text, words, word_mask)
        if IMAGE_TOKENS in batch:
            images = [batch[IMAGE_TOKENS]]
            seen = [word_mask.new_ones(images[0].shape[:2])]
        else:
            images, seen = self._images(batch, instruction)
        # A state far outside the training data says no more than "outside": the bound keeps one odd joint from
        # drowning the rest.
        state = self.state(batch[OBS_STATE].clamp(-5.0, 5.0))[:, None]
        own = [state] if self.embodiment is None else [state, self.embodiment(batch[OBS_EMBODIMENT])[:, None]]
        tokens = torch.cat((*images, *own, text), dim=1)
        always = word_mask.new_ones(tokens.shape[0], len(own))
        mask = torch.cat((*seen, always, word_mask), dim=1)
        if self.past is not None:
            past, known = self.past(self._past_tokens(batch, instruction), batch[PAST_AGE])
            tokens, mask = torch.cat((tokens, past), dim=1), torch.cat((mask, known), dim=1)
        return self.transformer(tokens, mask)

    def image_tokens(self, batch: dict[str, Any]) -> Tensor:
        """Tokens of all cameras, float [b, n, d]: what a history keeps of an observation."""
        *_, instruction = read_text(self.text, batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK])
        return torch.cat(self._images(batch, instruction)[0], dim=1)

    def _past_tokens(self, batch: dict[str, Any], instruction: Tensor) -> Tensor:
        """Tokens [b, p, n, d] of earlier observations: as they were kept, or of pictures, where there are any."""
        if PAST_AGE not in batch:
            raise UserError(
                f"the policy reads {self.config.history} earlier observations, and the batch has none",
                "train it by imitation with `vla train`; run it with `vla eval`, `serve`, `run` or `lerobot-eval`",
            )
        if PAST_TOKENS in batch:
            return batch[PAST_TOKENS]
        known = batch[PAST_AGE] > 0
        told = instruction[:, None].expand(-1, known.shape[1], -1)[known]
        tokens = torch.cat(
            [
                self.vision[module_name(key)](to_float(batch[past_key(key)][known]), told)
                for key in self.config.camera_keys
            ],
            dim=1,
        )
        return tokens.new_zeros(*known.shape, *tokens.shape[1:]).masked_scatter(known[..., None, None], tokens)

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
        image, camera = batch.get(key), camera_name(key)
        if image is None:
            have = sorted(camera_name(k) for k in batch if k.startswith(OBS_IMAGES + "."))
            raise SchemaError(f"camera '{camera}' is missing; the batch has {have}")
        height, width = self.config.input_features[key].shape[-2:]
        size = tuple(image.shape[1:3] if image.dtype == torch.uint8 else image.shape[2:])
        if size != (height, width):
            raise SchemaError(f"camera '{camera}' is {size[0]}x{size[1]}, the policy was trained with {height}x{width}")
        return image


def read_text(encoder: TextEncoder, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encoded instructions [b, n, d], which of their tokens are real [b, n], and one vector each [b, d].

    On a CPU, columns that are padding in all rows are left out, and rows that are alike are encoded once: few
    instructions make up a batch. Elsewhere, and where a graph is traced, no shape may depend on the data.
    """
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        real = mask.any(0).nonzero()
        longest = int(real.max()) + 1 if len(real) else 1
        tokens, mask = tokens[:, :longest], mask[:, :longest]
        if len(tokens) > 1:
            # Of vectors two entries tell: in another sentence they are others, also of the same word.
            told = tokens if tokens.ndim == 2 else tokens[..., :2].flatten(1)
            distinct, which = told.unique(dim=0, return_inverse=True)
            one = torch.zeros(len(distinct), dtype=torch.int64).scatter_(0, which, torch.arange(len(tokens)))
            text, instruction = encoder(tokens[one], mask[one])
            return text.index_select(0, which), mask, instruction.index_select(0, which)
    text, instruction = encoder(tokens, mask)
    return text, mask, instruction


def module_name(key: str) -> str:
    """Feature key of a camera as a module name, which may hold no dot."""
    return camera_name(key).replace(".", "_")
