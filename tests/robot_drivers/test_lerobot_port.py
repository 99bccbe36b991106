"""Waiting for answers of a servo bus: asleep, and without remains of the attempt before."""

import math
from types import SimpleNamespace

import pytest

from robot_drivers import lerobot_port
from robot_drivers.lerobot_port import ANSWER_S, ATTEMPTS, QUIET_S, WAIT_S, hasten, insist, prepare, silence, unhurried


class Serial:
    """A port on which bytes of an abandoned attempt are still arriving."""

    def __init__(self):
        self.timeout, self.is_open, self.arriving, self.cleared = 0, True, [], 0

    @property
    def in_waiting(self):
        return self.arriving.pop(0) if self.arriving else 0

    def reset_input_buffer(self):
        self.cleared += 1

    def read(self, length):
        return bytes(length)


class Port:
    """As Feetech's SDK has it; ``late`` is what its clock says."""

    def __init__(self):
        self.ser, self.late, self.tx_time_per_byte, self.packet_timeout = Serial(), False, 0.01, 0.0

    def readPort(self, length):
        return b""

    def setPacketTimeout(self, length):
        self.packet_timeout = 50.0

    def isPacketTimeout(self):
        return self.late


@pytest.fixture
def device():
    return SimpleNamespace(bus=SimpleNamespace(port_handler=Port()), config=SimpleNamespace(num_read_retries=2))


@pytest.fixture
def clock(monkeypatch):
    time = SimpleNamespace(now=100.0)

    def sleep(seconds):
        time.now += seconds

    monkeypatch.setattr(lerobot_port, "time", SimpleNamespace(monotonic=lambda: time.now, sleep=sleep))
    return time


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


def test_an_attempt_begins_on_a_silent_line(device, clock):
    device.bus.port_handler.ser.arriving = [3, 1]
    answers = [ConnectionError("corrupt"), 7]

    def call():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert insist(device, call) == 7
    assert device.bus.port_handler.ser.cleared == 3  # until nothing came any more
    assert clock.now == pytest.approx(100.0 + 2 * QUIET_S, abs=0.001)


def test_a_line_on_which_nothing_comes_is_not_waited_for(device, clock):
    prepare(device)
    device.bus.port_handler.readPort(4)  # bytes came now
    clock.now += QUIET_S
    silence(device)
    assert clock.now == pytest.approx(100.0 + QUIET_S, abs=0.001)


def test_an_answer_is_waited_for_as_long_as_this_bus_needs_one(device, clock):
    prepare(device)
    port = device.bus.port_handler

    def exchange(took_s):
        def read():
            clock.now += took_s

        return read

    port.setPacketTimeout(7)
    assert port.packet_timeout == 50.0  # while it connects, the SDK's
    hasten(device, exchange(0.002))
    port.setPacketTimeout(7)
    assert port.packet_timeout == pytest.approx(0.1 + ANSWER_S * 1000)
    with unhurried(device):
        port.setPacketTimeout(7)
        assert port.packet_timeout == 50.0
    hasten(device, exchange(0.016))  # an adapter that collects bytes for so long
    port.setPacketTimeout(7)
    assert port.packet_timeout == pytest.approx(0.1 + 32.0)


def test_an_answer_that_lies_there_is_not_late(device):
    prepare(device)
    port = device.bus.port_handler
    port.late, port.ser.arriving = True, [3]
    assert not port.isPacketTimeout()
    assert port.isPacketTimeout()


def test_attempts_after_the_first_end_with_the_time_for_the_reading(device, clock):
    prepare(device)
    port, tried = device.bus.port_handler, []

    def call():
        tried.append(port.isPacketTimeout())
        clock.now += 0.006
        tried.append(port.isPacketTimeout())
        raise ConnectionError("no status packet")

    with pytest.raises(ConnectionError):
        insist(device, call, 0.005)
    assert tried == [False, False]  # the first may take its time, and then there is none left
    tried.clear()
    with pytest.raises(ConnectionError):
        insist(device, call, 0.010)
    assert tried == [False, False, False, True]
    assert port.patience.until_s == math.inf


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
