"""Pictures on their way: shrunk as the policy reads them, compressed, and hostile."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from serving_fakes import HORIZON, ROBOT, WAIT_S, TickPolicy, collect, observation

from vla_stack.errors import UserError
from vla_stack.images import as_read, fit_image, touching
from vla_stack.schema import Camera, Chunks, Observation, PolicySpec, Reading
from vla_stack.serving import jpeg, messages, pictures, wire
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.pictures import How, Pictures
from vla_stack.serving.wire import Jpeg, WireError

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "bench"))
from hostile import mutate

WIDE = replace(ROBOT, cameras=(Camera("front", 48, 64), Camera("wrist", 30, 40)))
READS = {"front": Reading(24, 32, "linear"), "wrist": Reading(20, 20, "area")}


class SeeingPolicy(TickPolicy):
    """Keeps what it was shown, made what it reads."""

    def __init__(self, reads=READS):
        self.spec = PolicySpec(WIDE, HORIZON, "n1", "m1", reads=reads)
        self.seen: list[dict[str, np.ndarray]] = []
        self.shapes: list[tuple[int, ...]] = []

    def infer(self, observations, seeds):
        for o in observations:
            o.check(self.spec.robot, self.spec.reads)
            self.shapes.append(o.images["front"].shape)
            own = {c.name: Reading(c.height, c.width, "area") for c in self.spec.robot.cameras} | dict(self.spec.reads)
            self.seen.append({camera: as_read(image, own[camera]) for camera, image in o.images.items()})
        return Chunks(np.zeros((len(observations), HORIZON, len(ROBOT.action)), np.float32))


def scene(robot=WIDE, seed: int = 0) -> Observation:
    """Something with edges and colours, as a camera sees it."""
    rng = np.random.default_rng(seed)
    noise = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in robot.cameras}
    images = {camera: cv2.GaussianBlur(image, (5, 5), 2) for camera, image in noise.items()}
    return Observation(np.array([0.5, 1.0], np.float32), images, "pick")


def ask(client: PolicyClient, obs: Observation, rid: int = 0) -> object:
    assert client.request(obs, rid, 0, 0, 0)
    return collect(client, 1)[0]


@pytest.fixture
def through(serve):
    """``through(policy, form)`` is a client of a server with that policy, which sends pictures in that form."""
    clients = []

    def connect(policy, form):
        client = PolicyClient(serve(policy).endpoint, pictures=Pictures.parse(form))
        clients.append(client)
        client.hello(WIDE, WAIT_S)
        policy.seen.clear(), policy.shapes.clear()
        return client

    yield connect
    for client in clients:
        client.close()


def test_where_a_picture_is_shrunk_makes_no_difference(through):
    seen = {}
    for form in ("camera", "raw"):
        policy = SeeingPolicy()
        ask(through(policy, form), scene())
        seen[form] = policy.seen[0]
        assert policy.shapes == [(48, 64, 3) if form == "camera" else (24, 32, 3)]
    for camera, image in seen["camera"].items():
        np.testing.assert_array_equal(seen["raw"][camera], image)


def test_compressed_pictures_are_nearly_the_same(through):
    policy, obs = SeeingPolicy(), scene()
    client = through(policy, "jpeg:98")
    assert client.sends == Pictures(How.JPEG, 98)
    ask(client, obs)
    difference = policy.seen[0]["front"].astype(int) - as_read(obs.images["front"], READS["front"])
    assert 0 < np.abs(difference).max() and np.abs(difference).mean() < 2
    np.testing.assert_array_equal(policy.seen[0]["wrist"], as_read(obs.images["wrist"], READS["wrist"]))  # no shorter


def test_a_server_of_before_gets_what_the_cameras_give(through, monkeypatch):
    welcome = messages.welcome

    def before(spec, *args):
        message = welcome(replace(spec, reads={}), *args)
        return message._replace(fields={k: v for k, v in message.fields.items() if k != "codecs"})

    monkeypatch.setattr("vla_stack.serving.reception.messages.welcome", before)
    policy = SeeingPolicy()
    client = through(policy, "jpeg")
    assert client.sends.how is How.RAW
    ask(client, scene())
    assert policy.shapes == [(48, 64, 3)]


def test_on_this_machine_pictures_go_as_they_are(through):
    client = through(SeeingPolicy(), "auto")
    assert client.sends.how is How.CAMERA


def test_over_a_network_the_link_is_measured(through, monkeypatch):
    monkeypatch.setattr("vla_stack.serving.client.is_local", lambda _: False)
    sent = []
    monkeypatch.setattr("vla_stack.serving.client.choose", lambda *a: sent.append(a) or Pictures(How.JPEG, 80))
    policy = SeeingPolicy()
    client = through(policy, "auto")
    assert client.sends == Pictures(How.JPEG, 80) and len(sent) == 1
    ask(client, scene())
    assert policy.shapes == [(24, 32, 3)]


@pytest.mark.parametrize(("transfer", "how"), [(0.001, How.RAW), (0.0026, How.RAW), (0.0028, How.JPEG), (1, How.JPEG)])
def test_the_form_that_is_across_sooner_is_chosen(transfer, how):
    assert pictures.choose(transfer, 0.002).how is how


@pytest.mark.parametrize("text", ["png", "jpeg:0", "jpeg:101", "jpeg:", "raw:3", "jpeg:9x", "", "AUTO"])
def test_forms_that_there_are_not(text):
    if text == "jpeg:":
        assert Pictures.parse(text) == Pictures(How.JPEG)
        return
    with pytest.raises(UserError, match="--pictures"):
        Pictures.parse(text)


def test_a_size_that_was_not_agreed_on_is_refused(through):
    policy = SeeingPolicy()
    client = through(policy, "jpeg")
    client.policy = replace(client.policy, reads={**READS, "front": Reading(22, 30, "area")})
    error = ask(client, scene())
    assert error.code == "BAD_SCHEMA" and "of no size agreed on" in error.text and not policy.seen


def test_readings_survive_the_wire_and_unknown_filters_are_left_out():
    policy = SeeingPolicy().spec
    message = wire.decode([bytes(f) for f in wire.encode(messages.welcome(policy, "sid", 0))])
    assert messages.read_welcome(message) == policy and message.fields["codecs"] == "jpeg"
    body = policy.to_json()
    body["reads"]["wrist"][2] = "lanczos"
    assert set(PolicySpec.from_json(body).reads) == {"front"}
    del body["reads"]
    assert PolicySpec.from_json(body).reads == {}


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (448, 448), (1080, 1920)])
def test_what_touches_a_frame_is_not_shrunk_again(size):
    reading = touching(size, (224, 224))
    assert max(reading.height, reading.width) == 224
    assert touching((reading.height, reading.width), (224, 224)) is None
    image = np.zeros((*size, 3), np.uint8)
    made = as_read(image, reading)
    assert made.shape == (reading.height, reading.width, 3) and as_read(made, reading) is made
    assert touching((224, 168), (224, 224)) is None and touching((100, 90), (224, 224)) is None


def test_area_is_the_filter_of_datasets():
    image = scene().images["front"]
    np.testing.assert_array_equal(as_read(image, Reading(20, 20, "area")), fit_image(image, 20, 20))


# -- hostile files -----------------------------------------------------------------------------------------------


IMAGE = scene(replace(WIDE, cameras=(Camera("front", 40, 56),))).images["front"]
FILE = jpeg.compress(IMAGE, 90)
DATA = bytes(FILE.data)


def encoded(image, *how, kind=".jpg"):
    return cv2.imencode(kind, image, how)[1].tobytes()


def with_size(height: int, width: int) -> bytes:
    at = DATA.index(b"\xff\xc0") + 5
    return DATA[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + DATA[at + 4 :]


SCAN = DATA[DATA.index(b"\xff\xda") : -2]
EXIF = b"\xff\xe1\x00\x22Exif\x00\x00" + bytes.fromhex("49492a0008000000010012010300010000000600") + bytes(6)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (with_size(65500, 65500), "is not 40x56"),  # 12.9 GB of pixels in a kilobyte
        (with_size(0, 56), "is not 40x56"),
        (with_size(56, 40), "is not 40x56"),
        (encoded(IMAGE[:20]), "is not 40x56"),
        (encoded(IMAGE, cv2.IMWRITE_JPEG_PROGRESSIVE, 1), "0xc2"),
        (encoded(IMAGE[..., 0]), "8 bits of three colours"),
        (encoded(IMAGE, kind=".png"), "begin and end"),
        (b"", "begin and end"),
        (b"\xff\xd8\xff\xd9", "no picture"),
        (DATA[:-40], "begin and end"),
        (DATA[:60] + b"\xff\xd9", "cut off"),
        (DATA[:-2] + SCAN * 1000 + b"\xff\xd9", "more than one scan"),
        (DATA[:2] + EXIF + DATA[2:], "0xe1"),  # would be turned by 90 degrees
        (DATA[:2] + b"\0" + DATA[2:], "between its segments"),
        (DATA[:2] + DATA[DATA.index(b"\xff\xc0") :][:19] + DATA[2:], "8 bits of three colours"),  # two headers
        (DATA.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"), "8 bits"),
    ],
)
def test_files_that_the_decoder_never_sees(monkeypatch, data, reason):
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(WireError, match=reason):
        jpeg.expand(Jpeg(IMAGE.shape, data))


def test_a_thousand_damaged_files_end_in_pixels_or_a_refusal(capfd):
    rng, pixels, refused = np.random.default_rng(0), 0, 0
    for n in range(1000):
        damaged = bytearray(DATA)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged) - 2)] = rng.integers(256)
        if n % 3 == 0:
            damaged = damaged[: rng.integers(len(damaged))] + b"\xff\xd9"
        if n % 7 == 0:
            damaged[int(rng.integers(len(damaged))) : 0] = rng.bytes(int(rng.integers(1, 9)))
        try:
            image = jpeg.expand(Jpeg(IMAGE.shape, memoryview(bytes(damaged))))
        except WireError:
            refused += 1
            continue
        pixels += 1
        assert image.shape == IMAGE.shape and image.dtype == np.uint8
    capfd.readouterr()  # libjpeg says on stderr what it thinks of them
    assert pixels > 200 and refused > 50


def test_what_the_wire_says_of_a_compressed_picture():
    message = wire.Message(wire.Kind.INFER, pictures={"a": FILE})
    frames = [bytes(f) for f in wire.encode(message)]
    back = wire.decode(frames)
    assert back.pictures["a"].shape == IMAGE.shape and bytes(back.pictures["a"].data) == DATA and not back.tensors
    for frame in (b"", bytes(IMAGE.nbytes + 1)):
        with pytest.raises(WireError, match="its pixels are 6720"):
            wire.decode([frames[0], frame])
    for shape in ((40, 56), (40, 56, 4), (4000, 4000, 3)):
        with pytest.raises(WireError):
            wire.encode(wire.Message(wire.Kind.INFER, pictures={"a": Jpeg(shape, DATA)}))


def test_state_cannot_be_a_picture():
    sent = messages.infer(observation(), "s", 0, 1, 0, 0)
    tensors = {k: v for k, v in sent.tensors.items() if k != "observation.state"}
    hostile = sent._replace(tensors=tensors, pictures={"observation.state": FILE})
    with pytest.raises(WireError, match="'observation.state' is missing"):
        messages.read_infer(wire.decode(wire.encode(hostile)), ROBOT)


def test_noise_that_is_no_shorter_stays_raw():
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    made, compressed = pictures.sendable({"front": noise}, {}, Pictures(How.JPEG, 100))
    assert compressed == {} and made["front"] is noise


def test_mutated_requests_with_pictures():
    rng, read = np.random.default_rng(1), 0
    good = messages.infer(
        scene(), "s" * 32, 1, 2, 5, 7, pictures={c: jpeg.compress(i, 90) for c, i in scene().images.items()}
    )
    frames = [bytes(frame) for frame in wire.encode(good)]
    for _ in range(500):
        with suppress(WireError):
            messages.read_infer(wire.decode(mutate(rng, frames)), WIDE)
            read += 1
    assert read > 5
