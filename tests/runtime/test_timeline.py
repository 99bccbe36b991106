import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_stack.runtime.timeline import MERGE_RULES, Timeline, merge
from vla_stack.schema import ActionChunk

GRIPPER = np.array([False, True])


def chunk(origin: int, value: float | None = None, rid: int = 1, horizon: int = 8) -> ActionChunk:
    labels = np.arange(origin, origin + horizon) if value is None else np.full(horizon, value)
    return ActionChunk(np.stack([labels, labels], axis=1).astype(np.float32), origin, origin, rid=rid)


def lay(*steps, rule):
    """Merge (chunk, k_next) pairs into an empty plan."""
    plan = Timeline.empty(0, 2)
    for c, k_next in steps:
        plan, report = merge(plan, c, k_next, MERGE_RULES[rule], GRIPPER)
    return plan, report


def test_replace_uses_the_new_chunk_from_the_first_open_tick():
    plan, report = lay((chunk(0, 1.0), 0), (chunk(4, 2.0, rid=2), 6), rule="replace")
    assert (plan.start, plan.end) == (6, 12)
    assert (plan.actions[:, 0] == 2.0).all()
    assert (report.delay, report.used, report.jump) == (2, 6, 1.0)
    assert list(plan.index) == [2, 3, 4, 5, 6, 7]


def test_append_keeps_what_was_planned():
    plan, report = lay((chunk(0, 1.0), 0), (chunk(4, 2.0, rid=2), 6), rule="append")
    assert list(plan.actions[:, 0]) == [1, 1, 2, 2, 2, 2]
    assert (plan.start, report.used, report.jump) == (6, 4, 0.0)


@pytest.mark.parametrize("rule", MERGE_RULES)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=6))
def test_identical_plans_merge_to_themselves_and_the_past_is_not_touched(rule, moves):
    plan, origin, k = Timeline.empty(0, 2), 0, 0
    for rid, (step, delay) in enumerate(moves):
        origin = max(origin + step, k)
        before, k = plan, origin + delay
        plan, _ = merge(plan, chunk(origin, rid=rid), k, MERGE_RULES[rule], GRIPPER)
        assert plan.start >= k
        ticks = np.arange(plan.start, plan.end)
        np.testing.assert_array_equal(plan.actions[:, 0], ticks)
        assert len(before.actions) == before.end - before.start


def test_jump_leaves_grippers_out():
    a, b = chunk(0, 1.0), chunk(0, 1.0, rid=2)
    b.actions[:, 1] = 9.0
    _, report = lay((a, 0), (b, 2), rule="replace")
    assert report.jump == 0.0


def test_plans_with_a_gap_do_not_join():
    with pytest.raises(ValueError, match="starts at 9 cannot follow one that ends at 8"):
        Timeline.of(chunk(0)).followed_by(Timeline.of(chunk(9)))


def test_until_and_since_split_a_plan():
    plan = Timeline.of(chunk(3))
    joined = plan.until(6).followed_by(plan.since(6))
    np.testing.assert_array_equal(joined.actions, plan.actions)
    assert plan.row(2) is None and plan.row(3) == 0 and plan.row(11) is None
