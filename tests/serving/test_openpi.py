"""openpi's protocol: our server under its unmodified client, our client on a server like its own, and hostile bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_fakes import HORIZON, ROBOT, WAIT_S, TickPolicy, observation
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import serve

from vla_stack.errors import UserError
from vla_stack.schema import ActionChunk, RobotSpec
from vla_stack.serving.client import ServerError
from vla_stack.serving.clients import open_client
from vla_stack.serving.endpoint import OpenpiAddress
from vla_stack.serving.openpi import Keys, Openpi, pack, unpack
from vla_stack.serving.server import ServerConfig
from vla_stack.serving.trees import MAX_BYTES
from vla_stack.serving.websocket_server import WebsocketServer
from vla_stack.serving.wire import WireError

ANY = "ws://127.0.0.1:*"
KEYS = Keys.of(ROBOT, {})


@pytest.fixture
def start() -> Iterator[Callable[..., WebsocketServer]]:
    """``start(policy, ...)`` returns a server that is ready and ends with the test."""
    running: list[tuple[WebsocketServer, threading.Thread]] = []

    def begin(policy=None, keys=None, **options) -> WebsocketServer:
        ready = threading.Event()
        served = policy or TickPolicy()
        server = WebsocketServer(lambda: served, Openpi(keys or {}), ANY, on_ready=lambda _: ready.set(), **options)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        assert ready.wait(WAIT_S)
        return server

    yield begin
    for server, thread in running:
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def message(step: int = 0) -> dict:
    return KEYS.message(observation(step))


# -- format -----------------------------------------------------------------------------------------------------------


def test_what_openpis_client_packs_is_read_and_the_other_way_round():
    tree = {
        "state": np.arange(6, dtype=np.float32),
        "picture": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
        "scalar": np.float64(0.25),
        "prompt": "pick",
        "nested": {"flag": np.array([True, False])},
    }
    for encode, decode in ((msgpack_numpy.packb, unpack), (pack, msgpack_numpy.unpackb), (pack, unpack)):
        again = decode(encode(tree))
        assert again["prompt"] == "pick" and float(again["scalar"]) == 0.25
        for path in ("state", "picture"):
            assert again[path].dtype == tree[path].dtype
            np.testing.assert_array_equal(again[path], tree[path])
        np.testing.assert_array_equal(again["nested"]["flag"], [True, False])


def array(**changes) -> bytes:
    fields = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"state": fields | {key.encode(): value for key, value in changes.items()}})


@pytest.mark.parametrize(
    "bad",
    [
        array(dtype="|O"),
        array(dtype="|V8"),
        array(dtype="<M8[s]"),
        array(dtype=">f4"),
        array(dtype=["<f4"]),
        array(shape=[3]),
        array(shape=[-1]),
        array(shape=[1 << 40, 0]),
        array(shape=[1] * 9),
        array(shape="2"),
        array(shape=[2.0]),
        array(data="text"),
        msgpack.packb([1, 2]),
        msgpack.packb({"x": [0] * 1000}),
        msgpack.packb({"x": "y" * 10_000}),
        msgpack.packb({"x": msgpack.ExtType(1, b"x")}),
        b"",
        b"\xc1",
        b"\x81\xa1x" + b"\x91" * 5000,
    ],
)
def test_a_malformed_message_is_refused(bad):
    with pytest.raises(WireError):
        unpack(bad)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data):
    try:
        tree = unpack(data)
    except WireError:
        return
    with pytest.raises(WireError):
        KEYS.observation(tree, ROBOT, 0, 0)


@given(st.integers(0), st.binary(min_size=1, max_size=8))
def test_damage_to_a_good_message_is_refused_or_harmless(at, damage):
    good = bytearray(pack(message()))
    at %= len(good)
    good[at : at + len(damage)] = damage
    try:
        KEYS.observation(unpack(bytes(good)), ROBOT, 0, 0).check(ROBOT)
    except WireError:
        pass


def test_keys_are_found_nested_renamed_and_in_parts():
    seen = observation(3)
    keys = Keys.of(ROBOT, {"front": "images/cam_high", "state": "joints+gripper", "task": "task"})
    tree = {
        "images": {"cam_high": seen.images["front"].transpose(2, 0, 1)},
        "observation": {"images": {"wrist": seen.images["wrist"].astype(np.float32) / 255}},
        "joints": seen.state[:1].astype(np.float64),
        "gripper": float(seen.state[1]),
        "task": seen.task,
    }
    found = keys.observation(tree, ROBOT, 3, 7)
    np.testing.assert_array_equal(found.state, seen.state)
    for camera in seen.images:
        np.testing.assert_array_equal(found.images[camera], seen.images[camera])
    with pytest.raises(UserError, match="no 'side'"):
        Keys.of(ROBOT, {"side": "x"})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"observation/state": np.zeros(3, np.float32)}, "state is float32"),
        ({"observation/state": np.array([np.nan, 0])}, "not finite"),
        ({"observation/state": np.array([1e300, 0])}, "not finite"),
        ({"observation/state": "fast"}, "observation/state"),
        ({"observation/images/front": np.zeros((4, 4), np.uint8)}, "observation/images/front"),
        ({"observation/images/front": np.full((6, 8, 3), 7.0)}, "in floats"),
        ({"observation/images/front": np.zeros((6, 8, 3), np.int32)}, "int32"),
        ({"observation/images/front": np.zeros((0, 8, 3), np.uint8)}, "shape"),
        ({"prompt": 3}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(change, names):
    tree = {key: value for key, value in (message() | change).items()}
    with pytest.raises(WireError, match=names):
        KEYS.observation(tree, ROBOT, 0, 0)
    for key in message():
        with pytest.raises(WireError, match=f"'{key}' is missing"):
            KEYS.observation({k: v for k, v in message().items() if k != key}, ROBOT, 0, 0)


# -- our server -------------------------------------------------------------------------------------------------------


def test_openpis_own_client_gets_the_policys_chunks(start):
    server = start()
    policy = WebsocketClientPolicy(server.endpoint)
    meta = policy.get_server_metadata()
    assert meta["action_horizon"] == HORIZON and meta["keys"]["state"] == ["observation/state"]
    for step in range(3):
        answer = policy.infer(message(step))
        np.testing.assert_array_equal(answer["actions"], np.arange(HORIZON)[:, None] + step + np.zeros((1, 2)))
        assert answer["server_timing"]["infer_ms"] >= 0


def test_a_bad_request_is_answered_by_one_line_and_the_next_by_a_chunk(start):
    server = start()
    with connect(server.endpoint, compression=None) as peer:
        peer.recv()
        for bad in (b"\xc1", "a text", pack({"prompt": "pick"})):
            peer.send(bad)
            answer = peer.recv()
            assert isinstance(answer, str) and "\n" not in answer and "Traceback" not in answer
        peer.send(pack(message()))
        assert unpack(peer.recv())["actions"].shape == (HORIZON, 2)
    assert server.metrics.rejected["bad_schema"] == 3


def test_a_policy_that_fails_costs_one_request(start):
    class Failing(TickPolicy):
        def infer(self, observations, seeds):
            if any(o.task == "fail" for o in observations):
                raise ValueError("secret path /home/me")
            return super().infer(observations, seeds)

    with connect(start(Failing()).endpoint, compression=None) as peer:
        peer.recv()
        peer.send(pack(message() | {"prompt": "fail"}))
        answer = peer.recv()
        assert isinstance(answer, str) and "secret" not in answer
        peer.send(pack(message()))
        assert isinstance(peer.recv(), bytes)


def test_a_message_above_the_limit_ends_its_connection_alone(start):
    server = start()
    with connect(server.endpoint, compression=None) as other, connect(server.endpoint, compression=None) as peer:
        other.recv(), peer.recv()
        peer.send(b"\0" * (MAX_BYTES + 1))
        with pytest.raises(Exception, match="1009"):
            peer.recv()
        other.send(pack(message()))
        assert isinstance(other.recv(), bytes)


def test_nobody_gets_in_without_the_token_from_a_page_or_beyond_the_limit(start):
    server = start(token="a-token-of-twenty-odd-letters", config=ServerConfig(max_sessions=1))
    good = {"Authorization": "Api-Key a-token-of-twenty-odd-letters"}
    for headers, status in (({}, 401), ({"Authorization": "Api-Key other"}, 401), (good | {"Origin": "http://x"}, 403)):
        with pytest.raises(InvalidStatus) as refused:
            connect(server.endpoint, additional_headers=headers)
        assert refused.value.response.status_code == status
    with connect(server.endpoint, additional_headers=good, compression=None) as peer:
        peer.recv()
        with pytest.raises(InvalidStatus) as refused:
            connect(server.endpoint, additional_headers=good)
        assert refused.value.response.status_code == 503


def test_another_policy_is_gone_over_to_where_it_fits(start):
    server = start(keys={"front": "observation/image"})
    versions = ["m2"]

    def load():
        policy = TickPolicy(versions[-1])
        if policy.spec.model_version == "m3":  # the key names no camera of it
            policy.spec = replace(policy.spec, robot=replace(ROBOT, cameras=ROBOT.cameras[1:]))
        return policy

    def served() -> str:
        with connect(server.endpoint, compression=None) as peer:
            return unpack(peer.recv())["vla_stack"]["model_version"]

    server._load = load
    server._load_beside()
    assert served() == "m2" and server.metrics.labels["model_version"] == "m2" and server.metrics.reloads == {"ok": 1}
    versions.append("m3")
    server._load_beside()
    assert served() == "m2" and server.metrics.reloads == {"ok": 1, "failed": 1}
    with server._reloading:  # one at a time: the older one could come last
        versions.append("m4")
        server._load_beside()
    assert served() == "m2"


def test_a_policy_that_remembers_is_not_served_to_who_tells_no_steps():
    spec = replace(TickPolicy().spec, history=(0, 4))
    with pytest.raises(UserError, match="reads earlier observations"):
        Openpi({}).conversation(spec)


def test_off_loopback_it_wants_token_and_certificate():
    for endpoint, options in (
        ("ws://0.0.0.0:*", {}),
        ("ws://0.0.0.0:*", {"token": "t" * 20}),
        ("http://127.0.0.1:1", {}),
    ):
        with pytest.raises(UserError):
            WebsocketServer(TickPolicy, Openpi({}), endpoint, **options)


# -- our client -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stock() -> Iterator[Callable[..., str]]:
    """``stock(answer)`` serves as openpi does: metadata, then ``answer(observation)`` or a traceback."""
    servers = []

    def begin(answer: Callable[[dict], dict], metadata: dict | None = None) -> str:
        def converse(peer) -> None:
            peer.send(msgpack_numpy.packb(metadata or {}))
            for data in peer:
                try:
                    peer.send(msgpack_numpy.packb(answer(msgpack_numpy.unpackb(data))))
                except Exception as e:
                    peer.send(f"Traceback (most recent call last):\n  ...\nValueError: {e}")
                    return

        server = serve(converse, "127.0.0.1", 0, compression=None, max_size=None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"ws://127.0.0.1:{server.socket.getsockname()[1]}"

    yield begin
    for server in servers:
        server.shutdown()


def ask(client, rid: int, epoch: int = 1) -> list:
    assert client.request(observation(rid), rid, epoch, origin=rid, seed=0)
    items: list = []
    for _ in range(int(WAIT_S * 10)):
        items += client.poll(100)
        if items:
            return items
    raise AssertionError("nothing came")


def hello(endpoint: str, robot: RobotSpec | None = ROBOT, **options):
    client = open_client(OpenpiAddress(endpoint, **options))
    return client, client.hello(robot, WAIT_S)


def test_a_stock_server_drives_our_robot(stock):
    asked = []

    def answer(obs: dict) -> dict:
        asked.append(obs)
        return {
            "actions": np.full((10, 2), obs["observation/state"][0], np.float64),
            "server_timing": {"infer_ms": 1.0},
        }

    client, spec = hello(stock(answer), keys={"front": "observation/image"})
    with closing(client):
        assert spec is not None and spec.horizon == 10 and spec.robot == ROBOT
        (chunk,) = ask(client, 5)
        assert isinstance(chunk, ActionChunk) and (chunk.origin, chunk.k_obs, chunk.rid, chunk.epoch) == (5, 5, 5, 1)
        np.testing.assert_array_equal(chunk.actions, np.full((10, 2), 0.5, np.float32))
        np.testing.assert_array_equal(asked[-1]["observation/image"], observation(5).images["front"])
        assert asked[-1]["prompt"] == "pick the red cube"


def test_our_client_on_our_server(start):
    client, spec = hello(start().endpoint)
    with closing(client):
        assert spec is not None and spec.model_version == "m1"
        (chunk,) = ask(client, 3)
        assert isinstance(chunk, ActionChunk) and chunk.horizon == HORIZON


def test_a_state_of_two_keys_cannot_be_sent(start):
    with pytest.raises(UserError, match="one key for the state to send, not 2"):
        hello(start().endpoint, keys={"state": "joints+gripper"})


def test_whatever_goes_wrong_in_between_the_robot_hears_of_it(start, monkeypatch):
    client, _ = hello(start().endpoint)
    with closing(client):
        monkeypatch.setattr(client, "_read", lambda *_: 1 / 0)
        (error,) = ask(client, 1)
        assert isinstance(error, ServerError) and "division" in error.text
        monkeypatch.undo()
        for _ in range(int(WAIT_S * 10)):
            if client.connected:
                break
            client.poll(100)
        (chunk,) = ask(client, 2)
        assert isinstance(chunk, ActionChunk)


def test_only_asking_what_is_served(start, stock):
    client, spec = hello(start().endpoint, None)
    with closing(client):
        assert spec is not None and spec.robot == ROBOT
    client, spec = hello(stock(lambda _: {}), None)
    with closing(client):
        assert spec is None


@pytest.mark.parametrize(
    "actions",
    [
        np.zeros((4, 7)),
        np.full((4, 2), np.inf),
        np.zeros((5, 2)),
        np.zeros(4),
        "none",
    ],
)
def test_chunks_that_do_not_fit_never_reach_the_robot(stock, actions):
    good = {"actions": np.zeros((4, 2), np.float32)}
    answers = iter([good])
    client, _ = hello(stock(lambda _: next(answers, {"actions": actions})))
    with closing(client):
        (refusal,) = ask(client, 1)
        assert isinstance(refusal, ServerError) and "malformed" in refusal.text


def test_a_servers_traceback_becomes_one_line_and_the_connection_comes_back(stock):
    count = iter(range(100))

    def answer(_: dict) -> dict:
        if next(count) == 1:
            raise ValueError("no such key")
        return {"actions": np.zeros((4, 2), np.float32)}

    client, _ = hello(stock(answer))
    with closing(client):
        (refusal,) = ask(client, 1)
        assert isinstance(refusal, ServerError) and refusal.text == "ValueError: no such key"
        for _ in range(int(WAIT_S * 100)):  # it connects anew by itself
            client.poll(10)
            if client.connected and client.request(observation(2), 2, 1, 2, 0):
                break
        items: list = []
        while not any(isinstance(item, ActionChunk) for item in items):
            items += client.poll(100)
            if items and isinstance(items[-1], ServerError) and client.connected:
                client.request(observation(2), 2, 1, 2, 0)


def test_what_was_asked_before_a_reset_is_thrown_away(stock):
    gate = threading.Semaphore(1)

    def answer(_: dict) -> dict:
        assert gate.acquire(timeout=WAIT_S)
        return {"actions": np.zeros((4, 2), np.float32)}

    client, _ = hello(stock(answer))
    with closing(client):
        assert client.request(observation(1), 1, 1, 1, 0)
        client.reset(2)
        gate.release(), gate.release()
        (chunk,) = ask(client, 7, epoch=2)
        assert isinstance(chunk, ActionChunk) and chunk.rid == 7


def test_nobody_there_and_a_refusal_are_two_messages(start):
    server = start(token="a-token-of-twenty-odd-letters")
    with pytest.raises(UserError, match="refuses: 401"):
        hello(server.endpoint)
    client = open_client(OpenpiAddress("ws://127.0.0.1:9"))
    with closing(client), pytest.raises(UserError, match="does not answer"):
        client.hello(ROBOT, 0.2)
