"""Inference of an exported policy by ONNX Runtime: one graph of the whole chunk, or prefix and sampler step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.policies import flow
from vla_stack.policies.contract import NoisePolicy
from vla_stack.policies.directory import read_json

PREFIX, STEP, CHUNK, MANIFEST = "prefix.onnx", "step.onnx", "chunk.onnx", "onnx.json"
FIXED, IS_FIXED = "fixed", "is_fixed"  # inputs of a graph whose policy takes an action prefix


@dataclass(frozen=True)
class Manifest:
    """What the graphs do not say themselves.

    Attributes:
        graphs: Their files: prefix and sampler step, or the whole chunk.
        inputs: Names of the preprocessed tensors that the first graph takes, in order; the whole chunk's also takes
            ``noise``.
        horizon: Steps of a chunk.
        noise_dim: Entries of the noise.
        noise_scale: Its standard deviation.
        action_dim: Entries of an action.
        inference_steps: Euler steps of a chunk, inside the graph where there is one; 0 of a policy on states.
        max_delay: Longest action prefix in steps, 0 if the policy takes none.
        cosine: Least cosine between exported and original actions on random observations, both in float32.
        max_error: Largest difference between them, normalised actions.
        cosine_served: Least cosine between the original's actions in float32 and in its own arithmetic, which is
            bfloat16 with most backbones.
    """

    graphs: tuple[str, ...]
    inputs: tuple[str, ...]
    horizon: int
    noise_dim: int
    noise_scale: float
    action_dim: int
    inference_steps: int
    max_delay: int
    cosine: float = 1.0
    max_error: float = 0.0
    cosine_served: float = 1.0


class OnnxPolicy(NoisePolicy):
    """What :class:`~vla_stack.policies.chunk_policy.ChunkPolicy` needs of a policy, from its graphs.

    Args:
        directory: Made by :func:`vla_stack.policies.onnx_export.export`.
        config: Its configuration; ``config.device`` says where to compute.

    Raises:
        UserError: A file is missing or is not a graph, or there is no CUDA provider for a CUDA device.
    """

    def __init__(self, directory: Path, config: PreTrainedConfig) -> None:
        self.config = config
        try:
            self.manifest = Manifest(**read_json(directory / MANIFEST))
            if self.manifest.graphs not in ([PREFIX, STEP], [CHUNK]):  # as JSON has it; no other name is opened
                raise TypeError(f"its graphs are {self.manifest.graphs}")
        except (TypeError, json.JSONDecodeError) as e:
            raise UserError(f"{directory / MANIFEST} is damaged: {e}", "export the policy again") from None
        self.noise_dim, self.action_dim = self.manifest.noise_dim, self.manifest.action_dim
        self.max_delay, self.horizon = self.manifest.max_delay, self.manifest.horizon
        self.noise_scale = self.manifest.noise_scale
        self._device = "cuda" if str(config.device).startswith("cuda") else "cpu"
        self._sessions = {name: _session(directory / name, self._device) for name in self.manifest.graphs}

    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor, prefix: flow.ActionPrefix | None = None
    ) -> Float[Tensor, "b h a"]:
        """Sample one normalised chunk an observation from ``noise`` [b, h, noise_dim]."""
        seen = {name: batch[name].cpu().contiguous().numpy() for name in self.manifest.inputs}
        x = np.ascontiguousarray(noise.float().cpu().numpy())
        fixed, is_fixed = np.zeros_like(x), np.zeros(x.shape[:2], bool)
        if prefix is not None:
            fixed = np.ascontiguousarray(prefix.actions.float().cpu().numpy())
            is_fixed = np.ascontiguousarray(prefix.mask.cpu().numpy())
        given = {FIXED: fixed, IS_FIXED: is_fixed}
        if whole := self._sessions.get(CHUNK):
            taken = given if self.max_delay else {}
            return torch.from_numpy(whole.run(None, {**seen, **taken, "noise": x})[0])
        return self._sample(seen, x, given)

    def _sample(
        self, seen: dict[str, NDArray[Any]], x: NDArray[np.float32], given: dict[str, NDArray[Any]]
    ) -> Float[Tensor, "b h a"]:
        """The end of the flow; what the prefix gives and the sampler's state never leave the device."""
        from onnxruntime import OrtValue

        first, sampler = self._sessions[PREFIX], self._sessions[STEP]
        encode = first.io_binding()
        for name, array in seen.items():
            encode.bind_cpu_input(name, array)
        for output in first.get_outputs():
            encode.bind_output(output.name, self._device)
        first.run_with_iobinding(encode)
        context = dict(zip((o.name for o in first.get_outputs()), encode.get_outputs(), strict=True))

        step, b, n = sampler.io_binding(), len(x), self.manifest.inference_steps
        for name, value in context.items():
            step.bind_ortvalue_input(name, value)
        constant = {**given, "dt": np.full(b, 1.0 / n, np.float32)}
        for name, array in constant.items():
            step.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array, self._device))
        now, after = (OrtValue.ortvalue_from_numpy(x.copy(), self._device) for _ in range(2))
        for i in range(n):
            step.bind_cpu_input("t", np.full(b, 1.0 - i / n, np.float32))
            step.bind_ortvalue_input("x", now)
            step.bind_ortvalue_output("x_next", after)
            sampler.run_with_iobinding(step)
            now, after = after, now
        return torch.from_numpy(now.numpy().copy())[..., : self.action_dim]


def _session(file: Path, device: str) -> Any:
    import onnxruntime as ort  # takes a while; most policies are not exported ones

    if not file.is_file():
        raise UserError(f"{file} is missing", "export the policy again with `vla export`")
    providers = ["CPUExecutionProvider"]
    if device == "cuda":
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise UserError(
                "ONNX Runtime has no CUDA provider here", 'pip install "vla-stack[gpu]"; or use --device cpu'
            )
        providers.insert(0, "CUDAExecutionProvider")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = ort.InferenceSession(str(file), options, providers=providers)
    except Exception as e:  # the runtime's exceptions have no public common class
        raise UserError(f"{file} cannot be run: {str(e).splitlines()[0]}", "export the policy again") from None
    if session.get_providers()[0] != providers[0]:  # which it says in a log alone
        raise UserError("ONNX Runtime cannot load its CUDA provider", "install its CUDA libraries, or use --device cpu")
    return session
