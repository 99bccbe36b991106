"""Inference: a mailbox of requests, and one thread that runs the policy on them.

A thread, not a process: torch releases the interpreter lock inside its operators, so another thread keeps answering
the network while it computes. Measured on two shared cores with eager CPU inference of 60 to 90 ms a request, PING was
answered in 0.8 ms (median) and 8 ms (p99), as with an idle policy; with a policy that never leaves Python for 200 ms,
in 6 ms and 29 ms. A process would add another socket hop and copy to each request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import ActionChunk, Chunks, Observation, PolicySpec, SchemaError
from vla_stack.serving import messages, wire

log = logging.getLogger(__name__)

WARM_UP_RUNS = 3


class ChunkPolicy(Protocol):
    """What is served; :func:`vla_stack.policies.load_policy` returns one."""

    @property
    def spec(self) -> PolicySpec: ...

    def infer(self, observations: Sequence[Observation], seeds: Sequence[int]) -> Chunks:
        """One chunk an observation."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request on its way through inference; ``received_ns`` and ``queued_ns`` on the server's clock."""

    peer: bytes
    sid: str
    epoch: int
    rid: int
    observation: Observation
    origin: int
    seed: int
    received_ns: int
    queued_ns: int


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job: the frames to send, or None where inference failed. ``seconds`` by stage."""

    job: Job
    frames: list[bytes | memoryview] | None
    seconds: dict[str, float]


class Mailbox:
    """One slot a session, the latest request wins; sessions take turns.

    A newer request takes the slot, and so the turn, of the one it supersedes: neither can a robot that asks often
    overtake the others, nor is it set back for asking. Deadline order and batching belong in :meth:`take`.
    """

    def __init__(self) -> None:
        self._slots: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, job: Job) -> Job | None:
        """Queue a job; returns the one of the same session that it supersedes."""
        with self._changed:
            superseded = self._slots.get(job.sid)
            self._slots[job.sid] = job
            self._changed.notify()
        return superseded

    def take(self) -> Job | None:
        """The next job, once there is one; None after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._slots or self._closed)
            if self._closed:
                return None
            return self._slots.pop(next(iter(self._slots)))

    def poll(self) -> Job | None:
        """The next job, None if there is none."""
        with self._changed:
            return self._slots.pop(next(iter(self._slots))) if self._slots else None

    def drop(self, sid: str) -> Job | None:
        """Remove and return what a session has queued."""
        with self._changed:
            return self._slots.pop(sid, None)

    def close(self) -> None:
        """Let :meth:`take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Worker(threading.Thread):
    """Loads and warms a policy, then answers jobs. All functions are called on this thread.

    Args:
        load: Returns the policy.
        next_job: Waits for the next job; None ends the thread.
        deliver: Takes the policy's description once it is warm, then the result of each job.
        fail: Takes what ended the thread, if anything did.
    """

    def __init__(
        self,
        load: Callable[[], ChunkPolicy],
        next_job: Callable[[], Job | None],
        deliver: Callable[[Result | PolicySpec], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="vla-inference", daemon=True)
        self._load, self._next_job, self._deliver, self._fail = load, next_job, deliver, fail

    def run(self) -> None:
        try:
            policy = self._load()
            _warm_up(policy)
            self._deliver(policy.spec)
            while (job := self._next_job()) is not None:
                self._deliver(_answer(policy, job))
        except BaseException as e:  # whatever it is, run() of the server raises it on the thread of its caller
            self._fail(e)


def _warm_up(policy: ChunkPolicy) -> None:
    """First inferences allocate, compile and page in: pay before the first robot asks (0.7 s against 0.3 s steady)."""
    robot = policy.spec.robot
    blank = Observation(
        state=np.zeros(len(robot.state), np.float32),
        images={c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in robot.cameras},
        task="",
    )
    for _ in range(WARM_UP_RUNS):
        _infer(policy, blank, seed=0)


def _infer(policy: ChunkPolicy, observation: Observation, seed: int) -> tuple[NDArray[np.float32], int]:
    """Actions float32 [H, A] and how many of them to execute; SchemaError if the policy breaks its own promise."""
    chunks = policy.infer([observation], [seed])
    actions = chunks.actions
    expected = (1, policy.spec.horizon, len(policy.spec.robot.action))
    if actions.shape != expected or actions.dtype != np.float32:
        raise SchemaError(f"policy returned {actions.dtype}{list(actions.shape)}, promised float32{list(expected)}")
    if not np.isfinite(actions).all():
        raise SchemaError("policy returned actions that are not finite")
    return chunks.row(0)


def _answer(policy: ChunkPolicy, job: Job) -> Result:
    start = time.monotonic_ns()
    seconds = {"queue": (start - job.queued_ns) * 1e-9}
    try:
        actions, execute = _infer(policy, job.observation, job.seed)
        done = time.monotonic_ns()
        chunk = ActionChunk(
            actions=actions,
            origin=job.origin,
            k_obs=job.observation.step,
            rid=job.rid,
            epoch=job.epoch,
            session=job.sid,
            model_version=policy.spec.model_version,
            execute=execute,
        )
        frames = wire.encode(messages.chunk(chunk, job.observation.t_capture_ns))
    except Exception:  # the robot is told INTERNAL, the reason stays here
        log.exception("inference failed for request %d of session %.8s", job.rid, job.sid)
        return Result(job, None, seconds)
    seconds |= {"infer": (done - start) * 1e-9, "encode": (time.monotonic_ns() - done) * 1e-9}
    return Result(job, frames, seconds)
