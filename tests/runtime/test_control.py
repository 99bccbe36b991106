"""The control loop under the virtual clock, against a robot and a server made of numbers."""

from dataclasses import replace

import numpy as np
import pytest
from runtime_fakes import DT_NS, FakeDriver, FakePort, label_chunk, make_envelope, make_executor, robot_spec

from vla_stack.errors import UserError
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.dispatch import Help
from vla_stack.runtime.executor import Executor, ExecutorConfig
from vla_stack.runtime.limits import make_envelope as safe
from vla_stack.runtime.link_port import chunk_fields, read_chunk
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import PolicySpec


def rig(latency_ns=DT_NS // 2, orders=(), driver=None, safety=None, answer=label_chunk, **config):
    clock = VirtualClock(start_ns=7)
    driver = FakeDriver(clock, **(driver or {}))
    port = FakePort(clock, latency_ns, orders, answer)
    loop = ControlLoop(driver, make_executor(**config), make_envelope(**(safety or {})), clock, port)
    return loop, driver, port


@pytest.mark.parametrize("mode", ["sync", "naive"])
@pytest.mark.parametrize("steps", [1, 3])
def test_commands_are_their_ticks_and_latency_costs_only_what_it_must(mode, steps):
    loop, driver, _ = rig(latency_ns=steps * DT_NS - 1, mode=mode)
    log = loop.run(seed=3, max_ticks=64)
    sent = np.array(driver.sent)[:, 0]
    run = np.array(log.rids) >= 0
    if mode == "naive":
        late = np.arange(64)[run] - sent[run]  # the first chunk hurries to where it is due
        assert late[0] == steps - 1 and (np.diff(late) <= 0).all() and not late[2 * steps :].any()
        assert log.to_message()["idle_ticks"] == steps
    else:
        starts = np.arange(0, 64, 8 + steps)  # a sync plan is laid down where the reply arrived
        expected = np.concatenate([np.arange(s, s + 8) for s in starts])
        np.testing.assert_array_equal(sent[run], expected[: run.sum()])
        assert log.to_message()["idle_ticks"] == steps * len(starts)
    assert set(log.delays) == {steps}
    assert log.overruns == 0


def test_in_sync_a_reply_within_half_a_step_costs_none():
    loop, driver, port = rig(latency_ns=DT_NS // 2 - 10 * DT_NS // 100, mode="sync")
    log = loop.run(seed=3, max_ticks=64)
    assert log.to_message()["idle_ticks"] == 0 and set(log.delays) == {0} and log.overruns == 0
    np.testing.assert_array_equal(np.array(driver.sent)[:, 0], np.arange(64))
    assert [request.k_obs for request in port.requests] == list(range(0, 64, 8))
    loop, driver, port = rig(latency_ns=DT_NS // 2 + DT_NS // 100, mode="sync")
    assert loop.run(seed=3, max_ticks=64).to_message()["idle_ticks"] == 8  # it holds, as ever
    assert [row.step for row in port.rows] == [k for k in range(64) if k % 9]  # which is not recorded


def test_an_abort_ends_the_wait_for_a_reply():
    loop, driver, _ = rig(latency_ns=10 * DT_NS, orders=[(4, "abort")], mode="sync")
    log = loop.run(seed=3, max_ticks=64)
    assert len(log.rids) == 3 and not np.array(driver.sent).any()


def test_a_stall_skips_ticks_and_is_never_made_up_for():
    loop, driver, _ = rig(driver={"busy_ns": {20: 4 * DT_NS + 5}})
    log = loop.run(seed=0, max_ticks=40)
    sent = np.array(driver.sent)[:, 0]
    assert log.overruns == 3
    assert list(sent[18:23]) == [18, 19, 20, 24, 25]
    assert log.to_message()["steps"] == 40
    assert len(log.rids) == 37


def test_a_tick_that_is_a_little_late_is_run_late():
    loop, driver, _ = rig(driver={"busy_ns": {20: DT_NS + 5}})
    log = loop.run(seed=0, max_ticks=30)
    assert log.overruns == 0
    assert max(log.late_ns) == pytest.approx(5, abs=2_100_000)
    assert [int(x) for x in np.array(driver.sent)[19:23, 0]] == [19, 20, 21, 22]


def test_server_loss_holds_then_stops_then_goes_on():
    loop, driver, port = rig(orders=[(60, "rearm")])
    port.alive = lambda tick: not 20 <= tick < 55
    log = loop.run(seed=0, max_ticks=80)
    states = [s for _, s in port.states]
    assert states == ["run", "hold", "stop", "hold", "run"]
    held, stopped, again = (k for k, s in port.states if s in ("hold", "stop"))
    assert stopped - held == 5  # 0.5 s
    assert driver.calls["stop"] == 1
    assert port.states[-1][0] - again <= 1
    sent = np.array(log.actions)[:, 0]
    assert (sent[held:again] == sent[held - 1]).all()
    assert sent[-1] == 79
    assert log.states["run"] + log.states["hold"] + log.states["stop"] == 80


def test_a_computer_that_was_suspended_stops_the_robot():
    loop, driver, port = rig(orders=[(60, "rearm")], driver={"busy_ns": {}})
    read = driver.read

    def woken():
        if driver.calls["reads"] == 20:
            driver.clock.suspended = 3_600 * 10**9  # monotonic time has stood still
        return read()

    driver.read = woken
    log = loop.run(seed=0, max_ticks=80)
    assert [s for _, s in port.states] == ["run", "stop", "hold", "run"] and driver.calls["stop"] == 1
    assert port.states[1][0] == 20 and log.safety["suspended"] == 1
    loop.run(seed=1, max_ticks=20)
    assert port.states[-1][1] == "run"  # another episode is another start


def test_a_call_for_help_holds_without_a_stop_until_somebody_lets_it_go_on():
    loop, driver, port = rig(orders=[(20, Help("look here")), (40, Help("again")), (120, "rearm")])
    log = loop.run(seed=0, max_ticks=140)
    assert [s for _, s in port.states] == ["run", "hold", "run"] and driver.calls["stop"] == 0
    held, again = (k for k, s in port.states[1:])
    assert held == 20 and again - 120 <= 1  # ten seconds: help is waited for, not given up
    sent = np.array(log.actions)[:, 0]
    assert (sent[held:again] == sent[held - 1]).all() and sent[-1] == 139
    assert not [r for r in port.requests if held <= r.k_obs < 120]
    assert not {row.step for row in port.rows} & set(range(held, 120))  # a hold is not recorded
    assert {r.epoch for r in port.requests if r.k_obs < held} != {r.epoch for r in port.requests if r.k_obs >= 120}


def test_a_stopped_robot_asks_nothing_until_it_is_rearmed():
    loop, _, port = rig()
    port.alive = lambda tick: tick < 8
    loop.run(seed=0, max_ticks=100)
    stopped = next(k for k, s in port.states if s == "stop")
    assert max(r.origin for r in port.requests) <= stopped


def test_renewed_session_asks_again_at_once():
    loop, _, port = rig(orders=[(4, "renew")])
    port.alive = lambda tick: tick >= 4
    loop.run(seed=0, max_ticks=8)
    assert [r.origin for r in port.requests] == [0, 4]


def test_chunks_of_nan_hold_and_stay_out():
    def broken(request):
        chunk = label_chunk(request)
        chunk.actions[:] = np.nan
        return chunk

    loop, driver, port = rig(answer=broken)
    log = loop.run(seed=0, max_ticks=30)
    assert log.executor["rejected.not finite"] > 0
    assert np.isfinite(driver.sent).all() and not np.any(driver.sent)


def test_frozen_sensor_holds_then_stops():
    loop, driver, port = rig()
    driver.write = lambda a, write=driver.write: (write(a), _freeze(driver, at=15))[0]
    log = loop.run(seed=0, max_ticks=60)
    assert [s for _, s in port.states] == ["run", "hold", "stop"]
    assert log.safety["stale"] == 5


def _freeze(driver, at):
    if len(driver.sent) == at:
        driver.frozen_ns = driver.clock.now_ns()


def test_abort_ends_the_episode_and_holds():
    loop, driver, _ = rig(orders=[(12, "abort")])
    log = loop.run(seed=0)
    assert len(log.rids) == 12
    assert driver.calls["hold"] == 1


def test_the_driver_ends_the_episode_and_the_next_begins_afresh():
    loop, driver, port = rig(driver={"episode_ticks": 21})
    logs = [loop.run(seed) for seed in (4, 5)]
    for log, seed in zip(logs, (4, 5), strict=True):
        message = log.to_message()
        assert (message["steps"], message["success"], message["stage"]) == (20, True, 1)
        assert message["instruction"] == f"episode {seed}"
        assert message["executor"]["accepted"] == log.to_message()["executor"]["requests"]
    assert {r.epoch for r in port.requests} == {1, 2}
    np.testing.assert_array_equal(logs[0].actions, logs[1].actions)


def test_wall_clock_plays_no_part(monkeypatch):
    import time

    plain = rig()[0].run(seed=0, max_ticks=30).actions
    wall = iter(np.random.default_rng(0).uniform(-1e9, 1e9, 10**6))
    monkeypatch.setattr(time, "time", lambda: next(wall))
    np.testing.assert_array_equal(rig()[0].run(seed=0, max_ticks=30).actions, plain)


def test_chunk_survives_the_pipe():
    from vla_stack.runtime.executor import Request

    chunk = replace(label_chunk(Request(3, 2, 9, 9, 1, 20)), execute=5)
    back = read_chunk({"kind": "chunk", **chunk_fields(chunk)})
    np.testing.assert_array_equal(back.actions, chunk.actions)
    assert (back.origin, back.k_obs, back.rid, back.epoch, back.execute) == (9, 9, 3, 2, 5)


def test_commands_between_two_actions_lie_on_the_way_to_the_next_one_and_the_gripper_waits():
    loop, driver, _ = rig(interpolate=4)
    log = loop.run(seed=0, max_ticks=20)
    sent = np.array(driver.sent).reshape(20, 4, 2)
    last = 4 * log.to_message()["idle_ticks"]
    ticks = np.arange(20)[:, None] + np.arange(4) / 4
    np.testing.assert_allclose(sent.reshape(-1, 2)[last:, 0], ticks.reshape(-1)[last:], atol=1e-6)
    np.testing.assert_array_equal(sent[1:, :, 1], sent[1:, :1, 1].repeat(4, axis=1))
    np.testing.assert_array_equal(sent[2:, 0, 1], np.arange(2, 20))


def test_interpolated_commands_come_at_equal_distances_and_none_in_a_burst():
    loop, driver, port = rig(interpolate=4, driver={"busy_ns": {10: round(0.6 * DT_NS)}})
    times, write = [], driver.write
    driver.write = lambda action: times.append(driver.clock.now_ns()) or write(action)
    log = loop.run(seed=0, max_ticks=20)
    steps = np.diff(np.array(times)) / DT_NS
    assert len(times) == 20 * 4 - 2  # after a reading of 0.6 of a step, two of its four commands are too late
    assert steps.min() > 0.1
    assert np.median(steps) == pytest.approx(0.25, abs=0.001)
    assert log.overruns == 0


def test_limits_and_refusals_are_those_of_seconds_however_many_commands_there_are():
    spec = replace(robot_spec(), action=(replace(robot_spec().action[0], max_rate=5.0), robot_spec().action[1]))
    envelope = safe(spec, SafetyConfig(max_refusals=3), commands=4)
    envelope.reset(np.zeros(2))
    assert envelope.filter(np.array([9.0, 0.0])).command[0] == pytest.approx(5.0 / 10.0 / 4, rel=1e-6)
    nonsense = np.array([np.nan, 0.0])
    assert [envelope.filter(nonsense).state.value for _ in range(12)] == ["hold"] * 11 + ["stop"]


def test_a_reading_that_grows_old_within_a_step_holds_the_robot_within_it():
    loop, driver, port = rig(interpolate=4, safety={"max_sensor_age_s": 0.55})
    read = driver.read

    def freeze():
        obs = read()
        if driver.calls["reads"] == 8 and driver.frozen_ns is None:
            driver.frozen_ns = obs.t_capture_ns
        return obs

    driver.read = freeze
    loop.run(seed=0, max_ticks=20)
    sent = np.array(driver.sent)[:, 0]
    frozen = np.flatnonzero(np.diff(sent[8:]) == 0)[0] + 8
    assert sent[frozen] == pytest.approx(7 + 5.25, abs=0.26)
    assert (sent[frozen:] == sent[frozen]).all()
    assert driver.calls["stop"] == 1


@pytest.mark.parametrize(("config", "word"), [({"interpolate": 0}, "interpolate=0"), ({"interpolate": 2}, "absolute")])
def test_interpolation_is_refused_where_it_means_nothing(config, word):
    robot = robot_spec(action_kind="delta" if word == "absolute" else "absolute")
    with pytest.raises(UserError, match=word):
        Executor(robot, PolicySpec(robot, 16), ExecutorConfig(**config))


def test_a_servo_jerks_less_between_interpolated_commands():
    def swing(request):
        chunk = label_chunk(request)
        return replace(chunk, actions=np.sin(0.5 * chunk.actions).astype(np.float32))

    def acceleration(commands: int) -> float:
        loop, driver, _ = rig(answer=swing, interpolate=commands)
        sent, write = [], driver.write
        driver.write = lambda action: sent.append((driver.clock.now_ns(), action[0])) or write(action)
        loop.run(seed=0, max_ticks=60)
        times, goals = np.array(sent).T
        start = np.searchsorted(times, times[0] + 1e9)
        x, v, total, frequency, dt = goals[start], 0.0, [], 25.0, 1e-3  # a critically damped servo
        for t in np.arange(times[start], times[-1], dt * 1e9):
            a = frequency**2 * (goals[np.searchsorted(times, t, "right") - 1] - x) - 2 * frequency * v
            x, v = x + dt * v, v + dt * a
            total.append(a)
        return float(np.sqrt(np.mean(np.square(total))))

    assert acceleration(4) < 0.6 * acceleration(1)


class GuardedDriver(FakeDriver):
    """Counts the beats that it hears since its last reading."""

    def __init__(self, clock):
        super().__init__(clock)
        self.beats, self.heard = 0, []

    def beat(self):
        self.beats += 1

    def read(self):
        self.heard.append(self.beats)
        self.beats = 0
        return super().read()


def test_a_guarded_driver_hears_the_loop_in_every_wait():
    clock = VirtualClock()
    driver = GuardedDriver(clock)
    loop = ControlLoop(driver, make_executor(interpolate=2), make_envelope(), clock, FakePort(clock))
    loop.run(seed=0, max_ticks=5)
    assert len(driver.heard) == 5 and min(driver.heard[1:]) >= 1
