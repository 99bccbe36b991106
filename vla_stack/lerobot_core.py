"""The names of LeRobot that every policy needs, imported in a second: without its other policies and their libraries.

Import these from here. LeRobot's own packages (``lerobot.policies``, ``lerobot.configs``, ``lerobot.processor``) give
the same objects, and twenty seconds later; see :mod:`vla_stack.light_imports`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from pathlib import Path

import lerobot
from lerobot.lerobot_types import EnvTransition, PolicyAction, TransitionKey

from vla_stack.light_imports import light

_PACKAGES = ("lerobot.policies", "lerobot.configs", "lerobot.processor", "lerobot.datasets")

_LATER = (  # used by functions that most processes never call
    "peft",
    "diffusers.optimization",
    "lerobot.configs.train",
    "lerobot.envs",
    "lerobot.policies.evo1.configuration_evo1",
    "lerobot.policies.groot.configuration_groot",
)

with light(_PACKAGES, _LATER):
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.configs.types import FeatureType, NormalizationMode, PipelineFeatureType, PolicyFeature
    from lerobot.optim.optimizers import AdamWConfig, OptimizerConfig
    from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig, LRSchedulerConfig
    from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor.batch_processor import AddBatchDimensionProcessorStep
    from lerobot.processor.device_processor import DeviceProcessorStep
    from lerobot.processor.factory import make_default_policy_processor_steps, make_policy_processor_pipelines
    from lerobot.processor.normalize_processor import NormalizerProcessorStep, UnnormalizerProcessorStep
    from lerobot.processor.pipeline import PolicyProcessorPipeline, ProcessorStep, ProcessorStepRegistry
    from lerobot.processor.relative_action_processor import AbsoluteActionsProcessorStep, RelativeActionsProcessorStep
    from lerobot.processor.rename_processor import RenameObservationsProcessorStep

__all__ = [
    "AbsoluteActionsProcessorStep",
    "AdamWConfig",
    "AddBatchDimensionProcessorStep",
    "CosineDecayWithWarmupSchedulerConfig",
    "DeviceProcessorStep",
    "EnvTransition",
    "FeatureType",
    "LRSchedulerConfig",
    "NormalizationMode",
    "NormalizerProcessorStep",
    "OptimizerConfig",
    "PipelineFeatureType",
    "PolicyAction",
    "PolicyFeature",
    "PolicyProcessorPipeline",
    "PreTrainedConfig",
    "PreTrainedPolicy",
    "ProcessorStep",
    "ProcessorStepRegistry",
    "RelativeActionsProcessorStep",
    "RenameObservationsProcessorStep",
    "TransitionKey",
    "UnnormalizerProcessorStep",
    "get_policy_class",
    "import_type",
    "lightly",
    "lerobot_types",
    "make_default_policy_processor_steps",
    "make_policy_config",
    "make_policy_processor_pipelines",
    "make_pre_post_processors",
]


def lightly(*later: str) -> AbstractContextManager[None]:
    """A block in which further modules of LeRobot are imported without its packages' initialisers.

    Args:
        later: Modules that those need in functions alone, see :func:`~vla_stack.light_imports.light`.
    """
    return light(_PACKAGES, later)


def import_type(kind: str) -> None:
    """Have one of :func:`lerobot_types` registered with LeRobot, and no other."""
    with lightly():
        import_module(f"lerobot.policies.{kind}.configuration_{kind}")


@cache
def lerobot_types() -> tuple[str, ...]:
    """LeRobot's own policy types; ``lerobot.policies.<type>.configuration_<type>`` registers one."""
    folders = [file.parent for file in (Path(lerobot.__path__[0]) / "policies").glob("*/configuration_*.py")]
    return tuple(sorted(f.name for f in folders if (f / f"modeling_{f.name}.py").is_file() and f.name != "rtc"))
