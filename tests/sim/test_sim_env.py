"""What every task promises: the gymnasium interface, exact replay, control modes, rewards."""

import os
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import sim
from sim import objects
from sim.arm import ARM7, InverseKinematics
from sim.rendering import Renderer
from sim.so101 import SO101
from sim.tabletop import Tabletop
from vla_stack.errors import UserError
from vla_stack.schema import Observation

ALL = list(sim.TASKS)
CUBES = [objects.cube_name(colour) for colour in objects.COLOURS]


def make(task, **kwargs):
    kwargs.setdefault("cameras", ())
    return gym.make(sim.TASKS[task].id, **kwargs).unwrapped


def run_expert(env, seed, steps=None):
    """Actions, joint commands and rewards of an expert's episode."""
    env.reset(seed=seed)
    expert, actions, joints, rewards, done = sim.make_expert(env), [], [], [], False
    limit = steps or sim.TASKS[env.name].max_episode_steps
    while not done and len(actions) < limit:
        actions.append(expert.act())
        _, reward, done, _, _ = env.step(actions[-1])
        joints.append(np.append(env.joint_command, actions[-1][4]))
        rewards.append(reward)
    return actions, joints, rewards, done


@pytest.mark.parametrize("task", ALL)
@pytest.mark.filterwarnings("ignore")
def test_check_env(task):
    check_env(make(task, cameras=("front", "wrist"), image_size=32, render_mode="rgb_array", render_size=(32, 32)))


@pytest.mark.parametrize("mode", ["ee_abs", "joint_abs", "ee_delta"])
def test_observations_match_the_robot_description(mode):
    env = make("pick", control_mode=mode, cameras=("front", "wrist"), image_size=48)
    obs, _ = env.reset(seed=0)
    spec = env.spec_robot
    Observation(obs["agent_pos"], obs["pixels"], env.task).check(spec)
    measured = [d.name for d in spec.state[: len(spec.action)]]
    assert measured == [d.name for d in spec.action]
    assert env.action_space.shape == (len(spec.action),)


def test_same_seed_same_episode_other_seed_another():
    env, other = make("place", cameras=("front",)), make("place", cameras=("front",))
    a, b, c = env.reset(seed=3)[0], other.reset(seed=3)[0], other.reset(seed=4)[0]
    assert (a["pixels"]["front"] == b["pixels"]["front"]).all() and (a["agent_pos"] == b["agent_pos"]).all()
    assert (a["pixels"]["front"] != c["pixels"]["front"]).any()


@pytest.mark.parametrize("task", ALL)
def test_replay_from_a_state_is_exact_in_another_instance(task):
    env, copy = make(task, randomisation=2), make(task, randomisation=2)
    run_expert(env, seed=5, steps=7)
    state = env.get_state()
    copy.reset(seed=99)
    copy.set_state(state)
    assert (copy.get_state() == state).all() and copy.task == env.task
    rng = np.random.default_rng(0)
    for _ in range(6):
        action = rng.uniform(env.action_space.low, env.action_space.high).astype(np.float32)
        one, two = env.step(action), copy.step(action)
        assert (one[0]["agent_pos"] == two[0]["agent_pos"]).all() and one[1:] == two[1:]
        assert (env.get_state() == copy.get_state()).all()


def test_replay_restores_the_randomised_picture():
    env, copy = (make("stack", randomisation=2, cameras=("front", "wrist")) for _ in range(2))
    obs, _ = env.reset(seed=8)
    copy.reset(seed=1)
    copy.set_state(env.get_state())
    seen = copy.step(copy.tool_command)[0]["pixels"], env.step(env.tool_command)[0]["pixels"]
    assert all((seen[0][c] == seen[1][c]).all() for c in ("front", "wrist"))


def test_set_state_refuses_the_state_of_another_task():
    with pytest.raises(ValueError, match="stack has"):
        make("stack").set_state(make("push").get_state())


def test_joint_mode_replays_a_tool_episode():
    env, joint_env = make("place"), make("place", control_mode="joint_abs")
    _, joints, _, done = run_expert(env, seed=2)
    joint_env.reset(seed=2)
    results = [joint_env.step(np.float32(j)) for j in joints]
    assert done and results[-1][4]["is_success"]


def test_absolute_targets_hold_when_repeated_and_deltas_hold_at_zero():
    for mode, hold in (("ee_abs", None), ("ee_delta", np.zeros(5, np.float32))):
        env = make("pick", control_mode=mode)
        env.reset(seed=0)
        before = env.tool
        for _ in range(20):
            env.step(np.float32(env.tool_command) if hold is None else hold)
        assert np.abs(env.tool - before)[:4].max() < 2e-3


def test_delta_moves_by_its_rate():
    env = make("pick", control_mode="ee_delta")
    env.reset(seed=0)
    before = env.tool_command
    env.step(np.array([0.5, 0, 0, 0, -1], np.float32))
    np.testing.assert_allclose(env.tool_command - before, [0.03, 0, 0, 0, -0.5], atol=1e-9)


def test_tool_reaches_every_corner_of_its_range():
    env = make("push")
    low, high = env.action_space.low, env.action_space.high
    for corner in np.ndindex(2, 2, 2):
        env.reset(seed=0)
        target = np.where(np.append(corner, [0, 0]), high, low)
        target[3] = 0.0
        # Clear of the table, lest the zone's cube is in the way.
        target[2] = max(target[2], 0.05)
        for _ in range(25):
            env.step(np.float32(target))
        assert np.abs(env.tool[:4] - target[:4]).max() < 5e-3, target


def test_a_wild_command_moves_joints_no_faster_than_their_rate():
    env = make("pick")
    env.reset(seed=0)
    before = env.joint_command
    env.step(env.action_space.high)
    assert np.abs(env.joint_command - before).max() <= 2.5 * env.spec_robot.dt + 1e-6


@pytest.mark.parametrize("action", [np.full(5, np.nan), np.zeros(4), np.full(5, np.inf)])
def test_actions_that_are_none_are_refused(action):
    env = make("pick")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="finite"):
        env.step(action.astype(np.float32))


def test_a_state_keeps_an_instruction_that_was_given():
    env = make("pick")
    env.reset(seed=1, options={"instruction": "pick up the moon"})
    env.set_state(env.get_state())
    assert env.task == "pick up the moon"
    env.reset(seed=1)
    assert env.task != "pick up the moon"


def test_a_cube_that_is_carried_is_not_pushed():
    env = make("push")
    env.reset(seed=1)
    zone = env.zone
    for height, done in ((0.12, False), (env.position("cube")[2], True)):
        joint = env.data.joint("cube")
        joint.qpos[:3], joint.qvel[:] = [*zone, height], 0.0
        mujoco.mj_forward(env.model, env.data)
        assert env.progress()[-1] == done


def test_instruction_changes_the_text_and_nothing_else():
    env = make("pick")
    plain, _ = env.reset(seed=1)
    plain_state, variant = env.get_state(), env.variant
    told, info = env.reset(seed=1, options={"instruction": "pick up the moon"})
    assert env.task == env.task_description == info["task"] == "pick up the moon"
    assert env.variant == variant and (env.get_state() == plain_state).all()


@pytest.mark.parametrize("task", ALL)
def test_variant_fixes_what_is_asked_for_in_the_same_scene(task):
    env, info = make(task), sim.TASKS[task]
    named = not isinstance(env, Tabletop)  # the sentences of those follow from the scene
    assert len(set(info.instructions)) == len(info.variants)
    assert not named or env.task_variants == info.instructions
    poses = []
    for variant, text in zip(info.variants, info.instructions, strict=True):
        env.reset(seed=4, options={"variant": variant})
        assert env.variant == variant and (env.task == text if named else env.task in env.task_variants)
        poses.append(env.data.qpos.copy())
    assert all((p == poses[0]).all() for p in poses)


def test_only_the_named_cube_counts():
    env = make("pick")
    env.reset(seed=0, options={"variant": {"colour": "red"}})
    expert = sim.make_expert(env)
    env.reset(seed=0, options={"variant": {"colour": "green"}})
    lifted, asked = False, env.variants[1]
    assert asked == env.variant
    for _ in range(20):
        env._variant = 0  # the expert serves red
        action, lifted = expert.act(), env.progress()[-1]
        env._variant = 1  # the episode asks for green
        _, reward, terminated, _, info = env.step(action)
        assert not (terminated or reward or info["is_success"])
    assert lifted


def test_staged_rewards_sum_to_one_and_sparse_pays_success():
    for task in ALL:
        config = make(task).config
        assert sum(config.rewards.values()) == pytest.approx(1.0)
        staged = run_expert(make(task, reward="staged"), seed=1)
        sparse = run_expert(make(task), seed=1)
        assert sum(staged[2]) == pytest.approx(1.0) and np.count_nonzero(staged[2]) > 1
        assert sparse[2] == [0.0] * (len(sparse[2]) - 1) + [1.0]


@pytest.mark.parametrize("task", ALL)
def test_keypoints_are_finite_points_and_include_the_tool(task):
    env = make(task)
    env.reset(seed=0)
    points = env.keypoints()
    assert all(p.shape == (3,) and p.dtype == np.float32 and np.isfinite(p).all() for p in points.values())
    np.testing.assert_allclose(points["tcp"], env.tool[:3], atol=1e-6)


def test_the_wall_costs_when_it_is_hit_and_clearance_says_how_near_it_is():
    env = make("obstacle")
    env.reset(seed=0)
    assert env.clearance() > 0.02
    straight = np.float32([*env.position(env.target)[:2], 0.08, 0.0, 1.0])
    hit = [env.step(straight)[4]["cost"] for _ in range(10)]
    assert hit[0] == 0.0 and hit[-1] == 1.0 and env.clearance() < 0.005


def test_the_wall_costs_what_the_robot_does_not_what_lies_against_it():
    env = make("obstacle")
    env.reset(seed=0)
    cube, other = env.target, next(c for c in CUBES if c != env.target)
    for contacts, cost in (
        ([], 0.0),
        ([(cube, "wall")], 0.0),  # pushed there, or fallen
        ([(cube, "wall"), (cube, "pad_left")], 0.0),
        ([("wall", cube), (cube, "pad_left"), ("pad_right", cube)], 1.0),  # held
        ([("wall", other), (cube, "pad_left"), ("pad_right", cube)], 0.0),
        ([("wall", "hand")], 1.0),
    ):
        pairs = np.array([[env.model.geom(name).id for name in pair] for pair in contacts], np.int32).reshape(-1, 2)
        env.data = SimpleNamespace(contact=SimpleNamespace(geom=pairs))
        assert env.cost() == cost


@pytest.mark.parametrize(("rate_hz", "steps"), [(5.0, 20), (10.0, 40), (20.0, 80)])
def test_the_time_limit_is_the_same_seconds_at_every_rate(rate_hz, steps):
    env = gym.make("sim/pick-v0", cameras=(), control_hz=rate_hz)
    assert env.spec.max_episode_steps == steps == sim.TASKS["pick"].limit(rate_hz)
    _, info = env.reset(seed=0)
    hold, truncated, taken = np.float32(env.unwrapped.tool_command), False, 0
    while not truncated:
        truncated, taken = env.step(hold)[3], taken + 1
    assert taken == steps
    assert gym.make(env.spec).spec.max_episode_steps == steps


@pytest.mark.parametrize("given", [3, 500])
def test_a_given_time_limit_wins(given):
    env = gym.make("sim/pick-v0", cameras=(), control_hz=20.0, max_episode_steps=given)
    assert env.spec.max_episode_steps == env.get_wrapper_attr("_max_episode_steps") == given
    env.reset(seed=0)
    hold = np.float32(env.unwrapped.tool_command)
    assert [env.step(hold)[3] for _ in range(3)] == [False, False, given == 3]


def test_waiting_loses_the_conveyor_cube():
    env = make("conveyor")
    env.reset(seed=0)
    for _ in range(80):
        _, _, terminated, _, info = env.step(np.float32(env.tool_command))
        if terminated:
            break
    assert terminated and not info["is_success"]


@pytest.mark.parametrize(
    ("arm", "reach"),
    [
        (ARM7, ((0.30, -0.3, 0.02, -1.2), (0.62, 0.3, 0.35, 1.2))),
        (SO101, ((0.16, -0.08, 0.015, -1.2), (0.22, 0.08, 0.08, 1.2))),
    ],
)
def test_inverse_kinematics_meets_targets_to_a_millimetre(arm, reach):
    ik = InverseKinematics.of(arm)
    rng = np.random.default_rng(0)
    for _ in range(50):
        target = rng.uniform(*reach)
        got = ik.forward(ik.solve(target, arm.posture))
        assert np.abs(got - target).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("control_mode", "torque"),
        ("visuals", "ugly"),
        ("randomisation", 4),
        ("cameras", ("top",)),
        ("control_hz", 50.0),
    ],
)
def test_unknown_arguments_are_named(name, value):
    with pytest.raises(UserError, match=name):
        make("pick", **{name: value})


def test_missing_gl_names_the_packages(monkeypatch):
    def broken(*_args):
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")

    monkeypatch.setattr(mujoco, "Renderer", broken)
    env = make("pick")
    with pytest.raises(UserError, match="libegl1 libgl1 libgl1-mesa-dri"):
        Renderer(env.model, 32, 32).render(env.data, "front")


def test_importing_mujoco_first_does_not_break_rendering():
    code = "import mujoco, gymnasium as gym, sim\nenv = gym.make('sim/pick-v0'); print(env.reset()[0]['pixels'].keys())"
    env = {k: v for k, v in os.environ.items() if k != "MUJOCO_GL"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "wrist" in done.stdout, done.stderr


def test_exit_with_open_environments_is_quiet_and_needs_no_torch():
    code = (
        "import gymnasium as gym, sim, sys\n"
        "env = gym.make('sim/pick-v0', render_mode='rgb_array'); env.reset(); env.render()\n"
        "assert 'torch' not in sys.modules and 'lerobot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_achieved_tells_instructions_apart():
    env = make("pick")
    env.reset(seed=5, options={"variant": {"colour": "green"}, "instruction": "pick up the red cube"})
    expert = sim.make_expert(env)
    done = False
    while not done:
        *_, done, _, _ = env.step(expert.act())
    held = {text: env.unwrapped.achieved(text) for text in env.unwrapped.task_variants}
    assert held == {t: t == "pick up the green cube" for t in held}
    with pytest.raises(ValueError):
        env.unwrapped.achieved("dance")
