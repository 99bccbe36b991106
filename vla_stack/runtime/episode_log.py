"""What the control loop remembers of an episode, and what it hands out of each tick for a recording."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vla_stack.runtime.driver import Status
from vla_stack.runtime.link import Message

LATENESS_BINS_MS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class Row:
    """What goes with an observation into a recording.

    Attributes:
        step: Control step.
        state: float32 [S] as measured.
        action: float32 [A] as the driver sent it.
        labels: Plain values by column name.
        t_ns: Monotonic time at which the action was sent.
        joint_command: float32 [J], joint targets that realised it, radians; None where the driver does not say.
    """

    step: int
    state: NDArray[np.float32]
    action: NDArray[np.float32]
    labels: Message
    t_ns: int
    joint_command: NDArray[np.float32] | None = None


@dataclass
class EpisodeLog:
    """What an episode was like; one row a tick that was run: ``actions`` as sent, ``rids`` of chunks (-1: holding)."""

    seed: int
    task: str
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    rids: list[int] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    delays: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    overruns: int = 0
    executor: Counter[str] = field(default_factory=Counter)
    safety: Counter[str] = field(default_factory=Counter)
    status: Status = field(default_factory=lambda: Status(is_success=False, done=False))
    duration_s: float = 0.0
    operator: Message | None = None

    def to_message(self) -> Message:
        """Everything as plain values; ``steps`` counts all control ticks, skipped and idle ones included."""
        late_ms = np.array(self.late_ns or [0]) * 1e-6
        actions = np.array(self.actions, np.float32)
        ran = len(self.rids)
        return {
            "seed": self.seed,
            "instruction": self.task,
            "success": bool(self.status.get("is_success", False)),
            "stage": int(self.status.get("stage", -1)),
            "steps": ran + self.overruns,
            "idle_ticks": ran - self.states["run"] + self.overruns,
            "duration_s": self.duration_s,
            "real_time_factor": float(self.status.get("real_time_factor", 1.0)),
            "ticks": {**self.states, "overrun": self.overruns},
            "delay_ticks": {
                "mean": float(np.mean(self.delays)) if self.delays else 0.0,
                "max": max(self.delays, default=0),
                "counts": {str(d): n for d, n in sorted(Counter(self.delays).items())},
            },
            "lateness_ms": {
                "p50": float(np.median(late_ms)),
                "p99": float(np.quantile(late_ms, 0.99)),
                "max": float(late_ms.max()),
                "bins": list(LATENESS_BINS_MS),
                "counts": np.bincount(np.digitize(late_ms, LATENESS_BINS_MS), minlength=8).tolist(),
            },
            "executor": dict(self.executor),
            "safety": dict(self.safety),
            "operator": self.operator,
            "actions": actions.tobytes(),
            "shape": list(actions.shape),
            "rids": np.array(self.rids, np.int32).tobytes(),
        }


@dataclass(frozen=True)
class Episode:
    """An episode as it was driven.

    Attributes:
        summary: Plain values, see :meth:`EpisodeLog.to_message`.
        actions: float32 [T, A], commands as sent.
        rids: int32 [T], request id of the chunk behind each command, -1 while holding.
    """

    summary: Message
    actions: NDArray[np.float32]
    rids: NDArray[np.int32]

    @classmethod
    def of(cls, message: Message) -> Episode:
        """Of the message that the control process sends at its end."""
        summary = {k: v for k, v in message.items() if k not in ("kind", "actions", "shape", "rids")}
        actions = np.frombuffer(message["actions"], np.float32).reshape(message["shape"])
        return cls(summary, actions, np.frombuffer(message["rids"], np.int32))
