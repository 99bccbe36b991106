import threading

from robot_drivers.watchdog import Watchdog

PATIENCE_S = 20.0


def test_silence_after_a_command_holds_once():
    held = threading.Semaphore(0)
    dog = Watchdog(0.01, held.release, threading.RLock())
    dog.feed()
    assert held.acquire(timeout=PATIENCE_S)
    dog.feed()
    assert held.acquire(timeout=PATIENCE_S)
    dog.end()
    assert dog.barks == 2 and not held.acquire(blocking=False)


def test_rest_and_a_robot_that_was_never_commanded_are_left_alone():
    barked = threading.Event()
    never, resting = (Watchdog(0.005, barked.set, threading.RLock()) for _ in range(2))
    resting._limit_s = 3600.0  # so that rest() comes first on any machine
    resting.feed()
    resting.rest()
    resting._limit_s = 0.005
    other = threading.Event()
    clock = Watchdog(0.05, other.set, threading.RLock())  # ten times as long as theirs
    clock.feed()
    assert other.wait(PATIENCE_S)
    for dog in (never, resting, clock):
        dog.end()
    assert not barked.is_set()
