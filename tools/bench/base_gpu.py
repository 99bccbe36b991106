"""The preset ``base`` on a GPU: training step time and memory, and the latency of one chunk at the size of pi0.5.

    python tools/bench/base_gpu.py            # writes docs/results/base_gpu.json
    python tools/bench/base_gpu.py --smoke    # the same code on a CPU, tiny models, nothing written

Weights are random: neither time nor memory depends on them, and no download is needed. Training is
``configs/base.yaml`` with a backbone of the size of SmolVLM2-500M (two cameras, adapters, bfloat16); a step is loss,
backward pass, clipping and AdamW on data that is on the device. Inference is a PaliGemma-3B backbone with an expert of
width 1024, a prompt of 200 tokens with the state in it, three cameras, 50 actions and 10 Euler steps, as pi0.5; eager,
and with prefix and expert compiled. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from transformers import GemmaConfig, LlamaConfig, PaliGemmaConfig, PreTrainedConfig, SiglipVisionConfig, SmolVLMConfig

from vla_stack.errors import UserError
from vla_stack.methods import imitation
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import ACTION, ACTION_IS_PAD, OBS_STATE, image_key
from vla_stack.training import recipe as recipes
from vla_stack.training.loop import make_optimizer
from vla_stack.training.memory import estimate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from results import Check, write  # noqa: E402

STATES, ACTIONS = 12, 5
GB = 1e9


def smolvlm(smoke: bool) -> PreTrainedConfig:
    """SmolVLM2-500M, cut to the layers that ``configs/base.yaml`` uses."""
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


def make_batch(policy: VlaPolicy, size: int, device: torch.device) -> dict[str, Any]:
    """A preprocessed batch of random samples."""
    config = policy.config
    words = torch.randint(0, 60, (size, config.max_tokens), device=device)
    images = {
        key: torch.randint(0, 256, (size, 224, 224, 3), dtype=torch.uint8, device=device) for key in config.camera_keys
    }
    return images | {
        OBS_STATE: torch.randn(size, STATES, device=device),
        OBS_LANGUAGE_TOKENS: words,
        OBS_LANGUAGE_ATTENTION_MASK: torch.ones_like(words, dtype=torch.bool),
        ACTION: torch.randn(size, config.chunk_size, ACTIONS, device=device),
        ACTION_IS_PAD: torch.zeros(size, config.chunk_size, dtype=torch.bool, device=device),
    }


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of a call, to the end of its work on the device; a few calls before are not counted."""
    times, warmup = [], max(1, repeats // 5)
    for i in range(warmup + repeats):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= warmup:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def training(batch_size: int, smoke: bool, device: torch.device, repeats: int) -> dict[str, float]:
    """Step time and peak memory of ``configs/base.yaml`` at a batch size."""
    recipe = recipes.load(ROOT / "configs" / "base.yaml", [f"batch_size={batch_size}"])
    kept = {"expert_width", "chunk_size", "n_action_steps", "lora_rank", "lora_alpha", "max_tokens", "train_backbone"}
    options = {k: v for k, v in recipe.policy.options.items() if k in kept} | ({"expert_width": 32} if smoke else {})
    policy = make_policy(smolvlm(smoke), 2, device, **options).train()
    optimizer, batch = make_optimizer(policy, recipe.optimizer), make_batch(policy, batch_size, device)
    generator = torch.Generator(device).manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = imitation.loss(policy, batch, generator, **recipe.method_options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    milliseconds = median_ms(step, device, repeats)
    memory = estimate(policy, recipe)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "batch_size": batch_size,
        "step_ms": milliseconds,
        "peak_gb": peak / GB,
        # The average of the weights is the loop's and is not held here.
        "estimated_gb": (memory.total - memory.average) / GB,
        "parameters_m": sum(p.numel() for p in policy.parameters()) / 1e6,
    }


@torch.inference_mode()
def inference(smoke: bool, device: torch.device, repeats: int) -> dict[str, float]:
    """Latency of one chunk for one robot, eager and compiled."""
    sizes = {"chunk_size": 50, "max_tokens": 20 if smoke else 200, "expert_width": 32 if smoke else 1024}
    options = {"train_backbone": "expert_only", "state_input": "prompt", "num_inference_steps": 2 if smoke else 10}
    policy = make_policy(paligemma(smoke), 3, device, **sizes, **options).eval()
    batch = make_batch(policy, 1, device)
    noise = torch.randn(1, 50, ACTIONS, device=device)
    out = {"parameters_m": sum(p.numel() for p in policy.parameters()) / 1e6}
    out["eager_ms"] = median_ms(lambda: policy.predict_action_chunk(batch, noise), device, repeats)
    # The smoke run traces and does not generate code: a C++ compiler would take a minute for it.
    backend = "eager" if smoke else "inductor"
    policy.encode = torch.compile(policy.encode, fullgraph=True, backend=backend)
    policy.velocity = torch.compile(policy.velocity, fullgraph=True, backend=backend)
    begin = time.perf_counter()
    policy.predict_action_chunk(batch, noise)
    out["compile_s"] = time.perf_counter() - begin
    out["compiled_ms"] = median_ms(lambda: policy.predict_action_chunk(batch, noise), device, repeats)
    return out


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, nothing written")
    smoke = parser.parse_args(arguments).smoke
    if not smoke and not torch.cuda.is_available():
        raise UserError(
            "this bench needs a CUDA device", "python tools/bench/base_gpu.py --smoke runs its code on a CPU"
        )
    device = torch.device("cpu" if smoke else "cuda")
    repeats = 1 if smoke else 20
    trained = [training(size, smoke, device, repeats) for size in ((2, 4) if smoke else (8, 32))]
    served = inference(smoke, device, repeats)
    data = {"device": device.type if smoke else torch.cuda.get_device_name(), "training": trained, "inference": served}
    print(json.dumps(data, indent=1))
    if smoke:
        return 0
    checks = [
        Check("peak memory at batch 8, GB", trained[0]["peak_gb"], 24.0, "<="),
        Check("peak memory at batch 32, GB", trained[1]["peak_gb"]),
        Check("step at batch 8, ms", trained[0]["step_ms"]),
        Check("step at batch 32, ms", trained[1]["step_ms"]),
        Check("chunk at the size of pi0.5, eager, ms", served["eager_ms"]),
        Check("chunk at the size of pi0.5, compiled, ms", served["compiled_ms"]),
    ]
    write("base_gpu", checks, data)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        sys.exit(str(e))
