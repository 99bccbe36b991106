"""Scripted experts solve their tasks, inside the robot's rates, and recover from noise."""

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim import objects
from sim.slots import slot_name
from sim.tasks.shelf import HEIGHTS


def episode(task, seed, noise=0.0, errors=0.0, **kwargs):
    """Success, clean labels [T, A], executed actions [T, A] and the command before each, [T, A]."""
    env = gym.make(sim.TASKS[task].id, cameras=(), **kwargs)
    env.reset(seed=seed)
    expert = sim.make_expert(env, noise, seed, errors)
    labels, executed, before, done = [], [], [], False
    while not done:
        tool, joints = env.unwrapped.tool_command, env.unwrapped.joint_command
        before.append(np.append(joints, tool[4]) if env.unwrapped.control_mode == "joint_abs" else tool)
        labels.append(expert.act())
        executed.append(expert.perturb(labels[-1]))
        _, _, terminated, truncated, info = env.step(executed[-1])
        done = terminated or truncated
    return info["is_success"], np.array(labels), np.array(executed), np.array(before)


@pytest.mark.parametrize("task", list(sim.TASKS))
def test_expert_succeeds_within_range_and_rate(task):
    spec = gym.make(sim.TASKS[task].id, cameras=()).unwrapped.spec_robot
    for seed in range(8):
        success, labels, executed, before = episode(task, seed)
        assert success, seed
        assert (labels == executed).all()
        assert (labels >= spec.action_low).all() and (labels <= spec.action_high).all()
        rate = np.abs(labels - before).max(axis=0) / spec.dt
        assert all(r <= d.max_rate / 1.25 for r, d in zip(rate, spec.action, strict=True))


@pytest.mark.parametrize("task", ["pick", "insert"])
@pytest.mark.parametrize("rate", [5.0, 20.0])
def test_expert_holds_at_other_control_rates(task, rate):
    assert all(episode(task, seed, control_hz=rate)[0] for seed in range(4))


@pytest.mark.parametrize("mode", ["joint_abs", "ee_delta"])
def test_expert_acts_in_every_control_mode(mode):
    for seed in range(3):
        success, labels, executed, _ = episode("pick", seed, noise=0.3, control_mode=mode)
        assert success and labels.shape[1] == {"joint_abs": 8, "ee_delta": 5}[mode]
        assert (labels[:, -1] == executed[:, -1]).all() and (labels != executed).any()


def test_noise_disturbs_what_is_executed_and_leaves_labels_clean():
    success, labels, executed, _ = episode("place", seed=1, noise=0.35)
    changed = (labels != executed).any(axis=1)
    assert success and 0.2 < changed.mean() < 0.8
    assert (labels[:, 4] == executed[:, 4]).all()
    again = episode("place", seed=1, noise=0.35)
    assert (again[2] == executed).all()


@pytest.mark.parametrize("mode", ["ee_abs", "joint_abs", "ee_delta"])
def test_errors_last_and_leave_labels_clean_and_episodes_succeed(mode):
    most, wrong = 0, []
    for seed in range(6):
        success, labels, executed, _ = episode("pick", seed, errors=0.5, control_mode=mode, max_episode_steps=300)
        assert success
        changed = (labels != executed).any(axis=1)
        wrong.append(changed.mean())
        most = max(most, max(map(len, "".join("ox"[c] for c in changed).split("o"))))
        again = episode("pick", seed, errors=0.5, control_mode=mode, max_episode_steps=300)
        assert (again[2] == executed).all()
    assert 0.2 < np.mean(wrong) < 0.8 and most >= 5


def test_errors_bring_a_closed_gripper_that_holds_nothing_and_the_label_opens_it():
    env, opened = gym.make("sim/pick_any-v0", cameras=(), max_episode_steps=300), 0
    for seed in range(6):
        env.reset(seed=seed)
        expert, done = sim.make_expert(env, seed=seed, errors=0.5), False
        while not done:
            label, task = expert.act(), env.unwrapped
            opened += bool(task.tool[4] < 0.3 and not task.held and label[4] == 1.0)
            _, _, terminated, truncated, _ = env.step(expert.perturb(label))
            done = terminated or truncated
    assert opened >= 5


def test_expert_labels_any_state():
    env = gym.make("sim/place-v0", cameras=()).unwrapped
    env.reset(seed=0)
    expert = sim.make_expert(env)
    for _ in range(6):
        env.step(expert.act())
    state, label = env.get_state(), expert.act()
    env.reset(seed=5)
    env.set_state(state)
    assert (sim.make_expert(env).act() == label).all()


@pytest.mark.parametrize("aside", [-0.03, -0.02, 0.02, 0.03])
def test_the_slots_expert_takes_anew_what_was_pressed_on_the_edge_and_slipped_in_its_hand(aside):
    """A policy that misses presses on; an expert that did likewise would label such states with more of it."""
    env = gym.make("sim/slot-v0", cameras=(), max_episode_steps=200)
    for seed in range(3):
        env.reset(seed=seed)
        task, expert = env.unwrapped, sim.make_expert(env)
        while not task.progress()[3]:  # above the slot
            env.step(expert.act())
        turn = task.yaw("slot")
        wrong = task.position("slot") + [aside * np.cos(turn), aside * np.sin(turn), 0.055]
        for _ in range(12):
            env.step(expert.towards(wrong, task.tool[3], 0.0))
        off = np.linalg.norm(task.grip(task.slot).position - task.tool[:3])
        assert task.held and (off > 0.02 or task.data.body(task.target).xmat[8] < 0.98), "nothing slipped"
        for _ in range(60):
            *_, info = env.step(expert.act())
            if info["is_success"]:
                break
        assert info["is_success"], seed


def test_the_stacks_expert_puts_right_what_stands_too_far_off_centre_to_count():
    env = gym.make("sim/stack-v0", cameras=())
    env.reset(seed=3)
    task, expert = env.unwrapped, sim.make_expert(env)
    spot = task.position(task.base)[:2] + [0.017, 0.0]  # of cubes that are 4 cm wide; 1.4 cm count
    objects.lay(task, task.target, spot, 3 * objects.CUBE + 0.001, task.yaw(task.base))
    for _ in range(80):
        *_, info = env.step(expert.act())
        if info["is_success"]:
            break
    assert info["is_success"]


def test_the_shelfs_expert_finds_room_beside_what_a_policy_put_there():
    env = gym.make("sim/shelf-v0", cameras=(), max_episode_steps=150)
    for seed in range(3):
        env.reset(seed=seed)
        task, expert = env.unwrapped, sim.make_expert(env)
        shelf = task.wish[1]
        other = next(slot_name(i) for i in range(task.count) if i != task.slot)
        objects.lay(task, other, task.position(shelf)[:2], HEIGHTS[shelf] + 0.001)
        for _ in range(150):
            *_, info = env.step(expert.act())
            if info["is_success"]:
                break
        assert info["is_success"], seed


def test_what_lies_on_the_plate_upside_down_is_on_the_plate_and_what_lies_beside_it_is_not():
    env = gym.make("sim/place_relation-v0", cameras=(), max_episode_steps=200)
    counted = 0
    for seed in range(12):
        env.reset(seed=seed)
        task = env.unwrapped
        if task.wish[1] != "on":
            continue
        for over, on_it in ((0.0, True), (0.10, False)):
            joint = task.data.joint(task.target)
            joint.qpos[:] = [*(task.position("plate")[:2] + [over, 0.0]), 0.06, 0.0, 1.0, 0.0, 0.0]  # turned over by x
            joint.qvel[:] = 0.0
            for _ in range(15):
                *_, info = env.step(np.array([*task.tool_command[:4], 1.0]))
            lies = float(task.data.body(task.target).xmat[8]) < -0.9
            assert info["is_success"] == on_it or not lies
            counted += lies
    assert counted >= 3
