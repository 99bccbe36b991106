"""Pictures that do not travel: on one machine they lie in shared memory, and a request names slot and sequence.

The robot makes the memory, offers it in HELLO and removes its name once the server has opened it, so that nothing is
left behind whoever dies. Everything else of a request, and the pictures where there is no shared memory, is sent.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import U1, RobotSpec

FOLDER = Path("/dev/shm")  # memory on Linux; without it pictures are sent
SLOTS = 4  # a robot has one request in flight; the others are for those that it has given up
LINE = 64  # bytes of a cache line: where a sequence and each picture begin
_NAME = re.compile(r"vla-[0-9a-f]{32}")


class PixelRing:
    """Slots for the pictures of one robot. Each begins with its sequence number, which is odd while it is written.

    Args:
        robot: Whose cameras.
        name: File that a robot offers; None makes one.

    Raises:
        OSError: There is no shared memory here, or the file is not the caller's own or not of this robot's size.
    """

    def __init__(self, robot: RobotSpec, name: str | None = None) -> None:
        shapes = {c.name: (c.height, c.width, 3) for c in robot.cameras}
        starts = np.cumsum([LINE] + [-(-h * w * d // LINE) * LINE for h, w, d in shapes.values()]).tolist()
        size = starts[-1]
        if name is not None and not _NAME.fullmatch(name):
            raise OSError("not the name of a ring")
        self.name = name or f"vla-{secrets.token_hex(16)}"
        making = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = os.open(FOLDER / self.name, (os.O_RDONLY if name else making) | os.O_NOFOLLOW, 0o600)
        try:
            if name is None:
                os.posix_fallocate(file, 0, size * SLOTS)  # fails now where the memory is not there, not at a write
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size != size * SLOTS:
                raise OSError("not a ring of this robot")
            self._memory = mmap.mmap(file, size * SLOTS, access=mmap.ACCESS_READ if name else mmap.ACCESS_WRITE)
        finally:
            os.close(file)
        self._size, self._next, self._sequence = size, 0, 0
        self._rows: list[dict[str, NDArray[Any]]] = [
            {
                camera: np.ndarray(shape, U1, self._memory, slot * size + start)
                for (camera, shape), start in zip(shapes.items(), starts, strict=False)
            }
            for slot in range(SLOTS)
        ]

    def put(self, images: Mapping[str, NDArray[np.uint8]]) -> tuple[int, int] | None:
        """Robot: copy pictures in; slot and sequence, or None where they are not this robot's."""
        slot = self._next
        row = self._rows[slot]
        if images.keys() != row.keys() or any(
            images[c].shape != a.shape or images[c].dtype != U1 for c, a in row.items()
        ):
            return None
        self._next = (slot + 1) % SLOTS
        self._sequence += 2
        struct.pack_into("<q", self._memory, slot * self._size, self._sequence - 1)
        for camera, array in row.items():
            np.copyto(array, images[camera])
        struct.pack_into("<q", self._memory, slot * self._size, self._sequence)
        return slot, self._sequence

    def get(self, slot: int, sequence: int) -> dict[str, NDArray[np.uint8]] | None:
        """Server: the pictures, or None where the slot never held these or holds others by now.

        They are where the robot wrote them: ask :meth:`holds` again when everything has been read.
        """
        return dict(self._rows[slot]) if self.holds(slot, sequence) else None

    def holds(self, slot: int, sequence: int) -> bool:
        """Server: whether a slot holds these pictures, complete."""
        if not 0 <= slot < SLOTS or sequence < 2 or sequence % 2:
            return False
        found: int = struct.unpack_from("<q", self._memory, slot * self._size)[0]
        return found == sequence

    def unlink(self) -> None:
        """Robot: remove the name; who has opened the memory keeps it."""
        (FOLDER / self.name).unlink(missing_ok=True)
