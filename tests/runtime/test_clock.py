from vla_stack.runtime.clock import RealClock, VirtualClock


def test_virtual_time_moves_only_when_told():
    clock = VirtualClock(5)
    clock.sleep_until_ns(100)
    assert clock.now_ns() == 100
    clock.sleep_until_ns(50)
    assert clock.now_ns() == 100
    clock.advance_ns(7)
    assert clock.now_ns() == 107


def test_real_time_is_never_early_and_keeps_absolute_deadlines():
    clock = RealClock()
    t_0 = clock.now_ns()
    for k in range(1, 6):
        clock.sleep_until_ns(t_0 + k * 2_000_000)
        assert clock.now_ns() >= t_0 + k * 2_000_000
    before = clock.now_ns()
    clock.sleep_until_ns(before - 10**9)  # a deadline that has passed does not wait
    assert clock.now_ns() >= before
