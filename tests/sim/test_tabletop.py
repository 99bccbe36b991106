"""Tasks among things of the library: exact replay, splits, and that only what the sentence asks for counts."""

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim import library, registry
from sim.sentences import SPLITS
from sim.tabletop import Tabletop
from vla_stack import registry as names
from vla_stack.errors import UserError

TASKS = [name for name in sim.TASKS if issubclass(names.TASKS.get(name), Tabletop)]


def make(task, **kwargs):
    return gym.make(registry.task_id(task), **{"cameras": (), **kwargs}).unwrapped


def finish(env):
    """The expert's episode; whether it succeeded."""
    expert = sim.make_expert(env)
    for _ in range(env.config.max_episode_steps):
        _, _, done, _, info = env.step(expert.act())
        if done:
            return info["is_success"]
    return False


def test_there_are_short_tasks_of_several_kinds():
    assert len(TASKS) >= 6
    assert make("pick_any").task_variants == sim.TASKS["pick_any"].instructions  # before there is a scene


@pytest.mark.parametrize("task", TASKS)
def test_a_state_brings_back_things_sentence_and_picture(task):
    env, other = (make(task, cameras=("front",), randomisation=2) for _ in range(2))
    env.reset(seed=11)
    for action in (env.tool_command, env.tool_command - [0, 0, 0.05, 0, 0]):
        env.step(np.float32(action))
    other.reset(seed=12)
    other.set_state(env.get_state())
    assert other.things == env.things and other.task == env.task and other.task_variants == env.task_variants
    seen = [e.step(np.float32(e.tool_command))[0]["pixels"]["front"] for e in (env, other)]
    assert (seen[0] == seen[1]).all()


def test_nothing_is_asked_for_that_is_so_already():
    env = make("place_relation")
    for seed in range(1000, 1100):
        env.reset(seed=seed)
        assert not any(env.achieved(text) for text in env.task_variants)


@pytest.mark.parametrize("task", TASKS)
def test_sentences_of_a_scene_are_as_many_as_its_wishes_and_one_is_fulfilled(task):
    env = make(task)
    for seed in range(3):
        env.reset(seed=seed)
        assert env.task == env.task_variants[0] and len(set(env.task_variants)) == len(env.task_variants) >= 2
        assert not any(env.achieved(text) for text in env.task_variants)
        assert finish(env)
        assert [env.achieved(text) for text in env.task_variants] == [True] + [False] * (len(env.task_variants) - 1)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["unseen-orders", "unseen-names"])
def test_new_words_are_said_of_the_same_scene(task, split):
    env, other = make(task), make(task, split=split)
    for seed in range(5):
        env.reset(seed=seed), other.reset(seed=seed)
        assert env.things == other.things and (env.data.qpos == other.data.qpos).all()
        assert not set(env.task_variants) & set(other.task_variants)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_does_what_every_split_asks_for(task, split):
    env = make(task, split=split)
    for seed in (3, 4):
        env.reset(seed=seed)
        assert finish(env), (task, split, seed, env.task)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"press"}))
def test_what_is_asked_for_is_held_out_in_the_splits_of_things_alone(task):
    for split in SPLITS:
        env = make(task, split=split)
        for seed in range(8):
            env.reset(seed=seed)
            first, *others = env.things
            assert (first.kind in library.HELD_OUT) == (split == "unseen-objects")
            if split != "unseen-objects":
                assert library.held_out_pair(first.kind, first.colour) == (split == "unseen-compositions")
            assert not any(t.kind in library.HELD_OUT or library.held_out_pair(t.kind, t.colour) for t in others)
            if split in ("unseen-objects", "unseen-compositions"):
                assert f"the {first.colour} {first.kind}" in env.task


def test_a_wrong_button_ends_the_episode():
    env = make("press")
    env.reset(seed=0)
    wrong = env.position("button_1")
    for z in (0.08, 0.05, 0.02):
        for _ in range(8):
            _, _, done, _, info = env.step(np.float32([*wrong[:2], z, 0.0, 0.0]))
            if done:
                assert not info["is_success"] and env.depth(1) > 0 and env.achieved(env.task_variants[1])
                return
    raise AssertionError("it was never pressed")


@pytest.mark.parametrize("task", TASKS)
def test_the_options_of_each_split_make_it(task):
    offered = names.TASKS.get(task).splits
    assert list(offered) == list(SPLITS[1:])
    assert all(make(task, **options).split == split for split, options in offered.items())


def test_an_unknown_split_is_named():
    with pytest.raises(UserError, match="split='train'"):
        make("pick_any", split="train")
