"""Between browsers and a robot node: the pages' WebSockets on one side, the operator channels on the other.

One event loop owns everything. Nothing waits for a slow browser: each gets the newest picture of every camera when it
has taken the last one, and the newest state. The node decides who drives; the gateway gives every page a lease of its
own, and speaks for a page only under that page's lease. A page that says more than a hand can is closed, one that does
not drive is refused here, and the e-stop has a request and a thread of its own: no page holds up another one's stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from vla_stack.console import messages
from vla_stack.console.access import Access
from vla_stack.console.clocks import RemoteClock
from vla_stack.console.heat import heat
from vla_stack.errors import UserError
from vla_stack.runtime.lease import holder_name
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.operator_messages import Reply
from vla_stack.schema import RobotSpec, SchemaError
from vla_stack.serving.rates import Allowance

PAGES, PAGE_HZ, PAGE_BURST = (
    32,
    150.0,
    450.0,
)  # open at once; messages of one: three times what ours sends, and a stall's
COMMANDS_AT_ONCE = 8  # of a page that are not answered yet
POLL_S = 0.004  # between two looks at the operator channels
ANSWER_S = 5.0  # after which an event that nobody answered is given up
SILENT_S = 1.0  # after which a node that publishes no state is said to be gone
DISK_S = 2.0
STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}
REDEEMED = "<!doctype html><meta http-equiv=refresh content='0;url=/'><title>Operator console</title>"
REFUSED = (
    "<!doctype html><meta charset=utf-8><title>Operator console</title><body>"
    "<h1>This address has been used, or is not of this console.</h1><p>An address opens one browser, once. The "
    "terminal of <code>vla console</code> prints a new one after each use; an open console makes one with "
    "“Another screen”.</p>"
)


@dataclass(frozen=True)
class About:
    """What pages are told once.

    Attributes:
        robot: What is driven.
        stages: Names of the task's stages.
        mode: ``teleop``, ``rac`` or ``hg_dagger``.
        root: Dataset that is recorded into.
    """

    robot: RobotSpec
    stages: tuple[str, ...]
    mode: str
    root: Path


@dataclass(eq=False)
class Page:
    """One open page."""

    number: int
    socket: web.WebSocketResponse
    lease: str = field(default_factory=lambda: secrets.token_hex(8))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    clock: RemoteClock = field(default_factory=RemoteClock)
    shown: dict[str, tuple[int, int]] = field(default_factory=dict)  # camera -> episode's tick and time of its picture
    allowance: Allowance = field(default_factory=lambda: Allowance(PAGE_HZ, PAGE_BURST))
    commands: int = 0  # that are not answered yet


class Gateway:
    """Serves pages that drive one robot node.

    Args:
        client: Connected to the node; this gateway's own from now on.
        about: What is driven.
        access: Who may.
        on_invited: Called with a new address whenever one was used up.
    """

    def __init__(
        self, client: OperatorClient, about: About, access: Access, on_invited: Callable[[str], None] = lambda _: None
    ) -> None:
        self._client, self._about, self._access, self._on_invited = client, about, access, on_invited
        self._pages: dict[int, Page] = {}
        self._numbers = itertools.count(1)
        self._asked: int | None = None  # number of the page that would like to drive
        self._answers: dict[str, asyncio.Future[Reply]] = {}
        self._node_clock = RemoteClock()
        self._state_ns = 0
        self._disk_free = 0
        self._stopper = ThreadPoolExecutor(1, "estop")
        self._stop_wanted = False
        self._stopping: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        """The web application; its background work lives as long as it."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 16)
        app.router.add_get("/", self._index)
        app.router.add_get("/ws", self._socket)
        app.router.add_get("/heat", self._heat)
        app.router.add_post("/invite", self._invite)
        app.router.add_post("/estop", self._estop)
        app.router.add_static("/static", STATIC)
        app.cleanup_ctx.append(self._background)
        return app

    # -- HTTP -----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Host and session of everything; Origin of what acts."""
        if not self._access.right_host(request.headers.get("Host")):
            raise web.HTTPMisdirectedRequest(text="this console has another name")
        opening = request.path == "/" and "token" in request.query
        if not opening and not self._access.known(request.cookies.get(self._access.cookie, "")):
            return web.Response(status=403, text=REFUSED, content_type="text/html", headers=HEADERS)
        acts = request.method != "GET" or request.path == "/ws"
        if acts and not self._access.right_origin(request.headers.get("Origin")):
            raise web.HTTPForbidden(text="only the console's own page may do this")
        response: web.StreamResponse = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if "token" not in request.query:
            return web.FileResponse(STATIC / "index.html")
        session = self._access.redeem(request.query["token"])
        if session is None:
            return web.Response(status=403, text=REFUSED, content_type="text/html")
        # Not a redirect: the cookie is SameSite=Strict, and the next request has to come from this page.
        response = web.Response(text=REDEEMED, content_type="text/html")
        secure = self._access.base.startswith("https")
        response.set_cookie(self._access.cookie, session, httponly=True, samesite="Strict", secure=secure, path="/")
        self._on_invited(self._access.invite())
        return response

    async def _heat(self, _: web.Request) -> web.Response:
        try:
            return web.json_response(await asyncio.to_thread(heat, self._about.root, self._about.robot))
        except UserError as e:
            raise web.HTTPServiceUnavailable(text=str(e)) from None

    async def _invite(self, _: web.Request) -> web.Response:
        return web.json_response({"address": self._access.invite()})

    async def _estop(self, _: web.Request) -> web.Response:
        self._request_stop()
        return web.Response()

    # -- pages ----------------------------------------------------------------------------------------------------

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=messages.MAX_BYTES, heartbeat=5.0, compress=False)
        if len(self._pages) >= PAGES:
            raise web.HTTPServiceUnavailable(text=f"{PAGES} pages are open")
        await socket.prepare(request)
        page = Page(next(self._numbers), socket)
        self._pages[page.number] = page
        hello = {
            "type": "hello",
            "you": page.number,
            "robot": self._about.robot.to_json(),
            "stages": list(self._about.stages),
            "mode": self._about.mode,
        }
        await socket.send_json(hello)
        sender = asyncio.create_task(self._feed(page))
        try:
            async for message in socket:
                if not page.allowance.admit(time.monotonic_ns()):
                    raise SchemaError(f"more than {PAGE_HZ:g} messages a second")
                if message.type is not WSMsgType.TEXT:
                    raise SchemaError("not text")
                await self._take(page, messages.read(message.data, len(self._about.robot.action)))
        except SchemaError as e:
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(e)[:120].encode())
        finally:
            sender.cancel()
            del self._pages[page.number]
            if self._asked == page.number:
                self._asked = None
            if self._drives(page):  # let go at once; nobody waits for the answer
                self._as(page).teleop()
                self._client.event("release")
        return socket

    async def _take(self, page: Page, message: messages.Message) -> None:
        if isinstance(message, messages.Hand):
            self._drive(page, message)
        elif isinstance(message, messages.Ping):
            await page.socket.send_json({"type": "pong", "t": message.t})
        elif isinstance(message, messages.Stop):
            self._request_stop()
        elif page.commands >= COMMANDS_AT_ONCE:
            if isinstance(message, messages.Command):
                await self._answer(page, message, Reply("", False, "too many commands at once"))
        elif isinstance(message, messages.LeaseWish):
            asyncio.create_task(self._lease(page, message.want))
        else:
            asyncio.create_task(self._command(page, message))

    def _drive(self, page: Page, hand: messages.Hand) -> None:
        if not self._drives(page):
            return
        age_ns = page.clock.age_ns(round(hand.t_ms * 1e6), time.monotonic_ns())
        self._as(page).teleop(hand.velocity, None, hand.engaged, hand.rewind, age_ns)

    async def _command(self, page: Page, command: messages.Command) -> None:
        with _counted(page):
            if self._drives(page) or (self._free() and (await self._ask(page, "acquire")).ok):
                reply = await self._ask(page, command.name, **command.args)
            else:
                reply = Reply("", False, "another console has control" if self._client.state else "there is no robot")
        await self._answer(page, command, reply)

    async def _answer(self, page: Page, command: messages.Command, reply: Reply) -> None:
        answer = {"type": "ack", "id": command.id, "ok": reply.ok, "error": reply.error, "phase": reply.phase}
        with contextlib.suppress(ConnectionError):
            await page.socket.send_json(answer)

    async def _lease(self, page: Page, want: str) -> None:
        with _counted(page):
            await self._change_lease(page, want)

    async def _change_lease(self, page: Page, want: str) -> None:
        if want == "acquire":
            if not self._free() or not (await self._ask(page, "acquire")).ok:
                self._asked = None if self._drives(page) else page.number
        elif self._drives(page):
            await self._ask(page, "release")
            if want == "hand_over" and self._asked in self._pages:
                await self._ask(self._pages[self._asked], "acquire")
            self._asked = None

    def _request_stop(self) -> None:
        """Stop the robot; once more where a stop is under way already."""
        self._stop_wanted = True
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        while self._stop_wanted:
            self._stop_wanted = False
            try:
                await asyncio.get_running_loop().run_in_executor(self._stopper, self._client.estop)
            except UserError as e:
                for page in list(self._pages.values()):
                    with contextlib.suppress(ConnectionError):
                        await page.socket.send_json({"type": "alarm", "text": str(e)})

    def _as(self, page: Page) -> OperatorClient:
        self._client.lease = page.lease
        return self._client

    def _drives(self, page: Page) -> bool:
        return bool(self._client.state) and self._client.state["lease"] == holder_name(page.lease)

    def _free(self) -> bool:
        return bool(self._client.state) and not self._client.state["lease"]

    async def _ask(self, page: Page, name: str, **args: Any) -> Reply:
        """Send an event under a page's lease and wait for its answer."""
        identity = self._as(page).event(name, **args)
        self._answers[identity] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._answers[identity], ANSWER_S)
        except TimeoutError:
            self._client.forget(identity)
            return Reply(identity, False, "the robot does not answer")
        finally:
            del self._answers[identity]

    # -- node -----------------------------------------------------------------------------------------------------

    async def _background(self, _: web.Application) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._watch_disk())]
        yield
        for page in list(self._pages.values()):
            await page.socket.close(code=WSCloseCode.GOING_AWAY, message=b"The console was closed.")
        for task in tasks:
            task.cancel()
        self._stopper.shutdown(wait=False)
        self._client.close()

    async def _pump(self) -> None:
        """Take what the node says and wake the pages."""
        sent = gone = None
        while True:
            news = self._client.poll()
            state, now_ns = self._client.state, time.monotonic_ns()
            if state and state["t_sent_ns"] != sent:
                sent, self._state_ns = state["t_sent_ns"], now_ns
                self._node_clock.age_ns(sent, now_ns)
            for identity in [i for i in self._client.replies if i in self._answers]:
                answer = self._answers[identity]
                if not answer.done():
                    answer.set_result(self._client.replies[identity])
            self._client.replies.clear()
            silent = now_ns - self._state_ns > SILENT_S * 1e9
            if news or silent != gone:
                gone = silent
                for page in self._pages.values():
                    page.news.set()
            await asyncio.sleep(POLL_S)

    async def _watch_disk(self) -> None:
        while True:
            folder = next(p for p in (self._about.root, *self._about.root.absolute().parents) if p.exists())
            self._disk_free = shutil.disk_usage(folder).free
            await asyncio.sleep(DISK_S)

    async def _feed(self, page: Page) -> None:
        """Send a page what is new, as fast as it takes it."""
        with contextlib.suppress(ConnectionError):
            while True:
                page.news.clear()
                if "recording" in self._client.state:
                    await page.socket.send_json(self._state_for(page))
                for camera, (about, jpeg) in list(self._client.frames.items()):
                    stamp = (about["frame"], about["t_capture_ns"])
                    if page.shown.get(camera) == stamp:
                        continue
                    page.shown[camera] = stamp
                    await page.socket.send_bytes(self._picture(camera, about, jpeg))
                await page.news.wait()

    def _picture(self, camera: str, about: dict[str, Any], jpeg: bytes) -> bytes:
        captured = self._node_clock.local_ns(about["t_capture_ns"])
        age_ms = 0.0 if captured is None else max(0.0, (time.monotonic_ns() - captured) * 1e-6)
        header = json.dumps({"camera": camera, "frame": about["frame"], "age_ms": age_ms}).encode()
        return len(header).to_bytes(2, "big") + header + jpeg

    def _state_for(self, page: Page) -> dict[str, Any]:
        state = self._client.state
        holder = next((p.number for p in self._pages.values() if self._drives(p)), 0)
        lease = "free" if not state["lease"] else "you" if holder == page.number else "other"
        silent = time.monotonic_ns() - self._state_ns > SILENT_S * 1e9
        return {
            **state,
            **({"phase": "offline", "why": "the robot node is silent"} if silent else {}),
            "type": "state",
            "lease": lease,
            "holder": holder,
            "asked": self._asked,
            "you": page.number,
            "consoles": len(self._pages),
            "recording": {**state["recording"], "disk_free": self._disk_free, "pending": self._pending()},
        }

    def _pending(self) -> dict[str, Any] | None:
        """The last pending episode, with what is left of its undo window now."""
        pending = self._client.state["recording"]["pending"]
        if pending is None:
            return None
        due_ns = self._node_clock.local_ns(pending["due_ns"]) or 0
        return {**pending, "left_s": max(0.0, (due_ns - time.monotonic_ns()) * 1e-9)}


@contextlib.contextmanager
def _counted(page: Page) -> Iterator[None]:
    page.commands += 1
    try:
        yield
    finally:
        page.commands -= 1
