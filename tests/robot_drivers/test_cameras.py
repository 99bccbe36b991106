"""Cameras in threads of their own: newest picture, its time, and what is said when none or always the same comes."""

import threading
import time

import cv2
import numpy as np
import pytest
import zmq

from robot_drivers.cameras import CameraStream, LeRobotSource, VideoFileSource
from vla_stack.errors import UserError

PATIENCE_S = 60.0


class Scripted:
    """A device that shows the picture that it is told to, at the time that it is told, as fast as it is asked."""

    def __init__(self):
        self.gate = threading.Semaphore(0)
        self.image, self.t_ns, self.plugged = np.zeros((8, 10, 3), np.uint8), 0, True
        self.opened = 0

    def open(self):
        self.opened += 1
        if not self.plugged:
            raise ConnectionError("no such device")

    def read(self):
        if not self.gate.acquire(timeout=0.05):
            raise ConnectionError("timed out")
        if not self.plugged:
            raise ConnectionError("no such device")
        return self.image, self.t_ns

    def close(self): ...


def shown(stream: CameraStream, source: Scripted, value: int, t_ns: int) -> None:
    """Let the camera show one more picture and wait until the stream has it."""
    source.image, source.t_ns = np.full((8, 10, 3), value, np.uint8), t_ns
    source.gate.release()
    deadline = time.monotonic() + PATIENCE_S
    while stream._frame is None or stream._frame.t_ns != t_ns:
        assert time.monotonic() < deadline


@pytest.fixture
def pair():
    source = Scripted()
    stream = CameraStream("wrist", source, size=(8, 8), max_age_s=50.0, identical_s=1.0)
    source.gate.release()
    stream.start()
    yield stream, source
    stream.close()


def test_the_newest_picture_is_kept_with_its_time_and_resized(pair):
    stream, source = pair
    now = time.monotonic_ns()
    for i in range(1, 4):
        shown(stream, source, i, now + i)
    frame = stream.newest()
    assert (frame.t_ns, frame.number, frame.image.shape) == (now + 3, 3, (8, 8, 3))
    assert frame.image[4, 4, 0] == 3
    assert stream.trouble() == ""


def test_the_same_picture_for_too_long_is_a_frozen_camera(pair):
    stream, source = pair
    now = time.monotonic_ns()
    for i in range(4):
        shown(stream, source, 9, now + i * 400_000_000)
    assert stream.trouble() == "camera 'wrist' is frozen: the same picture for 1.2 s"
    shown(stream, source, 10, now + 1_600_000_000)
    assert stream.trouble() == ""


def test_an_old_picture_is_a_lost_camera_and_plugging_it_in_again_is_enough(pair):
    stream, source = pair
    source.plugged = False
    source.gate.release()
    shown_before = stream.newest()
    deadline = time.monotonic() + PATIENCE_S
    while not stream._error:
        assert time.monotonic() < deadline
    stream._frame = shown_before._replace(t_ns=time.monotonic_ns() - 60_000_000_000)
    assert stream.trouble().startswith("camera 'wrist' has sent no picture for 6")
    source.plugged = True
    shown(stream, source, 1, time.monotonic_ns())
    assert stream.trouble() == "" and stream.reopened >= 1


def test_a_camera_that_is_not_there_is_named():
    source = Scripted()
    source.plugged = False
    with pytest.raises(UserError, match="camera 'front': no such device"):
        CameraStream("front", source).start(timeout_s=0.2)


def test_a_film_plays_again_and_again(tmp_path):
    path = tmp_path / "film.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 30, (16, 16))
    for value in (0, 120, 240):
        writer.write(np.full((16, 16, 3), (value, 0, 0), np.uint8))  # blue in OpenCV's order
    writer.release()
    source = VideoFileSource(str(path), fps=1000.0)
    source.open()
    pictures = [source.read() for _ in range(7)]
    source.close()
    blue = [int(image[8, 8, 2]) for image, _ in pictures]
    np.testing.assert_allclose(blue, [0, 120, 240, 0, 120, 240, 0], atol=16)
    assert all(a[1] < b[1] for a, b in zip(pictures, pictures[1:], strict=False))


def test_a_silent_zmq_camera_is_let_go_of_without_closing_what_its_thread_receives_on():
    """libzmq would abort the process, which is the robot's."""
    from lerobot.cameras.zmq import ZMQCamera, ZMQCameraConfig

    inside: list[str] = []
    with zmq.Context() as context, context.socket(zmq.PUB) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        config = {"width": 8, "height": 8, "fps": 30, "timeout_ms": 200, "warmup_s": 0}
        camera = ZMQCamera(ZMQCameraConfig(server_address="127.0.0.1", port=port, **config))
        read, cleanup = camera._read_from_hardware, camera._cleanup

        def reading():
            inside.append("in")
            try:
                return read()
            finally:
                inside.append("out")

        def closing():
            inside.append("close")
            if len(inside) % 2:  # whoever is in is out
                cleanup()

        camera._read_from_hardware, camera._cleanup = reading, closing
        with pytest.raises(RuntimeError, match="failed to capture frames"):
            LeRobotSource(camera).open()
    assert inside[-1] == "close" and inside.count("in") == inside.count("out") > 0
    assert not camera.is_connected
