"""CurveZMQ: what two peers say to each other before and around encrypted messages (https://rfc.zeromq.org/spec/26/).

Both ends prove that they own their long-term key; every connection has keys of its own, which are forgotten with it.
The curve and the cipher are libsodium's (PyNaCl). Keys are 32 bytes here; elsewhere they are 40 characters of Z85.

CurveZMQ's cipher takes longer than all else that happens to a picture on its way. So a client names a faster one in its
INITIATE (``X-Cipher``), a server that knows it repeats the name in its READY, both of which are encrypted already, and
messages go by it from then on: AES-256-GCM, or ChaCha20-Poly1305 from a computer without instructions for AES. Peers
that say nothing, as ZeroMQ's own, go on with CurveZMQ's.

    client                                                  server
    HELLO     C', proof of C' to S                 ──►
                                                   ◄──  WELCOME   S', cookie
    INITIATE  cookie, C, proof that C owns C'      ──►       allowed? else ERROR 400
                                                   ◄──  READY
    MESSAGE                                        ◄─►  MESSAGE
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from nacl.bindings import (
    crypto_box,
    crypto_box_afternm,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open,
    crypto_box_open_afternm,
)
from nacl.exceptions import CryptoError
from zmq.utils import z85

from vla_stack.serving.zmtp import COMMAND, MORE, ProtocolError, Refusal, metadata, properties

HELLO, WELCOME, INITIATE, READY = b"\x05HELLO", b"\x07WELCOME", b"\x08INITIATE", b"\x05READY"
MESSAGE = b"\x07MESSAGE"
OVERHEAD = len(MESSAGE) + 8 + 16 + 1  # of an encrypted frame: name, nonce, authenticator, flags
PAD = bytes(4)  # before a number, as a nonce of 12 bytes
COMMAND_INSIDE = 2  # what COMMAND is in an encrypted frame
NOT_ALLOWED = b"\x05ERROR\x03400"
CIPHERS: dict[bytes, type[AESGCM] | type[ChaCha20Poly1305]]
CIPHERS = {b"AES-256-GCM": AESGCM, b"ChaCha20-Poly1305": ChaCha20Poly1305}


class CurveKeys(NamedTuple):
    """Keys of a connection, Z85 text: one's own pair and, at the client, the server's public one."""

    public: str
    secret: str
    server: str = ""


class Aead(NamedTuple):
    """A connection's faster cipher, with a key for each direction."""

    ours: AESGCM | ChaCha20Poly1305
    theirs: AESGCM | ChaCha20Poly1305


class _Curve:
    """What both ends have: keys of this connection, and a counter that makes every nonce new.

    Attributes:
        cipher: Name of the faster cipher by which messages go; empty: CurveZMQ's own.
    """

    name = b"CURVE"
    overhead = OVERHEAD
    _ours, _theirs = b"", b""  # prefixes of nonces

    def __init__(self, keys: CurveKeys) -> None:
        self._public, self._secret = z85.decode(keys.public.encode()), z85.decode(keys.secret.encode())
        self._short_public, self._short_secret = crypto_box_keypair()
        self._shared, self.cipher = b"", b""
        self._aead: Aead | None = None
        self._sent = self._heard = 0
        self.ready = False
        self.key = ""

    def seal(self, flags: int, payload: bytes | memoryview) -> tuple[int, list[bytes | memoryview]]:
        """An encrypted frame: its flags travel inside, or, with a faster cipher, before it and sealed with it."""
        number, inside = self._next(), bytes((COMMAND_INSIDE if flags & COMMAND else flags,))
        if self._aead:
            return 0, [MESSAGE + number + inside, self._aead.ours.encrypt(PAD + number, payload, inside)]
        return 0, [MESSAGE + number, crypto_box_afternm(inside + payload, self._ours + number, self._shared)]

    def open(self, flags: int, frame: bytes | memoryview) -> tuple[int, memoryview]:
        """Inverse of :meth:`seal`; flags and payload.

        Raises:
            ProtocolError: It is not encrypted for this connection, or is a copy.
        """
        if len(frame) < OVERHEAD or frame[:8] != MESSAGE:
            raise ProtocolError("a frame that is not encrypted")
        number = bytes(frame[8:16])
        self._check(number)
        if self._aead:
            inside = frame[16]
            payload = memoryview(_opened(self._aead.theirs.decrypt, PAD + number, frame[17:], bytes((inside,))))
        else:
            box = _opened(crypto_box_open_afternm, bytes(frame[16:]), self._theirs + number, self._shared)
            inside, payload = box[0], memoryview(box)[1:]
        if inside not in (0, MORE, COMMAND_INSIDE):
            raise ProtocolError("unknown flags of an encrypted frame")
        return COMMAND if inside == COMMAND_INSIDE else inside, payload

    def _go_by(self, cipher: bytes) -> None:
        """Let messages go by a faster cipher from now on."""
        ours, theirs = (CIPHERS[cipher](_derived(self._shared, name)) for name in (self._ours, self._theirs))
        self.cipher, self._aead = cipher, Aead(ours, theirs)

    def _next(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(8, "big")

    def _check(self, number: bytes) -> None:
        if (heard := int.from_bytes(number, "big")) <= self._heard:
            raise ProtocolError("a nonce that was used before")
        self._heard = heard


class CurveServer(_Curve):
    """The server's end.

    Args:
        keys: The server's.
        admits: Whether a public key (Z85 text) may connect.

    Attributes:
        key: Public key that the peer has proved to own, Z85 text; empty before.
    """

    as_server = True
    _ours, _theirs = b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC"

    def __init__(self, keys: CurveKeys, admits: Callable[[str], bool]) -> None:
        super().__init__(keys)
        self._admits, self._cookie, self._peer = admits, b"", b""

    def begin(self, kind: bytes) -> list[bytes]:
        self._kind = kind
        return []

    def handshake(self, command: bytes) -> list[bytes]:
        """Answers to a command of the handshake.

        Raises:
            Refusal: The key is not allowed.
            ProtocolError: It is no handshake.
        """
        if command.startswith(HELLO) and len(command) == 200 and not self._cookie:
            return [self._welcome(command)]
        if command.startswith(INITIATE) and len(command) >= 257 and self._cookie:
            return [self._admit(command)]
        raise ProtocolError("not a CURVE handshake")

    def _welcome(self, hello: bytes) -> bytes:
        self._peer, number = hello[80:112], hello[112:120]
        self._check(number)
        shared = crypto_box_beforenm(self._peer, self._secret)
        zeros = _opened(crypto_box_open_afternm, hello[120:], b"CurveZMQHELLO---" + number, shared)
        if zeros != bytes(64):
            raise ProtocolError("a HELLO that proves nothing")
        self._cookie = secrets.token_bytes(96)  # the connection's own memory says the rest
        nonce = secrets.token_bytes(16)
        box = crypto_box_afternm(self._short_public + self._cookie, b"WELCOME-" + nonce, shared)
        return WELCOME + nonce + box

    def _admit(self, initiate: bytes) -> bytes:
        cookie, number = initiate[9:105], initiate[105:113]
        if not secrets.compare_digest(cookie, self._cookie):
            raise ProtocolError("another connection's cookie")
        self._check(number)
        self._shared = crypto_box_beforenm(self._peer, self._short_secret)
        content = _opened(crypto_box_open_afternm, initiate[113:], b"CurveZMQINITIATE" + number, self._shared)
        if len(content) < 128:
            raise ProtocolError("an INITIATE without a vouch")
        public, nonce, vouch = content[:32], content[32:48], content[48:128]
        if (
            _opened(crypto_box_open, vouch, b"VOUCH---" + nonce, public, self._short_secret)
            != self._peer + self._public
        ):
            raise ProtocolError("a vouch for another connection")
        key = z85.encode(public).decode()
        if not self._admits(key):
            raise Refusal(f"key {key} is not on the allow-list", NOT_ALLOWED)
        self.key, self.ready = key, True
        number, cipher = self._next(), properties(content[128:]).get("X-Cipher", b"")
        said = metadata(self._kind, cipher=cipher) if cipher in CIPHERS else metadata(self._kind)
        ready = READY + number + crypto_box_afternm(said, b"CurveZMQREADY---" + number, self._shared)
        if cipher in CIPHERS:
            self._go_by(cipher)
        return ready


class CurveClient(_Curve):
    """The client's end; ``keys.server`` is whom it believes."""

    as_server = False
    _ours, _theirs = b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES"

    def __init__(self, keys: CurveKeys) -> None:
        super().__init__(keys)
        self.key, self._server = keys.server, z85.decode(keys.server.encode())
        self._welcomed = False
        self._offers = b"AES-256-GCM" if computes_aes() else b"ChaCha20-Poly1305"

    def begin(self, kind: bytes) -> list[bytes]:
        self._kind, number = kind, self._next()
        proof = crypto_box(bytes(64), b"CurveZMQHELLO---" + number, self._server, self._short_secret)
        return [HELLO + b"\x01\x00" + bytes(72) + self._short_public + number + proof]

    def handshake(self, command: bytes) -> list[bytes]:
        """See :meth:`CurveServer.handshake`."""
        if command.startswith(WELCOME) and len(command) == 168 and not self._welcomed:
            self._welcomed = True
            return [self._initiate(command)]
        if command.startswith(READY) and len(command) >= 30 and self._welcomed:
            number = command[6:14]
            self._check(number)
            said = _opened(crypto_box_open_afternm, command[14:], b"CurveZMQREADY---" + number, self._shared)
            if properties(said).get("X-Cipher") == self._offers:
                self._go_by(self._offers)
            self.ready = True
            return []
        if command.startswith(b"\x05ERROR"):
            raise Refusal("the server does not allow this computer's key" if self._welcomed else "refused")
        raise ProtocolError("not a CURVE handshake")

    def _initiate(self, welcome: bytes) -> bytes:
        nonce = b"WELCOME-" + welcome[8:24]
        content = _opened(crypto_box_open, welcome[24:], nonce, self._server, self._short_secret)
        server, cookie = content[:32], content[32:]
        self._shared = crypto_box_beforenm(server, self._short_secret)
        nonce = secrets.token_bytes(16)
        vouch = crypto_box(self._short_public + self._server, b"VOUCH---" + nonce, server, self._secret)
        number = self._next()
        content = self._public + nonce + vouch + metadata(self._kind, cipher=self._offers)
        box = crypto_box_afternm(content, b"CurveZMQINITIATE" + number, self._shared)
        return INITIATE + cookie + number + box


def computes_aes(about: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this computer has instructions for AES, without which it is slow; where nothing says so, it has."""
    try:
        return " aes" in about.read_text()
    except OSError:
        return True


def _derived(shared: bytes, direction: bytes) -> bytes:
    """A key of 32 bytes for one direction, of what both ends share."""
    return blake2b(direction, digest_size=32, key=shared).digest()


def _opened(function: Callable[..., bytes], *args: bytes | memoryview) -> bytes:
    try:
        return function(*args)
    except (CryptoError, InvalidTag):
        raise ProtocolError("a box that these keys do not open") from None
