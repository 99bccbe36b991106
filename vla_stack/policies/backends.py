"""What computes a served policy: torch as it is, compiled, compiled and captured as one graph, or ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vla_stack.errors import UserError
from vla_stack.policies.captured import CapturedSampler, tensors_read
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.continuation import continuing_modes
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.onnx_files import check_backend

BACKENDS = ("torch", "compile", "graph", "onnx")


def load_with(
    backend: str, path: Path, device: str, embodiment: str | None = None, batch_sizes: tuple[int, ...] = ()
) -> ChunkPolicy:
    """A policy on one of ``BACKENDS``.

    Args:
        backend: ``compile`` compiles prefix and step of the sampler at the first batch of each size; ``graph`` then
            replays a chunk as one CUDA graph; ``onnx`` takes an exported policy.
        path: Policy directory.
        device: Torch device.
        embodiment: As for :func:`~vla_stack.policies.chunk_policy.load_policy`.
        batch_sizes: The sizes of batch that a compiled or captured policy is given; others are filled up.

    Raises:
        UserError: The directory is not what the backend takes, the policy is no flow policy, or the device has no
            graphs.
    """
    check_backend(backend, path)
    chunks = load_policy(path, device, embodiment, frozen=True, graphs=backend == "onnx")
    if backend in ("compile", "graph"):
        _compile(chunks)
        chunks.batch_sizes = batch_sizes
    if backend == "graph":
        _capture(chunks)
    return chunks


def _compile(chunks: ChunkPolicy) -> None:
    """Compile prefix and velocity apart: the first runs once an observation, the other at every step of the sampler."""
    policy: Any = chunks.policy
    if not continuing_modes(policy):
        raise UserError(f"a policy of type '{policy.config.type}' is not a flow policy", "use --backend torch")
    encode = torch.compile(policy.encode, dynamic=False)
    policy.encode = lambda batch: encode(tensors_read(batch))  # each text would be compiled anew
    if isinstance(policy, MohPolicy):  # a mixture's velocity, too, is made of its branches
        policy.mix = torch.compile(policy.mix, dynamic=False)  # type: ignore[method-assign]
    else:
        policy.velocity = torch.compile(policy.velocity, dynamic=False)
    if isinstance(policy, VlaPolicy) and policy.unrolled is not None:
        policy.unrolled.velocity = torch.compile(policy.unrolled.velocity, dynamic=False)  # type: ignore[method-assign]


def _capture(chunks: ChunkPolicy) -> None:
    """Replay a chunk, prefix and all steps of the sampler, as one graph. What guides the sampler stays compiled."""
    policy: Any = chunks.policy
    device = torch.device(policy.config.device)
    if device.type != "cuda":
        raise UserError(f"--backend graph needs a CUDA device, not {device}", "use --backend torch, or export to ONNX")
    if isinstance(policy, MohPolicy):  # a robot asks how much its branches agree, on the host
        raise UserError("a mixture of horizons is not captured", "use --backend compile")
    policy.predict_action_chunk = CapturedSampler(policy.predict_action_chunk)
