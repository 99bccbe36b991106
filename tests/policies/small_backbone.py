"""Directories of tiny random vision-language models with local tokenizers, and policies on them."""

from pathlib import Path

import torch
from small_vla import make_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GemmaConfig,
    LlamaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from vla_stack.policies.modeling_vla import VlaPolicy

SPECIAL = ("<pad>", "<bos>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
SPECIAL = (*SPECIAL, "<|im_start|>")
SIDE, PATCH = 32, 8


def make_tokenizer(path: Path, bos: bool) -> int:
    """A byte-level tokenizer in ``path``; returns the size of its vocabulary."""
    letters = {c: i + len(SPECIAL) for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**{s: i for i, s in enumerate(SPECIAL)}, **letters}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    return tokenizer.get_vocab_size()


def make_smolvlm(path: Path, layers: int = 3) -> Path:
    """SmolVLM class: 4 query heads on 2 key heads, 4 tokens an image."""
    vocabulary = make_tokenizer(path, bos=False)
    torch.manual_seed(0)
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=layers, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=vocabulary, pad_token_id=0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}
    config = SmolVLMConfig(
        vision_config={**vision, "image_size": SIDE, "patch_size": PATCH},
        text_config=LlamaConfig(**sizes, **heads, **rope).to_dict(),
        scale_factor=2,
        image_token_id=3,
        pad_token_id=0,
    )
    save(SmolVLMForConditionalGeneration(config), path)
    return path


def make_paligemma(path: Path, layers: int = 3) -> Path:
    """PaliGemma class: 4 query heads on 1 key head, 16 tokens an image."""
    vocabulary = make_tokenizer(path, bos=True)
    torch.manual_seed(0)
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=layers, head_dim=8)
    ids = dict(vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(**vision, image_size=SIDE, patch_size=PATCH, vision_use_head=False).to_dict(),
        text_config=GemmaConfig(**sizes, **ids, num_attention_heads=4, num_key_value_heads=1).to_dict(),
        image_token_index=3,
        projection_dim=32,
        hidden_size=32,
        vocab_size=vocabulary,
    )
    save(PaliGemmaForConditionalGeneration(config), path)
    return path


def save(model: torch.nn.Module, path: Path) -> None:
    """Save with weights large enough that every part of the model matters to its output."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)


MAKERS = {"smolvlm": make_smolvlm, "paligemma": make_paligemma}


def make_base(backbone: Path, **options) -> VlaPolicy:
    """A policy on a backbone in float32, its gates open and its adapters away from zero, as after training."""
    defaults = {"backbone": str(backbone), "backbone_dtype": "float32", "train_backbone": "full", "max_tokens": 40}
    torch.manual_seed(0)
    policy = VlaPolicy(make_config(**{**defaults, **options}))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "modulation" in name or "lora_B" in name:
                parameter.normal_(std=0.2)
    return policy.eval()
