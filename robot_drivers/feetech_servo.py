"""One STS3215 as its registers show it: memory that survives power, protection that switches torque off.

Position mode only. What the manual leaves open is kept simple: acceleration is not limited, temperature follows the
square of the load.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from robot_drivers.feetech_protocol import signed, unsigned

TICKS = 4096  # a turn
MODEL = 777
STALL_A = 2.7  # current at stall, at 12 V
AMBIENT_C, HEATING_C, COOLING_S = 28.0, 60.0, 200.0  # at full load the motor tends to ambient + heating
VOLTAGE, SENSOR, HEAT, CURRENT, OVERLOAD = 0x01, 0x02, 0x04, 0x08, 0x20  # bits of a status and of register 65


@dataclass(frozen=True)
class Register:
    """Where a register is: ``address``, bytes, bit of the sign (0: none), value when new."""

    address: int
    size: int = 1
    sign: int = 0
    factory: int = 0


REGISTERS = {
    "firmware_major": Register(0, factory=3),
    "firmware_minor": Register(1, factory=10),
    "model": Register(3, 2, factory=MODEL),
    "id": Register(5),
    "baud_rate": Register(6),  # 0 is 1 Mbit/s
    "return_delay": Register(7, factory=250),  # 2 us each
    "response_level": Register(8, factory=1),  # 0: only pings and reads are answered
    "min_position": Register(9, 2),
    "max_position": Register(11, 2, factory=TICKS - 1),
    "max_temperature": Register(13, factory=70),  # degrees Celsius
    "max_voltage": Register(14, factory=140),  # 0.1 V
    "min_voltage": Register(15, factory=40),
    "max_torque": Register(16, 2, factory=1000),  # 0.1 %
    "phase": Register(18, factory=12),
    "unloading": Register(19, factory=44),  # errors that switch the torque off
    "p": Register(21, factory=32),
    "d": Register(22, factory=32),
    "protection_current": Register(28, 2, factory=500),  # 6.5 mA
    "homing": Register(31, 2, 11),  # ticks
    "mode": Register(33),
    "protective_torque": Register(34, factory=20),  # %, what is left of the torque in overload
    "protection_time": Register(35, factory=200),  # 10 ms
    "overload_torque": Register(36, factory=80),  # %, beyond which the protection time runs
    "overcurrent_time": Register(38, factory=200),  # 10 ms
    "torque_enable": Register(40),
    "acceleration": Register(41),
    "goal": Register(42, 2, 15),  # ticks
    "goal_velocity": Register(46, 2, 15),  # ticks/s, 0 is as fast as it can
    "torque_limit": Register(48, 2, factory=1000),  # 0.1 %
    "lock": Register(55, factory=1),  # 1: writes to what survives power do not survive it
    "position": Register(56, 2, 15),
    "velocity": Register(58, 2, 15),
    "load": Register(60, 2, 10),  # 0.1 % of the stall torque
    "voltage": Register(62, factory=120),  # 0.1 V
    "temperature": Register(63, factory=round(AMBIENT_C)),
    "status": Register(65),
    "moving": Register(66),
    "current": Register(69, 2),  # 6.5 mA
    "max_acceleration": Register(85),
}
KEPT = 40  # registers below this address survive power
READ_ONLY = frozenset(range(5)) | frozenset(range(56, 71))
CHECK_S = 0.05  # between two looks at temperature and alarms
_SIZE = 128
_MEASURED = struct.Struct("<HHH")  # position, velocity, load


class Servo:
    """Registers, and what they mean for the motor.

    Args:
        servo_id: Address on the bus.
        horn: Ticks by which the horn was mounted off: the encoder's reading at joint zero is ``TICKS / 2 + horn``.

    Attributes:
        horn: As given.
        heat_c: Added to the temperature, to provoke its alarm.
        frozen: The motor neither moves nor says that anything is wrong.
        changed: Whether :attr:`torque`, :attr:`stiffness` or :meth:`goal` may have changed; whoever drives clears it.
    """

    def __init__(self, servo_id: int, horn: int = 0) -> None:
        self.horn, self.heat_c, self.frozen, self.changed = horn, 0.0, False, True
        self._memory = bytearray(_SIZE)
        for name, register in REGISTERS.items():
            self._put(name, register.factory)
        self._put("id", servo_id)
        self._kept = bytes(self._memory[:KEPT])
        self._warmth = self._unchecked_s = 0.0
        self._over_s = {OVERLOAD: 0.0, CURRENT: 0.0}
        self._alarms = self._overloaded = 0  # error bits; the sign of the torque that raised them
        self._reference = 0.0

    def __getitem__(self, name: str) -> int:
        r = REGISTERS[name]
        value = int.from_bytes(self._memory[r.address : r.address + r.size], "little")
        return signed(value, r.sign) if r.sign else value

    def read(self, address: int, length: int) -> bytes:
        """Raw registers; zero where there are none."""
        return bytes(self._memory[address : address + length]).ljust(length, b"\0")

    def write(self, address: int, data: bytes) -> None:
        """Write raw registers, as an instruction does; what is read only stays as it is."""
        self.changed = True
        enabled = self["torque_enable"]
        for i, value in enumerate(data, address):
            if i < _SIZE and i not in READ_ONLY:
                self._memory[i] = value
                if i < KEPT and not self["lock"]:
                    self._kept = self._kept[:i] + bytes((value,)) + self._kept[i + 1 :]
        if REGISTERS["max_torque"].address in range(address, address + len(data)):
            self._put("torque_limit", self["max_torque"])
        if self["torque_enable"] and not enabled:  # switching on holds where it is
            self._unload()
            self.hold()
        # A goal that no longer asks for torque the way it was overloaded ends the protection.
        if address <= REGISTERS["goal"].address < address + len(data):
            if (self["goal"] - self["position"]) * self._overloaded <= 0:
                self._unload()

    def _unload(self) -> None:
        self._alarms &= ~(OVERLOAD | CURRENT)
        self._over_s = dict.fromkeys(self._over_s, 0.0)
        self._overloaded = 0

    def calibrate(self, homing: int, low: int, high: int) -> None:
        """Write a calibration that survives power."""
        for name, value in (("homing", homing), ("min_position", low), ("max_position", high)):
            self._put(name, value)
        self._kept = bytes(self._memory[:KEPT])

    def power_cycle(self) -> None:
        """What losing power and getting it back does."""
        self.changed = True
        fresh = Servo(self["id"], self.horn)
        self._memory = fresh._memory
        self._memory[:KEPT] = self._kept
        self._put("torque_limit", self["max_torque"])
        self._unload()
        self._alarms = 0

    @property
    def errors(self) -> int:
        """Error bits of a status."""
        return self["status"]

    @property
    def torque(self) -> float:
        """Share of the stall torque that the motor may use now."""
        if not self["torque_enable"] or self._alarms & HEAT & self["unloading"]:
            return 0.0
        limit = min(self["torque_limit"], self["max_torque"]) / 1000
        if self._alarms & (OVERLOAD | CURRENT) & self["unloading"]:
            limit *= self["protective_torque"] / 100
        return limit

    @property
    def stiffness(self) -> float:
        """Proportional gain relative to the one that LeRobot sets."""
        return self["p"] / 16

    def goal(self, dt: float) -> float:
        """Where the motor drives to after ``dt`` seconds more, encoder ticks without homing."""
        goal = min(max(self["goal"], self["min_position"]), self["max_position"])
        speed = abs(self["goal_velocity"])
        reach = speed * dt if speed else float(TICKS)
        self._reference += min(max(goal - self._reference, -reach), reach)
        self.changed |= self._reference != goal
        return self._reference + self["homing"]

    def hold(self) -> None:
        """Take the present position as goal, as after being carried elsewhere."""
        self.changed = True
        self._put("goal", self["position"])
        self._reference = float(self["position"])

    def measure(self, ticks: float, velocity: float, load: float, dt: float) -> None:
        """Update what is measured.

        Args:
            ticks: Encoder reading without homing.
            velocity: Ticks per second.
            load: Torque as a share of the stall torque, signed.
            dt: Seconds since the last call.
        """
        position = (round(ticks) - self["homing"]) % TICKS
        speed, share = unsigned(round(velocity), 15), unsigned(round(1000 * load), 10)
        _MEASURED.pack_into(self._memory, REGISTERS["position"].address, position, speed, share)
        self._unchecked_s += dt
        if self._unchecked_s >= CHECK_S:
            self._check(abs(load), self._unchecked_s)
            self._unchecked_s = 0.0

    def _check(self, load: float, dt: float) -> None:
        """What changes slowly: temperature, current, and the alarms that they raise."""
        self._put("moving", int(abs(self["velocity"]) > 20))
        self._put("current", round(load * STALL_A / 0.0065))
        self._warmth += (HEATING_C * load * load - self._warmth) * min(1.0, dt / COOLING_S)
        self._put("temperature", min(255, round(AMBIENT_C + self._warmth + self.heat_c)))
        over = {OVERLOAD: load * 100 > self["overload_torque"], CURRENT: self["current"] > self["protection_current"]}
        patience = {OVERLOAD: self["protection_time"] / 100, CURRENT: self["overcurrent_time"] / 100}
        for bit, is_over in over.items():
            self._over_s[bit] = self._over_s[bit] + dt if is_over else 0.0
            if self._over_s[bit] > patience[bit]:
                self._alarms |= bit
                self._overloaded = 1 if self["load"] > 0 else -1
        self._alarms &= ~(HEAT | VOLTAGE)
        self._alarms |= HEAT * (self["temperature"] > self["max_temperature"])
        self._alarms |= VOLTAGE * (not self["min_voltage"] <= self["voltage"] <= self["max_voltage"])
        self.changed |= self._alarms != self["status"]
        self._put("status", self._alarms)

    def _put(self, name: str, value: int) -> None:
        r = REGISTERS[name]
        raw = unsigned(value, r.sign) if r.sign else value & ((1 << 8 * r.size) - 1)
        self._memory[r.address : r.address + r.size] = raw.to_bytes(r.size, "little")
