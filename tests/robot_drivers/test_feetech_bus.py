"""The emulated Feetech bus: frames, registers, protection, and Feetech's own SDK on its port."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robot_drivers.feetech_bus import FeetechBus
from robot_drivers.feetech_protocol import (
    ACTION,
    PING,
    READ,
    REG_WRITE,
    SYNC_READ,
    SYNC_WRITE,
    WRITE,
    Packet,
    Parser,
    encode,
    signed,
    unsigned,
)
from robot_drivers.feetech_servo import CURRENT, HEAT, OVERLOAD, Servo

packets = st.builds(
    Packet,
    st.integers(0, 0xFD),
    st.sampled_from((PING, READ, WRITE, REG_WRITE, ACTION, SYNC_READ, SYNC_WRITE)),
    st.binary(max_size=40),
)


@given(st.lists(packets, max_size=5), st.binary(max_size=3).filter(lambda b: b"\xff" not in b), st.data())
def test_frames_survive_any_split_and_noise_before_them(sent, noise, data):
    stream = noise + b"".join(encode(p.id, p.instruction, p.parameters) for p in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    parser, got = Parser(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += parser.feed(stream[start:end])
    assert got == sent and not parser.rejected


@given(packets, st.integers(0, 7))
def test_a_frame_with_a_wrong_checksum_is_not_obeyed(packet, bit):
    frame = bytearray(encode(packet.id, packet.instruction, packet.parameters))
    frame[-1] ^= 1 << bit
    assert packet not in Parser().feed(bytes(frame))


@given(st.integers(-2047, 2047))
def test_sign_and_magnitude(value):
    assert signed(unsigned(value, 11), 11) == value


def test_what_is_written_under_lock_is_gone_after_power_is():
    servo = Servo(1)
    servo.write(55, b"\x01")
    servo.write(21, b"\x07")
    servo.power_cycle()
    assert servo["p"] == 32
    servo.write(55, b"\x00")
    servo.write(21, b"\x07")
    servo.write(40, b"\x01")
    servo.power_cycle()
    assert servo["p"] == 7 and not servo["torque_enable"]


def test_measurements_cannot_be_written():
    servo = Servo(3)
    servo.write(56, b"\x11\x11")
    servo.write(3, b"\x00\x00")
    assert servo["position"] == 0 and servo["model"] == 777


def test_homing_shifts_what_is_measured_and_what_is_meant():
    servo = Servo(1, horn=120)
    servo.measure(2168, 0.0, 0.0, 0.01)
    assert servo["position"] == 2168
    servo.calibrate(121, 0, 4095)
    servo.measure(2168, 0.0, 0.0, 0.01)
    assert servo["position"] == 2047
    servo.hold()
    assert servo.goal(1.0) == 2168


def test_goals_end_at_the_limits_and_move_at_the_goal_velocity():
    servo = Servo(1)
    servo.calibrate(0, 1000, 3000)
    servo.measure(1500, 0.0, 0.0, 0.01)
    servo.hold()
    servo.write(42, (3500).to_bytes(2, "little"))
    servo.write(46, (100).to_bytes(2, "little"))
    assert servo.goal(1.0) == 1600
    servo.write(46, bytes(2))
    assert servo.goal(0.1) == 3000


@pytest.mark.parametrize(("load", "bit"), [(1.0, OVERLOAD), (-1.0, OVERLOAD), (0.5, 0)])
def test_overload_is_raised_after_the_protection_time_and_cleared_by_torque(load, bit):
    servo = Servo(1)
    servo.write(40, b"\x01")
    for _ in range(19):
        servo.measure(2048, 0.0, load, 0.1)
    assert not servo.errors & OVERLOAD and servo.torque == 1.0
    for _ in range(5):
        servo.measure(2048, 0.0, load, 0.1)
    assert servo.errors & OVERLOAD == bit
    assert servo.torque == (pytest.approx(0.2) if bit else 1.0)
    servo.write(40, b"\x00")
    servo.write(40, b"\x01")
    servo.measure(2048, 0.0, 0.0, 0.1)
    assert not servo.errors & (OVERLOAD | CURRENT) and servo.torque == 1.0


def test_a_hot_servo_lets_go():
    servo = Servo(1)
    servo.write(40, b"\x01")
    servo.heat_c = 60.0
    servo.measure(2048, 0.0, 0.0, 0.1)
    assert servo.errors == HEAT and servo.torque == 0.0


@pytest.fixture
def bus(tmp_path):
    bus = FeetechBus([Servo(i) for i in (1, 2, 3)], tmp_path / "port")
    bus.plug()
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            bus.receive()
            bus.send()

    thread = threading.Thread(target=serve)
    thread.start()
    yield bus
    ended.set()
    thread.join()
    bus.unplug()


def exchange(bus, frame, answers):
    """Send a frame through the port; returns the bytes of ``answers`` statuses of three bytes more than the least."""
    port = os.open(bus.path, os.O_RDWR | os.O_NOCTTY)
    try:
        os.write(port, frame)
        data = b""
        while len(data) < answers:
            data += os.read(port, answers - len(data))
        return data
    finally:
        os.close(port)


def test_ping_read_and_sync_read_answer_in_order(bus):
    assert exchange(bus, encode(2, PING), 6) == encode(2, 0)
    assert exchange(bus, encode(2, READ, bytes((3, 2))), 8) == encode(2, 0, (777).to_bytes(2, "little"))
    answer = exchange(bus, encode(0xFE, SYNC_READ, bytes((5, 1, 3, 1))), 14)
    assert answer == encode(3, 0, b"\x03") + encode(1, 0, b"\x01")


def test_sync_write_and_deferred_writes_reach_their_registers(bus):
    exchange(bus, encode(0xFE, SYNC_WRITE, bytes((42, 2, 1, 10, 0, 3, 30, 0))) + encode(1, PING), 6)
    assert [s["goal"] for s in bus.servos] == [10, 0, 30]
    assert exchange(bus, encode(2, REG_WRITE, bytes((42, 20, 0))), 6) == encode(2, 0)
    assert bus.servos[1]["goal"] == 0
    exchange(bus, encode(0xFE, ACTION) + encode(2, PING), 6)
    assert bus.servos[1]["goal"] == 20


def test_lost_and_spoilt_frames_are_counted(bus):
    bus.line.corruption = 1.0
    answer = exchange(bus, encode(1, PING), 6)
    assert answer[:5] == encode(1, 0)[:5] and answer != encode(1, 0) and bus.counters["corrupted"] == 1
    bus.line.corruption, bus.line.loss = 0.0, 1.0
    bus.receive()
    assert bus.due_ns is None


def test_the_port_vanishes_and_comes_back_under_its_name(bus):
    port = os.open(bus.path, os.O_RDWR | os.O_NOCTTY)
    bus.unplug()
    assert not bus.path.exists()
    with pytest.raises(OSError):
        os.write(port, encode(1, PING))
        os.read(port, 1)
        raise OSError  # read returned nothing: the other end is closed
    os.close(port)
    bus.plug()
    assert exchange(bus, encode(1, PING), 6) == encode(1, 0)


def test_an_overload_ends_with_a_goal_the_other_way():
    servo = Servo(1)
    servo.measure(2048, 0.0, 0.0, 0.1)
    servo.write(40, b"\x01")
    for _ in range(25):
        servo.measure(2048, 0.0, 1.0, 0.1)
    servo.write(42, (2200).to_bytes(2, "little"))
    assert servo.torque < 1.0
    servo.write(42, (2000).to_bytes(2, "little"))
    assert servo.torque == 1.0
