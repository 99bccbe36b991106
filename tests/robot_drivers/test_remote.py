"""A robot on another computer: readings come, commands pass the envelope there, silence holds it there."""

import threading
import time

import msgpack
import numpy as np
import pytest
import zmq

from robot_drivers import make_driver
from robot_drivers.remote_service import serve_driver
from vla_stack.errors import UserError
from vla_stack.runtime.driver import Capabilities, Fault
from vla_stack.runtime.limits import make_envelope
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import Camera, Dim, Observation, RobotSpec
from vla_stack.serving.listener import Listener

DIMS = (Dim("x.pos", "m", -1, 1, 0.5), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
SPEC = RobotSpec("test/arm", DIMS, DIMS, (Camera("front", 4, 6),), rate_hz=50.0)
PATIENCE_S = 60.0


class Arm:
    spec, stages, fault, capabilities = SPEC, ("reach",), None, Capabilities()

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
def pair(tmp_path, monkeypatch):
    monkeypatch.setattr("robot_drivers.remote.LOST_STEPS", 10**6)  # a busy computer is no lost connection
    endpoint, arm, running = f"ipc://{tmp_path}/arm", Arm(), threading.Event()
    listener = Listener(endpoint)
    running.set()
    envelope = make_envelope(SPEC, SafetyConfig(max_sensor_age_s=PATIENCE_S))
    thread = threading.Thread(target=serve_driver, args=(arm, envelope, listener, running.is_set))
    thread.start()
    remote = make_driver("remote", endpoint=endpoint)
    remote.connect()
    yield remote, arm, endpoint
    remote.disconnect()
    running.clear()
    thread.join()
    listener.close()


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


def drop_connection(remote, endpoint):
    """What a network does that comes back: the new connection is one that the robot's side has never seen."""
    remote._socket.restart()


def test_a_connection_that_was_lost_and_made_again_goes_on(pair, monkeypatch):
    remote, arm, endpoint = pair
    target = np.array([0.9, 1.0], np.float32)
    remote.reset(0)
    until(lambda: remote.write(target) is not None and remote.read() and arm.sent)
    drop_connection(remote, endpoint)
    sent, step = len(arm.sent), remote.read().step
    until(lambda: remote.write(target) is not None and remote.read().step > step + 3 and len(arm.sent) > sent + 3)
    assert remote.fault is None
    drop_connection(remote, endpoint)
    assert remote.reset(3) == "seed 3"
    step = remote.read().step
    monkeypatch.setattr("robot_drivers.remote.LOST_STEPS", 3)
    drop_connection(remote, endpoint)
    until(lambda: remote.read().step > step + 3)  # also where nothing is commanded, as after a STOP


def test_a_stop_there_is_a_fault_here_until_whoever_stops_here_goes_on(pair):
    remote, arm, _ = pair
    target = np.array([0.9, 1.0], np.float32)
    remote.reset(0)
    until(lambda: remote.write(np.array([np.nan, 1.0], np.float32)) is not None and remote.read() and remote.fault)
    assert remote.fault.kind == "envelope" and remote.fault.stop and "not finite" in remote.fault.why
    sent, step = len(arm.sent), remote.read().step
    until(lambda: remote.write(target) is not None and remote.read().step > step + 10)
    assert len(arm.sent) == sent and remote.fault
    remote.stop()
    assert remote.fault is None  # else nobody could re-arm here
    until(lambda: remote.write(target) is not None and remote.read() and len(arm.sent) > sent + 3)
    assert remote.fault is None


def test_a_reading_that_was_long_on_its_way_is_old(tmp_path):
    context, endpoint = zmq.Context(), f"ipc://{tmp_path}/arm"
    context.linger = 0
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    remote = make_driver("remote", endpoint=endpoint)
    sent_ns = 10**15  # of another computer's clock

    def answered(call, **answer):
        thread = threading.Thread(target=call)
        thread.start()
        assert router.poll(1000 * PATIENCE_S)
        peer = router.recv_multipart()[0]
        router.send_multipart([peer, msgpack.packb({**answer, "sent_ns": sent_ns})])
        thread.join()
        return peer

    try:
        answered(remote.connect, kind="ready", spec=SPEC.to_json(), stages=[], token="t")
        peer = answered(lambda: remote.reset(0), kind="started", task="task")
        header = {"kind": "reading", "episode": 1, "step": 0, "task": "task", "state": bytes(8), "status": {}}
        header |= {"fault": None, "stopped": None, "arming": 0}
        header |= {"captured_ns": sent_ns - 2 * 10**9, "sent_ns": sent_ns - 2 * 10**9}
        router.send_multipart([peer, msgpack.packb(header), bytes(4 * 6 * 3)])
        obs = remote.read()
        assert time.monotonic_ns() - obs.t_capture_ns >= 2 * 10**9
        assert remote.fault.kind == "link" and remote.fault.stop
    finally:
        remote.disconnect()
        context.destroy(linger=0)


def test_nobody_there(tmp_path, monkeypatch):
    monkeypatch.setattr("robot_drivers.remote.CONNECT_S", 0.1)
    remote = make_driver("remote", endpoint=f"ipc://{tmp_path}/nobody")
    with pytest.raises(UserError, match="nobody listens there -- start `vla robot serve`"):
        remote.connect()
    remote.disconnect()
