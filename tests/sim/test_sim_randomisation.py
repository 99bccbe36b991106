"""Each level changes what it says, from the nominal model, as its seed says."""

import gymnasium as gym
import numpy as np
import pytest

from sim.drives import Drives
from sim.library import PALETTE
from sim.randomisation import BESIDE, LEVELS, NAMELESS, Level, Randomiser
from vla_stack.errors import UserError

SURROUNDINGS = ({"texture": 0.6}, {"background": 0.7}, {"distractors": 6})
FIELDS = {
    "geom_rgba": "colour",
    "mat_rgba": "colour",
    "light_diffuse": "light",
    "light_pos": "light_shift",
    "cam_pos": "camera_shift",
    "cam_quat": "camera_turn",
    "body_mass": "mass",
    "body_inertia": "mass",
    "geom_friction": "friction",
}


def fields(model):
    return {f: getattr(model, f).copy() for f in FIELDS}


@pytest.fixture
def model():
    return gym.make("sim/pick-v0", cameras=()).unwrapped.model


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_a_level_changes_exactly_what_it_names(level):
    model = gym.make("sim/pick-v0", cameras=(), randomisation=level).unwrapped.model
    before = fields(model)
    delay = Randomiser(model, LEVELS[level]).apply(seed=1)
    for name, after in fields(model).items():
        assert (after != before[name]).any() == (getattr(LEVELS[level], FIELDS[name]) > 0), name
    assert (delay > 0) == (LEVELS[level].delay > 0)


def test_changes_stay_in_their_bounds(model):
    before, level = fields(model), LEVELS[2]
    randomiser = Randomiser(model, level)
    for seed in range(30):
        assert 0 <= randomiser.apply(seed) <= level.delay
        assert np.abs(model.cam_pos - before["cam_pos"]).max() <= level.camera_shift
        assert np.abs(model.geom_rgba - before["geom_rgba"]).max() <= level.colour + 1e-6
        assert np.abs(np.log(model.body_mass[1:] / before["body_mass"][1:])).max() <= level.mass + 1e-9
        np.testing.assert_allclose(np.linalg.norm(model.cam_quat, axis=1), 1.0, atol=1e-9)


def test_a_seed_gives_the_same_world_whatever_came_before(model):
    randomiser = Randomiser(model, LEVELS[2])
    first_delay, first = randomiser.apply(7), fields(model)
    randomiser.apply(8)
    assert any((fields(model)[f] != first[f]).any() for f in FIELDS)
    assert randomiser.apply(7) == first_delay
    assert all((fields(model)[f] == first[f]).all() for f in FIELDS)


def test_robot_and_colour_identity_survive(model):
    """A red cube stays the reddest and the arm keeps its colours, whatever the shade."""
    shell = model.mat("shell").rgba.copy()
    randomiser = Randomiser(model, LEVELS[2])
    for seed in range(30):
        randomiser.apply(seed)
        for channel, colour in enumerate(("red", "green", "blue")):
            assert model.geom(f"cube_{colour}").rgba[:3].argmax() == channel
        assert (model.mat("shell").rgba == shell).all()


def test_levels_share_layout_and_instruction():
    envs = [gym.make("sim/pick-v0", cameras=(), randomisation=i).unwrapped for i in range(len(LEVELS))]
    for env in envs:
        env.reset(seed=3)
    assert len({e.task for e in envs}) == 1
    cubes = [e.position("cube_red") for e in envs]
    assert all(np.allclose(c, cubes[0]) for c in cubes)


def test_action_delay_shifts_the_motion():
    def height_after_one_step(delay):
        env = gym.make("sim/pick-v0", cameras=()).unwrapped
        env._randomiser = Randomiser(env.model, Level(delay=1e-9))
        env.reset(seed=0)
        env._delay = delay
        target = env.tool_command + [0, 0, 0.05, 0, 0]
        start = env.tool[2]
        env.step(np.float32(target))
        return env.tool[2] - start

    moved = [height_after_one_step(d) for d in (0.0, 0.03, 0.06)]
    assert moved[0] > moved[1] > moved[2] > 0


def test_a_command_that_is_late_by_more_than_a_step_is_the_same_command():
    drives, told = Drives(2, True, latest=1.6), []
    for k in range(1, 7):
        told += drives.path(np.full(2, float(k)), 4, 1.6).tolist()
    joint, gripper = np.array(told).T
    np.testing.assert_allclose(joint, np.maximum(0.0, np.arange(1, 25) / 4 - 1.6), atol=1e-12)
    assert gripper.tolist() == np.maximum(0.0, np.ceil(np.arange(1, 25) / 4 - 1.6)).tolist()


@pytest.mark.parametrize("task", ["pick", "so101_pick"])
@pytest.mark.parametrize("width", SURROUNDINGS, ids=lambda width: next(iter(width)))
def test_surroundings_change_what_is_seen_and_nothing_that_is_touched(task, width):
    plain, varied = (gym.make(f"sim/{task}-v0", image_size=32, randomisation=w).unwrapped for w in (0, width))
    (a, about), (b, told) = (env.reset(seed=4) for env in (plain, varied))
    assert about == told
    np.testing.assert_array_equal(a["agent_pos"], b["agent_pos"])
    assert any((a["pixels"][camera] != b["pixels"][camera]).any() for camera in a["pixels"])
    again, _ = varied.reset(seed=4)
    assert all((again["pixels"][camera] == b["pixels"][camera]).all() for camera in b["pixels"])
    action = plain.tool_command + [0.02, 0.05, -0.05, 0.0, 0.0]
    if plain.control_mode == "joint_abs":
        action = np.append(plain.joint_command, 0.5) + 0.05
    for _ in range(10):
        seen = [env.step(np.float32(action))[0]["agent_pos"] for env in (plain, varied)]
    np.testing.assert_array_equal(*seen)


def test_distractors_lie_beside_on_the_table():
    env = gym.make("sim/pick-v0", cameras=(), randomisation={"distractors": 4}).unwrapped
    places = []
    for seed in range(20):
        env.reset(seed=seed)
        geoms = [env.model.geom(f"distractor_{i}").id for i in range(4)]
        places.append(env.data.geom_xpos[geoms].copy())
    x, y, z = np.array(places).reshape(-1, 3).T
    (near, far), (inner, outer) = BESIDE
    assert (near <= x).all() and (x <= far).all() and (inner <= abs(y)).all() and (abs(y) <= outer).all()
    assert (z > 0).all() and {*np.sign(y)} == {-1.0, 1.0} and len(np.unique(x)) == 80


def test_no_distractor_has_a_colour_that_a_sentence_names():
    env = gym.make("sim/pick-v0", cameras=(), randomisation={"distractors": 6}).unwrapped
    for seed in range(20):
        env.reset(seed=seed)
        for i in range(6):
            rgb = env.model.geom(f"distractor_{i}").rgba[:3]
            assert min(np.linalg.norm(rgb - named) for named in PALETTE.values()) > NAMELESS - 1e-6


def test_a_width_that_no_level_has_is_named():
    with pytest.raises(UserError, match="no option 'colours' -- the nearest option is 'colour'"):
        gym.make("sim/pick-v0", cameras=(), randomisation={"colours": 0.1})


@pytest.mark.parametrize(
    ("width", "remedy"),
    [
        ({"light": 2.0}, "a number from 0 to 1"),
        ({"friction": -0.2}, "a number of at least 0"),
        ({"delay": "much"}, "a number of at least 0"),
        ({"distractors": 2.5}, "a whole number of at least 0"),
        ({"mass": float("nan")}, "a number of at least 0"),
    ],
)
def test_a_width_out_of_range_is_refused(width, remedy):
    with pytest.raises(UserError, match=f"randomisation: {next(iter(width))}=.* is out of range -- give {remedy}"):
        gym.make("sim/pick-v0", cameras=(), randomisation=width)
