"""A task that is not registered is named by its class wherever a person names tasks."""

import numpy as np
import pytest

import sim
from robot_drivers import make_driver
from vla_stack import envs
from vla_stack.errors import UserError
from vla_stack.schema import PolicySpec

PICK = "sim.tasks.pick:Pick"


def test_it_is_the_registered_one():
    spec = PolicySpec(sim.TASKS["pick"].arm.spec("ee_abs", (), 64, 10.0, privileged=True), 4)
    mine, ours = (envs.make(name, 1, spec) for name in (PICK, "sim/pick-v0"))
    assert mine.robot == ours.robot == spec.robot
    a, b = (rows.reset([0], [5])[0] for rows in (mine, ours))
    np.testing.assert_array_equal(a.observation["agent_pos"], b.observation["agent_pos"])
    limits = [rows.row(0).get_wrapper_attr("_max_episode_steps") for rows in (mine, ours)]
    assert limits[0] == limits[1] == sim.TASKS[PICK].limit(10.0)
    assert PICK not in sim.TASKS and "pick" in sim.TASKS  # the registered ones


def test_it_can_be_driven():
    driver = make_driver("sim", task=PICK, cameras=())
    driver.connect()
    assert "cube" in driver.reset(0) and driver.spec.name == "native/arm7"
    driver.disconnect()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("os:getcwd", "'os:getcwd' is no task -- a task is a subclass of sim.env.ArmEnv"),
        ("sim.tasks.pick:Pik", "task 'sim.tasks.pick:Pik' cannot be loaded: .*no attribute 'Pik'"),
        ("no_such_module:Task", "task 'no_such_module:Task' cannot be loaded: No module named"),
    ],
)
def test_what_is_none_is_said_in_one_line(name, words):
    with pytest.raises(UserError, match=words):
        sim.TASKS[name]
    with pytest.raises(UserError, match=name):
        envs.make(name)
