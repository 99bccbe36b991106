"""What console tests share: a small robot, free ports, a browser."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator

from playwright.sync_api import Browser, Page, expect, sync_playwright

from vla_stack.schema import Camera, Dim, RobotSpec

PATIENCE_MS = 60_000  # upper bound of waits; nothing depends on how long they take
CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")

_DIMS = (
    Dim("tcp_x.pos", "m", 0.2, 0.6),
    Dim("tcp_y.pos", "m", -0.3, 0.3),
    Dim("gripper.pos", "ratio", 0, 1, kind="gripper"),
)
ROBOT = RobotSpec("test/three", _DIMS, _DIMS, (Camera("front", 16, 24),), rate_hz=10.0)


def free_port() -> int:
    """A port that is free, and the one after it is."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
                return int(first.getsockname()[1])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), headless=True, args=[*CHROMIUM, "--no-first-run"]
        )
        yield chromium
        chromium.close()


def in_phase(page: Page, *phases: str) -> None:
    """Wait until the page shows one of these phases."""
    page.wait_for_selector(", ".join(f"body[data-phase='{p}']" for p in phases), timeout=PATIENCE_MS)


def measured(page: Page, dim: str) -> float:
    """What the page shows of one dimension of the state, in its unit."""
    return float(page.locator(f"#joints [data-dim='{dim}']").text_content().split()[0])


def until(page: Page, condition, what: str) -> None:
    """Wait for a condition on the page's values, letting the page go on meanwhile."""
    for _ in range(PATIENCE_MS // 20):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never: {what}")


def phase(page: Page) -> str:
    return page.locator("body").get_attribute("data-phase") or ""


def drive(page: Page, keys: tuple[str, ...], condition, what: str, dead_man: str = " ") -> None:
    """Hold the dead-man and keys until a condition holds; the dead-man stays down, the keys come up.

    On a busy computer pictures get old and the robot holds, as it should; then the dead-man is pressed anew.
    """
    for key in (dead_man, *keys):
        page.keyboard.down(key)
    waited = [0]

    def reached() -> bool:
        waited[0] = waited[0] + 1 if phase(page) == "hold" else 0
        if waited[0] > 25:
            page.keyboard.up(dead_man)
            page.wait_for_timeout(200)  # seen by the robot, whose channel keeps the newest message alone
            page.keyboard.down(dead_man)
            waited[0] = 0
        return bool(condition())

    until(page, reached, what)
    for key in keys:
        page.keyboard.up(key)


class Fingers:
    """Two fingers on a phone's page: one for the dead-man, one for everything else. No key, no mouse."""

    def __init__(self, page: Page) -> None:
        self.page, self._cdp, self._held = page, page.context.new_cdp_session(page), False

    def tap(self, selector: str) -> None:
        """Tap with the second finger; the first one stays where it is."""
        expect(self.page.locator(selector)).to_be_enabled()
        at = self._at(selector)
        self._say("touchStart", at)
        self._lift(at)

    def hold(self, held: bool) -> None:
        """Put the first finger on the dead-man, or lift it."""
        self._held = held
        self._say("touchStart" if held else "touchEnd")

    def push(self, pad: str, way: tuple[float, float], condition, what: str) -> None:
        """Hold the dead-man and push a pad until a condition holds; the dead-man stays down."""
        x, y = self._at(pad)
        waited = 1000  # as if the robot had held for long: so it begins
        if self._held:
            self.hold(False)

        def reached() -> bool:
            nonlocal waited
            waited = waited + 1 if phase(self.page) == "hold" else 0
            if waited > 25:  # pictures were old, as on a busy computer: both fingers anew
                if self._held:
                    self.hold(False)
                    self.page.wait_for_timeout(200)
                self.hold(True)
                self._say("touchStart", (x, y))
                self._say("touchMove", (x + way[0], y + way[1]))
                waited = 0
            return bool(condition())

        if phase(self.page) != "hold":
            self.hold(True)
            self._say("touchStart", (x, y))
            self._say("touchMove", (x + way[0], y + way[1]))
        until(self.page, reached, what)
        self._lift((x, y))

    def _lift(self, at: tuple[float, float]) -> None:
        """The second finger, the first one stays."""
        point = {"id": 1, "x": at[0], "y": at[1]}
        self._cdp.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": [point]})

    def _at(self, selector: str) -> tuple[float, float]:
        box = self.page.locator(selector).bounding_box()
        assert box is not None
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def _say(self, kind: str, second: tuple[float, float] | None = None) -> None:
        first = [self._at("#deadman")] if self._held else []
        points = [(0, *p) for p in first] + ([(1, *second)] if second else [])
        touched = [{"id": i, "x": x, "y": y} for i, x, y in points]
        self._cdp.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})


def frames(page: Page, camera: str) -> int:
    return int(page.locator(f"[data-camera='{camera}']").get_attribute("data-frames") or 0)


def pictures_come(page: Page, cameras: tuple[str, ...]) -> None:
    for camera in cameras:
        before = frames(page, camera)
        until(page, lambda c=camera, b=before: frames(page, c) > b + 2, f"pictures of {camera}")


expect.set_options(timeout=PATIENCE_MS)
