"""What a page is shown: as much as it acknowledges, the newest of it, and how old it was."""

import asyncio
import json

import cv2
import numpy as np
import pytest
from aiohttp import WSMsgType
from console_rig import Rig
from hypothesis import given
from hypothesis import strategies as st
from toy_console import browser

from vla_stack.console.feed import HALVINGS, PATIENCE, PICTURES, QUICK_NS, SLOW_NS, STALLED_NS, STATE, Feed, smaller
from vla_stack.console.gateway import STATIC
from vla_stack.schema import Observation

CAMERAS = ("front", "left", "wrist")


def test_a_page_is_sent_the_newest_of_what_it_has_acknowledged():
    feed = Feed()
    stamps = {STATE: 1, "front": 1}
    assert feed.next(stamps) == STATE
    first = feed.sent(STATE, 1, 0, 0)
    assert feed.next(stamps) == "front"
    picture = feed.sent("front", 1, 5, 0)
    for newer in (2, 3, 4):
        assert feed.next({STATE: newer, "front": newer}) is None  # neither has been acknowledged
    assert feed.acknowledged(picture, 9).captured_ns == 5
    assert feed.next({STATE: 4, "front": 4}) == "front"
    feed.sent("front", 4, 6, 10)  # 2 and 3 never go
    assert feed.acknowledged(first, 11) and feed.next({STATE: 4, "front": 4}) == STATE
    assert feed.acknowledged(first, 12) is None and feed.acknowledged(99, 12) is None


@given(st.lists(st.tuples(st.sampled_from(("new", "ack")), st.integers(0, 9)), max_size=80))
def test_however_a_page_acknowledges_little_is_under_way_and_each_camera_has_its_turn(steps):
    feed, stamps, under_way = Feed(), {STATE: 0, **dict.fromkeys(CAMERAS, 0)}, {}
    sent: list[str] = []
    for what, which in steps:
        if what == "new":
            stamps = {kind: stamp + 1 for kind, stamp in stamps.items()}
        elif under_way:
            number = list(under_way)[which % len(under_way)]
            del under_way[number]
            assert feed.acknowledged(number, 0)
        while (kind := feed.next(stamps)) is not None:
            under_way[feed.sent(kind, stamps[kind], 1, 0)] = kind
            sent.append(kind)
        kinds = list(under_way.values())
        assert len(set(kinds)) == len(kinds) and len([k for k in kinds if k != STATE]) <= PICTURES
    pictures = [kind for kind in sent if kind != STATE]
    assert all(len(set(pictures[i : i + 2])) == 2 for i in range(len(pictures) - 1)) or len(pictures) < 2


def test_pictures_get_smaller_on_a_slow_link_and_larger_on_a_quick_one():
    feed, now = Feed(), 0

    def show(took_ns):
        nonlocal now
        number = feed.sent("front", now, 1, now)
        now += took_ns
        feed.acknowledged(number, now)
        return feed.halvings

    assert [show(SLOW_NS + 1) for _ in range(HALVINGS + 2)] == [*range(1, HALVINGS + 1), HALVINGS, HALVINGS]
    shown = 0
    while feed.halvings == HALVINGS:
        show(QUICK_NS - 1)
        shown += 1
    assert shown == PATIENCE * 2**HALVINGS
    assert show(SLOW_NS + 1) == HALVINGS
    assert [show(QUICK_NS - 1) for _ in range(2 * shown)][-2:] == [HALVINGS, HALVINGS - 1]  # tried half as often


def test_what_was_sent_in_another_size_says_nothing_about_this_one():
    feed = Feed()
    numbers = [feed.sent(camera, 1, 1, 0) for camera in CAMERAS]
    for number in numbers:
        feed.acknowledged(number, SLOW_NS + 1)
    assert feed.halvings == 1


def test_a_page_that_acknowledges_nothing_is_noticed():
    feed = Feed()
    feed.sent(STATE, 1, 0, 7)
    assert not feed.stalled(7 + STALLED_NS) and feed.stalled(8 + STALLED_NS)


@pytest.mark.parametrize("halvings", range(HALVINGS + 1))
def test_a_smaller_picture_shows_the_same(halvings):
    image = np.zeros((64, 96, 3), np.uint8)
    image[:, 48:] = 255
    jpeg = cv2.imencode(".jpg", image)[1].tobytes()
    made = cv2.imdecode(np.frombuffer(smaller(jpeg, halvings), np.uint8), cv2.IMREAD_COLOR)
    assert made.shape == (64 >> halvings, 96 >> halvings, 3)
    assert made[:, : made.shape[1] // 4].max() < 40 and made[:, -made.shape[1] // 4 :].min() > 215
    assert smaller(b"no picture", halvings) == b"no picture"


def header(data: bytes) -> dict:
    return json.loads(data[2 : 2 + int.from_bytes(data[:2], "big")])


def test_the_gateway_sends_pictures_by_acknowledgement_and_says_how_old_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_stack.console.feed.STALLED_NS", 10**15)  # however busy the computer is

    async def scenario():
        async with Rig(tmp_path) as rig:
            tick = 0

            def show():
                nonlocal tick
                tick += 1
                picture = np.full((16, 24, 3), tick % 255, np.uint8)
                rig.operator.show(Observation(np.zeros(3, np.float32), {"front": picture}, "", tick, tick))

            async def pictures_until(page, done):
                """Pictures' headers and other messages, while the node goes on."""
                seen = []
                while not done(seen):
                    show()
                    message = await page.receive()
                    if message.type is WSMsgType.BINARY:
                        seen.append(header(message.data))
                    else:
                        seen.append(json.loads(message.data))
                return seen

            def pictures(seen):
                return [m for m in seen if "camera" in m]

            page, other = await rig.page(), await rig.page()
            seen = await pictures_until(page, pictures)
            (first,) = pictures(seen)
            # Another page, which acknowledges, is shown more meanwhile; this one is not.
            theirs = []
            while len(theirs) < 5:
                (got,) = pictures(await pictures_until(other, pictures))
                theirs.append(got["frame"])
                await other.send_str(json.dumps({"type": "seen", "n": got["n"]}))
            assert theirs == sorted(set(theirs))
            await page.send_str(json.dumps({"type": "ping", "t": 1}))
            assert not pictures(await pictures_until(page, lambda m: m and m[-1]["type"] == "pong"))
            newest = theirs[-1]
            await page.send_str(json.dumps({"type": "seen", "n": first["n"]}))
            seen = await pictures_until(page, lambda m: pictures(m) and any(x.get("type") == "shown" for x in m))
            (shown,) = [m for m in seen if m.get("type") == "shown"]
            assert shown["n"] == first["n"] and shown["age_ms"] > 0
            assert pictures(seen)[0]["frame"] >= newest  # what came between was dropped
            states = [m for m in seen if m.get("type") == "state"]
            assert not states  # its first state has not been acknowledged

    asyncio.run(scenario())


LINK = """async () => {
  const { GatewayLink } = await import("/link.js");
  let now = 1000, drawn;
  performance.now = () => now;
  const sent = [];
  window.WebSocket = class {
    static OPEN = 1;
    readyState = 1;
    send(text) { const m = JSON.parse(text); if (m.type !== "ping") sent.push(m); }
  };
  const link = new GatewayLink({ hello() {}, state() {}, picture: () => new Promise((resolve) => (drawn = resolve)) });
  const say = (message) => link.receive(typeof message === "string" ? message : JSON.stringify(message));
  const picture = (n, captured_ms) => {
    const header = new TextEncoder().encode(JSON.stringify({ n, captured_ms, camera: "front", frame: n }));
    const data = new Uint8Array(2 + header.length);
    data.set([0, header.length]);
    data.set(header, 2);
    link.receive(data.buffer);
  };
  const settled = () => new Promise((resolve) => setTimeout(resolve));
  const found = {};
  say({ type: "hello" });
  found.unknown = link.now() === Infinity;
  say({ type: "state", n: 1 });
  picture(2, 70000);
  await settled();
  found.early = [...sent];
  now = 1100;  // it takes 100 ms to draw
  drawn();
  await settled();
  found.late = sent.slice(1);
  now = 1500;
  say({ type: "shown", n: 2, age_ms: 230 });  // at 1100 here: 70230 there, at the latest
  found.clock = link.now();
  picture(3, 70400);
  drawn();
  await settled();
  say({ type: "shown", n: 3, age_ms: 900 });  // this acknowledgement took long: it says less than the one before
  found.again = link.now();
  return found;
}"""


def test_the_page_acknowledges_what_it_has_drawn_and_knows_the_gateway_s_clock():
    with browser() as chromium:
        page = chromium.new_page()

        def fulfil(route):
            script = route.request.url.endswith(".js")
            body = (STATIC / "link.js").read_text() if script else "<!doctype html>"
            route.fulfill(body=body, content_type="text/javascript" if script else "text/html")

        page.route("http://link.test/**", fulfil)
        page.goto("http://link.test/")
        found = page.evaluate(LINK)
    assert found["unknown"] and found["early"] == [{"type": "seen", "n": 1}]  # the state; the picture is not drawn yet
    assert found["late"] == [{"type": "seen", "n": 2}]
    assert found["clock"] == found["again"] == 70230 + 400
