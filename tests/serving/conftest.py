"""Servers and clients that live as long as a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from serving_fakes import ROBOT, WAIT_S

from vla_stack.serving.client import PolicyClient
from vla_stack.serving.server import PolicyServer, ServerConfig
from vla_stack.serving.worker import ChunkPolicy


@contextmanager
def _running(server: PolicyServer) -> Iterator[PolicyServer]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., PolicyServer]]:
    """``serve(policy, endpoint=..., config=...)`` starts a server that is stopped when the test ends."""
    with ExitStack() as stack:

        def start(policy: ChunkPolicy, endpoint: str = "tcp://127.0.0.1:*", config: ServerConfig = ServerConfig()):
            return stack.enter_context(_running(PolicyServer(lambda: policy, endpoint, config)))

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., PolicyClient]]:
    """``connect(endpoint)`` returns a client that has said HELLO and is closed when the test ends."""
    with ExitStack() as stack:

        def start(endpoint: str, hello: bool = True) -> PolicyClient:
            client = PolicyClient(endpoint)
            stack.callback(client.close)
            if hello:
                client.hello(ROBOT, WAIT_S)
            return client

        yield start
