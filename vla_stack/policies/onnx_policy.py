"""Inference of an exported policy by ONNX Runtime: one graph of the whole chunk, or prefix and sampler step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.policies import flow
from vla_stack.policies.contract import NoisePolicy
from vla_stack.policies.onnx_files import CHUNK, FIXED, IS_FIXED, PREFIX, STEP, device_of, open_graph, read_manifest


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
        self.manifest = read_manifest(directory)
        self.noise_dim, self.action_dim = self.manifest.noise_dim, self.manifest.action_dim
        self.max_delay, self.horizon = self.manifest.max_delay, self.manifest.horizon
        self.noise_scale = self.manifest.noise_scale
        device = str(config.device) if str(config.device).startswith("cuda") else "cpu"
        self._device = device_of(device)
        self._sessions = {
            name: open_graph(directory / name, device, torch.get_num_threads()) for name in self.manifest.graphs
        }

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
            encode.bind_output(output.name, *self._device)
        first.run_with_iobinding(encode)
        context = dict(zip((o.name for o in first.get_outputs()), encode.get_outputs(), strict=True))

        step, b, n = sampler.io_binding(), len(x), self.manifest.inference_steps
        for name, value in context.items():
            step.bind_ortvalue_input(name, value)
        constant = {**given, "dt": np.full(b, 1.0 / n, np.float32)}
        for name, array in constant.items():
            step.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array, *self._device))
        now, after = (OrtValue.ortvalue_from_numpy(x.copy(), *self._device) for _ in range(2))
        for i in range(n):
            step.bind_cpu_input("t", np.full(b, 1.0 - i / n, np.float32))
            step.bind_ortvalue_input("x", now)
            step.bind_ortvalue_output("x_next", after)
            sampler.run_with_iobinding(step)
            now, after = after, now
        return torch.from_numpy(now.numpy().copy())[..., : self.action_dim]
