"""Messages and pictures between processes; both ends live in this one."""

import multiprocessing as mp
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from runtime_fakes import robot_spec

from vla_stack.runtime.link import SLOTS, Link, ObservationSlots
from vla_stack.schema import Camera, Observation


@pytest.fixture
def ends():
    a, b = (Link(c) for c in mp.Pipe())
    yield a, b
    a.close()
    b.close()


def test_messages_arrive_in_order(ends):
    a, b = ends
    assert a.post("one", x=1)
    a.send("two", data=b"abc")
    assert b.receive(1.0) == [{"kind": "one", "x": 1}, {"kind": "two", "data": b"abc"}]
    assert b.receive() == []


def test_post_never_waits_for_a_reader_that_does_not_read(ends):
    a, b = ends
    sent = 0
    while a.post("n", data=bytes(1000)):
        sent += 1
    assert 10 < sent < 10_000
    assert len(b.receive()) == sent
    assert a.post("n")


def test_a_large_message_is_refused_by_post(ends):
    assert not ends[0].post("large", data=bytes(5000))


def test_a_closed_end_is_end_of_file(ends):
    a, b = ends
    a.post("last")
    a.close()
    assert [m["kind"] for m in b.receive()] == ["last"]
    with pytest.raises(EOFError):
        b.receive()
    with pytest.raises(EOFError):
        b.send("reply")


def observation(rng, spec) -> Observation:
    images = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in spec.cameras}
    return Observation(rng.normal(size=2).astype(np.float32), images, "pick", 7, 123)


def test_observations_cross_unchanged_and_slots_are_not_reused_before_they_are_free():
    spec = robot_spec(cameras=(Camera("front", 5, 7), Camera("wrist", 3, 3)))
    writer = ObservationSlots(spec)
    reader = ObservationSlots(spec, writer.name)
    rng = np.random.default_rng(0)
    sent = [observation(rng, spec) for _ in range(SLOTS)]
    notes = [writer.put(o) for o in sent]
    assert writer.put(sent[0]) is None
    for obs, note in zip(sent, notes, strict=True):
        got = reader.get(note)
        np.testing.assert_array_equal(got.state, obs.state)
        for camera, image in obs.images.items():
            np.testing.assert_array_equal(got.images[camera], image)
        assert (got.task, got.step, got.t_capture_ns) == ("pick", 7, 123)
    writer.free(notes[2]["slot"])
    assert writer.put(sent[0])["slot"] == notes[2]["slot"]
    reader.close()
    writer.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(writer.name)
