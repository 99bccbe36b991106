"""A flow policy as two ONNX graphs: the prefix, once an observation, and one step of the sampler.

The loop over steps stays outside, so that one pair of graphs serves any number of steps, and the prefix is computed
once. The second graph is the whole Euler step, fixed action prefix included: nothing but its own output has to be
handed back to it, which never leaves the device. Batch sizes are dynamic, everything else is static.
"""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.continuation import continuing_modes
from vla_stack.policies.onnx_policy import MANIFEST, PREFIX, STEP, Manifest, OnnxPolicy
from vla_stack.policies.transformer import PrefixContext
from vla_stack.policies.weights import find_weights
from vla_stack.schema import Observation

LARGEST_INLINE = 1 << 30  # bytes of weights inside a graph file; protobuf ends at 2 GiB


class PrefixGraph(nn.Module):
    """Preprocessed tensors to keys, values and mask."""

    def __init__(self, policy: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.policy, self.names = policy, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        context = self.policy.encode(dict(zip(self.names, tensors, strict=True)))
        return (context.mask, *(tensor for pair in context.keys_values for tensor in pair))


class StepGraph(nn.Module):
    """One Euler step of :func:`vla_stack.policies.flow.euler`."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self,
        x: Float[Tensor, "b h a"],
        t: Float[Tensor, " b"],
        dt: Float[Tensor, " b"],
        fixed: Float[Tensor, "b h a"],
        is_fixed: Bool[Tensor, "b h"],
        mask: Bool[Tensor, "b n"],
        *keys_values: Tensor,
    ) -> Tensor:
        context = PrefixContext(tuple(zip(keys_values[::2], keys_values[1::2], strict=True)), mask, mask[:, :0].float())
        x = torch.where(is_fixed[..., None], fixed, x)
        v = self.policy.velocity(context, x, torch.where(is_fixed, 0.0, t[:, None]))
        return torch.where(is_fixed[..., None], fixed, x - dt[:, None, None] * v)


def export(source: Path, out: Path) -> Manifest:
    """Write the graphs of a policy beside its configuration and processors.

    Args:
        source: Policy directory.
        out: New directory, which :func:`~vla_stack.policies.chunk_policy.load_policy` opens like any other.

    Raises:
        UserError: It is no flow policy, or the exported graphs do not compute what the policy does.
    """
    chunks = load_policy(source)
    policy: Any = chunks.policy
    if not continuing_modes(policy):
        raise UserError(f"a policy of type '{policy.config.type}' is not a flow policy", "only flow policies export")
    batch = example(chunks)
    names = tuple(key for key, value in batch.items() if isinstance(value, Tensor) and key.startswith("observation."))
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        context = policy.encode(batch)
        layers = len(context.keys_values)
        kv = [f"{kind}_{i}" for i in range(layers) for kind in ("k", "v")]
        _write(PrefixGraph(policy, names), tuple(batch[n] for n in names), names, ("mask", *kv), out / PREFIX)
        b, h, a = len(context.mask), policy.horizon, policy.noise_dim
        x, t, is_fixed = torch.randn(b, h, a), torch.full((b,), 0.5), torch.zeros(b, h, dtype=torch.bool)
        tensors = (x, t, t * 0.2, torch.zeros_like(x), is_fixed, context.mask)
        flat = tuple(tensor for pair in context.keys_values for tensor in pair)
        inputs = ("x", "t", "dt", "fixed", "is_fixed", "mask", *kv)
        _write(StepGraph(policy), (*tensors, *flat), inputs, ("x_next",), out / STEP)
    weights = find_weights(source)
    for file in source.iterdir():
        if file.is_file() and file != weights and file.suffix in (".json", ".safetensors", ".txt", ".model"):
            shutil.copy(file, out / file.name)
    max_delay, dim = getattr(policy, "max_delay", 0), policy.action_dim
    manifest = Manifest(names, layers, h, a, dim, policy.inference_steps, max_delay)
    (out / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    manifest = compare(chunks, out, manifest)
    (out / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def compare(chunks: ChunkPolicy, out: Path, manifest: Manifest) -> Manifest:
    """The manifest with how far the graphs are from the policy; UserError if they are not the same function."""
    batch = example(chunks, 3)  # another number than they were traced with
    noise = torch.randn(3, manifest.horizon, manifest.noise_dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = chunks.policy.predict_action_chunk(batch, noise=noise).float()
    got = OnnxPolicy(out, chunks.policy.config).predict_action_chunk(batch, noise=noise)
    cosine = torch.nn.functional.cosine_similarity(wanted.flatten(1), got.flatten(1)).min().item()
    error = (wanted - got).abs().max().item()
    if not cosine >= 0.999:
        raise UserError(f"the graphs in {out} do not compute what the policy does (cosine {cosine:.4f})")
    return replace(manifest, cosine=cosine, max_error=error)


def example(chunks: ChunkPolicy, n: int = 2) -> dict[str, Any]:
    """A preprocessed batch of random observations."""
    rng, robot = np.random.default_rng(0), chunks.spec.robot
    observations = [
        Observation(
            rng.normal(size=len(robot.state)).astype(np.float32),
            {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in robot.cameras},
            "pick up the red cube",
        )
        for _ in range(n)
    ]
    with torch.no_grad():
        return chunks.preprocess(observations)


def _write(
    module: nn.Module, tensors: tuple[Tensor, ...], inputs: tuple[str, ...], outputs: tuple[str, ...], file: Path
) -> None:
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    batch = {0: torch.export.Dim("batch")}
    variadic = module.forward.__code__.co_argcount - 1  # *args are one entry of the shapes' tree
    fixed, rest = tensors[:variadic], tensors[variadic:]
    shapes = (*(batch for _ in fixed), tuple(batch for _ in rest))
    with warnings.catch_warnings():  # the exporter's own, about its internals
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tensors,
            file,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=size > LARGEST_INLINE,
            verbose=False,
        )
