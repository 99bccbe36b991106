"""Between a robot and its server: passes each ZeroMQ message on, late, twice, changed or not at all."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import zmq
from hostile import mutate

from vla_stack.serving import messages, wire
from vla_stack.serving.wire import Kind, WireError

Frames = list[bytes]
Mangle = Callable[[np.random.Generator, bool, Frames], Sequence[tuple[float, Frames]]]
"""(random, is it a reply, message) -> what is passed on instead, each after so many seconds."""


class Proxy(threading.Thread):
    """A proxy with one connection to the server for each connection of a robot.

    Attributes:
        mangle: What is done to messages; None passes them on.
        counts: Messages that were touched, by what was done: ``lost``, ``late``, ``extra``, ``changed``.
    """

    def __init__(self, server: str, seed: int = 0) -> None:
        super().__init__(name="proxy", daemon=True)
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._server, self._rng = server, np.random.default_rng(seed)
        self._backs: dict[bytes, zmq.Socket] = {}
        self._due: list[tuple[float, int, bool, bytes, Frames]] = []
        self._order = itertools.count()
        self._over = threading.Event()
        self.mangle: Mangle | None = None
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._over.is_set():
            wait = min(0.05, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.05
            ready = dict(poller.poll(int(wait * 1000) + 1))
            if self._front in ready:
                peer, *frames = self._front.recv_multipart()
                if peer not in self._backs:
                    self._backs[peer] = self._context.socket(zmq.DEALER)
                    self._backs[peer].connect(self._server)
                    poller.register(self._backs[peer], zmq.POLLIN)
                self._take(False, peer, frames)
            for peer, back in self._backs.items():
                if back in ready:
                    self._take(True, peer, back.recv_multipart())
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, reply, peer, frames = heapq.heappop(self._due)
                if reply:
                    self._front.send_multipart([peer, *frames])
                else:
                    self._backs[peer].send_multipart(frames)
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._over.set()
        self.join()

    def _take(self, reply: bool, peer: bytes, frames: Frames) -> None:
        passed = self.mangle(self._rng, reply, frames) if self.mangle else [(0.0, frames)]
        self.counts["lost"] += not passed
        self.counts["extra"] += max(0, len(passed) - 1)
        self.counts["late"] += sum(bool(delay > 0) for delay, _ in passed)
        self.counts["changed"] += sum(other != frames for _, other in passed)
        for delay, other in passed:
            if other:
                heapq.heappush(self._due, (time.monotonic() + delay, next(self._order), reply, peer, other))


def loss(share: float) -> Mangle:
    """Either way."""
    return lambda rng, reply, frames: [] if rng.random() < share else [(0.0, frames)]


def delay(round_trip_s: float) -> Mangle:
    """Half of it each way."""
    return lambda rng, reply, frames: [(round_trip_s / 2, frames)]


def reorder(rng: np.random.Generator, reply: bool, frames: Frames) -> Sequence[tuple[float, Frames]]:
    """Each reply waits for a while of its own, so that later ones overtake it."""
    return [(rng.uniform(0, 0.4) if reply else 0.0, frames)]


def duplicate(rng: np.random.Generator, reply: bool, frames: Frames) -> Sequence[tuple[float, Frames]]:
    """Every message, at once and again after up to three seconds, when another epoch may run."""
    return [(0.0, frames), (0.0, frames), (rng.uniform(0.1, 3.0), frames)]


def truncate(rng: np.random.Generator, reply: bool, frames: Frames) -> Sequence[tuple[float, Frames]]:
    """Half of all messages lose frames, or the end of their last one."""
    if rng.random() < 0.5:
        return [(0.0, frames)]
    if rng.random() < 0.5 and len(frames) > 1:
        return [(0.0, frames[: rng.integers(1, len(frames))])]
    return [(0.0, [*frames[:-1], frames[-1][: rng.integers(len(frames[-1]))]])]


def oversize(rng: np.random.Generator, reply: bool, frames: Frames) -> Sequence[tuple[float, Frames]]:
    """A tenth of all messages get a frame larger than ZeroMQ may accept, or more frames than a message may have."""
    match rng.integers(20):
        case 0:
            return [(0.0, [*frames, bytes(wire.MAX_FRAME_BYTES + 1)])]
        case 1:
            return [(0.0, [*frames, *[b"x"] * 40])]
        case _:
            return [(0.0, frames)]


def fuzz(rng: np.random.Generator, reply: bool, frames: Frames) -> Sequence[tuple[float, Frames]]:
    """Half of all messages are edited anywhere but in the bytes of their tensors (numbers are another fault)."""
    return [(0.0, mutate(rng, frames, header_only=True) if rng.random() < 0.5 else frames)]


def nonsense(rng: np.random.Generator, reply: bool, frames: Frames) -> Sequence[tuple[float, Frames]]:
    """Half of all chunks hold NaN, infinity or numbers far outside every range, in one action or in all."""
    try:
        message = wire.decode(frames)
    except WireError:
        return [(0.0, frames)]
    if message.kind is not Kind.CHUNK or rng.random() < 0.5:
        return [(0.0, frames)]
    actions = message.tensors[messages.ACTION].copy()
    rows = slice(None) if rng.random() < 0.5 else slice(int(rng.integers(len(actions))), None)
    actions[rows, 0] = [np.nan, np.inf, 1e30, -1e6][rng.integers(4)]
    changed = wire.encode(message._replace(tensors={messages.ACTION: actions}))
    return [(0.0, [bytes(frame) for frame in changed])]
