"""The loop of iterations at toy size: what it writes, that it continues anywhere, and its verb."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from vla_stack import cli
from vla_stack.data.dataset import open_dataset
from vla_stack.data.integrity import check
from vla_stack.data.layout import read_json
from vla_stack.data.sidecar import EpisodeFacts, facts_row, read_facts, write_facts
from vla_stack.data.store import EpisodeStore
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.rac import loop as rac
from vla_stack.methods.rac.loop import RacLoop
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.engine import run as rollouts
from vla_stack.rollout.plan import Plan, Start
from vla_stack.training.recipe import load as load_recipe

CONFIG = Path(__file__).parents[2] / "vla_stack" / "configs" / "rac_stack.yaml"
TOY = [
    f"method.{key}" for key in ("iterations=1", "demos=3", "human_frames=30", "num_envs=2", "steps=2", "batch_size=4")
]
TOY += ["eval.episodes=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("iterations") / "run"
    assert cli.main(["train", str(CONFIG), *TOY, f"output_dir={out}"]) == 0
    return out


def test_iterations_aggregate_demonstrations_and_interventions(run: Path) -> None:
    records = [read_json(p) for p in sorted(run.glob("iteration-*/record.json"))]
    dataset, facts = open_dataset(run / "data"), read_facts(run / "data")
    assert check(run / "data") == []
    assert [r["iteration"] for r in records] == [0, 1] and records[0]["episodes"] == 3
    assert records[1]["episodes"] == dataset.num_episodes > 3
    demos = dataset.columns["episode_index"] < 3
    assert (dataset.columns["segment_type"][demos] == 0).all() and (dataset.columns["segment_type"][~demos] > 0).all()
    human = int((dataset.columns["control_source"] == 1).sum())
    assert records[1]["human_frames"] == human >= records[0]["human_frames"] + 30
    assert {row["iteration"] for row in facts.values()} == {0, 1}
    assert len(records[1]["success"]) == 2 and 0.0 <= records[1]["progress"] <= 1.0
    assert yaml.safe_load((run / "recipe.yaml").read_text())["method"]["iterations"] == 1


def test_a_stopped_run_continues_with_the_same_data(run: Path, capsys) -> None:
    before = {k: v.copy() for k, v in open_dataset(run / "data").columns.items()}
    record = read_json(run / "iteration-001" / "record.json")
    for name in ("record.json", "rollouts.json"):  # as if it had died while it wrote down what it had collected
        (run / "iteration-001" / name).unlink()
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert "recovery:correction" in capsys.readouterr().out
    for name, column in open_dataset(run / "data").columns.items():
        np.testing.assert_array_equal(column, before[name])
    assert read_json(run / "iteration-001" / "record.json") == record
    assert cli.main(["train", str(CONFIG), *TOY, f"output_dir={run}"]) == 1
    assert "already holds a run" in capsys.readouterr().err


def test_classes_are_weighed_once_there_are_interventions(tmp_path: Path) -> None:
    assert cli.main(["train", str(CONFIG), *TOY, "data.weights=iwr", f"output_dir={tmp_path}/run"]) == 0
    used = [yaml.safe_load((tmp_path / f"run/iteration-00{k}/train/recipe.yaml").read_text())["data"] for k in (0, 1)]
    assert [data["weights"] for data in used] == ["uniform", "iwr"]


def test_its_evaluation_is_that_of_vla_eval(run: Path, tmp_path: Path) -> None:
    loop = RacLoop(load_recipe(run / "recipe.yaml", []), run)
    policy, limit = load_policy(loop._policy_dir(1)), 12
    agent = rac.Operated("rac", limit, loop.familiar())
    options = {**loop.recipe.task.options, "max_episode_steps": limit}
    plan = Plan(loop.task.id, options, policy.spec, agent, executor=rac.EXECUTOR, linger=None)
    ours = sorted(rollouts(policy, plan, [Start(5), Start(6)], 2), key=lambda record: record.seed)
    theirs = evaluate(policy, loop.task.id, 2, 5, rac.EXECUTOR, num_envs=2, env_options=options)
    for a, b in zip(ours, theirs.episodes, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        assert len(a.actions) == limit


def test_an_episode_whose_commit_was_interrupted_is_recorded_again(tmp_path: Path, monkeypatch) -> None:
    publish, calls = EpisodeStore._publish, []

    def stopped(self, *given) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        publish(self, *given)

    monkeypatch.setattr(EpisodeStore, "_publish", stopped)
    recipe = load_recipe(CONFIG, TOY)
    with pytest.raises(KeyboardInterrupt):
        RacLoop(recipe, tmp_path).collect(0)
    assert len(read_facts(tmp_path / "data")) == 2 and open_dataset(tmp_path / "data").num_episodes == 1
    write_facts(tmp_path / "data", [facts_row(EpisodeFacts(), uid=7, n_recoveries=0, human_frames=500)])
    about = RacLoop(recipe, tmp_path).collect(0)
    dataset = open_dataset(tmp_path / "data")
    assert about["episodes"] == about["collected"] == dataset.num_episodes == 3
    assert about["human_frames"] == dataset.num_frames and check(tmp_path / "data") == []


def test_errors_name_the_key(capsys) -> None:
    assert cli.main(["train", str(CONFIG), "method.demoss=3"]) == 1
    assert "'method.demos'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("task=juggle", "no operator for the task 'juggle'"),
        ("data.root=x", "method 'rac' records its own data"),
        ("eval.envs=[sim/pick-v0]", "method 'rac' evaluates in its task -- leave it out"),
        ("data.episodes=[0,1]", "method 'rac' records its own data"),
        ("data.weights=sirius", "sirius needs the policy's own frames -- set data.interventions=all"),
        ("method.mode=hg_dagger & data.weights=balanced", "balanced needs recoveries, here are none"),
        ("policy.options.history=2", "reads earlier observations, which are not kept"),
        ("policy={type: act, options: {}}", "method 'rac' needs a flow policy, 'act' is none"),
        ("policy.options.widht=3", "the nearest option is 'width'"),
        ("device=gpu", "device 'gpu' is not available"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_recorded(override, says, tmp_path: Path, capsys) -> None:
    assert cli.main(["train", str(CONFIG), *override.split(" & "), f"output_dir={tmp_path}/x"]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_policy_rolls_out_where_it_is_trained(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(path: Path, device: str) -> None:
        asked.append(device)
        raise StopIteration

    monkeypatch.setattr(rac, "find_device", lambda name: torch.device("cuda:1") if name == "cuda:1" else None)
    monkeypatch.setattr(rac, "load_policy", load)
    loop = RacLoop(load_recipe(CONFIG, ["device=cuda:1"]), run)
    with pytest.raises(StopIteration):
        loop.evaluate(run)
    with pytest.raises(RuntimeError):  # what a generator makes of it
        next(loop._wanted(1, None))
    assert asked == ["cuda:1", "cuda:1"]
