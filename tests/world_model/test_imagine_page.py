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

from vla_stack.console.access import Access
from vla_stack.verbs.imagine import MOVE, Page, Pair


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
    made.reset(0)
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
    assert json.loads(verdicts.read_text()) == {"seed": 0, "steps": 1, "task": Still.task, "success": True}
