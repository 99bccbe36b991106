"""An operator's end of a robot node's channels: what a console, a gateway or a simulated operator talks through."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgpack
import zmq

from vla_stack.errors import UserError
from vla_stack.runtime.lease import holder_name
from vla_stack.runtime.link import Message
from vla_stack.runtime.operator_messages import ENDPOINT, Event, Reply, Teleop, channel, read_reply
from vla_stack.schema import SchemaError
from vla_stack.serving.keys import KeyFolder
from vla_stack.serving.transport import CurveKeys, is_local, new_socket, readable, receive, send, zmq_address

MAX_STATE_BYTES = 1 << 16
MAX_PICTURE_BYTES = 4 << 20
RESEND_S = 0.25


class OperatorClient:
    """One operator. Owned by one thread, all but :meth:`estop`, which has a socket for each call.

    Without the lease one may watch and stop the robot. With it (:meth:`call` ``acquire``) one drives, as long as
    :meth:`teleop` is called at least every 0.2 s while the dead-man is held, and once a second otherwise.

    Args:
        endpoint: The node's.
        keys: This computer's keys; the default folder where none is given and the node is on another computer.
        lease: Name of the lease; a new one by default.
        pictures: Whether to ask for pictures; who does not spares the node their encoding.

    Attributes:
        state: The newest state map of the node, empty before the first.
        frames: Camera -> (map of ``frame``, ``t_capture_ns``, ``width``, ``height``; JPEG), the newest.
        replies: Events that were answered and not taken yet, by id.
        rtt_ms: How long the last answered event took, milliseconds.
    """

    def __init__(
        self, endpoint: str = ENDPOINT, keys: KeyFolder | None = None, lease: str = "", pictures: bool = True
    ) -> None:
        self.endpoint, self.lease = endpoint, lease or secrets.token_hex(8)
        self.state: Message = {}
        self.frames: dict[str, tuple[Message, bytes]] = {}
        self.replies: dict[str, Reply] = {}
        self.rtt_ms = 0.0
        self._pictures = pictures
        self._curve: CurveKeys | None = None
        if keys is not None or not is_local(channel(endpoint, "event")):
            folder = keys or KeyFolder()
            identity = folder.identity()
            self._curve = CurveKeys(identity.public, identity.secret, folder.server_key(channel(endpoint, "teleop")))
        self._context = zmq.Context()
        self._teleop = self._connect(zmq.PUB, "teleop")
        self._events = self._connect(zmq.DEALER, "event")
        self._states = self._connect(zmq.SUB, "state")
        self._video = self._connect(zmq.SUB, "video")
        self._seq = 0
        self._waiting: dict[str, tuple[Event, int, float]] = {}  # id -> event, when first sent, when to send it again
        self._poller = zmq.Poller()
        for socket in (self._events, self._states, self._video):
            self._poller.register(socket, zmq.POLLIN)

    @property
    def holds_lease(self) -> bool:
        """Whether this operator drives, as of the newest state."""
        return bool(self.state) and self.state.get("lease") == holder_name(self.lease)

    def teleop(
        self,
        velocity: Any = None,
        target: Any = None,
        engaged: bool = False,
        rewind: bool = False,
        age_ns: int = 0,
    ) -> None:
        """Say where the hand is, or was ``age_ns`` ago; see :class:`Teleop`. Never waits."""
        self._seq += 1
        numbers = [None if v is None else tuple(float(x) for x in v) for v in (velocity, target)]
        message = Teleop(self.lease, self._seq, time.monotonic_ns() - age_ns, engaged, numbers[0], numbers[1], rewind)
        send(self._teleop, [message.pack()])

    def event(self, name: str, **args: Any) -> str:
        """Send an event, again and again until it is answered; returns its id. Never waits."""
        event = Event(secrets.token_hex(8), self.lease, name, args)
        self._waiting[event.id] = (event, time.monotonic_ns(), 0.0)
        self._resend()
        return event.id

    def call(self, name: str, timeout_s: float = 5.0, **args: Any) -> Reply:
        """Send an event and wait for its answer; teleop messages are the caller's affair meanwhile.

        Raises:
            UserError: There is none within ``timeout_s``.
        """
        wanted, deadline = self.event(name, **args), time.monotonic() + timeout_s
        while wanted not in self.replies:
            if time.monotonic() > deadline:
                self.forget(wanted)
                raise UserError(f"the robot node at {self.endpoint} does not answer", "is it running?")
            self.poll(20)
        return self.replies.pop(wanted)

    def forget(self, event_id: str) -> None:
        """Send an unanswered event no more; it may have been applied all the same."""
        self._waiting.pop(event_id, None)

    def poll(self, timeout_ms: int = 0) -> bool:
        """Take what has come into :attr:`state`, :attr:`frames` and :attr:`replies`; whether there was anything."""
        self._resend()
        self._poller.poll(timeout_ms)
        news = False
        while readable(self._events):
            frames = receive(self._events)
            news = True
            try:
                self._take(read_reply(frames[-1].buffer))
            except SchemaError:
                continue
        while readable(self._states):
            frames = receive(self._states)
            news = True
            self.state = msgpack.unpackb(frames[-1].buffer)
        while readable(self._video):
            frames = receive(self._video)
            if news := len(frames) == 3:
                camera, about, jpeg = (frame.buffer for frame in frames)
                self.frames[bytes(camera).decode()] = (msgpack.unpackb(about), bytes(jpeg))
        return news

    def estop(self) -> None:
        """Stop the robot, with or without the lease; from any thread. Waits until the node has it, at most 2 s.

        Raises:
            UserError: The node did not confirm it: use the hardware's own stop.
        """
        socket = self._connect(zmq.DEALER, "estop")
        socket.setsockopt(zmq.IMMEDIATE, 0)  # also where the connection is only being made
        try:
            socket.send(msgpack.packb({"lease": self.lease}))
            if not socket.poll(2000):
                raise UserError("the robot node did not confirm the stop", "press the robot's own emergency stop")
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """Close all sockets; the lease ends one second later unless it was released."""
        self._context.destroy(linger=0)

    def _connect(self, kind: int, name: str) -> zmq.Socket:
        socket = new_socket(self._context, kind, self._curve)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PICTURE_BYTES if name == "video" else MAX_STATE_BYTES)
        if name in ("teleop", "state"):
            socket.setsockopt(zmq.CONFLATE, 1)
        if name == "video":
            # libzmq ends the process (#3937) where a heartbeat gives up a connection that a full queue holds up.
            socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.RCVHWM, 4)
            socket.setsockopt(zmq.RCVBUF, 1 << 16)
        if kind == zmq.SUB and (self._pictures or name != "video"):
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.SNDHWM, 64)
        socket.connect(zmq_address(channel(self.endpoint, name)))
        return socket

    def _resend(self) -> None:
        now = time.monotonic()
        for event, sent_ns, due in list(self._waiting.values()):
            if now >= due and send(self._events, [event.pack()]):
                self._waiting[event.id] = (event, sent_ns, now + RESEND_S)

    def _take(self, reply: Reply) -> None:
        if (waiting := self._waiting.pop(reply.id, None)) is not None:
            self.rtt_ms = (time.monotonic_ns() - waiting[1]) * 1e-6
            self.replies[reply.id] = reply
