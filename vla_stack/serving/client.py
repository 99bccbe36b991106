"""The robot's half of the wire: never blocks, needs no torch, survives the server.

The caller owns time: it decides when a request is late and asks again. The client sees to it that what comes back
belongs to a request that is still wanted, and that a server that comes back goes on with the plan of the same policy.
Between two plans it may have other weights, as a server that follows a training has each time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.schema import ActionChunk, Continuation, Observation, PolicySpec, RobotSpec
from vla_stack.serving import jpeg, messages, wire
from vla_stack.serving.dialer import Dialer, no_server
from vla_stack.serving.endpoint import is_local
from vla_stack.serving.keys import KeyFolder, client_keys
from vla_stack.serving.pictures import TRIES, How, Pictures, choose, codec_seconds, read_shapes, sendable
from vla_stack.serving.pixels import PixelRing
from vla_stack.serving.wire import Code, Kind, Message, WireError

POLICY_CHANGED = "POLICY_CHANGED"
HELLO_INTERVAL_NS = 200_000_000
SILENCE_NS = 3_000_000_000
PUSH_S = 0.002  # that sending a picture may take at once; the rest goes with the next polls
PENDING = 64  # requests remembered; older ones will not be answered any more
TURNS = 8  # of the connection, by one poll: a server that floods its robots must not hold one up
TRAINED = (
    "serve a policy that was trained on this robot's data; where the policy's unit is 1, its data did not say theirs:"
    " `vla data import` brings a dataset of LeRobot's into SI units"
)
REMEDIES = {  # how a refusal names what differs (``messages.robot_difference``) -> what to do about it
    "this robot: rate_hz": "leave out --robot-arg rate_hz or control_hz, and `vla run` takes the policy's rate",
    "this robot: camera": "give the robot the policy's cameras, by --robot-arg cameras and image_size",
    "this robot: state": TRAINED,
    "this robot: action": TRAINED,
}


@dataclass(frozen=True, slots=True)
class ServerError:
    """A refusal, as :meth:`PolicyClient.poll` returns it.

    Attributes:
        code: A ``wire.Code``, or ``POLICY_CHANGED``: the server came back with a policy that cannot go on with the
            plan, or refuses this robot. Nothing is sent from then on until :meth:`PolicyClient.hello` is called again.
        text: One line for people.
        rid: Request that was refused, -1 if it concerns none.
        epoch: Epoch of that request.
    """

    code: str
    text: str
    rid: int = wire.NO_REQUEST
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Server's monotonic clock minus the robot's, from the fastest of the recent round trips.

    The true offset lies within ``round_trip_ns / 2`` of ``offset_ns``. For metrics only: staleness is judged by the
    robot's own timestamps.
    """

    offset_ns: int
    round_trip_ns: int


class PolicyClient:
    """Connection of one robot to one policy server. Not thread-safe: one thread owns it.

    Args:
        endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``. A server off this machine must prove that it owns the key
            that is pinned for it.
        keys: This computer's keys; the default folder where none is given.
        pictures: In what form they are sent.

    Attributes:
        policy: What the server said it serves, None before :meth:`hello`.
        clock: Clock offset and fastest round trip from :meth:`ping`, None before the first answer.
        last_pong_ns: Robot's monotonic clock when the server last answered a PING, None before the first answer.
        discarded: Replies that were filtered out, by reason (``stale``, ``malformed``).
        sends: In what form pictures are sent, AUTO before :meth:`hello` has decided.

    Raises:
        UserError: The endpoint is malformed, or lies off this machine and keys are missing.
    """

    def __init__(self, endpoint: str, keys: KeyFolder | None = None, pictures: Pictures = Pictures()) -> None:
        self._endpoint = endpoint
        self._socket = Dialer(endpoint, client_keys(endpoint, keys), wire.MAX_FRAME_BYTES)
        self._connection = 0  # the one that the server knows this robot by
        self._heard_ns = time.monotonic_ns()
        self._robot: RobotSpec | None = None
        self._sid = ""
        self._epoch = 0
        self._pending: dict[int, int] = {}  # rid -> epoch
        self._planned = False  # whether a chunk of this epoch is here, which the next one is to go on from
        self._hello_sent_ns: int | None = None  # set while a WELCOME is awaited
        self._pings: deque[ClockOffset] = deque(maxlen=64)
        self._offered: PixelRing | None = None  # memory for pictures, until a WELCOME says whether it is used
        self._ring: PixelRing | None = None
        self._codecs: tuple[str, ...] = ()  # of the server
        self.sends = self._wish = pictures
        self.policy: PolicySpec | None = None
        self.clock: ClockOffset | None = None
        self.last_pong_ns: int | None = None
        self.discarded: Counter[str] = Counter()

    @property
    def connected(self) -> bool:
        """Whether there is a session: requests can be sent."""
        return bool(self._sid) and self._hello_sent_ns is None and self._connection == self._socket.connections

    def hello(self, robot: RobotSpec | None, timeout_s: float = 30.0) -> PolicySpec:
        """Open a session and wait until the server is ready; the only call that waits.

        Without a robot it only asks what is served, so that a robot can be set up for it, and opens none.

        Raises:
            UserError: No answer in time, or the policy is not for this robot (the text names the field).
        """
        self._robot, self.policy, self._sid = robot, None, ""
        self._say_hello()
        started = time.monotonic()
        deadline = started + timeout_s
        last = ServerError("", "no answer")
        while self.policy is None:
            left_s = deadline - time.monotonic()
            start = f"start one with: vla serve --policy DIR --endpoint {self._endpoint}"
            if self._socket.hopeless(started) or (left_s <= 0 and not self._socket.ready):
                raise no_server(self._socket, "policy server", start)
            if left_s <= 0:
                raise UserError(f"policy server {self._endpoint}: {last.text} within {timeout_s:g} s", start)
            for item in self.poll(timeout_ms=min(100, round(left_s * 1e3))):
                if isinstance(item, ServerError):
                    last = item
                    if item.code not in (Code.NOT_READY, Code.BUSY):
                        text = f"policy server {self._endpoint} refused: {item.text} [{item.code}]"
                        raise UserError(text, next((r for what, r in REMEDIES.items() if what in item.text), ""))
        if robot is None:
            self._sid = ""
        else:
            self.sends = self._decide(self.policy, deadline)
        return self.policy

    def _decide(self, policy: PolicySpec, deadline: float) -> Pictures:
        """In what form pictures are sent to this server; over a network a few of a request's size are sent to see."""
        wish = self._wish
        if not jpeg.AVAILABLE or (wish.how is How.AUTO and (not policy.robot.cameras or is_local(self._endpoint))):
            return replace(wish, how=How.CAMERA)
        if jpeg.CODEC not in self._codecs:
            return replace(wish, how=How.CAMERA if wish.how is How.CAMERA else How.RAW)
        if wish.how is not How.AUTO:
            return wish
        shapes = read_shapes(policy)
        full = {f"probe {i}": np.zeros(shape, np.uint8) for i, shape in enumerate(shapes)}
        empty_s, full_s = (min(self._trip(load, deadline) for _ in range(TRIES)) for load in ({}, full))
        return choose(full_s - empty_s, codec_seconds(shapes, wish.quality), wish.quality)

    def _trip(self, load: Mapping[str, NDArray[np.uint8]], deadline: float) -> float:
        """Seconds until a PING with a load is answered; what there was until the deadline where it is not."""
        before, begun = self.last_pong_ns, time.monotonic()
        self._send(Message(Kind.PING, self._sid, self._epoch, fields={"t0": time.monotonic_ns()}, tensors=load))
        while self.last_pong_ns == before and time.monotonic() < deadline:
            self.poll(timeout_ms=20)
        return time.monotonic() - begun

    def request(
        self,
        obs: Observation,
        rid: int,
        epoch: int,
        origin: int,
        seed: int,
        continuation: Continuation | None = None,
        slack_ms: int | None = None,
    ) -> bool:
        """Ask for a chunk that starts at tick ``origin`` and continues a plan, if there is one. Never blocks.

        The server serves those first whose answer is due first, ``slack_ms`` from now, and does not compute what is
        overdue.

        The arrays of ``obs`` are sent without a copy: they must not be written to afterwards.

        Returns:
            False if nothing was sent: the server is away, a session is being renewed, or the queue is full.

        Raises:
            WireError: The observation does not fit the format, e.g. float64 objects or an image over 8 MiB.
        """
        if epoch > self._epoch:
            self._forget_until(epoch)
        if not self.connected or epoch < self._epoch:
            return False
        pixels = self._ring.put(obs.images) if self._ring else None
        compressed: dict[str, wire.Jpeg] = {}
        if pixels is None and self.policy is not None:
            images, compressed = sendable(obs.images, self.policy.reads, self.sends)
            obs = replace(obs, images=images)
        message = messages.infer(obs, self._sid, epoch, rid, origin, seed, continuation, slack_ms, pixels, compressed)
        if not self._send(message):
            return False
        self._pending[rid] = epoch
        if len(self._pending) > PENDING:
            del self._pending[next(iter(self._pending))]
        return True

    def poll(self, timeout_ms: int = 0) -> list[ActionChunk | ServerError]:
        """What has arrived; waits at most ``timeout_ms`` for something to. Filters what is no longer wanted.

        Also renews the session after a server restart: call it regularly.
        """
        if self._hello_sent_ns is not None and time.monotonic_ns() - self._hello_sent_ns > HELLO_INTERVAL_NS:
            self._say_hello()
        items: list[ActionChunk | ServerError] = []
        for _ in range(TURNS):
            arrived = self._socket.receive(timeout_ms * 1e-3)
            if self._socket.connections != self._connection and self._socket.ready:
                self._connection = self._socket.connections
                if self._sid or self._hello_sent_ns is not None:
                    self._say_hello()  # a server knows nothing of who comes by a new connection
            if not arrived:
                break
            timeout_ms, self._heard_ns = 0, time.monotonic_ns()
            for frames in arrived:
                try:
                    item = self._handle(wire.decode(frames))
                except WireError as e:
                    self.discarded["malformed"] += 1
                    item = ServerError(e.code, f"server's message is malformed: {e.text}")
                if item is not None:
                    items.append(item)
        return items

    def reset(self, epoch: int) -> None:
        """Start epoch ``epoch``: nothing that was asked before is wanted any more. Never blocks.

        The same epoch again says that its plan is over.
        """
        self._forget_until(epoch)
        if self.connected:
            self._send(Message(Kind.RESET, self._sid, epoch))

    def ping(self) -> None:
        """Send a PING; a later :meth:`poll` updates :attr:`clock`. Never blocks.

        Connects anew where nothing has been heard for seconds.
        """
        if self._socket.ready and time.monotonic_ns() - self._heard_ns > SILENCE_NS:
            self._socket.restart()
            self._heard_ns = time.monotonic_ns()
        self._send(Message(Kind.PING, self._sid, self._epoch, fields={"t0": time.monotonic_ns()}))

    def close(self) -> None:
        """Say BYE and close; a second call does nothing."""
        if self._socket.closed:
            return
        if self._sid:
            self._send(Message(Kind.BYE, self._sid, self._epoch))
        self._take_ring(None)
        self._socket.close(0.1)

    def _send(self, message: Message) -> bool:
        sent = self._socket.send(wire.encode(message))
        self._socket.flush(PUSH_S)
        return sent

    def _say_hello(self) -> None:
        self._hello_sent_ns = time.monotonic_ns()
        if self._offered is None and self._robot is not None and self._endpoint.startswith("ipc://"):
            with suppress(OSError):  # without it pictures are sent
                self._offered = PixelRing(self._robot)
        ring = self._offered.name if self._offered else None
        self._send(messages.hello(self._robot, self._epoch, self._sid, ring))

    def _take_ring(self, used: str | None) -> None:
        """The server has opened the memory that was offered, or has not; its name is not needed any more."""
        self._ring = self._offered if self._offered and self._offered.name == used else None
        if self._offered:
            self._offered.unlink()
        self._offered = None

    def _forget_until(self, epoch: int) -> None:
        self._epoch, self._planned = epoch, False
        self._pending.clear()

    # -- replies -------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> ActionChunk | ServerError | None:
        if message.kind is Kind.CHUNK:
            return self._on_chunk(message)
        if message.kind is Kind.WELCOME:
            return self._on_welcome(message)
        if message.kind is Kind.PONG:
            self._on_pong(message)
            return None
        if message.kind is Kind.ERR:
            return self._on_error(message)
        raise WireError(Code.BAD_SCHEMA, f"a robot does not take {message.kind}")

    def _is_wanted(self, message: Message) -> bool:
        return message.sid == self._sid and self._pending.get(message.rid) == message.epoch == self._epoch

    def _on_chunk(self, message: Message) -> ActionChunk | None:
        if self.policy is None or not self._is_wanted(message):
            self.discarded["stale"] += 1
            return None
        chunk = messages.read_chunk(message, self.policy)
        del self._pending[message.rid]
        self._planned = True
        return chunk

    def _on_welcome(self, message: Message) -> ServerError | None:
        policy = messages.read_welcome(message)
        if self._hello_sent_ns is None:
            self._on_swap(message, policy)
            return None
        differs = messages.policy_difference if self._planned else messages.plan_difference
        difference = differs(policy, self.policy) if self.policy else None
        self._hello_sent_ns = None
        self._codecs = tuple(message.fields.get("codecs", "").split())
        self._take_ring(message.fields.get("ring"))
        self._pending.clear()
        self._pings.clear()  # another server, another clock
        if difference:
            self._sid = ""
            return ServerError(POLICY_CHANGED, f"the server came back with another policy: {difference}")
        self.policy, self._sid = policy, message.sid
        return None

    def _on_swap(self, message: Message, policy: PolicySpec) -> None:
        """A WELCOME that was not asked for: from the epoch that begins on, the server answers with other weights."""
        known = self.policy if message.sid == self._sid else None
        if known is None or policy == known or messages.plan_difference(policy, known):
            self.discarded["stale"] += 1  # e.g. the answer to a repeated HELLO; a connection keeps its session id
        else:
            self.policy = policy

    def _on_pong(self, message: Message) -> None:
        t3 = self.last_pong_ns = time.monotonic_ns()
        t0, t1, t2 = (message.fields.get(key, 0) for key in ("t0", "t1", "t2"))
        self._pings.append(ClockOffset(((t1 - t0) + (t2 - t3)) // 2, (t3 - t0) - (t2 - t1)))
        self.clock = min(self._pings, key=lambda sample: sample.round_trip_ns)
        if self.connected and message.sid != self._sid:
            self._say_hello()

    def _on_error(self, message: Message) -> ServerError | None:
        code, text = message.fields.get("code", Code.INTERNAL), message.fields.get("text", "")
        if message.rid != wire.NO_REQUEST:
            if not self._is_wanted(message):
                self.discarded["stale"] += 1
                return None
            del self._pending[message.rid]
            if code == Code.NO_SESSION and self.connected:
                self._say_hello()
        elif self._hello_sent_ns is not None and code in (Code.BAD_SCHEMA, Code.VERSION, Code.AUTH):
            self._hello_sent_ns, self._sid = None, ""  # HELLO is refused for good: asking again changes nothing
            if self.policy is not None:
                return ServerError(POLICY_CHANGED, f"the server came back and refuses this robot: {text}")
        return ServerError(code, text, message.rid, message.epoch)
