"""An exported policy served without torch, in a fifth of the memory.

What stands before and behind the graph of a native VLA of one robot is simple: words as numbers, statistics of state
and action, actions relative to the state. ``vla export`` writes these into ``onnx.json`` (``plain_export.py``). An
exported policy whose processors do more is served by :class:`~vla_stack.policies.onnx_policy.OnnxPolicy`; where both
can, they compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.images import as_read
from vla_stack.policies.directory import GRAPHS, STATISTICS, WEIGHTS, check_manifest, digest
from vla_stack.policies.noise import randn
from vla_stack.policies.onnx_files import (
    CHUNK,
    FIXED,
    IS_FIXED,
    MANIFEST,
    Manifest,
    check_graph,
    open_graph,
    read_manifest,
)
from vla_stack.policies.sentence_encoder import embed, shipped_encoder
from vla_stack.policies.words import PAD, hash_words, prompt, sub_words
from vla_stack.schema import OBS_STATE, Chunks, Continuation, Observation, PolicySpec, Reading, SchemaError, image_key

TOKENS, TOKENS_MASK = "observation.language.tokens", "observation.language.attention_mask"
Row = NDArray[np.float32]


@dataclass(frozen=True)
class Plain:
    """What surrounds a graph.

    Attributes:
        spec: What the policy consumes and produces, without the hashes of its files.
        buckets: Size of the hash's range of words, 0 where there is a tokenizer.
        tokenizer: Content of its ``tokenizer.json``, else empty.
        encoder: Name of the sentence encoder that makes vectors instead of tokens, else empty.
        words: Tokens of the longest instruction.
        epsilon: Added to a standard deviation that something is divided by.
        state_mean: float32 [S].
        state_std: float32 [S].
        action_mean: float32 [A].
        action_std: float32 [A].
        relative: float32 [A], 1 where an action is relative to the state, else 0.
    """

    spec: PolicySpec
    buckets: int
    tokenizer: str
    words: int
    epsilon: float
    state_mean: Row
    state_std: Row
    action_mean: Row
    action_std: Row
    relative: Row
    encoder: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        rows = {name: value.tolist() for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {**vars(self), **rows, "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> Plain:
        """Inverse of :meth:`to_json`; raises ValueError, TypeError or KeyError on anything else."""
        spec = PolicySpec.from_json(d["spec"])
        sizes = {"state_mean": len(spec.robot.state), "state_std": len(spec.robot.state)}
        sizes |= dict.fromkeys(("action_mean", "action_std", "relative"), len(spec.robot.action))
        rows = {name: np.array(d[name], np.float32) for name in sizes}
        if any(rows[name].shape != (size,) or not np.isfinite(rows[name]).all() for name, size in sizes.items()):
            raise ValueError("statistics are not finite numbers, one a dimension")
        if rows["relative"].any() and len(spec.robot.state) < len(spec.robot.action):
            raise ValueError("actions are relative to a state that is shorter")
        buckets, words, content = int(d["buckets"]), int(d["words"]), str(d["tokenizer"])
        encoder = str(d.get("encoder", ""))
        if not ((content or encoder or 2 <= buckets < 1 << 31) and 0 < words < 1 << 16):
            raise ValueError(f"{words} words in {buckets} buckets")
        return cls(spec, buckets, content, words, float(d["epsilon"]), encoder=encoder, **rows)

    def tokens(self, instructions: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Tokens [b, words] of instructions, or vectors [b, words, d], and which of them are there.

        Raises:
            UserError: An instruction is too long.
        """
        if self.encoder:
            return embed(*shipped_encoder(self.encoder), instructions, self.words)
        if self.tokenizer:
            rows = sub_words(self.tokenizer.encode(), [prompt(text) for text in instructions], self.words)
            tokens = np.array([[*row, *[PAD] * (self.words - len(row))] for row in rows], np.int64)
            return tokens, np.arange(self.words) < np.array([len(row) for row in rows])[:, None]
        tokens = np.array([hash_words(text, self.buckets, self.words) for text in instructions], np.int64)
        return tokens, tokens != PAD


class PlainPolicy:
    """Batched inference with one seed an observation, as :class:`~vla_stack.policies.chunk_policy.ChunkPolicy`.

    Args:
        manifest: Of the exported policy.
        plain: What surrounds its graph.
        session: Its graph, see :func:`~vla_stack.policies.onnx_files.open_graph`.
    """

    def __init__(self, manifest: Manifest, plain: Plain, session: Any) -> None:
        self.spec, self._manifest, self._plain, self._session = plain.spec, manifest, plain, session
        own = {c.name: Reading(c.height, c.width, "area") for c in self.spec.robot.cameras}
        self._reads = own | dict(self.spec.reads)

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """One chunk of commands an observation; a continuation fixes the actions that will be over by then.

        Raises:
            SchemaError: An observation does not match ``spec.robot``, or its continuation is none of ``spec.extras``.
        """
        for observation in observations:
            observation.check(self.spec.robot, self.spec.reads)
        plain, m = self._plain, self._manifest
        states = np.stack([o.state for o in observations])
        n = min(states.shape[1], len(plain.relative))  # where states are fewer than actions, none is relative
        origin = np.zeros((len(states), 1, len(plain.relative)), np.float32)
        origin[:, 0, :n] = states[:, :n] * plain.relative[:n]
        given = self._seen(observations, states)
        given["noise"] = np.stack([randn(seed, m.horizon, m.noise_dim) for seed in seeds]) * np.float32(m.noise_scale)
        if m.max_delay:
            given |= self._prefix(continuations or [None] * len(observations), origin)
        elif any(continuations):
            raise SchemaError("this policy continues no plan")
        chunk = self._session.run(None, given)[0][:, : self.spec.horizon]
        return Chunks(chunk * plain.action_std + plain.action_mean + origin)

    def _seen(self, observations: Sequence[Observation], states: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """What the graph takes of observations, by its inputs' names."""
        plain = self._plain
        tokens, there = plain.tokens([o.task for o in observations])
        seen: dict[str, NDArray[Any]] = {
            OBS_STATE: (states - plain.state_mean) / (plain.state_std + np.float32(plain.epsilon)),
            TOKENS: tokens,
            TOKENS_MASK: there,
        }
        for camera in self.spec.robot.cameras:
            pictures = np.stack([as_read(o.images[camera.name], self._reads[camera.name]) for o in observations])
            floats = pictures.transpose(0, 3, 1, 2).astype(np.float32, order="C")
            seen[image_key(camera.name)] = np.divide(floats, np.float32(255), out=floats)
        return {name: seen[name] for name in self._manifest.inputs}

    def _prefix(self, plans: Sequence[Continuation | None], origin: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Actions that are fixed, normalised, and which: the first ``delay`` of each plan."""
        plain, horizon = self._plain, self._manifest.horizon
        fixed = np.zeros((len(plans), horizon, len(plain.relative)), np.float32)
        is_fixed = np.zeros(fixed.shape[:2], bool)
        for row, plan in enumerate(plans):
            if plan is None:
                continue
            if plan.mode != "prefix":
                raise SchemaError(f"this policy continues no plan by '{plan.mode}'")
            n = plan.delay
            action = plan.actions[:n] - origin[row] - plain.action_mean
            fixed[row, :n], is_fixed[row, :n] = action / (plain.action_std + np.float32(plain.epsilon)), True
        return {FIXED: fixed, IS_FIXED: is_fixed}


def load_plain(directory: Path, threads: int) -> PlainPolicy | None:
    """An exported policy, computed by ``threads`` threads of the CPU; None where it needs torch.

    Raises:
        UserError: One of its files is missing, damaged or not what its manifest says, or the graph is of other weights.
    """
    manifest = read_manifest(directory)
    if manifest.plain is None or list(manifest.graphs) != [CHUNK]:
        return None
    weights = check_manifest(directory).get(WEIGHTS, "")
    check_graph(manifest, directory, weights)
    try:
        plain = Plain.from_json(manifest.plain)
        plain.tokens([""])
    except Exception as e:  # a tokenizer's exceptions have no class of their own
        raise UserError(f"{directory / MANIFEST} is damaged: {e!r}", "export the policy again") from None
    version = weights[:16] or digest(directory, GRAPHS)
    spec = replace(plain.spec, normalisation=digest(directory, STATISTICS), model_version=version)
    plain = replace(plain, spec=spec)
    return PlainPolicy(manifest, plain, open_graph(directory / CHUNK, "cpu", threads))
