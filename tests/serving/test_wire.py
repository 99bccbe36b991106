"""The wire format: what is encoded comes back, and nothing else gets in."""

from __future__ import annotations

import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from serving_fakes import ROBOT, observation

from vla_stack.serving import messages, wire
from vla_stack.serving.wire import Code, Jpeg, Kind, Message, WireError

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "bench"))
from hostile import mutate, noise

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=40)
ARRAYS = st.sampled_from(list(wire.DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=5, max_side=4))
)
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))
PICTURES = st.builds(Jpeg, SHAPES, st.binary(min_size=1, max_size=3))
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    sid=TEXT,
    epoch=INT64,
    rid=INT64,
    fields=st.fixed_dictionaries({}, optional={k: INT64 if t is int else TEXT for k, t in wire.FIELDS.items()}),
    tensors=st.dictionaries(st.text(min_size=1, max_size=20), ARRAYS, max_size=4),
    pictures=st.dictionaries(st.text(min_size=21, max_size=25), PICTURES, max_size=2),
)


def header(**changes) -> bytes:
    base = {"v": 2, "type": "INFER", "sid": "s", "epoch": 0, "rid": 1, "tensors": [["a", "f32", [2, 3], "raw", 24]]}
    content = {**base, **changes}
    return msgpack.packb({**content, "tensors": msgpack.packb(content["tensors"])})


@given(MESSAGES)
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_comes_back(message):
    back = wire.decode([bytes(frame) for frame in wire.encode(message)])
    assert (back.kind, back.sid, back.epoch, back.rid, back.fields) == (
        message.kind,
        message.sid,
        message.epoch,
        message.rid,
        message.fields,
    )
    assert list(back.tensors) == list(message.tensors) and dict(back.pictures) == dict(message.pictures)
    for name, array in message.tensors.items():
        assert back.tensors[name].dtype == array.dtype and back.tensors[name].shape == array.shape
        assert back.tensors[name].tobytes() == array.tobytes()  # bit for bit, NaN included
        assert not back.tensors[name].flags.writeable


def test_no_copy_either_way():
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    frames = wire.encode(Message(Kind.INFER, tensors={"image": image}))
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), image)
    assert np.shares_memory(wire.decode(frames).tensors["image"], image)
    assert image.flags.writeable  # the sender's own array is left as it was


def test_strided_arrays_arrive_in_order():
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)[::-1, :, ::-1]
    back = wire.decode(wire.encode(Message(Kind.INFER, tensors={"image": image})))
    np.testing.assert_array_equal(back.tensors["image"], image)


def test_unaligned_memory_still_yields_an_aligned_array():
    frames = wire.encode(Message(Kind.CHUNK, tensors={"a": np.arange(6, dtype=np.float64)}))
    shifted = memoryview(b"x" + bytes(frames[1]))[1:]
    for offset in range(2):  # whichever of the two is the unaligned one
        back = wire.decode([frames[0], memoryview(b"x" * offset + bytes(shifted))[offset:]]).tensors["a"]
        assert back.flags.aligned and not back.flags.writeable
        np.testing.assert_array_equal(back, np.arange(6))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([object()]), "dtype object does not travel"),
        (np.zeros(2, np.complex64), "dtype complex64"),
        (np.zeros(2, ">f4"), "dtype >f4"),
        (np.zeros((1,) * 6, np.uint8), "at most 5"),
        (np.zeros((0, 3), np.uint8), "a size is not in 1.."),
        (np.zeros(wire.MAX_FRAME_BYTES + 1, np.uint8), "a size is not in 1.."),
    ],
)
def test_what_may_not_be_sent(array, reason):
    with pytest.raises(WireError, match=reason):
        wire.encode(Message(Kind.INFER, tensors={"a": array}))


def test_limits_of_encode():
    with pytest.raises(WireError, match="shorten the instruction"):
        wire.encode(Message(Kind.INFER, fields={"task": "x" * 5000}))
    with pytest.raises(WireError, match="exceed 16"):
        wire.encode(Message(Kind.INFER, tensors={str(i): np.zeros(1, np.uint8) for i in range(17)}))
    with pytest.raises(WireError, match="exceed 33554432"):
        big = np.zeros(wire.MAX_FRAME_BYTES, np.uint8)
        wire.encode(Message(Kind.INFER, tensors={str(i): big for i in range(5)}))
    with pytest.raises(WireError, match="'surprise' is not part of the format"):
        wire.encode(Message(Kind.INFER, fields={"surprise": 1}))


BODY = b"\0" * 24


@pytest.mark.parametrize(
    ("frames", "code", "reason"),
    [
        ([], Code.BAD_SCHEMA, "0 frames"),
        ([header()] + [BODY] * 17, Code.BAD_SCHEMA, "18 frames"),
        ([b"\xc1"], Code.BAD_SCHEMA, "not msgpack"),
        ([b"\x91" * 4000], Code.BAD_SCHEMA, "not msgpack"),  # nested lists: no recursion, no memory
        ([b"\xdd\xff\xff\xff\xff"], Code.BAD_SCHEMA, "not msgpack"),  # claims four billion elements
        ([header(task="x" * 5000), BODY], Code.BAD_SCHEMA, "exceeds 4096"),
        ([msgpack.packb([1, 2])], Code.BAD_SCHEMA, "not a map"),
        ([header(v=1), BODY], Code.VERSION, "wire version 1 is not 2"),
        ([header(v=True), BODY], Code.VERSION, "True"),
        ([header(type="EXEC"), BODY], Code.BAD_SCHEMA, "unknown message type 'EXEC'"),
        ([header(type=["INFER"]), BODY], Code.BAD_SCHEMA, "unknown message type"),
        ([header(sid=7), BODY], Code.BAD_SCHEMA, "'sid' is not str"),
        ([header(rid=True), BODY], Code.BAD_SCHEMA, "'rid' is not int"),
        ([header(rid=2**64 - 1), BODY], Code.BAD_SCHEMA, "'rid' is not int"),
        ([header(seed="0"), BODY], Code.BAD_SCHEMA, "'seed' is not int"),
        ([header(tensors={"a": 1}), BODY], Code.BAD_SCHEMA, "'tensors' is not a list"),
        ([msgpack.packb({"v": 2, "type": "INFER", "tensors": []})], Code.BAD_SCHEMA, "'tensors' is not bytes"),
        ([msgpack.packb({"v": 2, "type": "INFER", "tensors": b"\xc1"})], Code.BAD_SCHEMA, "'tensors' is not msgpack"),
        ([header()], Code.BAD_SCHEMA, "names 1 tensors, 0 frames follow"),
        ([header(tensors=[]), BODY], Code.BAD_SCHEMA, "names 0 tensors, 1 frames follow"),
        ([header(tensors=[["a", "f32"]]), BODY], Code.BAD_SCHEMA, "a tensor entry is not"),
        ([header(tensors=[["", "f32", [2, 3], "raw", 24]]), BODY], Code.BAD_SCHEMA, "a tensor name"),
        ([header(tensors=[["a", "O", [3], "raw", 24]]), BODY], Code.BAD_SCHEMA, "dtype 'O'"),
        ([header(tensors=[["a", "f32", [1] * 6, "raw", 4]]), b"0000"], Code.BAD_SCHEMA, "at most 5"),
        ([header(tensors=[["a", "u8", [-1, -24], "raw", 24]]), BODY], Code.BAD_SCHEMA, "a size is not in"),
        ([header(tensors=[["a", "u8", [2**32, 2**32], "raw", 24]]), BODY], Code.BAD_SCHEMA, "a size is not in"),
        ([header(tensors=[["a", "u8", [True] * 2, "raw", 1]]), b"0"], Code.BAD_SCHEMA, "a size is not in"),
        ([header(tensors=[["a", "f32", [2, 3], "pickle", 24]]), BODY], Code.BAD_SCHEMA, "encoding 'pickle'"),
        ([header(tensors=[["a", "f32", [2, 3], "raw", -24]]), BODY], Code.BAD_SCHEMA, "not 1.."),
        ([header(tensors=[["a", "f32", [2, 4], "raw", 24]]), BODY], Code.BAD_SCHEMA, r"f32\[2, 4\] is not 24 bytes"),
        ([header(), b"\0" * 23], Code.BAD_SCHEMA, "frame has 23 bytes, header says 24"),
        ([header(tensors=[["a", "bool", [2], "raw", 2]]), b"\0\2"], Code.BAD_SCHEMA, "bool bytes"),
        ([header(tensors=[["a", "u8", [1], "raw", 1]] * 2), b"0", b"0"], Code.BAD_SCHEMA, "a tensor appears twice"),
    ],
)
def test_what_may_not_come_in(frames, code, reason):
    with pytest.raises(WireError, match=reason) as e:
        wire.decode(frames)
    assert e.value.code is code


def test_unknown_optional_keys_are_ignored():
    message = wire.decode([header(deadline_ms=40, codec={"name": "av2"}), BODY])
    assert message.fields == {} and list(message.tensors) == ["a"]


def test_keys_that_a_peer_thinks_up_are_not_kept():
    before = sys.getallocatedblocks()
    for n in range(200):
        keys = {f"surprise {n} {i}": {f"nested {n} {i}": 0} for i in range(80)}
        wire.decode([header(tensors=[], **keys)])
    assert sys.getallocatedblocks() - before < 2000  # of 32 000 strings


def test_error_text_is_one_short_line():
    text = wire.error(Code.INTERNAL, "a\nb\t" + "c" * 1000).fields["text"]
    assert text.startswith("a b ccc") and len(text) == wire.MAX_ERROR_TEXT
    wire.decode(wire.encode(wire.error(Code.BAD_SCHEMA, "name \ud800 from a peer's JSON")))


# -- fuzz --------------------------------------------------------------------------------------------------------


def _seeds() -> list[list[bytes]]:
    valid = [
        messages.hello(ROBOT, 3),
        messages.infer(observation(5), "s" * 32, 1, 2, 5, 7),
        Message(Kind.PING, fields={"t0": 12345}),
        wire.error(Code.BUSY, "later", "s", 1, 2),
    ]
    return [[bytes(frame) for frame in wire.encode(message)] for message in valid]


def test_ten_thousand_hostile_messages():
    rng = np.random.default_rng(0)
    seeds = _seeds()
    accepted = refused = 0
    tracemalloc.start()
    for n in range(10_000):
        if n % 4:
            frames = mutate(rng, seeds[rng.integers(len(seeds))])
        else:
            frames = noise(rng)
        try:
            message = wire.decode(frames)
        except WireError:
            refused += 1
            continue
        accepted += 1
        assert sum(a.nbytes for a in message.tensors.values()) == sum(map(len, frames[1:]))
        for read in (messages.read_hello, lambda m: messages.read_infer(m, ROBOT)):
            with suppress(WireError):
                read(message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 5000 and accepted > 300  # both sides of the border were visited
    assert peak < 4 << 20
