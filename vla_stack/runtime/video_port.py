"""What the cameras see, as JPEGs for whoever watches: encoded on a thread of its own, the newest picture only."""

from __future__ import annotations

import threading

import msgpack
import zmq

from vla_stack.schema import Observation
from vla_stack.serving.transport import readable, send

QUALITY = 80


class VideoPort:
    """Publishes pictures while anybody is subscribed.

    Args:
        socket: Bound XPUB; this port owns it.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._newest: Observation | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="video", daemon=True)
        self._thread.start()

    def show(self, obs: Observation) -> None:
        """Publish the pictures of ``obs``, or of a newer one that comes before their turn."""
        with self._wake:
            self._newest = obs
            self._wake.notify()

    def close(self) -> None:
        """End the thread and close the socket."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(5.0)
        self._socket.close(linger=0)

    def _run(self) -> None:
        import cv2  # here: most nodes have no operator, and it takes a while to import

        watchers = 0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._newest is not None)
                obs, self._newest = self._newest, None
                if self._closing or obs is None:
                    return
            while readable(self._socket):
                note = self._socket.recv()
                watchers = max(0, watchers + (1 if note[:1] == b"\1" else -1))
            if not watchers:
                continue
            for camera, image in obs.images.items():
                ok, jpeg = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
                if ok:
                    height, width = image.shape[:2]
                    about = {"frame": obs.step, "t_capture_ns": obs.t_capture_ns, "width": width, "height": height}
                    send(self._socket, [camera.encode(), msgpack.packb(about), jpeg.tobytes()])
