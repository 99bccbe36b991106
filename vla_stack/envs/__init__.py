"""The one door to environments: by id, as rows that the engine steps, compared with the policy that acts in them."""

from vla_stack.envs.making import make, options_for
from vla_stack.envs.vector import EnvStep, VectorEnv

__all__ = ["EnvStep", "VectorEnv", "make", "options_for"]
