"""A robot whose policy does not keep up says so: in time, not at every step, and not where it waits for a person."""

from collections import Counter

import pytest

from vla_stack.runtime.starvation import REPEAT_S, WINDOW_S, Starvation


class Robot:
    """Goes through states, and looks twice a second, as the node does."""

    def __init__(self, mode: str = "naive") -> None:
        self.now = 100.0
        self.counters: Counter[str] = Counter()
        self.starvation = Starvation(mode, clock=lambda: self.now)
        self.told: list[tuple[float, str]] = []

    def spend(self, seconds: float, state: str) -> None:
        self.starvation.note(state)
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.look()

    def look(self) -> None:
        if line := self.starvation.look(self.counters):
            self.told.append((self.now - 100.0, line))


def test_a_robot_that_never_gets_an_action_says_so_and_says_it_again():
    robot = Robot()
    robot.counters["requests"] = 3
    robot.spend(3 * REPEAT_S, "hold")
    assert [at for at, _ in robot.told] == [WINDOW_S, WINDOW_S + REPEAT_S, WINDOW_S + 2 * REPEAT_S]
    assert robot.told[0][1].startswith("no action for 100% of the last 2 s: 3 requests, 0 answers -- see what the ser")


def test_answers_that_come_too_late_have_another_remedy():
    for mode, advises in (("naive", True), ("sync", False)):
        robot = Robot(mode)
        robot.counters["chunks"] = 1
        robot.spend(WINDOW_S, "hold")
        assert "--device" in robot.told[0][1] and ("--mode sync" in robot.told[0][1]) is advises


@pytest.mark.parametrize(("idle", "told"), [(0.2, False), (0.8, True)])
def test_what_counts_is_most_of_the_time_to_the_part_of_a_second(idle, told):
    robot = Robot()
    for _ in range(20):
        robot.starvation.note("hold")
        robot.now += idle / 4
        robot.starvation.note("run")
        robot.now += (1 - idle) / 4
        robot.look()
    assert bool(robot.told) is told


def test_a_stop_and_the_time_between_episodes_are_no_part_of_it():
    robot = Robot()
    robot.spend(WINDOW_S / 2, "hold")
    robot.spend(10 * WINDOW_S, "stop")
    assert not robot.told
    robot.spend(WINDOW_S / 2, "hold")  # the next episode goes on counting
    assert len(robot.told) == 1


def test_the_time_before_the_policy_is_asked_is_no_part_of_it():
    robot = Robot()
    for _ in range(5):  # short episodes, before each of which a scene is laid out slowly
        robot.starvation.begin(robot.counters)
        for _ in range(4):
            robot.now += 0.5
            robot.look()
        robot.counters.update(requests=1, chunks=1)
        robot.now += 0.1
        robot.spend(0.5, "run")
        robot.starvation.note("stop")
    assert not robot.told
    robot.starvation.begin(robot.counters)
    robot.counters["requests"] += 1
    for _ in range(6):  # and where it is asked and does not answer, the robot has nothing to do
        robot.now += 0.5
        robot.look()
    assert len(robot.told) == 1


def test_a_robot_that_got_going_again_says_nothing():
    robot = Robot()
    robot.spend(WINDOW_S / 2, "hold")
    robot.spend(20.0, "run")
    assert not robot.told
