"""Pictures in shared memory are the pictures, or nothing."""

import numpy as np
import pytest
from serving_fakes import ROBOT, WAIT_S, TickPolicy, barrier, codes, collect, observation

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
    first, notes = observation(7), []
    for step in range(SLOTS):
        notes.append(robot.put(observation(7 + step).images))
    got = server.get(*notes[0])
    for camera, image in first.images.items():
        np.testing.assert_array_equal(got[camera], image)
    robot.put(observation(99).images)  # around: into the first slot
    assert server.get(*notes[0]) is None
    assert int(server.get(*notes[1])["front"][0, 0, 0]) == 8
    assert int(got["front"][0, 0, 0]) == 7  # a copy


def test_a_slot_that_changes_while_it_is_read_is_not_believed(rings):
    robot = PixelRing(ROBOT)
    server = PixelRing(ROBOT, robot.name)
    note = robot.put(observation(1).images)

    class Overtaken(dict):
        def items(self):
            for _ in range(SLOTS):
                robot.put(observation(2).images)
            return super().items()

    server._rows[note[0]] = Overtaken(server._rows[note[0]])
    assert server.get(*note) is None


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
