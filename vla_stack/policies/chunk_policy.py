"""A trained policy as servers and evaluations see it: observations in, chunks of commands out."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.images import as_read, touching
from vla_stack.lerobot_core import FeatureType, PreTrainedConfig
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.continuation import Continuing, continue_chunk, continuing_modes
from vla_stack.policies.contract import FlowPolicy, NoisePolicy
from vla_stack.policies.directory import choose_robot
from vla_stack.policies.embodiment import Embodiment
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.past import PAST_TOKENS
from vla_stack.policies.reading import PolicyDirectory
from vla_stack.policies.registry import QUEUED
from vla_stack.schema import (
    ACTION,
    IMAGE_TOKENS,
    OBS_STATE,
    PAST_AGE,
    Camera,
    Chunks,
    Continuation,
    Dim,
    Observation,
    PolicySpec,
    Reading,
    RobotSpec,
    camera_name,
    image_key,
)

ROBOT = "robot.json"  # beside the policy, where its configuration has no field for the robot
GENERIC_RATE_HZ = 10.0
KEPT = 4096  # observations whose tokens are kept


class ChunkPolicy:
    """Batched inference with one seed an observation.

    Args:
        policy: LeRobot policy in evaluation mode, or an exported one.
        preprocessor: Its preprocessor.
        postprocessor: Its postprocessor.
        spec: What it consumes and produces.
        batch_sizes: Sizes of batch that the policy is given, ascending; smaller batches are filled up. Empty: any.

    Attributes:
        continuing: How it continues plans, where a mode leaves it open.
    """

    def __init__(
        self,
        policy: Any,
        preprocessor: Any,
        postprocessor: Any,
        spec: PolicySpec,
        batch_sizes: tuple[int, ...] = (),
    ) -> None:
        self.policy, self.preprocessor, self.postprocessor, self.spec = policy, preprocessor, postprocessor, spec
        self.batch_sizes = batch_sizes
        self.continuing = Continuing()
        own = {c.name: Reading(c.height, c.width, "area") for c in spec.robot.cameras}
        self._reads = own | dict(spec.reads)
        self._kept: dict[bytes, Tensor] = {}  # what is remembered of observations, by their contents
        self._takes_noise = "noise" in inspect.signature(policy.predict_action_chunk).parameters

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """One chunk of commands an observation.

        The chunk of an observation depends on its own seed alone, not on who shares its batch (up to the rounding of
        batched arithmetic).

        Args:
            observations: What each robot knew.
            seeds: Seed of each observation's noise.
            continuations: For each observation the plan that its chunk should continue, or None; empty: none at all.

        Returns:
            Absolute commands in the units of ``spec.robot.action``, and, from a policy with dynamic inference, how many
            of them to execute.

        Raises:
            SchemaError: An observation does not match ``spec.robot``: wrong state, missing camera, wrong size.
        """
        for observation in observations:
            observation.check(self.spec.robot, self.spec.reads)
        plans = list(continuations) or [None] * len(observations)
        size = next((size for size in self.batch_sizes if size >= len(observations)), len(observations))
        if missing := size - len(observations):
            filled = [*observations, *[observations[-1]] * missing], [*seeds, *[seeds[-1]] * missing]
            return self.infer(*filled, [*plans, *[plans[-1]] * missing]).first(len(observations))
        modes = {plan.mode if plan else "" for plan in plans}
        if len(modes) > 1:  # one way of sampling at a time
            groups = [[i for i, p in enumerate(plans) if (p.mode if p else "") == mode] for mode in sorted(modes)]
            parts = [
                self.infer([observations[i] for i in rows], [seeds[i] for i in rows], [plans[i] for i in rows])
                for rows in groups
            ]
            return Chunks.gathered(parts, groups)
        if plans[0] is not None:
            return self._continue(observations, seeds, plans, modes.pop())
        with torch.inference_mode():
            past = self.recall(observations)  # first: the postprocessor goes by the state that was preprocessed last
            batch = self.preprocess(observations) | past
            return self._chunks(*self._predict(batch, seeds))

    def _continue(
        self, observations: Sequence[Observation], seeds: Sequence[int], plans: Sequence[Any], mode: str
    ) -> Chunks:
        """Chunks that continue plans, sampled in one way."""
        steps = range(self.spec.horizon)
        commands = np.stack([p.actions[[min(i, len(p.actions) - 1) for i in steps]] for p in plans])
        with torch.no_grad():  # not inference_mode: guidance differentiates the velocity
            past = self.recall(observations)
            batch = self.preprocess(observations, commands) | past
            noise = self.noise(seeds)
            chunk, disagreement, given = continue_chunk(
                self.policy, batch, noise, batch[ACTION], plans, seeds, mode, self.continuing
            )
            execute = None if disagreement is None else self.policy.execute_steps(disagreement, given)
            return self._chunks(chunk, execute)

    def _chunks(self, chunk: Float[Tensor, "b h a"], execute: Int[Tensor, " b"] | None) -> Chunks:
        """Commands of normalised chunks."""
        commands = self.postprocessor(chunk[:, : self.spec.horizon])
        return Chunks(commands.float().numpy(), None if execute is None else tuple(execute.tolist()))

    def preprocess(
        self, observations: Sequence[Observation], commands: Float[NDArray, "b h a"] | None = None
    ) -> dict[str, Any]:
        """The batch that the policy is given for observations, without their past; with commands, what these are as
        actions: relative to the state of now, normalised."""
        given = {} if commands is None else {ACTION: torch.from_numpy(commands)}
        return self.preprocessor({**self._collate(observations), **given})

    def recall(self, observations: Sequence[Observation]) -> dict[str, Any]:
        """Entries of the batch for what is recalled beside each observation; none without a history."""
        if not (slots := len(self.spec.history)):
            return {}
        present = torch.stack([self._remembered(o) for o in observations])
        tokens = torch.zeros_like(present)[:, None].repeat(1, slots, 1, 1)
        age = tokens.new_zeros(len(observations), slots)
        for row, o in enumerate(observations):
            for slot, earlier in enumerate(o.past[:slots]):
                tokens[row, slot], age[row, slot] = self._remembered(earlier), o.step - earlier.step
        return {IMAGE_TOKENS: present, PAST_TOKENS: tokens, PAST_AGE: age}

    def _remembered(self, observation: Observation) -> Float[Tensor, "n d"]:
        """Tokens of an observation's pictures, made once and alone, so that they depend on no other row."""
        digest = hashlib.blake2b(observation.task.encode())
        for camera in self.spec.robot.cameras:
            picture = as_read(observation.images[camera.name], self._reads[camera.name])
            digest.update(np.ascontiguousarray(picture))
        key = digest.digest()
        if key not in self._kept:
            with torch.no_grad():  # not inference_mode: guidance differentiates what reads them
                self._kept[key] = self.policy.image_tokens(self.preprocessor(self._collate([observation])))[0]
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def _collate(self, observations: Sequence[Observation]) -> dict[str, Any]:
        robot = self.spec.robot
        batch: dict[str, Any] = {
            OBS_STATE: torch.from_numpy(np.stack([o.state for o in observations])),
            "task": [o.task for o in observations],
        }
        for camera in robot.cameras:
            pictures = [as_read(o.images[camera.name], self._reads[camera.name]) for o in observations]
            images = torch.from_numpy(np.stack(pictures))
            # [b, 3, h, w] in [0, 1], as LeRobot's policies take them; the permuted view stays channels-last.
            batch[image_key(camera.name)] = images.permute(0, 3, 1, 2).float().div_(255.0)
        return batch

    def _predict(self, batch: dict[str, Any], seeds: Sequence[int]) -> tuple[Float[Tensor, "b h a"], Tensor | None]:
        if self._takes_noise:
            noise = self.noise(seeds)
            if isinstance(self.policy, MohPolicy):
                chunk, disagreement = self.policy.sample(batch, noise)
                return chunk, self.policy.execute_steps(disagreement)
            return self.policy.predict_action_chunk(batch, noise=noise), None
        # Without such an argument a policy draws, if at all, from torch's global generator: one seeded call each.
        chunks = []
        with torch.random.fork_rng():
            for i, seed in enumerate(seeds):
                torch.manual_seed(seed)
                chunks.append(self.policy.predict_action_chunk(_row(batch, i, len(seeds))))
        return torch.cat(chunks), None

    def noise(self, seeds: Sequence[int]) -> Float[Tensor, "b h w"]:
        """The noise of chunks, by their seeds, where the policy takes it."""
        return torch.stack([self._noise(seed) for seed in seeds]).to(self.policy.config.device)

    def _noise(self, seed: int) -> Float[Tensor, "h a"]:
        ours = isinstance(self.policy, NoisePolicy)
        width, scale = (self.policy.noise_dim, self.policy.noise_scale) if ours else (len(self.spec.robot.action), 1.0)
        return torch.randn(self.spec.horizon, width, generator=torch.Generator().manual_seed(seed)) * scale


def load_policy(
    path: str | Path,
    device: str = "cpu",
    embodiment: str | None = None,
    frozen: bool = False,
    graphs: bool = False,
) -> ChunkPolicy:
    """Load a LeRobot policy directory for inference, of any type but :data:`~vla_stack.policies.registry.QUEUED`.

    Args:
        path: Directory with config.json, model.safetensors and the processors' files, or any other name of it that
            :func:`~vla_stack.policies.directory.resolve_policy` knows.
        device: Torch device, or ``auto``.
        embodiment: Which robot to drive, where the policy was trained on several.
        frozen: It is only asked, neither trained nor saved. Then adapters are multiplied into the weights, what runs in
            bfloat16 is kept in it, and what nothing reads is dropped.
        graphs: Its graphs are to compute, also where it has weights.

    Raises:
        UserError: There is no such device, not a policy directory, one of its files is missing, damaged, not what its
            manifest says, names code that nobody trusts or does not fit the others, the policy is not one chunk from
            one observation, or it has several robots and none was named.
    """
    source = PolicyDirectory(path, device, graphs)
    config = source.config
    if config.type in QUEUED:
        raise UserError(
            f"policy '{config.type}' gives one action a call from what it has queued, chunks alone are served",
            "evaluate it with lerobot-eval, or train another type, e.g. act or diffusion",
        )
    if config.n_obs_steps != 1:
        raise UserError(
            f"policy '{config.type}' reads {config.n_obs_steps} observations, only the present one is served",
            "train it with policy.options.n_obs_steps=1",
        )
    embodiments = [Embodiment.from_json(d) for d in getattr(config, "embodiments", ())]
    names = [e.name for e in embodiments]
    served = choose_robot(names, embodiment, source.path) if embodiments or embodiment else None
    robot = robot_spec(config, source.path) if served is None else embodiments[served].robot
    if frozen and isinstance(native := base_config(config), VlaConfig) and native.train_backbone == "lora":
        native.train_backbone = "expert_only"  # whose loading absorbs adapters
    policy = source.policy()
    if frozen and isinstance(policy, FlowPolicy):
        policy.for_inference()
    pre, post = source.processors(served)
    normalisation = source.normalisation
    extras = {
        "type": config.type,
        "n_action_steps": getattr(config, "n_action_steps", 1),
        "continues": continuing_modes(policy),
    }
    if isinstance(policy, NoisePolicy):  # the same weights are another policy with other noise
        extras["noise_scale"] = policy.noise_scale
    spec = PolicySpec(
        robot=robot,
        horizon=len(config.action_delta_indices or [0]),
        normalisation=normalisation if served is None else f"{normalisation}/{embodiments[served].name}",
        model_version=source.version,
        history=getattr(base_config(config), "history_ages", ()),
        d_train_max=policy.max_delay if isinstance(policy, NoisePolicy) else 0,
        extras=extras if served is None else {**extras, "embodiment": embodiments[served].name},
        reads=_reads(policy, robot, {} if served is None else embodiments[served].cameras),
    )
    return ChunkPolicy(policy, pre, post, spec)


def _reads(policy: Any, robot: RobotSpec, slots: Mapping[str, str]) -> dict[str, Reading]:
    """What a policy reads of each camera whose pictures it does not read as they are; ``slots`` name their cameras."""
    sizes = {c.name: (c.height, c.width) for c in robot.cameras}
    found: dict[str, Reading] = {}
    for slot, camera in slots.items():
        height, width = policy.config.input_features[image_key(slot)].shape[-2:]
        if camera in sizes and (height, width) != sizes[camera]:
            found[camera] = Reading(height, width, "area")
    frame = policy.frame if isinstance(policy, NoisePolicy) else None
    if frame is not None:
        shrunk = {name: touching(size, frame) for name, size in sizes.items() if name not in found}
        found |= {name: reading for name, reading in shrunk.items() if reading}
    return found


def robot_spec(config: PreTrainedConfig, path: Path) -> RobotSpec:
    """The embodiment that a policy says it was trained for, or a nameless one with the same shapes."""
    if robot := getattr(config, "robot", None):
        return RobotSpec.from_json(robot)
    if (path / ROBOT).is_file():
        return RobotSpec.from_json(json.loads((path / ROBOT).read_text()))
    inputs, outputs = config.input_features or {}, config.output_features or {}
    names = getattr(config, "action_feature_names", None)
    size = outputs[ACTION].shape[0]
    return RobotSpec(
        name=f"lerobot/{config.type}",
        state=tuple(Dim(f"state_{i}", "1") for i in range(inputs[OBS_STATE].shape[0] if OBS_STATE in inputs else 0)),
        action=tuple(Dim(name, "1") for name in names or [f"action_{i}" for i in range(size)]),
        cameras=tuple(
            Camera(camera_name(key), ft.shape[1], ft.shape[2])
            for key, ft in inputs.items()
            if ft.type is FeatureType.VISUAL
        ),
        rate_hz=GENERIC_RATE_HZ,
    )


def _row(batch: dict[str, Any], i: int, n: int) -> dict[str, Any]:
    """Row ``i`` of a batch of ``n``; what is not one entry a row stays as it is."""
    return {k: v[i : i + 1] if isinstance(v, Tensor | list) and len(v) == n else v for k, v in batch.items()}
