"""The files of an exported policy, without torch: what they are called, what ``onnx.json`` says, how a graph is run.

A policy is exported to a directory of its own, or its graph is put beside its weights; of the latter a CPU computes the
graph, which takes half the time, unless a backend is named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.policies.directory import WEIGHTS, read_json

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
        plain: What surrounds the graph, where that is simple enough to do without torch, see
            :mod:`vla_stack.policies.plain_policy`.
        int8: Whether products of matrices are computed in 8 bits.
        weights: SHA-256 of the weights beside which the graph lies, of which it was made; empty without any.
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
    plain: dict[str, Any] | None = None
    int8: bool = False
    weights: str = ""


def read_manifest(directory: Path) -> Manifest:
    """``onnx.json`` of an exported policy.

    Raises:
        UserError: It is missing or damaged.
    """
    try:
        manifest = Manifest(**read_json(directory / MANIFEST))
        if manifest.graphs not in ([PREFIX, STEP], [CHUNK]):  # as JSON has it; no other name is opened
            raise TypeError(f"its graphs are {manifest.graphs}")
    except (TypeError, json.JSONDecodeError) as e:
        raise UserError(f"{directory / MANIFEST} is damaged: {e}", "export the policy again") from None
    return manifest


def replaces_weights(directory: Path) -> bool:
    """Whether a directory holds graphs and no weights."""
    return (directory / MANIFEST).is_file() and not (directory / WEIGHTS).is_file()


def default_backend(directory: Path, device: str) -> str:
    """What computes a served policy where nobody says: its graph, where there is nothing else or no GPU."""
    graph = (directory / MANIFEST).is_file() and device == "cpu"
    return "onnx" if graph or replaces_weights(directory) else "torch"


def check_graph(manifest: Manifest, directory: Path, weights: str) -> None:
    """Whether a graph was made of the weights beside it, by their SHA-256; empty without any.

    Raises:
        UserError: It was made of others.
    """
    if manifest.weights != weights:
        what = f"{directory / CHUNK} was made of other weights than those beside it"
        raise UserError(what, f"vla export --policy {directory}; or --backend torch")


def check_backend(backend: str | None, directory: Path) -> None:
    """Whether a backend takes what is in a directory; None is any.

    Raises:
        UserError: ONNX Runtime would need an exported policy, or another backend the weights of one.
    """
    if backend == "onnx" and not (directory / MANIFEST).is_file():
        remedy = f"make them: vla export --policy {directory}"
        raise UserError(f"{directory} holds no exported graphs", remedy)
    if backend not in (None, "onnx") and replaces_weights(directory):
        raise UserError(f"{directory} is an exported policy, '{backend}' needs its weights", "use --backend onnx")


def open_graph(file: Path, device: str, threads: int) -> Any:
    """A graph as a session of ONNX Runtime, on ``cpu``, ``cuda`` or one of several GPUs, ``cuda:1``.

    Raises:
        UserError: It is missing or no graph, or there is no CUDA provider for a CUDA device.
    """
    import onnxruntime as ort  # takes a while; most policies are not exported ones

    if not file.is_file():
        raise UserError(f"{file} is missing", "export the policy again with `vla export`")
    providers: list[Any] = ["CPUExecutionProvider"]
    kind, index = device_of(device)
    if kind == "cuda":
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise UserError(
                "ONNX Runtime has no CUDA provider here", 'pip install "vla-stack[gpu]"; or use --device cpu'
            )
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": index}))
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that spin while they wait take the robot's core: on a busy machine a chunk took twice as long.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(str(file), options, providers=providers)
    except Exception as e:  # the runtime's exceptions have no public common class
        raise UserError(f"{file} cannot be run: {str(e).splitlines()[0]}", "export the policy again") from None
    if kind == "cuda" and session.get_providers()[0] != "CUDAExecutionProvider":  # which it says in a log alone
        raise UserError("ONNX Runtime cannot load its CUDA provider", "install its CUDA libraries, or use --device cpu")
    return session


def device_of(name: str) -> tuple[str, int]:
    """Kind and index of a device as ONNX Runtime takes them, by torch's name of it."""
    kind, _, index = name.partition(":")
    return kind, int(index or 0)
