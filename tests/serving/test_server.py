"""The policy server: what it answers, to whom, and what it survives."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import zmq
from serving_fakes import (
    HORIZON,
    ROBOT,
    WAIT_S,
    ContinuingPolicy,
    GatedPolicy,
    TickPolicy,
    barrier,
    codes,
    collect,
    observation,
)

from vla_stack.errors import UserError
from vla_stack.schema import Chunks, Continuation
from vla_stack.serving import listener, messages, wire
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.endpoint import is_local
from vla_stack.serving.server import PolicyServer, ServerConfig
from vla_stack.serving.sessions import Sessions
from vla_stack.serving.wire import Code, Kind, Message, WireError


@pytest.fixture
def raw():
    """``raw(endpoint)`` returns a bare DEALER socket: a peer that need not follow the format."""
    context = zmq.Context()
    context.linger = 0

    def connect(endpoint: str) -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.connect(endpoint)
        return socket

    yield connect
    context.destroy(linger=0)


def ask(socket: zmq.Socket, message: Message) -> Message:
    socket.send_multipart(wire.encode(message))
    return wire.decode(socket.recv_multipart())


# -- the ordinary ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_chunk_belongs_to_its_request(serve, connect, tmp_path, scheme):
    server = serve(TickPolicy(), "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/s")
    client = connect(server.endpoint)
    for rid, step in enumerate((7, 8, 30)):
        assert client.request(observation(step), rid=rid, epoch=0, origin=step, seed=step)
        (chunk,) = collect(client, 1)
        assert (chunk.rid, chunk.epoch, chunk.k_obs, chunk.origin, chunk.model_version) == (rid, 0, step, step, "m1")
        np.testing.assert_array_equal(chunk.actions[:, 0], step + np.arange(HORIZON))
        assert not chunk.actions.flags.writeable


def test_robots_do_not_see_each_other(serve, connect):
    server = serve(TickPolicy())
    clients = [connect(server.endpoint) for _ in range(3)]
    for step, client in enumerate(clients):
        assert client.request(observation(100 * step), rid=0, epoch=step, origin=0, seed=0)
    for step, client in enumerate(clients):
        (chunk,) = collect(client, 1)
        assert chunk.actions[0, 0] == 100 * step and chunk.epoch == step


def test_loading_is_not_ready_but_alive(connect, raw):
    may_load = threading.Event()

    def load():
        assert may_load.wait(WAIT_S)
        return TickPolicy()

    server = PolicyServer(load, "tcp://127.0.0.1:*")
    thread = threading.Thread(target=server.run)
    thread.start()
    peer = raw(server.endpoint)
    assert ask(peer, messages.hello(ROBOT, 0)).fields["code"] == Code.NOT_READY
    assert ask(peer, Message(Kind.PING)).kind is Kind.PONG
    may_load.set()
    assert connect(server.endpoint).policy.horizon == HORIZON  # hello() asks until the server is ready
    server.stop()
    thread.join(WAIT_S)


@pytest.mark.parametrize("failure", [UserError("no weights"), ValueError("boom")])
def test_run_raises_what_loading_raised(failure):
    def load():
        raise failure

    with pytest.raises(type(failure), match=str(failure)):
        PolicyServer(load, "tcp://127.0.0.1:*").run()


def test_a_policy_that_breaks_its_promise_never_becomes_ready():
    policy = TickPolicy()
    policy.spec = replace(policy.spec, horizon=HORIZON + 1)
    with pytest.raises(ValueError, match=r"returned float32\[1, 4, 2\], promised float32\[1, 5, 2\]"):
        PolicyServer(lambda: policy, "tcp://127.0.0.1:*").run()


# -- a slow policy -----------------------------------------------------------------------------------------------


def test_a_stalled_policy_blocks_neither_ping_nor_hello(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    client = connect(server.endpoint)
    client.request(observation(3), rid=0, epoch=0, origin=3, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)
    assert barrier(client) == []  # PING was answered while the policy is inside infer
    assert connect(server.endpoint).connected  # so was another robot's HELLO
    policy.gate.release()
    (chunk,) = collect(client, 1)
    assert chunk.actions[0, 0] == 3


def test_latest_request_wins_and_the_others_are_told(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    client = connect(server.endpoint)
    client.request(observation(0), rid=0, epoch=0, origin=0, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)
    for rid in (1, 2, 3):
        client.request(observation(rid), rid=rid, epoch=0, origin=rid, seed=0)
    early = barrier(client)
    assert codes(early) == [("EXPIRED", 1), ("EXPIRED", 2)]
    policy.gate.release(2)
    assert [chunk.rid for chunk in collect(client, 2)] == [0, 3]
    assert server.metrics.rejected["expired"] == 2


def test_what_waits_is_computed_together(serve, connect):
    policy = GatedPolicy()
    server = serve(policy, config=ServerConfig(max_batch=2))
    clients = [connect(server.endpoint) for _ in range(4)]
    for step, client in enumerate(clients):
        client.request(observation(step), rid=0, epoch=0, origin=0, seed=step)
        assert step or policy.entered.acquire(timeout=WAIT_S)  # the first one is being computed, alone
        barrier(client)
    policy.gate.release(3)
    for step, client in enumerate(clients):
        assert collect(client, 1)[0].actions[0, 0] == step
    assert policy.batches == [[0], [1, 2], [3]]


def test_who_can_wait_least_is_served_first(serve, connect):
    policy = GatedPolicy()
    server = serve(policy, config=ServerConfig(max_batch=1))
    clients = [connect(server.endpoint) for _ in range(4)]
    for step, slack_ms in enumerate((None, 9_000, 3_000, None)):
        clients[step].request(observation(step), rid=0, epoch=0, origin=0, seed=0, slack_ms=slack_ms)
        assert step or policy.entered.acquire(timeout=WAIT_S)
        barrier(clients[step])
    policy.gate.release(4)
    for client in clients:
        collect(client, 1)
    assert policy.batches == [[0], [2], [1], [3]]


def test_what_is_overdue_is_not_computed(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    first, late = connect(server.endpoint), connect(server.endpoint)
    first.request(observation(0), rid=0, epoch=0, origin=0, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)
    late.request(observation(1), rid=7, epoch=0, origin=0, seed=0, slack_ms=0)
    barrier(late)
    policy.gate.release(2)
    collect(first, 1)
    assert codes(collect(late, 1)) == [("EXPIRED", 7)] and policy.batches == [[0]]


def test_one_bad_observation_does_not_fail_its_batch(serve, connect, caplog):
    policy = GatedPolicy()
    server = serve(policy)
    clients = [connect(server.endpoint) for _ in range(3)]
    for step, client in enumerate(clients):
        task = "fail" if step == 1 else "pick"
        client.request(observation(step, task), rid=0, epoch=0, origin=0, seed=0)
        assert step or policy.entered.acquire(timeout=WAIT_S)
        barrier(client)
    policy.gate.release(9)
    assert collect(clients[2], 1)[0].actions[0, 0] == 2
    assert codes(collect(clients[1], 1)) == [("INTERNAL", 0)]


# -- plans to continue -------------------------------------------------------------------------------------------


def test_a_plan_reaches_the_policy_as_it_was(serve, connect):
    policy = ContinuingPolicy()
    client = connect(serve(policy).endpoint)
    plan = Continuation("prefix", np.arange(6, dtype=np.float32).reshape(3, 2), delay=2, execute=2)
    client.request(observation(), rid=0, epoch=0, origin=0, seed=0, continuation=plan)
    (chunk,) = collect(client, 1)
    assert chunk.d_cond == 2
    seen = policy.plans[-1]  # after those of warming up
    np.testing.assert_array_equal(seen.actions, plan.actions)
    assert (seen.mode, seen.delay, seen.execute) == ("prefix", 2, 2)


PLAN = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    "plan,text",
    [
        (Continuation("rtc", PLAN, 1, 1), "cannot continue a plan by 'rtc'"),
        (Continuation("prefix", PLAN[:, :1], 1, 1), "'plan' is not float32 of at most [4, 2]"),
        (Continuation("prefix", np.zeros((5, 2), np.float32), 1, 1), "'plan' is not float32 of at most [4, 2]"),
        (Continuation("prefix", PLAN.astype(np.float64), 1, 1), "'plan' is not float32 of at most [4, 2]"),
        (Continuation("prefix", np.full((3, 2), np.nan, np.float32), 1, 1), "'plan' is not finite"),
        (Continuation("prefix", PLAN, 3, 3), "delay 3 and execute 3 do not fit"),
        (Continuation("prefix", PLAN, 2, 1), "delay 2 and execute 1 do not fit"),
        (Continuation("prefix", PLAN, -1, 1), "delay -1"),
    ],
)
def test_a_plan_that_cannot_be_continued_is_refused(serve, connect, plan, text):
    client = connect(serve(ContinuingPolicy()).endpoint)
    client.request(observation(), rid=0, epoch=0, origin=0, seed=0, continuation=plan)
    (refusal,) = collect(client, 1)
    assert refusal.code == Code.BAD_SCHEMA and text in refusal.text


def test_reset_forgets_what_was_asked_before(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    client = connect(server.endpoint)
    client.request(observation(0), rid=0, epoch=0, origin=0, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)
    client.request(observation(1), rid=1, epoch=0, origin=1, seed=0)
    client.reset(epoch=1)
    client.request(observation(2), rid=2, epoch=1, origin=2, seed=0)
    barrier(client)
    policy.gate.release(2)
    (chunk,) = collect(client, 1)
    assert (chunk.rid, chunk.epoch) == (2, 1)
    assert client.discarded == {"stale": 2}  # the chunk of rid 0 and the EXPIRED of rid 1
    assert server.metrics.rejected["expired"] == 1


def test_an_older_epoch_is_refused(serve, raw):
    server = serve(TickPolicy())
    peer = raw(server.endpoint)
    while (welcome := ask(peer, messages.hello(ROBOT, epoch=5))).kind is not Kind.WELCOME:
        assert welcome.fields["code"] == Code.NOT_READY
    reply = ask(peer, messages.infer(observation(), welcome.sid, epoch=4, rid=1, origin=0, seed=0))
    assert (reply.fields["code"], reply.fields["text"]) == (Code.EXPIRED, "epoch 4 is over, 5 runs")


def test_stop_finishes_what_is_in_progress(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    client = connect(server.endpoint)
    client.request(observation(3), rid=0, epoch=0, origin=3, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)
    barrier(client)
    server.stop()
    client.request(observation(4), rid=1, epoch=0, origin=4, seed=0)
    assert codes(collect(client, 1)) == [("BUSY", 1)]
    policy.gate.release()
    assert collect(client, 1)[0].rid == 0


# -- the hostile and the broken ----------------------------------------------------------------------------------


def test_one_peers_garbage_does_not_concern_the_others(serve, connect, raw, monkeypatch):
    monkeypatch.setattr(listener, "STRANGER_BURST", 1e6)
    server = serve(TickPolicy())
    client = connect(server.endpoint)
    peer = raw(server.endpoint)
    valid = [bytes(f) for f in wire.encode(messages.infer(observation(), "nobody", 0, 0, 0, 0))]
    garbage = [[b""], [b"\xc1"], [b"", b""], valid[:1], valid[::-1], [*valid, b"more"], [b"x"] * 30, [b"\x91" * 9000]]
    rng = np.random.default_rng(0)
    for n in range(200):
        frames = garbage[n % len(garbage)] if n % 2 else [rng.bytes(int(rng.integers(300))) for _ in range(3)]
        peer.send_multipart(frames)
        assert wire.decode(peer.recv_multipart()).fields["code"] in (Code.BAD_SCHEMA, Code.NO_SESSION)
        if n % 20 == 0:
            assert client.request(observation(n), rid=n, epoch=0, origin=n, seed=0)
            assert collect(client, 1)[0].actions[0, 0] == n
    assert server.metrics.rejected["internal"] == 0
    peer.send(b"x" * (wire.MAX_FRAME_BYTES + 1))  # ends its connection
    assert client.request(observation(1), rid=999, epoch=0, origin=1, seed=0)
    assert collect(client, 1)[0].rid == 999


def test_a_robot_that_leaves_takes_nobody_along(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    leaver, stayer = connect(server.endpoint), connect(server.endpoint)
    leaver.request(observation(0), rid=0, epoch=0, origin=0, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)
    leaver.request(observation(1), rid=1, epoch=0, origin=1, seed=0)
    leaver.close()
    stayer.request(observation(2), rid=2, epoch=0, origin=2, seed=0)
    policy.gate.release(3)
    assert collect(stayer, 1)[0].rid == 2


@pytest.mark.parametrize("answer", ["raise", "shape", "nan", "none"])
def test_a_failed_inference_is_internal_and_tells_nothing(serve, connect, answer):
    class Fickle(TickPolicy):
        def infer(self, observations, seeds):
            chunks = super().infer(observations, seeds)
            if observations[0].step != 13:
                return chunks
            if answer == "raise":
                raise RuntimeError("secret/path")
            wrong = {"shape": chunks.actions[:, 1:], "nan": chunks.actions * np.float32(np.nan)}
            return Chunks(wrong[answer]) if answer in wrong else None

    client = connect(serve(Fickle()).endpoint)
    client.request(observation(13), rid=0, epoch=0, origin=13, seed=0)
    (error,) = collect(client, 1)
    assert (error.code, error.rid) == (Code.INTERNAL, 0) and "secret" not in error.text
    client.request(observation(14), rid=1, epoch=0, origin=14, seed=0)
    assert collect(client, 1)[0].rid == 1


def test_an_observation_that_does_not_fit_is_refused_by_name(serve, connect):
    client = connect(serve(TickPolicy()).endpoint)
    client.request(replace(observation(), images={}), rid=4, epoch=0, origin=0, seed=0)
    (error,) = collect(client, 1)
    assert (error.code, error.rid) == (Code.BAD_SCHEMA, 4)
    assert error.text == "camera 'front' is missing; the observation has []"


def test_another_version_is_told_so(serve, raw, monkeypatch):
    peer = raw(serve(TickPolicy()).endpoint)
    monkeypatch.setattr(wire, "VERSION", 1)
    frames = wire.encode(Message(Kind.PING))
    monkeypatch.undo()
    peer.send_multipart(frames)
    reply = wire.decode(peer.recv_multipart())
    assert reply.fields["code"] == Code.VERSION and "wire version 1 is not 2" in reply.fields["text"]


def test_what_only_a_server_says_is_refused(serve, raw):
    peer = raw(serve(TickPolicy()).endpoint)
    assert ask(peer, Message(Kind.WELCOME)).fields["text"] == "a server does not take WELCOME"


def test_sessions_are_capped_and_bye_frees_one(serve, connect, raw):
    server = serve(TickPolicy(), config=ServerConfig(max_sessions=2))
    first = connect(server.endpoint)
    connect(server.endpoint)
    refusal = ask(raw(server.endpoint), messages.hello(ROBOT, 0))
    assert refusal.fields == {"code": Code.BUSY, "text": "2 sessions are open, no more are allowed"}
    first.close()
    assert connect(server.endpoint).connected


def test_sessions_expire_and_are_replaced():
    sessions = Sessions(limit=2, idle_ns=10)
    a, _ = sessions.open(b"a", epoch=0, previous_sid="", now_ns=0)
    b, _ = sessions.open(b"b", epoch=0, previous_sid="", now_ns=0)
    assert sessions.open(b"a", 0, "", now_ns=5) == (a, None)  # HELLO again: same connection, same session
    with pytest.raises(WireError, match="BUSY"):
        sessions.open(b"c", 0, "guessed", now_ns=5)
    moved, replaced = sessions.open(b"c", 0, a.sid, now_ns=6)  # the same robot after a reconnect
    assert replaced is a and moved.sid != a.sid and len(sessions) == 2
    with pytest.raises(WireError, match="NO_SESSION"):
        sessions.require(b"c", b.sid, now_ns=7)  # another's id
    assert sessions.expire(now_ns=10) == []
    assert sessions.expire(now_ns=11) == [b]
    assert sessions.expire(now_ns=18) == [moved] and len(sessions) == 0


# -- addresses and the metrics page ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.168.1.4:5555", "tcp://eth0:5555", "tcp://[::]:5555"]
)
@pytest.mark.parametrize("end", [lambda e: PolicyServer(TickPolicy, e), PolicyClient])
def test_off_this_machine_keys_are_needed(endpoint, end, tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_KEYS", str(tmp_path))
    with pytest.raises(UserError, match="this computer has no keys .* vla keys create"):
        end(endpoint)


def test_addresses():
    assert is_local("tcp://localhost:5555") and is_local("ipc:///tmp/x") and not is_local("tcp://10.0.0.1:5555")
    for malformed in ("127.0.0.1:5555", "tcp://127.0.0.1", "udp://127.0.0.1:1", "ipc://"):
        with pytest.raises(UserError, match="is not tcp://HOST:PORT or ipc://PATH"):
            is_local(malformed)


def test_a_taken_port_is_named(serve):
    server = serve(TickPolicy())
    with pytest.raises(UserError, match=f"cannot bind {server.endpoint}: Address already in use"):
        PolicyServer(TickPolicy, server.endpoint)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_metrics_page(serve, connect):
    policy = GatedPolicy()
    server = serve(policy, config=ServerConfig(metrics_port=0))
    client = connect(server.endpoint)
    policy.gate.release()
    client.request(observation(1), rid=0, epoch=0, origin=1, seed=0)
    collect(client, 1)
    client.request(replace(observation(), images={}), rid=1, epoch=0, origin=0, seed=0)
    collect(client, 1)
    barrier(client)
    status, text = get(f"{server.metrics_url}/metrics")
    lines = text.splitlines()
    assert status == 200
    for line in (
        'vla_messages_total{kind="INFER"} 2',
        'vla_rejected_total{reason="bad_schema"} 1',
        'vla_stage_seconds_bucket{stage="infer",le="+Inf"} 1',
        'vla_stage_seconds_count{stage="queue"} 1',
        'vla_stage_seconds_count{stage="total"} 1',
        "vla_sessions 1",
        "vla_ready 1",
        'vla_model_info{model_version="m1",robot="test/two"} 1',
    ):
        assert line in lines
    assert get(f"{server.metrics_url}/healthz") == (200, "ok\n")
    assert get(f"{server.metrics_url}/readyz") == (200, "ok\n")
    assert get(f"{server.metrics_url}/../../etc/passwd")[0] == 404
    client.request(observation(2), rid=2, epoch=0, origin=2, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S) and policy.entered.acquire(timeout=WAIT_S)
    server.stop()
    client.request(observation(3), rid=3, epoch=0, origin=3, seed=0)
    assert codes(collect(client, 1)) == [("BUSY", 3)]
    assert get(f"{server.metrics_url}/readyz") == (503, "no\n")  # draining
    policy.gate.release()


def test_metrics_port_in_use(serve, connect):
    server = serve(TickPolicy(), config=ServerConfig(metrics_port=0))
    connect(server.endpoint)  # it runs, so its page is up
    port = int(server.metrics_url.rpartition(":")[2])
    with pytest.raises(UserError, match=f"cannot bind metrics port {port}"):
        PolicyServer(TickPolicy, "tcp://127.0.0.1:*", ServerConfig(metrics_port=port)).run()


def test_a_session_remembers_its_episode_alone(serve, connect):
    """A policy with a history is shown what its robot was asked about: no other robot's, nothing before a reset, and
    nothing after a session is lost."""

    class Remembering(TickPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.spec = replace(self.spec, history=(0, 4, 8))
            self.past: list = []

        def infer(self, observations, seeds):
            self.past += [[int(earlier.images["front"][0, 0, 0]) for earlier in o.past] for o in observations]
            return super().infer(observations, seeds)

    policy = Remembering()
    server = serve(policy)
    clients = [connect(server.endpoint), connect(server.endpoint)]
    policy.past.clear()

    def ask(client, step: int, epoch: int = 0) -> list:
        assert client.request(observation(step), rid=step, epoch=epoch, origin=step, seed=0)
        collect(client, 1)
        return policy.past[-1]

    assert [ask(clients[0], step) for step in (0, 4, 8, 12)] == [[], [0], [0, 4], [0, 8, 4]]
    assert [ask(clients[1], step) for step in (2, 9)] == [[], [2]]
    clients[0].reset(1)
    assert [ask(clients[0], step, epoch=1) for step in (20, 24)] == [[], [20]]
    assert ask(connect(server.endpoint), 28) == []
