"""The page of `vla imagine`: who may act, and what a held key does."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientSession, CookieJar, web
from aiohttp.test_utils import unused_port
from toy_console import browser, until

from vla_stack.console.access import Access
from vla_stack.key_map import as_script
from vla_stack.verbs.imagine import MOVE, STATIC, Page, Pair


class Still:
    """A robot that shows its command."""

    task = "pick up the red cube"

    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"agent_pos": np.array([0.4, 0, 0.2, 0, 1, 0], np.float32)}, {"is_success": False, "guards": ()}

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        self.actions.append(action)
        return {}, 0.0, False, False, {"is_success": True, "guards": ("latent",)}

    def render(self) -> np.ndarray:
        return np.zeros((8, 16, 3), np.uint8)


def pair() -> Pair:
    made = Pair.__new__(Pair)
    made.imagined, made.simulated = Still(), Still()  # type: ignore[assignment]
    made.low, made.high = np.full(5, -1, np.float32), np.full(5, 1, np.float32)
    made.model = "toy"
    made.reset(7)
    return made


def test_only_an_invited_page_acts_and_both_robots_do_the_same(tmp_path: Path) -> None:
    asyncio.run(visit(tmp_path))


async def visit(tmp_path: Path) -> None:
    port, robots = unused_port(), pair()
    access, verdicts = Access("127.0.0.1", port, False), tmp_path / "out" / "verdicts.jsonl"
    base, origin = f"http://127.0.0.1:{port}", {"Origin": f"http://127.0.0.1:{port}"}
    keys = {"x": 1, "y": 0, "z": -1, "yaw": 0, "grip": 0}
    with ThreadPoolExecutor(1) as thread:
        runner = web.AppRunner(Page(robots, thread, access, verdicts).app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
            for address in ("/", "/act?token=x", "/static/imagine.js", "/?token=x"):
                method = browser.post if address.startswith("/act") else browser.get
                async with method(base + address, json=keys, headers=origin) as reply:
                    assert reply.status == 403
            async with browser.get(access.invite()) as reply:
                assert reply.status == 200
            async with browser.get(base) as reply:
                assert "Imagined robot" in await reply.text() and "default-src 'self'" in str(reply.headers)
            async with browser.post(f"{base}/act", json=keys, headers={"Origin": "http://evil.example"}) as reply:
                assert reply.status == 403
            for bad in ({"x": 1}, keys | {"x": 7}, keys | {"x": "nan"}, []):
                async with browser.post(f"{base}/act", json=bad, headers=origin) as reply:
                    assert reply.status == 400
            async with browser.post(f"{base}/reset", json={}, headers=origin) as reply:
                assert (await reply.json())["seed"] == 7  # the scene that the command named
            async with browser.post(f"{base}/act", json=keys, headers=origin) as reply:
                news = await reply.json()
            async with browser.post(f"{base}/verdict", json={"success": True}, headers=origin) as reply:
                assert reply.status == 200
        await runner.cleanup()
    assert (
        news["step"] == 1 and news["guards"] == ["latent"] and news["success"] == {"imagined": True, "simulated": True}
    )
    assert news["pictures"]["imagined"].startswith("data:image/png;base64,")
    (one,), (two,) = robots.imagined.actions, robots.simulated.actions  # type: ignore[attr-defined]
    np.testing.assert_allclose(one, [0.4 + MOVE, 0, 0.2 - MOVE, 0, 0], rtol=1e-6)
    assert np.array_equal(one, two)
    told = json.loads(verdicts.read_text())
    assert told == {
        **{"seed": 7, "steps": 1, "task": Still.task, "success": True, "model": "toy", "guards": ["latent"]},
        "shown": {"imagined": True, "simulated": True},
    }


KEYS = """(events) => { for (const [type, key, code, more] of events)
  document.body.dispatchEvent(new KeyboardEvent(type, {bubbles: true, key, code, ...more})); }"""
SHIFT = {"shiftKey": True}


def test_a_key_that_comes_up_under_another_name_is_let_go() -> None:
    acts: list[dict[str, float]] = []
    pictures = dict.fromkeys(("imagined", "simulated"), "data:,")
    news = {"task": "pick", "seed": 0, "step": 0, "guards": [], "success": {}, "over": {}, "pictures": pictures}

    def serve(route: Any) -> None:
        path = route.request.url.removeprefix("http://imagine.test")
        if route.request.method == "POST":
            acts.extend([route.request.post_data_json] if path == "/act" else [])
            route.fulfill(json=news)
        elif path == "/keys.js":
            route.fulfill(body=as_script(), content_type="text/javascript")
        else:
            file = STATIC / ("imagine.html" if path == "/" else path.removeprefix("/static/"))
            kind = {".js": "text/javascript", ".css": "text/css"}.get(file.suffix, "text/html")
            route.fulfill(body=file.read_bytes(), content_type=kind)

    with browser() as chromium:
        page = chromium.new_page()
        page.route("**/*", serve)
        page.goto("http://imagine.test/")
        page.wait_for_function("document.getElementById('task').textContent === 'pick'")

        def asked(*events: tuple[Any, ...]) -> dict[str, float]:
            """The first thing that is asked for after these and one that may be under way."""
            page.evaluate(KEYS, [list(e) for e in events])
            before = len(acts)
            until(page, lambda: len(acts) > before + 1, "a step")
            return acts[-1]

        up = ("keydown", "q", "KeyQ")
        assert asked(("keydown", " ", "Space"), ("keydown", "a", "KeyA"), up, ("keyup", "ä", "KeyA"))["z"] == 1
        shifted = asked(("keydown", "Shift", "ShiftLeft", SHIFT), ("keydown", "<", "Comma", SHIFT))
        assert (shifted["z"], shifted["yaw"]) == (1, 1)
        both = asked(("keyup", "Shift", "ShiftLeft"), ("keyup", ",", "Comma"), ("keydown", "E", "KeyE"))
        assert (both["z"], both["yaw"]) == (1, 0)
