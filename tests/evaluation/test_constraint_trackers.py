"""Keypoints from pictures, against where the simulator says that things are."""

from __future__ import annotations

from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest

import sim
from sim import objects
from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.dry_run import expert_episodes, problems
from vla_stack.evaluation.constraints.spec import load_spec
from vla_stack.evaluation.constraints.trackers import CameraModel, ColourTracker, TagTracker, track

SIZE = 256
CONFIGS = Path(__file__).parents[2] / "vla_stack" / "configs" / "constraints"
AHEAD = CameraModel(np.zeros(3), np.eye(3), 300.0, (127.5, 127.5))  # looks along -z


def test_a_pixel_is_a_point_on_a_plane():
    down = CameraModel(np.array([0.5, 0.0, 1.0]), np.eye(3), 300.0, (127.5, 127.5))
    np.testing.assert_allclose(down.on_plane(127.5, 127.5, 0.1), [0.5, 0.0, 0.1])
    np.testing.assert_allclose(down.on_plane(127.5 + 300, 127.5 - 150, 0.0), [1.5, 0.5, 0.0])
    with pytest.raises(UserError, match="does not see the plane"):
        down.on_plane(127.5, 127.5, 2.0)


def test_colours_are_found_where_the_cubes_are():
    env = gym.make(sim.TASKS["pick"].id, cameras=("front",), image_size=SIZE, disable_env_checker=True)
    raw, _ = env.reset(seed=3)
    colours = {c: tuple(int(255 * x) for x in rgb[:3]) for c, rgb in objects.COLOURS.items()}
    camera = CameraModel.of_simulation(env.unwrapped, "front", SIZE)
    found = ColourTracker(colours, height=1.5 * objects.CUBE).find(raw["pixels"]["front"], camera)
    for colour in objects.COLOURS:
        true = env.unwrapped.position(objects.cube_name(colour))
        assert np.hypot(*(found[colour] - true)[:2]) < 0.015
    env.close()


def test_tags_are_found_where_they_are():
    family = cv2.aruco.getPredefinedDictionary(cv2.aruco.DICT_APRILTAG_36h11)
    picture = np.full((SIZE, SIZE, 3), 255, np.uint8)
    picture[60:140, 100:180] = cv2.aruco.generateImageMarker(family, 5, 80)[..., None]
    size = 0.08
    depth = size * 300.0 / 79  # from the middle of its first pixel to that of its last
    found = TagTracker({5: "obj.box"}, size).find(picture, AHEAD)
    expected = [(139.5 - 127.5) / 300 * depth, (127.5 - 99.5) / 300 * depth, -depth]
    np.testing.assert_allclose(found["obj.box"], expected, atol=1e-3)
    assert TagTracker({6: "other"}, size).find(picture, AHEAD) == {}


class Scripted:
    """Sees what it is told."""

    def __init__(self, seen):
        self.seen = iter(seen)

    def find(self, picture, camera):
        return next(self.seen)


def test_what_is_hidden_stays_where_it_was_seen_last():
    a, b = np.array([1.0, 0, 0]), np.array([2.0, 0, 0])
    out = track([np.zeros((1, 1, 3), np.uint8)] * 4, AHEAD, Scripted([{}, {"x": a}, {}, {"x": b}]))
    assert out["x"][:, 0].tolist() == [1, 1, 1, 2]
    with pytest.raises(UserError, match="sees nothing"):
        track([np.zeros((1, 1, 3), np.uint8)], AHEAD, Scripted([{}]))


@pytest.mark.parametrize("task", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_shipped_constraints_fit_their_task(task):
    traces, success = expert_episodes(task, 4)
    assert success == [True, False, True, False]
    assert problems(load_spec(CONFIGS / f"{task}.yaml", traces[0].points), traces, success) == []
    assert traces[0].wrench[:, :3].any() and abs(traces[0].ee[:, 3:]).max() <= 1.0 + 1e-6
