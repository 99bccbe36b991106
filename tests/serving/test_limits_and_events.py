"""What is dropped before it is read, and what is written down."""

from __future__ import annotations

import json
import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import WAIT_S, ContinuingPolicy, GatedPolicy, TickPolicy, barrier, collect, observation

from vla_stack.errors import UserError
from vla_stack.schema import Continuation
from vla_stack.serving import messages
from vla_stack.serving.events import EventLog
from vla_stack.serving.listener import STRANGER_BURST, STRANGER_HZ
from vla_stack.serving.rates import Allowance
from vla_stack.serving.sessions import REMEMBERED, Session

S = 1_000_000_000


@given(st.lists(st.integers(0, 2 * S), min_size=1, max_size=60), st.integers(1, 5))
def test_never_more_than_a_burst_and_the_rate(gaps, rate):
    limit, now, admitted = Allowance(rate), 0, []
    for gap in gaps:
        now += gap
        if limit.admit(now):
            admitted.append(now)
    for i, start in enumerate(admitted):
        for n, end in enumerate(admitted[i:], 1):
            assert n <= rate + (end - start) / S * rate + 1e-6


def test_a_burst_of_its_own_and_infinity_is_no_limit():
    now = S
    limit = Allowance(1.0, burst=2.0)
    assert [limit.admit(now) for _ in range(3)] == [True, True, False]
    assert limit.admit(now + 2 * S)
    assert all(Allowance(float("inf")).admit(now) for _ in range(5))


def test_a_flood_stays_with_its_sender_and_harms_nobody_else(serve, connect):
    server = serve(TickPolicy())
    robot = connect(server.endpoint)
    context = zmq.Context()
    context.linger = 0  # a test that fails leaves it behind, and its end would wait for ever
    rogue = context.socket(zmq.DEALER)
    rogue.connect(server.endpoint)
    for _ in range(400):
        rogue.send(b"\xc1")
    assert rogue.poll(1000 * WAIT_S)  # the first ones are refused, the others wait
    begun = time.monotonic()
    robot.request(observation(3), rid=0, epoch=0, origin=3, seed=0)
    assert collect(robot, 1)[0].actions[0, 0] == 3
    assert server.metrics.rejected["bad_schema"] <= STRANGER_BURST + STRANGER_HZ * (time.monotonic() - begun + 1)
    context.destroy(linger=0)


def test_every_line_is_json_and_refusals_cannot_push_out_the_rest(servers, connect, tmp_path):
    log = tmp_path / "serve.jsonl"
    server = servers.start_with(TickPolicy, log_file=log)
    client = connect(server.endpoint)
    for rid in range(60):  # all but the first are refused
        client.request(observation(1, task="x\ny"), rid=rid, epoch=0, origin=0, seed=-1 if rid else 0)
        collect(client, 1)
    client.close()
    servers.stop(server)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds[:2] == ["ready", "hello"] and kinds[-2:] == ["end", "stopped"]
    assert 1 <= kinds.count("refused") < 60
    assert all({"t", "mono_ns"} <= line.keys() for line in lines)
    (chunk,) = [line for line in lines if line["event"] == "chunk"]
    assert chunk["model"] == "m1" and chunk["rid"] == 0 and chunk["k_obs"] == 1


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot write the log"):
        EventLog(tmp_path / "missing" / "serve.jsonl")


def test_batches_and_expected_delays_are_counted(serve, connect):
    server = serve(ContinuingPolicy())
    client = connect(server.endpoint)
    plan = Continuation("prefix", observation().state[None].repeat(4, 0), delay=2, execute=2)
    client.request(observation(), rid=0, epoch=0, origin=0, seed=0, continuation=plan)
    collect(client, 1)
    page = server.metrics.render().splitlines()
    assert 'vla_batches_total{size="1"} 1' in page
    assert f'vla_delay_ticks{{session="{client._sid[:8]}"}} 2' in page
    session = client._sid[:8]
    client.close()
    other = connect(server.endpoint)
    while f'vla_delay_ticks{{session="{session}"}} 2' in server.metrics.render():
        barrier(other)


def test_a_copy_of_a_request_displaces_nothing(serve, connect):
    policy = GatedPolicy()
    server = serve(policy)
    client = connect(server.endpoint)
    client.request(observation(0), rid=0, epoch=0, origin=0, seed=0)
    assert policy.entered.acquire(timeout=WAIT_S)  # what comes now waits in the mailbox
    client.request(observation(1), rid=1, epoch=0, origin=1, seed=0)
    for rid in (0, 1, 0):
        client._send(messages.infer(observation(rid), client._sid, 0, rid, rid, 0))
    assert barrier(client) == []
    assert server.metrics.rejected["replay"] == 3
    for _ in range(3):
        policy.gate.release()
    assert [chunk.rid for chunk in collect(client, 2)] == [0, 1]
    client.request(observation(2), rid=0, epoch=1, origin=2, seed=0)  # ids start anew
    assert [chunk.origin for chunk in collect(client, 1)] == [2]
    assert policy.batches == [[0], [1], [2]]


def test_memory_of_requests_is_bounded():
    session = Session("s", b"", 0, 0)
    assert all(session.ask(rid) for rid in range(3 * REMEMBERED))
    assert len(session.asked) == REMEMBERED
    assert not session.ask(3 * REMEMBERED - 1)
