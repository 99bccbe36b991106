"""A recorded episode plays as a robot and as a teleoperator."""

import time

import numpy as np
import pytest

from robot_drivers import make_driver
from robot_drivers.teleop import make_teleop
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.runtime.driver import EpisodicDriver
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

DIMS = (Dim("x.pos", "m", -1, 1), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
SPEC = RobotSpec("test/arm", DIMS, DIMS, (Camera("front", 16, 16),), rate_hz=100.0)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay") / "data"
    with EpisodeRecorder(root, SPEC, image_mode="image") as recorder:
        for episode, length in enumerate((5, 3)):
            for i in range(length):
                image = np.full((16, 16, 3), 10 * episode + i, np.uint8)
                state = np.array([0.01 * i, episode], np.float32)
                recorder.add_frame(Observation(state, {"front": image}, f"task {episode}", i), state + 0.001)
            recorder.save_episode(success=episode == 1)
    return root


def test_it_plays_the_episode_that_the_seed_names(root):
    robot = make_driver("replay", root=str(root))
    assert isinstance(robot, EpisodicDriver)
    robot.connect()
    assert robot.spec == SPEC
    assert robot.reset(3) == "task 1"  # episode 3 modulo 2
    seen = {}
    deadline = time.monotonic() + PATIENCE_S
    while not robot.status()["done"]:
        assert time.monotonic() < deadline
        obs = robot.read()
        obs.check(SPEC)
        seen[obs.step] = (float(obs.state[0]), int(obs.images["front"][0, 0, 0]))
        robot.write(obs.state)
    assert all(v == (pytest.approx(0.01 * step), 10 + step) for step, v in seen.items())
    assert max(seen) == 2 and robot.status()["is_success"] and len(robot.sent) >= len(seen)
    robot.disconnect()


def test_its_commands_play_on_another_robot_and_then_end(root):
    teleop = make_teleop("replay", SPEC, root=str(root), episode=1)
    intents = [teleop.read(np.zeros(2)) for _ in range(4)]
    np.testing.assert_allclose([i.target[0] for i in intents], [0.001, 0.011, 0.021, 0.021], atol=1e-6)
    assert [i.event for i in intents] == ["", "", "", "end"]


def test_an_episode_that_is_not_there_is_named(root):
    with pytest.raises(UserError, match="has no episode 2 -- it has 0 to 1"):
        make_teleop("replay", SPEC, root=str(root), episode=2)
    other = RobotSpec("x", DIMS[:1], DIMS[:1], (), 30.0)
    with pytest.raises(UserError, match="commands x.pos, gripper.pos -- the robot takes x.pos"):
        make_teleop("replay", other, root=str(root))
