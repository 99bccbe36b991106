"""Pages that say too much: the others, and the e-stop, do not wait for them."""

import asyncio
import json
import multiprocessing as mp
import threading

from aiohttp import ClientSession, CookieJar, WSMsgType, web
from toy_console import ROBOT, free_port

from vla_stack.console.access import Access
from vla_stack.console.gateway import COMMANDS_AT_ONCE, PAGE_BURST, About, Gateway
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
        self.runner = web.AppRunner(self.gateway.app())
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.http = ClientSession(self.access.base, cookie_jar=CookieJar(unsafe=True))
        async with self.http.get(self.access.invite().removeprefix(self.access.base)) as answer:
            assert answer.status == 200
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.runner.cleanup()
        self.over.set()
        self.thread.join()
        self.operator.close()

    async def page(self):
        return await self.http.ws_connect("/ws", headers={"Origin": self.access.base})


async def heard(page, kind):
    """The next message of a kind."""
    async with asyncio.timeout(PATIENCE_S):
        async for message in page:
            if message.type is WSMsgType.TEXT and (body := json.loads(message.data))["type"] == kind:
                return body
    raise AssertionError("the page was closed")


def command(n):
    return json.dumps({"type": "event", "id": n, "name": "start", "args": {}})


def test_pages_that_flood_are_closed_and_an_e_stop_does_not_wait_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_stack.runtime.lease.LEASE_S", 1e6)  # who drives stays it, however busy the computer is

    async def scenario():
        async with Rig(tmp_path) as rig:
            driver = await rig.page()
            await heard(driver, "state")
            await driver.send_str(command(1))
            assert (await heard(driver, "ack"))["ok"]
            floods = [await rig.page() for _ in range(4)]

            async def flood(page):
                try:
                    for n in range(10 * int(PAGE_BURST)):
                        await page.send_str(command(n))
                except ConnectionError:
                    pass

            tasks = [asyncio.create_task(flood(page)) for page in floods]
            await asyncio.sleep(0)
            async with rig.http.post("/estop", headers={"Origin": rig.access.base}) as answer:
                assert answer.status == 200
            await asyncio.to_thread(rig.stopped.wait, PATIENCE_S)
            assert rig.stopped.is_set() and rig.events == 1  # no command of who does not drive reaches the node
            await driver.send_str(json.dumps({"type": "ping", "t": 5}))
            assert (await heard(driver, "pong"))["t"] == 5
            await asyncio.gather(*tasks)
            async with asyncio.timeout(PATIENCE_S):
                for page in floods:
                    while not page.closed:
                        await page.receive()
            assert {page.close_code for page in floods} <= {1008, 1006}
            await driver.send_str(command(2))
            answer = await heard(driver, "ack")
            assert answer["ok"], answer

    asyncio.run(scenario())


def test_a_page_has_few_commands_that_are_not_answered(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            page = await rig.page()
            await heard(page, "state")
            for n in range(3 * COMMANDS_AT_ONCE):
                await page.send_str(command(n))
            answers = [await heard(page, "ack") for _ in range(3 * COMMANDS_AT_ONCE)]
            refused = [a for a in answers if not a["ok"]]
            assert all(a["error"] == "too many commands at once" for a in refused)
            assert rig.events == len(answers) - len(refused) >= COMMANDS_AT_ONCE

    asyncio.run(scenario())
