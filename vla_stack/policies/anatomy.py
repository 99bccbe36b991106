"""What a policy is made of, reads and answers, and what it costs on this machine; behind ``vla policy info``."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_stack.lerobot_core import NormalizerProcessorStep
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.onnx_policy import OnnxPolicy
from vla_stack.policies.processor_embodiment import EmbodimentInputStep
from vla_stack.schema import IMAGE_TOKENS, Observation

WARM_UP = 2
# The statistics that a normalisation uses.
USED = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


def describe(policy: ChunkPolicy) -> dict[str, Any]:
    """Parameters, features and horizons of a policy, as plain JSON data."""
    config, spec, network = policy.policy.config, policy.spec, policy.policy
    exported = isinstance(network, OnnxPolicy)  # graphs, whose weights are not ours to count
    return {
        "type": config.type,
        "class": f"{type(policy.policy).__module__}.{type(policy.policy).__name__}",
        "model_version": spec.model_version,
        "robot": spec.robot.to_json(),
        "embodiment": spec.extras.get("embodiment"),
        "embodiments": [e["name"] for e in getattr(config, "embodiments", ())],
        "parameters": {} if exported else parameters(network),
        "inputs": [feature(policy, key) for key in config.input_features or {}],
        "outputs": [feature(policy, key) for key in config.output_features or {}],
        "relative_actions": bool(getattr(config, "use_relative_actions", False)),
        "horizon": spec.horizon,
        "executed": spec.extras.get("n_action_steps"),
        "horizons": list(getattr(config, "horizons", ())),
        "euler_steps": network.manifest.inference_steps if exported else euler_steps(network),
        "weights_bytes": {} if exported else weight_bytes(network),
    }


def parameters(policy: nn.Module) -> dict[str, Any]:
    """Numbers of parameters: all, those that training changes, and both by part."""
    whole, by_part = count(policy), {name: count(part) for name, part in parts(policy)}
    rest = {key: whole[key] - sum(part[key] for part in by_part.values()) for key in whole}
    if rest["total"]:
        by_part["(other)"] = rest
    return {**whole, "parts": [{"part": name, **counts} for name, counts in by_part.items()]}


def count(module: nn.Module) -> dict[str, int]:
    """Parameters of a module, shared ones once."""
    every = {id(p): p for p in module.parameters()}.values()
    trained = [p for p in every if p.requires_grad]
    return {"total": sum(p.numel() for p in every), "trainable": sum(p.numel() for p in trained)}


def parts(policy: nn.Module, most: int = 6) -> list[tuple[str, nn.Module]]:
    """Submodules that say where the parameters are: the largest is opened until there are enough, or it is a list."""
    found: list[tuple[str, nn.Module]] = [("", policy)]
    while len(found) < most:
        name, largest = max(found, key=lambda part: count(part[1])["total"])
        inside = [(f"{name}.{n}".lstrip("."), m) for n, m in largest.named_children() if count(m)["total"]]
        if not inside or isinstance(largest, nn.ModuleList | nn.Sequential):
            break
        found = [part for part in found if part[1] is not largest] + inside
    return sorted(found, key=lambda part: -count(part[1])["total"])[:most]


def feature(policy: ChunkPolicy, key: str) -> dict[str, Any]:
    """One input or output of the network: its shape, and how its numbers are normalised."""
    config = policy.policy.config
    of = {**(config.input_features or {}), **(config.output_features or {})}[key]
    mode = (getattr(config, "normalization_mapping", None) or {}).get(of.type.name)
    name = mode.value if mode else "IDENTITY"
    shape = {"key": key, "type": of.type.name, "shape": list(of.shape)}
    return {**shape, "normalisation": name, "statistics": numbers(policy, key, USED.get(name, ()))}


def numbers(policy: ChunkPolicy, key: str, used: tuple[str, ...]) -> dict[str, list[float]]:
    """The statistics by which the preprocessor normalises a feature, flat; empty where it leaves it as it is.

    A policy of several robots has an offset and a scale for each robot instead.
    """
    for step in policy.preprocessor.steps:
        if isinstance(step, EmbodimentInputStep) and key in ("observation.state", "action"):
            name = key.removeprefix("observation.")
            rows = {kind: step.tables[f"{name}_{kind}"][step.serve or 0] for kind in ("offset", "scale")}
            return {kind: row.tolist() for kind, row in rows.items()}
        if isinstance(step, NormalizerProcessorStep):
            state = step.state_dict()
            return {kind: state[f"{key}.{kind}"].flatten().tolist() for kind in used if f"{key}.{kind}" in state}
    return {}


def euler_steps(policy: nn.Module) -> int | None:
    """Velocities of one chunk; None for what is no flow."""
    return policy.inference_steps if is_flow(policy) else None


def is_flow(policy: nn.Module) -> bool:
    """Whether a policy has a velocity; one with a one-step head, or a mixture of such predictions, has none."""
    return isinstance(policy, FlowPolicy) and not policy.one_step


def weight_bytes(policy: nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers by type, shared ones once."""
    sizes: Counter[str] = Counter()
    for tensor in {t.data_ptr(): t for t in (*policy.parameters(), *policy.buffers())}.values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return dict(sizes)


def measure(policy: ChunkPolicy, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Milliseconds at batch 1, medians of calls taken in turns, and the peak of memory.

    Args:
        policy: What is timed.
        repeats: Calls of each kind, after two that are not counted.
        seed: Seed of the made-up observation.

    Returns:
        ``latency_ms``: the whole ``chunk`` with its processors and, for a flow policy, its ``prefix`` and one
        ``velocity``. ``peak_bytes``: of the device's tensors, or on a CPU of this whole process.
    """
    observation, device = made_up(policy, seed), torch.device(policy.policy.config.device)
    calls: dict[str, Callable[[], Any]] = {"chunk": lambda: policy.infer([observation], [seed])}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        if is_flow(policy.policy):
            calls |= halves(policy, observation)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for name, seconds in timed(calls, repeats, device):
            taken[name].append(seconds)
    cuda = device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{device}, {torch.get_num_threads()} threads",
        "repeats": repeats,
        "latency_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()},
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else resident,
    }


def halves(policy: ChunkPolicy, observation: Observation) -> dict[str, Callable[[], Any]]:
    """The two halves of a flow policy's chunk: the prefix, once an observation, and the velocity, once a step."""
    network = policy.policy
    past = policy.recall([observation])
    past.pop(IMAGE_TOKENS, None)  # the prefix is to encode its pictures
    batch = policy.preprocess([observation]) | past
    context = network.encode(batch)
    x = torch.zeros(1, network.horizon, network.noise_dim, device=network.config.device)
    t = torch.ones(1, device=x.device)
    return {"prefix": lambda: network.encode(batch), "velocity": lambda: network.velocity(context, x, t)}


def timed(calls: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> Iterator[tuple[str, float]]:
    """Seconds of each call in turns, so that what else the machine does meets all alike."""
    for turn in range(WARM_UP + repeats):
        for name, call in calls.items():
            _finish(device)
            begin = time.perf_counter()
            call()
            _finish(device)
            if turn >= WARM_UP:
                yield name, time.perf_counter() - begin


def made_up(policy: ChunkPolicy, seed: int) -> Observation:
    """An observation of the policy's robot with noise for pictures."""
    robot, rng = policy.spec.robot, np.random.default_rng(seed)
    images = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in robot.cameras}
    return Observation(np.zeros(len(robot.state), np.float32), images, "pick up the red cube")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
