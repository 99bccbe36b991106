"""Servers and clients that live as long as a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from serving_fakes import ROBOT, WAIT_S

from vla_stack.serving.client import PolicyClient
from vla_stack.serving.server import PolicyServer, ServerConfig
from vla_stack.serving.worker import ChunkPolicy


class Servers:
    """Servers on threads of their own, stopped when the test ends."""

    def __init__(self) -> None:
        self._threads: dict[PolicyServer, threading.Thread] = {}

    def start(
        self, policy: ChunkPolicy, endpoint: str = "tcp://127.0.0.1:*", config: ServerConfig = ServerConfig()
    ) -> PolicyServer:
        return self.start_with(lambda: policy, endpoint, config)

    def start_with(
        self,
        load: Callable[[], ChunkPolicy],
        endpoint: str = "tcp://127.0.0.1:*",
        config: ServerConfig = ServerConfig(),
        log_file: Path | None = None,
    ) -> PolicyServer:
        server = PolicyServer(load, endpoint, config, log_file=log_file)
        self._threads[server] = threading.Thread(target=server.run)
        self._threads[server].start()
        return server

    def stop(self, server: PolicyServer) -> None:
        server.stop()
        self._threads[server].join(WAIT_S)
        assert not self._threads.pop(server).is_alive()

    def restart(self, server: PolicyServer, policy: ChunkPolicy) -> PolicyServer:
        """Another server at the address of ``server``, which is stopped first."""
        self.stop(server)
        return self.start(policy, server.endpoint)

    def close(self) -> None:
        for server in list(self._threads):
            self.stop(server)


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def serve(servers: Servers) -> Callable[..., PolicyServer]:
    """``serve(policy, endpoint=..., config=...)`` starts a server."""
    return servers.start


@pytest.fixture
def restart(servers: Servers) -> Callable[..., PolicyServer]:
    """``restart(server, policy)`` replaces a server by another one at the same address."""
    return servers.restart


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
