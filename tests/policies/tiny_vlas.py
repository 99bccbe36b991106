"""SmolVLA, pi0 and pi0.5 with random weights and a few ten thousand parameters, made on the spot without a hub.

with tiny_pi(folder):                          # the sizes of pi0 and pi0.5 are constants of LeRobot's modules
    policy = make_vla("pi05", folder)          # our adapter; stock=True: LeRobot's own class, equal weights
    pre, post = make_processors(policy)
    batch = pre(make_batch(2))                 # of small_vla
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from small_vla import ACTIONS, ROBOT, SIZE, STATES, make_stats
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from vla_stack.policies.registry import policy_class
from vla_stack.schema import ACTION, OBS_STATE, image_key

KINDS = ("smolvla", "pi0", "pi05")
CHUNK = 6
MAX_DIM = 8  # state and action are padded to it
IMAGE_TOKEN = "<image>"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", IMAGE_TOKEN, "<fake>", "<global-img>", "<end_of_utterance>")


@functools.cache
def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"image_token": IMAGE_TOKEN, "fake_image_token": "<fake>", "global_image_token": "<global-img>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={**special, "end_of_utterance_token": "<end_of_utterance>"},
    )
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


@functools.cache
def make_smolvlm(folder: Path, size: int = SIZE) -> Path:
    """Configuration and processor of a SmolVLM, as SmolVLA reads them; no weights."""
    path = folder / "smolvlm"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_tokenizer(folder))
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=300)
    SmolVLMConfig(
        vision_config={**vision, "image_size": size, "patch_size": 8},
        text_config={**text, "model_type": "llama", "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=0,
    ).save_pretrained(path)
    images = SmolVLMImageProcessorPil(size={"longest_edge": size}, max_image_size={"longest_edge": size})
    videos = SmolVLMVideoProcessor(size={"longest_edge": size}, max_image_size={"longest_edge": size})
    SmolVLMProcessor(images, tokenizer, videos, chat_template="{{ messages }}").save_pretrained(path)
    return path


@contextmanager
def tiny_pi(folder: Path) -> Iterator[None]:
    """Within it pi0 and pi0.5 are built small and with a local tokenizer."""
    with mock.patch.multiple("lerobot.policies.pi0.modeling_pi0", **_tiny_gemma("pi0")):
        with mock.patch.multiple("lerobot.policies.pi05.modeling_pi05", **_tiny_gemma("pi05")):
            tokenizer = make_tokenizer(folder)
            with _local_tokenizer("pi0", tokenizer), _local_tokenizer("pi05", tokenizer):
                yield


def _tiny_gemma(kind: str) -> dict[str, Any]:
    from lerobot.policies.pi0 import modeling_pi0 as module

    def gemma_config(variant: str) -> Any:
        width = {"gemma_2b": 32, "gemma_300m": 16}[variant]
        # LeRobot's layers take eight heads for granted.
        return module.GemmaConfig(width=width, depth=3, mlp_dim=32, num_heads=8, num_kv_heads=1, head_dim=8)

    def paligemma(config: Any) -> Any:
        vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=8)
        for key, value in {**vision, "projection_dim": config.text_config.hidden_size}.items():
            setattr(config.vision_config, key, value)
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = 300
        return original_vlm(config)

    def expert(config: Any) -> Any:
        config.vocab_size = 300
        return original_expert(config)

    original_vlm = module.PaliGemmaForConditionalGenerationWithPiGemma
    original_expert = module.PiGemmaForCausalLM
    return {
        "get_gemma_config": gemma_config,
        "PaliGemmaForConditionalGenerationWithPiGemma": paligemma,
        "PiGemmaForCausalLM": expert,
    }


def _local_tokenizer(kind: str, tokenizer: Path) -> Any:
    from lerobot.processor import TokenizerProcessorStep

    def step(tokenizer_name: str, **options: Any) -> TokenizerProcessorStep:
        return TokenizerProcessorStep(tokenizer_name=str(tokenizer), **options)

    return mock.patch(f"lerobot.policies.{kind}.processor_{kind}.TokenizerProcessorStep", step)


def tiny_options(kind: str, folder: Path) -> dict[str, Any]:
    """Fields of the configuration that make a policy tiny, as a recipe's ``policy.options`` has them."""
    sizes = {"chunk_size": CHUNK, "n_action_steps": 4, "max_state_dim": MAX_DIM, "max_action_dim": MAX_DIM}
    if kind == "smolvla":
        backbone = {"vlm_model_name": str(make_smolvlm(folder)), "num_vlm_layers": 4}
        return {**sizes, **backbone, "resize_imgs_with_padding": (SIZE, SIZE), "num_steps": 3}
    text = {"pi0": 48, "pi05": 96}[kind]
    return {**sizes, "image_resolution": (SIZE, SIZE), "tokenizer_max_length": text, "num_inference_steps": 3}


def tiny_config(kind: str, folder: Path, **options: Any) -> PreTrainedConfig:
    features = {image_key(c.name): PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for c in ROBOT.cameras}
    return make_policy_config(
        kind,
        device="cpu",
        push_to_hub=False,
        input_features=features | {OBS_STATE: PolicyFeature(FeatureType.STATE, (STATES,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
        **{**tiny_options(kind, folder), **options},
    )


def make_vla(kind: str, folder: Path, stock: bool = False, **options: Any) -> Any:
    """A tiny policy in evaluation mode, with weights that make every part count; pi0 and pi0.5 within `tiny_pi`."""
    torch.manual_seed(0)
    policy = (get_policy_class if stock else policy_class)(kind)(tiny_config(kind, folder, **options))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    return policy.eval()


def make_processors(policy: Any) -> tuple[Any, Any]:
    stats = {key: {name: torch.from_numpy(x) for name, x in of.items()} for key, of in make_stats().items()}
    for of in stats.values():
        of |= {"q01": of["mean"] - 2 * of["std"], "q99": of["mean"] + 2 * of["std"]}
    return make_pre_post_processors(policy.config, dataset_stats=stats)


def save_vla(policy: Any, path: Path) -> Path:
    """Write the policy directory."""
    for part in (policy, *make_processors(policy)):
        part.save_pretrained(path)
    return path
