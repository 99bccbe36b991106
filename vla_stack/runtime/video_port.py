"""What the cameras see, as JPEGs for whoever watches: encoded on a thread of its own, the newest picture only.

A watcher acknowledges what it has taken, and gets nothing new before. So a slow link shows fewer pictures, not older
ones. A quick one may have two sets of pictures under way, so that a round trip costs it none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

import msgpack

from vla_stack.runtime.operator_messages import TAKEN
from vla_stack.schema import Observation
from vla_stack.serving.listener import Listener, PeerGone

QUALITY = 80
QUICK_NS, LOST_NS = 250_000_000, 2_000_000_000  # acknowledged so soon: two may be under way; not any more: lost
TURN_S = 0.05


class UnderWay:
    """What one watcher has been sent and has not acknowledged."""

    def __init__(self) -> None:
        self._sent_ns: deque[int] = deque()
        self._quick = False

    def free(self) -> bool:
        """Whether the next pictures may be sent."""
        while self._sent_ns and time.monotonic_ns() - self._sent_ns[0] > LOST_NS:
            self._sent_ns.popleft()
        return len(self._sent_ns) < 1 + self._quick

    def send(self) -> None:
        self._sent_ns.append(time.monotonic_ns())

    def acknowledge(self) -> None:
        if self._sent_ns:
            self._quick = time.monotonic_ns() - self._sent_ns.popleft() < QUICK_NS


class VideoPort:
    """Publishes pictures while anybody is connected.

    Args:
        listener: This port owns it.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._newest: Observation | None = None
        self._closing = False
        self._watchers: dict[bytes, UnderWay] = {}
        self._thread = threading.Thread(target=self._run, name="video", daemon=True)
        self._thread.start()

    def show(self, obs: Observation) -> None:
        """Publish the pictures of ``obs``, or of a newer one that comes before their turn."""
        self._newest = obs
        self._listener.wake()

    def close(self) -> None:
        """End the thread and close the listener."""
        self._closing = True
        self._listener.wake()
        self._thread.join(5.0)
        self._listener.close()

    def _run(self) -> None:
        import cv2  # here: most nodes have no operator, and it takes a while to import

        while not self._closing:
            acknowledged = self._listener.receive(TURN_S)
            self._watchers = {peer: self._watchers.get(peer) or UnderWay() for peer in self._listener.peers}
            for peer in [mail.peer for mail in acknowledged if mail.frames == [TAKEN] and mail.peer in self._watchers]:
                self._watchers[peer].acknowledge()
                self._listener.vouch(peer)  # it answers, at the rate of pictures
            free = [peer for peer, watcher in self._watchers.items() if watcher.free()]
            if not free or self._newest is None:
                continue
            obs, self._newest = self._newest, None
            frames: list[bytes] = []
            for camera, image in obs.images.items():
                ok, jpeg = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
                if ok:
                    height, width = image.shape[:2]
                    about = {"frame": obs.step, "t_capture_ns": obs.t_capture_ns, "width": width, "height": height}
                    frames += [camera.encode(), msgpack.packb(about), jpeg.tobytes()]
            for peer in free if frames else ():
                with contextlib.suppress(PeerGone):
                    if self._listener.send(peer, frames):
                        self._watchers[peer].send()
