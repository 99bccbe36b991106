"""Addresses of servers: ``tcp://HOST:PORT`` and ``ipc://PATH``; ``ws://HOST:PORT`` of those of openpi's protocol."""

from __future__ import annotations

import ipaddress
import socket
import ssl
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


def tls_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    """For a server, of PEM files of its certificate and key; UserError where they cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*certificate)
    except (OSError, ssl.SSLError) as e:
        files = " and ".join(map(str, certificate))
        raise UserError(
            f"no certificate and key in {files}: {e}",
            "make one with: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 "
            "-subj /CN=HOST -addext subjectAltName=DNS:HOST -keyout key.pem -out cert.pem",
        ) from None
    return context


def bound_websocket(endpoint: str, encrypted: bool, token: str | None) -> socket.socket:
    """The socket of ``ws://`` or ``wss://ADDRESS:PORT``, which nobody can connect to yet.

    Raises:
        UserError: It is in use, has another scheme, or can be reached from outside and lacks token or encryption.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme != ("wss" if encrypted else "ws"):
        raise UserError(
            f"endpoint '{endpoint}' is not {'wss' if encrypted else 'ws'}://HOST:PORT",
            "with --tls it is wss://, without ws://, e.g. ws://127.0.0.1:8000",
        )
    if not is_local(f"tcp://{rest}") and (token is None or not encrypted):
        raise UserError(
            f"{endpoint} can be reached from outside",
            "give --token FILE and --tls CERTIFICATE KEY, or listen on 127.0.0.1",
        )
    family, address = parse(f"tcp://{rest}")
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as e:
        bound.close()
        raise UserError(f"cannot listen on {endpoint}: {e.strerror}", "choose another --endpoint") from None
    return bound
