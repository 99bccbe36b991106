"""Does any command leave the safety envelope, whatever the policy says? The whole control loop under the virtual clock.

Random and adversarial policies (noise, jumps, oscillation at the limits, not-a-number, wrong units, far outside) answer
the executor of three robots, late and out of order; sensors go stale, the robot reports faults, stops are
re-armed. Every command that reaches the driver is checked against position, velocity, acceleration and, for the arm in
joint space, the box of its tool.

    python tools/bench/envelope.py [--ticks 100000]
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.arm import ARM7
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.dispatch import Request, State
from vla_stack.runtime.driver import Capabilities, Fault
from vla_stack.runtime.episode_log import Row
from vla_stack.runtime.executor import Executor, ExecutorConfig
from vla_stack.runtime.kinematics import Kinematics
from vla_stack.runtime.limits import make_envelope
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import ActionChunk, Dim, Observation, PolicySpec, RobotSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write

HORIZON = 16
EPISODE_TICKS = 1000
FLOAT32 = 1e-6  # commands are float32: differences of two are off by as much
POLICIES = ("noise", "jumps", "oscillation", "not a number", "wrong unit", "outside", "frozen", "drift")


@dataclass(frozen=True)
class Case:
    """A robot, its limits, where its episodes begin, and how many commands a control step it is sent."""

    robot: RobotSpec
    safety: SafetyConfig
    home: NDArray[np.float64]
    commands: int = 1


def cases() -> dict[str, Case]:
    tool = ARM7.spec("ee_abs", (), 0, 30.0)
    joints = ARM7.spec("joint_abs", (), 0, 30.0)
    dims = (
        Dim("x.pos", "m", -0.5, 0.7, 0.9),
        Dim("spin.pos", "rad", max_rate=2.0, kind="angle"),
        Dim("gripper.pos", "ratio", 0.0, 1.0, 8.0, "gripper"),
    )
    made = {
        "arm, tool commands": Case(
            tool,
            SafetyConfig(
                workspace={"tcp_z.pos": (0.05, 0.30)},
                max_acceleration={d.name: 4.0 for d in tool.action[:3]} | {"tcp_yaw.pos": 20.0},
                soft_start_s=1.0,
            ),
            np.array([0.45, 0.0, 0.2, 0.0, 1.0]),
        ),
        "arm, joint commands": Case(
            joints,
            SafetyConfig(
                max_rate={d.name: 1.5 for d in joints.action[:7]},
                max_acceleration={d.name: 15.0 for d in joints.action[:7]},
                tool_box={"x": (0.2, 0.65), "y": (-0.3, 0.3), "z": (0.05, 0.6)},
                kinematics="arm7",
                soft_start_s=0.5,
            ),
            np.append(ARM7.posture, 1.0),
        ),
        "endless joint": Case(
            RobotSpec("bench/endless", dims, dims, (), 100.0),
            SafetyConfig(max_acceleration={"x.pos": 2.0, "spin.pos": 10.0}),
            np.array([0.1, 0.0, 0.5]),
        ),
    }
    return made | {"endless joint, four commands a step": replace(made["endless joint"], commands=4)}


class Plant:
    """Goes where it is sent, with noise on what it measures; goes stale and faulty at random. Keeps what it was sent.

    ``path`` has one row a command: (what it must be smooth with, whether that is a start, the command).
    """

    def __init__(self, case: Case, clock: VirtualClock, rng: np.random.Generator) -> None:
        self.spec, self._home, self._clock, self._rng = case.robot, case.home, clock, rng
        self._low, self._high = np.asarray(case.robot.action_low), np.asarray(case.robot.action_high)
        self._at = case.home.copy()
        self._extra = np.zeros(len(case.robot.state) - len(case.home))
        self._seen, self._stale_ns, self._left = case.home, 0, 0
        self._starting = True
        self.fault: Fault | None = None
        self.capabilities = Capabilities()
        self.path: list[tuple[bool, NDArray[np.float64], NDArray[np.float64]]] = []

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def begin(self) -> None:
        self._at, self._starting = self._home.copy(), True

    def read(self) -> Observation:
        if self._left == 0 and self._rng.random() < 0.002:
            self._left = int(self._rng.integers(1, 12))
            self._stale_ns = self._clock.now_ns() if self._rng.random() < 0.5 else 0
            if not self._stale_ns:
                self.fault = Fault("bus", "no status packet", bool(self._rng.random() < 0.3))
        self._left = max(0, self._left - 1)
        if not self._left:
            self._stale_ns, self.fault = 0, None
        noise = self._rng.normal(0, 1e-3, len(self._at)) if self._starting else 0.0
        self._seen = np.clip(self._at + noise, self._low, self._high).astype(np.float32)
        state = np.concatenate([self._seen, self._extra]).astype(np.float32)
        return Observation(state, {}, "", 0, self._stale_ns or self._clock.now_ns())

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        before = self._seen if self._starting else self._at
        self.path.append((self._starting, np.asarray(before, np.float64), np.asarray(action, np.float64)))
        self._at, self._starting = np.asarray(action, np.float64), False
        return action

    def hold(self) -> None: ...

    def stop(self) -> None:
        self._starting = True


class Adversary:
    """A policy server that means harm, a random latency away; re-arms what has stopped."""

    def __init__(self, case: Case, clock: VirtualClock, rng: np.random.Generator) -> None:
        self._case, self._clock, self._rng = case, clock, rng
        self._inbox: list[tuple[int, ActionChunk]] = []
        self._stopped = False
        self.kind, self.asked = POLICIES[0], 0
        self.wild = 0  # actions answered that lie outside the robot's position limits, or are no numbers

    def offer(self, obs: Observation, request: Request | None) -> None:
        if request is None or self._rng.random() < 0.02:
            return
        actions = self._actions(obs.state[: len(self._case.home)])
        low, high = self._case.robot.action_low, self._case.robot.action_high
        self.wild += int((~((actions >= low) & (actions <= high)).all(axis=1)).sum())
        self.asked += len(actions)
        chunk = ActionChunk(actions, request.origin, request.k_obs, request.rid, request.epoch)
        delay = int(self._rng.integers(0, 8)) * round(1e9 / self._case.robot.rate_hz)
        self._inbox += [(self._clock.now_ns() + delay, chunk)] * (2 if self._rng.random() < 0.05 else 1)

    def receive(self, timeout_s: float = 0.0) -> list[ActionChunk | str]:
        self._clock.advance_ns(round(timeout_s * 1e9))
        now = self._clock.now_ns()
        ready: list[ActionChunk | str] = [c for due, c in self._inbox if due <= now]
        self._inbox = [x for x in self._inbox if x[0] > now]
        return [*ready, "rearm"] if self._stopped and self._rng.random() < 0.2 else ready

    def record(self, row: Row) -> None: ...

    def announce(self, k: int, state: State, why: str) -> None:
        self._stopped = state is State.STOP

    def _actions(self, at: NDArray[np.float32]) -> NDArray[np.float32]:
        rng, n = self._rng, len(at)
        low = np.where(np.isfinite(self._case.robot.action_low), self._case.robot.action_low, -7.0)
        high = np.where(np.isfinite(self._case.robot.action_high), self._case.robot.action_high, 7.0)
        wide = high - low
        shape = (HORIZON, n)
        made = {
            "noise": lambda: at + rng.normal(0, 0.3, shape) * wide,
            "jumps": lambda: np.where(rng.random(shape) < 0.2, rng.uniform(low, high, shape), at),
            "oscillation": lambda: np.where((np.arange(HORIZON)[:, None] + rng.integers(2)) % 2, low, high),
            "not a number": lambda: np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf]), at),
            "wrong unit": lambda: np.rad2deg(at) + rng.normal(0, 1, shape),
            "outside": lambda: rng.uniform(low - 0.9 * wide, high + 0.9 * wide, n) + np.zeros(shape),
            "frozen": lambda: np.broadcast_to(at, shape),
            "drift": lambda: at + np.cumsum(np.broadcast_to(rng.normal(0, 0.05, n) * wide, shape), axis=0),
        }
        return made[self.kind]().astype(np.float32)


def drive(case: Case, ticks: int, seed: int) -> tuple[Plant, Adversary, Counter[str]]:
    """Run ``ticks`` control steps of episodes, one adversary and execution mode after the other."""
    clock, rng = VirtualClock(10**9), np.random.default_rng(seed)
    plant, port = Plant(case, clock, rng), Adversary(case, clock, rng)
    envelope = make_envelope(case.robot, replace(case.safety, max_refusals=20), case.commands)
    counters: Counter[str] = Counter()
    done = episode = 0
    while done < ticks:
        port.kind = POLICIES[episode % len(POLICIES)]
        mode = ("naive", "sync", "ensemble")[episode // len(POLICIES) % 3]
        config = ExecutorConfig(mode=mode, interpolate=case.commands)
        loop = ControlLoop(plant, Executor(case.robot, PolicySpec(case.robot, HORIZON), config), envelope, clock, port)
        plant.begin()
        log = loop.run(episode, EPISODE_TICKS)
        counters += log.safety + Counter({f"ticks in {name}": n for name, n in log.states.items()})
        done += len(log.rids)
        episode += 1
    return plant, port, counters


def violations(case: Case, plant: Plant) -> Counter[str]:
    """Commands outside each limit, counted."""
    robot, safety, dt = case.robot, case.safety, case.robot.dt / case.commands
    starts = np.array([row[0] for row in plant.path])
    before, sent = (np.array([row[i] for row in plant.path]) for i in (1, 2))
    box = [safety.workspace.get(d.name, (-np.inf, np.inf)) for d in robot.action]
    low = np.maximum(robot.action_low.astype(float), [b[0] for b in box])
    high = np.minimum(robot.action_high.astype(float), [b[1] for b in box])
    rates = np.array([min(d.max_rate, safety.max_rate.get(d.name, np.inf)) for d in robot.action])
    accelerations = np.array([safety.max_acceleration.get(d.name, np.inf) for d in robot.action])
    u = sent - before
    u_before = np.where(starts[:, None], 0.0, np.vstack([np.zeros_like(u[:1]), u[:-1]]))
    out = Counter(
        {
            "not finite": int((~np.isfinite(sent)).any(axis=1).sum()),
            "position": int(((sent < low - FLOAT32) | (sent > high + FLOAT32)).any(axis=1).sum()),
            "velocity": int((np.abs(u) > rates * dt + FLOAT32).any(axis=1).sum()),
            "acceleration": int((np.abs(u - u_before) > accelerations * dt**2 + FLOAT32).any(axis=1).sum()),
        }
    )
    if safety.tool_box:
        tool = Kinematics(safety.kinematics, robot).tool
        at = np.array([tool(q) for q in sent])
        edges = np.array([safety.tool_box[axis] for axis in "xyz"]).T
        out["tool"] = int(((at < edges[0]) | (at > edges[1])).any(axis=1).sum())
    return out


def measure(ticks: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Of each case: commands sent, violations by limit, how wild the policy was, how often what was applied."""
    out: dict[str, dict[str, Any]] = {}
    for name, case in cases().items():
        plant, port, counters = drive(case, ticks, seed)
        moved = np.array([np.abs(sent - before).max() > 1e-6 for _, before, sent in plant.path])
        out[name] = {
            "ticks": sum(n for key, n in counters.items() if key.startswith("ticks in")),
            "commands": len(plant.path),
            "violations": dict(violations(case, plant)),
            "share of commands that moved": float(moved.mean()),
            "share of the policy's actions outside the position limits": port.wild / port.asked,
            "applied": dict(counters),
        }
    return out


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--ticks", type=int, default=100_000, help="control steps of each robot (default: %(default)s)")
    args = p.parse_args()
    data = measure(args.ticks)
    checks = []
    for name, row in data.items():
        checks.append(Check(f"{name}: control steps", row["ticks"], 100_000))
        total = sum(row["violations"].values())
        checks.append(Check(f"{name}: commands outside the envelope", total, 0, "<="))
        checks.append(Check(f"{name}: share of commands that moved", row["share of commands that moved"]))
    write("envelope", checks, data, seeds=[0])


if __name__ == "__main__":
    main()
