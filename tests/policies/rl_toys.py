"""A point on a line, and stores of it: small enough for exact tests of learners."""

import numpy as np

from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.methods.sac import SacRecipe

SMALL = SacRecipe(actor=(8,), critic=(8,), num_critics=3, batch=8, utd=2, layer_norm=True, entropy_backup=False)
GAMMA = 0.9


class Line:
    """An environment as :class:`StateEnv` offers it: move right past 1 within ``limit`` steps."""

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
