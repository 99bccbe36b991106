"""A point on a line, and stores of it: small enough for exact tests of learners."""

import gymnasium as gym
import numpy as np

from vla_stack import envs
from vla_stack.methods.off_policy.collecting import Acting, Collector
from vla_stack.methods.off_policy.deployed import Seen
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.methods.sac import SacRecipe
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import PolicySpec

SMALL = SacRecipe(actor=(8,), critic=(8,), num_critics=3, batch=8, utd=2, layer_norm=True, entropy_backup=False)
GAMMA = 0.9


class Line:
    """Move right past 1 within ``limit`` steps."""

    obs_dim, action_dim = 2, 1

    def __init__(self, limit=6):
        self.limit = limit

    def reset(self, seed):
        self.x = float(np.random.default_rng(seed).uniform(-0.5, 0.5))
        self.steps, self.success = 0, False
        return self.seen()

    def seen(self):
        return np.array([self.x, self.steps / self.limit], np.float32)

    def step(self, action):
        self.x += 0.5 * float(action[0])
        self.steps += 1
        self.success = self.x > 1.0
        return self.seen(), float(self.success) - 1.0, self.success, self.steps >= self.limit and not self.success


def stored(steps=60, capacity=200, slots=1, seed=0, actions=None):
    """A store of random episodes of the line."""
    rng = np.random.default_rng(seed)
    store = ReplayBuffer(capacity, 2, 1, slots, GAMMA, tail=-1 / (1 - GAMMA))
    envs = [Line() for _ in range(slots)]
    obs = np.stack([e.reset(i) for i, e in enumerate(envs)])
    for t in range(steps):
        action = rng.uniform(-1, 1, (slots, 1)).astype(np.float32)
        rows = [e.step(a) for e, a in zip(envs, action, strict=True)]
        after = np.stack([r[0] for r in rows])
        ends = np.array([[r[2] for r in rows], [r[3] for r in rows]])
        zero = np.zeros(slots, int)
        reward = np.array([r[1] for r in rows], np.float32)
        store.add(Transition(obs, action, reward, *ends, after, zero, zero, np.full(slots, Source.OFFLINE)))
        obs = np.stack([e.reset(t) if ends[:, i].any() else after[i] for i, e in enumerate(envs)])
    return store


class LineEnv(gym.Env):
    """The line as an environment of gymnasium."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.line = Line()
        return self.line.reset(seed), {}

    def step(self, action):
        seen, reward, success, _ = self.line.step(action)
        return seen, reward, success, False, {"is_success": success}


LINE = "toys/Line-v0"
gym.register(LINE, LineEnv, max_episode_steps=6)
SEEN = Seen(envs.make(LINE).robot, np.zeros(2, np.float32), np.ones(2, np.float32))


def collector(made, seeds=range(5000, 6000), num_envs=1, agent=PolicyAgent, limit=6):
    """Episodes of the line, in which a learner acts."""
    spec = PolicySpec(SEEN.robot, made.horizon, extras={"n_action_steps": made.horizon})
    plan = Plan(LINE, {"max_episode_steps": limit}, spec, agent, executor=ExecutorConfig("sync"))
    return Collector(Acting(made, SEEN), plan, "step", map(Start, seeds), num_envs)


def run(made, steps):
    """Act and learn for some control steps; returns the chunks that were asked for, with their noise's seeds."""
    episodes, asked = collector(made), []
    infer = episodes.acting.infer

    def noted(observations, seeds, continuations=()):
        chunks = infer(observations, seeds)
        asked.extend(zip([o.state for o in observations], seeds, chunks.actions, strict=True))
        return chunks

    episodes.acting.infer = noted
    for _ in range(steps):
        episodes.acting.source = made.source
        made.store.add(episodes.step()[0])
        made.update()
    episodes.close()
    return asked
