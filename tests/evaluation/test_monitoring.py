"""A monitor on made-up policies: what it scores, what it promises, what its file takes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from runtime_fakes import robot_spec

from vla_stack.errors import UserError
from vla_stack.evaluation.monitoring import Listening, Watched, alarm_step, fit, judged
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.monitor import LATE, SCORES, Decided, Monitor, Watch
from vla_stack.schema import ActionChunk, Chunks, Observation, PolicySpec

H, DT, GOAL = 8, 0.1, 20


def episode(rng, stuck=0, noise=0.02, features=True, steps=60) -> Watched:
    """A robot that walks to GOAL in about 20 steps, or stands from step ``stuck`` on until time is up."""
    speed, decisions, x = 1 + 0.1 * rng.normal(), [], 0.0
    for k in range(0, steps, 4):
        pace = 0.0 if stuck and k >= stuck else speed
        plan = x + pace * np.arange(1, H + 1) + noise * rng.normal(size=H)
        state = np.array([x, 0.5], np.float32)
        actions = np.stack([plan, 0.1 * rng.normal(size=H)], 1).astype(np.float32)
        seen = rng.normal(size=6).astype(np.float32) if features else None
        decisions.append(Decided(k, state, actions, k, seen, used=k))
        x += 4 * pace
        if x >= GOAL:
            return Watched(decisions, k + 4, True)
    return Watched(decisions, steps, False)


def many(n, seed, **how) -> list[Watched]:
    rng = np.random.default_rng(seed)
    return [episode(rng, **how) for _ in range(n)]


@pytest.fixture(scope="module")
def monitor() -> Monitor:
    return fit(many(200, 0), DT, 0.1, "weights")


def test_false_alarms_are_as_rare_as_promised_whatever_the_scores_are():
    """Over fits as well as episodes, which is what the promise is over."""
    alarms = [
        alarm_step(fitted, e.decisions) is not None
        for seed in range(8)
        for fitted in [fit(many(60, seed), DT, 0.2)]
        for e in many(60, 1000 + seed)
    ]
    assert 0.12 < np.mean(alarms) < 0.28  # 480 episodes, 8 thresholds of 30 each: three standard deviations


def test_a_robot_that_stands_still_and_one_that_dithers_are_called_early(monitor):
    for how in ({"stuck": 8}, {"stuck": 8, "noise": 5.0}):
        for e in many(20, 5, **how):
            at = alarm_step(monitor, e.decisions)
            assert not e.success and at is not None and (e.steps - at) * DT >= 1.0


def test_without_features_the_other_scores_have_a_threshold_of_their_own(monitor):
    bare = fit(many(200, 0, features=False), DT, 0.1, "weights")
    assert len(monitor.centre) == len(SCORES) and len(bare.centre) == len(SCORES) - 1
    assert (bare.thresholds[0] == bare.thresholds[1]).all()
    assert (monitor.thresholds[0] <= monitor.thresholds[1][: len(monitor.thresholds[0])]).all()
    stuck = many(20, 5, stuck=8, features=False)
    assert all(alarm_step(monitor, e.decisions) is not None for e in stuck)


def test_an_alarm_is_given_once_until_all_is_well_again(monitor):
    watch = Watch(monitor)
    good, bad = (many(1, 7, stuck=stuck)[0].decisions for stuck in (0, 4))
    said = [watch.decided(d) for d in bad]
    assert sum(map(bool, said)) == 1 and any("times its limit" in text for text in said)
    watch.begin()
    assert not any(watch.decided(d) for d in good[:3])


def test_time_alone_calls_where_an_episode_lasts_longer_than_successes_do(monitor):
    def excess(step):
        return monitor.excess(np.array([0.0, 0.0, 0.0, step * DT]), step)[LATE] / monitor.thresholds[0][LATE]

    assert excess(20) < 1 < excess(60)
    watch = Watch(monitor)
    once = many(1, 9)[0].decisions[:-1]
    assert not any(watch.decided(d) for d in once)
    watch.resume(400)  # after somebody else has acted
    assert not any(watch.decided(replace(d, step=d.step + 400)) for d in once)


def test_time_begins_anew_with_the_first_chunk_of_another_epoch(monitor):
    watch = Watch(monitor)
    for epoch, begun in ((3, 0), (4, 200)):
        for d in many(1, 9, features=False)[0].decisions[:3]:
            watch.observation(Observation(d.state, {}, "task", begun + d.step))
            assert not watch.chunk(ActionChunk(d.actions, begun + d.origin, begun + d.step, epoch=epoch))


def test_a_robot_asks_about_its_chunks_by_the_observations_that_they_answer(monitor):
    watch = Watch(monitor)
    for d in many(1, 5, stuck=8, features=False)[0].decisions:
        watch.observation(Observation(d.state, {}, "task", d.step))
        last = watch.chunk(ActionChunk(d.actions, d.origin, d.step)) or (watch.excess > 1)
    assert last and watch.chunk(ActionChunk(d.actions, d.origin, 10**6)) == ""  # answers nothing that it has seen


def test_the_file_says_the_same_and_nothing_else_is_taken(monitor, tmp_path):
    path = tmp_path / "monitor.json"
    monitor.save(path)
    again = Monitor.load(path)
    tested = many(20, 5, stuck=30) + many(20, 6)
    assert [alarm_step(again, e.decisions) for e in tested] == [alarm_step(monitor, e.decisions) for e in tested]
    text = json.loads(path.read_text())
    for key, odd in (("format", "x"), ("width", [[0.0]]), ("left_s", [1.0]), ("thresholds", [1]), ("dt", float("nan"))):
        path.write_text(json.dumps(text | {key: odd}))
        with pytest.raises(UserError, match="not a monitor"):
            Monitor.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        Monitor.load(tmp_path / "none.json")


def test_it_watches_the_policy_and_the_robot_that_it_was_fitted_to(monitor):
    monitor.check("weights", robot_spec())
    with pytest.raises(UserError, match="fitted to policy weights, not to others"):
        monitor.check("others", robot_spec())


def test_too_few_successes_are_refused_with_how_many_it_takes():
    with pytest.raises(UserError, match="it takes 19"):
        fit(many(18, 0), DT, 0.05)
    fit(many(19, 0), DT, 0.05)


def test_decisions_are_found_by_the_noise_of_the_executed_chunks():
    class Policy:
        spec = PolicySpec(robot_spec(), H)

        def infer(self, observations, seeds, continuations=()):
            return Chunks(np.stack([np.full((H, 2), seed, np.float32) for seed in seeds]))

    listening = Listening(Policy())
    listening.infer([Observation(np.zeros(2, np.float32), {}, "", k) for k in (0, 4, 8)], [11, 22, 33])
    noise = np.array([0, 11, 11, 33, 33, 33])
    record = EpisodeRecord(0, "", "", True, 6, chunks=np.array([-1, 1, 1, 3, 3, 3]), noise=noise)
    found = listening.taken(record)  # the second chunk came too late: nothing of it was executed
    assert [(d.step, d.used, d.actions[0, 0]) for d in found] == [(0, 1, 11.0), (8, 3, 33.0)]
    assert listening.taken(record) == []


def test_calls_are_judged_by_whether_they_leave_a_second():
    def record(success, alarm):
        return EpisodeRecord(0, "", "", success, 40, alarm_step=alarm)

    found = judged([record(True, None), record(True, 3), record(False, 30), record(False, 31), record(False, None)], DT)
    assert (found.false.value, found.false.n) == (0.5, 2)
    assert (found.early.value, found.early.n) == (pytest.approx(1 / 3), 3)
