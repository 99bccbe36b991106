"""The control loop's log of what it dispatched, under every accident of network and clock that it cannot see."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import DT_NS, HORIZON, FakeDriver, FakePort, make_envelope, make_executor

from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.control import ControlLoop

MODES = st.sampled_from(["sync", "naive", "ensemble", "future_state"])
DELAYS = st.lists(st.one_of(st.none(), st.integers(0, 25)), min_size=1, max_size=8)  # half ticks; None: lost


class Network(FakePort):
    """A policy whose n-th reply takes ``delays[n]`` half ticks or is lost; old replies come again in any order."""

    def __init__(self, clock, delays, copies=(), orders=(), seed=0):
        super().__init__(clock, orders=orders)
        self._delays = itertools.cycle(delays)
        self._copies, self._rng = itertools.cycle(copies or (0,)), np.random.default_rng(seed)
        self._past = []

    def offer(self, obs, request):
        delay = next(self._delays) if request else None
        self.alive = lambda tick: delay is not None
        self.latency_ns = (delay or 0) * DT_NS // 2
        super().offer(obs, request)

    def receive(self, timeout_s=0.0):
        items = super().receive(timeout_s)
        fresh = [item for item in items if not isinstance(item, str)]
        orders = [item for item in items if isinstance(item, str)]
        again = [self._past[self._rng.integers(len(self._past))] for _ in range(next(self._copies)) if self._past]
        self._past += fresh
        mixed = fresh + again + fresh * bool(again)
        return [mixed[i] for i in self._rng.permutation(len(mixed))] + orders


def drive(mode, delays, *, copies=(), stalls=None, orders=(), episodes=2, ticks=45, **config):
    """Episodes in a row on one executor; each dispatch as (epoch, tick, action, state, request id, age in ticks)."""
    clock = VirtualClock()
    driver = FakeDriver(clock, busy_ns=stalls)
    executor, log = make_executor(mode=mode, **config), []
    dispatch = executor.dispatch

    def noted(k):
        d = dispatch(k)
        action = None if d.action is None else tuple(d.action)
        log.append((executor.epoch, k, action, d.state.value, d.chunk_rid, k - d.k_obs if d.k_obs >= 0 else 0))
        return d

    executor.dispatch = noted
    port = Network(clock, delays, copies, orders)
    loop = ControlLoop(driver, executor, make_envelope(), clock, port)
    sent = [loop.run(seed, max_ticks=ticks).actions for seed in range(episodes)]
    return log, np.concatenate(sent), executor, port


@settings(max_examples=40, deadline=None)
@given(
    MODES,
    DELAYS,
    st.lists(st.integers(0, 3), max_size=4),
    st.dictionaries(st.integers(1, 40), st.integers(0, 6 * DT_NS), max_size=3),
    st.lists(st.integers(1, 40), max_size=3),
    st.integers(2, HORIZON),
)
def test_ticks_strictly_increase_and_nothing_is_old(mode, delays, copies, stalls, rearms, max_age):
    orders = [(tick, "rearm") for tick in sorted(rearms)]
    log, _, executor, port = drive(
        mode, delays, copies=copies, stalls=stalls, orders=orders, episodes=3, max_age_s=max_age / 10
    )
    assert {epoch for epoch, *_ in log} == {1, 2, 3}
    for before, after in itertools.pairwise(log):
        assert after[:2] > before[:2]  # no (epoch, tick) twice, none backwards
    epoch_of = {request.rid: request.epoch for request in port.requests}
    for epoch, _, action, state, rid, age in log:
        if state == "run":
            assert action is not None and epoch_of[rid] == epoch and age <= max_age == executor.max_age
        else:
            assert rid == -1


@settings(max_examples=40, deadline=None)
@given(MODES, DELAYS, st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_duplicated_and_reordered_replies_change_nothing(mode, delays, copies):
    plain, sent, *_ = drive(mode, delays)
    mixed, sent_mixed, *_ = drive(mode, delays, copies=copies)
    assert mixed == plain
    np.testing.assert_array_equal(sent_mixed, sent)


@pytest.mark.parametrize("mode", ["sync", "naive", "ensemble", "future_state"])
def test_a_jumping_wall_clock_changes_nothing(mode, monkeypatch):
    plain, sent, *_ = drive(mode, [1, 3, None, 5])
    wall = itertools.cycle((1e9 - 3600, 1e9 + 3600))
    for name, scale in (("time", 1), ("time_ns", 10**9)):
        monkeypatch.setattr(time, name, lambda scale=scale: next(wall) * scale)
    jumped, sent_jumped, *_ = drive(mode, [1, 3, None, 5])
    assert jumped == plain
    np.testing.assert_array_equal(sent_jumped, sent)


def test_nothing_between_policy_and_motor_reads_the_time_of_day():
    parts = {
        "runtime": "clock control control_process executor link link_port merging node safety timeline".split(),
        "serving": "client connection dialer listener messages ownership rates reception server sessions wire".split(),
    }
    root = Path(__file__).resolve().parents[2] / "vla_stack"
    reads = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\b|\bdatetime\b|CLOCK_REALTIME")
    for room, names in parts.items():
        for name in names:
            assert not reads.search((root / room / f"{name}.py").read_text()), name
