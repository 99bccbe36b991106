"""The guardian on an emulated bus: what it does to velocities, positions and torque when its owner ends or hangs."""

import multiprocessing as mp
import os
import select
import signal
import threading
import time

import pytest

from robot_drivers import guardian
from robot_drivers.feetech_bus import FeetechBus
from robot_drivers.feetech_protocol import BROADCAST, SYNC_READ, encode
from robot_drivers.feetech_servo import REGISTERS, Servo
from robot_drivers.guarding import GuardedBus, Guarding

PATIENCE_S = 60.0  # of these tests
ARM, WHEEL = 1, 7
TORQUE, GOAL, SPEED, POSITION = (
    REGISTERS[name].address for name in ("torque_enable", "goal", "goal_velocity", "position")
)
NEVER = 3600.0


class Line(threading.Thread):
    """A bus with one joint under way and one wheel that turns."""

    def __init__(self, folder) -> None:
        super().__init__(daemon=True)
        self.joint, self.wheel = Servo(ARM), Servo(WHEEL)
        for servo in (self.joint, self.wheel):
            servo.write(TORQUE, b"\1")
        self.wheel.write(REGISTERS["mode"].address, b"\1")
        self.bus = FeetechBus([self.joint, self.wheel], folder / "port")
        self.bus.plug()
        self.ended = threading.Event()
        self.move()
        self.start()

    def move(self, at=1000, goal=1500, speed=800) -> None:
        self.joint.measure(at, 0.0, 0.0, 0.0)
        self.joint.write(GOAL, goal.to_bytes(2, "little"))
        self.wheel.write(SPEED, speed.to_bytes(2, "little"))

    def run(self) -> None:
        while not self.ended.is_set():
            if (fd := self.bus.fileno()) is not None:
                select.select([fd], [], [], 0.01)
            self.bus.receive()
            while self.bus.due_ns is not None:
                self.bus.send()

    @property
    def plan(self) -> list[GuardedBus]:
        return [GuardedBus(str(self.bus.path), 1_000_000, [ARM], [WHEEL], POSITION, GOAL, SPEED)]

    @property
    def rests(self) -> bool:
        return self.wheel["goal_velocity"] == 0 and self.joint["goal"] == self.joint["position"]

    def torque_was_touched(self) -> bool:
        return any(at <= TORQUE < at + len(data) for _, _, at, data, _ in self.bus.written)


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path)
    yield line
    line.ended.set()
    line.join()
    line.bus.unplug()


def wait(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def own(connection, plan, patience_s, farewell):
    """A process that moves the robot; beats until it is told how to end."""
    guarding = Guarding("test/robot", plan, patience_s)
    guarding.moving()
    connection.send(guarding.pid)
    while not connection.poll(0.001):
        guarding.beat(strict=False)
    order = connection.recv()
    if order == "farewell":
        guarding.rest()
        guarding.end()
    elif order == "hang":
        time.sleep(NEVER)
    elif order == "raise":
        raise RuntimeError("on purpose")


class Owner:
    def __init__(self, plan, patience_s=NEVER) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=own, args=(theirs, plan, patience_s, False))
        self.process.start()
        theirs.close()
        self.guardian = self.pipe.recv()

    def watched(self) -> bool:
        return os.path.exists(f"/proc/{self.guardian}")

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, "raise"])
def test_a_process_that_ends_leaves_the_robot_at_rest_with_its_torque(line, how):
    owner = Owner(line.plan)
    assert not line.rests
    if isinstance(how, str):
        owner.pipe.send(how)
    else:
        os.kill(owner.process.pid, how)
    owner.process.join()
    wait(lambda: not owner.watched())  # it ends once the bus has confirmed the rest
    assert line.rests and not line.torque_was_touched()
    assert line.joint["torque_enable"] and line.wheel["torque_enable"]


@pytest.mark.parametrize("how", [signal.SIGSTOP, "hang"])
def test_a_process_that_no_longer_beats_is_overruled_again_and_again(line, how):
    owner = Owner(line.plan, patience_s=0.05)
    if isinstance(how, str):
        owner.pipe.send(how)
    else:
        os.kill(owner.process.pid, how)
    wait(lambda: line.rests)
    line.joint.measure(900, 0.0, 0.0, 0.0)  # it sags; a command that was on its way comes out
    line.wheel.write(SPEED, b"\1\1")
    wait(lambda: line.wheel["goal_velocity"] == 0)
    assert line.joint["goal"] == 1000 and not line.torque_was_touched()  # held where it was, not where it sinks to
    owner.end()
    wait(lambda: not owner.watched())


def test_a_farewell_leaves_the_bus_alone(line):
    owner = Owner(line.plan)
    owner.pipe.send("farewell")
    owner.process.join()
    wait(lambda: not owner.watched())
    assert not line.bus.written and not line.rests


def test_a_trip_forbids_commands_until_it_has_been_noted(line):
    guarding = Guarding("test/robot", line.plan, 0.05)
    assert not guarding.trouble
    guarding.moving()
    wait(lambda: guarding.trips)
    assert "was silent for" in guarding.trouble
    guarding.moving()  # who does not ask before it sends is overruled as well
    line.move()
    wait(lambda: line.rests)
    guarding.rest()
    assert not guarding.trouble
    trips = guarding.trips
    line.move(at=1200)
    guarding.moving()
    wait(lambda: guarding.trips > trips)
    wait(lambda: line.joint["goal"] == 1200)
    guarding.rest()
    guarding.end()


def test_silence_at_rest_is_no_trip_and_a_guardian_that_was_killed_is_replaced(line):
    guarding = Guarding("test/robot", line.plan, 0.01)
    watching = Guarding("test/robot", line.plan, 0.05)
    watching.moving()
    wait(lambda: watching.trips)  # five times the patience of the other one
    assert guarding.trips == 0
    first = guarding.pid
    os.kill(first, signal.SIGKILL)
    wait(lambda: guarding.trouble)
    assert "its guardian has ended" in guarding.trouble
    guarding.rest()
    assert guarding.pid != first and not guarding.trouble
    for each in (watching, guarding):
        each.end()


def test_a_bus_that_is_away_is_tried_again(line):
    owner = Owner(line.plan)
    line.bus.powered = False
    owner.end()
    assert owner.watched() and not line.rests
    line.bus.powered = True
    wait(lambda: not owner.watched())
    assert line.rests


def test_frames_are_the_protocol_s():
    assert guardian.frame(BROADCAST, SYNC_READ, b"\x38\2\1\2") == encode(BROADCAST, SYNC_READ, b"\x38\2\1\2")
    spoilt = bytearray(encode(3, 0, b"\4\5"))
    spoilt[5] ^= 1
    stream = b"\xff" + encode(1, 0, b"\2\3") + bytes(spoilt) + encode(2, 32, b"\xff\xff") + b"\xff\xff"
    assert guardian.answers(stream) == [(1, b"\2\3"), (2, b"\xff\xff")]
