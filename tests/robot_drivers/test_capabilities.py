"""What a robot can do is known from its class, before there is a robot."""

import pytest

from robot_drivers import driver_type
from vla_stack.errors import UserError
from vla_stack.registry import ROBOTS
from vla_stack.runtime.driver import Capabilities, Guard
from vla_stack.schema import Camera, Dim, RobotSpec

DIMS = (Dim("joint.pos", "rad"),)


def robot(*sizes):
    return RobotSpec("test/robot", DIMS, DIMS, tuple(Camera(f"c{i}", *s) for i, s in enumerate(sizes)), 12.0)


@pytest.mark.parametrize("name", ROBOTS.built_in())
def test_every_robot_declares_them(name):
    can = driver_type(name).capabilities
    assert isinstance(can, Capabilities) and set(can.like(robot((48, 48)))).isdisjoint(can.unlimited)


def test_pictures_and_rate_of_another_robot():
    sim, real = (driver_type(name).capabilities for name in ("sim", "lerobot"))
    shown = {"control_hz": 12.0, "cameras": ("c0",), "image_size": 64, "control_mode": "joint_abs"}
    assert sim.like(robot((64, 64))) == shown | {"privileged": False, "tool_target": False}
    with pytest.raises(UserError, match="square images of one size, the policy wants c0 48x64"):
        sim.like(robot((48, 64)))
    assert real.like(robot((48, 64))) == {"rate_hz": 12.0, "image_size": (48, 64)}
    assert real.like(robot((48, 64), (64, 64))) == {"rate_hz": 12.0}
    assert sim.simulated and not real.simulated and sim.guard is Guard.DEVICE
