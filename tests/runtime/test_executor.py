"""The executor under random delays, losses, duplicates and reordering.

The policy of these tests answers with labels: action i of a chunk is the number origin + i. Whatever arrives whenever,
a dispatched label must be the step that the plan means, which catches every off-by-one (async execution, test 7).
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_stack.errors import UserError
from vla_stack.runtime import executor as executor_module
from vla_stack.runtime.dispatch import Dispatch, Request, State
from vla_stack.runtime.executor import DelayEstimator, Executor, ExecutorConfig, catching_up
from vla_stack.schema import CONTINUE, ActionChunk, Dim, PolicySpec, RobotSpec

HORIZON = 16
MODES = st.sampled_from(executor_module.MODES)
MAX_DELAY = 4  # that the policy was trained with


def robot(kind: str = "absolute", max_rate: float = np.inf) -> RobotSpec:
    dims = (Dim("x.pos", "m", max_rate=max_rate), Dim("gripper.pos", "ratio", kind="gripper"))
    return RobotSpec("test/robot", dims, dims, (), rate_hz=10.0, action_kind=kind)


def executor(mode: str = "naive", kind: str = "absolute", max_rate: float = np.inf, **config) -> Executor:
    """Chunks, which last longer than the default age cap here, may be executed to their end unless a test says more."""
    spec = robot(kind, max_rate)
    if mode != "sync":
        config.setdefault("max_age_s", HORIZON * spec.dt)
    policy = PolicySpec(spec, HORIZON, d_train_max=MAX_DELAY, extras={"continues": CONTINUE})
    return Executor(spec, policy, ExecutorConfig(mode=mode, **config))


def answer(r: Request, **changes) -> ActionChunk:
    labels = np.arange(r.origin, r.origin + HORIZON, dtype=np.float32)
    chunk = ActionChunk(np.stack([labels, labels], axis=1), r.origin, r.k_obs, rid=r.rid, epoch=r.epoch)
    return replace(chunk, **changes)


def drive(ex, ticks, delays=(), copies=(), resets=()):
    """Run ``ticks`` steps; reply n arrives ``delays[n]`` steps late (None: lost), with ``copies[n]`` copies.

    The last entry of ``delays`` and ``copies`` holds for all further replies; copies follow one step apart.
    """
    inbox: list[tuple[int, ActionChunk]] = []
    log: list[tuple[int, int, Dispatch]] = []
    sent = 0
    ex.reset(0)
    for k in range(ticks):
        if k in resets:
            ex.reset(k)
        if (request := ex.plan(k)) is not None:
            delay = delays[min(sent, len(delays) - 1)] if delays else 0
            extra = copies[min(sent, len(copies) - 1)] if copies else 0
            sent += 1
            if delay is not None:
                inbox += [(k + delay + i, answer(request)) for i in range(1 + extra)]
        for _, chunk in [x for x in inbox if x[0] <= k]:
            ex.deliver(chunk, k)
        inbox = [x for x in inbox if x[0] > k]
        log.append((ex.epoch, k, ex.dispatch(k)))
    return log


def check_labels(ex: Executor, log) -> None:
    """Every action is its own step: at once where motion goes on, after the wait where it stops for the policy."""
    held = {k for _, k, d in log if d.state is not State.RUN}
    averages = ex.config.mode in ("ensemble", *CONTINUE) or ex.config.merge in ("crossfade", "ensemble")
    longest = 0
    for _, k, d in log:
        if d.state is not State.RUN:
            continue
        waited = k - d.action[0]
        assert averages or d.action[0] == d.action[1]  # a gripper is not averaged
        if ex.config.mode == "sync":  # by exactly the steps held since the request
            assert waited == sum(d.k_obs <= kk < k for kk in held)
        else:  # where the robot has held since the observation, until the chunk came
            since = next(n for n in range(len(log)) if d.k_obs + n not in held)
            longest = max(longest, since)
            late = k - d.k_obs - catching_up(k - d.k_obs + 1, since)[-1]
            assert 0 <= waited <= longest if averages else waited in (0, late)
        assert k - d.k_obs <= ex.max_age
    assert len({(epoch, k) for epoch, k, _ in log}) == len(log)


DELAYS = st.lists(st.one_of(st.integers(0, 12), st.none()), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    MODES,
    st.sampled_from(["", "append", "crossfade", "ensemble", "replace"]),
    DELAYS,
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, HORIZON),
)
def test_every_dispatched_value_is_its_tick(mode, merge, delays, copies, execute):
    """§8 test 7."""
    ex = executor(mode, merge=merge, execute=execute, hold_s=60.0)
    check_labels(ex, drive(ex, 120, delays, copies))


@settings(max_examples=100, deadline=None)
@given(MODES, DELAYS, st.sets(st.integers(1, 90), max_size=4), st.integers(3, 14))
def test_nothing_of_an_old_epoch_after_reset_and_nothing_too_old(mode, delays, resets, max_age):
    """§8 test 10: ticks rise, none twice in an epoch, no action too old or of an epoch before."""
    ex = executor(mode, max_age_s=max_age / 10, hold_s=60.0)
    log = drive(ex, 100, delays, resets=resets)
    check_labels(ex, log)
    for _, k, d in log:
        if d.state is State.RUN:
            assert d.k_obs >= max((r for r in resets if r <= k), default=0)
            assert k - d.k_obs <= max_age == ex.max_age
    assert [k for _, k, _ in log] == sorted({k for _, k, _ in log})


@settings(max_examples=50, deadline=None)
@given(MODES, DELAYS, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_duplicates_change_nothing(mode, delays, copies):
    """§8 test 11, second half: duplicates, which also arrive out of order, leave the same log."""
    once, often = (drive(executor(mode), 100, delays, c) for c in ((), copies))
    assert _trace(once) == _trace(often)


@pytest.mark.parametrize("mode", [m for m in executor_module.MODES if m not in ("sync", "ensemble")])
@settings(deadline=None)
@given(st.integers(1, HORIZON - 1))
def test_without_delay_every_mode_is_sync(mode, execute):
    """§8 test 9, first half."""
    logs = [drive(executor(m, execute=execute), 80) for m in ("sync", mode)]
    assert _trace(logs[0]) == _trace(logs[1])
    assert all(d.state is State.RUN for _, _, d in logs[0])


# -- what a request carries ----------------------------------------------------------------------------------------


def requests(mode, delay, execute=6, ticks=40, **config):
    """Requests of a drive with a constant delay, each with the plan as it was at that moment."""
    ex = executor(mode, execute=execute, hold_s=60.0, **config)
    seen, plan = [], ex.plan
    ex.plan = lambda k: seen.append((k, ex._now.timeline.since(k), plan(k))) or seen[-1][2]
    drive(ex, ticks, [delay])
    return [(k, before, r) for k, before, r in seen if r is not None]


@pytest.mark.parametrize("mode", CONTINUE)
def test_how_much_a_chunk_says_to_execute_holds_in_every_mode_that_continues(mode):
    """As a mixture of horizons says it: the next request comes after so many steps of that chunk."""
    ex = executor(mode)
    ex.reset(0)
    asked = []
    for k in range(40):
        if (request := ex.plan(k)) is not None:
            asked.append(k)
            assert ex.deliver(answer(request, execute=3 + request.rid), k).accepted
        ex.dispatch(k)
    assert asked == [0, 4, 9, 15, 22, 30, 39]


@pytest.mark.parametrize("mode", CONTINUE)
def test_a_request_carries_the_plan_that_its_chunk_continues(mode):
    first, *later = requests(mode, delay=3)
    assert first[2].continuation is None and len(later) > 3
    for k, plan, request in later[1:]:
        c = request.continuation
        np.testing.assert_array_equal(c.actions[:, 0], np.arange(k, plan.end))
        assert (c.mode, c.delay, c.execute) == (mode, 3, HORIZON - len(c.actions)) and request.state is None


def test_a_prefix_is_no_longer_than_training_knew():
    later = requests("prefix", delay=MAX_DELAY + 2)[1:]
    assert {r.continuation.delay for _, _, r in later} == {MAX_DELAY}


@pytest.mark.parametrize("mode", ["sync", "naive", "ensemble"])
def test_other_modes_carry_nothing(mode):
    assert all(
        r.continuation is None and r.state is None and r.origin == r.k_obs for _, _, r in requests(mode, delay=2)
    )


def test_future_state_is_where_the_plan_leads_to():
    """The new chunk starts at the step at which it arrives; the policy is shown the last command before that."""
    for k, _, request in requests("future_state", delay=3)[2:]:
        assert (request.k_obs, request.origin) == (k, k + 3)
        np.testing.assert_array_equal(request.state, [k + 2, k + 2])


def test_future_state_discards_nothing():
    ex = executor("future_state", execute=6)
    log = drive(ex, 60, [3])
    used = [d.index for _, k, d in log if k > 20 and d.state is State.RUN]
    assert set(used) == set(range(6))


def follow(mode, delay, execute, ticks, state=0.3):
    """Commands to a robot that is where it was commanded to be, by a policy that sees its state alone, and hand-overs.

    From a state the policy goes on in a straight line whose slope is a rough function of that state, so a chunk from
    another state, or laid down elsewhere, leads elsewhere. The first reply comes at once.
    """
    ex, inbox, commands, first = executor(mode, execute=execute, hold_s=60.0, max_age_s=9.9), [], [], []
    ex.reset(0)
    ex.delay.observe(delay)
    for k in range(ticks):
        for _, chunk in [x for x in inbox if x[0] <= k]:
            assert ex.deliver(chunk, k).accepted
        inbox = [x for x in inbox if x[0] > k]
        while (request := ex.plan(k)) is not None:
            seen = np.float32(state if request.state is None else request.state[0])
            line = seen + np.sin(40.0 * seen) * np.arange(1, HORIZON + 1, dtype=np.float32)
            chunk = replace(answer(request), actions=np.stack([line, line], axis=1))
            if delay and request.rid > 1:
                inbox.append((k + delay, chunk))
            else:
                ex.deliver(chunk, k)
        d = ex.dispatch(k)
        if d.state is State.RUN:
            first += [len(commands)] * (d.index == 0)
            state = float(d.action[0])
            commands.append(state)
    return commands, first


@pytest.mark.parametrize("delay", range(HORIZON + 1))
def test_future_state_is_sync_without_the_waiting(delay):
    """§8 test 8: exact roll-forward and a policy of the state alone give the trajectory of synchronous execution."""
    future, first = follow("future_state", delay, execute=6, ticks=150)
    assert len(future) == 150  # it never waited
    start, steps = first[1], max(6, delay)
    assert set(np.diff(first)) == {steps}
    sync, _ = follow("sync", delay, steps, ticks=600, state=future[start - 1])
    np.testing.assert_array_equal(future[start:], sync[: 150 - start])


def test_a_chunk_later_than_it_was_made_for_is_faded_in():
    ex = executor("prefix", execute=8, hold_s=60.0)
    shifted = lambda r: replace(answer(r), actions=answer(r).actions + 10.0 * (r.rid > 1))  # noqa: E731
    ex.reset(0)
    ex.deliver(shifted(ex.plan(0)), 0)
    asked, values = None, []
    for k in range(14):
        asked = asked or (ex.plan(k) if k else None)
        if k == 13:  # conditioned on a delay of 0, it comes five steps late
            assert asked.origin == 8 and asked.continuation.delay == 0
            ex.deliver(shifted(asked), k)
        values.append(ex.dispatch(k).action.copy())
    assert 13 < values[13][0] < 23 and values[13][1] == 23  # on the way; the gripper has switched
    assert ex.counters["later than conditioned"] == 1


def jump(far: float, late: int, delay: int = 0):
    """A chunk ``far`` from the plan that was conditioned on no delay and comes ``late`` steps late."""
    ex = executor("prefix", max_rate=2.0, execute=8, hold_s=60.0)  # 2 / s: 0.8 within a crossfade
    ex.reset(0)
    ex.deliver(answer(ex.plan(0)), 0)
    for k in range(8):
        ex.dispatch(k)
    request = ex.plan(8)
    for k in range(8, 8 + late):
        ex.dispatch(k)
    assert request.continuation.delay == 0
    if delay:
        ex.delay.observe(delay)
    k = 8 + late
    return ex, k, ex.deliver(replace(answer(request), actions=answer(request).actions + np.float32(far)), k)


def test_a_late_chunk_too_far_from_the_plan_is_dropped_while_there_is_time_to_ask_again():
    ex, k, report = jump(far=0.9, late=2)  # 6 steps are left, 2 are needed
    assert (report.accepted, report.reason, report.delay) == (False, "jump", 2)
    assert ex.counters["rejected.jump"] == 1
    request = ex.plan(k)  # at once, from here
    assert (request.k_obs, request.continuation.delay) == (k, 2)
    assert ex.dispatch(k).action[0] == k  # the plan goes on
    assert ex.deliver(answer(request), k + 1).accepted


@pytest.mark.parametrize(
    ("far", "late", "delay"),
    [(0.7, 2, 0), (0.9, 4, 0), (0.9, 2, 6)],  # within reach; 4 steps left and 4 needed; 6 left and 6 needed
)
def test_a_late_chunk_is_faded_in_within_reach_and_rather_than_starving(far, late, delay):
    ex, k, report = jump(far, late, delay)
    assert report.accepted and k < ex.dispatch(k).action[0] < k + far


def test_motion_rests_on_no_observation_older_than_a_second_by_default():
    spec = robot()
    for mode, horizon, age in (("naive", 32, 10), ("naive", 8, 8), ("sync", 32, 82)):
        ex = Executor(spec, PolicySpec(spec, horizon), ExecutorConfig(mode=mode))
        assert ex.max_age == age  # control steps of 0.1 s; sync stands still for up to 5 s more
    longer = ExecutorConfig(execute=15)
    assert Executor(robot(), PolicySpec(robot(), 32), longer).max_age == 15  # who asks for more means it


@pytest.mark.parametrize("mode", CONTINUE)
def test_a_policy_that_cannot_continue_plans_is_refused(mode):
    with pytest.raises(UserError, match=f"cannot continue a plan in mode '{mode}'.* its modes are none"):
        Executor(robot(), PolicySpec(robot(), HORIZON), ExecutorConfig(mode=mode))


def test_future_state_wants_absolute_actions():
    with pytest.raises(UserError, match="needs absolute actions"):
        executor("future_state", kind="delta")


def _trace(log):
    return [(k, d.state, None if d.action is None else tuple(d.action), d.chunk_rid, d.index) for _, k, d in log]


@pytest.mark.parametrize("delay", [0, 1, 3, 5, 7])
def test_naive_never_waits_once_it_moves_and_sync_waits_the_delay(delay):
    naive = [d.state for _, _, d in drive(executor("naive"), 100, [delay])]
    assert naive == [State.HOLD] * delay + [State.RUN] * (100 - delay)
    sync = [d.state for _, _, d in drive(executor("sync"), 5 * (8 + delay), [delay])]
    assert sync == ([State.HOLD] * delay + [State.RUN] * 8) * 5


def test_one_request_in_flight_and_resent_once_given_up():
    ex = executor(timeout_s=1.0)
    ex.reset(0)
    asked = []
    for k in range(80):
        if (r := ex.plan(k)) is not None:
            asked.append(r)
        ex.dispatch(k)
    assert [r.origin for r in asked[:3]] == [0, 10, 30]  # twice as long each time
    assert [r.rid for r in asked] == sorted({r.rid for r in asked})
    assert ex.deliver(answer(asked[0]), 80).reason == "not asked"


def test_lost_reply_is_asked_for_again_before_the_plan_runs_out():
    log = drive(executor("naive", execute=4), 60, [0, None, 1, 1, 1, 1])
    assert all(d.state is State.RUN for _, _, d in log)


def test_starvation_holds_then_stops_until_rearmed():
    ex = executor("naive", hold_s=0.5)
    log = drive(ex, 40, [0, None, None, None, None])
    states = [d.state for _, _, d in log]
    assert states == [State.RUN] * 16 + [State.HOLD] * 5 + [State.STOP] * 19
    assert log[18][2].action[0] == log[15][2].action[0] == 15  # HOLD repeats the last command
    assert log[-1][2].action is None
    assert ex.plan(40) is None
    ex.rearm(40)
    request = ex.plan(40)
    assert ex.dispatch(40).state is State.HOLD
    assert ex.deliver(answer(request), 43).accepted
    assert [ex.dispatch(k).action[0] for k in range(43, 49)] == [
        41,
        42,
        44,
        45,
        47,
        48,
    ]  # it has held since, and hurries


def test_moves_that_came_late_to_a_robot_that_stood_still_are_done_in_full():
    ex = executor("naive", kind="delta")
    ex.reset(0)
    request = ex.plan(0)
    for k in range(4):
        assert ex.dispatch(k).state is State.HOLD
    assert ex.deliver(answer(request), 4).accepted
    assert [ex.dispatch(k).action[0] for k in range(4, 9)] == [0, 1, 2, 3, 4]


def test_skipped_ticks_count_towards_stop():
    ex = executor("naive", hold_s=0.5)
    drive(ex, 16, [0, None])
    assert ex.dispatch(30).state is State.STOP


def test_waiting_for_the_first_chunk_never_stops():
    assert {d.state for _, _, d in drive(executor("naive"), 100, [None])} == {State.HOLD}


def test_holding_a_delta_robot_commands_no_motion():
    _, _, last = drive(executor("naive", kind="delta"), 18, [0, None])[-1]
    assert last.state is State.HOLD
    np.testing.assert_array_equal(last.action, [0.0, 15.0])


def test_holding_a_robot_that_is_commanded_in_velocities_commands_none():
    dims = (Dim("x.vel", "m/s"), Dim("lift.pos", "m"), Dim("grip", "N", kind="gripper"), Dim("push", "N"))
    spec = RobotSpec("test/base", dims, dims, (), rate_hz=10.0)
    ex = Executor(spec, PolicySpec(spec, HORIZON), ExecutorConfig(max_age_s=0.5))
    ex.reset(0)
    request = ex.plan(0)
    chunk = ActionChunk(np.full((HORIZON, 4), 0.3, np.float32), request.origin, request.k_obs, request.rid, ex.epoch)
    assert ex.deliver(chunk, 0).accepted
    for k in range(8):
        last = ex.dispatch(k)
    assert last.state is State.HOLD
    np.testing.assert_array_equal(last.action, np.float32([0.0, 0.3, 0.3, 0.0]))


@pytest.mark.parametrize(
    ("reason", "changes", "k_next"),
    [
        ("epoch", {"epoch": 0}, 1),
        ("not asked", {"rid": 99}, 1),
        ("shape", {"actions": np.zeros((HORIZON, 3), np.float32)}, 1),
        ("shape", {"actions": np.zeros((HORIZON - 1, 2), np.float32)}, 1),
        ("origin", {"origin": 1}, 1),
        ("origin", {"k_obs": -1}, 1),
        ("not finite", {"actions": np.full((HORIZON, 2), np.nan, np.float32)}, 1),
        ("too late", {}, HORIZON),
    ],
)
def test_refusals(reason, changes, k_next):
    ex = executor()
    ex.reset(0)
    request = ex.plan(0)
    report = ex.deliver(answer(request, **changes), k_next)
    assert (report.accepted, report.reason) == (False, reason)
    assert ex.counters[f"rejected.{reason}"] == 1
    assert ex.dispatch(k_next).action is None
    assert ex.deliver(answer(request), k_next).accepted == (reason != "too late")


def test_a_step_is_dispatched_once():
    ex = executor()
    ex.dispatch(4)
    with pytest.raises(ValueError, match="step 4 was dispatched already"):
        ex.dispatch(4)


def test_delay_is_the_window_maximum_without_the_first_reply():
    estimator = DelayEstimator(window=3)
    assert estimator.predict() == 0
    estimator.observe_first(9)
    assert estimator.predict() == 9
    for d in (7, 1, 2, 1):
        estimator.observe(d)
    assert estimator.predict() == 2
    ex = executor("naive")
    drive(ex, 40, [9, 3])
    assert ex.delay.predict() == 3


def test_a_slow_policy_is_asked_earlier():
    log = drive(executor("naive", execute=12), 100, [7])  # asking after s = 12 > H - d = 9 steps would starve
    assert [d.state for _, _, d in log] == [State.HOLD] * 7 + [State.RUN] * 93


def test_noise_seeds_repeat_with_the_epoch_seed_alone():
    def seeds(ex, k, seed):
        ex.reset(k, seed=seed)
        return ex.plan(k).seed

    a, b = executor(), executor()
    first = seeds(a, 0, 5)
    assert seeds(a, 30, 6) != first
    assert seeds(a, 70, 5) == seeds(b, 0, 5) == first


@pytest.mark.parametrize(
    ("config", "words"),
    [({"mode": "magic"}, "mode 'magic'"), ({"merge": "mix"}, "rule 'mix'"), ({"execute": 17}, r"outside \[1, 16\]")],
)
def test_bad_configuration_names_the_value(config, words):
    with pytest.raises(UserError, match=words):
        executor(**config)


@pytest.mark.parametrize("mode", ["sync", "naive"])
@pytest.mark.parametrize(("execute", "asked_at"), [(None, [0, 3, 10, 18, 21]), (5, [0, 5, 10, 15, 20])])
def test_a_chunk_says_how_much_of_it_is_executed(mode, execute, asked_at):
    """Where the configuration says nothing; 0 is the policy's own number of steps, half a chunk here."""
    ex, wanted, asked = executor(mode, execute=execute), iter([3, 7, 0, 3, 9]), []
    ex.reset(0)
    for k in range(24):
        if (request := ex.plan(k)) is not None:
            asked.append(k)
            assert ex.deliver(answer(request, execute=next(wanted)), k).accepted
        assert ex.dispatch(k).action[0] == k
    assert asked == asked_at


@pytest.mark.parametrize("execute", [-1, HORIZON + 1])
def test_a_chunk_cannot_want_more_executed_than_it_has(execute):
    ex = executor()
    ex.reset(0)
    assert ex.deliver(answer(ex.plan(0), execute=execute), 0).reason == "execute"
