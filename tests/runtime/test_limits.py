"""A limits file is read completely or refused with the name of what is wrong."""

import pytest

from sim.arm import ARM7
from vla_stack.errors import UserError
from vla_stack.runtime.limits import check_limits, describe_limits, read_limits

ARM = ARM7.spec("joint_abs", (), 0, 30.0)
GOOD = """
robot: native/arm7
dimensions:
  joint_1.pos: {low: -1.0, high: 1.0, max_rate: 0.5, max_acceleration: 4, max_load: 0.6}
  joint_2.pos: {high: 1.2}
tool: {kinematics: arm7, x: [0.2, 0.6], z: [0.05, 0.5]}
soft_start_s: 1
max_refusals: 3
"""


def write(tmp_path, text):
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    return path


def test_a_limits_file_becomes_the_envelope(tmp_path):
    limits = read_limits(write(tmp_path, GOOD))
    check_limits(limits, ARM)
    assert limits.safety.workspace == {"joint_1.pos": (-1.0, 1.0), "joint_2.pos": (-float("inf"), 1.2)}
    assert limits.safety.max_rate == {"joint_1.pos": 0.5} and limits.max_load == {"joint_1.pos": 0.6}
    assert limits.safety.tool_box == {"x": (0.2, 0.6), "z": (0.05, 0.5)} and limits.safety.max_refusals == 3
    table = describe_limits(ARM, limits.safety).splitlines()
    assert table[1].split() == ["joint_1.pos", "-1.000", "1.000", "0.5", "4", "rad"]
    assert "tool z" in table[-2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("robot: native/arm7", ""), "there is no 'robot'"),
        (("max_refusals", "max_refusal"), "unknown key 'max_refusal'"),
        (("max_load", "max_laod"), r"unknown key 'dimensions.joint_1.pos.max_laod'"),
        (("max_rate: 0.5", "max_rate: -1"), r"dimensions.joint_1.pos.max_rate is -1"),
        (("max_rate: 0.5", "max_rate: fast"), "max_rate is 'fast'"),
        (("low: -1.0", "low: 2.0"), "low 2 is not below high 1"),
        (("x: [0.2, 0.6]", "x: 0.2"), "tool.x is 0.2"),
        (("kinematics: arm7, ", ""), "tool needs 'kinematics'"),
        (("soft_start_s: 1", "soft_start_s: -1"), "soft_start_s is -1"),
        (("dimensions:", "dimensions: 3 #"), "limits file"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        read_limits(write(tmp_path, GOOD.replace(*change)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("native/arm7", "lerobot/so_follower"), "are for 'lerobot/so_follower', the robot is 'native/arm7'"),
        (("joint_2", "joint_9"), "no action dimension 'joint_9.pos'"),
        (("kinematics: arm7", "kinematics: arm8"), "no kinematic model 'arm8'"),
    ],
)
def test_limits_of_another_robot_are_refused(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        check_limits(read_limits(write(tmp_path, GOOD.replace(*change))), ARM)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="none.yaml"):
        read_limits(tmp_path / "none.yaml")
