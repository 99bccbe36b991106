"""The sockets between an operator and a node: what gets through to the control process, and what does not."""

import multiprocessing as mp
import socket
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq
from runtime_fakes import robot_spec

from vla_stack.errors import UserError
from vla_stack.runtime.lease import Lease, holder_name
from vla_stack.runtime.link import Link
from vla_stack.runtime.operator_client import RESEND_S, OperatorClient
from vla_stack.runtime.operator_messages import (
    CHANNELS,
    MAX_BYTES,
    Event,
    Teleop,
    channel,
    read_event,
    read_teleop,
)
from vla_stack.runtime.operator_port import OperatorPort
from vla_stack.schema import Observation, SchemaError
from vla_stack.serving.keys import KeyFolder, Role

PATIENCE_S = 60.0  # upper bound of waits; nothing depends on how long they take
MS = 1_000_000


class Rig:
    """A port with the test in place of the control process."""

    def __init__(self, path, endpoint="", **kwargs) -> None:
        self.endpoint = endpoint or f"ipc://{path}/op"
        ours, control = mp.Pipe()
        stops, estop = mp.Pipe()
        self.control, self.stops, self.heard, self.stopped = Link(ours), Link(stops), [], 0
        self.port = OperatorPort(control, estop, robot_spec(), self.endpoint, **kwargs)
        self.clients = []

    def client(self, keys=None) -> OperatorClient:
        self.clients.append(OperatorClient(self.endpoint, keys))
        return self.clients[-1]

    def turn(self) -> None:
        for message in self.control.receive(0.005):
            self.heard.append(message)
            if message["kind"] == "event":
                self.control.send("reply", id=message["id"], ok=True, error="", phase="auto", tick=7)
        self.stopped += len(self.stops.receive())
        for client in self.clients:
            client.poll()

    def until(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def ask(self, client, name, **args):
        wanted = client.event(name, **args)
        self.until(lambda: wanted in client.replies)
        return client.replies.pop(wanted)

    def events(self) -> list[str]:
        return [m["name"] for m in self.heard if m["kind"] == "event"]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.port.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_an_event_is_acknowledged_and_applied_once_however_often_it_is_sent(rig):
    client = rig.client()
    assert rig.ask(client, "acquire").ok
    reply = rig.ask(client, "start")
    assert (reply.ok, reply.phase, reply.tick) == (True, "auto", 7)
    event = Event("same", client.lease, "takeover")
    for _ in range(5):
        client._events.send([event.pack()])
    client._waiting["same"] = (event, 0)
    rig.until(lambda: "same" in client.replies and rig.port.counters["event repeated"] == 4)
    assert rig.events() == ["start", "takeover"]


def test_each_turn_sends_what_is_due_and_looks_at_nothing_else(rig, monkeypatch):
    """However many events are not answered, another one costs a message, not a message for each."""
    client, now, packed = rig.client(), [0.0], 0
    pack = Event.pack

    def count(event):
        nonlocal packed
        packed += 1
        return pack(event)

    client.close()
    client._events = SimpleNamespace(send=lambda frames: frames and room[0])
    monkeypatch.setattr(
        "vla_stack.runtime.operator_client.time", SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=int)
    )
    monkeypatch.setattr(Event, "pack", count)
    room = [True]
    names = [client.event("start") for _ in range(1000)]
    assert packed == 1000
    now[0] += RESEND_S
    client._resend()
    assert packed == 2000
    client.forget(names[0])
    now[0] += RESEND_S
    room[0] = False
    client._resend()
    client._resend()
    assert packed == 2002  # the connection is full: the first one is tried, the others wait
    room[0] = True
    client._resend()
    assert packed == 2002 + 999
    rig.clients.clear()


def test_one_lease_two_clients_and_its_hand_over(rig):
    first, second = rig.client(), rig.client()
    assert not rig.ask(first, "start").ok  # nobody drives without it
    assert rig.ask(first, "acquire").ok and rig.ask(first, "acquire").ok
    refused = rig.ask(second, "acquire")
    assert not refused.ok and "another operator" in refused.error
    assert not rig.ask(second, "release").ok and not rig.ask(second, "takeover").ok
    rig.until(lambda: first.holds_lease and not second.holds_lease and second.state)
    assert rig.ask(first, "release").ok
    assert rig.ask(second, "acquire").ok
    rig.until(lambda: second.holds_lease and not first.holds_lease)
    assert [m["kind"] for m in rig.heard] == ["lost"]  # whoever takes over finds the robot holding
    assert first.lease not in str(first.state)  # what is published cannot be used to drive


def test_only_the_holder_s_hand_moves_and_a_replayed_or_older_message_does_not(rig):
    driver, other = rig.client(), rig.client()
    rig.ask(driver, "acquire")

    def heard():
        return [m for m in rig.heard if m["kind"] == "teleop"]

    def stream(client, velocity):
        client.teleop(velocity=velocity, engaged=True)
        rig.turn()
        return len(heard())

    rig.until(lambda: stream(other, [9.0, 9.0]) or rig.port.counters["teleop not accepted"] > 2)
    rig.until(lambda: stream(driver, [1.0, 0.5]))
    assert {tuple(m["velocity"]) for m in heard()} == {(1.0, 0.5)} and heard()[0]["engaged"] is True
    before, refused = len(heard()), rig.port.counters["teleop not accepted"]
    replayed = Teleop(driver.lease, 1, time.monotonic_ns(), True, (7.0, 7.0))
    driver._teleop.send([replayed.pack()])
    rig.until(lambda: rig.port.counters["teleop not accepted"] > refused)
    assert (7.0, 7.0) not in {tuple(m["velocity"]) for m in heard()[before:]}


def test_what_is_malformed_or_too_big_reaches_nobody_and_breaks_nothing(rig):
    client = rig.client()
    rig.ask(client, "acquire")
    context = zmq.Context()
    context.linger = 0  # a test that fails leaves it behind, and its end would wait for ever
    socket = context.socket(zmq.DEALER)
    socket.connect(channel(rig.endpoint, "event"))
    bad = [b"", b"\xc1", b"\x91" * 3000, msgpack.packb([1]), msgpack.packb({"id": 1}), msgpack.packb({1: 2})]
    bad += [Event("x" * 300, "a", "start").pack(), msgpack.packb({"id": "a", "lease": "b", "name": "c", "args": []})]
    for data in bad:
        socket.send(data)
    socket.send_multipart([b"a", b"b", b"c"])
    rig.until(lambda: rig.port.counters["event malformed"] == len(bad) + 1)
    socket.send(bytes(MAX_BYTES + 1))  # ends this connection
    for data in bad:
        client._teleop.send([data])
        rig.turn()
    rig.until(lambda: rig.port.counters["teleop malformed"] > 0)
    assert rig.heard == [] and rig.ask(client, "start").ok
    socket.close(linger=0)
    context.term()


def test_a_clock_that_jumps_by_centuries_costs_its_own_messages_alone(rig):
    client = rig.client()
    rig.ask(client, "acquire")

    def send(seq, t_ns):
        hand = Teleop(client.lease, seq, t_ns, True, (0.1, 0.0))
        before = rig.port.counters.copy()
        rig.until(lambda: (client._teleop.send([hand.pack()]), 0)[1] or rig.port.counters - before)

    send(1, 2**62)
    heard = len(rig.heard)
    for seq, t_ns in ((2, -(2**63)), (3, 2**63), (4, 2**63 + 2**62), (5, 0)):
        send(seq, t_ns)
    assert rig.ask(client, "start").ok and rig.port.counters["teleop malformed"] > 0
    stamps = [m["t_ns"] for m in rig.heard[heard:] if m["kind"] == "teleop"]
    assert all(abs(t - time.monotonic_ns()) < 3600 * 10**9 for t in stamps)


def test_an_owner_that_fails_refuses_the_event_and_nobody_else_notices(tmp_path, caplog):
    rig = Rig(tmp_path, on_event=lambda name, args: {}[name])
    client = rig.client()
    rig.ask(client, "acquire")
    for _ in range(2):
        refused = rig.ask(client, "keep")
        assert not refused.ok and refused.error == "KeyError: 'keep'"
    assert rig.ask(client, "start").ok and rig.port.counters["event failed"] == 2
    assert [r.exc_info[0] for r in caplog.records if r.name.endswith("operator_port")] == [KeyError]
    rig.close()


def test_whoever_listens_no_more_says_that_the_operator_is_lost(rig, monkeypatch):
    client = rig.client()
    rig.ask(client, "acquire")
    monkeypatch.setattr(rig.port._lease, "expired", lambda now_ns: 1 / 0)
    rig.until(lambda: [m["kind"] for m in rig.heard] == ["lost"])


def test_an_e_stop_that_is_out_of_order_stops_the_robot(rig):
    def broken(timeout_s):
        raise OSError("no socket")

    socket, rig.port._stops = rig.port._stops, SimpleNamespace(receive=broken)
    rig.until(lambda: rig.stopped > 1)  # nothing lets the robot go on while it lasts
    rig.port._stops = socket


def test_anybody_may_stop_the_robot_with_any_message(rig):
    watcher = rig.client()
    watcher.estop()  # no lease
    rig.until(lambda: rig.stopped == 1)
    context = zmq.Context()
    context.linger = 0  # a test that fails leaves it behind, and its end would wait for ever
    socket = context.socket(zmq.DEALER)
    socket.connect(channel(rig.endpoint, "estop"))
    socket.send(b"\xff not msgpack")
    rig.until(lambda: rig.stopped == 2)
    socket.close(linger=0)
    context.term()


def test_states_and_pictures_reach_who_watches(rig):
    watcher = rig.client()
    picture = np.full((40, 60, 3), 200, np.uint8)
    step = 0

    def show():
        nonlocal step
        step += 1
        rig.control.send("state", tick=step, phase="auto")
        rig.port.show(Observation(np.zeros(2, np.float32), {"front": picture}, "", step, 5))
        rig.turn()
        return watcher.frames and watcher.state.get("tick", 0) > 0

    rig.until(show)
    about, jpeg = watcher.frames["front"]
    assert (about["width"], about["height"], about["t_capture_ns"]) == (60, 40, 5) and jpeg[:2] == b"\xff\xd8"
    assert watcher.state["phase"] == "auto" and watcher.state["lease"] == ""


def test_recordings_and_scenes_are_the_owner_s_affair(tmp_path):
    seen = []
    rig = Rig(tmp_path, on_event=lambda name, args: (seen.append((name, args)), args.get("refuse"))[1])
    client = rig.client()
    rig.ask(client, "acquire")
    assert rig.ask(client, "instruct", text="pick the red cube").ok
    refused = rig.ask(client, "keep", refuse="nothing is pending")
    assert not refused.ok and refused.error == "nothing is pending"
    assert seen[0] == ("instruct", {"text": "pick the red cube"}) and rig.events() == []
    assert "is no event" in rig.ask(client, "self_destruct").error
    rig.close()


def test_a_discard_below_an_e_stop_is_of_what_was_stopped(tmp_path):
    """Before the next episode's start the one that has ended is meant: it is the owner's, in its undo window."""
    seen = []
    rig = Rig(tmp_path, on_event=lambda name, args: seen.append(name))
    client = rig.client()
    rig.ask(client, "acquire")
    # One that has ended while it was stopped is not over until it is re-armed.
    for resumes, discarded in (("reset", ["discard"]), ("teleop", []), ("end_demo", [])):
        rig.control.send("state", phase="estop", resumes=resumes, tick=3)
        rig.until(lambda r=resumes: client.state.get("resumes") == r)
        seen.clear()
        before = len(rig.events())
        assert rig.ask(client, "discard").ok
        assert (seen, rig.events()[before:]) == (discarded, [] if discarded else ["discard"])
    rig.close()


def free_port() -> int:
    """Of five in a row, most likely."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_with_keys_only_operators_drive_and_strangers_see_nothing(tmp_path):
    node = KeyFolder(tmp_path / "node")
    server = node.create("node")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    folders = {}
    for name, role in (("anna", Role.OPERATOR), ("arm2", Role.ROBOT), ("stranger", None)):
        folders[name] = KeyFolder(tmp_path / name)
        public = folders[name].create(name).public
        folders[name].trust(endpoint, server.public)
        if role is not None:
            node.allow(public, name, role)
    rig = Rig(tmp_path, endpoint, keys=node)
    anna, robot, stranger = (rig.client(folders[name]) for name in folders)
    refused = rig.ask(robot, "acquire")
    assert not refused.ok and "may not drive" in refused.error
    assert rig.ask(anna, "acquire").ok and rig.ask(anna, "start").ok
    rig.until(lambda: anna.holds_lease and robot.state)
    stranger.event("start")
    robot.estop()  # whoever is let in may stop
    rig.until(lambda: rig.stopped == 1)
    assert stranger.state == {} and rig.events() == ["start"]
    allowed = node.path / "allowed.json"
    good = allowed.read_text()
    allowed.write_text("{ by hand")
    refused = rig.ask(anna, "takeover")
    assert not refused.ok and "allowed.json" in refused.error
    rig.until(lambda: anna.teleop() or rig.port.counters["teleop failed"] > 0)
    allowed.write_text(good)
    rig.until(lambda: rig.ask(anna, "acquire").ok and rig.ask(anna, "takeover").ok)
    rig.close()


def test_off_this_machine_there_is_no_port_without_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_KEYS", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no keys"):
        Rig(tmp_path, f"tcp://0.0.0.0:{free_port()}")


def test_a_lease_ends_one_second_after_its_holder_falls_silent():
    lease = Lease()
    assert lease.acquire("a", 0) is None and lease.acquire("b", 999 * MS) is not None
    assert lease.accept(Teleop("a", 0, 0), 500 * MS) is not None
    assert not lease.expired(1500 * MS) and lease.expired(1501 * MS)
    assert not lease.expired(1502 * MS)  # said once
    assert lease.acquire("b", 1502 * MS) is None and lease.accept(Teleop("a", 1, 0), 1503 * MS) is None
    assert holder_name("a") != holder_name("b") and "b" not in (holder_name(""),)


def test_a_message_s_age_needs_no_common_clock():
    lease = Lease()
    lease.acquire("a", 0)
    ahead = 10**15  # the operator's clock
    assert lease.accept(Teleop("a", 0, ahead), 30 * MS) == 30 * MS
    assert lease.accept(Teleop("a", 1, ahead + 50 * MS), 70 * MS) == 70 * MS  # quicker: the reference from now on
    sent = lease.accept(Teleop("a", 2, ahead + 100 * MS), 420 * MS)  # 300 ms in the queue of some network
    assert 420 * MS - sent == pytest.approx(300 * MS, abs=MS)
    assert lease.accept(Teleop("a", 2, ahead + 100 * MS), 421 * MS) is None  # replayed


def test_messages_of_the_wrong_shape_are_refused_by_name():
    good = Teleop("a", 1, 2, True, (0.0, 1.0))
    assert read_teleop(good.pack(), 2) == good
    body = msgpack.unpackb(good.pack())
    for change, match in [
        ({"velocity": [1.0]}, "list of 2 numbers"),
        ({"velocity": [1.0, float("nan")]}, "no finite number"),
        ({"target": [1.0, "x"]}, "no finite number"),
        ({"engaged": 1}, "'engaged' is int"),
        ({"seq": True}, "'seq' is bool"),
        ({"extra": 1}, "'extra' is unknown"),
    ]:
        with pytest.raises(SchemaError, match=match):
            read_teleop(msgpack.packb(body | change), 2)
    with pytest.raises(SchemaError, match="'rewind' is missing"):
        read_teleop(msgpack.packb({k: v for k, v in body.items() if k != "rewind"}), 2)
    with pytest.raises(SchemaError, match="at most"):
        read_event(bytes(MAX_BYTES + 1))


def test_channels_are_beside_each_other():
    assert [channel("tcp://127.0.0.1:7000", c) for c in CHANNELS][-1] == "tcp://127.0.0.1:7004"
    assert channel("ipc:///tmp/x", "estop") == "ipc:///tmp/x.estop"


def test_keys_that_a_stranger_thinks_up_are_not_kept():
    before = sys.getallocatedblocks()
    for n in range(200):
        with suppress(SchemaError):
            read_event(msgpack.packb({f"surprise {n} {i}": {f"nested {n} {i}": 0} for i in range(80)}))
    assert sys.getallocatedblocks() - before < 2000  # of 32 000 strings
