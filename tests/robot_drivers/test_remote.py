"""A robot on another computer: readings come, commands pass the envelope there, silence holds it there."""

import threading
import time

import numpy as np
import pytest
import zmq

from robot_drivers import make_driver
from robot_drivers.driver import Fault
from robot_drivers.remote import serve_driver
from vla_stack.errors import UserError
from vla_stack.runtime.limits import make_envelope
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import Camera, Dim, Observation, RobotSpec
from vla_stack.serving.transport import new_socket

DIMS = (Dim("x.pos", "m", -1, 1, 0.5), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
SPEC = RobotSpec("test/arm", DIMS, DIMS, (Camera("front", 4, 6),), rate_hz=50.0)
PATIENCE_S = 60.0


class Arm:
    spec, stages, fault = SPEC, ("reach",), None

    def __init__(self):
        self.at, self.sent, self.holds = np.zeros(2, np.float32), [], 0

    def connect(self): ...

    def disconnect(self): ...

    def reset(self, seed):
        self.at = np.array([0.01 * seed, 1.0], np.float32)
        return f"seed {seed}"

    def read(self):
        image = np.full((4, 6, 3), len(self.sent) % 256, np.uint8)
        return Observation(self.at.copy(), {"front": image}, "task", 0, time.monotonic_ns())

    def write(self, action):
        self.at = action.copy()
        self.sent.append(action)
        return action

    def hold(self):
        self.holds += 1

    def stop(self): ...

    def status(self):
        return {"is_success": len(self.sent) > 3, "done": False, "stage": 1}


@pytest.fixture
def pair(tmp_path):
    endpoint, context, arm, running = f"ipc://{tmp_path}/arm", zmq.Context(), Arm(), threading.Event()
    socket = new_socket(context, zmq.ROUTER)
    socket.bind(endpoint)
    running.set()
    envelope = make_envelope(SPEC, SafetyConfig())
    thread = threading.Thread(target=serve_driver, args=(arm, envelope, socket, running.is_set))
    thread.start()
    remote = make_driver("remote", endpoint=endpoint)
    remote.connect()
    yield remote, arm, endpoint
    remote.disconnect()
    running.clear()
    thread.join()
    socket.close()
    context.term()


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline


def test_it_is_the_robot_that_is_there(pair):
    remote, arm, _ = pair
    assert remote.spec == SPEC and remote.stages == ("reach",)
    assert remote.reset(20) == "seed 20"
    obs = remote.read()
    obs.check(SPEC)
    assert obs.state[0] == np.float32(0.2) and remote.fault is None
    assert 0 <= time.monotonic_ns() - obs.t_capture_ns < PATIENCE_S * 1e9


def test_commands_pass_the_envelope_there_and_silence_holds(pair):
    remote, arm, _ = pair
    remote.reset(0)
    remote.read()
    until(lambda: remote.write(np.array([0.9, 1.0], np.float32)) is not None and remote.read() and len(arm.sent) > 5)
    steps = np.diff([s[0] for s in arm.sent])
    assert (steps > 0).all() and (steps <= 0.5 / 50 + 1e-6).all()  # 0.9 m away, at 0.5 m/s
    assert remote.status()["is_success"]
    held = arm.holds
    until(lambda: arm.holds > held)  # nobody commands any more
    sent = len(arm.sent)
    remote.hold()
    until(lambda: arm.holds > held + 1)
    assert len(arm.sent) == sent


def test_faults_there_are_faults_here(pair):
    remote, arm, _ = pair
    remote.reset(0)
    arm.fault = Fault("bus", "the arm is lost", True)
    until(lambda: remote.read() and remote.fault is not None)
    assert remote.fault == Fault("bus", "the arm is lost", True)


def test_a_second_computer_is_refused_while_the_first_drives(pair):
    remote, arm, endpoint = pair
    remote.reset(0)
    until(lambda: remote.write(np.array([0.9, 1.0], np.float32)) is not None and remote.read() and arm.sent)
    moving, stop = threading.Event(), threading.Event()

    def drive():
        while not stop.is_set():
            remote.write(np.array([0.9, 1.0], np.float32))
            remote.read()
            moving.set()

    driving = threading.Thread(target=drive)
    driving.start()
    moving.wait(PATIENCE_S)
    second = make_driver("remote", endpoint=endpoint)
    with pytest.raises(UserError, match="another computer drives this robot"):
        second.connect()
    stop.set()
    driving.join()
    second.disconnect()


def test_nobody_there(tmp_path, monkeypatch):
    monkeypatch.setattr("robot_drivers.remote.CONNECT_S", 0.1)
    remote = make_driver("remote", endpoint=f"ipc://{tmp_path}/nobody")
    with pytest.raises(UserError, match="no answer from .* -- start `vla robot serve`"):
        remote.connect()
    remote.disconnect()
