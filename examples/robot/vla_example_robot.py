"""A robot: one joint that is where it was last told. A real one opens its port in ``connect``."""

import time

import numpy as np

from vla_stack.runtime.driver import Capabilities, Guard
from vla_stack.schema import Dim, Observation, RobotSpec

JOINT = Dim("joint.pos", "rad", -1.0, 1.0, 2.0)


class Spring:
    capabilities = Capabilities(guard=Guard.UNMOVED, simulated=True)

    def __init__(self, rate_hz: float = 20.0, task: str = ""):
        self.spec = RobotSpec("example/spring", (JOINT,), (JOINT,), (), rate_hz)
        self.task = task

    def connect(self):
        self.at, self.start_ns = np.zeros(1, np.float32), time.monotonic_ns()

    def read(self):
        now = time.monotonic_ns()
        step = int((now - self.start_ns) * self.spec.rate_hz / 1e9)
        return Observation(self.at.copy(), {}, self.task, step, now)

    def write(self, action):
        self.at = np.clip(action, -1.0, 1.0).astype(np.float32)
        return self.at

    def hold(self):
        """It stands still by itself."""

    stop = disconnect = hold
