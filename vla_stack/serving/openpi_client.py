"""A robot of this project on a server that speaks openpi's websocket protocol, openpi's own above all.

The interface is that of :class:`~vla_stack.serving.client.PolicyClient`. A thread holds the connection, so that
nothing here waits for the network: at most one request is on its way, and while it is, only the newest is kept. The
protocol continues no plans, so chunks are computed from the observation alone, and it knows no epochs: an answer to
what was asked before a reset is thrown away here.
"""

from __future__ import annotations

import logging
import queue
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from vla_stack.errors import UserError
from vla_stack.schema import F4, ActionChunk, Continuation, Observation, PolicySpec, RobotSpec, SchemaError, finite
from vla_stack.serving import messages
from vla_stack.serving.client import ClockOffset, ServerError
from vla_stack.serving.endpoint import OpenpiAddress
from vla_stack.serving.openpi import SPEC_KEY, Keys, pack, unpack
from vla_stack.serving.trees import MAX_BYTES
from vla_stack.serving.wire import Code, WireError

log = logging.getLogger(__name__)

AGAIN_S = 0.2  # between two attempts to connect
MAX_HORIZON = 10_000


@dataclass(frozen=True)
class _Request:
    """What the thread sends, and what becomes of its answer."""

    observation: Observation
    rid: int
    epoch: int
    origin: int


class OpenpiClient:
    """Connection of one robot to one server. Not thread-safe: one thread owns it.

    Args:
        address: Of the server.

    Attributes:
        policy: What is served: as the server describes it, or as this robot is, with the length of the chunks that
            come. None before :meth:`hello`.
        clock: None; the protocol has no clocks.
        last_pong_ns: Robot's monotonic clock when the server last answered, None before.
        discarded: Answers that were not wanted any more, by reason.
    """

    clock: ClockOffset | None = None

    def __init__(self, address: OpenpiAddress) -> None:
        self._endpoint, self._named = address.endpoint, address.keys
        self._headers = {"Authorization": f"Api-Key {address.token}"} if address.token else None
        self._ssl = _trusting(address.certificate) if address.endpoint.startswith("wss:") else None
        self._keys: Keys | None = None
        self._epoch = 0
        self._asked: _Request | None = None  # to be sent next
        self._changed = threading.Condition()
        self._arrived: queue.SimpleQueue[tuple[_Request | None, dict[str, Any] | ServerError]] = queue.SimpleQueue()
        self._closed = False
        self._connection: ClientConnection | None = None
        self._refused = ""  # for good
        self._metadata: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._talk, name="vla-openpi", daemon=True)
        self.policy: PolicySpec | None = None
        self.last_pong_ns: int | None = None
        self.discarded: Counter[str] = Counter()

    @property
    def connected(self) -> bool:
        """Whether a request would be sent."""
        return self.policy is not None and self._connection is not None

    def hello(self, robot: RobotSpec | None, timeout_s: float = 30.0) -> PolicySpec | None:
        """Connect and wait for the greeting; the only call that waits.

        A server that does not describe its policy is asked once about a blank observation, to learn how long its chunks
        are. Without a robot nothing is asked: None where the server says nothing about its policy.

        Raises:
            UserError: No answer in time, or what comes is not for this robot.
        """
        deadline = time.monotonic() + timeout_s
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._connection is not None or self._refused, timeout_s)
        if self._connection is None:
            why = self._refused or "does not answer"
            raise UserError(f"openpi server {self._endpoint} {why}", "is it running there? does it want --token?")
        spec = self._described()
        if robot is None:
            return spec
        if spec is not None:
            difference = messages.robot_difference(robot, spec.robot)
            if difference:
                raise UserError(f"policy of {self._endpoint} was not trained for this robot: {difference}")
        self._keys = Keys.of(robot, self._named)
        if len(self._keys.state) != 1:
            raise UserError(f"--keys: one key for the state to send, not {len(self._keys.state)}")
        self.policy = spec or PolicySpec(robot, self._measure_horizon(robot, deadline), model_version=self._endpoint)
        return self.policy

    def _described(self) -> PolicySpec | None:
        if not isinstance(found := self._metadata.get(SPEC_KEY), dict):
            return None
        try:
            spec = PolicySpec.from_json(found)
        except SchemaError as e:
            raise UserError(f"openpi server {self._endpoint}: {e}") from None
        return PolicySpec(spec.robot, spec.horizon, spec.normalisation, spec.model_version)  # it continues no plans

    def _measure_horizon(self, robot: RobotSpec, deadline: float) -> int:
        blank = Observation(
            np.zeros(len(robot.state), np.float32),
            {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in robot.cameras},
            "",
        )
        self._ask(_Request(blank, -1, -1, 0))
        try:
            _, answer = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise UserError(f"openpi server {self._endpoint} computed nothing in time") from None
        if isinstance(answer, ServerError):
            raise UserError(f"openpi server {self._endpoint}: {answer.text}", "name its keys with --keys")
        try:
            return len(_actions(answer, robot, None))
        except WireError as e:
            raise UserError(f"openpi server {self._endpoint}: {e.text}", "serve a policy for this robot") from None

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
        """Ask for a chunk that starts at tick ``origin``; what was asked and not sent yet is forgotten. Never blocks.

        ``seed``, ``continuation`` and ``slack_ms`` are not in the protocol.

        Returns:
            False if there is no connection.
        """
        self._epoch = max(self._epoch, epoch)
        if not self.connected or epoch < self._epoch:
            return False
        self._ask(_Request(obs, rid, epoch, origin))
        return True

    def poll(self, timeout_ms: int = 0) -> list[ActionChunk | ServerError]:
        """What has arrived; waits at most ``timeout_ms`` for something to."""
        items: list[ActionChunk | ServerError] = []
        with suppress(queue.Empty):
            arrived = self._arrived.get(block=timeout_ms > 0, timeout=timeout_ms * 1e-3 or None)
            while True:
                item = self._chunk(*arrived)
                if item is not None:
                    items.append(item)
                arrived = self._arrived.get_nowait()
        return items

    def _chunk(self, asked: _Request | None, answer: dict[str, Any] | ServerError) -> ActionChunk | ServerError | None:
        if asked is None:
            return answer if isinstance(answer, ServerError) else None
        if asked.epoch != self._epoch:
            self.discarded["stale"] += 1
            return None
        if isinstance(answer, ServerError):
            return answer
        assert self.policy is not None
        try:
            actions = _actions(answer, self.policy.robot, self.policy.horizon)
            execute = answer.get("execute", 0)
            if type(execute) is not int or not 0 <= execute <= self.policy.horizon:
                raise WireError(Code.BAD_SCHEMA, "'execute' is not a number of the chunk's steps")
        except WireError as e:
            self.discarded["malformed"] += 1
            return ServerError(e.code, f"server's message is malformed: {e.text}", asked.rid, asked.epoch)
        return ActionChunk(
            actions,
            asked.origin,
            asked.observation.step,
            asked.rid,
            asked.epoch,
            model_version=self.policy.model_version,
            execute=execute,
        )

    def reset(self, epoch: int) -> None:
        """Start epoch ``epoch``: nothing that was asked before is wanted any more."""
        self._epoch = epoch
        with self._changed:
            self._asked = None

    def ping(self) -> None:
        """Nothing: the connection pings by itself, and ends where no answer comes."""

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._connection is not None:
            with suppress(OSError, WebSocketException):
                self._connection.close_socket()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    # -- thread -------------------------------------------------------------------------------------------------------

    def _ask(self, request: _Request) -> None:
        with self._changed:
            self._asked = request
            self._changed.notify_all()

    def _next(self) -> _Request | None:
        with self._changed:
            self._changed.wait_for(lambda: self._asked is not None or self._closed)
            request, self._asked = self._asked, None
            return None if self._closed else request

    def _talk(self) -> None:
        while not self._closed:
            asked: _Request | None = None
            try:
                with connect(
                    self._endpoint,
                    compression=None,
                    max_size=MAX_BYTES,
                    additional_headers=self._headers,
                    ssl=self._ssl,
                    open_timeout=3.0,
                    close_timeout=0.2,
                    ping_interval=2.0,
                    ping_timeout=4.0,
                ) as connection:
                    self._metadata = unpack(_binary(connection.recv(timeout=None)))
                    with self._changed:
                        self._connection, self._asked = connection, None
                        self._changed.notify_all()
                    while (asked := self._next()) is not None:
                        assert self._keys is not None  # hello() names them before anything is asked
                        connection.send(pack(self._keys.message(asked.observation)))
                        answer = connection.recv()
                        self.last_pong_ns = time.monotonic_ns()
                        self._arrived.put((asked, self._read(answer, asked)))
            except InvalidStatus as e:
                status = e.response.status_code
                self._refused = f"refuses: {status} {(e.response.body or b'').decode('utf8', 'replace').strip()[:200]}"
            except Exception as e:  # what it may be, the robot must hear of it; mostly the connection ended
                if not isinstance(e, (OSError, WebSocketException, WireError)):
                    log.exception("openpi server %s", self._endpoint)
                if asked is not None:
                    text = f"the connection ended: {e}"[:300]
                    self._arrived.put((asked, ServerError(Code.NO_SESSION, text, asked.rid, asked.epoch)))
            with self._changed:
                self._connection = None
                self._changed.notify_all()
                if self._refused and self.policy is None:
                    return
                self._changed.wait_for(lambda: self._closed, AGAIN_S)

    def _read(self, answer: str | bytes, asked: _Request) -> dict[str, Any] | ServerError:
        try:
            return unpack(_binary(answer))
        except WireError as e:
            return ServerError(e.code, e.text, asked.rid, asked.epoch)


def _trusting(certificate: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificate)
    except (OSError, ssl.SSLError) as e:
        raise UserError(f"no certificate in {certificate}: {e}", "name the server's cert.pem with --tls") from None


def _binary(answer: str | bytes) -> bytes:
    """What a server says in text is that something went wrong, often a traceback: its last line is the reason."""
    if isinstance(answer, str):
        raise WireError(Code.INTERNAL, (answer.strip().splitlines() or ["no reason given"])[-1][:300])
    return answer


def _actions(answer: Mapping[str, Any], robot: RobotSpec, horizon: int | None) -> np.ndarray:
    """Float32 [H, A] of an answer; WireError where it is anything else."""
    actions = answer.get("actions")
    if not isinstance(actions, np.ndarray) or actions.ndim != 2 or actions.dtype.kind not in "fiu":
        raise WireError(Code.BAD_SCHEMA, "the answer has no 'actions' [steps, dimensions]")
    expected = (horizon or len(actions), len(robot.action))
    if actions.shape != expected or not 0 < len(actions) <= MAX_HORIZON:
        raise WireError(Code.BAD_SCHEMA, f"'actions' are {list(actions.shape)}, expected {list(expected)}")
    with np.errstate(over="ignore"):
        actions = actions.astype(F4)
    if not finite(actions):
        raise WireError(Code.BAD_SCHEMA, "'actions' are not finite")
    return actions
