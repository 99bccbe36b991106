"""A robot and a policy made of numbers, for the control loop under the virtual clock."""

from collections import Counter

import numpy as np

from vla_stack.runtime.clock import RealClock, VirtualClock
from vla_stack.runtime.driver import Capabilities
from vla_stack.runtime.executor import Executor, ExecutorConfig
from vla_stack.runtime.safety import SafetyConfig, SafetyEnvelope
from vla_stack.schema import ActionChunk, Camera, Dim, Observation, PolicySpec, RobotSpec

HORIZON = 16
DT_NS = 100_000_000


def robot_spec(**kwargs) -> RobotSpec:
    dims = (Dim("x.pos", "m"), Dim("gripper.pos", "ratio", kind="gripper"))
    return RobotSpec("test/robot", dims, dims, kwargs.pop("cameras", (Camera("front", 4, 6),)), rate_hz=10.0, **kwargs)


class FakeDriver:
    """Stands where it was last sent to; ``busy_ns`` is how long each of its calls to read takes, by reading."""

    def __init__(
        self, clock: VirtualClock | RealClock, episode_ticks: int = 10**9, busy_ns: dict[int, int] | None = None
    ):
        self.spec = robot_spec()
        self.clock, self.episode_ticks, self.busy_ns = clock, episode_ticks, busy_ns or {}
        self.calls: Counter[str] = Counter()
        self.sent: list[np.ndarray] = []
        self.at = np.zeros(2, np.float32)
        self.frozen_ns: int | None = None  # capture time of a sensor that has gone quiet

    capabilities = Capabilities()
    stages = ("reach", "grasp")

    def connect(self): ...

    def disconnect(self):
        self.calls["disconnect"] += 1

    def reset(self, seed):
        self.calls["reads"] = 0
        self.at = np.zeros(2, np.float32)
        return f"episode {seed}"

    def read(self):
        if busy := self.busy_ns.get(self.calls["reads"]):
            self.clock.advance_ns(busy)
        self.calls["reads"] += 1
        t_ns = self.clock.now_ns() if self.frozen_ns is None else self.frozen_ns
        return Observation(self.at.copy(), {"front": np.zeros((4, 6, 3), np.uint8)}, "task", 0, t_ns)

    def write(self, action):
        self.sent.append(action.copy())
        self.at = action.copy()
        return action

    def hold(self):
        self.calls["hold"] += 1

    def stop(self):
        self.calls["stop"] += 1

    def status(self):
        done = self.calls["reads"] >= self.episode_ticks
        return {"is_success": done, "done": done, "stage": 1, "real_time_factor": 1.0}


def label_chunk(request, scale: float = 1.0) -> ActionChunk:
    """The policy of the tests: action i is the number (origin + i) * scale."""
    labels = (np.arange(request.origin, request.origin + HORIZON) * scale).astype(np.float32)
    return ActionChunk(np.stack([labels, labels], 1), request.origin, request.k_obs, request.rid, request.epoch)


def real_time_robot() -> FakeDriver:
    """For the control process, which is handed a function."""
    return FakeDriver(RealClock())


class FakePort:
    """A policy server ``latency_ns`` away that answers while ``alive``; ``orders`` is (tick, order)."""

    def __init__(self, clock: VirtualClock, latency_ns: int = DT_NS, orders=(), answer=label_chunk):
        self.clock, self.latency_ns, self.orders, self.answer = clock, latency_ns, list(orders), answer
        self.alive = lambda tick: True
        self.inbox: list[tuple[int, ActionChunk]] = []
        self.states: list[tuple[int, str]] = []
        self.requests = []
        self.rows = []
        self.tick = 0

    def offer(self, obs, request):
        self.tick = obs.step + 1
        if request is not None:
            self.requests.append(request)
            if self.alive(obs.step):
                self.inbox.append((self.clock.now_ns() + self.latency_ns, self.answer(request)))

    def receive(self, timeout_s=0.0):
        if timeout_s and not any(due <= self.clock.now_ns() for due, _ in self.inbox):
            wait = min([due - self.clock.now_ns() for due, _ in self.inbox] + [round(timeout_s * 1e9)])
            self.clock.advance_ns(max(1, wait))
        ready = [chunk for due, chunk in self.inbox if due <= self.clock.now_ns()]
        self.inbox = [x for x in self.inbox if x[0] > self.clock.now_ns()]
        orders = [order for tick, order in self.orders if tick <= self.tick]
        self.orders = [x for x in self.orders if x[0] > self.tick]
        return ready + orders

    def announce(self, k, state, why):
        self.states.append((k, state.value))

    def record(self, row):
        self.rows.append(row)


def make_executor(**config) -> Executor:
    spec = robot_spec()
    return Executor(spec, PolicySpec(spec, HORIZON), ExecutorConfig(**config))


def make_envelope(**config) -> SafetyEnvelope:
    return SafetyEnvelope(robot_spec(), SafetyConfig(**config))
