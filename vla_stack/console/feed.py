"""What a page is shown: the newest state and pictures, as often as it acknowledges them, as large as its link carries.

A page acknowledges what it has drawn. Until then nothing more of the same kind is sent, so what waits anywhere between
here and its screen is one state and :data:`PICTURES` pictures, however slow the link: it shows fewer, not older ones.
Where they take long all the same they are made smaller. Decides without sockets and clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

STATE = ""  # no camera has this name
PICTURES = 2  # under way to a page, of different cameras
SLOW_NS, QUICK_NS = 120_000_000, 60_000_000  # from sending to acknowledgement: smaller pictures; larger ones again
HALVINGS = 3  # of width and height, at most
PATIENCE, MOST_PATIENCE = 20, 320  # quick pictures in a row before larger ones are tried
STALLED_NS = 10_000_000_000
QUALITY = 70  # JPEG, of pictures that were made smaller


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Something that a page has been sent and has not acknowledged."""

    kind: str
    captured_ns: int
    sent_ns: int
    halvings: int


class Feed:
    """Decides what a page is sent next.

    Attributes:
        halvings: How often width and height of pictures are halved for this page, 0 to :data:`HALVINGS`.
    """

    def __init__(self) -> None:
        self.halvings = 0
        self._under_way: dict[int, UnderWay] = {}
        self._count = 0
        self._last: dict[str, tuple[int, Any]] = {}  # kind -> number and stamp of what was sent last
        self._quick, self._patience = 0, PATIENCE

    def next(self, stamps: dict[str, Any]) -> str | None:
        """The kind that is due: :data:`STATE` first, else the camera that has waited longest; None where nothing is.

        Args:
            stamps: Kind -> what distinguishes its newest from those before.
        """
        busy = {shown.kind for shown in self._under_way.values()}
        full = len(busy - {STATE}) >= PICTURES
        new = [
            (kind != STATE, self._last.get(kind, (0, None))[0], kind)
            for kind, stamp in stamps.items()
            if kind not in busy and self._last.get(kind, (0, None))[1] != stamp and not (full and kind != STATE)
        ]
        return min(new)[2] if new else None

    def sent(self, kind: str, stamp: Any, captured_ns: int, now_ns: int) -> int:
        """Note that the newest of a kind is on its way; returns the number under which it is acknowledged."""
        self._count += 1
        self._last[kind] = (self._count, stamp)
        self._under_way[self._count] = UnderWay(kind, captured_ns, now_ns, self.halvings)
        return self._count

    def acknowledged(self, number: int, now_ns: int) -> UnderWay | None:
        """The page has drawn it; None where it was not under way."""
        shown = self._under_way.pop(number, None)
        if shown is not None and shown.kind != STATE and shown.halvings == self.halvings:
            self._adapt(now_ns - shown.sent_ns)
        return shown

    def stalled(self, now_ns: int) -> bool:
        """Whether the page has not acknowledged something for so long that it will not."""
        return any(now_ns - shown.sent_ns > STALLED_NS for shown in self._under_way.values())

    def _adapt(self, took_ns: int) -> None:
        if took_ns > SLOW_NS and self.halvings < HALVINGS:
            self.halvings += 1
            self._quick, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)
        elif took_ns > QUICK_NS or self.halvings == 0:
            self._quick = 0
        else:
            self._quick += 1
            if self._quick == self._patience:
                self._quick, self.halvings = 0, self.halvings - 1


def smaller(jpeg: bytes, halvings: int) -> bytes:
    """A JPEG with width and height halved so many times; as it is where it cannot be read."""
    import cv2  # here: pages with a good link do not need it

    scale = (None, cv2.IMREAD_REDUCED_COLOR_2, cv2.IMREAD_REDUCED_COLOR_4, cv2.IMREAD_REDUCED_COLOR_8)[halvings]
    if scale is None or (image := cv2.imdecode(np.frombuffer(jpeg, np.uint8), scale)) is None:
        return jpeg
    ok, made = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return bytes(made.tobytes()) if ok else jpeg
