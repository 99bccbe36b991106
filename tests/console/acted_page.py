"""The operator's page in a browser, with the test in place of gateway and robot: what it shows, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any

import cv2
import numpy as np
from playwright.sync_api import Browser, BrowserContext, Page, expect

from vla_stack.console.access import Access
from vla_stack.console.gateway import STATIC
from vla_stack.key_map import as_script
from vla_stack.schema import Camera, Dim, RobotSpec

PORT = 8765  # nothing listens there: every request is answered here
ACCESS = Access("127.0.0.1", PORT, False)
_TOOL = [Dim(f"tcp_{axis}.pos", "m", -0.6, 0.6) for axis in "xyz"]
_TOOL += [Dim("tcp_yaw.pos", "rad", -3, 3, kind="angle"), Dim("gripper.pos", "ratio", 0, 1, kind="gripper")]
ARM = RobotSpec("sim/arm", tuple(_TOOL), tuple(_TOOL), (Camera("front", 64, 64), Camera("wrist", 64, 64)), rate_hz=20.0)
RECORDING = {"episodes": 3, "successes": 2, "human_frames": 120, "recovery_frames": 40, "correction_frames": 60}
RECORDING |= {"quota": 0, "pending": None, "error": "", "disk_free": 9e10}
AGE_MS = -1e9  # of every picture: none gets old while a busy machine draws
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class ActedPage:
    """One page; ``said`` holds what it says, ``show`` changes what it is told."""

    def __init__(self, chromium: Browser, width: int, height: int, mode: str = "rac", touch: bool = True) -> None:
        self.said: list[dict[str, Any]] = []
        self.mode, self.state = mode, self._state()
        self._sent, self._socket, self._stop_socket = 0, None, None
        self.stop_error: str | None = ""  # answer to a STOP; None: there is none
        self.context: BrowserContext = chromium.new_context(
            viewport={"width": width, "height": height}, has_touch=touch, is_mobile=touch
        )
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.route("**/*", self._serve)
        self.page.route_web_socket(re.compile("/ws$"), self._connect)
        self.page.route_web_socket(re.compile("/stop$"), self._connect_stop)
        self.page.goto(f"http://127.0.0.1:{PORT}/")
        expect(self.page.locator("[data-frames]")).to_have_count(2)
        self._touch = self.context.new_cdp_session(self.page)

    def _state(self) -> dict[str, Any]:
        return {
            **{"type": "state", "phase": "auto", "run": "run", "why": "", "resumes": "auto", "tick": 84, "stage": 1},
            **{"instruction": "pick up the red cube and lift it", "lease": "you", "holder": 1, "asked": None, "you": 1},
            **{"consoles": 1, "recording": dict(RECORDING), "in_dist_score": 0.8, "cmd_age_ms": 12.0, "drops": 0},
            **{"state": [0.4, 0.1, 0.2, 0.3, 1.0], "action": [0.4, 0.1, 0.2, 0.3, 1.0], "stops": 0},
        }

    def show(self, **changes: Any) -> None:
        """Tell the page, and wait until it shows that."""
        self.state |= changes
        self._send({**self.state, "n": self._number()})
        self.page.wait_for_selector(f"body[data-phase='{self.state['phase']}']")
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def fingers(self, kind: str, *points: tuple[float, float]) -> None:
        """A touch event with these fingers on the screen; each keeps its place in the list."""
        touched = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self._touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})

    def lift(self, finger: int, at: tuple[float, float]) -> None:
        """Lift one finger by its place in the list; the others stay."""
        point = {"x": at[0], "y": at[1], "id": finger}
        self._touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": [point]})

    def centre(self, selector: str) -> tuple[float, float]:
        box = self.page.locator(selector).bounding_box()
        assert box is not None
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def hand(self) -> dict[str, Any]:
        """The next thing that the page says about the hand, from now on."""
        before = len(self.said)
        while not (new := [m for m in self.said[before:] if m["type"] == "teleop"][1:]):
            self.page.wait_for_timeout(10)
        return new[-1]

    def answer_stop(self) -> None:
        """As the gateway and the e-stop's own process do."""
        if self.stop_error is not None:
            self._send({"type": "stopped", "error": self.stop_error})
            self._stop_socket.send(json.dumps({"error": self.stop_error}))

    def cut(self, stop_line: bool = True) -> None:
        """Close the connection to the gateway, and the e-stop's own."""
        for socket in (self._socket, self._stop_socket)[: 1 + stop_line]:
            socket.close()
        self.page.wait_for_selector("body[data-phase='offline']")

    def close(self) -> None:
        self.context.close()
        assert not self.errors

    def _serve(self, route: Any) -> None:
        path = re.sub(r"^https?://[^/]+", "", route.request.url)
        headers = {"Content-Security-Policy": ACCESS.policy(f"127.0.0.1:{PORT}")}
        if path == "/keys.js":
            route.fulfill(body=as_script(), content_type="text/javascript", headers=headers)
        elif path == "/heat":
            route.fulfill(json={"x": [0.2, 0.6], "y": [-0.3, 0.3], "counts": [[0, 1], [2, 0]], "frames": 3})
        else:
            file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
            route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix], headers=headers)

    def _connect(self, socket: Any) -> None:
        self._socket = socket
        socket.on_message(self._hear)
        stages = ["reached", "grasped", "lifted"]
        about = {"type": "hello", "you": 1, "robot": ARM.to_json(), "stages": stages, "mode": self.mode}
        self._send({**about, "stop_port": PORT + 1})
        self._send({**self.state, "n": self._number()})
        for i, camera in enumerate(("front", "wrist")):
            self._picture(camera, i)

    def _picture(self, camera: str, i: int) -> None:
        image = np.full((320, 320, 3), 60 + 60 * i, np.uint8)
        cv2.circle(image, (160, 160), 90, (40, 90, 200), -1)
        header = {"n": self._number(), "camera": camera, "frame": 1, "captured_ms": 1000.0}
        packed = json.dumps(header).encode()
        self._socket.send(len(packed).to_bytes(2, "big") + packed + cv2.imencode(".jpg", image)[1].tobytes())

    def _hear(self, text: str) -> None:
        message = json.loads(text)
        self.said.append(message)
        if message["type"] == "seen" and message["n"] > 1:
            self._send({"type": "shown", "n": message["n"], "age_ms": AGE_MS}) if message["n"] in (2, 3) else None
        elif message["type"] == "estop":
            self.answer_stop()
        elif message["type"] == "event":
            self._send({"type": "ack", "id": message["id"], "ok": True, "error": "", "phase": self.state["phase"]})

    def _connect_stop(self, socket: Any) -> None:
        self._stop_socket = socket
        socket.on_message(lambda message: self.said.append({"type": "own line", "what": message}))

    def _number(self) -> int:
        self._sent += 1
        return self._sent

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message))
