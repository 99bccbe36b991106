"""Rollouts of an on-policy learner on a scripted environment, with numbers from a sheet of paper."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch

from vla_stack.methods.episodes_loop import FINAL, FinalObservation
from vla_stack.methods.reinflow.rollouts import Explorer
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.transformer import PrefixContext
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import OBS_STATE, Dim, PolicySpec, RobotSpec

STATE = (Dim("seed", "m"), Dim("step", "m"))
ROBOT = RobotSpec(name="test/scripted", state=STATE, action=(Dim("x.pos", "m"),), cameras=(), rate_hz=10.0)
EXECUTE, GAMMA = 3, 0.5
# Last step, and whether the episode terminates and is truncated there, by seed.
SCRIPT = {0: (5, True, False), 1: (4, False, True), 2: (3, True, True)}


class Scripted(gym.Env):
    """Pays 1, 2, 4, ... a step; its state is its seed and the steps so far. Termination is success."""

    observation_space = gym.spaces.Dict({"agent_pos": gym.spaces.Box(-9, 9, (2,), np.float32)})
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, *, seed, options=None):
        self.seed, self.steps = seed, 0
        return self._observation(), {"task": "", "is_success": False}

    def step(self, action):
        self.steps += 1
        end, terminates, truncates = SCRIPT[self.seed]
        terminated, truncated = self.steps == end and terminates, self.steps == end and truncates
        info = {"task": "", "is_success": terminated}
        return self._observation(), 2.0 ** (self.steps - 1), terminated, truncated, info

    def _observation(self):
        return {"agent_pos": np.array([self.seed, self.steps], np.float32)}


class Network(FlowPolicy):
    """Its prefix is the state."""

    horizon, action_dim, noise_dim, inference_steps = 4, 1, 2, 2
    config = SimpleNamespace(device="cpu")

    def encode(self, batch):
        state = batch[OBS_STATE]
        return PrefixContext(((state[:, None, None], state[:, None, None]),), torch.ones(len(state), 1).bool(), state)

    def features(self, context):
        return context.summary

    def velocity(self, context, x, t):
        raise NotImplementedError


class Actor:
    """A learner whose chunk says of which seed and step of the observation it is."""

    policy, config = Network(), SimpleNamespace(gamma=GAMMA)

    def act(self, context, inputs, noise, generator):
        chunk = (10 * context.summary[:, 0] + context.summary[:, 1])[:, None, None] + torch.zeros_like(noise)
        return torch.stack((noise, chunk + 0.1 * torch.arange(4)[:, None]), dim=1)


gym.register("Scripted-v0", entry_point=Scripted)


def live(reward, num_envs=2):
    policy = SimpleNamespace(
        spec=PolicySpec(ROBOT, 4, extras={"n_action_steps": EXECUTE}),
        preprocess=lambda seen: {OBS_STATE: torch.stack([torch.from_numpy(o.state) for o in seen])},
        postprocessor=lambda actions: actions,
    )
    explorer = Explorer(policy, Actor())
    how = ExecutorConfig(mode="sync")
    plan = Plan("Scripted-v0", {}, policy.spec, PolicyAgent, {FINAL: FinalObservation}, how)
    records = sorted(run(explorer, plan, [Start(n) for n in range(3)], num_envs), key=lambda r: r.seed)
    return explorer.experience(records, reward), {r.seed: r.actions[:, 0] for r in records}


def test_rows_are_whole_episodes_in_their_order() -> None:
    data, actions = live("task")
    states = [[0, 0], [0, 3], [1, 0], [1, 3], [2, 0]]
    assert data.state.tolist() == states and data.context.summary.tolist() == states
    assert data.inputs[:, 2:].tolist() == states
    assert data.chain[:, -1, 0, 0].tolist() == [0.0, 3.0, 10.0, 13.0, 20.0]
    assert data.last.tolist() == [False, True, False, True, True]
    assert data.success.tolist() == [True, False, True] and data.steps == 12
    # Each environment got its own chunk's first three actions, and no more of the last one than it had room for.
    np.testing.assert_allclose(actions[0], [0.0, 0.1, 0.2, 3.0, 3.1], atol=1e-5)
    np.testing.assert_allclose(actions[1], [10.0, 10.1, 10.2, 13.0], atol=1e-5)
    np.testing.assert_allclose(actions[2], [20.0, 20.1, 20.2], atol=1e-5)


def test_rewards_are_discounted_inside_a_chunk_and_what_follows_by_its_executed_steps() -> None:
    data, _ = live("task")
    assert data.executed.tolist() == [3, 2, 3, 1, 3]
    # 1 + 2/2 + 4/4; 8 + 16/2; 3; 8; 3.
    assert data.reward.tolist() == [3.0, 16.0, 3.0, 8.0, 3.0]
    # 1/8 goes on; nothing follows a termination, also of an episode that is truncated in the same step; a truncated
    # one goes on after the one step that it took.
    assert data.discount.tolist() == [0.125, 0.0, 0.125, 0.5, 0.0]
    # The success of the first episode is the second action of its last chunk, that of the third the third.
    assert live("success")[0].reward.tolist() == [0.0, 0.5, 0.0, 0.0, 0.25]


def test_a_truncated_episode_alone_has_final_inputs_its_own() -> None:
    data, _ = live("task")
    assert not data.final_inputs[[0, 1, 2, 4]].any(), "also not after a termination"
    assert data.final_inputs[3, 2:].tolist() == [1.0, 4.0], "its own last state, not the next episode's first"
    torch.testing.assert_close(
        data.final_inputs[3, :2], torch.tensor([-1.0, 1.0])
    )  # features are the state, normalised


def test_rows_do_not_depend_on_how_many_run_side_by_side() -> None:
    one, three = live("task", 1)[0], live("task", 3)[0]
    for name in ("inputs", "state", "chain", "executed", "reward", "discount", "last", "final_inputs", "success"):
        assert torch.equal(getattr(one, name), getattr(three, name)), name
