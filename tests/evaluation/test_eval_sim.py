"""The evaluation on a real task of ``sim``: embodiment from the policy, instructions, replays."""

import subprocess
import sys
from dataclasses import replace

import av
import gymnasium as gym
import numpy as np
import pytest

from sim import TASKS, make_expert
from sim.arm import ARM7
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.video import film
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, PolicySpec


class Wander:
    """Moves the tool about, and remembers what it was shown."""

    def __init__(self, mode="ee_abs", rate_hz=10.0):
        self.spec = PolicySpec(robot=ARM7.spec(mode, ("front", "wrist"), 32, rate_hz), horizon=8)
        self.tasks, self.sizes = set(), set()

    def infer(self, observations, seeds):
        self.tasks |= {o.task for o in observations}
        self.sizes |= {image.shape for o in observations for image in o.images.values()}
        for o in observations:
            o.check(self.spec.robot)
        n = len(self.spec.robot.action)
        start = np.stack([o.state[:n] for o in observations])[:, None].repeat(8, axis=1)
        noise = [np.random.default_rng(s).normal(0, 0.02, (8, n)) for s in seeds]
        return Chunks((start + noise).astype(np.float32))


class Rehearsed:
    """Knows the expert's actions for the seeds in order: one environment at a time."""

    def __init__(self, seeds):
        self.spec = PolicySpec(robot=ARM7.spec("ee_abs", ("front",), 16, 10.0), horizon=8)
        env = gym.make("sim:sim/pick-v0", cameras=())
        self.plans = []
        for seed in seeds:
            env.reset(seed=seed)
            expert, actions, over = make_expert(env), [], False
            while not over:
                actions.append(expert.act())
                _, _, terminated, truncated, info = env.step(actions[-1])
                over = terminated or truncated
            assert info["is_success"]
            self.plans.append(np.concatenate([actions, [actions[-1]] * 8]))
        env.close()

    def infer(self, observations, seeds):
        (o,) = observations
        if o.step == 0:
            self.plan = self.plans.pop(0)
        return Chunks(self.plan[None, o.step : o.step + 8].astype(np.float32))


@pytest.mark.parametrize("mode", ["sync", "naive"])
def test_the_experts_own_actions_succeed_whatever_they_are_called(mode):
    for instruct in (None, "swap"):
        result = evaluate(
            Rehearsed([7, 8]), "sim/pick-v0", 2, seed=7, executor=ExecutorConfig(mode, 4), instruct=instruct, num_envs=1
        )
        assert result.success_rate == 1.0 and {e.stage for e in result.episodes} == {3}
        assert all(e.steps < 30 for e in result.episodes)


def test_a_task_of_sim_takes_the_policys_cameras_and_instructions():
    policy = Wander()
    result = evaluate(policy, "sim/pick-v0", episodes=4, seed=3, num_envs=4)
    assert policy.sizes == {(32, 32, 3)} and policy.tasks <= set(TASKS["pick"].instructions) and len(policy.tasks) > 1
    assert result.stages == TASKS["pick"].stages and result.rate_hz == 10.0
    assert all(e.steps == TASKS["pick"].max_episode_steps and not e.success for e in result.episodes)
    again = evaluate(Wander(), "sim/pick-v0", episodes=4, seed=3, num_envs=1)
    assert again.episodes == result.episodes
    for a, b in zip(again.episodes, result.episodes, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)


def test_swapping_keeps_the_scene_and_changes_the_words():
    plain, swapped = (evaluate(Wander(), "sim/pick-v0", episodes=2, instruct=i) for i in (None, "swap"))
    for a, b in zip(plain.episodes, swapped.episodes, strict=True):
        assert a.task == b.task == a.instruction != b.instruction
        np.testing.assert_array_equal(a.actions, b.actions)  # this policy is deaf


def test_control_mode_and_rate_follow_the_policy():
    result = evaluate(Wander("joint_abs", rate_hz=5.0), "sim/pick-v0", episodes=1)
    assert result.episodes[0].actions.shape[1] == 8 and result.rate_hz == 5.0
    assert result.settings["env_options"]["control_mode"] == "joint_abs"


@pytest.mark.slow
def test_a_film_shows_the_episode_that_happened(tmp_path):
    filmed = film(evaluate(Wander(), "sim/pick-v0", episodes=1), tmp_path, per_outcome=1)
    with av.open(filmed.episodes[0].video) as f:
        frames = [x.to_ndarray(format="rgb24") for x in f.decode(video=0)]
    assert len(frames) == filmed.episodes[0].steps + 1 and frames[0].shape == (
        320,
        586,
        3,
    )  # beside what the policy saw
    assert frames[0].std() > 10 and np.abs(frames[0].astype(int) - frames[-1]).mean() > 0.5


def test_pictures_that_sim_cannot_make_are_refused():
    policy = Wander()
    cameras = policy.spec.robot.cameras
    policy.spec = replace(
        policy.spec, robot=replace(policy.spec.robot, cameras=(cameras[0], replace(cameras[1], width=48)))
    )
    with pytest.raises(UserError, match="square images of one size, the policy wants front 32x32, wrist 32x48"):
        evaluate(policy, "sim/pick-v0", episodes=1)


def test_environment_processes_load_no_torch():
    code = "import sys, vla_stack.rollout.engine, sim; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
