"""A small robot, policies whose answers can be checked, and ways to wait for a server without timing it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from vla_stack.schema import Camera, Chunks, Dim, Observation, PolicySpec, RobotSpec
from vla_stack.serving.client import PolicyClient, ServerError

HORIZON = 4
WAIT_S = 20.0  # upper bound of every wait; no test depends on how long anything takes

ROBOT = RobotSpec(
    name="test/two",
    state=(Dim("x.pos", "m"), Dim("gripper.pos", "ratio", 0, 1, kind="gripper")),
    action=(Dim("x.pos", "m"), Dim("gripper.pos", "ratio", 0, 1, kind="gripper")),
    cameras=(Camera("front", 6, 8), Camera("wrist", 4, 4)),
    rate_hz=10.0,
)


def observation(step: int = 0, task: str = "pick the red cube") -> Observation:
    images = {c.name: np.full((c.height, c.width, 3), step % 256, np.uint8) for c in ROBOT.cameras}
    return Observation(np.array([0.5, 1.0], np.float32), images, task, step, t_capture_ns=1000 + step)


class TickPolicy:
    """``actions[i] == step + i`` in every dimension."""

    def __init__(self, model_version: str = "m1") -> None:
        self.spec = PolicySpec(ROBOT, HORIZON, normalisation="n1", model_version=model_version)

    def infer(self, observations, seeds):
        ticks = np.array([[o.step + i for i in range(HORIZON)] for o in observations], np.float32)
        return Chunks(np.repeat(ticks[:, :, None], len(ROBOT.action), axis=2))


class GatedPolicy(TickPolicy):
    """Each inference after warm-up announces itself by ``entered`` and then waits for a permit of ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.batches: list[list[int]] = []  # steps of the observations that were computed together

    def infer(self, observations, seeds):
        if not any(o.task for o in observations):  # as only warming up has none
            return super().infer(observations, seeds)
        self.entered.release()
        assert self.gate.acquire(timeout=WAIT_S)
        if any(o.task == "fail" for o in observations):
            raise ValueError("an observation that this policy cannot take")
        self.batches.append([o.step for o in observations])
        return super().infer(observations, seeds)


class ContinuingPolicy(TickPolicy):
    """Continues plans by prefixes of up to two steps, and keeps the plans."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, d_train_max=2, extras={"continues": ["prefix"]})
        self.plans: list = []

    def infer(self, observations, seeds, continuations=()):
        self.plans += continuations
        return super().infer(observations, seeds)


def collect(client: PolicyClient, n: int) -> list:
    """The next ``n`` things that a client reports."""
    items: list = []
    for _ in range(int(WAIT_S * 10)):
        items += client.poll(timeout_ms=100)
        if len(items) >= n:
            return items
    raise AssertionError(f"{len(items)} of {n} arrived: {items}")


def barrier(client: PolicyClient) -> list:
    """Wait until the server has handled everything sent so far; returns what came meanwhile.

    Messages of one connection stay in order, so the PONG comes after whatever they caused at once.
    """
    items: list = []
    before = client.last_pong_ns
    client.ping()
    for _ in range(int(WAIT_S * 10)):
        items += client.poll(timeout_ms=100)
        if client.last_pong_ns != before:
            return items
    raise AssertionError("no PONG")


def codes(items: list) -> list[tuple[str, int]]:
    return [(item.code, item.rid) for item in items if isinstance(item, ServerError)]
