"""Registers in, motion out: the emulated arm obeys its servos, and nothing but them and hands."""

import gymnasium as gym
import numpy as np
import pytest

import sim
from robot_drivers.feetech_servo import OVERLOAD, TICKS
from robot_drivers.so101_plant import PER_RAD, Plant, leading, resting, sweeping
from sim.so101 import SO101

START_NS = 10**12


class Run:
    """A plant and its clock."""

    def __init__(self) -> None:
        self.env = gym.make("sim/so101_pick-v0", cameras=()).unwrapped
        self.env.reset(seed=0)
        self.plant = Plant(SO101, self.env.model, self.env.data, np.random.default_rng(0))
        self.calibration = self.plant.calibrate()
        self.now_ns = START_NS
        self.plant.advance(self.now_ns)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.02)):
            self.now_ns += 20_000_000
            self.plant.advance(self.now_ns)

    def torque(self, on: int) -> None:
        for servo in self.plant.servos:
            servo.write(21, b"\x10")
            servo.write(40, bytes((on,)))

    def command(self, i: int, angle: float) -> None:
        ticks = round(TICKS // 2 - 1 + angle * PER_RAD)
        self.plant.servos[i].write(42, ticks.to_bytes(2, "little"))


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_calibrated_joint_reads_zero_in_the_middle_of_its_range(run):
    run.plant.take(resting(np.zeros(6)))
    run.wait(3.0)
    for servo, c in zip(run.plant.servos, run.calibration.values(), strict=True):
        assert abs(servo["position"] - (c["range_min"] + c["range_max"]) / 2) <= 1


def test_goals_move_the_arm_only_under_torque(run):
    before = run.plant.angles
    run.command(0, before[0] + 0.4)
    run.wait(0.5)
    assert np.abs(run.plant.angles - before).max() < 0.01
    run.torque(1)
    run.wait(0.1)
    assert np.abs(run.plant.angles - before).max() < 0.01  # switching on does not jump to an old goal
    run.command(0, before[0] + 0.4)
    run.wait(1.0)
    assert run.plant.angles[0] == pytest.approx(before[0] + 0.4, abs=0.01)
    assert np.abs(run.plant.angles - before)[1:].max() < 0.02


def test_readings_agree_with_the_model(run):
    run.torque(1)
    run.command(2, -0.5)
    run.wait(1.0)
    position = run.plant.servos[2]["position"]
    assert position == pytest.approx(TICKS // 2 - 1 + run.plant.angles[2] * PER_RAD, abs=1)
    assert run.plant.goals()[2] == pytest.approx(-0.5, abs=0.002)


def test_a_horn_that_is_one_tooth_off_moves_nothing_but_what_is_read_and_obeyed(run):
    run.torque(1)
    before = run.plant.angles
    run.plant.remount(2)
    run.wait(0.5)
    assert np.abs(run.plant.angles - before).max() < 0.01
    assert run.plant.servos[2]["position"] == pytest.approx(TICKS // 2 - 1 + before[2] * PER_RAD + TICKS // 25, abs=2)
    run.command(2, 0.0)
    run.wait(1.5)
    assert run.plant.angles[2] == pytest.approx(-2 * np.pi / 25, abs=0.01)
    assert run.plant.goals()[2] == pytest.approx(-2 * np.pi / 25, abs=0.01)  # whoever looks at the arm is not deceived
    told = run.plant.told(np.zeros(6))
    assert told[[0, 2]] == pytest.approx([0.0, 2 * np.pi / 25], abs=2e-3)
    run.command(2, told[2])
    run.wait(1.0)
    assert run.plant.angles[2] == pytest.approx(0.0, abs=0.01)
    run.plant.mend()
    run.command(2, 0.0)
    run.wait(1.0)
    assert run.plant.angles[2] == pytest.approx(0.0, abs=0.01)


def test_a_frozen_joint_stays_and_says_nothing(run):
    run.torque(1)
    run.plant.freeze(0)
    before = run.plant.angles[0]
    run.command(0, before + 0.5)
    run.wait(3.0)
    assert run.plant.angles[0] == pytest.approx(before, abs=0.005) and run.plant.servos[0].errors == 0
    run.plant.mend()
    run.wait(1.0)
    assert run.plant.angles[0] == pytest.approx(before + 0.5, abs=0.01)


def test_a_joint_that_is_pushed_raises_overload(run):
    run.torque(1)
    run.plant.push(0)
    run.wait(3.0)
    assert run.plant.servos[0].errors & OVERLOAD
    run.plant.mend()
    run.command(0, run.plant.angles[0] + 0.2)
    run.wait(1.0)
    assert not run.plant.servos[0].errors


def test_a_sweep_reaches_both_ends_of_the_ranges_that_calibration_asks_for_again_and_again(run):
    run.plant.take(sweeping(run.plant))
    for _ in range(2):
        seen = []
        for _ in range(600):
            run.wait(0.02)
            seen.append(run.plant.angles)
        ends = np.column_stack([np.min(seen, axis=0), np.max(seen, axis=0)])
        swept = [0, 1, 2, 3, 5]  # LeRobot takes the roll to turn without end
        assert np.abs(ends - run.plant.range)[swept].max() < 0.01


def test_a_stalled_process_skips_time_instead_of_racing(run):
    run.now_ns += 5 * 10**9
    run.plant.advance(run.now_ns)
    assert run.plant.skipped_s == pytest.approx(5.0, abs=0.01)


def test_who_follows_a_leader_in_the_experts_hand_picks_the_cube(run):
    """Two plants, no bus: the follower's servos get what the leader's read."""
    import mujoco

    model = mujoco.MjModel.from_xml_path(SO101.xml)
    leader = Plant(SO101, model, mujoco.MjData(model), np.random.default_rng(1))
    leader.calibrate()
    leader.take(resting(run.plant.angles))
    leader.advance(START_NS)
    for k in range(1, 101):
        leader.advance(START_NS + k * 20_000_000)
    expert = sim.make_expert(run.env)

    def command():
        run.env.set_command(run.plant.goals())
        return expert.act()

    leader.take(leading(command, leader))
    run.torque(1)
    begin = START_NS + 2 * 10**9
    run.now_ns = run.now_ns + 2 * 10**9
    run.plant.advance(run.now_ns)
    picked = False
    for k in range(600):
        leader.advance(begin + k * 20_000_000)
        run.wait(0.02)
        for mine, its in zip(run.plant.servos, leader.servos, strict=True):
            mine.write(42, its["position"].to_bytes(2, "little"))
        picked = picked or run.env.progress()[-1]
        if picked:
            break
    assert picked
