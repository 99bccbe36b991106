"""Differential inverse kinematics: it follows a twist where it can, and slows down where it cannot."""

import numpy as np
import pytest

from sim.arm import ARM7
from vla_stack.errors import UserError
from vla_stack.runtime.kinematics import Kinematics
from vla_stack.schema import Dim, RobotSpec

ARM = ARM7.spec("joint_abs", (), 0, 30.0)
HOME = np.append(ARM7.posture, 0.3)


@pytest.fixture(scope="module")
def arm():
    return Kinematics("arm7", ARM)


def test_the_jacobian_is_the_derivative_of_the_tool(arm):
    step = 1e-6
    numeric = [(arm.tool(HOME + step * e) - arm.tool(HOME - step * e)) / (2 * step) for e in np.eye(8)[:7]]
    np.testing.assert_allclose(arm.jacobian(HOME)[:3], np.array(numeric).T, atol=1e-6)


@pytest.mark.parametrize("twist", [[0.1, 0, 0], [0, -0.1, 0.05], [0.05, 0, 0, 0, 0, 0.3]])
def test_it_moves_the_tool_as_asked(arm, twist):
    dq = arm.joint_velocity(HOME, np.array(twist))
    np.testing.assert_allclose((arm.jacobian(HOME) @ dq[:7])[: len(twist)], twist, atol=1e-6)
    assert dq[7] == 0.0  # the gripper is nobody's joint


def test_too_fast_a_twist_keeps_its_direction(arm):
    twist = np.array([3.0, 0.0, 0.0])
    dq = arm.joint_velocity(HOME, twist)
    assert np.abs(dq).max() == pytest.approx(2.5)  # rad/s, the arm's own limit
    got = arm.jacobian(HOME)[:3] @ dq[:7]
    assert got[0] > 0 and np.abs(got[1:]).max() < 1e-6


def test_stretched_out_it_stays_slow_and_inside_its_joints(arm):
    q = HOME.copy()
    for _ in range(600):  # 20 s of pulling the tool out of reach
        dq = arm.joint_velocity(q, np.array([0.3, 0.0, 0.2]))
        assert np.isfinite(dq).all() and np.abs(dq).max() <= 2.5 + 1e-9
        q = q + dq / 30.0
        assert (q[:7] >= ARM.action_low[:7] - 1e-6).all() and (q[:7] <= ARM.action_high[:7] + 1e-6).all()
    assert np.linalg.norm(arm.tool(q)) > 0.8


def test_a_joint_at_its_limit_leaves_the_work_to_the_others(arm):
    free = arm.joint_velocity(HOME, np.array([0.0, 0.1, 0.0]))
    j = int(np.abs(free[:7]).argmax())
    q = HOME.copy()
    q[j] = ARM.action_high[j] if free[j] > 0 else ARM.action_low[j]
    dq = arm.joint_velocity(q, np.array([0.0, 0.1, 0.0]))
    assert dq[j] * np.sign(free[j]) <= 1e-6


def test_bad_models_are_named(tmp_path):
    with pytest.raises(UserError, match="no kinematic model 'arm8'"):
        Kinematics("arm8", ARM)
    broken = tmp_path / "x.xml"
    broken.write_text("<mujoco/>")
    with pytest.raises(UserError, match="no site 'tcp'"):
        Kinematics(str(broken), RobotSpec("test/none", ARM.state, (Dim("a.pos", "rad"),), (), 30.0))


def test_what_would_touch_is_named(arm):
    assert arm.touching(HOME) == frozenset()
    q = HOME.copy()
    while not (touching := arm.touching(q)):  # down to the table
        q = q + arm.joint_velocity(q, np.array([0.0, 0.0, -0.3])) / 30.0
        assert arm.tool(q)[2] > -0.1
    assert all("table" in pair for pair in touching)
