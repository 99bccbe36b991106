"""Which requests make a batch: all where all are in time, else as many as can be."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from vla_stack.serving.pace import MARGIN, Pace, batch_sizes
from vla_stack.serving.worker import Job, Mailbox


def job(robot: int, policy: object, deadline_ns: int) -> Job:
    return Job(b"", str(robot), 0, 0, None, 0, 0, None, 0, 0, deadline_ns, policy)


def paced(most: int = 64) -> Pace:
    """A policy for whose batches 60 + 5·B milliseconds are allowed."""
    pace = Pace(most)
    for n in batch_sizes(most):
        pace.note(n, (60 + 5 * n) / MARGIN)
    return pace


def test_sizes_that_are_warmed_up():
    assert batch_sizes(8) == (1, 2, 4, 8) and batch_sizes(1) == (1,)
    assert batch_sizes(12) == (1, 2, 4, 8, 12)


def test_all_are_taken_where_all_are_in_time():
    assert paced().next([200] * 20) == (0, 20)
    assert paced(8).next([200] * 20) == (0, 8)
    assert Pace(8).next([0] * 20) == (0, 8)  # nothing is known yet: the most urgent


def test_as_many_as_can_be_in_time_are_taken_the_most_urgent_first():
    slacks = list(range(100, 600, 5))  # 100 robots that asked at all times of the last half second
    begin, number = paced().next(slacks)
    assert slacks[begin] >= 60 + 5 * number > slacks[begin - 1] and number == 54


def test_who_cannot_be_in_time_is_computed_where_nobody_can():
    assert paced().next([10, 20, 30]) == (0, 3)


def test_one_slow_batch_is_forgotten():
    pace = paced()
    pace.note(32, 1e6)
    assert pace.next([1.3 * 220] * 32) == (0, 32)
    pace.note(32, 220 / MARGIN)
    assert pace.next([221] * 32) == (0, 32)


@given(st.lists(st.integers(1, 600).map(lambda ms: ms + 0.5), min_size=1, max_size=50).map(sorted), st.integers(1, 32))
@settings(max_examples=50, deadline=None)
def test_no_other_batch_has_more_in_time_for_its_computing(slacks, most):
    def rate(part):
        ms = 60 + 5 * len(part)
        return sum(slack >= ms + 1e-9 for slack in part) / ms

    pace = Pace(most)
    for n in range(1, most + 1):
        pace.note(n, (60 + 5 * n) / MARGIN)
    taken = pace.next(slacks)
    chosen = slacks[taken[0] : sum(taken)]
    assert 0 < len(chosen) <= most
    if slacks[0] >= 60 + 5 * min(most, len(slacks)):
        assert taken == (0, min(most, len(slacks)))
    others = [slacks[i : i + n] for n in range(1, most + 1) for i in range(len(slacks) - n + 1)]
    assert rate(chosen) >= max(map(rate, others)) - 1e-12


def test_nobody_starves_where_more_is_asked_than_can_be_computed():
    """100 robots twice a second, batches of 8 of 100 ms: the grid and the batches fall on each other for ever."""
    now, last, gaps = 0.0, dict.fromkeys(range(100), 0.0), []
    asks = sorted((0.5 * k + 0.005 * i, i) for i in range(100) for k in range(40))
    mailbox = Mailbox(8)
    for n in batch_sizes(8):
        mailbox.note(n, (60 + 5 * n) * 1e6)
    policy, due = object(), 0
    with mock.patch("vla_stack.serving.worker.time.monotonic_ns", lambda: round(now * 1e9)):
        while due < len(asks):
            while due < len(asks) and asks[due][0] <= now:
                at, robot = asks[due]
                mailbox.put(job(robot, policy, round((at + 0.5) * 1e9)))
                due += 1
            batch = [j for j in mailbox.poll() if j.deadline_ns >= now * 1e9]
            now += 0.06 + 0.005 * len(batch)
            for j in batch:
                gaps.append(now - last[int(j.sid)])
                last[int(j.sid)] = now
    assert len(gaps) > 0.9 * 80 * now and max(gaps) < 3 and min(last.values()) > now - 3
