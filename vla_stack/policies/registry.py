"""Which class a policy type is: ours where it adds something, LeRobot's for all others."""

from __future__ import annotations

import importlib

from lerobot.configs import PreTrainedConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.policies.factory import get_policy_class

import vla_stack.policies.configuration_moh  # registers the policy type `moh`
import vla_stack.policies.configuration_vla  # noqa: F401  registers the policy type `vla`
from vla_stack.errors import UserError

# LeRobot's VLAs as flow policies. They fit any cameras and, by padding, any state and action.
ADAPTERS = {
    "smolvla": ("vla_stack.policies.adapters.smolvla", "SmolVLA"),
    "pi0": ("vla_stack.policies.adapters.pi", "Pi0"),
    "pi05": ("vla_stack.policies.adapters.pi", "Pi05"),
}
PLAIN = {"diffusion": ("vla_stack.policies.adapters.diffusion", "Diffusion")}


def policy_class(kind: str) -> type[PreTrainedPolicy]:
    """The class of a policy type.

    Raises:
        UserError: There is no such type, or it needs a package that is not installed.
    """
    if kind not in PreTrainedConfig.get_known_choices():
        known = ", ".join(sorted(PreTrainedConfig.get_known_choices()))
        raise UserError(f"there is no policy type '{kind}'", f"the types are {known}")
    try:
        if ours := {**ADAPTERS, **PLAIN}.get(kind):
            module, name = ours
            return getattr(importlib.import_module(module), name)
        return get_policy_class(kind)
    except ImportError as e:
        raise UserError(f"policy type '{kind}' needs a package: {str(e).splitlines()[0]}") from None
