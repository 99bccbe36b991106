"""The robot's side of a remote robot: offers a connected driver, ``robot_drivers.remote`` drives it from elsewhere.

This is a driver's far end and no control loop: it plans nothing, it forwards readings one way and commands the other.
Every command passes the envelope here. One that answers no reading, or one that is too old on the clock here, is
refused. A STOP lasts until a command says that the other side was re-armed since, or an episode begins. One computer
drives at a time: its lease is bound to its key, outlives its connection for ``LEASE_S``, and ends when it leaves or its
key is revoked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.clock import BEAT_NS, SPIN_NS, Clock, RealClock
from vla_stack.runtime.driver import Driver, EpisodicDriver, Fault, Guarded, SelfChecking
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import Observation
from vla_stack.serving.admission import Admission
from vla_stack.serving.keys import Role
from vla_stack.serving.listener import Listener, Mail, PeerGone

QUIET_STEPS = 3  # without a command before the robot holds
LEASE_S = 3.0  # that a lease outlives its holder's connection: a new one is made within two
MAX_TURNS, MAX_BYTES = 8, 4096  # of the network a control step, the rest waits; of a message
READINGS_KEPT = 4  # that a command may answer; one is on the way at a time


def serve_driver(
    driver: Driver,
    envelope: SafetyEnvelope,
    listener: Listener,
    running: Callable[[], bool],
    clock: Clock | None = None,
    admission: Admission | None = None,
) -> int:
    """Offer a connected driver to one remote robot at a time; returns how many commands were sent to it.

    Args:
        driver: The robot here.
        envelope: What any command has to pass.
        listener: Of messages up to :data:`MAX_BYTES`.
        running: Asked each control step; False ends it.
        clock: For tests; the network is attended to between control steps too where it is None.
        admission: Only keys that are operators now are listened to; None where nobody outside can reach the socket.
    """
    return _Service(driver, envelope, listener, clock, admission).run(running)


class _Write(NamedTuple):
    """A command: float32 [A], the step of the reading that it answers, how often the robot was re-armed there."""

    action: NDArray[np.float32]
    step: int
    arming: int


class _Service:
    def __init__(
        self,
        driver: Driver,
        envelope: SafetyEnvelope,
        listener: Listener,
        clock: Clock | None,
        admission: Admission | None,
    ) -> None:
        self._driver, self._envelope, self._listener = driver, envelope, listener
        self._clock, self._in_real_time, self._admission = clock or RealClock(), clock is None, admission
        self._inbox: list[Mail] = []  # what came between two control steps
        self._episodic = driver if isinstance(driver, EpisodicDriver) else None
        self._checking = driver if isinstance(driver, SelfChecking) else None
        self._beat = driver.beat if isinstance(driver, Guarded) else None
        self._dims = len(driver.spec.action)
        self._token, self._key, self._heard_ns = "", "", 0  # the lease: its name, empty where it is free, and its owner
        self._peer = b""  # the owner's connection, empty where it is lost
        self._episode = self._step = self._quiet = self._commands = self._arming = 0
        self._task, self._moving = "", False
        self._stopped: Fault | None = None  # until re-armed
        self._sent = (0, 0)  # episode and step of the newest reading under way
        self._under_way = False
        self._captured: dict[int, int] = {}  # step -> ns, of readings sent

    def run(self, running: Callable[[], bool]) -> int:
        dt_ns = round(1e9 * self._driver.spec.dt)
        t_k = self._clock.now_ns()
        while running():
            command = self._messages()
            if self._episode:
                self._tick(command)
            t_k = max(t_k + dt_ns, self._clock.now_ns() - dt_ns)
            self._wait(t_k)
        self._driver.hold()
        return self._commands

    def _wait(self, t_ns: int) -> None:
        while self._in_real_time and (left_ns := t_ns - self._clock.now_ns() - SPIN_NS) > 0:
            if self._beat is not None:
                self._beat()
            self._inbox += self._listener.receive(min(left_ns, BEAT_NS) * 1e-9)
        self._clock.sleep_until_ns(t_ns, self._beat)

    def _tick(self, command: _Write | None) -> None:
        obs = self._driver.read()
        fault = self._checking.fault if self._checking else None
        self._quiet = 0 if command is not None else self._quiet + 1
        if command is not None and command.arming > self._arming:
            self._arming, self._stopped = command.arming, None
        if fault is not None and fault.stop:
            self._stop(fault)
        if command is not None and self._stopped is None:
            self._obey(command, obs, fault)
        elif self._moving and self._quiet >= QUIET_STEPS:
            self._rest()
        self._send_reading(obs, fault)
        self._step += 1

    def _obey(self, command: _Write, obs: Observation, fault: Fault | None) -> None:
        if not self._moving:  # from wherever the robot has come to rest
            self._envelope.reset(obs.state[: self._dims])
        captured_ns = self._captured.get(command.step)
        age_s = np.inf if captured_ns is None else (self._clock.now_ns() - captured_ns) * 1e-9
        verdict = self._envelope.filter(command.action, age_s, fault.kind if fault else "")
        if verdict.command is None:
            why = f"the envelope of the robot's computer stopped it: {', '.join(verdict.changes)}"
            self._stop(Fault("envelope", why, True))
            return
        self._driver.write(verdict.command)
        self._moving = True
        self._commands += 1

    def _stop(self, why: Fault) -> None:
        if self._stopped is None:
            self._driver.stop()
        self._stopped, self._moving = self._stopped or why, False

    def _rest(self) -> None:
        self._moving = False
        self._driver.hold()

    # -- messages -------------------------------------------------------------------------------------------------

    def _messages(self) -> _Write | None:
        """Do what was asked; the newest command that came."""
        command = None
        for _ in range(MAX_TURNS):
            mail, self._inbox = self._inbox + self._listener.receive(), []
            if not mail:
                break
            for peer, key, frames in mail:
                try:
                    command = self._take(peer, key, msgpack.unpackb(frames[0]), command)
                except (KeyError, TypeError, ValueError, IndexError, OverflowError, msgpack.UnpackException):
                    continue  # not ours; a robot has no use for an argument about it
        return command

    def _take(self, peer: bytes, key: str, message: dict[str, Any], command: _Write | None) -> _Write | None:
        """Do what one message asks; the command that is in force after it."""
        kind, ours = message["kind"], peer == self._peer and key == self._key
        if not self._may_drive(key):
            self._answer(peer, kind="refused", why="this key may not drive: vla keys allow --role operator")
            if ours:
                self._release()
            return None if ours else command
        if kind == "hello":
            self._hello(peer, key, message["token"])
            return command
        if not ours:
            self._answer(peer, kind="unknown")
            return command
        self._heard_ns = self._clock.now_ns()
        if kind == "write":
            new = _Write(np.frombuffer(message["action"], np.float32), int(message["step"]), int(message["arming"]))
            return new if new.action.shape == (self._dims,) and message["episode"] == self._episode else command
        if kind == "taken":
            self._under_way &= (message["episode"], message["step"]) != self._sent
            return command
        if kind == "hold":
            self._rest()
        elif kind == "stop":
            self._stop(Fault("stop", "the robot was told to stop", True))
        elif kind == "reset":
            self._reset(int(message["seed"]), int(message["episode"]), int(message["arming"]))
        elif kind == "bye":
            self._release()
        return None

    def _may_drive(self, key: str) -> bool:
        try:
            return self._admission is None or self._admission.has_role(key, Role.OPERATOR)
        except UserError:  # the allow-list was damaged while the robot is served
            return False

    def _hello(self, peer: bytes, key: str, token: str) -> None:
        ours = key == self._key and self._token != "" and (peer == self._peer or token == self._token)
        if not ours:
            if not self._is_free():
                why = f"another computer drives this robot; it is free {LEASE_S:g} s after that one has left"
                self._answer(peer, kind="refused", why=why)
                return
            if self._token:
                self._release()
            self._token, self._key = secrets.token_hex(16), key
        if peer != self._peer:  # what was on its way over another connection is lost
            self._under_way = False
            self._listener.vouch(self._peer, False)
        self._peer, self._heard_ns = peer, self._clock.now_ns()
        self._listener.vouch(peer)
        stages = list(self._episodic.stages) if self._episodic else []
        self._answer(peer, kind="ready", spec=self._driver.spec.to_json(), stages=stages, token=self._token)

    def _is_free(self) -> bool:
        """Whether nobody drives: who is silent does while the connection stands, as a scene is set meanwhile."""
        if not self._token or not self._may_drive(self._key):
            return True
        if self._peer and self._is_silent():
            self._answer(self._peer, kind="asked")  # finds out whether its connection stands
        return not self._peer and self._is_silent()

    def _is_silent(self) -> bool:
        return self._clock.now_ns() - self._heard_ns > LEASE_S * 1e9

    def _release(self) -> None:
        self._rest()
        self._listener.vouch(self._peer, False)
        self._token, self._key, self._peer, self._episode = "", "", b"", 0

    def _reset(self, seed: int, episode: int, arming: int) -> None:
        if episode != self._episode:  # else asked again over a new connection
            self._rest()
            self._task = self._episodic.reset(seed) if self._episodic else self._driver.read().task
            self._episode, self._step, self._quiet = episode, 0, 0
            self._arming, self._stopped, self._under_way = arming, None, False
            self._captured.clear()
        self._answer(self._peer, kind="started", task=self._task)

    def _send_reading(self, obs: Observation, fault: Fault | None) -> None:
        if not self._peer or self._under_way:
            return
        header = {
            "kind": "reading",
            "episode": self._episode,
            "step": self._step,
            "task": obs.task,
            "state": obs.state.tobytes(),
            "captured_ns": obs.t_capture_ns,
            "sent_ns": self._clock.now_ns(),
            "status": dict(self._episodic.status()) if self._episodic else {"is_success": False, "done": False},
            "fault": list(fault) if fault else None,
            "stopped": list(self._stopped) if self._stopped else None,
            "arming": self._arming,
        }
        pictures = [np.ascontiguousarray(obs.images[c.name]).data.cast("B") for c in self._driver.spec.cameras]
        self._under_way = self._send(self._peer, [msgpack.packb(header), *pictures])
        if self._under_way:
            self._sent = (self._episode, self._step)
            self._captured[self._step] = obs.t_capture_ns
            if len(self._captured) > READINGS_KEPT:
                del self._captured[min(self._captured)]

    def _answer(self, peer: bytes, **message: Any) -> None:
        self._send(peer, [msgpack.packb({**message, "sent_ns": self._clock.now_ns()})])

    def _send(self, peer: bytes, frames: list[Any]) -> bool:
        try:
            return self._listener.send(peer, frames)
        except PeerGone:
            if peer == self._peer:
                self._rest()
                self._peer, self._heard_ns = b"", self._clock.now_ns()
            return False
