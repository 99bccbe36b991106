"""The off-policy loop: bit-exact when stopped and resumed, the same on one Ray actor, alive when one is killed."""

import json
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import yaml

from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.expo import Expo
from vla_stack.methods.off_policy import learner as learners
from vla_stack.methods.off_policy import loop as off_policy
from vla_stack.methods.off_policy.deployed import deployed, normalised
from vla_stack.methods.off_policy.human_intervention import HumanIntervention
from vla_stack.methods.off_policy.loop import OffPolicyLoop, make_worker
from vla_stack.methods.off_policy.workers import LocalRollouts, Worker
from vla_stack.methods.replay_buffer import Source, Transition
from vla_stack.methods.wsrl import Wsrl
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.ray_cluster import connect
from vla_stack.rollout.plan import Decision
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import OBS_STATE, Observation
from vla_stack.training.recipe import Recipe, make
from vla_stack.training.recipe_tree import with_overrides
from vla_stack.training.stop import Stop

PICK = {"id": "sim/pick-v0", "options": {"max_episode_steps": 8}}
TINY = {"offline": {"episodes": 3, "noise": [0.3]}, "horizon": 2, "steps": 24}
SAC = {"actor": [8], "critic": [8], "num_critics": 2, "batch": 8, "utd": 2, "layer_norm": True}
WSRL = {"name": "wsrl", "sac": SAC, "offline_steps": 2, "warmup": 6, "cal_ql": {"draws": 2}}
EXPO = {"name": "expo", "sac": SAC, "base": [8], "base_steps": 2, "samples": 2, "edits": 1}


def recipe(task=PICK, every=12, **method) -> Recipe:
    evaluations = {"every": every, "episodes": 2, "num_envs": 2}
    return make({"task": task, "method": TINY | method, "eval": evaluations, "device": "cpu"}, "test")


def final(loop: OffPolicyLoop) -> torch.Tensor:
    return torch.cat([p.flatten() for p in learners.weights(loop.learner.modules).values()])


def finished(run_dir: Path, **changes) -> OffPolicyLoop:
    loop = OffPolicyLoop(recipe(**changes), run_dir)
    loop.run()
    return loop


@pytest.mark.parametrize("method", [WSRL, EXPO], ids=["wsrl", "expo"])
def test_a_stopped_run_continues_bit_for_bit(tmp_path, method):
    whole = finished(tmp_path / "whole", **method)
    finished(tmp_path / "halves", **method | {"steps": 12})
    halves = OffPolicyLoop(recipe(**method), tmp_path / "halves")
    assert halves.step == 12
    halves.run()
    assert torch.equal(final(whole), final(halves))
    for name, column in whole.learner.store.columns.items():
        np.testing.assert_array_equal(column[:24], halves.learner.store.columns[name][:24])
    records = [json.loads(line) for line in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 12, 24] and all("eval/success" in r for r in records)
    assert (tmp_path / "halves" / "learning_curve.png").stat().st_size > 1000


def records(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def stopped(monkeypatch, loop: OffPolicyLoop, at: int) -> None:
    """Run it until Ctrl-C at a control step."""
    collect = LocalRollouts.collect

    def collecting(rollouts, learner, version):
        if loop.step == at:
            signal.raise_signal(signal.SIGINT)
        return collect(rollouts, learner, version)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalRollouts, "collect", collecting)
        loop.run()


@pytest.mark.parametrize("at", [5, 17])
def test_a_stop_between_evaluations_goes_on_from_the_last_one_bit_for_bit(tmp_path, monkeypatch, at):
    whole = finished(tmp_path / "whole", **WSRL)
    stopped(monkeypatch, OffPolicyLoop(recipe(**WSRL), tmp_path / "halves"), at)
    halves = OffPolicyLoop(recipe(**WSRL), tmp_path / "halves")
    assert halves.step == at // 12 * 12
    halves.run()
    assert torch.equal(final(whole), final(halves))
    for name, column in whole.learner.store.columns.items():
        np.testing.assert_array_equal(column[:24], halves.learner.store.columns[name][:24])
    assert records(tmp_path / "halves") == records(tmp_path / "whole")
    assert [r["step"] for r in records(tmp_path / "halves")] == [0, 12, 24]


def test_what_a_person_did_is_saved_at_a_stop_and_an_evaluation_parts_it(tmp_path, monkeypatch):
    class Person:
        def act(self, k, observation, now):
            return Decision(np.full(5, 0.1, np.float32), label=Source.HUMAN)
            yield

        def result(self):
            return None

    port = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(off_policy, "at_endpoint", lambda *_: (lambda episode: Person(), port))
    person = recipe(**EXPO | {"operator": "tcp://127.0.0.1:1"})
    loop = OffPolicyLoop(person, tmp_path)
    before = loop.learner.offline.total
    stopped(monkeypatch, loop, 17)
    assert [r["step"] for r in records(tmp_path)] == [0, 12]
    demos = loop.learner.offline
    ends = demos.columns["truncated"][demos.rows()[before:]]
    assert np.flatnonzero(ends).tolist() == [7, 11, 17]  # a limit, the evaluation, the stop
    again = OffPolicyLoop(person, tmp_path)
    assert again.step == 18
    for name, column in demos.columns.items():
        np.testing.assert_array_equal(column, again.learner.offline.columns[name])
    again.run()
    assert [r["step"] for r in records(tmp_path)] == [0, 12, 24]


def test_a_person_may_take_over_after_an_evaluation_too(tmp_path, monkeypatch):
    class Console:
        looks = 0

        def receive(self):
            self.looks += 1
            hand = {"kind": "teleop", "engaged": True, "velocity": [0.1] * 5}
            return [{"kind": "event", "id": "t", "name": "takeover"}, hand] if self.looks == 1 else [hand]

        def post(self, kind, **fields):
            return True

    person = HumanIntervention(console := Console(), np.ones(5), 0.1, VirtualClock())
    port = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(off_policy, "at_endpoint", lambda *_: (person, port))
    operator = {"operator": "tcp://127.0.0.1:1", "num_envs": 2}
    loop = finished(tmp_path, every=16, **EXPO | operator | {"steps": 32})
    store = loop.learner.store
    assert console.looks >= 16  # once a control step, and 8 of these come after the evaluation
    assert (store.columns["source"][store.rows(0)] == Source.HUMAN).all()
    assert (store.columns["source"][store.rows(1)] == Source.ONLINE).all()


def test_one_key_of_the_networks_leaves_the_others_as_the_method_has_them():
    for method in (Wsrl(), Expo()):
        sac = recipe(name=method.name, sac={"batch": 64}).method.sac
        assert sac == replace(method.sac, batch=64) and sac.num_critics == 10


def test_rlpd_is_compared_with_expo_at_its_sizes_and_rates(load_tool, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # what the script adds is taken back
    expo = load_tool("reproduce/expo.py")
    from rl_cells import recipe

    expos, rlpd = (recipe(expo.CONFIG, overrides, 0).method for overrides in ((), expo.RLPD))
    assert rlpd.name == "wsrl" and rlpd.arm == "rlpd"
    assert rlpd.sac == replace(expos.sac, temperature=0.1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("eval.num_envs=0", "'eval.num_envs' is 0, expected at least 1"),
        ("eval.episodes=0", "'eval.episodes' is 0"),
        ("eval.every=0", "'eval.every' is 0, and a run saves its checkpoints at evaluations"),
        ("seed=-1", "'seed' is -1"),
        ("method.log_every=0", "'method.log_every' is 0"),
        ("method.horizon=0", "'method.horizon' is 0"),
        ("method.num_envs=0", "'method.num_envs' is 0"),
        ("method.gamma=1.0", "'method.gamma' is 1.0, expected a number in [0, 1)"),
        ("method.samples=2 method.edits=3", "'method.edits' is 3, there are 2 samples to edit"),
        ("method.samples=0 method.edits=0", "'method.samples' is 0"),
        ("method.edits=0 method.unedited=false", "'method.edits' is 0 and 'method.unedited' is false"),
        ("method.beta=-0.1", "'method.beta' is -0.1"),
        ("method.euler_steps=0", "'method.euler_steps' is 0"),
        ("method.sac.utd=0", "'method.sac.utd' is 0"),
        ("method.sac.batch=1", "'method.sac.batch' is 1, expected at least 2"),
        ("method.sac.temperature=0", "'method.sac.temperature' is 0.0, expected more than 0"),
        ("method=wsrl method.sac.subset=0", "'method.sac.subset' is 0"),
        ("method=wsrl method.sac.subset=3 method.sac.num_critics=2", "'sac.subset' is 3, 'sac.num_critics' is 2"),
        ("method=wsrl method.cal_ql.draws=1", "'method.cal_ql.draws' is 1, expected at least 2"),
        ("method.offline.episodes=0", "'method.offline.episodes' is 0, and method 'expo' learns from stored episodes"),
        ("method=wsrl method.arm=rlpd method.offline.episodes=0", "is 0, and method.arm=rlpd learns"),
        ("method.offline.noise=[]", "'method.offline.noise' is empty"),
        ("method.offline.failures=false method.reward=task", "'method.offline.failures' is false, and reward=task"),
        ("data.root=d method.reward=task", "method.reward=task, and d tells success alone"),
        ("method.judge=run method.reward=task", "'method.judge' says what success is, method.reward=task pays none"),
        ("task=imagined:run", "imagined:run shows pictures, no poses of objects -- set method.features=POLICY"),
        ("task=imagined:run method.features=p method.judge=run", "judges of its own -- leave out method.judge"),
        ("task=imagined:run method.features=p method.reward=task", "judges of its own -- leave out method.judge"),
        ("task=imagined:run method.features=p task.options.control_hz=5", "imagined:run has a rate and judges"),
        ("method.reward=own", "test: 'method.reward=own' is no longer a value -- it is now task; docs/recipes.md"),
        ("method.successes=true method.reward=task", "'method.successes' is true, and reward=task"),
        ("method.rollouts=ray method.scenes=3", "'method.scenes' is 3, which needs rollouts=local"),
        ("method.rollouts=ray method.operator=tcp://x:1", "'method.operator' is tcp://x:1, which needs rollouts=local"),
        ("method.rollouts=ray method.workers=0", "'method.workers' is 0"),
        ("method.rollouts=ray", "'method.rollouts' is ray, and Ray is not installed -- pip install"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_made(monkeypatch, overrides, message):
    monkeypatch.setitem(sys.modules, "ray", None)
    tree = {"task": "sim/pick-v0", "method": "expo", "eval": {"every": 2000}}
    with pytest.raises(UserError) as error:
        make(with_overrides(tree, overrides.split()), "test")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 2}, "none would reach its limit of 8 steps -- set eval.every=16 or more, or task.options.max_ep"),
        (
            {"task": {"id": "Pendulum-v1", "options": {"max_episode_steps": 8}}},
            "Pendulum-v1 does not report 'is_success'",
        ),
        ({"task": "CartPole-v1"}, "CartPole-v1 has actions of type Discrete"),
    ],
)
def test_what_would_never_learn_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        finished(tmp_path, **{"offline": {"episodes": 0}, "name": "wsrl", "arm": "sac"} | changes)
    assert message in str(error.value)


@pytest.mark.parametrize("changes", [{"gamma": 0.5}, {"horizon": 4}, {"offline": {"episodes": 2, "noise": [0.3]}}])
def test_a_run_does_not_go_on_with_experience_of_something_else(tmp_path, changes):
    finished(tmp_path, **WSRL | {"steps": 12})
    with pytest.raises(UserError, match=f"is to go on has {next(iter(changes))}="):
        OffPolicyLoop(recipe(**WSRL | changes), tmp_path)


def test_an_evaluation_begins_episodes_that_nobody_has_begun(tmp_path):
    loop = OffPolicyLoop(recipe(**WSRL | {"num_envs": 2, "every": 16, "steps": 48}), tmp_path)
    begun, seed_of = [], loop._episode_seed
    loop._episode_seed = lambda number: begun.append(number) or seed_of(number)
    loop.run()
    assert begun == sorted(set(begun)) and len(begun) >= 6


@pytest.mark.parametrize("every", [8, 9])
def test_there_is_one_update_for_each_executed_chunk_however_evaluations_fall(tmp_path, monkeypatch, every):
    loop = OffPolicyLoop(recipe(**WSRL | {"horizon": 6, "every": every, "steps": 36}), tmp_path)
    updates = []
    monkeypatch.setattr(type(loop.learner), "update", lambda self: updates.append(self.store.total) or {})
    loop.run()
    assert updates == [6, 12, 18, 24, 30, 36]


def test_a_first_evaluation_that_no_checkpoint_followed_is_written_once(tmp_path, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(OffPolicyLoop, "_save", killed)
        finished(tmp_path, **WSRL)
    finished(tmp_path, **WSRL)
    assert [r["step"] for r in records(tmp_path)] == [0, 12, 24]


def test_a_stop_in_the_offline_training_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(off_policy, "OFFLINE_SAVE", 1)
    whole = OffPolicyLoop(recipe(**WSRL), tmp_path / "whole")
    whole._pretrain(Stop())
    halves, stop = OffPolicyLoop(recipe(**WSRL), tmp_path / "halves"), Stop()
    stop.asked = True
    with pytest.raises(KeyboardInterrupt):
        halves._pretrain(stop)
    halves = OffPolicyLoop(recipe(**WSRL), tmp_path / "halves")
    assert halves.learner.pretrained == 1 and not halves.started
    halves._pretrain(Stop())
    assert torch.equal(final(whole), final(halves))


@pytest.mark.parametrize("method", [WSRL, EXPO], ids=["wsrl", "expo"])
def test_what_is_saved_is_what_was_evaluated(tmp_path, method):
    loop = finished(tmp_path, **method)
    directory = tmp_path / "checkpoints" / "last" / "pretrained_model"
    saved, live = load_policy(directory), deployed(loop.learner, loop.seen)
    state = saved.policy.state_dict()
    assert all(torch.equal(p, state[name]) for name, p in live.policy.state_dict().items())
    assert saved.spec.robot == live.spec.robot and "trained_in" not in saved.spec.extras
    names = [d.name for d in saved.spec.robot.state]
    assert names[-6:] == ["goal_joint", "target_dx", "target_dy", "target_dz", "target_dyaw", "target_dgripper"]

    # The processors are the loop's normalisation, and the robot's range.
    seen = np.random.default_rng(0).normal(size=(3, len(names))).astype(np.float32)
    observations = [Observation(row, {}, "") for row in seen]
    batch = saved.preprocess(observations)
    np.testing.assert_array_equal(batch[OBS_STATE].numpy(), normalised(seen, *loop.scale))
    commands = saved.infer(observations, [1, 2, 3]).actions
    assert commands.shape == (3, 2, 5) and np.abs(commands).max() <= 1.0

    # `vla eval` prints what the loop logged, however many environments run side by side.
    for num_envs in (1, 2):
        how = {"num_envs": num_envs, "env_options": {"max_episode_steps": 8}}
        result = evaluate(saved, "sim/pick-v0", 2, loop.recipe.eval.seed, ExecutorConfig("sync"), **how)
        assert result.success_rate == records(tmp_path)[-1]["eval/success"]
        assert -result.episodes[0].steps == -8
    with pytest.raises(UserError, match=r"sim/so101_pick-v0 has state .* the policy was trained on"):
        evaluate(saved, "sim/so101_pick-v0", 1)


def test_the_mode_of_an_actor_is_what_the_learner_would_do_without_noise(tmp_path):
    loop = finished(tmp_path, **WSRL | {"steps": 12})
    policy = deployed(loop.learner, loop.seen)
    seen = np.random.default_rng(0).normal(size=(4, len(loop.scale[0]))).astype(np.float32)
    wanted = loop.learner.agent.actor.mode(torch.from_numpy(normalised(seen, *loop.scale)))
    chunks = policy.infer([Observation(row, {}, "") for row in seen], range(4)).actions
    np.testing.assert_array_equal(chunks, wanted.detach().unflatten(1, (2, 5)).numpy())


def test_an_evaluated_expo_draws_by_the_seed_of_the_observation(tmp_path):
    loop = finished(tmp_path, **EXPO | {"steps": 12})
    policy = deployed(loop.learner, loop.seen)
    seen = np.random.default_rng(0).normal(size=(3, len(loop.scale[0]))).astype(np.float32)
    observations = [Observation(row, {}, "") for row in seen]
    chunks = policy.infer(observations, [5, 6, 5]).actions
    alone = [policy.infer([o], [s]).actions[0] for o, s in zip(observations, [5, 6, 5], strict=True)]
    np.testing.assert_allclose(chunks, np.stack(alone), atol=1e-6)
    assert (policy.infer(observations, [7, 7, 7]).actions != chunks).any()


def test_a_gymnasium_environment_needs_no_stored_episodes_and_leaves_a_policy(tmp_path):
    task = {"id": "Pendulum-v1", "options": {"max_episode_steps": 8}}
    own = {"reward": "task", "offline": {"episodes": 0}, "steps": 12}
    loop = finished(tmp_path, task=task, name="wsrl", sac=SAC, arm="sac", warmup=6, **own)
    assert np.isfinite(loop.learner.store.columns["obs"][:12]).all() and torch.isfinite(final(loop)).all()
    policy = load_policy(tmp_path / "checkpoints" / "last" / "pretrained_model")
    assert policy.spec.robot.name == "gym/Pendulum-v1" and policy.spec.robot.action_high.tolist() == [2.0]
    with pytest.raises(UserError, match="Pendulum-v1 does not report 'is_success'"):
        evaluate(policy, "Pendulum-v1", 1)


def test_what_an_actor_elsewhere_is_made_of_travels_and_acts_as_the_learner_does(tmp_path):
    loop = OffPolicyLoop(recipe(**WSRL | {"offline_steps": 0}), tmp_path)
    make = ray.cloudpickle.loads(ray.cloudpickle.dumps(partial(make_worker, loop.recipe, loop.seen.robot, loop.scale)))
    worker, local = Worker(make, loop._episode_seed(0)), loop._rollouts(Stop())
    published = {name: p.numpy() for name, p in learners.weights(loop.learner.acting).items()}
    made = worker.run(published, 3, int(loop.learner.source), 10)
    for theirs in made.steps:
        (ours,) = local.collect(loop.learner, 3)[0].steps
        for name in Transition._fields[:-1]:
            np.testing.assert_array_equal(getattr(theirs, name), getattr(ours, name))
    assert [record.steps for record in made.finished] == [8] and (ours.version == 3).all()
    local.close()


@pytest.fixture(scope="module")
def cluster():
    connect(2)
    yield
    ray.shutdown()


@pytest.mark.flaky(reruns=1)  # Ray has deadlines of its own, see conftest.py
def test_one_ray_actor_without_lag_is_the_local_run_and_a_killed_one_is_replaced(tmp_path, cluster):
    """One cluster for both, as starting it is what takes time."""
    local = finished(tmp_path / "local", **WSRL | {"steps": 12})
    remote = finished(
        tmp_path / "ray", **WSRL | {"steps": 12, "rollouts": "ray", "workers": 1, "fragment": 1, "max_lag": 0}
    )
    for name in ("obs", "action", "source"):
        np.testing.assert_array_equal(local.learner.store.columns[name][:12], remote.learner.store.columns[name][:12])
    assert torch.equal(final(local), final(remote))

    two = recipe(**WSRL | {"steps": 80, "rollouts": "ray", "workers": 2, "fragment": 4, "max_lag": 2})
    loop = OffPolicyLoop(two, tmp_path / "two")
    loop._pretrain(Stop())
    rollouts = loop._rollouts(Stop())
    store, version, lags = loop.learner.store, 0, []
    while store.total < 48:
        if store.total >= 16 and not rollouts.lost and version and not lags.count(-1):
            ray.kill(rollouts.actors[0])
            lags.append(-1)
        for fragment in rollouts.collect(loop.learner, version):
            for transition in fragment.steps:
                store.add(transition, fragment.slots)
            lags.append(rollouts.lag)
        version += 1
    rollouts.close()
    assert rollouts.lost == 1 and max(lags) <= 2
    assert (store.steps > 0).all() and store.steps.sum() == store.total
    cut = store.columns["truncated"] | store.columns["terminated"]
    for slot in range(2):  # episodes are whole: where one begins, the one before ended or was cut
        rows = store.rows(slot)
        follows = np.isclose(store.columns["next_obs"][rows[:-1]], store.columns["obs"][rows[1:]]).all(1)
        assert (follows | cut[rows[:-1]]).all()


def test_a_refused_override_leaves_a_run_its_recipe_and_says_which_code_ran(tmp_path, capsys):
    own = TINY | WSRL | {"steps": 12}
    where = {"task": PICK, "output_dir": str(tmp_path / "run")}
    tiny = where | {"method": own, "eval": {"every": 12, "episodes": 2, "num_envs": 2}, "threads": 1}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    assert main(["train", str(tmp_path / "tiny.yaml")]) == 0
    written = tmp_path / "run/recipe.yaml"
    before = written.read_text()
    assert main(["train", "--resume", str(tmp_path / "run"), "method.horizon=1"]) == 1
    assert "the run that is to go on has horizon=2, not 1" in capsys.readouterr().err
    assert written.read_text() == before
    assert len((tmp_path / "run/revision.txt").read_text().splitlines()) == 2
