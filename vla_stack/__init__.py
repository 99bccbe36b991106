"""Train, align, improve, serve and run vision-language-action policies.

    import vla_stack as vla

    vla.rollout(vla.load_policy("shipped"), "sim/pick-v0", episodes=20).success

The functions are those of :mod:`vla_stack.api`, imported when they are asked for.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vla_stack.version import __version__ as __version__

if TYPE_CHECKING:
    from vla_stack.api import Rollouts as Rollouts
    from vla_stack.api import collect as collect
    from vla_stack.api import load_policy as load_policy
    from vla_stack.api import make_env as make_env
    from vla_stack.api import open_dataset as open_dataset
    from vla_stack.api import rollout as rollout
    from vla_stack.api import serve as serve
    from vla_stack.api import train as train

__all__ = ["Rollouts", "collect", "load_policy", "make_env", "open_dataset", "rollout", "serve", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vla_stack' has no attribute '{name}'")
    from vla_stack import api

    return getattr(api, name)


class _Called(ModuleType):
    """The room ``vla_stack.rollout``, which takes the place of the function of that name once it is imported."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return __getattr__("rollout")(*args, **settings)


class _Package(ModuleType):
    """Importing a room makes it an attribute of this package."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rollout" and isinstance(value, ModuleType):
            value.__class__ = _Called
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
