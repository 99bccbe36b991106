"""Who gets in: tokens once, sessions, Host, Origin, TLS."""

import asyncio
import copy
import ssl
import stat
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar, TCPConnector, WSServerHandshakeError
from toy_console import ROBOT, free_port

from vla_stack.console.access import Access, tls_context
from vla_stack.console.door import opened
from vla_stack.console.gateway import About, Gateway
from vla_stack.errors import UserError
from vla_stack.runtime.operator_client import OperatorClient


class Rig:
    """A gateway without a node, and a browser's worth of cookies."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.port = free_port()
        self.access = Access(host, self.port, tls is not None)
        self.invited: list[str] = []
        client = OperatorClient(f"ipc://{folder}/nobody")
        about = About(ROBOT, ("reach",), "teleop", folder / "data")
        self.gateway = Gateway(client, about, self.access, self.invited.append)
        self.host, self.tls = host, tls

    async def __aenter__(self):
        self.served = opened(self.gateway.app(), self.gateway.door, self.host, self.port, self.tls)
        await self.served.__aenter__()
        self.http = ClientSession(
            self.access.base, cookie_jar=CookieJar(unsafe=True), connector=TCPConnector(ssl=False)
        )
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.served.__aexit__(None, None, None)

    async def open(self, address: str) -> int:
        async with self.http.get(address.removeprefix(self.access.base)) as answer:
            return answer.status

    async def connect(self, **headers: str) -> int:
        try:
            async with self.http.ws_connect("/ws", headers=headers) as socket:
                assert (await socket.receive_json())["type"] == "hello"
                return 101
        except WSServerHandshakeError as e:
            return e.status


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_token_opens_one_browser_once(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            assert await rig.open("/") == 403
            assert await rig.open("/static/app.js") == 403
            assert await rig.open("/?token=guess") == 403
            address = rig.access.invite()
            assert await rig.open(address) == 200
            assert len(rig.invited) == 1 and rig.invited[0] != address
            assert await rig.open("/") == 200 and await rig.open("/static/app.js") == 200
            rig.http.cookie_jar.clear()
            assert await rig.open(address) == 403
            assert await rig.open(rig.invited[0]) == 200

    run(scenario())


def test_only_the_consoles_own_page_acts(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            own = rig.access.base
            assert await rig.connect(Origin=own) == 403  # no session yet
            await rig.open(rig.access.invite())
            assert await rig.connect(Origin=own) == 101
            assert await rig.connect(Origin="http://evil.example") == 403
            assert await rig.connect(Origin=own.replace("http", "https")) == 403
            assert await rig.connect(Origin="null") == 403
            assert await rig.connect() == 403  # a browser always says where a page is from
            assert await rig.connect(Origin=own, Host="evil.example") == 421
            async with rig.http.post("/invite") as answer:
                assert answer.status == 403
            async with rig.http.post("/invite", headers={"Origin": own}) as answer:
                assert (await answer.json())["address"].startswith(f"{own}/?token=")

    run(scenario())


def test_a_page_that_breaks_the_rules_is_shown_out(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            await rig.open(rig.access.invite())
            for bad in ("{}", '{"type": "ping", "t": 1}' + " " * 5000, b"bytes"):
                async with rig.http.ws_connect("/ws", headers={"Origin": rig.access.base}) as socket:
                    await socket.receive_json()
                    await (socket.send_bytes(bad) if isinstance(bad, bytes) else socket.send_str(bad))
                    await socket.receive()
                    assert socket.close_code in (1008, 1009)

    run(scenario())


def test_answers_carry_headers_that_keep_other_pages_out(tmp_path):
    async def scenario():
        async with Rig(tmp_path) as rig:
            await rig.open(rig.access.invite())
            async with rig.http.get("/") as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
                assert answer.headers["Referrer-Policy"] == "no-referrer"
            async with rig.http.get("/static/../access.py") as answer:
                assert answer.status in (403, 404)

    run(scenario())


def test_a_session_is_signed_and_another_process_knows_it():
    access = Access("127.0.0.1", 8765, tls=False)
    session = access.redeem(access.invite().partition("token=")[2])
    name, _, signature = session.partition(".")
    assert access.known(session) and copy.deepcopy(access).known(session)
    for forged in ("", ".", name, f"{name}.", f"{name}x.{signature}", f"{name}.{signature[:-1]}", "ä.\udcff"):
        assert not access.known(forged)
    assert not Access("127.0.0.1", 8765, tls=False).known(session)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_console_has_one_address(host):
    with pytest.raises(UserError, match="no address to open"):
        Access(host, 8765, tls=True)


def test_off_this_computer_only_with_tls():
    with pytest.raises(UserError, match="TLS"):
        Access("192.168.1.20", 8765, tls=False)
    assert Access("192.168.1.20", 8765, tls=True).base == "https://192.168.1.20:8765"


def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_KEYS", str(tmp_path / "keys"))
    _, first = tls_context("robot.lab", None, None)
    _, again = tls_context("robot.lab", None, None)
    _, other = tls_context("192.168.1.20", None, None)
    assert first == again != other
    keys = list((tmp_path / "keys" / "console").glob("*.key"))
    assert len(keys) == 2 and all(stat.S_IMODE(k.stat().st_mode) == 0o600 for k in keys)
    with pytest.raises(UserError, match="go together"):
        tls_context("robot.lab", keys[0], None)
    with pytest.raises(UserError, match="no certificate"):
        tls_context("robot.lab", keys[0], keys[1])


def test_the_page_is_served_over_tls(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_KEYS", str(tmp_path / "keys"))
    context, _ = tls_context("localhost", None, None)
    certificate = next((tmp_path / "keys" / "console").glob("*.crt"))

    async def scenario():
        async with Rig(tmp_path, "localhost", context) as rig:
            trusted = ssl.create_default_context(cafile=certificate)  # checks the name, too
            async with ClientSession(connector=TCPConnector(ssl=trusted)) as browser:
                async with browser.get(rig.access.invite()) as answer:
                    assert answer.status == 200
                    cookie = answer.headers["Set-Cookie"]
                    assert all(word in cookie for word in ("Secure", "HttpOnly", "SameSite=Strict"))

    run(scenario())
