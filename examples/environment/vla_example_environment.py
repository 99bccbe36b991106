"""An environment: carts to be pushed to the origin, all rows in one array. Its ids are ``cart:<size of the start>``."""

import numpy as np

from vla_stack.envs import EnvStep
from vla_stack.schema import Dim, RobotSpec

VELOCITY = Dim("x.vel", "m/s", -1.0, 1.0)
ROBOT = RobotSpec("example/cart", (VELOCITY, Dim("x.pos", "m")), (VELOCITY,), (), rate_hz=10.0)


class Carts:
    robot, stages = ROBOT, ()

    def __init__(self, size, num_envs, limit=30):
        self.size, self.num_envs, self.limit = size, num_envs, limit
        self.state, self.steps = np.zeros((num_envs, 2), np.float32), np.zeros(num_envs, int)

    def reset(self, rows, seeds):
        self.state[rows] = [(0.0, np.random.default_rng(s).uniform(-self.size, self.size)) for s in seeds]
        self.steps[rows] = 0
        return [self._shown(row) for row in rows]

    def step(self, rows, actions, ahead=()):
        self.state[rows, 0] = np.clip(actions[:, 0], -1.0, 1.0)
        self.state[rows, 1] += self.state[rows, 0] / ROBOT.rate_hz
        self.steps[rows] += 1
        return [self._shown(row) for row in rows]

    def _shown(self, row):
        distance = abs(float(self.state[row, 1]))
        done = distance < 0.05
        info = {"task": "push the cart to the origin", "is_success": done}
        cut = self.steps[row] >= self.limit and not done
        return EnvStep({"agent_pos": self.state[row].copy()}, -distance, done, bool(cut), info)

    def row(self, row):
        return self

    def render(self, row):
        return None

    def close(self):
        pass


def make(rest, num_envs, **options):
    return Carts(float(rest), num_envs, **options)
