"""The operator's plane under load: the e-stop while pages flood the gateway, and the shown age on a slow link.

    python tools/bench/console_flood.py [--stops 100] [--seconds 20] [--only stop|age]

Stop: a robot node with its control process (50 Hz, a driver that notes when it is stopped), a gateway and the e-stop's
process, each as in ``vla console``. One page asks for stops by the e-stop's line, and rearms; then again while eight
browsers queue 100 000 commands (``pages.py``, at the lowest priority). A stop is in force when the driver's ``stop`` is
called. Afterwards: how soon the gateway answers a page.

Age: a real page in Chromium behind a proxy that passes a tenth of the bytes per second that the pictures have at their
full size and rate, and keeps whatever it is given. The ages that the page paints are compared with the time since the
pictures that it shows were captured. Both on one machine, whose clock both read.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pages
from attack_targets import ROBOT

from results import Check, parser, write
from vla_stack.console.access import Access
from vla_stack.console.door import opened
from vla_stack.console.gateway import About, Gateway
from vla_stack.runtime.driver import Capabilities
from vla_stack.runtime.link import Link
from vla_stack.runtime.node import Operator, RobotNode
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.operator_port import OperatorPort
from vla_stack.runtime.video_port import QUALITY
from vla_stack.schema import Camera, Observation, RobotSpec
from vla_stack.verbs.console import stop_line

COMMANDS, FLOOD_S = 100_000, 60.0
TENTH, CAMERAS, SIZE, RATE_HZ = 0.1, ("front", "wrist"), (240, 320), 20.0
SETTLE_S = 3.0


# -- the e-stop --------------------------------------------------------------------------------------------------------


class Arm:
    """A robot that does nothing; the time of each stop is appended to a file."""

    capabilities = Capabilities()
    spec = ROBOT

    def __init__(self, note: Path) -> None:
        self._note, self._at = note, np.zeros(2, np.float32)

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def hold(self) -> None: ...

    def read(self) -> Observation:
        return Observation(self._at, {}, "", 0, time.monotonic_ns())

    def write(self, action: Any) -> Any:
        return action

    def stop(self) -> None:
        with self._note.open("ab") as f:
            f.write(time.monotonic_ns().to_bytes(8, "big"))


def node_process(pipe: Any, note: Path, endpoint: str) -> None:
    facts = {"recording": {"pending": None, "error": ""}}
    with RobotNode(None, partial(Arm, note), operator=Operator(endpoint)) as node:
        node.tell(**facts)
        pipe.send("ready")
        ended = threading.Event()
        threading.Thread(target=_abort_at_end, args=(pipe, node, ended), daemon=True).start()
        while not ended.is_set():
            node.run_episode(0, 10**9, mode="teleop")


def _abort_at_end(pipe: Any, node: RobotNode, ended: threading.Event) -> None:
    with suppress(EOFError):
        pipe.recv()
    ended.set()
    while True:  # again and again, as an episode that only begins now would not notice
        node.abort()
        time.sleep(0.1)


def gateway_process(pipe: Any, robot: RobotSpec, endpoint: str, access: Access, port: int) -> None:
    """A gateway at ``port`` whose pages know it as ``access`` says."""

    async def serve() -> None:
        gateway = Gateway(OperatorClient(endpoint), About(robot, (), "teleop", Path(endpoint[6:]).parent), access)
        async with opened(gateway.app(), gateway.door, "127.0.0.1", port):
            pipe.send("ready")
            over = asyncio.Event()
            asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
            await over.wait()

    asyncio.run(serve())


@contextmanager
def process(main: Callable[..., None], *args: Any) -> Iterator[Any]:
    """A process that has said that it is ready, told to end afterwards by the end of its pipe."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    running = context.Process(target=main, args=(theirs, *args))
    running.start()
    theirs.close()
    assert ours.poll(60.0)
    ours.recv()
    try:
        yield running
    finally:
        ours.close()
        running.join(10.0)
        running.kill()
        running.join()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Driver:
    """The page that drives: says that it is there, rearms, and knows the phase."""

    def __init__(self, access: Access) -> None:
        self.page, self.phase, self.stops = pages.Page(access, pages.session(access)), "", 0
        self._acks: list[bool] = []
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def go_on(self) -> None:
        """Start or rearm."""
        while self.phase not in ("hold", "teleop"):
            if not self._acks or not self._acks[-1]:
                self._ask("start" if self.phase == "reset" else "rearm")
            self._wait()
        self._acks.clear()

    def _ask(self, name: str) -> None:
        self._acks.clear()
        self.page.send(type="event", id=1, name=name, args={"stops": self.stops} if name == "rearm" else {})
        while not self._acks:
            self._wait()

    def _wait(self) -> None:
        if not self._reader.is_alive():
            raise ConnectionError("the page that drives was closed")
        time.sleep(0.005)

    def close(self) -> None:
        self._over.set()
        self._reader.join()
        self.page.close()

    def _read(self) -> None:
        hand = {"type": "teleop", "engaged": False, "rewind": False, "velocity": None}
        for number, message in enumerate(self.page.messages()):
            if message.get("type") == "state":
                self.phase, self.stops = message["phase"], message.get("stops", 0)
                self.page.send(**hand, seq=number, t=time.monotonic() * 1e3)
            elif message.get("type") == "ack":
                self._acks.append(message["ok"])
            if self._over.is_set():
                return


def stops(access: Access, driver: Driver, note: Path, number: int) -> list[float]:
    """Milliseconds from asking for a stop on the e-stop's line to the driver's stop."""
    line, found = pages.Page(access, pages.session(access), "/stop"), []
    for _ in range(number):
        driver.go_on()
        known, asked = note.stat().st_size if note.exists() else 0, time.monotonic_ns()
        line.socket.sendall(pages.frame(b"stop"))
        while (note.stat().st_size if note.exists() else 0) < known + 8:
            time.sleep(0.0005)
        at = int.from_bytes(note.read_bytes()[known : known + 8], "big")
        found.append((at - asked) * 1e-6)
        line.wait_for(lambda message: "error" in message)
        while driver.phase != "estop":
            time.sleep(0.001)
    line.close()
    return found


def flood_process(pipe: Any, access: Access, over: Any, taken: Any) -> None:
    """Eight browsers say commands without control, at least :data:`COMMANDS`, until ``over``."""
    os.nice(19)
    cookies = [pages.session(access) for _ in range(pages.PAGES)]
    pipe.send("ready")
    end = time.monotonic() + FLOOD_S
    while time.monotonic() < end and not (over.is_set() and taken.value >= COMMANDS):
        _, said = pages.flood(lambda n: pages.Page(access, cookies[n]), time.monotonic() + 0.5, pages.PAGES)
        taken.value += said


def measure_stops(number: int) -> tuple[list[Check], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        note, endpoint = Path(name) / "stops", f"ipc://{name}/op"
        access = Access("127.0.0.1", free_port(), False)
        over, taken = mp.get_context("spawn").Event(), mp.get_context("spawn").Value("q", 0)
        with (
            process(node_process, note, endpoint),
            process(gateway_process, ROBOT, endpoint, access, access.port),
            stop_line(access, "127.0.0.1", None, endpoint),
        ):
            driver = Driver(access)
            idle = stops(access, driver, note, number)
            with process(flood_process, access, over, taken) as flooding:
                flooded = stops(access, driver, note, number)
                over.set()
                flooding.join(FLOOD_S)
            ended = time.monotonic()
            page = pages.Page(access, pages.session(access))
            page.round_trip()
            answered_s = time.monotonic() - ended
            driver.close()
    p50, p99 = (np.quantile([idle, flooded], q, axis=1) for q in (0.5, 0.99))
    checks = [
        Check("e-stop in force at the robot under a flood of 8 pages, p99, ms", round(float(p99[1]), 1), 100, "<="),
        Check("the same without the flood, p99, ms", round(float(p99[0]), 1)),
        Check("commands that the 8 pages have queued", taken.value, COMMANDS, ">="),
        Check("a new page is answered after the flood's end within, s", round(answered_s, 3), 1, "<="),
    ]
    data = {"p50_idle_ms": p50[0], "p50_flooded_ms": p50[1], "idle_ms": idle, "flooded_ms": flooded}
    return checks, data


# -- the shown age -----------------------------------------------------------------------------------------------------


def pictures_process(pipe: Any, robot: RobotSpec, endpoint: str) -> None:
    """A node that shows pictures of noise; says the number and time of each over the pipe."""
    control, theirs = mp.Pipe()
    stopping, estop = mp.Pipe()
    port = OperatorPort(theirs, estop, robot, endpoint, facts={"recording": {"pending": None, "error": ""}})
    link, tick, due = Link(control), 0, time.monotonic()
    pictures = scenes()
    pipe.send("ready")
    while True:
        tick, due = tick + 1, due + robot.dt
        captured_ns, wall = time.monotonic_ns(), time.time()
        link.receive()
        link.send("state", phase="hold", tick=tick, run="hold", why="", state=[0.1] * len(robot.state))
        port.show(
            Observation(np.zeros(2, np.float32), dict.fromkeys(CAMERAS, pictures[tick % 4]), "", tick, captured_ns)
        )
        pipe.send((tick, wall))
        time.sleep(max(0.0, due - time.monotonic()))


def scenes() -> Any:
    """Four pictures [4, H, W, 3] of coloured tiles."""
    tiles = np.random.default_rng(0).integers(0, 255, (4, SIZE[0] // 8, SIZE[1] // 8, 3), np.uint8)
    return tiles.repeat(8, axis=1).repeat(8, axis=2)


def needed_bytes_s() -> float:
    """What the pictures have a second, as a node encodes them."""
    import cv2

    sizes = [len(cv2.imencode(".jpg", scene, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1]) for scene in scenes()]
    return RATE_HZ * len(CAMERAS) * float(np.mean(sizes))


class SlowLink:
    """A proxy on a thread that passes so many bytes a second to the page, and keeps the rest in order."""

    def __init__(self, port: int, target: int) -> None:
        self.rate = float("inf")
        self._target, self._loop = target, asyncio.new_event_loop()
        self._free_at = 0.0
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", port), self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pass(reader, ours), self._slowly(theirs, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def _slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: asyncio.Queue[bytes] = asyncio.Queue()  # without bound, as the worst of links

        async def send() -> None:
            while data := await waiting.get():
                for at in range(0, len(data), 1400):
                    part = data[at : at + 1400]
                    self._free_at = max(time.monotonic(), self._free_at) + len(part) / self.rate
                    await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
                    writer.write(part)

        sending = asyncio.create_task(send())
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                waiting.put_nowait(data)
        waiting.put_nowait(b"")
        await sending
        writer.close()


NOTE = """() => {
  window.painted = [];
  const note = () => {
    requestAnimationFrame(note);
    for (const box of document.querySelectorAll("[data-camera]")) {
      const age = box.querySelector(".age").textContent;
      painted.push([Number(box.dataset.frame), age, performance.timeOrigin + performance.now()]);
    }
  };
  requestAnimationFrame(note);
}"""


def watch(page: Any, seconds: float, times: dict[int, float]) -> list[tuple[float, float]]:
    """(shown, true) ages in ms of what a page has painted, each time that it painted."""
    page.evaluate("() => { painted.length = 0 }")
    page.wait_for_timeout(seconds * 1e3)
    found = []
    for number, text, now in page.evaluate("() => painted"):
        value, _, unit = text.partition(" ")
        if unit in ("ms", "s") and number in times:
            found.append((float(value) * (1e3 if unit == "s" else 1.0), now - 1e3 * times[number]))
    return found


def measure_age(seconds: float) -> tuple[list[Check], dict[str, Any]]:
    from playwright.sync_api import sync_playwright

    robot = RobotSpec("bench/arm", ROBOT.state, ROBOT.action, tuple(Camera(c, *SIZE) for c in CAMERAS), RATE_HZ)
    context = mp.get_context("spawn")
    times: dict[int, float] = {}  # picture -> when it was captured, Unix seconds
    ours, theirs = context.Pipe()

    def note() -> None:  # all the time: a full pipe would hold the node
        with suppress(EOFError, OSError):
            while True:
                number, wall = ours.recv()
                times[number] = wall

    with tempfile.TemporaryDirectory() as name:
        endpoint, port = f"ipc://{name}/op", free_port()
        access = Access("127.0.0.1", free_port(), False)
        node = context.Process(target=pictures_process, args=(theirs, robot, endpoint), daemon=True)
        node.start()
        assert ours.poll(60.0) and ours.recv() == "ready"
        threading.Thread(target=note, daemon=True).start()
        link, address = SlowLink(access.port, port), access.invite()
        flags = ["--no-sandbox", "--disable-gpu"]
        with process(gateway_process, robot, endpoint, access, port), sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
            page = chromium.new_page()
            page.goto(address)
            page.wait_for_selector("[data-camera] .age")
            page.evaluate(NOTE)
            page.wait_for_timeout(SETTLE_S * 1e3)
            fast = watch(page, seconds, times)
            link.rate = TENTH * needed_bytes_s()
            page.wait_for_timeout(SETTLE_S * 1e3)
            slow = watch(page, seconds, times)
            chromium.close()
        node.kill()
        node.join()
    shown, true = np.array(slow).T
    wrong = np.abs(shown - true)
    checks = [
        Check("shown age at a tenth of the bandwidth, p99, ms", round(float(np.quantile(shown, 0.99)), 1), 400, "<="),
        Check("the same, longest, ms", round(float(shown.max()), 1)),
        Check("how wrong it is, p99, ms", round(float(np.quantile(wrong, 0.99)), 1), 50, "<="),
        Check("bandwidth of the pictures, kB/s", round(needed_bytes_s() / 1e3, 1)),
    ]
    data = {"seconds": seconds, "fast_p99_ms": np.quantile(np.array(fast), 0.99, axis=0).tolist(), "samples": len(slow)}
    return checks, data | {"slow_p50_ms": np.median(np.array(slow), axis=0).tolist()}


def main(args: argparse.Namespace) -> int:
    checks: list[Check] = []
    data: dict[str, Any] = {}
    if args.only != "age":
        found, data["stop"] = measure_stops(args.stops)
        checks += found
    if args.only != "stop":
        found, data["age"] = measure_age(args.seconds)
        checks += found
    write("console_flood", checks, data, path=args.out)
    return 0


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--stops", type=int, default=100, help="with the flood and without (default: %(default)s)")
    arguments.add_argument("--seconds", type=float, default=20.0, help="with each link (default: %(default)g)")
    arguments.add_argument("--only", choices=("stop", "age"), help="one half of it")
    arguments.add_argument("--out", type=Path, help="another file than docs/results/console_flood.json")
    sys.exit(main(arguments.parse_args()))
