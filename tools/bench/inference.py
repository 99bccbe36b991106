"""A chunk as one graph, as far as that can be told without a GPU.

    python tools/bench/inference.py

A policy of pi0.5's depth (PaliGemma, three cameras, ten steps), one of SmolVLA's (SmolVLM2, two) and the shipped native
one. Each is made ready for inference, as a server does it. Counted is what a GPU would be asked for, with tensors that
say they lie on one and hold nothing: reading one, which would wait for the GPU, raises. A break of the graph is a place
in an evaluation of the velocity where a compiler has to fall back to Python. The chunk is compared with the one of the
policy as it was trained. Widths are as small as can be: they change no count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from base_gpu_onnx import observations
from base_models import deep_paligemma, deep_smolvlm, make_batch, make_policy
from counting import Launched, OneAttention, on_fake_gpu
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import PreTrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.modeling_vla import VlaPolicy

HORIZON = 50


def on_backbone(deep: Callable[[], PreTrainedConfig], cameras: int) -> VlaPolicy:
    """A narrow policy on a backbone of the usual depth; weights of a trained one's scale."""
    options = {"expert_width": 64, "chunk_size": HORIZON, "max_tokens": 48, "train_backbone": "expert_only"}
    policy = make_policy(deep(), cameras, torch.device("cpu"), **options).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.ndim > 1:
                scale = p.shape[-1] ** -0.5 * (0.3 if "modulation" in name else 1.0)
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
    return policy


def noise(policy: VlaPolicy, n: int) -> torch.Tensor:
    return torch.randn(n, policy.horizon, policy.noise_dim, generator=torch.Generator().manual_seed(1))


def chunks(policy: VlaPolicy, batch: dict[str, Any], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the policy as trained and made ready, [n, h, a]; ready it stays."""
    x = noise(policy, n)
    with torch.no_grad():
        plain = policy.predict_action_chunk(batch, noise=x)
        policy.for_inference()
        return plain, policy.predict_action_chunk(batch, noise=x)


def breaks(policy: VlaPolicy, batch: dict[str, Any], n: int) -> int:
    """Places where a compiler leaves the graph of an evaluation of the velocity."""
    velocity, calls = policy.unrolled.velocity, []
    policy.unrolled.velocity = lambda *args: calls.append(args) or velocity(*args)
    try:
        with torch.inference_mode():
            policy.unrolled.sample(policy.encode(batch), noise(policy, n))
            torch._dynamo.reset()
            return torch._dynamo.explain(velocity)(*calls[0]).graph_break_count
    finally:
        policy.unrolled.velocity = velocity


def launched(policy: VlaPolicy, batch: dict[str, Any]) -> tuple[int, int]:
    """Operations of a chunk, and whether something would have waited for the GPU."""
    with FakeTensorMode() as mode, torch.no_grad(), torch.device("cuda"):
        on_fake_gpu(policy, mode).for_inference()
        batch = {k: mode.from_tensor(v).to("cuda") for k, v in batch.items()}
        x = torch.zeros(1, policy.horizon, policy.noise_dim)
        try:
            with OneAttention(), Launched() as counted:
                policy.predict_action_chunk(batch, noise=x)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return counted.count, 1
        return counted.count, 0


def main() -> None:
    checks = []
    for name, deep, cameras, bound in (
        ("pi0.5's depth, three cameras", deep_paligemma, 3, 3000),
        ("SmolVLA's depth, two cameras", deep_smolvlm, 2, None),
    ):
        policy = on_backbone(deep, cameras)
        batch = make_batch(policy, 2, torch.device("cpu"), recorded=False)
        x = noise(policy, 2)
        plain, ready = ((one - x).flatten(1).double() for one in chunks(policy, batch, 2))
        cosine = torch.cosine_similarity(ready, plain).min().item()
        broken = breaks(policy, batch, 2)
        operations, waits = launched(
            on_backbone(deep, cameras), {k: v[:1] for k, v in batch.items() if isinstance(v, torch.Tensor)}
        )
        checks += [
            Check(f"{name}: operations of a chunk", operations, bound, "<="),
            Check(f"{name}: calls that wait for the GPU", waits, 0, "<="),
            Check(f"{name}: breaks of the graph of a velocity", broken, 0, "<="),
            Check(f"{name}: cosine of its chunk and the one of the policy as trained", cosine, 0.9999),
        ]
    shipped = load_policy("shipped")
    batch = shipped.preprocess(observations(shipped.spec, 2))
    plain, ready = chunks(shipped.policy, batch, 2)
    broken = breaks(shipped.policy, batch, 2)
    one = {k: v[:1] for k, v in batch.items() if isinstance(v, torch.Tensor)}
    operations, waits = launched(load_policy("shipped").policy, one)
    checks += [
        Check("native: operations of a chunk", operations, None, "<="),
        Check("native: calls that wait for the GPU", waits, 0, "<="),
        Check("native: breaks of the graph of a velocity", broken, 0, "<="),
        Check("native: largest difference of a normalised action", (ready - plain).abs().max().item(), 1e-5, "<="),
    ]
    write("inference", checks, {}, seeds=[0])


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
