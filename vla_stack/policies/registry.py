"""Which policy types there are, which class each is, and which of them, and which processor steps, a file may name.

A class is ours where it adds something, LeRobot's or an installed package's for all others.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import vla_stack.policies.configuration_expo
import vla_stack.policies.configuration_moh
import vla_stack.policies.configuration_state
import vla_stack.policies.configuration_steered
import vla_stack.policies.configuration_vla  # noqa: F401  each registers its policy types
from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    PreTrainedConfig,
    PreTrainedPolicy,
    get_policy_class,
    import_type,
    lerobot_types,
    lightly,
)
from vla_stack.policies.contract import NoisePolicy
from vla_stack.registry import POLICIES, import_lerobot_plugins

LEROBOTS = (
    "act",
    "multi_task_dit",
    "tdmpc",
    "vqbet",
)  # policy types that we add nothing to, and that run no foreign code
QUEUED = ("multi_task_dit", "tdmpc", "vqbet")  # whose chunks are of a queue that select_action alone fills
STEPS = (
    *("to_batch_processor", "to_batch_processor_action", "to_batch_processor_observation"),
    *("to_batch_processor_complementary_data", "device_processor", "rename_observations_processor"),
    *("normalizer_processor", "unnormalizer_processor", "observation_processor", "tokenizer_processor"),
    *("relative_actions_processor", "absolute_actions_processor", "image_crop_resize_processor"),
    *("map_tensor_to_delta_action_dict", "map_delta_action_to_robot_action"),
    *("torch2numpy_action_processor", "numpy2torch_action_processor"),
    *("smolvla_new_line_processor", "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"),
)


@cache
def plugins() -> tuple[str, ...]:
    """Modules of the installed packages ``lerobot_policy_*``, imported once a process: so LeRobot finds them, too."""
    return tuple(import_lerobot_plugins("policy"))


def is_known(kind: str) -> bool:
    """Whether there is a policy type; installed packages are imported where LeRobot knows none of that name."""
    known = PreTrainedConfig.get_known_choices
    if kind not in known() and kind in lerobot_types():
        import_type(kind)
    if kind not in known():
        plugins()
    if kind not in known() and kind in POLICIES.names():
        POLICIES.get(kind)  # its module registers the configuration
    return kind in known()


def known_types() -> list[str]:
    """All policy types, for messages."""
    plugins()
    return sorted({*PreTrainedConfig.get_known_choices(), *lerobot_types(), *POLICIES.names()})


def is_extension(kind: type) -> bool:
    """Whether a class is ours, or of a package that somebody installed to extend LeRobot or this project."""
    top = kind.__module__.partition(".")[0]
    ours = {e.target.partition(":")[0].partition(".")[0] for e in POLICIES.entries().values()}
    return top in ours or top in plugins()


def policy_class(kind: str) -> type[PreTrainedPolicy]:
    """The class of a policy type.

    Raises:
        UserError: There is no such type, or it needs a package that is not installed.
    """
    if not is_known(kind):
        raise UserError(f"there is no policy type '{kind}'", f"the types are {', '.join(known_types())}")
    try:
        with lightly() if kind in lerobot_types() else nullcontext():
            return POLICIES.get(kind) if kind in POLICIES.names() else get_policy_class(kind)
    except ImportError as e:
        raise UserError(f"policy type '{kind}' needs a package: {str(e).splitlines()[0]}") from None


def pads(kind: str) -> bool:
    """Whether policies of a type fit any cameras and, by padding, any state and action."""
    found = POLICIES.get(kind) if kind in POLICIES.names() else None
    return found is not None and issubclass(found, NoisePolicy) and found.pads


def blank_policy(config: PreTrainedConfig) -> PreTrainedPolicy:
    """A policy whose weights are about to be replaced; of a type that can, without reading any."""
    kind = policy_class(config.type)
    return kind.blank(config) if hasattr(kind, "blank") else kind(config)
