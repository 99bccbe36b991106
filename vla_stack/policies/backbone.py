"""Preset ``base``: a pretrained vision-language model as the prefix of the native VLA.

Images of all cameras, the state and the instruction are one block of tokens that read each other in full; each text
layer's keys and values, rotated, are what the action expert's layer of the same depth attends to (pi0, Black et al.
2024). Shapes are static: every camera has its slot and the prompt its length, whatever a sample lacks is masked, and
positions count what is there, so that a missing camera leaves no gap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla_stack.errors import UserError
from vla_stack.policies.backbone_family import FAMILIES, drop_language_head, geometry, load_backbone, set_trainable
from vla_stack.policies.backbone_weights import fit_weights
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.embodiment import OBS_EMBODIMENT
from vla_stack.policies.transformer import KeyValue, PrefixContext, rotate
from vla_stack.policies.unrolled_backbone import UnrolledEncoder, UnrolledText
from vla_stack.policies.vision import to_float
from vla_stack.schema import IMAGE_TOKENS, OBS_STATE, SchemaError, camera_name


class Tap:
    """Stands where transformers expects a cache of past keys and values, and keeps the ones that a layer computes."""

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> KeyValue:
        self.kept = (k.to(v.dtype), v)
        return k, v


class PretrainedPrefix(nn.Module):
    """Prefix of a pretrained backbone.

    Args:
        config: The policy's configuration, with features filled in; its ``backbone_config`` is filled in here.

    Attributes:
        trained_alpha: ``lora_alpha`` of the policy whose weights are about to be loaded.

    Raises:
        UserError: The backbone cannot be loaded.
    """

    def __init__(self, config: VlaConfig) -> None:
        super().__init__()
        assert config.robot_state_feature is not None
        self.config = config
        self.backbone = load_backbone(config)
        self.family = FAMILIES[self.backbone.config.model_type](self.backbone)
        self.register_buffer("patch_positions", self.family.patch_positions(), persistent=False)
        self.geometry = geometry(self.backbone, self.text)
        if not config.keep_language_head:
            drop_language_head(self.backbone, self.text)
        set_trainable(self.backbone, self.family, config)
        self.trained_alpha = config.lora_alpha
        self._register_load_state_dict_pre_hook(self._fit_weights)
        self.width = self.backbone.config.text_config.hidden_size
        self.size = self.backbone.config.vision_config.image_size
        states = config.robot_state_feature.shape[0]
        self.state = nn.Linear(states, self.width) if config.state_input == "token" else None
        self.embodiment = nn.Embedding(len(config.embodiments), self.width) if config.embodiments else None
        self._unrolled: UnrolledText | None = None

    def for_inference(self) -> None:
        """Join what transformers computes apart, and drop what it was; adapters have to be in the weights already."""
        attend = self.text.layers[0].self_attn
        if self.config.train_backbone == "lora" or attend.q_proj.bias is not None or len(self.text.layers) < 2:
            return
        self._unrolled = UnrolledText(self.text, self.geometry.head_dim)
        self.text.layers = self.text.layers[-1:]
        vision = self.family.vision
        vision.encoder = UnrolledEncoder(vision.encoder)

    def _fit_weights(self, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
        alpha = self.config.lora_alpha
        fit_weights(self.backbone, weights, f"{prefix}backbone.", alpha, self.trained_alpha)
        self.trained_alpha = alpha  # what is loaded from now on is of this policy

    @property
    def text(self) -> Any:
        """The text model; its layers are run one by one."""
        return self.backbone.get_submodule(self.family.text_path)

    def forward(self, batch: dict[str, Any]) -> PrefixContext:
        """Prefix of a preprocessed batch. A camera that is absent from it, or marked in ``<camera>_is_pad`` [b], is
        masked.

        Raises:
            SchemaError: There is no camera at all.
        """
        tokens, mask = self.tokens(batch)
        return self.run(tokens, mask)

    def tokens(self, batch: dict[str, Any]) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"]]:
        """Embedded prefix tokens and which of them are there: cameras in the configuration's order, state, prompt."""
        words, word_mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK].bool()
        text = self.text.embed_tokens(words)
        images, seen = self.images(batch, text.dtype)
        state = text[:, :0]
        if self.state is not None:  # bounded as in ScratchPrefix
            state = self.state(batch[OBS_STATE].clamp(-5.0, 5.0))[:, None].to(text.dtype)
        if self.embodiment is not None:
            state = torch.cat((state, self.embodiment(batch[OBS_EMBODIMENT])[:, None].to(text.dtype)), dim=1)
        mask = torch.cat((seen, seen.new_ones(text.shape[0], state.shape[1]), word_mask), dim=1)
        return torch.cat((images, state, text), dim=1), mask

    def images(self, batch: dict[str, Any], dtype: torch.dtype) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"]]:
        """Tokens of every camera slot and their mask; all images that are there pass the encoder as one batch."""
        if (kept := batch.get(IMAGE_TOKENS)) is not None:
            return kept.to(dtype), torch.ones(kept.shape[:2], dtype=torch.bool, device=kept.device)
        present = [key for key in self.config.camera_keys if key in batch]
        words, per_image = batch[OBS_LANGUAGE_TOKENS], self.family.tokens_per_image
        if self.config.camera_keys and not present:
            cameras = ", ".join(camera_name(key) for key in self.config.camera_keys)
            raise SchemaError(f"the batch has none of the policy's cameras ({cameras})")
        encoded: dict[str, Tensor] = {}
        if present:
            pixels = torch.cat([fit(to_float(batch[key]), self.size) for key in present])
            # Not `chunk`, which would tie an exported graph to the size of its batch.
            per_camera = self.encode_images(pixels).to(dtype).unflatten(0, (len(present), -1))
            encoded = dict(zip(present, per_camera, strict=True))
        absent = torch.zeros(words.shape[0], per_image, self.width, dtype=dtype, device=words.device)
        tokens, masks = [absent[:, :0]], [torch.zeros(words.shape[0], 0, dtype=torch.bool, device=words.device)]
        for key in self.config.camera_keys:
            seen = torch.full(words.shape[:1], key in encoded, device=words.device)
            if (lacking := batch.get(f"{key}_is_pad")) is not None:
                seen = seen & ~lacking
            tokens.append(encoded.get(key, absent))
            masks.append(seen[:, None].expand(-1, per_image))
        return torch.cat(tokens, dim=1), torch.cat(masks, dim=1)

    def image_tokens(self, batch: dict[str, Any]) -> Float[Tensor, "b n d"]:
        """Tokens of all cameras, which a batch may bring in place of its pictures."""
        return self.images(batch, self.text.embed_tokens.weight.dtype)[0]

    def encode_images(self, pixels: Float[Tensor, "b 3 s s"]) -> Float[Tensor, "b n d"]:
        """Tokens of images in [-1, 1] that have the backbone's size already."""
        weight = next(self.backbone.get_submodule(self.family.vision_path).parameters())
        return self.family.image_tokens(pixels.to(weight.dtype), self.patch_positions)

    def run(self, tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> PrefixContext:
        """Full attention over prefix tokens through all layers; of the last one, keys and values alone."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        rotary, keys, x, cache = self.text.rotary_emb(tokens, positions), mask[:, None, None], tokens, []
        *layers, last = self.text.layers
        if self._unrolled is not None:
            x, cache = self._unrolled.run(tokens, mask, rotary)
        for layer in layers:
            if self.config.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x, *kv = checkpoint(run_layer, layer, x, keys, rotary, use_reentrant=False, preserve_rng_state=False)
            else:
                x, *kv = run_layer(layer, x, keys, rotary)
            cache.append(tuple(kv))
        x = last.input_layernorm(x)
        heads = (*x.shape[:2], -1, self.geometry.head_dim)
        k, v = (project(x).view(heads).transpose(1, 2) for project in (last.self_attn.k_proj, last.self_attn.v_proj))
        cache.append((rotate(k, tuple(angle[:, None] for angle in rotary)), v))
        count = mask.sum(1, keepdim=True)
        summary = torch.where(mask[..., None], x, 0.0).float().sum(1) / count
        return PrefixContext(tuple(cache), mask, summary)

    def language_loss(self, images: Tensor, input_ids: Int[Tensor, "b n"], labels: Int[Tensor, "b n"]) -> Tensor:
        """Next-token cross entropy of the backbone as a language model; see ``VlaPolicy.language_loss``."""
        if not self.config.keep_language_head:
            raise UserError("this policy has no language head", "train it with keep_language_head=true")
        pixels = fit(to_float(images), self.size)
        # Padding on the right needs no mask: what precedes it never reads it, and its labels are ignored.
        extra = self.family.language_inputs(pixels, labels)
        return self.backbone(input_ids=input_ids, labels=labels, use_cache=False, **extra).loss


def run_layer(layer: Any, x: Tensor, keys: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One text layer: its output, rotated keys and values. ``forward`` and not a call, which may drop the tap."""
    tap = Tap()
    x = layer.forward(x, attention_mask=keys, position_embeddings=rotary, past_key_values=tap)
    return x, *tap.kept


def fit(images: Float[Tensor, "b 3 h w"], size: int) -> Float[Tensor, "b 3 s s"]:
    """Images in [-1, 1], resized to touch a square of ``size`` pixels from within, centred, the rest black."""
    h, w = images.shape[-2:]
    scale = size / max(h, w)
    inner = (max(1, round(h * scale)), max(1, round(w * scale)))
    if inner != (h, w):
        images = F.interpolate(images, inner, mode="bilinear", antialias=True, align_corners=False)
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    return F.pad(images, (left, size - inner[1] - left, top, size - inner[0] - top), value=-1.0)
