"""What surrounds an exported graph, for a server without torch; see :mod:`vla_stack.policies.plain_policy`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vla_stack.lerobot_core import (
    AbsoluteActionsProcessorStep,
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    FeatureType,
    NormalizationMode,
    NormalizerProcessorStep,
    RelativeActionsProcessorStep,
    RenameObservationsProcessorStep,
    UnnormalizerProcessorStep,
)
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.plain_policy import Plain
from vla_stack.policies.processor_text import FrozenTextStep, HashTokenizerStep, TokenizerStep
from vla_stack.policies.processor_vla import ActionOriginStep
from vla_stack.schema import ACTION, OBS_STATE

STANDARD, MEAN, STD = NormalizationMode.MEAN_STD, f"{ACTION}.mean", f"{ACTION}.std"

BEFORE = [  # and one for words, anywhere
    RenameObservationsProcessorStep,
    AddBatchDimensionProcessorStep,
    ActionOriginStep,
    DeviceProcessorStep,
    RelativeActionsProcessorStep,
    NormalizerProcessorStep,
]
WORDS = (HashTokenizerStep, TokenizerStep, FrozenTextStep)
BEHIND = [UnnormalizerProcessorStep, AbsoluteActionsProcessorStep, DeviceProcessorStep]


def plain_of(chunks: ChunkPolicy) -> Plain | None:
    """What a loaded policy's processors do; None where that is more than a server without torch can."""
    steps: dict[type, Any] = {type(step): step for step in chunks.preprocessor.steps}
    kinds = [type(step) for step in chunks.preprocessor.steps]
    words = next((step for kind in WORDS if (step := steps.get(kind))), None)
    if words is None or [kind for kind in kinds if kind is not type(words)] != BEFORE or len(kinds) > len(steps):
        return None
    if getattr(words, "with_state", False) or (isinstance(words, FrozenTextStep) and not words.shipped):
        return None
    if [type(step) for step in chunks.postprocessor.steps] != BEHIND:
        return None
    relative, normalizer = steps[RelativeActionsProcessorStep], steps[NormalizerProcessorStep]
    spec, size = chunks.spec, len(chunks.spec.robot.action)
    mapped = [normalizer.norm_map.get(kind) for kind in (FeatureType.STATE, FeatureType.ACTION, FeatureType.VISUAL)]
    if steps[RenameObservationsProcessorStep].rename_map or mapped != [STANDARD, STANDARD, NormalizationMode.IDENTITY]:
        return None
    if (chunks.policy.noise_dim, chunks.policy.action_dim) != (size, size):
        return None
    numbers = {key: value.float().cpu().numpy().ravel() for key, value in normalizer.state_dict().items()}
    inverse = chunks.postprocessor.steps[0].state_dict()
    if any(not np.array_equal(inverse[key].cpu().numpy().ravel(), numbers[key]) for key in (MEAN, STD)):
        return None
    # It has no velocity to ask, but takes prefixes.
    extras = {**spec.extras, "continues": ["prefix"] * (spec.d_train_max > 0)}
    return Plain(
        spec=replace(spec, normalisation="", model_version="", extras=extras),
        buckets=words.buckets if isinstance(words, HashTokenizerStep) else 0,
        tokenizer=words.content.decode() if isinstance(words, TokenizerStep) else "",
        encoder=words.shipped if isinstance(words, FrozenTextStep) else "",
        words=words.length,
        epsilon=normalizer.eps,
        state_mean=numbers[f"{OBS_STATE}.mean"],
        state_std=numbers[f"{OBS_STATE}.std"],
        action_mean=numbers[MEAN],
        action_std=numbers[STD],
        relative=np.array(relative._build_mask(size), np.float32) * np.float32(relative.enabled),
    )
