"""Waiting for answers of a servo bus: asleep, and without remains of the attempt before."""

from types import SimpleNamespace

import pytest

from robot_drivers import lerobot_port
from robot_drivers.lerobot_port import ATTEMPTS, WAIT_S, insist, prepare


class Serial:
    """A port on which bytes of an abandoned attempt are still arriving."""

    def __init__(self):
        self.timeout, self.is_open, self.arriving, self.cleared = 0, True, [3, 1, 0], 0

    @property
    def in_waiting(self):
        return self.arriving.pop(0)

    def reset_input_buffer(self):
        self.cleared += 1

    def read(self, length):
        return bytes(length)


@pytest.fixture
def device():
    port = SimpleNamespace(ser=Serial(), readPort=lambda length: b"")
    return SimpleNamespace(bus=SimpleNamespace(port_handler=port), config=SimpleNamespace(num_read_retries=2))


def test_reads_sleep_until_bytes_come_however_often_the_port_is_opened(device):
    prepare(device)
    for _ in range(2):
        device.bus.port_handler.ser = Serial()
        assert device.bus.port_handler.readPort(4) == bytes(4)
        assert device.bus.port_handler.ser.timeout == WAIT_S
    assert device.config.num_read_retries == 0


def test_a_device_without_a_port_is_left_alone():
    prepare(SimpleNamespace(bus=SimpleNamespace()))
    prepare(SimpleNamespace())


def test_an_attempt_begins_on_a_silent_line(device, monkeypatch):
    monkeypatch.setattr(lerobot_port, "SILENCE_S", 60.0)  # however busy the computer
    answers = [ConnectionError("corrupt"), 7]

    def call():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert insist(device, call) == 7
    assert device.bus.port_handler.ser.cleared == 3  # until nothing came any more


def test_the_last_attempt_says_why(device):
    tried = []

    def call():
        device.bus.port_handler.ser.arriving = [0]
        tried.append(True)
        raise ConnectionError(f"attempt {len(tried)}")

    with pytest.raises(ConnectionError, match=f"attempt {ATTEMPTS}"):
        insist(device, call)


def test_other_errors_are_not_repeated(device):
    with pytest.raises(OSError, match="gone"):
        insist(device, lambda: (_ for _ in ()).throw(OSError("gone")))
