"""Pictures in shared memory are the pictures, or nothing."""

import numpy as np
import pytest
from serving_fakes import ROBOT, WAIT_S, GatedPolicy, TickPolicy, barrier, codes, collect, observation

from vla_stack.schema import Chunks
from vla_stack.serving import messages, pixels, wire
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.pixels import SLOTS, PixelRing


class SeeingPolicy(TickPolicy):
    """Answers with the brightness of the pictures."""

    def infer(self, observations, seeds):
        seen = [sum(float(image.mean()) for image in o.images.values()) / len(o.images) for o in observations]
        return Chunks(super().infer(observations, seeds).actions * 0 + np.array(seen, np.float32)[:, None, None])


@pytest.fixture
def rings(tmp_path, monkeypatch):
    """A folder in place of shared memory."""
    monkeypatch.setattr(pixels, "FOLDER", tmp_path)
    return tmp_path


def test_what_is_put_is_got_until_it_is_overwritten(rings):
    robot = PixelRing(ROBOT)
    server = PixelRing(ROBOT, robot.name)
    robot.unlink()
    assert list(rings.iterdir()) == []
    notes = [robot.put(observation(7 + step).images) for step in range(SLOTS)]
    got = server.get(*notes[0])
    for camera, image in observation(7).images.items():
        np.testing.assert_array_equal(got[camera], image)
        assert not got[camera].flags.writeable
    assert server.holds(*notes[0])
    robot.put(observation(99).images)  # around: into the first slot
    assert server.get(*notes[0]) is None and not server.holds(*notes[0])
    assert int(server.get(*notes[1])["front"][0, 0, 0]) == 8


def test_a_slot_is_invalid_while_it_is_written(rings, monkeypatch):
    robot = PixelRing(ROBOT)
    server = PixelRing(ROBOT, robot.name)
    note, copy, seen = robot.put(observation(1).images), np.copyto, []
    monkeypatch.setattr(np, "copyto", lambda *a: seen.append(server.get(0, note[1] + 2 * SLOTS)) or copy(*a))
    for _ in range(SLOTS):
        last = robot.put(observation(2).images)
    assert last == (0, note[1] + 2 * SLOTS) and server.holds(*last)
    assert seen == [None] * (SLOTS * len(ROBOT.cameras))


def test_a_chunk_of_pictures_that_were_overwritten_meanwhile_is_not_sent(serve, connect, tmp_path):
    policy = GatedPolicy()
    client = connect(serve(policy, f"ipc://{tmp_path}/sock").endpoint)
    client.request(observation(1), 0, 0, 0, 0)
    assert policy.entered.acquire(timeout=WAIT_S)
    for _ in range(SLOTS):
        client._ring.put(observation(2).images)
    policy.gate.release()
    assert codes(collect(client, 1)) == [("EXPIRED", 0)]


@pytest.mark.parametrize("slot,sequence", [(-1, 2), (SLOTS, 2), (1, 0), (1, 2), (0, 1), (0, 4), (2**62, 2)])
def test_what_was_never_there(rings, slot, sequence):
    robot = PixelRing(ROBOT)
    robot.put(observation(1).images)
    assert PixelRing(ROBOT, robot.name).get(slot, sequence) is None


def test_only_the_own_ring_of_the_right_size_is_opened(rings):
    name = f"vla-{'0' * 32}"
    (rings / name).write_bytes(b"\0" * 100)
    (rings / name.replace("0", "1")).symlink_to(rings / name)
    for wrong in (name, name.replace("0", "1"), f"vla-{'2' * 32}", "../etc/passwd", "vla-" + "g" * 32, name + "\n"):
        with pytest.raises(OSError):
            PixelRing(ROBOT, wrong)


def test_pictures_reach_the_policy_through_memory(serve, connect, tmp_path):
    server = serve(SeeingPolicy(), f"ipc://{tmp_path}/sock")
    client = connect(server.endpoint)
    assert client._ring is not None and not (pixels.FOLDER / client._ring.name).exists()
    sent = []
    send, client._send = client._send, lambda message: sent.append(message) or send(message)
    for rid in range(2 * SLOTS):
        assert client.request(observation(rid), rid, 0, rid, 0)
        assert collect(client, 1)[0].actions[0, 0] == rid
    assert all(list(message.tensors) == ["observation.state"] for message in sent)


def test_without_memory_they_are_sent(serve, connect, tmp_path, monkeypatch):
    server = serve(SeeingPolicy(), f"ipc://{tmp_path}/sock")
    monkeypatch.setattr(pixels, "FOLDER", tmp_path / "missing")
    client = connect(server.endpoint)
    assert client._ring is None
    assert client.request(observation(5), 0, 0, 0, 0) and collect(client, 1)[0].actions[0, 0] == 5


def test_a_server_that_cannot_open_it_is_sent_pictures(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("vla_stack.serving.reception.PixelRing", lambda *_: (_ for _ in ()).throw(OSError()))
    client = PolicyClient(serve(SeeingPolicy(), f"ipc://{tmp_path}/sock").endpoint)
    client.hello(ROBOT, WAIT_S)
    assert client._ring is None and client._offered is None
    assert client.request(observation(6), 0, 0, 0, 0) and collect(client, 1)[0].actions[0, 0] == 6
    client.close()


def test_overwritten_or_unknown_memory_is_refused(serve, connect, tmp_path):
    server = serve(SeeingPolicy(), f"ipc://{tmp_path}/sock")
    client = connect(server.endpoint)
    put = client._ring.put
    client._ring.put = lambda images: (put(images)[0], 1000)
    assert client.request(observation(1), 0, 0, 0, 0)
    assert codes(collect(client, 1)) == [("EXPIRED", 0)]
    client._ring.put = put
    assert client.request(observation(3), 1, 0, 0, 0) and collect(client, 1)[0].actions[0, 0] == 3
    assert barrier(client) == []


def test_a_slot_without_a_ring_is_refused():
    message = messages.infer(observation(), "s", 0, 0, 0, 0, pixels=(0, 2))
    with pytest.raises(wire.WireError, match="no longer in shared memory"):
        messages.read_infer(wire.decode(wire.encode(message)), ROBOT)
