"""A dry run reads a robot, prints commands and sends none."""

import numpy as np

from robot_drivers.dry_run import dry_run
from vla_stack.runtime.driver import Capabilities, EpisodicDriver
from vla_stack.schema import Dim, Observation, RobotSpec

DIMS = (Dim("elbow.pos", "rad", -1, 1), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))


class Robot:
    spec = RobotSpec("test/arm", DIMS, DIMS, (), 30.0)
    stages = ()
    capabilities = Capabilities()

    def __init__(self):
        self.commanded = 0

    def connect(self): ...

    def disconnect(self): ...

    def read(self):
        return Observation(np.array([0.25, 0.5], np.float32), {}, "", 0, 0)

    def write(self, action):
        self.commanded += 1
        return action

    def hold(self):
        self.commanded += 1

    stop = hold

    def reset(self, seed):
        return "task"

    def status(self):
        return {"done": False}


def test_commands_are_printed_and_not_sent(capsys):
    robot = Robot()
    dry = dry_run(robot, every_s=3600.0)
    dry.read()
    action = np.array([0.5, 1.0], np.float32)
    np.testing.assert_array_equal(dry.write(action), action)
    dry.write(action)
    dry.hold()
    dry.stop()
    assert robot.commanded == 0
    assert capsys.readouterr().out == (
        "dry run, command 1: elbow.pos +0.500 (+0.250) rad, gripper.pos +1.000 (+0.500) ratio\n"
    )
    assert isinstance(dry, EpisodicDriver) and dry.reset(0) == "task"  # everything else is the robot's
