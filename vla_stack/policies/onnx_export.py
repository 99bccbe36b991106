"""A policy as ONNX graphs: a small one as one, another VLA as two.

Of the native VLA one graph gives the chunk, all steps of the sampler in it: what depends on the schedule alone is
constant there. Of a VLA on a pretrained backbone, of another family or with a mixture of horizons the first graph is
the prefix, once an observation, the second one step of the sampler. The loop over steps stays outside, so that one pair
of graphs serves any number of steps. The second graph is the whole Euler step, fixed action prefix included: nothing
but its own output has to be handed back to it, which never leaves the device.

Of a policy on states (``state_gaussian``, ``state_flow``) or around another (``expo``, ``steered``) one graph gives the
chunk: steps of the sampler, edits and the choice of critics are in it. Noise is an input of either, so a seed means
what it means in torch. Batch sizes are dynamic, everything else is static.

Graphs compute in float32, whatever types the policy's weights have: on a CPU, ONNX Runtime has no bfloat16
convolutions. Adapters (LoRA) are merged into the weights that they adapt. ``onnx_write.py`` has the files.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK
from torch import Tensor, nn

from vla_stack.errors import UserError, first_line
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.continuation import continuing_modes
from vla_stack.policies.directory import SIGNATURE, WEIGHTS, check_manifest, write_manifest
from vla_stack.policies.flow import ActionPrefix
from vla_stack.policies.modeling_expo import ExpoPolicy
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.modeling_state import StateFlowPolicy, StateGaussianPolicy
from vla_stack.policies.modeling_steered import SteeredPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.onnx_files import (
    CHUNK,
    FIXED,
    IS_FIXED,
    MANIFEST,
    PREFIX,
    STEP,
    Manifest,
    open_graph,
    read_manifest,
)
from vla_stack.policies.onnx_policy import OnnxPolicy
from vla_stack.policies.onnx_write import REMEDY, Graph, write
from vla_stack.policies.plain_export import plain_of
from vla_stack.policies.plain_policy import Plain, PlainPolicy
from vla_stack.policies.reading import find_weights, read_config
from vla_stack.policies.transformer import PrefixContext
from vla_stack.schema import ACTION_DIM_IS_PAD, Observation

LEAST_COSINE, LEAST_COSINE_INT8 = 0.999, 0.99  # of a graph that computes what its policy does
SMALL = (StateGaussianPolicy, StateFlowPolicy, ExpoPolicy, SteeredPolicy)  # a chunk of theirs is one graph
COMPARED = (1, 2, 3)  # sizes of batch; graphs are traced with 2


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


class ChunkGraph(nn.Module):
    """Noise and named tensors to the chunk: the preprocessed ones, before them the given actions of a policy that takes
    such."""

    def __init__(self, policy: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.policy, self.names = policy, names

    def forward(self, noise: Float[Tensor, "b h a"], *tensors: Tensor) -> Tensor:
        batch = dict(zip(self.names, tensors, strict=True))
        given = {"prefix": ActionPrefix(batch.pop(FIXED), batch.pop(IS_FIXED))} if FIXED in batch else {}
        return self.policy.predict_action_chunk(batch, noise=noise, **given)


def export(source: Path, out: Path, int8: bool = False) -> Manifest:
    """Write the graphs of a policy beside its configuration and processors.

    A graph that lies beside the policy's weights and is of them is not traced again.

    Args:
        source: Policy directory.
        out: New directory, which :func:`~vla_stack.policies.chunk_policy.load_policy` opens like any other.
        int8: Products of matrices in 8 bits.

    Raises:
        UserError: As :func:`write_graphs`, or the policy drives several robots.
    """
    chunks = _of_one_robot(source)
    plain = plain_of(chunks)
    beside = source if _has_graph(source, chunks.policy, int8) else None
    manifest = write_graphs(chunks.policy, example(chunks, max(COMPARED)), out, int8, beside)
    if plain is not None and manifest.graphs == [CHUNK]:
        manifest = _with_plain(manifest, plain, chunks, out)
    weights = find_weights(source)
    for file in source.iterdir():
        kept = file.is_file() and file not in (weights, source / MANIFEST)
        if kept and file.suffix in (".json", ".safetensors", ".txt", ".model"):
            shutil.copy(file, out / file.name)
    (out / SIGNATURE).unlink(missing_ok=True)  # it is of the original
    write_manifest(out)
    return manifest


def export_beside(source: Path, int8: bool = False) -> Manifest:
    """Put the graph of a policy beside its weights, where :func:`~vla_stack.verbs.serve.load_directory` takes it on a
    CPU; a signature, which does not vouch for it, is removed.

    Args:
        source: Policy directory.
        int8: Products of matrices in 8 bits.

    Raises:
        UserError: As :func:`export`, or the policy is not one that its graph replaces: native, of few steps around it.
    """
    chunks = _of_one_robot(source)
    plain = plain_of(chunks)
    if plain is None or not is_native(chunks.policy) or not (source / WEIGHTS).is_file():
        what = f"{source} is not a native VLA that a server could compute without torch"
        raise UserError(what, "write its graphs to a directory of their own: --out DIR")
    weights = check_manifest(source)[WEIGHTS]
    with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=source.parent) as name:
        manifest = write_graphs(chunks.policy, example(chunks, max(COMPARED)), Path(name), int8)
        manifest = _with_plain(replace(manifest, weights=weights), plain, chunks, Path(name))
        for file in sorted(Path(name).iterdir()):
            os.replace(file, source / file.name)
    write_manifest(source)
    (source / SIGNATURE).unlink(missing_ok=True)
    return manifest


def _with_plain(manifest: Manifest, plain: Plain, chunks: ChunkPolicy, out: Path) -> Manifest:
    """The manifest with what surrounds its graph; UserError if that is not what the policy's processors do."""
    around = ChunkPolicy(OnnxPolicy(out, chunks.policy.config), chunks.preprocessor, chunks.postprocessor, chunks.spec)
    asked, seeds = observations(chunks, max(COMPARED)), list(range(max(COMPARED)))
    wanted = torch.from_numpy(around.infer(asked, seeds).actions)
    try:
        served = PlainPolicy(manifest, Plain.from_json(plain.to_json()), open_graph(out / CHUNK, "cpu", 1))
        cosine = _cosine(wanted, torch.from_numpy(served.infer(asked, seeds).actions))
        if not cosine >= LEAST_COSINE:
            raise UserError(f"without torch the policy is another one (cosine {cosine:.4f})", REMEDY)
    except BaseException:
        (out / MANIFEST).unlink()  # nothing here may look like an exported policy
        raise
    manifest = replace(manifest, plain=plain.to_json())
    _save(manifest, out)
    return manifest


def _of_one_robot(source: Path) -> ChunkPolicy:
    if len(getattr(read_config(source, "cpu"), "embodiments", ())) > 1:
        raise UserError(f"{source} drives several robots, which graphs cannot", REMEDY)
    return load_policy(source)


def _has_graph(source: Path, policy: Any, int8: bool) -> bool:
    """Whether the graph of a policy lies beside its weights."""
    if not is_native(policy) or not (source / MANIFEST).is_file() or not (source / WEIGHTS).is_file():
        return False
    found = read_manifest(source)
    made_of = found.weights, found.int8, found.inference_steps
    return made_of == (check_manifest(source).get(WEIGHTS), int8, policy.inference_steps)


def is_native(policy: Any) -> bool:
    """Whether a policy is a native VLA whose chunk is one graph."""
    return isinstance(policy, VlaPolicy) and policy.unrolls and not policy.config.backbone


def write_graphs(
    policy: Any, batch: Mapping[str, Any], out: Path, int8: bool = False, made_in: Path | None = None
) -> Manifest:
    """Write the graphs of a policy and their manifest, which is what :class:`OnnxPolicy` reads.

    Args:
        policy: The policy, which is used up: it ends on the CPU, in float32, without adapters.
        batch: Three preprocessed observations.
        out: Directory.
        int8: Products of matrices in 8 bits.
        made_in: Where they lie already; they are compared with the policy all the same.

    Raises:
        UserError: It is neither a flow policy nor one on states, it cannot be traced, or the graphs do not compute what
            the policy does.
    """
    native = is_native(policy)
    one_graph = isinstance(policy, SMALL) or native
    if not one_graph and not continuing_modes(policy):
        remedy = "flow policies export, and policies on states"
        raise UserError(f"a policy of type '{policy.config.type}' is not a flow policy", remedy)
    if isinstance(policy, MohPolicy) and policy.config.consensus_ratio is not None:
        what = "a mixture of horizons that chooses how much of a chunk to execute"
        raise UserError(f"{what} does not export", f"{REMEDY}, or set consensus_ratio=null in its config.json")
    if (lacking := batch.get(ACTION_DIM_IS_PAD)) is not None and lacking.any():
        raise UserError("a policy whose actions are padded to a larger robot's does not export", REMEDY)
    if getattr(base_config(policy.config), "history", 0):
        raise UserError("a policy with a history does not export", REMEDY)
    policy.eval()
    names = tuple(key for key, value in batch.items() if isinstance(value, Tensor) and key.startswith("observation."))
    noise = torch.randn(max(COMPARED), policy.horizon, policy.noise_dim, generator=torch.Generator().manual_seed(0))
    device = next(policy.parameters()).device
    served = policy.predict_action_chunk({n: batch[n].to(device) for n in names}, noise=noise.to(device)).float().cpu()
    to_float32(policy)
    batch = {n: batch[n].cpu() for n in names}
    wanted = policy.predict_action_chunk(batch, noise=noise)
    merge_adapters(policy)
    if native:
        policy.for_inference()

    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # what fails below must not look like an exported policy
    if made_in is not None:
        graphs = tuple(read_manifest(made_in).graphs)
        for name in graphs:
            shutil.copy(made_in / name, out / name)
    else:
        graphs = _trace(policy, {n: batch[n][:2] for n in names}, noise[:2], one_graph, out, int8)
    manifest = Manifest(
        graphs=graphs,
        inputs=names,
        horizon=policy.horizon,
        noise_dim=policy.noise_dim,
        noise_scale=policy.noise_scale,
        action_dim=policy.action_dim,
        inference_steps=0 if isinstance(policy, SMALL) else policy.inference_steps,
        max_delay=policy.max_delay,
        cosine_served=_cosine(served, wanted),
        int8=int8,
    )
    _save(manifest, out)
    try:
        manifest = compare(OnnxPolicy(out, policy.config), batch, noise, wanted)
    except BaseException:
        (out / MANIFEST).unlink()
        raise
    _save(manifest, out)
    return manifest


def _trace(
    policy: Any, batch: dict[str, Tensor], noise: Float[Tensor, "b h a"], one_graph: bool, out: Path, int8: bool
) -> tuple[str, ...]:
    """Write the graphs: the names of their files."""
    with torch.no_grad():
        made = chunk_graph(policy, batch, noise) if one_graph else pair_of_graphs(policy, batch)
        for name, graph in made.items():
            write(graph, out / name, int8)
    return tuple(made)


def _save(manifest: Manifest, out: Path) -> None:
    (out / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def chunk_graph(policy: Any, batch: dict[str, Tensor], noise: Float[Tensor, "b h a"]) -> dict[str, Graph]:
    """The one graph of a policy on states or of the native one."""
    if policy.max_delay:
        batch = {FIXED: torch.zeros_like(noise), IS_FIXED: torch.zeros(noise.shape[:2], dtype=torch.bool), **batch}
    names = tuple(batch)
    return {CHUNK: Graph(ChunkGraph(policy, names), (noise, *batch.values()), ("noise", *names), ("chunk",))}


def pair_of_graphs(policy: Any, batch: dict[str, Tensor]) -> dict[str, Graph]:
    """Prefix and sampler step of a VLA."""
    names = tuple(batch)
    whole = {n: torch.ones_like(v) if n == OBS_LANGUAGE_ATTENTION_MASK else v for n, v in batch.items()}
    context = policy.encode(whole)  # of the longest instruction: a graph leaves out no padding
    kv = [f"{kind}_{i}" for i in range(len(context.keys_values)) for kind in ("k", "v")]
    prefix = Graph(PrefixGraph(policy, names), tuple(batch.values()), names, ("mask", *kv))
    b, h, a = len(context.mask), policy.horizon, policy.noise_dim
    x, t, is_fixed = torch.randn(b, h, a), torch.full((b,), 0.5), torch.zeros(b, h, dtype=torch.bool)
    tensors = (x, t, t * 0.2, torch.zeros_like(x), is_fixed, context.mask)
    flat = tuple(tensor for pair in context.keys_values for tensor in pair)
    inputs = ("x", "t", "dt", FIXED, IS_FIXED, "mask", *kv)
    return {PREFIX: prefix, STEP: Graph(StepGraph(policy), (*tensors, *flat), inputs, ("x_next",))}


def compare(
    exported: OnnxPolicy, batch: Mapping[str, Tensor], noise: Float[Tensor, "b h a"], wanted: Float[Tensor, "b h a"]
) -> Manifest:
    """The manifest with how far the graphs are from the policy; UserError if they are not the same function."""
    cosine, error = 1.0, 0.0
    for n in COMPARED:
        try:
            got = exported.predict_action_chunk({k: v[:n] for k, v in batch.items()}, noise[:n])
        except Exception as e:  # the runtime's exceptions have no public common class
            raise UserError(f"the graphs cannot be run on {n} observations: {first_line(e)}", REMEDY) from e
        cosine = min(cosine, _cosine(wanted[:n], got))
        error = max(error, (wanted[:n] - got).abs().max().item())
    if not cosine >= (LEAST_COSINE_INT8 if exported.manifest.int8 else LEAST_COSINE):
        raise UserError(f"the graphs do not compute what the policy does (cosine {cosine:.4f})", REMEDY)
    return replace(exported.manifest, cosine=cosine, max_error=error)


def _cosine(a: Float[Tensor, "b h a"], b: Float[Tensor, "b h a"]) -> float:
    """Least cosine of two chunks of one observation."""
    return torch.nn.functional.cosine_similarity(a.flatten(1).double(), b.flatten(1).double()).min().item()


def to_float32(policy: Any) -> None:
    """Move a policy to the CPU and to float32, weights and arithmetic, in place; its configuration is copied."""
    policy.to("cpu", torch.float32)
    for module in policy.modules():
        if hasattr(module, "_arithmetic") or module is policy:
            module.config = copy.copy(module.config)
            module.config.device = "cpu"
            if hasattr(module.config, "backbone_dtype"):
                module.config.backbone_dtype = "float32"


def merge_adapters(policy: nn.Module) -> None:
    """Add the adapters of peft to the weights that they adapt, and take them out, in place."""
    for name, module in list(policy.named_modules()):
        if hasattr(module, "get_base_layer"):
            module.merge()
            policy.set_submodule(name, module.get_base_layer())


def observations(chunks: ChunkPolicy, n: int) -> list[Observation]:
    """Random ones of a policy's robot."""
    rng, robot = np.random.default_rng(0), chunks.spec.robot
    return [
        Observation(
            rng.normal(size=len(robot.state)).astype(np.float32),
            {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in robot.cameras},
            "pick up the red cube",
        )
        for _ in range(n)
    ]


def example(chunks: ChunkPolicy, n: int = 2) -> dict[str, Any]:
    """A preprocessed batch of :func:`observations`."""
    with torch.no_grad():
        return chunks.preprocess(observations(chunks, n))
