"""The other direction: our drivers as a LeRobot robot, for stock ``lerobot-record``, ``lerobot-rollout`` and others.

    lerobot-rollout --policy.path=DIR --robot.type=vla_robot --robot.driver=sim --robot.task=pick ...
    lerobot-record --robot.type=vla_robot --teleop.type=vla_replay --teleop.root=DATASET ...

Importing this registers both types with LeRobot. It looks for the classes here, in the package of their configs.
"""

from robot_drivers.as_lerobot.replay import VlaReplay, VlaReplayConfig
from robot_drivers.as_lerobot.robot import VlaRobot, VlaRobotConfig

__all__ = ["VlaReplay", "VlaReplayConfig", "VlaRobot", "VlaRobotConfig"]
