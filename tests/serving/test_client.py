"""The client: what it lets through, what it survives, what it needs installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import zmq
from serving_fakes import HORIZON, ROBOT, WAIT_S, TickPolicy, barrier, codes, collect, observation

from vla_stack.errors import UserError
from vla_stack.schema import ActionChunk
from vla_stack.serving import messages, wire
from vla_stack.serving.client import HELLO_INTERVAL_NS, PENDING, POLICY_CHANGED, PolicyClient, ServerError
from vla_stack.serving.wire import Code, Kind, Message, WireError

SID = "0123"


class Scripted:
    """The server's end of one client's connection, in the hands of the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._context.linger = 0
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self._router.bind("tcp://127.0.0.1:*")
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._peer = b""

    def take(self) -> Message:
        self._peer, *frames = self._router.recv_multipart()
        return wire.decode(frames)

    def take_kind(self, kind: Kind) -> Message:
        while (message := self.take()).kind is not kind:
            pass
        return message

    def give(self, message: Message) -> None:
        self._router.send_multipart([self._peer, *wire.encode(message)])

    def chunk(self, rid: int, epoch: int = 0, sid: str = SID) -> None:
        actions = np.full((HORIZON, 2), rid, np.float32)
        self.give(messages.chunk(ActionChunk(actions, origin=rid, k_obs=rid, rid=rid, epoch=epoch, session=sid), 0))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def scripted():
    server = Scripted()
    yield server
    server.close()


@pytest.fixture
def client(scripted):
    """A client that a scripted server has welcomed."""
    client = PolicyClient(scripted.endpoint)
    with pytest.raises(UserError):
        client.hello(ROBOT, timeout_s=0)  # sends HELLO, does not wait
    for _ in range(int(WAIT_S * 10)):
        client.poll(timeout_ms=100)  # says HELLO again once the connection stands
        if client.connected:
            break
        if scripted._router.poll(0):
            scripted.take_kind(Kind.HELLO)
            scripted.give(messages.welcome(TickPolicy().spec, SID, 0))
    assert client.policy == TickPolicy().spec
    yield client
    client.close()


def until_pong(client: PolicyClient, scripted: Scripted) -> list:
    """All that arrived before the answer to a PING, i.e. everything the scripted server gave so far."""
    client.ping()
    ping = scripted.take_kind(Kind.PING)
    scripted.give(Message(Kind.PONG, SID, fields={"t0": ping.fields["t0"], "t1": 5, "t2": 5}))
    before, items = client.last_pong_ns, []
    while client.last_pong_ns == before:
        items += client.poll(timeout_ms=100)
    return items


def test_only_wanted_chunks_pass(client, scripted):
    for rid in (1, 2):
        assert client.request(observation(rid), rid=rid, epoch=0, origin=rid, seed=0)
    scripted.chunk(1, sid="other")  # another session
    scripted.chunk(1, epoch=1)  # another epoch
    scripted.chunk(3)  # never asked
    scripted.chunk(2)  # out of order is fine
    scripted.chunk(2)  # duplicate
    scripted.chunk(1)
    assert [chunk.rid for chunk in until_pong(client, scripted)] == [2, 1]
    assert client.discarded == {"stale": 4}


def test_nothing_of_an_older_epoch_passes(client, scripted):
    client.request(observation(1), rid=1, epoch=0, origin=1, seed=0)
    client.reset(epoch=1)
    assert not client.request(observation(1), rid=2, epoch=0, origin=1, seed=0)  # the caller is behind
    client.request(observation(2), rid=1, epoch=1, origin=2, seed=0)  # ids may start anew
    scripted.chunk(1, epoch=0)
    scripted.give(wire.error(Code.EXPIRED, "late", SID, epoch=0, rid=1))
    scripted.chunk(1, epoch=1)
    assert [(c.rid, c.epoch) for c in until_pong(client, scripted)] == [(1, 1)]


def test_a_newer_epoch_in_a_request_is_a_reset(client, scripted):
    client.request(observation(1), rid=1, epoch=0, origin=1, seed=0)
    client.request(observation(2), rid=2, epoch=3, origin=2, seed=0)
    scripted.chunk(1, epoch=0)
    scripted.chunk(2, epoch=3)
    assert [c.rid for c in until_pong(client, scripted)] == [2]


def test_a_refusal_names_its_request_and_ends_it(client, scripted):
    client.request(observation(1), rid=7, epoch=0, origin=1, seed=0)
    scripted.give(wire.error(Code.INTERNAL, "sorry", SID, epoch=0, rid=7))
    scripted.chunk(7)
    assert until_pong(client, scripted) == [ServerError("INTERNAL", "sorry", 7, 0)]


def test_malformed_replies_are_reported_not_raised(client, scripted):
    client.request(observation(1), rid=1, epoch=0, origin=1, seed=0)
    scripted.take_kind(Kind.INFER)
    scripted._router.send_multipart([scripted._peer, b"\xc1"])
    wrong = ActionChunk(np.zeros((HORIZON + 1, 2), np.float32), 1, 1, rid=1, session=SID)
    scripted.give(messages.chunk(wrong, 0))
    scripted.give(Message(Kind.INFER))
    errors = until_pong(client, scripted)
    assert [e.code for e in errors] == ["BAD_SCHEMA"] * 3 and client.discarded == {"malformed": 3}
    assert "CHUNK does not hold float32[4, 2]" in errors[1].text


def test_requests_that_are_never_answered_do_not_pile_up(client, scripted):
    for rid in range(PENDING + 10):
        assert client.request(observation(rid), rid=rid, epoch=0, origin=rid, seed=0)
        scripted.take_kind(Kind.INFER)
    scripted.chunk(9)
    scripted.chunk(10)
    assert [c.rid for c in until_pong(client, scripted)] == [10]


def test_clock_offset_is_that_of_the_fastest_round_trip(client, scripted, monkeypatch):
    now = 1_000_000
    monkeypatch.setattr("vla_stack.serving.client.time.monotonic_ns", lambda: now)
    for there, back in ((300, 100), (50, 70), (900, 10)):  # one-way delays; the server's clock is 5000 ahead
        client.ping()
        t0 = scripted.take_kind(Kind.PING).fields["t0"]
        t1 = t0 + there + 5000
        scripted.give(Message(Kind.PONG, SID, fields={"t0": t0, "t1": t1, "t2": t1 + 400}))
        now = t0 + there + 400 + back
        client.poll(timeout_ms=int(WAIT_S * 1000))
    assert client.clock.round_trip_ns == 120
    assert abs(client.clock.offset_ns - 5000) <= 60


def test_what_does_not_fit_the_format_is_the_callers_error(client):
    with pytest.raises(WireError, match="dtype int16 does not travel"):
        client.request(replace(observation(), state=np.zeros(2, np.int16)), rid=1, epoch=0, origin=0, seed=0)


# -- hello -------------------------------------------------------------------------------------------------------


def test_hello_names_the_field_that_differs(serve, connect):
    client = connect(serve(TickPolicy()).endpoint, hello=False)
    differs = (
        r"not trained for this robot: rate_hz is 30.0 on the robot, 10.0 in the policy .* -- leave out --robot-arg"
    )
    with pytest.raises(UserError, match=differs):
        client.hello(replace(ROBOT, rate_hz=30.0), WAIT_S)
    with pytest.raises(
        UserError, match=r"state\[1\] is absent on the robot.* -- serve a policy that was trained on this"
    ):
        client.hello(replace(ROBOT, state=ROBOT.state[:1]), WAIT_S)
    assert not client.connected and not client.request(observation(), rid=0, epoch=0, origin=0, seed=0)
    assert client.hello(ROBOT, WAIT_S).model_version == "m1"


def test_nobody_answers(tmp_path):
    client = PolicyClient(f"ipc://{tmp_path}/nobody")
    with pytest.raises(UserError, match="nobody listens there -- start one with: vla serve"):
        client.hello(ROBOT, timeout_s=0.05)
    assert not client.request(observation(), rid=0, epoch=0, origin=0, seed=0)
    client.ping()
    assert client.poll() == []
    client.close()
    client.close()


# -- restart -----------------------------------------------------------------------------------------------------


def test_restarted_server_is_joined_without_the_caller(serve, restart, connect, tmp_path):
    server = serve(TickPolicy(), f"ipc://{tmp_path}/s")
    client = connect(server.endpoint)
    client.request(observation(1), rid=0, epoch=2, origin=1, seed=0)
    collect(client, 1)
    restart(server, TickPolicy())
    rid, items = 1, []
    while not any(isinstance(item, ActionChunk) for item in items):  # as an executor would: ask again
        client.request(observation(rid), rid=rid, epoch=2, origin=rid, seed=0)
        items += client.poll(timeout_ms=50)
        rid += 1
    chunk = items[-1]
    assert chunk.actions[0, 0] == chunk.k_obs and chunk.epoch == 2
    assert {code for code, _ in codes(items)} <= {"NO_SESSION", "NOT_READY", "EXPIRED"}


def test_a_ping_is_enough_to_notice_a_restart(serve, restart, connect, tmp_path):
    server = serve(TickPolicy(), f"ipc://{tmp_path}/s")
    client = connect(server.endpoint)
    barrier(client)
    before = client.last_pong_ns
    restarted = restart(server, TickPolicy())
    while client.last_pong_ns == before:
        client.ping()
        client.poll(timeout_ms=50)
    while not restarted.metrics.sessions:
        client.poll(timeout_ms=50)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (TickPolicy("m2"), "model_version was 'm1', is 'm2'"),
        ("another robot", "this policy was not trained for this robot: rate_hz is 10.0 on the robot, 5.0"),
    ],
)
def test_another_policy_after_a_restart_is_an_error(serve, restart, connect, tmp_path, policy, text):
    if policy == "another robot":
        policy = TickPolicy()
        policy.spec = replace(policy.spec, robot=replace(ROBOT, rate_hz=5.0))
    server = serve(TickPolicy(), f"ipc://{tmp_path}/s")
    client = connect(server.endpoint)
    assert client.request(observation(), rid=100, epoch=0, origin=0, seed=0)
    collect(client, 1)  # a plan that runs
    restart(server, policy)
    rid, errors = 0, []
    while not any(text in error.text for error in errors):
        client.request(observation(rid), rid=rid, epoch=0, origin=rid, seed=0)
        errors += client.poll(timeout_ms=50)
        rid += 1
    assert errors[-1].code == POLICY_CHANGED
    assert not any(isinstance(item, ActionChunk) for item in errors)
    assert not client.connected and not client.request(observation(), rid=rid, epoch=0, origin=0, seed=0)
    assert client.poll(timeout_ms=2 * HELLO_INTERVAL_NS // 1_000_000) == []  # said once, and no further HELLO


@pytest.mark.parametrize("epoch", [0, 1])  # over, or the next one begins
def test_between_two_plans_a_server_may_come_back_with_other_weights(serve, restart, connect, tmp_path, epoch):
    server = serve(TickPolicy(), f"ipc://{tmp_path}/s")
    client = connect(server.endpoint)
    assert client.request(observation(), rid=100, epoch=0, origin=0, seed=0)
    collect(client, 1)
    client.reset(epoch)
    restart(server, TickPolicy("m2"))
    items, rid = [], 0
    while not any(isinstance(item, ActionChunk) for item in items):
        client.request(observation(rid), rid=rid, epoch=1, origin=rid, seed=0)
        items += client.poll(timeout_ms=50)
        assert not any(isinstance(item, ServerError) and item.code == POLICY_CHANGED for item in items)
        rid += 1
    assert items[-1].model_version == client.policy.model_version == "m2"


def test_the_client_needs_neither_torch_nor_lerobot():
    code = (
        "import sys, vla_stack.serving.client;"
        "print([m for m in ('torch', 'lerobot', 'vla_stack.policies', 'vla_stack.serving.server') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_connection_that_ended_on_an_oversized_frame_is_made_again(scripted, client, monkeypatch):
    client.ping()
    scripted.take_kind(Kind.PING)
    scripted._router.send_multipart([scripted._peer, bytes(wire.MAX_FRAME_BYTES + 1)])  # ends the connection
    before = client.last_pong_ns
    monkeypatch.setattr("vla_stack.serving.client.SILENCE_NS", HELLO_INTERVAL_NS)
    for _ in range(int(WAIT_S * 100)):
        client.ping()
        client.poll(timeout_ms=10)
        while scripted._router.poll(0):
            if scripted.take().kind is Kind.PING:
                scripted.give(Message(Kind.PONG, SID, fields={"t0": 1, "t1": 2, "t2": 3}))
        if client.last_pong_ns != before:
            return
    raise AssertionError("never connected again")


def test_whoever_only_asks_is_told_what_is_served_and_has_no_session(serve, connect):
    client = connect(serve(TickPolicy()).endpoint, hello=False)
    assert client.hello(None, WAIT_S).robot == ROBOT
    assert not client.connected
    assert client.hello(ROBOT, WAIT_S).robot == ROBOT and client.connected
