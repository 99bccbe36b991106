"""Socket options and the address rule that server and client share.

ZeroMQ's defaults suit trusted networks: no size limit, no heartbeats, a thousand queued messages, and a close that
waits for ever. A robot wants the opposite of each.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq
from zmq.backend import Socket as RawSocket
from zmq.backend import zmq_poll

from vla_stack.errors import UserError
from vla_stack.serving.wire import MAX_FRAME_BYTES, MAX_TENSORS

COPY_BYTES = 64 << 10  # a smaller frame is copied faster than ZeroMQ reports back that its memory is free again
# Without the conveniences around each call, which cost as much as the call.
raw_send: Any = RawSocket.send
raw_recv: Any = RawSocket.recv
NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)  # Python's flags are slow to combine
MORE = NOBLOCK | int(zmq.SNDMORE)
QUEUED_MESSAGES = 8  # per peer and direction: a burst of reset, request and ping; older data is of no use to a robot


def is_local(endpoint: str) -> bool:
    """Whether nothing outside this machine can reach an endpoint.

    Raises:
        UserError: It is malformed.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc") and rest:
        return True
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or port.isdigit()):
        raise UserError(f"endpoint '{endpoint}' is not tcp://HOST:PORT or ipc://PATH", "e.g. tcp://127.0.0.1:5555")
    if host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ipaddress.AddressValueError:
        return False


def zmq_address(endpoint: str) -> str:
    """An endpoint as ZeroMQ binds it, which knows interfaces and addresses but not the name ``localhost``."""
    return endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:")


class CurveKeys(NamedTuple):
    """Keys of a connection, Z85 text: one's own pair and, at the client, the server's public one."""

    public: str
    secret: str
    server: str = ""


def new_socket(context: zmq.Context, kind: int, keys: CurveKeys | None = None) -> zmq.Socket:
    """A socket that forgets rather than waits: small queues, heartbeats, bounded frames, no lingering.

    Args:
        context: ZeroMQ context.
        kind: ``zmq.ROUTER``, ``zmq.DEALER`` or, for what an operator sends and sees, ``zmq.PUB``, ``XPUB``, ``SUB``.
        keys: Encrypt and authenticate with these keys; None for connections that stay on this machine.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 200)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for live connections only
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that left is an error, not a silent loss
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        if keys.server:
            socket.curve_serverkey = keys.server.encode()
        else:
            socket.curve_server = True
    return socket


def send(socket: zmq.Socket, frames: Sequence[bytes | memoryview]) -> bool:
    """Send without waiting; False if the queue is full or nobody is connected. Large frames are not copied.

    Raises:
        zmq.ZMQError: EHOSTUNREACH, the peer that a ROUTER should send to has left.
    """
    for _ in range(2):
        try:
            for frame in frames[:-1]:
                raw_send(socket, frame, MORE, len(frame) < COPY_BYTES)
            raw_send(socket, frames[-1], NOBLOCK, len(frames[-1]) < COPY_BYTES)
            return True
        except zmq.Again:
            # ZeroMQ takes note of what the other side has read at most once a millisecond while one only sends, so a
            # full queue may be an old truth; asking for EVENTS brings it up to date.
            socket.getsockopt(zmq.EVENTS)
    return False


def readable(socket: zmq.Socket) -> bool:
    """Whether a message waits; cheaper than to catch what :func:`receive` raises where none does."""
    return bool(zmq_poll([(socket, POLLIN)], 0))


def wait_readable(sockets: Sequence[zmq.Socket], timeout_ms: int) -> list[zmq.Socket]:
    """The sockets at which a message waits, after at most ``timeout_ms``."""
    return [socket for socket, _ in zmq_poll([(socket, POLLIN) for socket in sockets], timeout_ms)]


def receive(socket: zmq.Socket) -> list[zmq.Frame]:
    """Frames of the next message without copying.

    MAXMSGSIZE bounds a frame, not their number: frames beyond what any message may have (routing id, header, tensors)
    are dropped here except one, so that the decoder sees that there were too many.

    Raises:
        zmq.Again: There is none.
    """
    frame = raw_recv(socket, NOBLOCK, False)
    frames = [frame]
    while frame.more:
        frame = raw_recv(socket, 0, False)
        if len(frames) < MAX_TENSORS + 3:
            frames.append(frame)
    return frames


def owner(frame: zmq.Frame) -> str:
    """Public key of the peer that sent a frame, as the authenticator saw it; empty on a connection without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
