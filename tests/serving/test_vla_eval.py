"""vla-eval's protocol: our server under the harness's unmodified connection, its pictures, and hostile bytes."""

from __future__ import annotations

import asyncio
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from serving_fakes import HORIZON, ROBOT, WAIT_S, TickPolicy, observation
from vla_eval.connection import Connection
from vla_eval.protocol import numpy_codec
from vla_eval.protocol.messages import Message, MessageType, pack_message
from vla_eval.specs import DimSpec, check_specs

from vla_stack.serving.openpi import Keys
from vla_stack.serving.vla_eval import USUAL_KEYS, VlaEval, _read, action_spec, observation_spec
from vla_stack.serving.websocket_server import WebsocketServer
from vla_stack.serving.wire import WireError

KEYS = Keys.of(ROBOT, {}, USUAL_KEYS)


@pytest.fixture
def server() -> Iterator[WebsocketServer]:
    ready = threading.Event()
    served = WebsocketServer(
        TickPolicy, VlaEval({}, lambda policy: HORIZON), "ws://127.0.0.1:*", on_ready=lambda _: ready.set()
    )
    thread = threading.Thread(target=served.run)
    thread.start()
    assert ready.wait(WAIT_S)
    yield served
    served.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.fixture(params=["raw", "png", "jpeg"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the harness sends pictures."""
    before = numpy_codec.get_image_format()
    numpy_codec.set_image_format(request.param)
    yield request.param
    numpy_codec.set_image_format(before)


def seen(step: int = 0) -> dict:
    obs = observation(step)
    return {"images": obs.images, "state": obs.state, "task_description": obs.task}


def packed(payload: dict, kind: MessageType = MessageType.OBSERVATION) -> bytes:
    return pack_message(Message(kind, payload, seq=3))


# -- conversation ------------------------------------------------------------------------------------------------------


def test_the_harness_gets_one_command_an_observation_and_a_new_plan_when_it_is_used_up(server):
    async def episodes() -> list[list[float]]:
        asked = []
        async with Connection(server.endpoint, timeout=WAIT_S) as connection:
            for _ in range(2):
                await connection.start_episode({"task": {"name": "x"}})
                commands = [await connection.act(seen(step)) for step in range(HORIZON + 2)]
                asked.append([float(command["actions"][0]) for command in commands])
                assert all(command["actions"].shape == (2,) for command in commands)
                await connection.end_episode({"metrics": {"success": True}})
        return asked

    # What was planned at step 0, then what is planned at step HORIZON; a new episode counts from 0 again.
    first, second = asyncio.run(episodes())
    assert first == second == [float(i) for i in range(HORIZON + 2)]


def test_a_policy_that_remembers_is_shown_its_episode_alone(server):
    past: list = []
    policy = server._policy
    policy.spec = replace(policy.spec, history=(0, HORIZON, 2 * HORIZON))
    infer = policy.infer

    def seeing(observations, seeds):
        past.extend([earlier.step for earlier in o.past] for o in observations)
        return infer(observations, seeds)

    policy.infer = seeing

    async def episodes() -> None:
        async with Connection(server.endpoint, timeout=WAIT_S) as connection:
            for _ in range(2):
                await connection.start_episode({"task": {"name": "x"}})
                for step in range(2 * HORIZON + 1):
                    await connection.act(seen(step))
                await connection.end_episode({"metrics": {"success": True}})

    asyncio.run(episodes())
    assert past == 2 * [[], [0], [0, HORIZON]]


def test_greeting_says_what_the_policy_needs_and_ours_are_told_more(server):
    async def greetings() -> list[dict]:
        found = []
        for benchmark in ("vla_eval.benchmarks.libero:LIBEROBenchmark", "vla_stack.evaluation.vla_eval:Tasks"):
            connection = Connection(server.endpoint, timeout=WAIT_S)
            await connection.connect(benchmark=benchmark)
            found.append(connection.server_info)
            await connection.close()
        return found

    other, ours = asyncio.run(greetings())
    assert "observation_params" not in other and ours["observation_params"]["policy"]["horizon"] == HORIZON
    assert ours["action_spec"]["action"]["dims"] == 2


def test_a_bad_observation_is_answered_by_an_error_and_the_next_by_a_command(server):
    async def talk() -> tuple[str, dict]:
        async with Connection(server.endpoint, timeout=WAIT_S) as connection:
            with pytest.raises(RuntimeError) as refused:
                await connection.act({**seen(), "state": np.zeros(7, np.float32)})
            return str(refused.value), await connection.act(seen())

    why, command = asyncio.run(talk())
    assert "state is float32" in why and "Traceback" not in why
    assert command["actions"].tolist() == [0.0, 0.0]


def test_conventions_are_compared_by_names_units_and_kinds():
    def specs(robot):
        return (
            {k: DimSpec.from_dict(v) for k, v in action_spec(robot).items()},
            {k: DimSpec.from_dict(v) for k, v in observation_spec(robot).items()},
        )

    action, seen_ = specs(ROBOT)
    assert check_specs(action, action, seen_, seen_) == []
    for other in (
        replace(ROBOT, action=ROBOT.action[::-1]),
        replace(ROBOT, action_kind="delta"),
        replace(ROBOT, action=(replace(ROBOT.action[0], unit="mm"), ROBOT.action[1])),
        replace(ROBOT, state=ROBOT.state[:1]),
    ):
        theirs, shown = specs(other)
        assert check_specs(action, theirs, seen_, shown)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_pictures_come_as_the_harness_sends_them(form):
    ramp = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    _, payload, seq = _read(packed({**seen(), "images": {"front": ramp, "wrist": ramp[:4, :4]}}))
    found = KEYS.observation(payload, ROBOT, 0, 0)
    assert seq == 3 and found.task == observation().task
    np.testing.assert_allclose(found.images["front"], ramp, atol=20 if form == "jpeg" else 0)
    np.testing.assert_array_equal(found.state, observation().state)


def png(height: int, width: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height)).save(out, "PNG")
    return out.getvalue()


def part(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


GOOD = png(4, 4)
HEADER, END = GOOD[:33], part(b"IEND", b"")
LARGER = part(b"IHDR", struct.pack(">IIBBBBB", 12000, 12000, 8, 2, 0, 0, 0))
ROWS = bytes(13 * 4)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"data": png(64, 64)}, "is not 4x4"),
        ({"data": png(4, 4, "RGBA")}, "is not 4x4"),
        ({"data": GOOD[:40]}, "has not the pixels"),
        ({"data": GOOD[:-4] + b"abcd"}, "is damaged"),
        ({"data": GOOD + b"x" * 20}, "another part"),
        ({"data": HEADER + LARGER + GOOD[33:]}, "another part"),
        ({"data": HEADER + part(b"tEXt", b"a" * 9) + GOOD[33:]}, "another part"),
        ({"data": HEADER + part(b"IDAT", zlib.compress(bytes(10_000_000))) + END}, "has not the pixels"),
        ({"data": HEADER + part(b"IDAT", zlib.compress(ROWS[:-1])) + END}, "has not the pixels"),
        ({"data": HEADER + part(b"IDAT", zlib.compress(b"\x09" * 52)) + END}, "has not the pixels"),
        ({"data": HEADER + part(b"IDAT", b"no zlib") + END}, "is damaged"),
        ({"data": HEADER + END}, "has not the pixels"),
        ({"data": b"GIF89a"}, "does not begin"),
        ({"data": "text"}, "needs bytes"),
        ({"shape": [4, 4]}, "needs bytes and a shape"),
        ({"shape": [4, 4, 4]}, "needs bytes and a shape"),
        ({"shape": [16000, 16000, 3]}, "a picture of shape"),
        ({"shape": [4.0, 4, 3]}, "a picture of shape"),
        ({"format": "tiff"}, "tiff"),
        ({"format": "jpeg"}, "a JPEG"),
        ({"format": "raw"}, "is not"),
    ],
)
def test_a_picture_that_is_none_is_refused(change, names):
    picture = {"__image__": True, "format": "png", "data": png(4, 4), "shape": [4, 4, 3], **change}
    body = {"type": "observation", "payload": {"images": {"wrist": picture}}, "seq": 0, "timestamp": 0.0}
    with pytest.raises(WireError, match=names):
        _read(msgpack.packb(body))


@pytest.mark.parametrize(
    "tree",
    [[], {"type": "hello"}, {"type": 1, "payload": {}, "seq": 0}, {"type": "hello", "payload": [], "seq": 0}]
    + [{"type": "hello", "payload": {}, "seq": seq} for seq in (True, "1", 1.5, 1 << 60)],
)
def test_what_is_no_message_is_refused(tree):
    with pytest.raises(WireError):
        _read(msgpack.packb(tree))


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data):
    try:
        _read(data)
    except WireError:
        pass


@given(st.integers(0), st.binary(min_size=1, max_size=8))
def test_damage_to_a_good_message_is_refused_or_harmless(at, damage):
    good = bytearray(packed(seen()))
    at %= len(good)
    good[at : at + len(damage)] = damage
    try:
        _, payload, _ = _read(bytes(good))
        KEYS.observation(payload, ROBOT, 0, 0).check(ROBOT)
    except WireError:
        pass


def test_who_speaks_gets_no_more_than_an_error(server):
    """A conversation of nonsense, and the connection goes on."""

    async def talk() -> dict:
        async with Connection(server.endpoint, timeout=WAIT_S) as connection:
            for nonsense in (b"\xc1", packed({}, MessageType.ERROR), b"", msgpack.packb({"type": "observation"})):
                await connection._ws.send(nonsense)
            answers = [await connection.recv(timeout=WAIT_S) for _ in range(3)]
            assert {answer.type for answer in answers} == {MessageType.ERROR}
            return await connection.act(seen())

    assert asyncio.run(talk())["actions"].tolist() == [0.0, 0.0]
