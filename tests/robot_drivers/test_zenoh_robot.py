"""A ROS 2 robot over Zenoh, with a node that speaks as ``rmw_zenoh`` does, and Zenoh itself unmodified."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import zenoh
from mcap_ros2.writer import Writer as RosWriter

from robot_drivers import make_driver
from robot_drivers.zenoh_names import Attachments
from vla_stack import ros_messages as ros
from vla_stack.errors import UserError

WAIT_S = 20.0
JOINTS = ("shoulder", "elbow", "finger")
HASH = "RIHS01_" + "ab" * 32
STATE = f"0/joint_states/sensor_msgs::msg::dds_::JointState_/{HASH}"
CAMERA = f"0/camera/image_raw/sensor_msgs::msg::dds_::Image_/{HASH}"
PACKED = f"0/camera/compressed/sensor_msgs::msg::dds_::CompressedImage_/{HASH}"
MAP = "state: /joint_states\nrate_hz: 20\njoints: [shoulder, elbow, finger]\ngrippers: {finger: [0.0, 0.04]}\n"


def encoded(kind: str, message: dict) -> bytes:
    """A message by the MCAP package's own encoder."""
    writer = RosWriter(SimpleNamespace(write=len, tell=lambda: 0, flush=lambda: None))
    schema = writer.register_msgdef(kind, ros.DEFINITIONS[kind])
    kept: list[bytes] = []
    writer._writer.add_message = lambda channel_id, log_time, data, **_: kept.append(bytes(data))
    writer.write_message("x", schema, message, 0)
    return kept[0]


class Node:
    """A robot's nodes and the router: publishes joints and pictures, and subscribes to commands."""

    def __init__(self, command: str = ros.TRAJECTORY) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp/127.0.0.1:{probe.getsockname()[1]}"
        config = zenoh.Config()
        config.insert_json5("mode", json.dumps("router"))
        config.insert_json5("listen/endpoints", json.dumps([self.endpoint]))
        config.insert_json5("scouting/multicast/enabled", "false")
        self.session = zenoh.open(config)
        package, _, name = command.split("/")
        self.commands: list[tuple[bytes, bytes]] = []
        self.told = threading.Condition()
        mangled = f"{package}::msg::dds_::{name}_"
        self.session.declare_subscriber(f"0/arm/command/{mangled}/{HASH}", self._hear)
        self._token = self.session.liveliness().declare_token(
            f"@ros2_lv/0/{self.session.zid()}/3/7/MS/%/%/controller/%arm%command/{mangled}/{HASH}/::,10:,:,:,,"
        )
        self.positions = [0.1, -0.2, 0.01]
        self.attachments = Attachments()
        self.extra: list[tuple[str, bytes]] = []
        self.silent, self._end = False, threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def _publish(self) -> None:
        while not self._end.wait(0.02):
            if self.silent:
                continue
            payload = ros.joint_state(time.time_ns(), JOINTS, self.positions)
            self.session.put(STATE, payload, attachment=self.attachments.next(time.time_ns()))
            for key, data in self.extra:
                self.session.put(key, data)

    def _hear(self, sample) -> None:
        with self.told:
            self.commands.append((sample.payload.to_bytes(), sample.attachment.to_bytes()))
            self.told.notify_all()

    def next_command(self) -> tuple[bytes, bytes]:
        with self.told:
            assert self.told.wait_for(lambda: self.commands, WAIT_S)
            return self.commands.pop(0)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.session.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


@pytest.fixture
def robot(tmp_path) -> Iterator[Callable]:
    """``robot(node, map, ...)`` is a driver; it lets go when the test is over, however that ends."""
    made = []

    def make(node: Node, text: str = MAP, **more):
        file = tmp_path / "arm.yaml"
        file.write_text(text)
        made.append(make_driver("ros2", map=str(file), command="/arm/command", endpoint=node.endpoint, **more))
        return made[-1]

    yield make
    for driver in made:
        driver.disconnect()


def positions(payload: bytes) -> list[float]:
    """Of a trajectory of one point."""
    return list(ros.decoder(ros.TRAJECTORY)(payload).points[0].positions)


def picture() -> np.ndarray:
    return np.dstack([np.full((6, 8), 10 * c, np.uint8) for c in (1, 5, 9)])


def raw(image: np.ndarray) -> bytes:
    h, w, _ = image.shape
    about = {"height": h, "width": w, "encoding": "rgb8", "is_bigendian": 0, "step": 3 * w}
    return encoded(ros.IMAGE, {"header": header(), **about, "data": image.tobytes()})


def header() -> dict:
    return {"stamp": {"sec": 0, "nanosec": 0}, "frame_id": ""}


def test_it_is_described_by_the_map_and_measured_in_its_units(node, robot):
    node.extra = [(CAMERA, raw(picture()))]
    driver = robot(node, MAP + "cameras: {front: /camera/image_raw}\ntask: tidy up\n", limits={"elbow": [-1, 1]})
    driver.connect()
    spec = driver.spec
    assert [d.name for d in spec.action] == ["shoulder.pos", "elbow.pos", "finger.pos"]
    assert (spec.action[1].low, spec.action[1].high, spec.action[2].unit) == (-1.0, 1.0, "ratio")
    assert spec.rate_hz == 20.0 and [(c.name, c.height, c.width) for c in spec.cameras] == [("front", 6, 8)]
    seen = driver.read()
    seen.check(spec)
    np.testing.assert_allclose(seen.state, [0.1, -0.2, 0.25], atol=1e-6)
    np.testing.assert_array_equal(seen.images["front"], picture())
    assert seen.task == "tidy up" and driver.fault is None
    driver.disconnect()


def test_a_command_is_a_trajectory_of_one_point_in_the_robots_units(node, robot):
    driver = robot(node, limits={"elbow": [-1, 1]})
    driver.connect()
    np.testing.assert_allclose(driver.write(np.array([0.3, -7.0, 0.5], np.float32)), [0.3, -1.0, 0.5])
    payload, _ = node.next_command()
    message = ros.decoder(ros.TRAJECTORY)(payload)
    assert tuple(message.joint_names) == JOINTS and len(message.points) == 1
    np.testing.assert_allclose(message.points[0].positions, [0.3, -1.0, 0.02], atol=1e-7)
    assert message.points[0].time_from_start.nanosec == 50_000_000
    driver.hold()
    held = ros.decoder(ros.TRAJECTORY)(node.next_command()[0])
    np.testing.assert_allclose(held.points[0].positions, node.positions, atol=1e-7)
    driver.disconnect()
    assert len(ros.decoder(ros.TRAJECTORY)(node.next_command()[0]).points) == 1  # it holds when it leaves


def test_plain_numbers_where_the_controller_takes_those(robot):
    node = Node(ros.FLOATS)
    try:
        driver = robot(node)
        driver.connect()
        driver.write(np.array([0.3, 0.2, 1.0], np.float32))
        message = ros.decoder(ros.FLOATS)(node.next_command()[0])
        np.testing.assert_allclose(message.data, [0.3, 0.2, 0.04], atol=1e-7)
        driver.disconnect()
    finally:
        node.close()


@pytest.mark.parametrize("labelled", [True, False])
def test_what_goes_with_a_message_is_written_as_the_robots_release_writes_it(node, robot, labelled):
    node.attachments.labelled = labelled
    driver = robot(node)
    driver.connect()
    for number in (1, 2):
        driver.write(np.zeros(3, np.float32))
        _, attachment = node.next_command()
        assert len(attachment) == (77 if labelled else 33)
        at = 16 if labelled else 0
        assert struct.unpack_from("<q", attachment, at)[0] == number
        if labelled:
            assert attachment[:16] == b"\x0fsequence_number" and attachment[24:41] == b"\x10source_timestamp"
            assert attachment[49:61] == b"\x0asource_gid\x10"
        else:
            assert attachment[16] == 16
    driver.disconnect()


def test_compressed_pictures_and_another_size(node, robot):
    ok, jpeg = cv2.imencode(".png", cv2.cvtColor(picture(), cv2.COLOR_RGB2BGR))
    assert ok
    body = {"header": header(), "format": "png", "data": jpeg.tobytes()}
    node.extra = [(PACKED, encoded(ros.COMPRESSED_IMAGE, body))]
    driver = robot(node, MAP + "cameras: {wrist: camera/compressed}\n", image_size=16)
    driver.connect()
    assert driver.read().images["wrist"].shape == (16, 16, 3)
    driver.disconnect()


def test_silence_is_a_fault_and_its_end_is_none(node, robot):
    node.extra = [(CAMERA, raw(picture()))]
    driver = robot(node, MAP + "cameras: {front: /camera/image_raw}\n")
    driver.connect()
    driver.read()
    node.silent = True
    deadline = time.monotonic() + WAIT_S
    while driver.fault is None:
        driver.read()
        assert time.monotonic() < deadline
    assert "nothing of use on" in driver.fault.why
    while not driver.fault.stop:
        driver.read()
        assert time.monotonic() < deadline
    node.silent = False
    while driver.fault is not None:
        driver.read()
        assert time.monotonic() < deadline
    driver.disconnect()


def test_standing_still_is_no_jump_back_where_the_joints_are_silent(node, robot):
    driver = robot(node)
    driver.connect()
    assert driver.read().state[0] == pytest.approx(0.1)
    node.silent = True
    deadline = time.monotonic() + WAIT_S
    while driver.fault is None:
        driver.read()
        assert time.monotonic() < deadline
    driver.stop()  # it was not driven: there is nothing to stop
    driver.write(np.array([0.5, -0.4, 0.75], np.float32))
    driver.stop()
    for _ in range(2):
        np.testing.assert_allclose(positions(node.next_command()[0]), [0.5, -0.4, 0.03], atol=1e-7)
    node.silent = False
    while driver.fault is not None:
        driver.read()
        assert time.monotonic() < deadline
    driver.stop()
    np.testing.assert_allclose(positions(node.next_command()[0]), node.positions, atol=1e-7)


def test_who_never_commanded_it_sends_nothing_when_it_leaves(node, robot):
    for commands in (0, 1):
        driver = robot(node)
        driver.connect()
        for _ in range(commands):
            driver.write(driver.read().state)
        driver.disconnect()
    for _ in range(2):  # of the second one
        node.next_command()
    assert not node.commands


def test_damaged_messages_change_nothing_and_are_named_once_they_are_all_there_is(node, robot):
    node.extra = [(CAMERA, raw(picture()))]
    driver = robot(node, MAP + "cameras: {front: /camera/image_raw}\n")
    driver.connect()
    before = driver.read()
    nan = ros.joint_state(0, JOINTS, [float("nan"), 0.0, 0.0])
    short = ros.joint_state(0, JOINTS, [1.0])
    node.extra = [(STATE, bad) for bad in (nan, short, b"", b"\x00\x01\x00\x00" + b"\xff" * 40)]
    node.extra += [(CAMERA, b"\x00\x01\x00\x00" + b"\xff" * 200), ("0/joint_states/odd/key", b"x")]
    deadline = time.monotonic() + WAIT_S
    while (fault := driver.fault) is None or fault.kind != "camera":
        seen = driver.read()
        assert time.monotonic() < deadline
    np.testing.assert_allclose(seen.state, before.state)
    np.testing.assert_array_equal(seen.images["front"], before.images["front"])
    assert "/camera/image_raw" in fault.why
    driver.disconnect()


def test_two_kinds_of_controllers_on_one_topic_are_not_chosen_between(node, robot):
    package, _, name = ros.FLOATS.split("/")
    other = node.session.liveliness().declare_token(
        f"@ros2_lv/0/{node.session.zid()}/4/8/MS/%/%/other/%arm%command/{package}::msg::dds_::{name}_/{HASH}/::,10:,:,:,,"
    )
    with pytest.raises(UserError, match="is subscribed to as .* and as"):
        robot(node).connect()
    other.undeclare()


@pytest.mark.parametrize(
    ("text", "more", "why"),
    [
        (MAP.replace("elbow", "knee"), {}, "no joint 'knee' on /joint_states; heard of: elbow, finger, shoulder"),
        (MAP + "cameras: {front: /nowhere}\n", {}, "no picture on /nowhere"),
        (MAP, {"command": "/other"}, "nobody subscribes to /other in domain 0"),
        (MAP, {"domain": 5}, "in domain 5"),
        (MAP.replace("joints", "units").replace("[shoulder, elbow, finger]", "{}"), {}, "does not say 'joints'"),
        (MAP, {"limits": {"knee": [0, 1]}}, "there is no joint 'knee'"),
        (MAP, {"limits": {"finger": [0.01, 0.03]}}, "'finger' is a gripper, whose range is that of `grippers`"),
        (MAP, {"endpoint": "tcp/192.0.2.1:7447"}, "is not encrypted"),
        (MAP, {"endpoint": "tcp/127.0.0.1:9"}, "no Zenoh router answers at tcp/127.0.0.1:9"),
    ],
)
def test_what_is_missing_is_named(node, tmp_path, monkeypatch, text, more, why):
    monkeypatch.setattr("robot_drivers.zenoh_robot.CONNECT_S", 0.5)
    file = tmp_path / "arm.yaml"
    file.write_text(text)
    given = {"map": str(file), "command": "/arm/command", "endpoint": node.endpoint, **more}
    with pytest.raises(UserError, match=why):
        make_driver("ros2", **given).connect()
