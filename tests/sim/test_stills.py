"""Moments of scenes: what they say of themselves is what the pictures show."""

import gymnasium as gym
import numpy as np
import pytest

import sim  # noqa: F401  registers the tasks
from sim.library import PALETTE
from sim.stills import COLOURS, MOST, NAMES, in_picture, still


def make(task, **kwargs):
    return gym.make(f"sim/{task}-v0", **kwargs).unwrapped


@pytest.mark.parametrize("anywhere", [0.0, 1.0])
def test_a_plain_button_has_its_colour_where_it_is_said_to_be(anywhere):
    env, rng, looked = make("press", image_size=128), np.random.default_rng(0), 0
    for seed in range(8):
        told = still(env, seed, rng, anywhere)
        for camera, seen in zip(("front", "wrist"), told.pixels, strict=True):
            for i in range(3):  # the buttons
                if np.isnan(seen[i]).any():
                    continue
                x, y = (seen[i] * 128).astype(int)
                around = told.observation["pixels"][camera][max(0, y - 2) : y + 3, max(0, x - 2) : x + 3] / 255.0
                colour = np.array(PALETTE[COLOURS[told.colours[i]]])
                # Light and the arm may change some of it: the nearest pixel has nearly that hue.
                unit = around / np.linalg.norm(around, axis=-1, keepdims=True).clip(1e-6)
                looked += bool((unit @ colour / np.linalg.norm(colour)).max() > 0.97)
                assert NAMES[told.kinds[i]] == "button"
    assert looked >= 20


def test_what_is_named_first_is_what_the_sentence_means():
    env, rng = make("pick_any"), np.random.default_rng(1)
    for seed in range(10):
        told = still(env, seed, rng)
        assert told.sentence == env.task and (told.kinds >= 0).sum() == MOST
        assert told.places[0] == pytest.approx(env.position(env.target)[:2], abs=0.06)
        assert (told.places[1] == np.float32(env.position(env.subjects[0])[:2])).all()


def test_the_scene_is_the_seeds_wherever_the_arm_is():
    env = make("pick_any")
    first, other = (still(env, 5, np.random.default_rng(0), share) for share in (0.0, 1.0))
    assert first.sentence == other.sentence and (first.places[1:] == other.places[1:]).all()
    assert (first.kinds == other.kinds).all() and (first.colours == other.colours).all()
    assert (first.observation["agent_pos"] != other.observation["agent_pos"]).any()


def test_some_moments_into_an_episode_things_are_held_and_told_where_they_are_now():
    env, rng = make("place"), np.random.default_rng(0)
    told, held, over = [], [], []
    for seed in range(30):
        told.append(still(env, seed, rng, later=1.0))
        held.append(env.grasped(env.subjects[0]))
        now = np.array([env.position(body)[:2] for body in env.subjects])
        goal = env.expert_goal()
        assert told[-1].places[1:] == pytest.approx(now) and told[-1].places[0] == pytest.approx(goal.position[:2])
        assert told[-1].pose == pytest.approx([goal.position[2], np.sin(goal.yaw), np.cos(goal.yaw)])
        over.append(np.linalg.norm(told[-1].places[0] - told[-1].places[2]) < 0.02)
    assert 5 <= sum(held) <= 25
    # Before the thing is held the tool goes to it, then to where it is to be.
    assert np.mean(np.array(over)[held]) > 0.7 and np.mean(np.array(over)[~np.array(held)]) < 0.5
    again = still(make("place"), 0, np.random.default_rng(0), later=1.0)
    assert (again.observation["pixels"]["wrist"] == told[0].observation["pixels"]["wrist"]).all()


def test_tasks_without_things_of_the_library_name_nothing():
    told = still(make("drawer"), 0, np.random.default_rng(0))
    assert (told.kinds == -1).all() and np.isnan(told.pixels).all() and np.isfinite(told.places).all()


def test_behind_a_camera_nothing_is_in_its_picture():
    env = make("pick")
    env.reset(seed=0)
    camera = env.data.cam_xpos[env.model.camera("front").id]
    forward = -env.data.cam_xmat[env.model.camera("front").id].reshape(3, 3)[:, 2]
    ahead, behind = in_picture(env, "front", np.array([camera + forward, camera - forward]))
    assert ahead == pytest.approx([0.5, 0.5]) and np.isnan(behind).all()
