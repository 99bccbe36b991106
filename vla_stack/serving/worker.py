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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import F4, ActionChunk, Chunks, Continuation, Observation, PolicySpec, SchemaError, finite
from vla_stack.serving import messages, wire
from vla_stack.serving.pace import Pace, batch_sizes
from vla_stack.serving.wire import Code, WireError

log = logging.getLogger(__name__)

WARM_UP_RUNS = 3
BATCHES = batch_sizes(8)  # where nothing else is said


class ChunkPolicy(Protocol):
    """What is served; :func:`vla_stack.policies.load_policy` returns one."""

    @property
    def spec(self) -> PolicySpec: ...

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """One chunk an observation; ``continuations`` are empty or one an observation."""
        ...


class Job(NamedTuple):
    """One request on its way through inference; times are the server's clock."""

    peer: bytes
    sid: str
    epoch: int
    rid: int
    observation: Observation
    origin: int
    seed: int
    continuation: Continuation | None
    received_ns: int
    queued_ns: int
    deadline_ns: int
    policy: ChunkPolicy
    pixels_hold: Callable[[], bool] | None = None  # where pictures lie in the robot's memory: they are still the same


Frames = list[bytes | memoryview]


class Result(NamedTuple):
    """What became of a job: the frames to send, or why there are none, and when; times are the server's clock."""

    job: Job
    frames: Frames | WireError
    begun_ns: int
    computed_ns: int = 0
    encoded_ns: int = 0


class Mailbox:
    """One slot a session, the latest request wins; whose robot can wait least is served first, where it can be in time
    (``pace.py``), and before it who has been passed over more often since its last chunk, so that nobody starves.

    Whatever has gathered while a batch was computed is the next batch: an idle policy never waits for company.

    Args:
        max_batch: Jobs taken at once.
    """

    def __init__(self, max_batch: int) -> None:
        self._pace = Pace(max_batch)
        self._missed: Counter[str] = Counter()  # requests of a session that got nothing since its last chunk
        self._slots: dict[str, Job] = {}
        self._changed = threading.Condition(threading.Lock())
        self._waited_for = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, job: Job) -> Job | None:
        """Queue a job; returns the one of the same session that it supersedes."""
        with self._changed:
            superseded = self._slots.get(job.sid)
            self._missed[job.sid] += superseded is not None
            self._slots[job.sid] = job
            if self._waited_for:
                self._changed.notify()
        return superseded

    def take(self) -> list[Job]:
        """The next jobs, once there is one; none after :meth:`close`."""
        with self._changed:
            self._waited_for = True
            self._changed.wait_for(lambda: self._slots or self._closed)
            self._waited_for = False
            return [] if self._closed else self._pop()

    def poll(self) -> list[Job]:
        """The next jobs, none if there are none."""
        with self._changed:
            return self._pop()

    def _pop(self) -> list[Job]:
        jobs = list(self._slots.values())
        if len(jobs) > 1:
            jobs.sort(key=lambda job: job.deadline_ns)
            jobs = [job for job in jobs if job.policy is jobs[0].policy]
            now_ns = time.monotonic_ns()
            late = sum(job.deadline_ns < now_ns for job in jobs)  # they cost nothing, and are to be told
            waiting = jobs[late:]
            if waiting:
                begin, number = self._pace.next([job.deadline_ns - now_ns for job in waiting])
                waiting = sorted(waiting[begin:], key=lambda job: -self._missed[job.sid])[:number]
            self._missed.update(job.sid for job in jobs[:late])
            jobs = jobs[:late] + waiting
        else:
            waiting = jobs
        for job in waiting:
            del self._missed[job.sid]
        for job in jobs:
            del self._slots[job.sid]
        return jobs

    def note(self, size: int, ns: float) -> None:
        """A batch of ``size`` jobs has taken ``ns`` nanoseconds to compute. Any thread."""
        with self._changed:
            self._pace.note(size, ns)

    def drop(self, sid: str) -> Job | None:
        """Remove and return what a session has queued."""
        with self._changed:
            del self._missed[sid]
            return self._slots.pop(sid, None)

    def close(self) -> None:
        """Let :meth:`take` return nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Worker(threading.Thread):
    """Loads and warms a policy, then answers jobs. All functions are called on this thread.

    Args:
        load: Returns the policy.
        next_jobs: Waits for the next jobs; none ends the thread.
        deliver: Takes the policy once it is warm, then the results of each batch.
        fail: Takes what ended the thread, if anything did.
        encode: Frames of a reply.
        note: Takes the size of each batch and the nanoseconds that it took.
        sizes: Of batches to warm up at.
    """

    def __init__(
        self,
        load: Callable[[], ChunkPolicy],
        next_jobs: Callable[[], list[Job]],
        deliver: Callable[[list[Result] | ChunkPolicy], None],
        fail: Callable[[BaseException], None],
        encode: Callable[[ActionChunk, Job], Frames],
        note: Callable[[int, float], None],
        sizes: Sequence[int] = BATCHES,
    ) -> None:
        super().__init__(name="vla-inference", daemon=True)
        self._load, self._next_jobs, self._deliver, self._fail = load, next_jobs, deliver, fail
        self._encode, self._note, self._sizes = encode, note, sizes

    def run(self) -> None:
        try:
            self._deliver(load_warm(self._load, self._sizes, self._note))
            while jobs := self._next_jobs():
                self._deliver(_answer(jobs, self._encode, self._note))
        except BaseException as e:  # whatever it is, run() of the server raises it on the thread of its caller
            self._fail(e)


def load_warm(
    load: Callable[[], ChunkPolicy], sizes: Sequence[int] = BATCHES, note: Callable[[int, float], None] | None = None
) -> ChunkPolicy:
    """A policy that answers its first request as fast as any other; ``note`` is told what batches of ``sizes`` take."""
    policy = load()
    _warm_up(policy, sizes, note)
    return policy


def _warm_up(policy: ChunkPolicy, sizes: Sequence[int], note: Callable[[int, float], None] | None) -> None:
    """First inferences allocate, compile and page in: pay before the first robot asks (0.7 s against 0.3 s steady).

    At every size of batch, with and without an action prefix.
    """
    robot, horizon = policy.spec.robot, policy.spec.horizon
    blank = Observation(
        state=np.zeros(len(robot.state), np.float32),
        images={c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in robot.cameras},
        task="",
    )
    plans: list[Continuation | None] = [None]
    if "prefix" in policy.spec.extras.get("continues", ()):
        plans.append(Continuation("prefix", np.zeros((horizon, len(robot.action)), np.float32), 1, 1))
    for n in sizes:
        for plan in plans:
            for _ in range(WARM_UP_RUNS):
                begun_ns = time.monotonic_ns()
                _infer(policy, [blank] * n, [0] * n, [plan] * n)
        if note:  # the last time: the first one may have compiled
            note(n, time.monotonic_ns() - begun_ns)


def _infer(
    policy: ChunkPolicy,
    observations: list[Observation],
    seeds: list[int],
    continuations: list[Continuation | None],
) -> Chunks:
    """Chunks of a batch; SchemaError if the policy breaks its own promise."""
    plans = (continuations,) if any(continuations) else ()
    chunks = policy.infer(observations, seeds, *plans)
    actions = chunks.actions
    expected = (len(observations), policy.spec.horizon, len(policy.spec.robot.action))
    if actions.shape != expected or actions.dtype != F4:
        raise SchemaError(f"policy returned {actions.dtype}{list(actions.shape)}, promised float32{list(expected)}")
    if not finite(actions):
        raise SchemaError("policy returned actions that are not finite")
    return chunks


def encode(chunk: ActionChunk, job: Job) -> Frames:
    """A CHUNK of our own protocol."""
    return wire.encode(messages.chunk(chunk, job.observation.t_capture_ns))


def _answer(
    jobs: list[Job], encode: Callable[[ActionChunk, Job], Frames], note: Callable[[int, float], None]
) -> list[Result]:
    """Results of a batch of one policy, in any order. One request that cannot be computed does not fail the others."""
    start = time.monotonic_ns()
    results = []
    if any(job.deadline_ns < start for job in jobs):
        overdue = WireError(Code.EXPIRED, "the robot can no longer use an answer")
        results = [Result(job, overdue, start) for job in jobs if job.deadline_ns < start]
        jobs = [job for job in jobs if job.deadline_ns >= start]
        if not jobs:
            return results
    policy = jobs[0].policy
    try:
        chunks = _infer(
            policy, [job.observation for job in jobs], [job.seed for job in jobs], [job.continuation for job in jobs]
        )
    except Exception:  # the robot is told INTERNAL, the reason stays here
        if len(jobs) > 1:
            return results + [result for job in jobs for result in _answer([job], encode, note)]
        log.exception("inference failed for request %d of session %.8s", jobs[0].rid, jobs[0].sid)
        failed = WireError(Code.INTERNAL, "inference failed; see the server's log")
        return [*results, Result(jobs[0], failed, start)]
    done = time.monotonic_ns()
    note(len(jobs), done - start)
    for i, job in enumerate(jobs):
        if job.pixels_hold and not job.pixels_hold():
            results.append(Result(job, WireError(Code.EXPIRED, messages.OVERWRITTEN), start))
            continue
        frames = encode(_chunk(job, *chunks.row(i), policy.spec), job)
        results.append(Result(job, frames, start, done, time.monotonic_ns()))
    return results


def _chunk(job: Job, actions: NDArray[np.float32], execute: int, spec: PolicySpec) -> ActionChunk:
    return ActionChunk(
        actions=actions,
        origin=job.origin,
        k_obs=job.observation.step,
        rid=job.rid,
        epoch=job.epoch,
        session=job.sid,
        d_cond=job.continuation.delay if job.continuation else 0,
        model_version=spec.model_version,
        execute=execute,
    )
