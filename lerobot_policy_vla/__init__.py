"""Registers vla-stack with LeRobot's stock tools.

``--policy.type=vla``, ``moh``, ``state_gaussian``, ``state_flow``, ``expo`` or ``steered``,
``--env.type=vla_sim``, ``--robot.type=vla_robot``, ``--teleop.type=vla_replay``.
"""

import robot_drivers.as_lerobot  # noqa: F401
import sim.lerobot_env  # noqa: F401
import vla_stack.policies.configuration_expo
import vla_stack.policies.configuration_moh
import vla_stack.policies.configuration_state
import vla_stack.policies.configuration_steered
import vla_stack.policies.configuration_vla  # noqa: F401
