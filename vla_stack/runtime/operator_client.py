"""An operator's end of a robot node's channels: what a console, a gateway or a simulated operator talks through."""

from __future__ import annotations

import contextlib
import secrets
import select
import time
from collections import deque
from typing import Any

import msgpack

from vla_stack.errors import UserError
from vla_stack.runtime.lease import holder_name
from vla_stack.runtime.link import Message
from vla_stack.runtime.operator_messages import ENDPOINT, PRESENT, TAKEN, Event, Reply, Teleop, channel, read_reply
from vla_stack.schema import SchemaError
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.dialer import Dialer
from vla_stack.serving.keys import KeyFolder, client_keys

MAX_STATE_BYTES = 1 << 16
MAX_PICTURE_BYTES = 4 << 20
RESEND_S, PRESENT_S, TURN_S, ESTOP_S = 0.25, 1.0, 0.05, 2.0


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
        self._curve = client_keys(channel(endpoint, "teleop"), keys)  # of the node, for all channels
        self._teleop, self._events, self._states = map(self._connect, ("teleop", "event", "state"))
        self._video = self._connect("video") if pictures else None
        self._dialers = [self._teleop, self._events, self._states, *([self._video] if self._video else [])]
        self._seq = 0
        self._waiting: dict[str, tuple[Event, int]] = {}  # id -> event that is not answered, when it was first sent
        self._due: deque[tuple[float, str]] = deque()  # when to send an event again, the next one first
        self._unsent: deque[str] = deque()  # events that have never been sent
        self._present_at = dict.fromkeys(self._dialers, 0.0)  # when it is due to say again that somebody watches

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
        self._teleop.send([message.pack()], newest=True)
        self._teleop.receive()

    def event(self, name: str, **args: Any) -> str:
        """Send an event, again and again until it is answered; returns its id. Never waits.

        ``rearm`` is for the stops that :attr:`state` knows of now, unless ``stops`` says for which.
        """
        if name == "rearm":
            args = {"stops": self.state.get("stops"), **args}
        event = Event(secrets.token_hex(8), self.lease, name, args)
        self._waiting[event.id] = (event, time.monotonic_ns())
        self._unsent.append(event.id)
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
        end = time.monotonic() + timeout_ms * 1e-3
        while True:
            self._resend()
            news = self._take_turn()
            left = end - time.monotonic()
            if news or left <= 0:
                return news
            open_ones = [s for s in self._dialers if s.fileno() >= 0]
            select.select(open_ones, [s for s in open_ones if s.waiting], [], min(left, TURN_S))

    def _take_turn(self) -> bool:
        news = False
        self._teleop.receive()  # nothing comes, but the connection may have to be made again
        for frames in self._events.receive():
            with contextlib.suppress(SchemaError):
                self._take(read_reply(frames[-1]))
            news = True
        for frames in self._states.receive():
            self.state = msgpack.unpackb(frames[-1])
            news = True
        if self._video is not None:
            news |= self._take_pictures(self._video)
        now = time.monotonic()
        for dialer, due in self._present_at.items():
            if now > due and dialer.send([PRESENT]):
                self._present_at[dialer] = now + PRESENT_S
        return news

    def _take_pictures(self, video: Dialer) -> bool:
        pictures = video.receive()
        for frames in pictures:
            video.send([TAKEN])
            for camera, about, jpeg in zip(*[iter(frames)] * 3, strict=False):
                self.frames[bytes(camera).decode()] = (msgpack.unpackb(about), bytes(jpeg))
        return bool(pictures)

    def estop(self) -> None:
        """Stop the robot, with or without the lease; from any thread. See :func:`stop_robot`."""
        stop_robot(self.endpoint, self._curve)

    def close(self) -> None:
        """Close all sockets; the lease ends one second later unless it was released."""
        for dialer in self._dialers:
            dialer.close(0.01)

    def _connect(self, name: str) -> Dialer:
        limit = MAX_PICTURE_BYTES if name == "video" else MAX_STATE_BYTES
        return Dialer(channel(self.endpoint, name), self._curve, limit)

    def _resend(self) -> None:
        """Send what is new, then what is due again, as far as the connection takes it: each event is looked at once."""
        now = time.monotonic()
        while self._unsent or (self._due and self._due[0][0] <= now):
            name = self._unsent[0] if self._unsent else self._due[0][1]
            if name in self._waiting:
                if not self._events.send([self._waiting[name][0].pack()]):
                    return
                self._due.append((now + RESEND_S, name))
            if self._unsent:
                self._unsent.popleft()
            else:
                self._due.popleft()

    def _take(self, reply: Reply) -> None:
        if (waiting := self._waiting.pop(reply.id, None)) is not None:
            self.rtt_ms = (time.monotonic_ns() - waiting[1]) * 1e-6
            self.replies[reply.id] = reply


def stop_robot(endpoint: str, curve: CurveKeys | None = None) -> None:
    """Stop the robot of a node by a connection of its own. Waits until the node has it, at most 2 s.

    Args:
        endpoint: The node's.
        curve: This computer's keys and the node's; None on this machine.

    Raises:
        UserError: The node did not confirm it: use the hardware's own stop.
    """
    dialer, end, sent = Dialer(channel(endpoint, "estop"), curve), time.monotonic() + ESTOP_S, False
    try:
        while not dialer.receive(0.1 if sent else 0.002):
            sent = sent or dialer.send([b"stop"])
            if time.monotonic() > end:
                raise UserError("the robot node did not confirm the stop", "press the robot's own emergency stop")
    finally:
        dialer.close()
