"""The preset ``base`` on a GPU: training step time and memory; latency of one chunk, also at the size of pi0.5.

    python tools/bench/base_gpu.py                  # writes docs/results/base_gpu.json
    python tools/bench/base_gpu.py --only base exported --out FILE
    python tools/bench/base_gpu.py --smoke          # the same code on a CPU, tiny models, nothing written

Weights are random: neither time nor memory depends on them, and no download is needed. Times are medians, GB are 10^9
bytes.

training: ``configs/base.yaml`` with a backbone of the size of SmolVLM2-500M (two cameras, adapters, bfloat16); a step
is loss, backward pass, clipping and AdamW on data that is on the device.
base: one chunk of that policy. pi05: one chunk of a policy with a PaliGemma-3B backbone, an expert of width 1024, a
prompt of 200 tokens with the state in it, three cameras, 50 actions and 10 Euler steps, as pi0.5.
exported: that of base as ``vla export`` writes it, in float32, on the provider that is there.
onnx: the shipped policy, torch beside ONNX Runtime; here times are of ``ChunkPolicy.infer``, processors included.

Policies compute as ``vla serve`` has them: frozen weights in ``backbone_dtype``, bfloat16, the rest in float32, and
arithmetic in bfloat16 by autocast, whatever ``native_precision`` says. *compiled* is what ``--backend compile`` does:
prefix and velocity by ``torch.compile(dynamic=False)``, anew for each size of batch, without CUDA graphs. Pictures are
floats, as the server passes them; processors are outside of the times of base and pi05.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor
from transformers import GemmaConfig, LlamaConfig, PaliGemmaConfig, PreTrainedConfig, SiglipVisionConfig, SmolVLMConfig

from vla_stack.errors import UserError
from vla_stack.policies.backends import _compile, load_with
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.shipped import resolve_policy
from vla_stack.schema import ACTION, ACTION_IS_PAD, OBS_STATE, Observation, PolicySpec, image_key
from vla_stack.training import recipe as recipes
from vla_stack.training.loop import make_optimizer
from vla_stack.training.memory import estimate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]
from gpu_bench import GB, Figures, run  # noqa: E402

from results import Check  # noqa: E402

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
    """``configs/base.yaml`` at a batch size, and its policy's options that do not name a backbone."""
    recipe = recipes.load(ROOT / "configs" / "base.yaml", [f"method.batch_size={batch_size}"])
    options = {k: v for k, v in recipe.policy.options.items() if k in BASE_OPTIONS}
    return recipe, options | ({"expert_width": 32} if smoke else {})


def training(figures: Figures, smoke: bool) -> None:
    """Step time and peak memory of ``configs/base.yaml``."""
    for size in (2, 4) if smoke else (8, 32):
        with figures.row("training", f"batch {size}") as row:
            row |= train_steps(figures, size, smoke)


def train_steps(figures: Figures, batch_size: int, smoke: bool) -> dict[str, float]:
    """Figures of one batch size."""
    device = figures.device
    recipe, options = recipe_of_base(smoke, batch_size)
    policy = make_policy(smolvlm(smoke), 2, device, **options).train()
    optimizer, batch = make_optimizer(policy, recipe.method.optimizer), make_batch(policy, batch_size, device)
    generator = torch.Generator(device).manual_seed(0)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = recipe.method.loss()(policy, batch, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    milliseconds = figures.median_ms(step, 1 if smoke else 20)
    memory = estimate(policy, recipe)
    return {
        "batch_size": batch_size,
        "step_ms": milliseconds,
        "peak_gb": figures.peak_gb(),
        # The average of the weights is the loop's and is not held here.
        "estimated_gb": (memory.total - memory.average) / GB,
        "parameters_m": sum(p.numel() for p in policy.parameters()) / 1e6,
    }


def base(figures: Figures, smoke: bool) -> None:
    """Chunks of the policy of ``configs/base.yaml``, adapters in place, as a checkpoint has them."""
    served(
        figures, "base", smoke, lambda: make_policy(smolvlm(smoke), 2, figures.device, **recipe_of_base(smoke, 1)[1])
    )


def pi05(figures: Figures, smoke: bool) -> None:
    """Chunks at the size of pi0.5."""
    sizes = {"chunk_size": 50, "max_tokens": 20 if smoke else 200, "expert_width": 32 if smoke else 1024}
    options = {"train_backbone": "expert_only", "state_input": "prompt", "num_inference_steps": 2 if smoke else 10}
    served(figures, "pi05", smoke, lambda: make_policy(paligemma(smoke), 3, figures.device, **sizes, **options))


def served(figures: Figures, section: str, smoke: bool, make: Callable[[], VlaPolicy]) -> None:
    """Latency and peak memory of one chunk, eager and compiled, at each size of batch."""
    policy: VlaPolicy | None = None
    with figures.row(section, "weights") as row:
        policy = make().eval()
        row["parameters_m"] = sum(p.numel() for p in policy.parameters()) / 1e6
        types = Counter[str]()
        for p in policy.parameters():
            types[str(p.dtype).removeprefix("torch.")] += p.numel() * p.element_size()
        row["weights_gb"] = {name: size / GB for name, size in types.items()}
        row["arithmetic"] = policy.config.backbone_dtype
    if policy is None:
        return
    inputs, moved = {}, {}
    for size in BATCHES:
        inputs[size] = make_batch(policy, size, figures.device, recorded=False)
        with figures.row(section, f"eager, batch {size}") as row:
            figure, moved[size] = latency(figures, policy, inputs[size], 1 if smoke else 20)
            row |= figure
    _compile(SimpleNamespace(policy=policy))  # type: ignore[arg-type]  of a ChunkPolicy it reads this attribute alone
    with tried_out(smoke):
        for size in BATCHES:
            with figures.row(section, f"compiled, batch {size}") as row:
                compiled = counted()
                figure, again = latency(figures, policy, inputs[size], 1 if smoke else 20)
                row |= figure | {"graphs": (counted() - compiled)["graphs"], "breaks": (counted() - compiled)["breaks"]}
                if size in moved:
                    row["cosine_with_eager"] = torch.cosine_similarity(moved[size], again, dim=0).item()
    torch.compiler.reset()


def latency(
    figures: Figures, policy: VlaPolicy, batch: dict[str, Any], repeats: int
) -> tuple[dict[str, float], Tensor]:
    """Figures of one chunk an observation, and how far it led away from the noise, flat, on the CPU.

    Raises:
        RuntimeError: The chunk is not finite, or graphs were compiled again after the first call.
    """
    config = policy.config
    generator = torch.Generator(figures.device).manual_seed(0)
    size = (len(batch[OBS_STATE]), config.chunk_size, ACTIONS)
    with torch.inference_mode():  # as ChunkPolicy.infer, noise included: another kind of tensor is another graph
        noise = torch.randn(size, generator=generator, device=figures.device)
        batch = {k: v.clone() for k, v in batch.items()}
        begin = time.perf_counter()
        chunk = policy.predict_action_chunk(batch, noise)
        figures.synchronize()
        row = {"first_s": time.perf_counter() - begin}
        before = counted()
        row["ms"] = figures.median_ms(lambda: policy.predict_action_chunk(batch, noise), repeats)
        row["peak_gb"] = figures.peak_gb()
        moved = (chunk - noise).float().flatten().cpu()
    if not moved.isfinite().all():
        raise RuntimeError("the chunk is not finite")
    if again := counted() - before:
        raise RuntimeError(f"compiled again while it was timed: {dict(again)}")
    return row, moved


def counted() -> Counter[str]:
    """Graphs that torch has compiled so far, and where it could not go on with one."""
    counters = torch._dynamo.utils.counters
    return Counter(graphs=counters["stats"]["unique_graphs"], breaks=sum(counters["graph_break"].values()))


def tried_out(smoke: bool) -> AbstractContextManager[Any]:
    """A smoke run traces and does not generate code: a C++ compiler would take a minute for it."""
    return torch.compiler.set_stance("default", force_backend="eager") if smoke else nullcontext()


def exported(figures: Figures, smoke: bool) -> None:
    """Chunks of base by ONNX Runtime; on CUDA a call takes its inputs from the host and brings its chunk there."""
    import onnxruntime

    from vla_stack.policies.onnx_export import write_graphs
    from vla_stack.policies.onnx_policy import OnnxPolicy

    threads, cuda = torch.get_num_threads(), "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    torch.set_num_threads(1 if smoke else os.cpu_count() or 1)  # as `vla serve`
    policy = make_policy(smolvlm(smoke), 2, figures.device, **recipe_of_base(smoke, 1)[1]).eval()
    config = copy.copy(policy.config)  # the policy is used up
    config.device = "cuda" if cuda else "cpu"
    inputs = {size: make_batch(policy, size, torch.device("cpu"), recorded=False) for size in BATCHES}
    with tempfile.TemporaryDirectory() as folder:
        with figures.row("exported", "export") as row:
            manifest = write_graphs(policy, make_batch(policy, 3, figures.device, recorded=False), Path(folder))
            row |= {"max_error": manifest.max_error, "cosine_served": manifest.cosine_served}
        del policy
        runtime = OnnxPolicy(Path(folder), config)
        for size in BATCHES:
            with figures.row("exported", f"batch {size}") as row:
                row["device"], batch = f"{'CUDA' if cuda else 'CPU'}ExecutionProvider", inputs[size]
                noise = torch.randn(size, runtime.horizon, runtime.noise_dim)
                row["ms"] = figures.median_ms(lambda: runtime.predict_action_chunk(batch, noise), 1 if smoke else 20)  # noqa: B023
    torch.set_num_threads(threads)


def onnx(figures: Figures, smoke: bool) -> None:
    """The shipped policy: torch, torch compiled, and ONNX Runtime on the provider that is there."""
    import onnxruntime

    from vla_stack.policies.onnx_export import export

    threads, cuda = torch.get_num_threads(), "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    torch.set_num_threads(1 if smoke else os.cpu_count() or 1)  # as `vla serve`
    source, there = resolve_policy("shipped"), figures.device.type
    with tempfile.TemporaryDirectory() as folder, tried_out(smoke):
        with figures.row("onnx", "export") as row:
            manifest = export(source, Path(folder) / "onnx")
            row |= {"cosine": manifest.cosine, "max_error": manifest.max_error, "threads": torch.get_num_threads()}
        runtime = there if cuda else "cpu"
        backends = {
            "torch": ("torch", source, there),
            "compiled": ("compile", source, there),
            "ONNX Runtime": ("onnx", Path(folder) / "onnx", runtime),
        }
        for name, (backend, path, device) in backends.items():
            for size in BATCHES:
                with figures.row("onnx", f"{name}, batch {size}") as row:
                    row["device"] = f"{'CUDA' if cuda else 'CPU'}ExecutionProvider" if backend == "onnx" else device
                    chunks = load_with(backend, path, device, batch_sizes=BATCHES)
                    seen = observations(chunks.spec, size)
                    row["ms"] = figures.median_ms(lambda: chunks.infer(seen, range(len(seen))), 1 if smoke else 20)  # noqa: B023
                    if backend != "onnx":  # whose memory torch does not see
                        row["peak_gb"] = figures.peak_gb()
    torch.set_num_threads(threads)
    torch.compiler.reset()


def observations(spec: PolicySpec, n: int) -> list[Observation]:
    """Random ones."""
    rng, robot = np.random.default_rng(0), spec.robot
    return [
        Observation(
            rng.normal(size=len(robot.state)).astype(np.float32),
            {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in robot.cameras},
            "pick up the red cube",
        )
        for _ in range(n)
    ]


def checks(figures: Figures) -> list[Check]:
    """The figures that a reader asks for."""
    found = figures.check("training, peak memory at batch 8, GB", "training", "batch 8", "peak_gb", 24.0)
    found += figures.check("training, peak memory at batch 32, GB", "training", "batch 32", "peak_gb")
    for size in (8, 32):
        found += figures.check(f"training, step at batch {size}, ms", "training", f"batch {size}", "step_ms")
    for section, title in (("base", "base"), ("pi05", "size of pi0.5")):
        for how in ("eager", "compiled"):
            for size in BATCHES:
                row = (section, f"{how}, batch {size}")
                found += figures.check(f"{title}, chunk, {how}, batch {size}, ms", *row, "ms")
                found += figures.check(f"{title}, peak memory, {how}, batch {size}, GB", *row, "peak_gb")
    for name, row in figures.sections.get("exported", {}).items():
        if "ms" in row:
            found.append(Check(f"base, chunk, ONNX Runtime, {row['device']}, {name}, ms", row["ms"]))
    for name, row in figures.sections.get("onnx", {}).items():
        if "ms" in row:
            found.append(Check(f"shipped policy, {name}, {row['device']}, ms", row["ms"]))
    return found


def main(arguments: list[str]) -> int:
    sections = {"training": training, "base": base, "pi05": pi05, "exported": exported, "onnx": onnx}
    return run("base_gpu", __doc__, sections, checks, arguments, seconds=270)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        sys.exit(str(e))
