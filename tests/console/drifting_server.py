"""A policy server without a model, as a process: it moves the simulated arm slowly to the right, 16 steps at a time."""

import numpy as np

from sim.arm import ARM7
from vla_stack.schema import Chunks, PolicySpec
from vla_stack.serving.server import PolicyServer

HORIZON, STEP = 16, 0.005  # m


class Drift:
    def __init__(self) -> None:
        self.spec = PolicySpec(ARM7.spec("ee_abs", ("front", "wrist"), 32, 10.0), HORIZON, model_version="drift")

    def infer(self, observations, seeds):
        actions = np.repeat(np.stack([o.state[:5] for o in observations])[:, None], HORIZON, axis=1)
        actions[:, :, 1] += STEP * np.arange(1, HORIZON + 1, dtype=np.float32)
        return Chunks(actions)


if __name__ == "__main__":
    server = PolicyServer(Drift, "tcp://127.0.0.1:*", on_ready=lambda _: print("READY", server.endpoint, flush=True))
    server.run()
