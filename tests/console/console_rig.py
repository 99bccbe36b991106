"""A gateway and a node's operator port, with the test in place of the control process."""

import asyncio
import json
import multiprocessing as mp
import threading

from aiohttp import ClientSession, CookieJar, WSMsgType
from toy_console import ROBOT, free_port

from vla_stack.console.access import Access
from vla_stack.console.door import opened
from vla_stack.console.gateway import About, Gateway
from vla_stack.runtime.link import Link
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.operator_port import OperatorPort

PATIENCE_S = 60.0  # upper bound of waits


class Rig:
    """A gateway and a node's operator port, with the test in place of the control process."""

    def __init__(self, folder):
        endpoint = f"ipc://{folder}/op"
        ours, control = mp.Pipe()
        stops, estop = mp.Pipe()
        self.control, self.stops = Link(ours), Link(stops)
        recording = {"recording": {"pending": None, "error": ""}}
        self.operator = OperatorPort(control, estop, ROBOT, endpoint, facts=recording)
        self.stopped, self.events, self.over = threading.Event(), 0, threading.Event()
        self.endpoint = endpoint
        self.access = Access("127.0.0.1", port := free_port(), False)
        about = About(ROBOT, (), "teleop", folder / "data")
        self.gateway, self.port = Gateway(OperatorClient(endpoint), about, self.access), port
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self):
        while not self.over.is_set():
            for message in self.control.receive(0.005):
                if message["kind"] == "event":
                    self.events += 1
                    self.control.send("reply", id=message["id"], ok=True, error="", phase="auto", tick=7)
            if self.stops.receive():
                self.stopped.set()

    async def __aenter__(self):
        self.served = opened(self.gateway.app(), self.gateway.door, "127.0.0.1", self.port)
        await self.served.__aenter__()
        self.http = await self.browser()
        return self

    async def browser(self):
        """A browser with a session."""
        http = ClientSession(self.access.base, cookie_jar=CookieJar(unsafe=True))
        async with http.get(self.access.invite().removeprefix(self.access.base)) as answer:
            assert answer.status == 200
        return http

    async def __aexit__(self, *_):
        await self.http.close()
        await self.served.__aexit__(None, None, None)
        self.over.set()
        self.thread.join()
        self.operator.close()

    async def page(self):
        return await self.http.ws_connect("/ws", headers={"Origin": self.access.base})


async def heard(page, kind):
    """The next message of a kind."""
    async with asyncio.timeout(PATIENCE_S):
        async for message in page:
            if message.type is not WSMsgType.TEXT:
                continue
            body = json.loads(message.data)
            if body["type"] == "state":  # as a page does that shows it
                await page.send_str(json.dumps({"type": "seen", "n": body["n"]}))
            if body["type"] == kind:
                return body
    raise AssertionError("the page was closed")
