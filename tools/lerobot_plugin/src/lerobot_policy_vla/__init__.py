"""Registers vla-stack with LeRobot: ``--policy.type=vla`` or ``moh``, ``--env.type=vla_sim`` in the stock tools."""

import sim.lerobot_env  # noqa: F401
import vla_stack.policies.configuration_moh
import vla_stack.policies.configuration_vla  # noqa: F401
