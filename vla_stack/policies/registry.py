"""Which class a policy type is: ours where it adds something, LeRobot's or an installed package's for all others."""

from __future__ import annotations

from functools import cache

from lerobot.configs import PreTrainedConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.policies.factory import get_policy_class

import vla_stack.policies.configuration_expo
import vla_stack.policies.configuration_moh
import vla_stack.policies.configuration_state
import vla_stack.policies.configuration_vla  # noqa: F401  each registers its policy types
from vla_stack.errors import UserError
from vla_stack.policies.contract import NoisePolicy
from vla_stack.registry import POLICIES, import_lerobot_plugins


@cache
def plugins() -> tuple[str, ...]:
    """Modules of the installed packages ``lerobot_policy_*``, imported once a process: so LeRobot finds them, too."""
    return tuple(import_lerobot_plugins("policy"))


def is_known(kind: str) -> bool:
    """Whether there is a policy type; installed packages are imported where LeRobot knows none of that name."""
    known = PreTrainedConfig.get_known_choices
    if kind not in known():
        plugins()
    if kind not in known() and kind in POLICIES.names():
        POLICIES.get(kind)  # its module registers the configuration
    return kind in known()


def known_types() -> list[str]:
    """All policy types, for messages."""
    plugins()
    return sorted({*PreTrainedConfig.get_known_choices(), *POLICIES.names()})


def is_extension(kind: type) -> bool:
    """Whether a class is ours, or of a package that somebody installed to extend LeRobot or this project."""
    top = kind.__module__.partition(".")[0]
    return top in {e.target.partition(":")[0].partition(".")[0] for e in POLICIES.entries().values()} | {*plugins()}


def policy_class(kind: str) -> type[PreTrainedPolicy]:
    """The class of a policy type.

    Raises:
        UserError: There is no such type, or it needs a package that is not installed.
    """
    if not is_known(kind):
        raise UserError(f"there is no policy type '{kind}'", f"the types are {', '.join(known_types())}")
    try:
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
