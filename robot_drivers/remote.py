"""A robot on another computer: this driver here, ``remote_service`` (``vla robot serve``) there.

Two-way ZeroMQ, msgpack headers and raw pictures, CURVE keys off this machine. The computer at the robot reads it at its
rate and passes every command through its own safety envelope; without a command for three control steps it holds. So a
network that fails stops the robot there, whatever happens here.

A reading is sent once the one before has been taken: none waits on the way and grows old. A command names the reading
that it answers, and is refused there if that one is too old on the clock there.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.driver import Capabilities, Fault, Guard, Status
from vla_stack.runtime.lease import DRIFT
from vla_stack.schema import Observation, RobotSpec, SchemaError
from vla_stack.serving.connection import Frames
from vla_stack.serving.dialer import Dialer, no_server
from vla_stack.serving.keys import client_keys

CONNECT_S, RESET_S = 10.0, 30.0
MAX_READING_BYTES = 64 << 20
GREET_S = 0.25  # between two attempts to be known again over a new connection
LOST_STEPS, STOP_S = 3, 1.0  # without a reading: the link is at fault; and the robot is stopped here


class RemoteRobot:
    """An :class:`~vla_stack.runtime.driver.EpisodicDriver` for a robot that ``vla robot serve`` offers.

    The first :meth:`write` after a :meth:`stop` re-arms the robot's side: whoever stopped here has re-armed by then.

    Args:
        endpoint: ``tcp://HOST:PORT`` of that computer.
        task: Instruction in place of the robot's own.
    """

    capabilities = Capabilities(guard=Guard.DEVICE)

    def __init__(self, endpoint: str, task: str | None = None) -> None:
        self._endpoint, self._task = endpoint, task
        self._spec: RobotSpec | None = None
        self._socket: Any = None
        self._newest: Observation | None = None
        self._status: Status = {"is_success": False, "done": False}
        self._fault: Fault | None = None
        self._latched: Fault | None = None  # why the robot's side is stopped and waits to be re-armed
        self._fresh, self._episode = False, 0
        self._arming, self._stopped = 0, False
        self._token, self._refused, self._greeted = "", "", 0.0
        self._taken: dict[str, Any] | None = None  # for the robot's side, not sent yet
        self._offset_ns: int | None = None  # of the two clocks, had the quickest message taken no time
        self._offset_at_ns = 0
        self.stages: tuple[str, ...] = ()

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("a remote robot has no description before connect()")
        return self._spec

    @property
    def fault(self) -> Fault | None:
        if self._refused:
            return Fault("link", f"{self._endpoint}: {self._refused}", True)
        if self._newest is not None and self._silent():
            age_s = self._age_s(self._newest)
            return Fault("link", f"no reading from {self._endpoint} for {age_s:.1f} s", age_s > STOP_S)
        return self._fault or (None if self._stopped else self._latched)

    def connect(self) -> None:
        """Say hello.

        Raises:
            UserError: Nobody answers, what answers is no robot, or another computer drives it.
        """
        self._socket = Dialer(self._endpoint, client_keys(self._endpoint), MAX_READING_BYTES)
        self._token = self._refused = ""
        try:
            about = self._ask({"kind": "hello", "token": ""}, "ready", CONNECT_S)
            self._spec, self.stages = RobotSpec.from_json(about["spec"]), tuple(about["stages"])
        except (KeyError, SchemaError) as e:
            raise UserError(f"{self._endpoint} is no robot: {e}", "give the endpoint of `vla robot serve`") from e

    def reset(self, seed: int) -> str:
        self._episode += 1
        self._newest = self._fault = self._latched = None
        self._stopped = False
        message = {"kind": "reset", "seed": seed, "episode": self._episode, "arming": self._arming}
        started = self._ask(message, "started", RESET_S)
        return self._task or str(started["task"])

    def read(self) -> Observation:
        """The newest reading; waits up to half a step for one that was not read yet."""
        until = time.monotonic() + (0.5 * self.spec.dt if self._newest is not None else CONNECT_S)
        self._take(0.0)
        while not self._fresh and (left := until - time.monotonic()) > 0:
            self._take(min(left, GREET_S))
            if not self._fresh and self._silent():
                self._greet()
        if self._newest is None:
            raise UserError(f"no reading from {self._endpoint}", "look at the robot's computer")
        self._fresh = False
        return self._newest

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        sent = np.clip(np.asarray(action, np.float32), self.spec.action_low, self.spec.action_high)
        if self._stopped:
            self._stopped, self._latched = False, None
            self._arming += 1
        step = -1 if self._newest is None else self._newest.step
        message = {"kind": "write", "episode": self._episode, "step": step, "arming": self._arming}
        self._post({**message, "action": sent.tobytes()})
        return sent

    def hold(self) -> None:
        self._post({"kind": "hold"})

    def stop(self) -> None:
        self._stopped = True
        self._post({"kind": "stop"})

    def status(self) -> Status:
        return self._status

    def disconnect(self) -> None:
        if self._socket is not None:
            self._post({"kind": "bye"})
            self._socket.close(0.1)
            self._socket = None

    def _age_s(self, obs: Observation) -> float:
        return (time.monotonic_ns() - obs.t_capture_ns) * 1e-9

    def _silent(self) -> bool:
        return self._newest is None or self._age_s(self._newest) > LOST_STEPS * self.spec.dt + 0.1

    def _post(self, message: dict[str, Any]) -> bool:
        return bool(self._socket.send([msgpack.packb(message)]))

    def _greet(self) -> None:
        """Say who this is: a connection that was lost and made again is a stranger's."""
        if time.monotonic() - self._greeted > GREET_S:
            self._greeted = time.monotonic()
            self._post({"kind": "hello", "token": self._token})

    def _ask(self, message: dict[str, Any], kind: str, timeout_s: float) -> dict[str, Any]:
        started = time.monotonic()
        deadline, posted = started + timeout_s, False
        while (left := deadline - time.monotonic()) > 0:
            posted = posted or self._post(message)  # nothing is sent before the connection stands
            for answer in self._take(min(left, 0.1)):
                if answer["kind"] == kind:
                    return answer
                if answer["kind"] == "refused":
                    raise UserError(f"{self._endpoint}: {answer['why']}")
                if answer["kind"] == "ready":
                    posted = False  # known again, over a connection that has not carried the question
            if kind != "ready":
                self._greet()
            if self._socket.hopeless(started):
                break
        raise no_server(self._socket, "the robot", "start `vla robot serve` on the robot's computer")

    def _take(self, timeout_s: float) -> list[dict[str, Any]]:
        """Keep the newest reading that has arrived, return other messages."""
        others: list[dict[str, Any]] = []
        for frames in self._socket.receive(timeout_s):
            header = msgpack.unpackb(frames[0])
            kind = header["kind"]
            new_lease = kind == "ready" and header["token"] != self._token  # maybe after a restart, of another clock
            self._compare_clocks(header["sent_ns"], afresh=new_lease)
            if kind == "reading":
                self._taken = {"kind": "taken", "episode": header["episode"], "step": header["step"]}
                if self._spec is not None and header["episode"] == self._episode:
                    self._keep(header, frames[1:])
                continue
            if kind == "ready":
                self._token, self._refused = header["token"], ""
            elif kind == "refused":
                self._refused = header["why"]
            elif kind == "unknown":
                self._greet()
            others.append(header)
        if self._taken is not None and self._post(self._taken):
            self._taken = None
        return others

    def _compare_clocks(self, sent_ns: int, afresh: bool) -> None:
        """How long a message travelled is not known, but how much longer than the quickest one."""
        now_ns = time.monotonic_ns()
        offset = now_ns - sent_ns
        if self._offset_ns is not None and not afresh:
            offset = min(offset, self._offset_ns + round(DRIFT * (now_ns - self._offset_at_ns)))
        self._offset_ns, self._offset_at_ns = offset, now_ns

    def _keep(self, header: dict[str, Any], frames: Frames) -> None:
        images: dict[str, NDArray[np.uint8]] = {
            camera.name: np.frombuffer(frame, np.uint8).reshape(camera.height, camera.width, 3)
            for camera, frame in zip(self.spec.cameras, frames, strict=True)
        }
        assert self._offset_ns is not None
        captured_ns = header["captured_ns"] + self._offset_ns
        state = np.frombuffer(header["state"], np.float32)
        self._newest = Observation(state, images, self._task or header["task"], header["step"], captured_ns)
        self._status, self._fresh = header["status"], True
        self._fault = Fault(*header["fault"]) if header["fault"] else None
        stopped = header["stopped"] if header["arming"] == self._arming else None  # else it is re-armed by now
        self._latched = Fault(*stopped) if stopped else None
