"""The evaluation runs the robot's timeline; its outcome depends on seeds, not on batching or processes."""

import eval_fakes
import numpy as np
import pytest

from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import run
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.plan import Decision, Plan, Start
from vla_stack.rollout.records import IDLE
from vla_stack.runtime.executor import ExecutorConfig

LINE = "eval_fakes:Line-v0"


def same(a, b):
    assert a.episodes == b.episodes
    for x, y in zip(a.episodes, b.episodes, strict=True):
        np.testing.assert_array_equal(x.actions, y.actions)
        np.testing.assert_array_equal(x.chunks, y.chunks)


def test_a_good_policy_succeeds_and_the_record_says_how():
    result = evaluate(eval_fakes.Obedient(), LINE, episodes=12, seed=5)
    assert [e.seed for e in result.episodes] == list(range(5, 17))
    assert result.success_rate == 1.0 and result.stages == ("started", "half way", "there")
    assert {e.task for e in result.episodes} == {"go left", "go right"}
    for e in result.episodes:
        assert e.instruction == e.task and e.stage == 3 and e.idle_ticks == 0 and e.instructed_success
        assert e.actions.shape == (e.steps, 2) and e.chunks.shape == (e.steps,)


@pytest.mark.parametrize(("mode", "latency"), [("sync", 0), ("naive", 0), ("naive", 3), ("sync", 3)])
def test_outcomes_do_not_depend_on_the_number_of_environments(mode, latency):
    run = [
        evaluate(
            eval_fakes.Obedient(),
            LINE,
            episodes=7,
            executor=ExecutorConfig(mode, 4),
            latency=Latency(latency / 10),
            num_envs=n,
        )
        for n in (1, 4)
    ]
    same(*run)


@pytest.mark.slow
def test_outcomes_do_not_depend_on_processes():
    here = evaluate(eval_fakes.Obedient(), LINE, episodes=9, num_envs=4, latency=Latency(0.2))
    there = evaluate(eval_fakes.Obedient(), LINE, episodes=9, num_envs=4, latency=Latency(0.2), workers=2)
    same(here, there)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_policy_decides_how_much_of_each_chunk_is_executed(workers):
    result = evaluate(eval_fakes.Undecided(), LINE, episodes=6, seed=5, num_envs=4, workers=workers)
    for e in result.episodes:
        _, ticks = np.unique(e.chunks, return_counts=True)
        assert e.steps > 4 and set(ticks[:-1]) == {1 if e.instruction == "go left" else 3}
    assert len({e.instruction for e in result.episodes}) == 2


def test_queries_of_all_environments_share_a_batch():
    policy = eval_fakes.Obedient()
    evaluate(policy, LINE, episodes=16, num_envs=8)
    assert policy.batches[0] == 8 and np.mean(policy.batches) > 6


@pytest.mark.parametrize("mode", ["sync", "naive"])
@pytest.mark.parametrize("latency", [0, 1, 2, 5])
def test_what_is_sent_at_a_tick_was_meant_for_that_tick(mode, latency):
    result = evaluate(
        eval_fakes.TickLabel(),
        "eval_fakes:Counter-v0",
        episodes=2,
        executor=ExecutorConfig(mode, 4, timeout_s=9.0),
        latency=Latency(latency / 10),
    )
    for e in result.episodes:
        ran = np.flatnonzero(e.chunks != IDLE)
        ticks = e.actions[ran, 0]
        assert len(ran) > 10
        late = ran - ticks
        if mode == "sync":  # time stands still while the robot waits: a reply is shifted by exactly the latency
            assert (late == latency).all()
        else:  # the first chunk hurries to where it is due
            assert late[0] == max(0, latency - 1) and (np.diff(late) <= 0).all() and not late[2 * latency :].any()


class Interrupted(PolicyAgent):
    """Somebody else stands at -1 for steps 5 to 9."""

    def act(self, k, observation, now):
        if 5 <= k < 10:
            return Decision(np.array([-1.0, 1.0], np.float32))
        if k == 10:
            self.resume(k, np.array([-1.0, 1.0], np.float32))
        return (yield from super().act(k, observation, now))


@pytest.mark.parametrize("latency", [0, 3])
def test_a_policy_that_goes_on_after_somebody_else_executes_nothing_older(latency):
    how, late = ExecutorConfig("naive", 4, timeout_s=9.0), Latency(latency / 10)
    policy = eval_fakes.TickLabel()
    plan = Plan("eval_fakes:Counter-v0", {}, policy.spec, Interrupted, executor=how, latency=late)
    (record,) = run(policy, plan, [Start(3)])
    ticks, ran = record.actions[:, 0], record.chunks != IDLE
    assert (ticks[5 : 10 + latency] == -1.0).all() and not ran[5 : 10 + latency].any()
    after = np.arange(10 + latency, record.steps)
    waited = after - ticks[after]  # for the first chunk after that, whose actions all come later by it
    assert waited[0] == max(0, latency - 1) and waited[-1] == 0 and (np.diff(waited) <= 0).all()
    assert ran[after].all() and min(record.chunks[after]) > max(record.chunks[:5])


@pytest.mark.parametrize(("latency", "first"), [(0, 0), (3, 3)])
def test_before_the_first_chunk_the_robot_stands_still(latency, first):
    result = evaluate(eval_fakes.Obedient(), LINE, episodes=3, latency=Latency(latency / 10))
    for e in result.episodes:
        assert (e.chunks[:first] == IDLE).all() and e.chunks[first] != IDLE
        assert len(np.unique(e.actions[:first, 0])) == min(first, 1)
        assert e.idle_ticks == first


def test_sync_pays_its_latency_in_idle_ticks():
    idle = [
        evaluate(
            eval_fakes.Obedient(), LINE, episodes=4, executor=ExecutorConfig("sync", 4), latency=Latency(d / 10)
        ).idle_fraction
        for d in (0, 2)
    ]
    assert idle[0] == 0 and idle[1] == pytest.approx(1 / 3, abs=0.1)


def test_the_wrong_instruction_leads_away_from_the_target():
    right = evaluate(eval_fakes.Obedient(), LINE, episodes=10)
    wrong = evaluate(eval_fakes.Obedient(), LINE, episodes=10, instruct="swap")
    assert right.success_rate == 1.0 and wrong.success_rate == 0.0
    for a, b in zip(right.episodes, wrong.episodes, strict=True):
        assert a.task == b.task and b.instruction not in ("", b.task)
        assert b.instructed_success
    assert "wrong instruction" in wrong.label


def test_an_unknown_environment_lists_what_there_is():
    with pytest.raises(UserError, match="no environment 'sim/pikc-v0'.*sim/pick-v0"):
        evaluate(eval_fakes.Obedient(), "sim/pikc-v0", episodes=1)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v1", "has actions of type Discrete, not a vector of numbers"),
        ("eval_fakes:Silent-v0", "does not report 'is_success'"),
        ("no_such_module:X-v0", "no_such_module"),
    ],
)
def test_an_environment_of_another_kind_is_refused(env_id, message):
    with pytest.raises(UserError, match=message):
        evaluate(eval_fakes.Obedient(), env_id, episodes=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate_hz": 20.0}, "runs at 10 Hz, the policy was trained at 20 Hz"),
        ({"action": eval_fakes.ROBOT.action[:1]}, "has action .* the policy was trained on"),
        ({"cameras": (eval_fakes.Camera("wrist", 16, 16),)}, "needs camera 'wrist'"),
        ({"cameras": (eval_fakes.Camera("front", 32, 32),)}, "is 16x16, the policy was trained at 32x32"),
        ({"action_kind": "delta"}, "takes absolute actions"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_in_one_line(change, message):
    from dataclasses import replace

    policy = eval_fakes.Obedient()
    policy.spec = replace(policy.spec, robot=replace(eval_fakes.ROBOT, **change))
    with pytest.raises(UserError, match=message) as error:
        evaluate(policy, LINE, episodes=1)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_worker_that_fails_reports_its_own_traceback():
    with pytest.raises(RuntimeError, match="the gearbox fell off"):
        evaluate(eval_fakes.Obedient(), "eval_fakes:Crash-v0", episodes=2, workers=1)
