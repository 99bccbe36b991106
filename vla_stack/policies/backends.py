"""What computes a served policy: torch as it is, torch compiled, or ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.continuation import continuing_modes
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.onnx_policy import MANIFEST
from vla_stack.schema import ACTION_DIM_IS_PAD

BACKENDS = ("torch", "compile", "onnx")


def load_with(
    backend: str, path: Path, device: str, embodiment: str | None = None, batch_sizes: tuple[int, ...] = ()
) -> ChunkPolicy:
    """A policy on one of ``BACKENDS``.

    Args:
        backend: ``compile`` compiles prefix and step of the sampler at the first batch of each size; ``onnx`` takes an
            exported policy.
        path: Policy directory.
        device: Torch device.
        embodiment: As for :func:`~vla_stack.policies.chunk_policy.load_policy`.
        batch_sizes: The sizes of batch that a compiled policy is given; others are filled up.

    Raises:
        UserError: The directory is not what the backend takes, or the policy is no flow policy.
    """
    exported = (path / MANIFEST).is_file()
    if backend == "onnx" and not exported:
        raise UserError(f"{path} holds no exported graphs", f"make them: vla export --policy {path} --out DIR")
    if backend != "onnx" and exported:
        raise UserError(f"{path} is an exported policy, '{backend}' needs its weights", "use --backend onnx")
    chunks = load_policy(path, device, embodiment, frozen=True)
    if backend == "compile":
        _compile(chunks)
        chunks.batch_sizes = batch_sizes
    return chunks


def _compile(chunks: ChunkPolicy) -> None:
    """Compile prefix and velocity apart: the first runs once an observation, the other at every step of the sampler."""
    policy: Any = chunks.policy
    if not continuing_modes(policy):
        raise UserError(f"a policy of type '{policy.config.type}' is not a flow policy", "use --backend torch")
    encode = torch.compile(policy.encode, dynamic=False)

    def encode_tensors(batch: dict[str, Any]) -> Any:
        # Without texts, e.g. the instruction, each of which would be compiled anew; the tokens are among the tensors.
        read = (k for k in batch if k.startswith("observation.") or k == ACTION_DIM_IS_PAD)
        return encode({k: batch[k] for k in read if isinstance(batch[k], Tensor)})

    policy.encode = encode_tensors
    if isinstance(policy, MohPolicy):  # a mixture's velocity, too, is made of its branches
        policy.mix = torch.compile(policy.mix, dynamic=False)  # type: ignore[method-assign]
    else:
        policy.velocity = torch.compile(policy.velocity, dynamic=False)
