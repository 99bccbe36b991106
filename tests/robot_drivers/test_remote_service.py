"""The robot's side of a remote robot, step by step on a virtual clock: what it obeys, and from whom."""

import time

import msgpack
import numpy as np
import pytest
import zmq

from robot_drivers.remote_service import LEASE_S, MAX_BYTES, MAX_TURNS, serve_driver
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.driver import Capabilities, Fault
from vla_stack.runtime.limits import make_envelope
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import Camera, Dim, Observation, RobotSpec
from vla_stack.serving.admission import Admission
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.keys import KeyFolder, Role
from vla_stack.serving.listener import Listener, Mail

DIMS = (Dim("x.pos", "m", -1, 1, 0.5), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
SPEC = RobotSpec("test/arm", DIMS, DIMS, (Camera("front", 4, 6),), rate_hz=50.0)
DT_NS = 20_000_000
PATIENCE_MS = 60_000


class Arm:
    spec, fault, capabilities = SPEC, None, Capabilities()

    def __init__(self, clock):
        self.clock, self.at, self.sent, self.holds, self.stops = clock, np.zeros(2, np.float32), [], 0, 0

    def connect(self): ...

    def disconnect(self): ...

    def read(self):
        return Observation(self.at.copy(), {"front": np.zeros((4, 6, 3), np.uint8)}, "task", 0, self.clock.now_ns())

    def write(self, action):
        self.at = action.copy()
        self.sent.append(action)
        return action

    def hold(self):
        self.holds += 1

    def stop(self):
        self.stops += 1


class Peer:
    """Another computer, one message a step: ``yield from`` its methods in a script."""

    def __init__(self, rig, keys=None):
        self.rig = rig
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
            self.socket.curve_serverkey = keys.server.encode()
        self.socket.connect(rig.endpoint)
        self.token, self.heard = "", []

    def say(self, kind, **fields):
        self.socket.send(msgpack.packb({"kind": kind, **fields}))
        self.rig.wait_for_mail()
        yield True

    def hear(self, *kinds):
        """The next message of these kinds; ``heard`` are all messages so far."""
        while True:
            assert self.socket.poll(PATIENCE_MS)
            message = msgpack.unpackb(self.socket.recv_multipart()[0])
            self.heard.append(message["kind"])
            if message["kind"] in kinds:
                return message

    def hello(self, token=""):
        yield from self.say("hello", token=token)
        return self.hear("ready", "refused")

    def begin(self, episode=1):
        ready = yield from self.hello()
        self.token = ready["token"]
        yield from self.say("reset", seed=0, episode=episode, arming=0)
        self.hear("started")

    def write(self, x, step, arming=0, episode=1):
        action = np.array([x, 0.0], np.float32).tobytes()
        yield from self.say("write", action=action, step=step, arming=arming, episode=episode)

    def drive(self, x, arming=0):
        """Take a reading and answer it with a command; returns the reading."""
        reading = self.hear("reading")
        yield from self.write(x, reading["step"], arming, reading["episode"])
        yield from self.say("taken", step=reading["step"], episode=reading["episode"])
        return reading


class Rig:
    def __init__(self, endpoint, keys=None):
        self.clock, self.kept = VirtualClock(10**9), []
        self.arm = Arm(self.clock)
        self.admission = Admission(keys) if keys else None
        self.listener = Listener(endpoint, self.admission, MAX_BYTES)
        self.endpoint = self.listener.endpoint
        self._receive, self.listener.receive = self.listener.receive, self.receive

    def receive(self, timeout_s=0.0):
        kept, self.kept = self.kept, []
        return kept or self._receive(timeout_s)

    def wait_for_mail(self):
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not self.kept:
            self.kept = self._receive(0.1)
            assert time.monotonic() < deadline

    def run(self, script):
        """Serve the arm; ``script`` gets one turn before each control step."""
        envelope = make_envelope(SPEC, SafetyConfig())
        running = lambda: next(script, False)  # noqa: E731
        return serve_driver(self.arm, envelope, self.listener, running, self.clock, self.admission)

    def close(self):
        self.listener.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(f"ipc://{tmp_path}/arm")
    yield rig
    rig.close()


def test_a_command_is_refused_whose_reading_is_too_old_on_the_robots_clock(rig):
    peer = Peer(rig)

    def script():
        yield from peer.begin()
        old = yield from peer.drive(0.5)
        assert rig.arm.sent[-1][0] == pytest.approx(0.01)  # one step at 0.5 m/s
        rig.clock.advance_ns(20 * DT_NS)
        yield from peer.write(0.5, old["step"])
        yield from peer.write(0.5, 10_000)  # a reading that never was
        assert rig.arm.sent[-1][0] == rig.arm.sent[0][0]
        peer.hear("reading")  # sent before the clock went on
        yield from peer.say("taken", step=old["step"] + 1, episode=1)
        yield from peer.say("taken", step=old["step"] + 2, episode=1)
        new = peer.hear("reading")
        yield from peer.write(0.5, new["step"])
        assert rig.arm.sent[-1][0] > rig.arm.sent[0][0]

    rig.run(script())


def test_the_next_reading_waits_until_the_one_before_is_taken_and_is_the_newest(rig):
    peer = Peer(rig)

    def script():
        yield from peer.begin()
        first = peer.hear("reading")
        for _ in range(20):
            yield True
        yield from peer.hello()
        assert peer.heard.count("reading") == 1
        yield from peer.say("taken", step=first["step"], episode=1)
        assert peer.hear("reading")["step"] > first["step"] + 20

    rig.run(script())


def test_a_stop_of_the_envelope_lasts_until_it_is_rearmed(rig):
    peer = Peer(rig)

    def script():
        yield from peer.begin()
        for _ in range(20):
            yield from peer.drive(np.nan)
        assert rig.arm.stops == 1
        sent = len(rig.arm.sent)
        for _ in range(8):
            reading = yield from peer.drive(0.5)
        assert len(rig.arm.sent) == sent and rig.arm.at[0] == 0.0
        assert reading["stopped"][0] == "envelope" and "not finite" in reading["stopped"][1]
        yield from peer.drive(0.5, arming=1)
        reading = yield from peer.drive(0.5, arming=1)
        assert rig.arm.at[0] > 0.0 and reading["stopped"] is None and reading["arming"] == 1

    rig.run(script())


def test_a_fault_that_is_over_and_a_stop_that_was_asked_for_last_as_well(rig):
    peer = Peer(rig)

    def script():
        yield from peer.begin()
        rig.arm.fault = Fault("load", "too heavy", True)
        yield True
        rig.arm.fault = None
        yield from peer.drive(0.5)
        assert not rig.arm.sent and rig.arm.stops == 1
        yield from peer.drive(0.5, arming=1)
        assert rig.arm.sent
        yield from peer.say("stop")
        sent = len(rig.arm.sent)
        yield from peer.drive(0.5, arming=1)
        assert len(rig.arm.sent) == sent and rig.arm.stops == 2
        yield from peer.say("reset", seed=0, episode=2, arming=1)  # a new episode begins re-armed
        while (yield from peer.drive(0.5, arming=1))["episode"] == 1:
            pass
        assert len(rig.arm.sent) > sent

    rig.run(script())


def test_the_lease_ends_when_its_holder_leaves(rig):
    first, second = Peer(rig), Peer(rig)

    def script():
        yield from first.begin()
        rig.clock.advance_ns(round(100 * LEASE_S * 1e9))  # it stands still, as while somebody sets the scene
        assert "another computer drives" in (yield from second.hello())["why"]
        yield from second.say("reset", seed=0, episode=1, arming=0)
        assert second.hear("unknown", "started")["kind"] == "unknown"
        yield from first.say("bye")
        assert (yield from second.hello())["kind"] == "ready"

    rig.run(script())


def test_a_lost_connection_leaves_the_lease_to_its_token_for_a_while(rig):
    first, again, second = Peer(rig), Peer(rig), Peer(rig)

    def script():
        yield from first.begin()
        yield from first.drive(0.5)
        first.socket.close()
        assert (yield from second.hello("a guess"))["kind"] == "refused"
        assert (yield from again.hello(first.token))["token"] == first.token
        yield from again.drive(0.5)
        assert again.heard.count("ready") == 1 and len(rig.arm.sent) > 1  # in the episode that was running
        again.socket.close()
        gone, deadline = rig.clock.now_ns(), time.monotonic() + PATIENCE_MS / 1000
        while (yield from second.hello())["kind"] != "ready":
            rig.clock.advance_ns(10 * DT_NS)
            assert time.monotonic() < deadline
        assert rig.clock.now_ns() - gone > LEASE_S * 1e9

    rig.run(script())


def test_only_operators_drive_and_none_whose_key_was_revoked(tmp_path):
    robot = KeyFolder(tmp_path / "robot")
    server = robot.create("robot")
    rig = Rig("tcp://127.0.0.1:*", robot)
    peers = {}
    for name, role in (("anna", Role.OPERATOR), ("ben", Role.OPERATOR), ("olga", Role.OBSERVER), ("arm2", Role.ROBOT)):
        identity = KeyFolder(tmp_path / name).create(name)
        robot.allow(identity.public, name, role)
        peers[name] = Peer(rig, CurveKeys(identity.public, identity.secret, server.public))
    anna, ben = peers["anna"], peers["ben"]

    def script():
        for name in ("olga", "arm2"):
            assert "this key may not drive" in (yield from peers[name].hello())["why"]
        yield from anna.begin()
        yield from anna.drive(0.5)
        assert (yield from ben.hello(anna.token))["kind"] == "refused"  # a lease is its holder's key's
        robot.revoke("anna")
        sent, holds = len(rig.arm.sent), rig.arm.holds
        yield from anna.drive(0.5)
        assert "this key may not drive" in anna.hear("refused")["why"]
        assert len(rig.arm.sent) == sent and rig.arm.holds > holds
        assert (yield from ben.hello())["kind"] == "ready"
        (robot.path / "allowed.json").write_text("damaged")
        yield from ben.say("reset", seed=0, episode=1, arming=0)
        assert ben.hear("refused", "started")["kind"] == "refused"

    rig.run(script())
    rig.close()


def test_a_flood_of_messages_does_not_keep_the_robot_from_its_steps(rig):
    received = []

    def receive(timeout_s=0.0):
        received.append(1)
        assert len(received) < 100 * MAX_TURNS
        return [Mail(b"peer", "", [memoryview(b"nonsense")])]

    rig.listener.receive = receive
    rig.run(iter([True] * 3))
    assert len(received) == 3 * MAX_TURNS
