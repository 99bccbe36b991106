"""Addresses of servers: ``tcp://HOST:PORT`` and ``ipc://PATH``."""

from __future__ import annotations

import ipaddress
import socket

from vla_stack.errors import UserError


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
