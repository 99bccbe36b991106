"""Poses of the tool from what robots measure and are commanded in, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim.arm import ARM7
from sim.so101 import SO101
from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec
from vla_stack.world_model.rehearsal import driving
from vla_stack.world_model.tool import FILES, check_commands_poses, kinematics_beside, tool_of

URDF = """<robot name="planar">
  <link name="base"/>
  <link name="upper"><visual><geometry><mesh filename="gone.stl"/></geometry></visual></link>
  <link name="lower"/>
  <link name="{tool}"/>
  <joint name="lift" type="revolute"><parent link="base"/><child link="upper"/><origin xyz="0 0 0.3"/>
    <axis xyz="0 1 0"/><limit lower="-2" upper="2" effort="1" velocity="1"/></joint>
  <joint name="bend" type="revolute"><parent link="upper"/><child link="lower"/><origin xyz="0.2 0 0"/>
    <axis xyz="0 1 0"/><limit lower="-2" upper="2" effort="1" velocity="1"/></joint>
  <joint name="hand" type="fixed"><parent link="lower"/><child link="{tool}"/><origin xyz="0.1 0 0"/></joint>
</robot>"""
JAW = Dim("jaw.pos", "ratio", 0.2, 0.8, kind="gripper")
DIMS = (Dim("lift.pos", "rad", -2, 2), Dim("bend.pos", "rad", -2, 2), JAW)
PLANAR = RobotSpec("mine/planar", DIMS, DIMS, (), 10.0)


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("sim/pick-v0", {"control_mode": "ee_abs"}),
        ("sim/pick-v0", {"control_mode": "ee_delta"}),
        ("sim/pick-v0", {"control_mode": "joint_abs"}),
        ("sim/so101_pick-v0", {}),
        ("sim/so101_pick-v0", {"control_mode": "ee_abs"}),
        ("sim/so101_pick-v0", {"control_mode": "ee_delta"}),
    ],
)
def test_every_way_of_commanding_an_arm_says_the_same_poses(env_id: str, options: dict) -> None:
    """As the simulator knows them; and a state follows from its pose."""
    env = gym.make(env_id, cameras=(), **options)
    raw, _ = env.reset(seed=3)
    task: Any = env.unwrapped
    tool, expert = tool_of(task.spec_robot), sim.make_expert(env)
    command = task.tool_command
    for _ in range(12):
        action = expert.act()
        state = np.asarray(raw["agent_pos"], np.float32)
        np.testing.assert_allclose(tool.measured(state[None])[0], task.tool, atol=2e-4)
        command = tool.commanded(action, command.astype(np.float32))
        raw = env.step(action)[0]
        np.testing.assert_allclose(command, task.tool_command, atol=2e-4)
        after = np.asarray(raw["agent_pos"], np.float32)
        again = tool.state(tool.measured(after[None])[0], state)
        assert again.shape == after.shape
        np.testing.assert_allclose(tool.measured(again[None])[0], task.tool, atol=2e-3)
        np.testing.assert_allclose(again, after, atol=0.05)


@pytest.mark.parametrize("name", FILES)
def test_an_arm_of_your_own_has_its_model_beside_the_data(tmp_path: Path, name: str) -> None:
    (tmp_path / "meta").mkdir()
    assert kinematics_beside(tmp_path) == ""
    with pytest.raises(UserError, match="mine/planar measures lift.pos, .* -- put a MuJoCo model or URDF"):
        tool_of(PLANAR)
    (tmp_path / "meta" / name).write_text(URDF.format(tool="tcp"))
    bare = kinematics_beside(tmp_path)
    assert "mesh" not in bare
    tool = tool_of(PLANAR, bare)
    straight, down = tool.measured(np.array([[0, 0, 0.8], [0, np.pi / 2, 0.2]], np.float32))
    np.testing.assert_allclose(straight, [0.3, 0, 0.3, 0, 1], atol=1e-6)
    np.testing.assert_allclose(down, [0.2, 0, 0.2, down[3], 0], atol=1e-6)
    state = tool.state(np.array([0.2, 0, 0.2, 0, 0.5], np.float32), np.array([0.1, 1.4, 0.3], np.float32))
    assert state[2] == pytest.approx(0.5) and tool.measured(state[None])[0, :3] == pytest.approx(
        [0.2, 0, 0.2], abs=0.02
    )


def test_a_model_that_says_too_little_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    path = tmp_path / "meta" / FILES[1]
    path.write_text(URDF.format(tool="hand"))
    with pytest.raises(UserError, match="no site and no link 'tcp'"):
        kinematics_beside(tmp_path)
    path.write_text("<robot>")
    with pytest.raises(UserError, match="give a model that MuJoCo loads"):
        kinematics_beside(tmp_path)
    path.write_text(URDF.format(tool="tcp"))
    bare = kinematics_beside(tmp_path)
    dims = (Dim("x.pos", "rad"), DIMS[1], JAW)
    others = replace(PLANAR, state=dims, action=dims)
    with pytest.raises(UserError, match="first joint of the kinematic model is 'lift', mine/planar has bend, x"):
        tool_of(others, bare)
    with pytest.raises(UserError, match="needs one gripper"):
        tool_of(replace(PLANAR, action=PLANAR.action[:2]), bare)
    moved = replace(PLANAR, action_kind="delta")
    with pytest.raises(UserError, match="takes delta actions"):
        tool_of(moved, bare)


def test_what_gives_poses_is_not_given_to_joints() -> None:
    joints = SO101.spec("joint_abs", (), 64, 10.0)
    with pytest.raises(UserError, match="steering commands poses of the tool, native/so101 is commanded in sh"):
        check_commands_poses(joints, "steering")
    check_commands_poses(ARM7.spec("ee_abs", (), 64, 10.0), "steering")
    with pytest.raises(UserError, match="driving to a random place"):
        driving(np.zeros(6, np.float32), joints, 0, 0.05)


def test_a_tool_that_does_not_turn_has_no_direction() -> None:
    dims = tuple(Dim(f"hand_{axis}.pos", "m", -1, 1) for axis in "xyz") + (
        Dim("gripper.pos", "ratio", 0, 1, kind="gripper"),
    )
    tool = tool_of(RobotSpec("metaworld/sawyer", dims, dims, (), 20.0))
    state = np.array([0.1, 0.2, 0.3, 0.7], np.float32)
    pose = tool.measured(state[None])[0]
    assert pose.tolist() == pytest.approx([0.1, 0.2, 0.3, 0, 0.7])
    np.testing.assert_array_equal(tool.commanded(state, pose), pose)
    np.testing.assert_array_equal(tool.state(pose, 0 * state), state)


def test_an_arm_that_takes_poses_needs_a_model_for_its_joints_alone() -> None:
    pose = (*ARM7.tool, Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
    plain = RobotSpec("mine/arm", pose, pose, (), 10.0)
    numbers = np.array([0.4, 0.1, 0.2, 0.3, 1.0], np.float32)
    np.testing.assert_array_equal(tool_of(plain).state(numbers, 0 * numbers), numbers)
    with pytest.raises(UserError, match="mine/arm measures .* joint_7.pos and takes absolute"):
        tool_of(replace(ARM7.spec("ee_abs", (), 64, 10.0), name="mine/arm"))
