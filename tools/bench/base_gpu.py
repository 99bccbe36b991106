"""The preset ``base`` on a GPU: training step time and memory; latency of one chunk, also at the size of pi0.5.

    python tools/bench/base_gpu.py                  # writes docs/results/base_gpu.json
    python tools/bench/base_gpu.py --only base exported --out FILE
    python tools/bench/base_gpu.py --smoke          # the same code on a CPU, tiny models, nothing written

Weights are random: neither time nor memory depends on them, and no download is needed. Times are medians, GB are 10^9
bytes.

training: recipe ``base`` with a backbone of the size of SmolVLM2-500M (two cameras, adapters, bfloat16); a step
is loss, backward pass, clipping and AdamW on data that is on the device. Its *share of the peak* is its arithmetic, as
``torch.utils.flop_counter`` counts it, over what a large product of matrices in bfloat16 does in the same time.
base: one chunk of that policy. pi05: one chunk of a policy with a PaliGemma-3B backbone, an expert of width 1024, a
prompt of 200 tokens with the state in it, three cameras, 50 actions and 10 Euler steps, as pi0.5.
exported: that of base as ``vla export`` writes it, in float32, on the provider that is there.
onnx: the shipped policy, torch beside ONNX Runtime; here times are of ``ChunkPolicy.infer``, processors included.

Policies compute as ``vla serve`` has them: after ``for_inference``, matrices in bfloat16 and the rest in float32, and
arithmetic in bfloat16 by autocast, whatever ``native_precision`` says. *compiled* is what ``--backend compile`` does:
prefix and velocity by ``torch.compile(dynamic=False)``, anew for each size of batch, without CUDA graphs. *captured*
and *graph* are the whole chunk as one CUDA graph, of eager and of compiled operations; the latter is ``--backend
graph``. *stock* is LeRobot's own pi0.5 with weights of the same sizes, its own sampler, in bfloat16. Pictures are
floats, as the server passes them; processors are outside of the times of base and pi05. How busy the host is stands in
each row.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vla_stack.errors import UserError
from vla_stack.policies.backends import _compile
from vla_stack.policies.captured import CapturedSampler, Sampler
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import ACTION, OBS_STATE, image_key
from vla_stack.training.memory import estimate
from vla_stack.training.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]
from base_gpu_onnx import exported, onnx  # noqa: E402
from base_models import ACTIONS, BATCHES, STATES, make_batch, make_policy, paligemma, recipe_of_base, smolvlm  # noqa: E402
from gpu_bench import GB, Figures, run, tried_out  # noqa: E402

from results import Check  # noqa: E402


def training(figures: Figures, smoke: bool) -> None:
    """Step time and peak memory of recipe ``base``."""
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
    peak_gb, memory = figures.peak_gb(), estimate(policy, recipe)
    with FlopCounterMode(display=False) as counter:
        step()
    operations = counter.get_total_flops()
    return {
        "batch_size": batch_size,
        "step_ms": milliseconds,
        "tflop": operations / 1e12,
        "share_of_peak": operations / (1e-3 * milliseconds) / peak_rate(figures, smoke),
        "peak_gb": peak_gb,
        # The average of the weights is the loop's and is not held here.
        "estimated_gb": (memory.total - memory.average) / GB,
        "parameters_m": sum(p.numel() for p in policy.parameters()) / 1e6,
    }


def peak_rate(figures: Figures, smoke: bool) -> float:
    """Operations a second of a large product of matrices in bfloat16."""
    side = 64 if smoke else 8192
    a, b = torch.randn(2, side, side, device=figures.device, dtype=torch.bfloat16)
    return 2 * side**3 / (1e-3 * figures.median_ms(lambda: a @ b, 1 if smoke else 50))


def base(figures: Figures, smoke: bool) -> None:
    """Chunks of the policy of recipe ``base``, adapters in place, as a checkpoint has them."""
    served(
        figures, "base", smoke, lambda: make_policy(smolvlm(smoke), 2, figures.device, **recipe_of_base(smoke, 1)[1])
    )


def pi05(figures: Figures, smoke: bool) -> None:
    """Chunks at the size of pi0.5."""
    sizes = {"chunk_size": 50, "max_tokens": 20 if smoke else 200, "expert_width": 32 if smoke else 1024}
    options = {"train_backbone": "expert_only", "state_input": "prompt", "num_inference_steps": 2 if smoke else 10}
    served(figures, "pi05", smoke, lambda: make_policy(paligemma(smoke), 3, figures.device, **sizes, **options))
    stock(figures, smoke)


def stock(figures: Figures, smoke: bool) -> None:
    """LeRobot's own pi0.5, its sampler included, on pictures and a prompt of the same sizes."""
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    with figures.row("pi05", "stock, batch 1") as row:
        keys = [image_key(name) for name in ("front", "wrist", "side")]
        config = PI05Config(
            device=figures.device.type,
            dtype="float32" if smoke else "bfloat16",
            push_to_hub=False,
            **({"paligemma_variant": "gemma_300m", "num_inference_steps": 1} if smoke else {}),
            input_features={
                **{key: PolicyFeature(FeatureType.VISUAL, (3, 224, 224)) for key in keys},
                OBS_STATE: PolicyFeature(FeatureType.STATE, (STATES,)),
            },
            output_features={ACTION: PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
        )
        if smoke:  # three billion weights are too many for a try
            row["skipped"] = "smoke"
            return
        with torch.device(figures.device):
            policy = PI05Policy(config).to(figures.device).eval()
        words = torch.randint(0, 60, (1, 200), device=figures.device)
        batch = {key: torch.rand(1, 3, 224, 224, device=figures.device) for key in keys} | {
            OBS_LANGUAGE_TOKENS: words,
            OBS_LANGUAGE_ATTENTION_MASK: torch.ones_like(words, dtype=torch.bool),
        }
        with torch.inference_mode():
            row["ms"] = figures.median_ms(lambda: policy.predict_action_chunk(batch), 20)
        row |= {"peak_gb": figures.peak_gb(), "busy_cores": os.getloadavg()[0]}


def served(figures: Figures, section: str, smoke: bool, make: Callable[[], VlaPolicy]) -> None:
    """Latency and peak memory of one chunk, eager and compiled, at each size of batch."""
    policy: VlaPolicy | None = None
    with figures.row(section, "weights") as row:
        policy = make().eval()
        policy.for_inference()
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
            figure, moved[size] = latency(figures, policy.predict_action_chunk, inputs[size], 1 if smoke else 20)
            row |= figure
        captured(figures, section, f"captured, batch {size}", policy, inputs[size], moved.get(size), smoke)
    _compile(SimpleNamespace(policy=policy))  # type: ignore[arg-type]  of a ChunkPolicy it reads this attribute alone
    with tried_out(smoke):
        for size in BATCHES:
            with figures.row(section, f"compiled, batch {size}") as row:
                compiled = counted()
                figure, again = latency(figures, policy.predict_action_chunk, inputs[size], 1 if smoke else 20)
                row |= figure | {"graphs": (counted() - compiled)["graphs"], "breaks": (counted() - compiled)["breaks"]}
                if size in moved:
                    row["cosine_with_eager"] = torch.cosine_similarity(moved[size], again, dim=0).item()
            captured(figures, section, f"graph, batch {size}", policy, inputs[size], moved.get(size), smoke)
    torch.compiler.reset()


def captured(
    figures: Figures,
    section: str,
    name: str,
    policy: VlaPolicy,
    batch: dict[str, Any],
    eager: Tensor | None,
    smoke: bool,
) -> None:
    """A row of the whole chunk as one graph; a smoke run calls the function in the graph's place."""
    with figures.row(section, name) as row:
        how = {"capture": uncaptured} if smoke else {}
        figure, again = latency(figures, CapturedSampler(policy.predict_action_chunk, **how), batch, 1 if smoke else 20)
        row |= figure
        if eager is not None:
            row["cosine_with_eager"] = torch.cosine_similarity(eager, again, dim=0).item()


def uncaptured(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
    """In a graph's place where there is no GPU."""
    out = run().clone()
    return out, lambda: out.copy_(run())


def latency(figures: Figures, sample: Sampler, batch: dict[str, Any], repeats: int) -> tuple[dict[str, float], Tensor]:
    """Figures of one chunk an observation, and how far it led away from the noise, flat, on the CPU.

    Raises:
        RuntimeError: The chunk is not finite, or graphs were compiled again after the first call.
    """
    generator = torch.Generator(figures.device).manual_seed(0)
    size = batch[ACTION].shape
    with torch.inference_mode():  # as ChunkPolicy.infer, noise included: another kind of tensor is another graph
        noise = torch.randn(size, generator=generator, device=figures.device)
        batch = {k: v.clone() for k, v in batch.items()}
        begin = time.perf_counter()
        chunk = sample(batch, noise)
        figures.synchronize()
        row = {"first_s": time.perf_counter() - begin}
        before = counted()
        row["ms"] = figures.median_ms(lambda: sample(batch, noise), repeats)
        row |= {"peak_gb": figures.peak_gb(), "busy_cores": os.getloadavg()[0]}
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


def checks(figures: Figures) -> list[Check]:
    """The figures that a reader asks for."""
    found = figures.check("training, peak memory at batch 8, GB", "training", "batch 8", "peak_gb", 24.0)
    found += figures.check("training, peak memory at batch 32, GB", "training", "batch 32", "peak_gb")
    for size in (8, 32):
        found += figures.check(f"training, step at batch {size}, ms", "training", f"batch {size}", "step_ms")
        bound, name = 0.35 if size == 32 else None, f"training, share of the peak at batch {size}"
        found += figures.check(name, "training", f"batch {size}", "share_of_peak", bound, ">=")
    for section, title in (("base", "base"), ("pi05", "size of pi0.5")):
        for how in ("eager", "captured", "compiled", "graph"):
            for size in BATCHES:
                row = (section, f"{how}, batch {size}")
                found += figures.check(f"{title}, chunk, {how}, batch {size}, ms", *row, "ms")
                found += figures.check(f"{title}, peak memory, {how}, batch {size}, GB", *row, "peak_gb")
    found += figures.check("size of pi0.5, chunk, LeRobot's own, batch 1, ms", "pi05", "stock, batch 1", "ms")
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
