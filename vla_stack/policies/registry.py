"""Which class a policy type is: ours where it adds something, LeRobot's for all others."""

from __future__ import annotations

from lerobot.configs import PreTrainedConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.policies.factory import get_policy_class

import vla_stack.policies.configuration_moh  # registers the policy type `moh`
import vla_stack.policies.configuration_vla  # noqa: F401  registers the policy type `vla`
from vla_stack.errors import UserError
from vla_stack.registry import POLICIES

# LeRobot's VLAs as flow policies. They fit any cameras and, by padding, any state and action.
ADAPTERS = ("smolvla", "pi0", "pi05")


def policy_class(kind: str) -> type[PreTrainedPolicy]:
    """The class of a policy type.

    Raises:
        UserError: There is no such type, or it needs a package that is not installed.
    """
    if kind not in PreTrainedConfig.get_known_choices():
        known = ", ".join(sorted(PreTrainedConfig.get_known_choices()))
        raise UserError(f"there is no policy type '{kind}'", f"the types are {known}")
    try:
        return POLICIES.get(kind) if kind in POLICIES.built_in() else get_policy_class(kind)
    except ImportError as e:
        raise UserError(f"policy type '{kind}' needs a package: {str(e).splitlines()[0]}") from None
