"""Policies of the sizes of recipe ``base`` and pi0.5 with random weights, and batches for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor
from transformers import GemmaConfig, LlamaConfig, PaliGemmaConfig, PreTrainedConfig, SiglipVisionConfig, SmolVLMConfig

from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import ACTION, ACTION_IS_PAD, OBS_STATE, image_key
from vla_stack.training import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 8)
BASE_OPTIONS = {
    "expert_width",
    "chunk_size",
    "n_action_steps",
    "lora_rank",
    "lora_alpha",
    "max_tokens",
    "train_backbone",
}
STATES, ACTIONS = 12, 5


def smolvlm(smoke: bool) -> PreTrainedConfig:
    """SmolVLM2-500M, cut to the layers that recipe ``base`` uses."""
    if smoke:
        vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, vocab_size=64)
        heads, image = dict(num_attention_heads=4, num_key_value_heads=2), dict(image_size=32, patch_size=8)
    else:
        vision = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        text = dict(hidden_size=960, intermediate_size=2560, num_hidden_layers=16, head_dim=64, vocab_size=49280)
        heads, image = dict(num_attention_heads=15, num_key_value_heads=5), dict(image_size=512, patch_size=16)
    return SmolVLMConfig(
        vision_config={**vision, **image},
        text_config=LlamaConfig(**text, **heads, pad_token_id=2).to_dict(),
        scale_factor=2 if smoke else 4,
        image_token_id=3,
        pad_token_id=2,
    )


def paligemma(smoke: bool) -> PreTrainedConfig:
    """PaliGemma-3B at 224 pixels; transformers' defaults are its sizes."""
    if not smoke:
        return PaliGemmaConfig()
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, vocab_size=64)
    text_config = GemmaConfig(**text, num_attention_heads=4, num_key_value_heads=1)
    return PaliGemmaConfig(
        vision_config=vision.to_dict(),
        text_config=text_config.to_dict(),
        projection_dim=32,
        hidden_size=32,
        vocab_size=64,
    )


def deep_paligemma(layers: int = 18, image_layers: int = 27) -> PreTrainedConfig:
    """PaliGemma-3B's depth and as narrow as can be: it takes as many operations."""
    config = paligemma(True)
    config.text_config.num_hidden_layers = layers
    config.vision_config.num_hidden_layers = image_layers
    return config


def deep_smolvlm(layers: int = 16, image_layers: int = 12) -> PreTrainedConfig:
    """SmolVLM2-500M's, as recipe ``base`` uses it."""
    config = smolvlm(True)
    config.text_config.num_hidden_layers = layers
    config.vision_config.num_hidden_layers = image_layers
    return config


def make_policy(backbone: PreTrainedConfig, cameras: int, device: torch.device, **options: Any) -> VlaPolicy:
    """A policy with random weights on a backbone of this architecture."""
    keys = [image_key(name) for name in ("front", "wrist", "side")[:cameras]]
    config = VlaConfig(
        device=device.type,
        push_to_hub=False,
        backbone="random",
        backbone_config=json.loads(backbone.to_json_string(use_diff=False)),
        input_features={
            **{key: PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for key in keys},
            OBS_STATE: PolicyFeature(FeatureType.STATE, (STATES,)),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
        **options,
    )
    policy = VlaPolicy(config).to(device)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.02)
    return policy


def make_batch(policy: VlaPolicy, size: int, device: torch.device, recorded: bool = True) -> dict[str, Any]:
    """A preprocessed batch of random samples; pictures uint8 as recorded, or floats in [0, 1] as they are served."""
    config = policy.config
    words = torch.randint(0, 60, (size, config.max_tokens), device=device)

    def pictures() -> Tensor:
        if recorded:
            return torch.randint(0, 256, (size, 224, 224, 3), dtype=torch.uint8, device=device)
        return torch.rand(size, 224, 224, 3, device=device).permute(0, 3, 1, 2)

    return {key: pictures() for key in config.camera_keys} | {
        OBS_STATE: torch.randn(size, STATES, device=device),
        OBS_LANGUAGE_TOKENS: words,
        OBS_LANGUAGE_ATTENTION_MASK: torch.ones_like(words, dtype=torch.bool),
        ACTION: torch.randn(size, config.chunk_size, ACTIONS, device=device),
        ACTION_IS_PAD: torch.zeros(size, config.chunk_size, dtype=torch.bool, device=device),
    }


def recipe_of_base(smoke: bool, batch_size: int) -> tuple[recipes.Recipe, dict[str, Any]]:
    """Recipe ``base`` at a batch size, and its policy's options that do not name a backbone."""
    recipe = recipes.load(ROOT / "vla_stack" / "configs" / "base.yaml", [f"method.batch_size={batch_size}"])
    options = {k: v for k, v in recipe.policy.options.items() if k in BASE_OPTIONS}
    return recipe, options | ({"expert_width": 32} if smoke else {})
