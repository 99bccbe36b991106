"""Who may talk to whom off this machine: CurveZMQ keys, an allow-list with roles, and pinned servers.

One folder a computer (``~/.config/vla-stack`` or ``VLA_KEYS``)::

    identity.json   this computer's name, public and secret key; mode 0600
    allowed.json    server: public keys that may connect, each with a name and a role
    trusted.json    robot: servers by host and port, each with the one public key that it must prove to own

CurveZMQ (http://curvezmq.org) encrypts and authenticates both ends; a public key is 40 characters that can be sent by
any channel on which nobody can exchange them.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from vla_stack.errors import UserError
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.endpoint import is_local

KEY_LENGTH = 40  # Z85 text of 32 bytes


class Role(StrEnum):
    """What a peer may ask of a server."""

    ROBOT = "robot"  # sessions and action chunks
    OPERATOR = "operator"  # to drive a robot through its node's operator channels
    OBSERVER = "observer"  # whether the server lives


@dataclass(frozen=True)
class Identity:
    """This computer's key pair; keys are Z85 text."""

    name: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Identity({self.name}, {self.public})"  # the secret does not get into logs


@dataclass(frozen=True)
class Peer:
    """An entry of the allow-list."""

    name: str
    role: Role


class KeyFolder:
    """The keys of one computer.

    Args:
        path: The folder; by default ``VLA_KEYS``, or ``vla-stack`` in the user's configuration folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        self.path = Path(path or os.environ.get("VLA_KEYS") or Path(config) / "vla-stack")

    def create(self, name: str) -> Identity:
        """Make this computer's keys; those that exist are never overwritten.

        Raises:
            UserError: There are keys already.
        """
        public, secret = zmq.curve_keypair()
        while not public[:1].isalnum():  # "-..." reads as an option where somebody types it after `vla keys allow`
            public, secret = zmq.curve_keypair()
        identity = Identity(name, public.decode(), secret.decode())
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self.path / "identity.json"
        try:  # private from its first byte on
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise UserError(f"{file} exists", "keep it, or delete it first: peers then have to be told again") from None
        with os.fdopen(handle, "w") as f:
            f.write(json.dumps(asdict(identity), indent=1) + "\n")
        return identity

    def identity(self) -> Identity:
        """This computer's keys.

        Raises:
            UserError: There are none, they are damaged, or others can read them.
        """
        file = self.path / "identity.json"
        if not file.is_file():
            raise UserError(f"this computer has no keys ({file} is missing)", "make them with: vla keys create NAME")
        if os.name == "posix" and stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise UserError(
                f"{file} can be read by others", f"chmod 600 {file}, or make new keys if they may have been"
            )
        body = self._read("identity.json")
        try:
            return Identity(str(body["name"]), check_key(body["public"]), check_key(body["secret"]))
        except KeyError as e:
            raise UserError(f"{file} has no {e}", "delete it and make new keys with: vla keys create NAME") from None

    def allowed(self) -> dict[str, Peer]:
        """Allow-list of a server: public key -> peer."""
        try:
            return {check_key(k): Peer(str(v["name"]), Role(v["role"])) for k, v in self._read("allowed.json").items()}
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{self.path / 'allowed.json'} is damaged: {e!r}", "write it with: vla keys allow"
            ) from None

    def allow(self, public: str, name: str, role: Role) -> None:
        """Let a peer connect to servers of this computer; a name stands for one key."""
        key = check_key(public)  # before anything is taken away
        others = {k: value for k, value in self._read("allowed.json").items() if value.get("name") != name}
        self._write("allowed.json", others | {key: {"name": name, "role": str(role)}})

    def revoke(self, name: str) -> None:
        """Take a peer off the allow-list; running servers notice.

        Raises:
            UserError: There is no such peer.
        """
        body = self._read("allowed.json")
        kept = {key: value for key, value in body.items() if value.get("name") != name}
        if len(kept) == len(body):
            names = ", ".join(sorted(value.get("name", "") for value in body.values())) or "nobody"
            raise UserError(f"'{name}' is not on the allow-list", f"it holds {names}")
        self._write("allowed.json", kept)

    def trust(self, server: str, public: str) -> None:
        """Pin the key of a server, ``HOST:PORT``."""
        self._write("trusted.json", self._read("trusted.json") | {address(server): check_key(public)})

    def server_key(self, endpoint: str) -> str:
        """Pinned key of the server at an endpoint.

        Raises:
            UserError: None is pinned: who answers there cannot be told from an impostor.
        """
        key = self._read("trusted.json").get(address(endpoint))
        if key is None:
            raise UserError(
                f"no key is pinned for the server {address(endpoint)}",
                f"run `vla keys show` there, then here: vla keys trust {address(endpoint)} 'KEY'",
            )
        return check_key(key)

    def pins(self, endpoint: str) -> bool:
        """Whether a key is pinned for the server at an endpoint."""
        return endpoint.startswith("tcp://") and address(endpoint) in self._read("trusted.json")

    def _read(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            body = json.loads(file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            raise UserError(f"{file} cannot be read: {e}") from None
        if not isinstance(body, dict):
            raise UserError(f"{file} is not a JSON object")
        return body

    def _write(self, name: str, body: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = self.path / f".{name}.tmp"
        partial.write_text(json.dumps(body, indent=1) + "\n")
        os.replace(partial, self.path / name)


class AllowList:
    """The allow-list of a running server: re-read when its file changes.

    Args:
        folder: The server's keys.
    """

    def __init__(self, folder: KeyFolder) -> None:
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._peers: dict[str, Peer] = {}
        self.peer("")  # a damaged list is an error at once, not at the first connection

    def peer(self, public: str) -> Peer | None:
        """Who owns a public key; None: nobody that may connect."""
        try:
            status = (self._folder.path / "allowed.json").stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            self._stamp, self._peers = None, {}
            return None
        if stamp != self._stamp:
            self._peers, self._stamp = self._folder.allowed(), stamp
        return self._peers.get(public)


def client_keys(endpoint: str, folder: KeyFolder | None = None) -> CurveKeys | None:
    """Keys for a connection to a server; None where it lies on this machine and no key is pinned for it.

    Args:
        endpoint: Of the server.
        folder: This computer's keys, which are then used in any case; the default folder where None.

    Raises:
        UserError: Keys are needed and missing.
    """
    wanted, folder = folder is not None or not is_local(endpoint), folder or KeyFolder()
    if not wanted and not folder.pins(endpoint):
        return None
    identity = folder.identity()
    return CurveKeys(identity.public, identity.secret, folder.server_key(endpoint))


def check_key(text: Any) -> str:
    """``text`` if it is a key.

    Raises:
        UserError: It is not 40 characters of Z85.
    """
    try:
        if isinstance(text, str) and len(text) == KEY_LENGTH:
            z85.decode(text.encode("ascii"))
            return text
    except (ValueError, KeyError, UnicodeError):
        pass
    raise UserError(f"'{str(text)[:60]}' is not a key", "a key is the 40 characters that `vla keys show` prints")


def address(endpoint: str) -> str:
    """``HOST:PORT`` of an endpoint.

    Raises:
        UserError: It is neither ``tcp://HOST:PORT`` nor ``HOST:PORT``.
    """
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (colon and host and port.isdigit()):
        raise UserError(f"'{endpoint}' is not HOST:PORT", "e.g. gpu.lab:5555")
    return f"{host}:{port}"
