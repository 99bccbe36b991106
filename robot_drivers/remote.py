"""A robot on another computer: its driver there (``vla robot serve``), this one here.

Two-way ZeroMQ, msgpack headers and raw pictures, CURVE keys off this machine. The computer at the robot reads it at its
rate, sends each reading, and passes every command through its own safety envelope; without a command for three control
steps it holds. So a network that fails stops the robot there, whatever happens here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import zmq
from numpy.typing import NDArray

from robot_drivers.driver import Driver, EpisodicDriver, Fault, SelfChecking, Status
from vla_stack.errors import UserError
from vla_stack.runtime.clock import Clock, RealClock
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import Observation, RobotSpec, SchemaError
from vla_stack.serving.keys import KeyFolder
from vla_stack.serving.transport import CurveKeys, is_local, new_socket, receive, send, zmq_address

CONNECT_S, RESET_S = 10.0, 30.0
QUIET_STEPS = 3  # without a command before the robot's side holds
LOST_STEPS, STOP_S = 3, 1.0  # without a reading: the link is at fault; and the robot is stopped here


class RemoteRobot:
    """An :class:`~robot_drivers.driver.EpisodicDriver` for a robot that ``vla robot serve`` offers.

    Args:
        endpoint: ``tcp://HOST:PORT`` of that computer.
        task: Instruction in place of the robot's own.
    """

    def __init__(self, endpoint: str, task: str | None = None) -> None:
        self._endpoint, self._task = endpoint, task
        self._spec: RobotSpec | None = None
        self._socket: Any = None
        self._newest: Observation | None = None
        self._status: Status = {"is_success": False, "done": False}
        self._fault: Fault | None = None
        self._fresh, self._episode = False, 0
        self.stages: tuple[str, ...] = ()

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("a remote robot has no description before connect()")
        return self._spec

    @property
    def fault(self) -> Fault | None:
        if self._newest is not None:
            age_s = (time.monotonic_ns() - self._newest.t_capture_ns) * 1e-9
            if age_s > LOST_STEPS * self.spec.dt + 0.1:
                return Fault("link", f"no reading from {self._endpoint} for {age_s:.1f} s", age_s > STOP_S)
        return self._fault

    def connect(self) -> None:
        """Say hello.

        Raises:
            UserError: Nobody answers, or what answers is no robot.
        """
        keys = None
        if not is_local(self._endpoint):
            folder = KeyFolder()
            identity = folder.identity()
            keys = CurveKeys(identity.public, identity.secret, folder.server_key(self._endpoint))
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER, keys)
        self._socket.connect(zmq_address(self._endpoint))
        about = self._ask({"kind": "hello"}, "ready", CONNECT_S)
        try:
            self._spec, self.stages = RobotSpec.from_json(about["spec"]), tuple(about["stages"])
        except (KeyError, SchemaError) as e:
            raise UserError(f"{self._endpoint} is no robot: {e}", "give the endpoint of `vla robot serve`") from e

    def reset(self, seed: int) -> str:
        self._episode += 1
        self._newest = None
        started = self._ask({"kind": "reset", "seed": seed, "episode": self._episode}, "started", RESET_S)
        return self._task or str(started["task"])

    def read(self) -> Observation:
        """The newest reading; waits up to half a step for one that was not read yet."""
        until = time.monotonic() + (0.5 * self.spec.dt if self._newest is not None else CONNECT_S)
        self._take(0.0)
        while not self._fresh and (left := until - time.monotonic()) > 0:
            self._take(left)
        if self._newest is None:
            raise UserError(f"no reading from {self._endpoint}", "look at the robot's computer")
        self._fresh = False
        return self._newest

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        sent = np.clip(np.asarray(action, np.float32), self.spec.action_low, self.spec.action_high)
        self._post({"kind": "write", "action": sent.tobytes()})
        return sent

    def hold(self) -> None:
        self._post({"kind": "hold"})

    def stop(self) -> None:
        self._post({"kind": "stop"})

    def status(self) -> Status:
        return self._status

    def disconnect(self) -> None:
        if self._socket is not None:
            self._post({"kind": "bye"})
            self._socket.close(linger=100)
            self._context.term()
            self._socket = None

    def _post(self, message: dict[str, Any]) -> bool:
        return send(self._socket, [msgpack.packb(message)])

    def _ask(self, message: dict[str, Any], kind: str, timeout_s: float) -> dict[str, Any]:
        deadline, posted = time.monotonic() + timeout_s, False
        while (left := deadline - time.monotonic()) > 0:
            posted = posted or self._post(message)  # nothing is sent before the connection stands
            for answer in self._take(min(left, 0.1)):
                if answer["kind"] == kind:
                    return answer
                if answer["kind"] == "refused":
                    raise UserError(f"{self._endpoint}: {answer['why']}")
        raise UserError(f"no answer from {self._endpoint}", "start `vla robot serve` on the robot's computer")

    def _take(self, timeout_s: float) -> list[dict[str, Any]]:
        """Keep the newest reading that has arrived, return other messages."""
        others: list[dict[str, Any]] = []
        self._socket.poll(round(1000 * timeout_s))
        while self._socket.poll(0):
            frames = receive(self._socket)
            header = msgpack.unpackb(frames[0].buffer)
            if header["kind"] != "reading":
                others.append(header)
            elif self._spec is not None and header["episode"] == self._episode:
                self._keep(header, frames[1:])
        return others

    def _keep(self, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        images: dict[str, NDArray[np.uint8]] = {
            camera.name: np.frombuffer(frame.buffer, np.uint8).reshape(camera.height, camera.width, 3)
            for camera, frame in zip(self.spec.cameras, frames, strict=True)
        }
        # Clocks differ: how old it was when it was sent is known, how long it travelled is not.
        captured_ns = time.monotonic_ns() - header["age_ns"]
        state = np.frombuffer(header["state"], np.float32)
        self._newest = Observation(state, images, self._task or header["task"], header["step"], captured_ns)
        self._status, self._fresh = header["status"], True
        self._fault = Fault(*header["fault"]) if header["fault"] else None


def serve_driver(
    driver: Driver,
    envelope: SafetyEnvelope,
    socket: zmq.Socket,
    running: Callable[[], bool],
    clock: Clock | None = None,
) -> int:
    """Offer a connected driver to one remote robot at a time; returns how many commands were sent to it.

    Args:
        driver: The robot here.
        envelope: What any command has to pass.
        socket: A bound ROUTER.
        running: Asked each control step; False ends it.
        clock: For tests.
    """
    return _Service(driver, envelope, socket, clock or RealClock()).run(running)


class _Service:
    def __init__(self, driver: Driver, envelope: SafetyEnvelope, socket: zmq.Socket, clock: Clock) -> None:
        self._driver, self._envelope, self._socket, self._clock = driver, envelope, socket, clock
        self._episodic = driver if isinstance(driver, EpisodicDriver) else None
        self._checking = driver if isinstance(driver, SelfChecking) else None
        self._dims = len(driver.spec.action)
        self._peer: bytes | None = None
        self._episode = self._step = self._quiet = self._commands = 0
        self._moving = False

    def run(self, running: Callable[[], bool]) -> int:
        dt_ns = round(1e9 * self._driver.spec.dt)
        t_k = self._clock.now_ns()
        while running():
            command = self._messages()
            if self._episode:
                self._tick(command)
            t_k = max(t_k + dt_ns, self._clock.now_ns() - dt_ns)
            self._clock.sleep_until_ns(t_k)
        self._driver.hold()
        return self._commands

    def _tick(self, command: NDArray[np.float32] | None) -> None:
        obs = self._driver.read()
        fault = self._checking.fault if self._checking else None
        self._quiet = 0 if command is not None else self._quiet + 1
        if command is not None:
            age_s = (self._clock.now_ns() - obs.t_capture_ns) * 1e-9
            if not self._moving and not (fault and fault.stop):  # from wherever the robot has come to rest
                self._envelope.reset(obs.state[: self._dims])
            verdict = self._envelope.filter(command, age_s, fault.kind if fault else "")
            self._moving = verdict.command is not None
            if verdict.command is not None:
                self._driver.write(verdict.command)
                self._commands += 1
        if self._moving and (self._quiet >= QUIET_STEPS or (fault is not None and fault.stop)):
            self._rest()
        self._send_reading(obs, fault)
        self._step += 1

    def _rest(self) -> None:
        self._moving = False
        self._driver.hold()

    def _messages(self) -> NDArray[np.float32] | None:
        """Do what was asked; the newest command that came."""
        command = None
        while self._socket.poll(0):
            peer, *rest = (bytes(f.buffer) for f in receive(self._socket))
            try:
                message = msgpack.unpackb(rest[0])
                kind = message["kind"]
                if kind == "hello":
                    self._hello(peer)
                elif peer != self._peer:
                    self._answer(peer, kind="refused", why="another computer drives this robot")
                elif kind == "write":
                    new = np.frombuffer(message["action"], np.float32)
                    command = new if new.shape == (self._dims,) else command
                elif kind in ("hold", "stop"):
                    command = None
                    self._rest()
                elif kind == "reset":
                    command = None
                    self._reset(int(message["seed"]), int(message["episode"]))
                elif kind == "bye":
                    self._rest()
                    self._peer, self._episode = None, 0
            except (KeyError, TypeError, ValueError, IndexError, msgpack.UnpackException):
                continue  # not ours; a robot has no use for an argument about it
        return command

    def _hello(self, peer: bytes) -> None:
        if self._peer is not None and self._moving:
            self._answer(peer, kind="refused", why="another computer drives this robot")
            return
        self._peer, self._episode = peer, 0
        stages = list(self._episodic.stages) if self._episodic else []
        self._answer(peer, kind="ready", spec=self._driver.spec.to_json(), stages=stages)

    def _reset(self, seed: int, episode: int) -> None:
        self._rest()
        task = self._episodic.reset(seed) if self._episodic else self._driver.read().task
        self._episode, self._step, self._quiet = episode, 0, 0
        assert self._peer is not None
        self._answer(self._peer, kind="started", task=task)

    def _send_reading(self, obs: Observation, fault: Fault | None) -> None:
        if self._peer is None:
            return
        header = {
            "kind": "reading",
            "episode": self._episode,
            "step": self._step,
            "task": obs.task,
            "state": obs.state.tobytes(),
            "age_ns": self._clock.now_ns() - obs.t_capture_ns,
            "status": dict(self._episodic.status()) if self._episodic else {"is_success": False, "done": False},
            "fault": list(fault) if fault else None,
        }
        pictures = [np.ascontiguousarray(obs.images[c.name]).data.cast("B") for c in self._driver.spec.cameras]
        self._send(self._peer, [msgpack.packb(header), *pictures])

    def _answer(self, peer: bytes, **message: Any) -> None:
        self._send(peer, [msgpack.packb(message)])

    def _send(self, peer: bytes, frames: list[Any]) -> None:
        try:
            send(self._socket, [peer, *frames])
        except zmq.ZMQError:  # it has left
            self._rest()
            self._peer, self._episode = None, 0
