"""Between two processes of one robot: small messages through a pipe, pictures through shared memory.

The side with deadlines must never wait for the other, so a message is only written where the pipe has room, and an
observation only where the reader has given a slot back. A pipe alone would not do: two 640x480 pictures are 1.8 MB, a
pipe holds 64 KB, so writing them lasts until the reader has read them (``tools/bench/executor.py`` measures both). The
message that names a slot is written after the slot and read before it, which orders the two on every processor.

Nothing here unpickles: messages are msgpack maps.
"""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Observation, RobotSpec

Message = dict[str, Any]
SLOTS = 4
PLAN = "plan\0"  # no camera can have this name
ROOM = 4096  # bytes that a pipe takes at once where select() calls it writable (PIPE_BUF)


class Link:
    """One end of a two-way pipe between processes.

    Args:
        connection: From ``multiprocessing.Pipe()``; this end owns it.

    Raises (all methods):
        EOFError: The other process is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def post(self, kind: str, **fields: Any) -> bool:
        """Send a message of at most 4 KiB if there is room; never waits. Returns whether it was sent."""
        data = msgpack.packb({"kind": kind, **fields})
        if len(data) > ROOM or not select.select([], [self._connection], [], 0)[1]:
            return False
        self._write(data)
        return True

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message of any size; waits for the reader."""
        self._write(msgpack.packb({"kind": kind, **fields}))

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """All messages that are there; waits at most ``timeout_s`` for the first."""
        messages: list[Message] = []
        try:
            while self._connection.poll(0.0 if messages else max(0.0, timeout_s)):
                messages.append(msgpack.unpackb(self._connection.recv_bytes()))
        except (EOFError, OSError) as e:
            if not messages:
                raise EOFError("the other process is gone") from e
        return messages

    def fileno(self) -> int:
        """For ``select`` and friends."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end; the other one reads ``EOFError``."""
        self._connection.close()

    def _write(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except (BrokenPipeError, ConnectionError, OSError) as e:
            raise EOFError("the other process is gone") from e


class ObservationSlots:
    """Room for a few observations of one robot in shared memory; who creates it unlinks it.

    Args:
        robot: Shapes of state and pictures.
        name: Existing block to attach to; None creates one.
        horizon: Longest plan that goes with an observation, control steps.
        count: How many observations.
    """

    def __init__(self, robot: RobotSpec, name: str | None = None, horizon: int = 0, count: int = SLOTS) -> None:
        layout: list[tuple[str, type, tuple[int, ...]]] = [("state", np.float32, (len(robot.state),))]
        layout.append((PLAN, np.float32, (horizon, len(robot.action))))
        layout += [(c.name, np.uint8, (c.height, c.width, 3)) for c in robot.cameras]
        sizes = [int(np.prod(shape)) * np.dtype(kind).itemsize for _, kind, shape in layout]
        offsets = np.cumsum([0] + [-(-s // 64) * 64 for s in sizes])
        self._owner = name is None
        self._memory = SharedMemory(name, create=self._owner, size=max(1, int(offsets[-1]) * count))
        self._rows: list[dict[str, NDArray[Any]]] = [
            {
                key: np.ndarray(shape, kind, self._memory.buf, int(offsets[-1]) * slot + int(offset))
                for (key, kind, shape), offset in zip(layout, offsets, strict=False)
            }
            for slot in range(count)
        ]
        self._free = list(range(count))

    @property
    def name(self) -> str:
        return self._memory.name

    @property
    def spare(self) -> int:
        """Writer: slots that are free."""
        return len(self._free)

    def put(self, obs: Observation, plan: NDArray[np.float32] | None = None) -> Message | None:
        """Writer: copy ``obs``, and a plan [L, A] if there is one, in.

        Returns:
            What the reader needs to :meth:`get` them, or None where no slot is free.
        """
        if not self._free:
            return None
        slot = self._free.pop()
        np.copyto(self._rows[slot]["state"], obs.state)
        for camera, image in obs.images.items():
            np.copyto(self._rows[slot][camera], image)
        if plan is not None:
            self._rows[slot][PLAN][: len(plan)] = plan
        return {"slot": slot, "task": obs.task, "step": obs.step, "t": obs.t_capture_ns}

    def free(self, slot: int) -> None:
        """Writer: the reader has given ``slot`` back."""
        self._free.append(slot)

    def get(self, note: Message) -> Observation:
        """Reader: a copy of the observation that ``note`` names; the slot can then be given back."""
        row = {key: value.copy() for key, value in self._rows[note["slot"]].items() if key != PLAN}
        return Observation(row.pop("state"), row, note["task"], note["step"], note["t"])

    def get_plan(self, note: Message, length: int) -> NDArray[np.float32]:
        """Reader: a copy of the first ``length`` steps of the plan beside an observation."""
        return self._rows[note["slot"]][PLAN][:length].copy()

    def close(self) -> None:
        """Let go of the memory; the owner removes it."""
        self._rows.clear()
        self._memory.close()
        if self._owner:
            self._memory.unlink()


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Start processes in here: a Ctrl-C, which the terminal sends to all of them, then reaches the parent alone."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
