"""A policy server without a model, as a process: ``python label_server.py ENDPOINT numbers|arm``.

``numbers`` answers with the step numbers of the chunk, ``arm`` tells the simulated arm to stay where it is.
"""

import signal
import sys

import numpy as np
from runtime_fakes import HORIZON, robot_spec

from vla_stack.schema import Chunks, PolicySpec
from vla_stack.serving.server import PolicyServer


class Labels:
    spec = PolicySpec(robot_spec(), HORIZON, model_version="labels")

    def infer(self, observations, seeds):
        steps = np.array([o.step for o in observations])[:, None] + np.arange(HORIZON)
        return Chunks(np.repeat(steps[:, :, None], 2, axis=2).astype(np.float32))


class Stay:
    def __init__(self) -> None:
        from sim.arm import ARM7

        self.spec = PolicySpec(ARM7.spec("ee_abs", ("front", "wrist"), 32, 10.0), HORIZON, model_version="stay")

    def infer(self, observations, seeds):
        return Chunks(np.repeat(np.stack([o.state[:5] for o in observations])[:, None], HORIZON, axis=1))


def main(endpoint: str, kind: str) -> None:
    server = PolicyServer(
        Labels if kind == "numbers" else Stay, endpoint, on_ready=lambda _: print("READY", server.endpoint, flush=True)
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
