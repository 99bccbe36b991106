import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_stack.errors import UserError
from vla_stack.runtime.merging import blender, crossfade, ensemble, merge_rule
from vla_stack.runtime.timeline import Timeline, merge
from vla_stack.schema import ActionChunk, Dim, RobotSpec

RULES = ("replace", "append", "crossfade", "ensemble")
DIMS = (Dim("x", "m"), Dim("gripper", "ratio", kind="gripper"))
ROBOT = RobotSpec("test", DIMS, DIMS, (), 10.0)
GRIPPER = ROBOT.gripper_mask


def chunk(origin: int, value: float | None = None, rid: int = 1, horizon: int = 8) -> ActionChunk:
    labels = np.arange(origin, origin + horizon) if value is None else np.full(horizon, value)
    return ActionChunk(np.stack([labels, labels], axis=1).astype(np.float32), origin, origin, rid=rid)


def lay(*steps, rule):
    """Merge (chunk, k_next) pairs into an empty plan."""
    plan = Timeline.empty(0, 2)
    for c, k_next in steps:
        plan, report = merge(plan, c, k_next, merge_rule(rule, ROBOT), GRIPPER)
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


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=6))
def test_identical_plans_merge_to_themselves_and_the_past_is_not_touched(rule, moves):
    """§8 test 9 of asynchronous execution, second half: all merge rules are idempotent."""
    plan, origin, k = Timeline.empty(0, 2), 0, 0
    for rid, (step, delay) in enumerate(moves):
        origin = max(origin + step, k)
        before, k = plan, origin + delay
        plan, _ = merge(plan, chunk(origin, rid=rid), k, merge_rule(rule, ROBOT), GRIPPER)
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


# -- rules that blend ----------------------------------------------------------------------------------------------

ARM = (Dim("x", "m"), Dim("yaw", "rad", kind="angle"), Dim("gripper", "ratio", kind="gripper"))
BLEND = blender(RobotSpec("arm", ARM, ARM, (), 10.0))


def plan_of(rows, origin=0, rid=1):
    return Timeline.of(ActionChunk(np.array(rows, np.float32), origin, origin, rid=rid))


def test_positions_blend_linearly_angles_the_short_way_grippers_not_at_all():
    old, new = plan_of([[0.0, 3.0, 0.0]] * 4), plan_of([[1.0, -3.0, 1.0]] * 4, rid=2)
    faded = crossfade(old, new, BLEND, steps=3)
    np.testing.assert_allclose(faded.actions[:, 0], [0.25, 0.5, 0.75, 1.0])
    assert (faded.actions[:, 2] == 1.0).all()
    way = np.remainder(faded.actions[:3, 1] - 3.0, 2 * np.pi)  # onwards past pi, not back through 0
    np.testing.assert_allclose(way, np.array([0.25, 0.5, 0.75]) * (2 * np.pi - 6.0), atol=1e-6)
    assert faded.actions[3, 1] == -3.0 and (faded.rid == 2).all()


def test_a_joint_with_stops_does_not_turn_through_them():
    joint = (Dim("wrist", "rad", -3.1, 3.1, kind="angle"),)
    blend = blender(RobotSpec("arm", joint, joint, (), 10.0))
    halfway = blend(*np.array([[[3.0]], [[-3.0]]], np.float32), np.array([0.5], np.float32))
    np.testing.assert_allclose(halfway, 0.0, atol=1e-6)


def test_ensemble_is_the_weighted_average_of_all_chunks():
    """Against the definition: weights exp(-m j), j = 0 for the oldest."""
    m, values = 0.3, [1.0, 5.0, -2.0, 4.0]
    plan = plan_of([[values[0], 0.0, 0.0]] * 6)
    for rid, value in enumerate(values[1:], start=2):
        plan = ensemble(plan, plan_of([[value, 0.0, float(rid)]] * 6, rid=rid), BLEND, decay=m)
    weights = np.exp(-m * np.arange(4))
    np.testing.assert_allclose(plan.actions[:, 0], (weights @ values) / weights.sum(), rtol=1e-6)
    assert (plan.actions[:, 2] == 4.0).all() and (plan.votes == 4).all() and (plan.rid == 4).all()


def test_a_chunk_that_starts_ahead_leaves_the_plan_until_then():
    old = plan_of([[float(i), 0.0, 0.0] for i in range(6)])
    later = ActionChunk(np.full((6, 3), 9.0, np.float32), origin=4, k_obs=1, rid=2)
    plan, report = merge(old, later, 2, merge_rule("replace", ROBOT), np.array([False, False, True]))
    assert (plan.start, plan.end) == (2, 10)
    np.testing.assert_array_equal(plan.actions[:, 0], [2, 3, 9, 9, 9, 9, 9, 9])
    assert report.used == 6 and report.jump == 0.0


def test_an_unknown_rule_is_named():
    with pytest.raises(UserError, match="merge rule 'mean' does not exist.*replace, append, crossfade, ensemble"):
        merge_rule("mean", ROBOT)
