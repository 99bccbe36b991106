"""Processor steps of a policy that drives several embodiments: padding, masks and per-embodiment normalisation.

Both derive from LeRobot's relative and absolute steps because LeRobot pairs those two when it loads a policy directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    AbsoluteActionsProcessorStep,
    EnvTransition,
    NormalizationMode,
    PipelineFeatureType,
    PolicyFeature,
    ProcessorStepRegistry,
    RelativeActionsProcessorStep,
    TransitionKey,
)
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.embodiment import OBS_EMBODIMENT, Embodiment, has_dims
from vla_stack.schema import ACTION, ACTION_DIM_IS_PAD, OBS_STATE, image_key

Stats = dict[str, dict[str, Any]]
EPSILON = 1e-8  # a dimension that never moved is scaled by this, as LeRobot does
# Statistics that are mapped to -1 and 1.
BOUNDS = {NormalizationMode.MIN_MAX: ("min", "max"), NormalizationMode.QUANTILES: ("q01", "q99")}


@ProcessorStepRegistry.register("embodiment_input_processor")
@dataclass
class EmbodimentInputStep(RelativeActionsProcessorStep):
    """Brings a sample of any embodiment into the policy's common coordinates.

    In: ``observation.state`` [b, <= S], ``action`` [b, h, <= A] (absent at inference), cameras, and
    ``observation.embodiment`` int64 [b] unless ``serve`` fixes it. Out: state [b, S] and action [b, h, A], relative to
    the state and normalised by the embodiment's statistics, zero on padding; ``action_dim_is_pad`` bool [b, A]; and for
    each camera slot ``observation.images.<slot>_is_pad`` bool [b].

    Attributes:
        embodiments: ``Embodiment.to_json()`` of each.
        slots: Camera slots of the policy.
        state_dim: S.
        action_dim: A.
        serve: Index of the embodiment that all samples are of, with its own camera names; None in training, where
            cameras carry the names of their slots.
    """

    embodiments: list[dict[str, Any]] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    state_dim: int = 0
    action_dim: int = 0
    serve: int | None = None
    tables: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._parsed = [Embodiment.from_json(d) for d in self.embodiments]
        robots = [e.robot for e in self._parsed]
        n = len(robots)
        self.tables = {
            "state_offset": torch.zeros(n, self.state_dim),
            "state_scale": torch.ones(n, self.state_dim),
            "action_offset": torch.zeros(n, self.action_dim),
            "action_scale": torch.ones(n, self.action_dim),
        }
        relative = torch.zeros(n, self.action_dim)
        for i, e in enumerate(self._parsed):
            relative[i, : len(e.relative)] = torch.tensor(e.relative)
        self._facts = {
            "relative": relative,
            "has_dim": has_dims([len(r.action) for r in robots], self.action_dim),
            "has_camera": torch.tensor([[slot in e.cameras for slot in self.slots] for e in self._parsed]).view(n, -1),
        }
        self._index: Tensor | None = None

    def set_stats(self, stats: dict[str, Stats], modes: dict[str, NormalizationMode]) -> None:
        """Fill the tables from ``stats[embodiment][feature]``, for those embodiments that it has.

        Args:
            stats: Statistics; those of ``action`` after the embodiment's relative dimensions.
            modes: The policy's normalisation mapping.
        """
        for i, e in enumerate(self._parsed):
            for key, feature, mode in (("state", OBS_STATE, modes["STATE"]), ("action", ACTION, modes["ACTION"])):
                if mode is NormalizationMode.IDENTITY or e.name not in stats:
                    continue
                offset, scale = affine(stats[e.name][feature], mode)
                self.tables[f"{key}_offset"][i, : len(offset)] = offset
                self.tables[f"{key}_scale"][i, : len(scale)] = scale

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        observation = dict(transition[TransitionKey.OBSERVATION])
        state, index = observation[OBS_STATE], observation.get(OBS_EMBODIMENT)
        if self.serve is not None:
            index = torch.full((len(state),), self.serve, device=state.device)
            self._rename_cameras(observation, self._parsed[self.serve])
        elif index is None:
            raise UserError(
                f"the batch has no '{OBS_EMBODIMENT}'", "this policy drives several robots: load it with embodiment=..."
            )
        self._tables_to(state.device)
        facts, table = self._facts, self.tables
        state = F.pad(state, (0, self.state_dim - state.shape[-1]))
        measured = F.pad(state, (0, max(0, self.action_dim - self.state_dim)))[:, : self.action_dim]
        self._index, self._last_state = index, measured * facts["relative"][index]
        observation[OBS_EMBODIMENT] = index
        observation[OBS_STATE] = (state - table["state_offset"][index]) / table["state_scale"][index]
        for slot, has in zip(self.slots, facts["has_camera"][index].unbind(1), strict=True):
            observation[f"{image_key(slot)}_is_pad"] = ~has
        out = {**transition, TransitionKey.OBSERVATION: observation}
        has_dim = facts["has_dim"][index]
        out[TransitionKey.COMPLEMENTARY_DATA] = {
            **(transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}),
            ACTION_DIM_IS_PAD: ~has_dim,
        }
        if (action := transition.get(TransitionKey.ACTION)) is not None:
            action = F.pad(action, (0, self.action_dim - action.shape[-1])) - self._last_state[:, None]
            action = (action - table["action_offset"][index, None]) / table["action_scale"][index, None]
            out[TransitionKey.ACTION] = torch.where(has_dim[:, None], action, 0.0)
        return out

    def to_command(self, action: Tensor) -> Tensor:
        """Inverse of the action's way through the last call: [b, h, A] or [b, A] to absolute commands."""
        if self._index is None or self._last_state is None:
            raise RuntimeError("the postprocessor ran before the preprocessor")
        rows = (self._index, None) if action.ndim == 3 else (self._index,)
        anchor = self._last_state[:, None] if action.ndim == 3 else self._last_state
        self._tables_to(action.device)
        action = action * self.tables["action_scale"][rows] + self.tables["action_offset"][rows] + anchor
        return action if self.serve is None else action[..., : len(self._parsed[self.serve].robot.action)]

    def _rename_cameras(self, observation: dict[str, Any], embodiment: Embodiment) -> None:
        """Cameras of the robot become slots of the policy."""
        images = {slot: observation.get(image_key(camera)) for slot, camera in embodiment.cameras.items()}
        for camera in embodiment.robot.cameras:
            observation.pop(image_key(camera.name), None)
        observation.update({image_key(slot): image for slot, image in images.items() if image is not None})

    def _tables_to(self, device: torch.device) -> None:
        for tables in (self.tables, self._facts):
            for key, value in tables.items():
                tables[key] = value.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        return {key: value.cpu().contiguous() for key, value in self.tables.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for key, table in state.items():  # robots may have been added behind those that were saved
            self.tables[key][: len(table)] = table

    def get_config(self) -> dict[str, Any]:
        keys = ("embodiments", "slots", "state_dim", "action_dim", "serve")
        return {key: getattr(self, key) for key in keys}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        return features


@ProcessorStepRegistry.register("embodiment_output_processor")
@dataclass
class EmbodimentOutputStep(AbsoluteActionsProcessorStep):
    """Normalised, padded actions to commands of the embodiment of the last observations."""

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        assert isinstance(self.relative_step, EmbodimentInputStep)
        return {**transition, TransitionKey.ACTION: self.relative_step.to_command(transition[TransitionKey.ACTION])}

    def get_config(self) -> dict[str, Any]:
        return {}


def affine(stats: dict[str, Any], mode: NormalizationMode) -> tuple[Tensor, Tensor]:
    """Offset and scale, float32 [d] each, of ``(x - offset) / scale`` for one of LeRobot's normalisations.

    Raises:
        UserError: A normalisation that nobody computes statistics for.
    """
    if mode is not NormalizationMode.MEAN_STD and mode not in BOUNDS:
        known = ", ".join(m.value for m in (NormalizationMode.MEAN_STD, *BOUNDS))
        raise UserError(f"normalization_mapping: {mode.value} is not for several robots", f"take one of {known}")
    if mode is NormalizationMode.MEAN_STD:
        offset, scale = (torch.as_tensor(stats[name], dtype=torch.float32) for name in ("mean", "std"))
    else:
        low, high = (torch.as_tensor(stats[name], dtype=torch.float32) for name in BOUNDS[mode])
        offset, scale = (low + high) / 2, (high - low) / 2
    return offset, scale.clamp(min=EPSILON)


def embodiment_steps(
    config: VlaConfig, stats: dict[str, Stats] | None
) -> tuple[EmbodimentInputStep, EmbodimentOutputStep]:
    """The two steps of a policy with embodiments.

    Args:
        config: The policy's configuration, with features and embodiments filled in.
        stats: Statistics by embodiment and feature; those of ``action`` after the embodiment's relative dimensions.
    """
    assert config.robot_state_feature is not None and config.action_feature is not None
    step = EmbodimentInputStep(
        embodiments=config.embodiments,
        slots=[key.removeprefix("observation.images.") for key in config.camera_keys],
        state_dim=config.robot_state_feature.shape[0],
        action_dim=config.action_feature.shape[0],
    )
    if stats is not None:
        step.set_stats(stats, config.normalization_mapping)
    return step, EmbodimentOutputStep(enabled=True, relative_step=step)
