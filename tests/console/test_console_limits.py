"""Pages and connections that ask for too much: the others, and the e-stop, do not wait for them."""

import asyncio
import json
import socket
import threading
from functools import partial

import pytest
from aiohttp import ClientSession, CookieJar, WSServerHandshakeError
from console_rig import PATIENCE_S, Rig, heard

from vla_stack.console import door as doors
from vla_stack.console.door import Door, Visitors, opened
from vla_stack.console.gateway import PAGES_OF_ONE
from vla_stack.console.page import ANSWERS, COMMANDS_AT_ONCE, PAGE_BURST, Page
from vla_stack.console.stopping import StopLines, Stopper
from vla_stack.errors import UserError
from vla_stack.runtime.operator_client import stop_robot
from vla_stack.schema import SchemaError
from vla_stack.verbs.console import stop_line


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
            await driver.send_str('{"type": "estop"}')
            assert (await heard(driver, "stopped"))["error"] == ""
            assert rig.stopped.wait(PATIENCE_S) and rig.events == 1  # no command of who does not drive reaches the node
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


def test_the_e_stop_s_own_line_waits_for_nothing_that_pages_have_said(tmp_path):
    """Commands are queued while the gateway cannot even read; the stop is in force before the first of them is."""

    async def scenario():
        async with Rig(tmp_path) as rig:
            with stop_line(rig.access, "127.0.0.1", None, rig.endpoint):
                pages = [await rig.page() for _ in range(PAGES_OF_ONE)]
                await heard(pages[0], "state")
                cookies = rig.http.cookie_jar.filter_cookies(rig.access.base)
                queued = asyncio.create_task(queue(pages))
                asked = asyncio.to_thread(asyncio.run, ask(rig, {name: c.value for name, c in cookies.items()}))
                stopping = asyncio.create_task(asked)
                await queued
                assert not rig.stopped.is_set()
                go.set()
                assert rig.stopped.wait(PATIENCE_S)  # this thread, the gateway's, stands still meanwhile
                assert await stopping == {"error": ""}
                await heard(pages[-1], "ack")  # now it answers what was said before

    async def queue(pages):
        for page in pages:
            for n in range(int(PAGE_BURST) // 2):
                await page.send_str(command(n))

    async def ask(rig, cookies):
        async with ClientSession(cookies=cookies, cookie_jar=CookieJar(unsafe=True)) as http:
            address = f"http://127.0.0.1:{rig.access.port + 1}/stop"
            async with http.ws_connect(address, headers={"Origin": rig.access.base}) as line:
                await asyncio.to_thread(go.wait)
                await line.send_str("stop")
                return await line.receive_json()

    go = threading.Event()
    asyncio.run(scenario())


def test_only_the_console_s_own_page_may_use_the_e_stop_s_line(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            lines = StopLines(rig.access, partial(stop_robot, rig.endpoint))
            async with opened(lines.app(), lines.door, "127.0.0.1", rig.access.port + 1):
                address = f"http://127.0.0.1:{rig.access.port + 1}/stop"
                own = {"Origin": rig.access.base}
                wrong = [{"Origin": "http://evil.example"}, {}, {**own, "Host": f"127.0.0.1:{rig.access.port}"}]
                async with ClientSession() as stranger:
                    for http, headers in ((stranger, own), *((rig.http, headers) for headers in wrong)):
                        with pytest.raises(WSServerHandshakeError):
                            await http.ws_connect(address, headers=headers)
                assert not rig.stopped.is_set()
                async with rig.http.ws_connect(address, headers=own) as line:
                    await line.send_str("anything")
                    assert await line.receive_json() == {"error": ""} and rig.stopped.wait(PATIENCE_S)

    asyncio.run(scenario())


def test_however_many_ask_one_stop_is_under_way_and_one_waits():
    async def scenario():
        begun, go, stops = threading.Event(), threading.Event(), []

        def stop():
            stops.append(len(stops))
            begun.set()
            go.wait(PATIENCE_S)
            if len(stops) == 2:
                raise UserError("no answer", "press the robot's own")

        stopper = Stopper(stop)
        first = asyncio.create_task(stopper.stop())
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        others = [asyncio.create_task(stopper.stop()) for _ in range(1000)]
        await asyncio.sleep(0)
        others.pop().cancel()  # a page that has gone takes nobody's stop with it
        go.set()
        assert await first == ""
        assert set(await asyncio.gather(*others)) == {"no answer -- press the robot's own"}
        assert stops == [0, 1]
        stopper.close()

    asyncio.run(scenario())


def test_a_browser_has_few_pages_and_another_one_finds_its_place(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            pages = [await rig.page() for _ in range(PAGES_OF_ONE)]
            with pytest.raises(WSServerHandshakeError, match="503"):
                await rig.page()
            async with await rig.browser() as other:
                page = await other.ws_connect("/ws", headers={"Origin": rig.access.base})
                await heard(page, "state")
            await pages[0].close()

    asyncio.run(scenario())


def test_how_often_a_browser_asks_is_limited_and_nobody_else_notices():
    visitors = Visitors()
    assert [visitors.admit("a", True, 0) for _ in range(2 * int(doors.PAGE_BURST))].count(True) == doors.PAGE_BURST
    assert not visitors.admit("a", True, 0) and visitors.admit("a", False, 0) and visitors.admit("b", True, 0)
    assert visitors.admit("a", True, round(1e9 / doors.PAGE_HZ) + 1)
    for n in range(2 * doors.SESSIONS):
        visitors.admit(f"session {n}", False, 1)
    assert len(visitors._allowances) == doors.SESSIONS


def test_a_page_that_reads_nothing_is_told_nothing_more():
    page = Page(1, "", None, None)
    for _ in range(ANSWERS):
        page.say(type="pong", t=0)
    with pytest.raises(SchemaError, match="does not read"):
        page.say(type="pong", t=0)


def test_silent_connections_make_room_and_who_has_a_session_keeps_its_place(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            page = await rig.page()
            await heard(page, "state")
            silent = []
            for _ in range(3 * doors.STRANGERS):
                silent.append(await asyncio.open_connection("127.0.0.1", rig.port))
                assert len(rig.gateway.door._strangers) <= doors.STRANGERS
            async with await rig.browser() as newcomer, newcomer.get("/") as answer:
                assert answer.status == 200
            await page.send_str(json.dumps({"type": "ping", "t": 5}))
            assert (await heard(page, "pong"))["t"] == 5
            for _, writer in silent:
                writer.close()

    asyncio.run(scenario())


def test_one_is_accepted_in_a_turn_of_the_loop_and_who_is_silent_is_no_more_than_a_socket():
    async def scenario():
        made = []

        def serve():
            made.append(asyncio.Protocol())
            return made[-1]

        door = Door()
        await door.open(serve, "127.0.0.1", 0)
        address = door._listening[0].getsockname()
        crowd = [socket.create_connection(address) for _ in range(20)]
        before = 0
        async with asyncio.timeout(PATIENCE_S):
            while before < len(crowd):
                await asyncio.sleep(0)
                assert len(door._strangers) - before <= 1
                before = len(door._strangers)
            assert not made
            for stream in crowd[:9]:
                stream.close()
            crowd[9].sendall(b"x")
            while not made or len(door._strangers) > len(crowd) - 9:
                await asyncio.sleep(0)
        assert len(made) == 1  # of who has said something, not of who has left
        await door.close()
        for stream in crowd:
            stream.close()

    asyncio.run(scenario())


def test_a_stranger_has_one_answer(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            with socket.create_connection(("127.0.0.1", rig.port)) as stream:
                stream.setblocking(False)
                request = f"GET /heat HTTP/1.1\r\nHost: 127.0.0.1:{rig.port}\r\n\r\n".encode()
                await asyncio.get_running_loop().sock_sendall(stream, 3 * request)
                data = b""
                while part := await asyncio.get_running_loop().sock_recv(stream, 65536):
                    data += part
            assert data.count(b"HTTP/1.1 403") == 1

    asyncio.run(scenario())


def test_who_says_more_than_any_page_is_not_even_parsed(tmp_path, load_tool):
    """Frames without content, of two bytes each: no parser counts them."""
    pages = load_tool("bench/pages.py")

    def press(page):
        page.push(pages.frame(b"x", fin=False))
        try:
            while True:
                page.push(bytes(2 * round(doors.BYTES_HZ)))
        except OSError:
            return page.taken

    async def scenario():
        async with Rig(tmp_path) as rig:
            good = await rig.page()
            await heard(good, "state")
            bad = await asyncio.to_thread(pages.Page, rig.access, pages.session(rig.access))
            await asyncio.to_thread(press, bad)
            await good.send_str(json.dumps({"type": "ping", "t": 5}))
            assert (await heard(good, "pong"))["t"] == 5

    asyncio.run(scenario())
