"""Between browsers and a robot node: the pages' WebSockets on one side, the operator channels on the other.

One event loop owns everything. Nothing waits for a slow browser: each gets the newest state and the newest picture of
every camera when it has acknowledged the last ones (``feed.py``). The node decides who drives; the gateway gives every
page a lease of its own, and speaks for a page only under that page's lease. A page that says more than a hand can is
closed, and one that does not drive is refused here. The e-stop has a process of its own (``stopping.py``); here it is
taken too, and sent by a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from vla_stack.console import messages
from vla_stack.console.access import INVITED, REFUSED, Access, closing
from vla_stack.console.clocks import RemoteClock
from vla_stack.console.door import Door, Visitors
from vla_stack.console.feed import STATE, smaller
from vla_stack.console.heat import heat
from vla_stack.console.page import COMMANDS_AT_ONCE, PAGE_HZ, Page
from vla_stack.console.stopping import Stopper
from vla_stack.errors import UserError
from vla_stack.key_map import as_script
from vla_stack.runtime.lease import holder_name
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.operator_messages import Reply
from vla_stack.schema import RobotSpec, SchemaError

PAGES, PAGES_OF_ONE = 32, 8  # open at once, in all and of one browser
POLL_S = 0.004  # between two looks at the operator channels
ANSWER_S = 5.0  # after which an event that nobody answered is given up
SILENT_S = 1.0  # after which a node that publishes no state is said to be gone
DISK_S = 2.0
STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}
REDEEMED = "<!doctype html><meta http-equiv=refresh content='0;url=/'><title>Operator console</title>"


async def keys_script(_: web.Request) -> web.Response:
    """The key map, as pages import it."""
    return web.Response(text=as_script(), content_type="text/javascript")


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
        self._states = 0  # counted, as pages are told
        self._smaller: dict[tuple[str, int], tuple[Any, asyncio.Task[bytes]]] = {}  # (camera, halvings) -> stamp, JPEG
        self._heating: asyncio.Task[Any] | None = None
        self._stopper = Stopper(client.estop)
        self._work: set[asyncio.Task[None]] = set()
        self._visitors = Visitors()
        self.door = Door()

    def app(self) -> web.Application:
        """The web application; its background work lives as long as it."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 16)
        app.router.add_get("/", self._index)
        app.router.add_get("/ws", self._socket)
        app.router.add_get("/heat", self._heat)
        app.router.add_get("/keys.js", keys_script)
        app.router.add_post("/invite", self._invite)
        app.router.add_static("/static", STATIC)
        app.cleanup_ctx.append(self._background)
        return app

    # -- HTTP -----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Host and session of everything; Origin of what acts; how often one browser asks."""
        if not (request.path == "/" and "token" in request.query):
            self._access.check(request, acts=request.method != "GET" or request.path == "/ws")
            self._admit(request)
        elif not self._access.right_host(request.headers.get("Host")):
            raise closing(web.HTTPMisdirectedRequest(text="this console has another name"))
        response: web.StreamResponse = await handler(request)
        if not response.prepared:
            policy = self._access.policy(request.headers["Host"])
            response.headers.update({**HEADERS, "Content-Security-Policy": policy})
        return response

    def _admit(self, request: web.Request) -> None:
        self.door.welcome(request)
        if not self._visitors.admit(self._access.session(request), request.path == "/ws", time.monotonic_ns()):
            raise closing(web.HTTPTooManyRequests(text="too many requests of this browser"))

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if "token" not in request.query:
            return web.FileResponse(STATIC / "index.html")
        session = self._access.redeem(request.query["token"])
        if session is None:
            raise closing(web.HTTPForbidden(text=REFUSED, content_type="text/html"))
        # Not a redirect: the cookie is SameSite=Strict, and the next request has to come from this page.
        response = web.Response(text=REDEEMED, content_type="text/html")
        secure = self._access.base.startswith("https")
        response.set_cookie(self._access.cookie, session, httponly=True, samesite="Strict", secure=secure, path="/")
        self._on_invited(self._access.invite())
        return response

    async def _heat(self, _: web.Request) -> web.Response:
        if self._heating is None or self._heating.done():  # who asks meanwhile gets the same answer
            self._heating = asyncio.create_task(asyncio.to_thread(heat, self._about.root, self._about.robot))
        try:
            return web.json_response(await asyncio.shield(self._heating))
        except UserError as e:
            raise web.HTTPServiceUnavailable(text=str(e)) from None

    async def _invite(self, _: web.Request) -> web.Response:
        if self._access.invitations >= INVITED:
            raise web.HTTPTooManyRequests(text=f"{INVITED} addresses have not been used")
        return web.json_response({"address": self._access.invite()})

    # -- pages ----------------------------------------------------------------------------------------------------

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        session = self._access.session(request)
        if len(self._pages) >= PAGES or sum(p.session == session for p in self._pages.values()) >= PAGES_OF_ONE:
            raise web.HTTPServiceUnavailable(text="too many pages are open")
        socket = web.WebSocketResponse(max_msg_size=messages.MAX_BYTES, heartbeat=5.0, compress=False, autoping=False)
        page = Page(next(self._numbers), session, socket, request.transport)
        self._pages[page.number] = page
        sender: asyncio.Task[None] | None = None
        try:
            await socket.prepare(request)
            self.door.settle(request)
            page.say(**self._hello(page))
            sender = asyncio.create_task(self._feed(page))
            async for message in socket:
                if not page.allowance.has(time.monotonic_ns()):
                    raise SchemaError(f"more than {PAGE_HZ:g} messages a second")
                if message.type is WSMsgType.PONG:
                    page.allowance.spend()
                elif message.type is WSMsgType.TEXT:
                    self._take(page, messages.read(message.data, len(self._about.robot.action)))
                else:
                    raise SchemaError("not text")
                await asyncio.sleep(0)  # what else it has said waits until the other pages have had their turn
        except SchemaError as e:
            await page.close(WSCloseCode.POLICY_VIOLATION, str(e))
        finally:
            if sender is not None:
                sender.cancel()
            del self._pages[page.number]
            if self._asked == page.number:
                self._asked = None
            if self._drives(page):  # let go at once; nobody waits for the answer
                self._as(page).teleop()
                self._client.event("release")
        return socket

    def _hello(self, page: Page) -> dict[str, Any]:
        about = self._about
        return {
            "type": "hello",
            "you": page.number,
            "robot": about.robot.to_json(),
            "stages": list(about.stages),
            "mode": about.mode,
            "stop_port": self._access.port + 1,
        }

    def _take(self, page: Page, message: messages.Message) -> None:
        """Act on a message, without waiting. An acknowledgement of what was sent is not counted: we set its rate."""
        if isinstance(message, messages.Seen) and page.acknowledged(message.number):
            return
        page.allowance.spend()
        if isinstance(message, messages.Hand):
            self._drive(page, message)
        elif isinstance(message, messages.Ping):
            page.say(type="pong", t=message.t)
        elif isinstance(message, messages.Stop):
            self._begin(self._stop(page))
        elif isinstance(message, messages.Seen):
            pass  # of nothing
        elif page.commands >= COMMANDS_AT_ONCE:
            if isinstance(message, messages.Command):
                self._answer(page, message, Reply("", False, "too many commands at once"))
        elif isinstance(message, messages.LeaseWish):
            self._begin(self._lease(page, message.want))
        elif not self._drives(page) and not self._free():
            why = "another console has control" if self._client.state else "there is no robot"
            self._answer(page, message, Reply("", False, why))
        else:
            self._begin(self._command(page, message))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)  # or it might be collected before its end
        task.add_done_callback(self._work.discard)

    def _drive(self, page: Page, hand: messages.Hand) -> None:
        if not self._drives(page):
            return
        age_ns = page.clock.age_ns(round(hand.t_ms * 1e6), time.monotonic_ns())
        self._as(page).teleop(hand.velocity, None, hand.engaged, hand.rewind, age_ns)

    async def _command(self, page: Page, command: messages.Command) -> None:
        with page.command():
            if self._drives(page) or (reply := await self._ask(page, "acquire")).ok:
                reply = await self._ask(page, command.name, **command.args)
        with contextlib.suppress(SchemaError):
            self._answer(page, command, reply)

    def _answer(self, page: Page, command: messages.Command, reply: Reply) -> None:
        page.say(type="ack", id=command.id, ok=reply.ok, error=reply.error, phase=reply.phase)

    async def _lease(self, page: Page, want: str) -> None:
        with page.command():
            if want == "acquire":
                if not self._free() or not (await self._ask(page, "acquire")).ok:
                    self._asked = None if self._drives(page) else page.number
            elif self._drives(page):
                await self._ask(page, "release")
                if want == "hand_over" and self._asked in self._pages:
                    await self._ask(self._pages[self._asked], "acquire")
                self._asked = None

    async def _stop(self, page: Page) -> None:
        with contextlib.suppress(SchemaError):
            page.say(type="stopped", error=await self._stopper.stop())

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
        goodbye = (page.close(WSCloseCode.GOING_AWAY, "The console was closed.") for page in self._pages.values())
        await asyncio.gather(*goodbye)
        for task in tasks:
            task.cancel()
        self._stopper.close()
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
            if self._asked in self._pages and self._drives(self._pages[self._asked]):
                self._asked = None  # it has got that, and is not offered to hand over to itself
            for identity in [i for i in self._client.replies if i in self._answers]:
                answer = self._answers[identity]
                if not answer.done():
                    answer.set_result(self._client.replies[identity])
            self._client.replies.clear()
            silent = now_ns - self._state_ns > SILENT_S * 1e9
            if news or silent != gone:
                gone, self._states = silent, self._states + 1
                for page in self._pages.values():
                    page.news.set()
                    if page.feed.stalled(now_ns):
                        page.abort()
            await asyncio.sleep(POLL_S)

    async def _watch_disk(self) -> None:
        while True:
            folder = next(p for p in (self._about.root, *self._about.root.absolute().parents) if p.exists())
            self._disk_free = shutil.disk_usage(folder).free
            await asyncio.sleep(DISK_S)

    async def _feed(self, page: Page) -> None:
        """Send a page its answers, then what its feed says is due."""
        with contextlib.suppress(ConnectionError):
            while True:
                page.news.clear()
                while page.answers:
                    await page.socket.send_str(messages.as_text(page.answers.popleft()))
                if not await self._show_next(page):
                    await page.news.wait()

    async def _show_next(self, page: Page) -> bool:
        """Send what is due; whether anything was."""
        stamps: dict[str, Any] = {c: (f["frame"], f["t_capture_ns"]) for c, (f, _) in self._client.frames.items()}
        if "recording" in self._client.state:
            stamps[STATE] = self._states
        if (kind := page.feed.next(stamps)) is None:
            return False
        if kind == STATE:
            number = page.feed.sent(STATE, stamps[STATE], 0, time.monotonic_ns())
            await page.socket.send_str(messages.as_text({**self._state_for(page), "n": number}))
            return True
        about, jpeg = self._client.frames[kind]
        jpeg = await self._resized(kind, stamps[kind], jpeg, page.feed.halvings)
        now_ns = time.monotonic_ns()
        captured_ns = min(self._node_clock.local_ns(about["t_capture_ns"]) or now_ns, now_ns)
        number = page.feed.sent(kind, stamps[kind], captured_ns, now_ns)
        about = {"n": number, "camera": kind, "frame": about["frame"], "captured_ms": captured_ns * 1e-6}
        header = json.dumps(about).encode()
        await page.socket.send_bytes(len(header).to_bytes(2, "big") + header + jpeg)
        return True

    async def _resized(self, camera: str, stamp: Any, jpeg: bytes, halvings: int) -> bytes:
        """A picture as large as a page's link carries; made once for all pages."""
        if halvings == 0:
            return jpeg
        kept = self._smaller.get((camera, halvings))
        if kept is None or kept[0] != stamp:
            kept = stamp, asyncio.create_task(asyncio.to_thread(smaller, jpeg, halvings))
            self._smaller[camera, halvings] = kept
        return await asyncio.shield(kept[1])

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
