"""Sections of ``base_gpu.py`` that ONNX Runtime computes."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from base_models import BATCHES, make_batch, make_policy, recipe_of_base, smolvlm
from gpu_bench import Figures, tried_out

from vla_stack.policies.backends import load_with
from vla_stack.policies.directory import resolve_policy
from vla_stack.schema import Observation, PolicySpec


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
