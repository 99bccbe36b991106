"""Frames of the Feetech serial bus, protocol 0 (STS and SMS servos), as a servo sees them.

An instruction is ``FF FF id length instruction parameters checksum``, a status ``FF FF id length error parameters
checksum``; length counts what follows it, the checksum is the complement of the sum from id on. Words are
little-endian; signed values are sign and magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

PING, READ, WRITE, REG_WRITE, ACTION, SYNC_READ, SYNC_WRITE = 0x01, 0x02, 0x03, 0x04, 0x05, 0x82, 0x83
BROADCAST = 0xFE
HEADER = b"\xff\xff"


@dataclass(frozen=True)
class Packet:
    """An instruction to servo ``id``."""

    id: int
    instruction: int
    parameters: bytes


def encode(servo: int, code: int, parameters: bytes = b"") -> bytes:
    """A frame; ``code`` is the instruction, or in a status the error bits."""
    body = bytes((servo, len(parameters) + 2, code)) + parameters
    return HEADER + body + bytes((checksum(body),))


def checksum(body: bytes) -> int:
    """Of everything between header and checksum."""
    return ~sum(body) & 0xFF


class Parser:
    """Finds the frames in a stream of bytes. What is no frame is skipped, a frame with a wrong checksum ignored.

    Attributes:
        rejected: Frames with a wrong checksum so far.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.rejected = 0

    def feed(self, data: bytes) -> list[Packet]:
        """Add bytes as they came; returns the packets that they complete."""
        self._buffer += data
        packets: list[Packet] = []
        while (start := self._buffer.find(HEADER)) >= 0:
            del self._buffer[:start]
            while self._buffer[2:3] == b"\xff":  # one FF more: the header is the last two
                del self._buffer[0]
            if len(self._buffer) < 4 or len(self._buffer) < self._buffer[3] + 4:
                return packets
            end = self._buffer[3] + 4
            frame = bytes(self._buffer[:end])
            if end < 6 or checksum(frame[2:-1]) != frame[-1]:
                self.rejected += 1
                del self._buffer[:2]
                continue
            del self._buffer[:end]
            packets.append(Packet(frame[2], frame[4], frame[5:-1]))
        del self._buffer[: max(0, len(self._buffer) - 1)]  # the last byte may be half a header
        return packets


def signed(value: int, bit: int) -> int:
    """A value whose sign is ``bit`` and whose magnitude the bits below."""
    magnitude = value & ((1 << bit) - 1)
    return -magnitude if value >> bit & 1 else magnitude


def unsigned(value: int, bit: int) -> int:
    """Inverse of :func:`signed`; magnitudes too large for the register are cut."""
    magnitude = min(abs(value), (1 << bit) - 1)
    return magnitude | (1 << bit) if value < 0 else magnitude
