"""One open page: its connection, what it may say, what it is shown."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSCloseCode, web

from vla_stack.console.clocks import RemoteClock
from vla_stack.console.feed import Feed
from vla_stack.schema import SchemaError
from vla_stack.serving.rates import Allowance

PAGE_HZ, PAGE_BURST = 150.0, 150.0  # messages: three times what ours sends, and those of a stall of three seconds
COMMANDS_AT_ONCE = 8  # that are not answered yet
ANSWERS = 256  # that it has not read
CLOSE_S = 1.0  # that a farewell may take


@dataclass(eq=False)
class Page:
    """One open page.

    Attributes:
        number: That people see.
        session: Of its browser.
        lease: That the node knows it by.
        news: Set when there may be something for it.
        clock: Of its hand's messages.
        commands: That are not answered yet.
    """

    number: int
    session: str
    socket: web.WebSocketResponse
    transport: asyncio.WriteTransport | None
    lease: str = field(default_factory=lambda: secrets.token_hex(8))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    clock: RemoteClock = field(default_factory=RemoteClock)
    feed: Feed = field(default_factory=Feed)
    allowance: Allowance = field(default_factory=lambda: Allowance(PAGE_HZ, PAGE_BURST))
    answers: deque[dict[str, Any]] = field(default_factory=deque)
    commands: int = 0

    def say(self, **message: Any) -> None:
        """Tell it something as soon as it reads; does not wait.

        Raises:
            SchemaError: It has read nothing for long.
        """
        if len(self.answers) >= ANSWERS:
            raise SchemaError("this page does not read")
        self.answers.append(message)
        self.news.set()

    def acknowledged(self, number: int) -> bool:
        """Note that it has drawn something; how old a picture was it is told. False where it was not under way."""
        now_ns = time.monotonic_ns()
        if (shown := self.feed.acknowledged(number, now_ns)) is None:
            return False
        if shown.captured_ns:
            self.say(type="shown", n=number, age_ms=(now_ns - shown.captured_ns) * 1e-6)
        self.news.set()
        return True

    @contextlib.contextmanager
    def command(self) -> Iterator[None]:
        """While one of its commands is under way."""
        self.commands += 1
        try:
            yield
        finally:
            self.commands -= 1

    async def close(self, code: WSCloseCode, why: str) -> None:
        """Say good-bye and end the connection. Nothing that it says meanwhile is read."""
        farewell = asyncio.create_task(self.socket.close(code=code, message=why[:120].encode()))
        await asyncio.sleep(0)  # it is on its way; the rest would be to wait for an answer among all that is said
        if self.transport is not None:
            self.transport.close()
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(farewell, CLOSE_S)
        self.abort()

    def abort(self) -> None:
        """End the connection."""
        if self.transport is not None:
            self.transport.abort()
