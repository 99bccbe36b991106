"""Addresses of servers: ``tcp://HOST:PORT`` and ``ipc://PATH``; ``ws://HOST:PORT`` of those of openpi's protocol."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vla_stack.errors import UserError

OPENPI_SCHEMES = ("ws", "wss")


@dataclass(frozen=True)
class OpenpiAddress:
    """Where a server that speaks openpi's protocol is, and what it wants.

    Attributes:
        endpoint: ``ws://HOST:PORT`` or ``wss://HOST:PORT``.
        keys: Names of keys that differ from ours, see :meth:`~vla_stack.serving.openpi.Keys.of`.
        token: For ``Authorization: Api-Key``.
        certificate: PEM file of the server's certificate, where no authority signed it.
    """

    endpoint: str
    keys: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    certificate: Path | None = None


def is_local(endpoint: str) -> bool:
    """Whether nothing outside this machine can reach an endpoint.

    Raises:
        UserError: It is malformed.
    """
    family, address = parse(endpoint)
    if family != socket.AF_INET:
        return True
    try:
        return address[0] == "localhost" or ipaddress.IPv4Address(address[0]).is_loopback
    except ipaddress.AddressValueError:
        return False


def parse(endpoint: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Family and address of an endpoint: host and port (0 for ``*``), or path and 0.

    Raises:
        UserError: It is malformed.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return socket.AF_UNIX, (rest, 0)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or (port.isdigit() and int(port) < 1 << 16)):
        raise UserError(f"endpoint '{endpoint}' is not tcp://HOST:PORT or ipc://PATH", "e.g. tcp://127.0.0.1:5555")
    return socket.AF_INET, (host, 0 if port == "*" else int(port))
