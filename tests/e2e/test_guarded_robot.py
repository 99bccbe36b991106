"""A robot that a person drives through its node, LeRobot's driver and a bus: its processes are killed and stopped."""

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest

from robot_drivers import make_driver
from robot_drivers.feetech_servo import REGISTERS
from robot_drivers.so101_emulator import Emulator
from vla_stack.errors import UserError
from vla_stack.runtime.driver import Guard
from vla_stack.runtime.node import Operator, RobotNode
from vla_stack.runtime.operator_client import OperatorClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 240.0
TORQUE = REGISTERS["torque_enable"].address


@pytest.fixture(scope="module")
def lekiwi(tmp_path_factory):
    with Emulator(tmp_path_factory.mktemp("lekiwi"), image_size=0, base=True) as arm:
        yield arm


def wait(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def alive(client):
    """The robot drives ahead for as long as this is called."""
    client.teleop(velocity=[0.0] * 6 + [0.3, 0.0, 0.0], engaged=True)
    client.poll(5)
    return client.state


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP, None], ids=["killed", "stopped", "node ends"])
def test_a_base_stands_still_and_the_arm_keeps_its_torque(lekiwi, tmp_path, harm):
    endpoint, ended = f"ipc://{tmp_path}/operator", []
    make = partial(make_driver, "lerobot", robot_type="lekiwi", rate_hz=30.0, cameras={}, **lekiwi.device())

    def run(node):
        try:
            node.run_episode(0, mode="teleop")
        except UserError as e:
            ended.append(str(e))

    with RobotNode(None, make, operator=Operator(endpoint)) as node:
        assert node.guard is Guard.GUARDIAN
        control = node._process.pid
        thread = threading.Thread(target=run, args=(node,), daemon=True)
        thread.start()
        client = OperatorClient(endpoint, pictures=False)
        assert client.call("acquire").ok
        wait(lambda: client.call("start", 60.0).ok)
        while alive(client).get("phase") != "hold":  # the dead-man is to be seen released first
            client.teleop()
        wait(lambda: not client.teleop() and client.poll(50) and client.state["tick"] > 5)
        wait(lambda: alive(client)["phase"] == "teleop" and lekiwi.status()["velocity"][0] > 0.25)
        before, written = lekiwi.status(), len(lekiwi.written())
        if harm is not None:
            os.kill(control, harm)
            wait(lambda: abs(lekiwi.status()["velocity"][0]) < 1e-3)
        if harm is signal.SIGSTOP:
            wait(lambda: alive(client) is not None and abs(lekiwi.status()["velocity"][0]) < 1e-3)
            os.kill(control, signal.SIGCONT)  # it finds out that it was overruled, and stops
            wait(lambda: alive(client)["phase"] == "estop")
            assert "silent for" in client.state["why"]
        if harm is signal.SIGKILL:
            thread.join(PATIENCE_S)
            assert "exit code -9" in ended[0]
        client.close()
    wait(lambda: abs(lekiwi.status()["velocity"][0]) < 1e-3)
    after = lekiwi.status()
    assert not [w for w in lekiwi.written()[written:] if w[2] <= TORQUE < w[2] + len(w[3])]
    assert after["limp_s"] == before["limp_s"]
    np.testing.assert_allclose(after["angles"]["follower"], before["angles"]["follower"], atol=0.05)
