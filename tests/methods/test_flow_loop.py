"""The loop around a frozen policy at toy size: stopped runs, demonstrations, what is refused; and the fit of noise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_reinflow_loop import make_start

from vla_stack import cli
from vla_stack.data.dataset import open_dataset
from vla_stack.errors import UserError
from vla_stack.methods.on_flow import rollouts
from vla_stack.methods.on_flow.loop import FlowLoop
from vla_stack.methods.reinflow import noise
from vla_stack.rollout.collect import COMMAND_SENT, CollectConfig, collect
from vla_stack.schema import ACTION, Observation
from vla_stack.training.recipe import load

CONFIG = Path(__file__).parents[2] / "vla_stack" / "configs" / "rl_vla.yaml"
TOY = (
    *("task={id: sim/place-v0, options: {max_episode_steps: 5}}", "method.iterations=2", "method.episodes=2"),
    *("method.num_envs=2", "method.save_every=1", "method.samples=2", "method.edits=1", "eval.every=1"),
    "method.sac={actor: [8], critic: [8], num_critics: 2, batch: 4, utd: 1, layer_norm: true}",
    *("eval.episodes=2", "eval.num_envs=2", "device=cpu", "method.warmup=1"),
)


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[str, ...]:
    """An untrained policy on states, and demonstrations of its robot."""
    root = tmp_path_factory.mktemp("given")
    collect(CollectConfig(task="place", privileged=True, noise=0.3), root / "data", 2, workers=1)
    return *TOY, f"policy={make_start(root / 'start')}", f"data.root={root / 'data'}"


def records(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def test_a_stopped_run_gives_the_same_curve_and_policy(given, tmp_path):
    runs = tmp_path / "whole", tmp_path / "stopped"
    for run in runs:
        assert cli.main(["train", str(CONFIG), *given, "method.keep=3", f"output_dir={run}"]) == 0
    shutil.rmtree(runs[1] / "checkpoints" / "000002")  # as if it had died before that was written
    assert cli.main(["train", "--resume", str(runs[1])]) == 0
    rows = records(runs[0])
    assert rows == records(runs[1]) and [row["step"] for row in rows] == [0, 1, 2] and "td" in rows[1]
    a, b = (load_file(run / "checkpoints/last/pretrained_model/model.safetensors") for run in runs)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_there_is_an_update_for_each_decision_of_the_warm_up_too(given, tmp_path, monkeypatch):
    loop = FlowLoop(load(CONFIG, [*given, "method.warmup=2", "method.iterations=3"]), tmp_path)
    updates, update = [], loop.learner.update
    monkeypatch.setattr(loop.learner, "update", lambda: updates.append(len(loop.learner.store)) or update())
    loop.run()
    rows = records(tmp_path)
    assert "td" not in rows[1] and "td" in rows[2]
    first, second, third = (row["decisions"] for row in rows[1:])
    assert updates == [first + second] * (first + second) + [first + second + third] * third


def test_demonstrations_are_decisions_at_every_frame(given, tmp_path):
    loop = FlowLoop(load(CONFIG, given), tmp_path)
    dataset, kept = open_dataset(Path(loop.recipe.data.root[0])), loop.learner.offline
    n = int(dataset.episode_to[0])
    steps, gamma = 3, loop.method.gamma
    assert len(kept) == dataset.num_frames == len(kept.seen)  # all of them succeeded
    assert kept.at[:n].tolist() == list(range(n))
    assert kept.after[:n].tolist() == [*range(steps, n), *range(n - steps, n)]
    assert kept.discount[:n].tolist() == pytest.approx([gamma**3] * (n - steps) + [0.0] * steps)
    earned = [-sum(gamma**i for i in range(k)) + (gamma ** (k - 1) if k < 4 else 0) for k in (3, 2, 1)]
    assert kept.reward[n - steps : n].tolist() == pytest.approx(earned, abs=1e-6)
    # An action is what the policy's processors make of the commands that were sent: they give these back,
    # but for the gripper, whose statistics are made up: 4 of its deviations are less than its range.
    sent = dataset.columns.get(COMMAND_SENT, dataset.columns[ACTION])
    frame = n // 2
    state = dataset.columns["observation.state"][frame]
    policy = loop.policy
    policy.preprocess([Observation(state, {}, dataset.tasks[0])])
    back = policy.postprocessor(kept.actions[frame].view(1, steps, -1))[0].numpy()
    np.testing.assert_allclose(back[:, :4], sent[frame : frame + steps, :4], atol=1e-4)
    assert kept.offered.shape[1:] == (2, steps * sent.shape[1])


def test_a_run_that_goes_on_does_not_look_at_demonstrations_again(given, tmp_path, monkeypatch):
    made = FlowLoop(load(CONFIG, given), tmp_path).learner.offline
    looked, look = [], rollouts.recorded_episode
    monkeypatch.setattr(rollouts, "recorded_episode", lambda *a: looked.append(a) or look(*a))
    found = FlowLoop(load(CONFIG, given), tmp_path).learner.offline
    assert not looked and all(torch.equal(x, found.state_dict()[name]) for name, x in made.state_dict().items())
    other = FlowLoop(load(CONFIG, [*given, "method.gamma=0.5"]), tmp_path).learner.offline  # of which it is no longer
    assert len(looked) == 2 and not torch.equal(other.discount, made.discount)


def test_a_run_does_not_go_on_with_decisions_of_something_else(given, tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", str(CONFIG), *given, "method.iterations=1", f"output_dir={run}"]) == 0
    demonstrations = (run / "demonstrations.safetensors").read_bytes()
    start = next(Path(key.removeprefix("policy=")) for key in given if key.startswith("policy="))
    other, shorter = (shutil.copytree(start, tmp_path / name) for name in ("other", "shorter"))
    weights = load_file(other / "model.safetensors")
    save_file({name: 0.5 * w for name, w in weights.items()}, other / "model.safetensors", {"format": "pt"})
    config = json.loads((shorter / "config.json").read_text()) | {"n_action_steps": 2}
    (shorter / "config.json").write_text(json.dumps(config))
    for key, named in {
        "method.reward=success": "reward=step",
        "method.gamma=0.5": "gamma=0.98",
        "method.samples=3": "samples=2",
        "method.judge=elsewhere": "judge=",
        "task.options.max_episode_steps=4": "task=",
        f"policy={other}": "policy.pretrained=",
        f"policy={shorter}": "n_action_steps=3",
    }.items():
        assert cli.main(["train", "--resume", str(run), key, "method.iterations=2"]) == 1
        assert f"the run that is to go on has {named}" in capsys.readouterr().err
        assert (run / "demonstrations.safetensors").read_bytes() == demonstrations
    assert cli.main(["train", "--resume", str(run), "method.iterations=2", "method.episodes=1"]) == 0


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("policy=", "'policy.pretrained' is missing"),
        ("data.root=[a,b]", "'data.root' names 2 datasets"),
        ("method.edits=3", "'method.edits' is 3, there are 2 samples"),
        ("method.warmup=3", "'method.warmup' is 3, of 2 iterations"),
        ("method.reward=task", "demonstrations tell success alone"),
        ("task=", "'task' is missing"),
    ],
)
def test_what_does_not_go_together_is_refused(given, key, message):
    with pytest.raises(UserError, match=message):
        load(CONFIG, [*given, key])


@pytest.mark.parametrize(("breaks", "fitted"), [(0.08, 0.07), (0.02, 0.03), (9.0, 0.5)])
def test_the_noise_is_the_largest_that_costs_no_more_than_a_quarter(breaks, fitted, capsys):
    tried = []

    def set_noise(low, high):
        tried.append(low)
        assert low == high

    config = SimpleNamespace(sigma_low=0.1, sigma_high=0.4)
    learner = SimpleNamespace(config=config, set_noise=set_noise)

    def practise():
        won = 12 if tried[-1] < breaks else 8  # of 16, which is more than a quarter less
        return SimpleNamespace(success=torch.arange(16) < won)

    low, high = noise.fit_noise(learner, practise)
    assert (low * high) ** 0.5 == pytest.approx(fitted) and high / low == pytest.approx(4.0)
    assert tried[0] == noise.NONE and capsys.readouterr().out.count("rollouts succeed") == len(tried)


def test_a_run_that_fits_its_noise_goes_on_with_it(given, tmp_path):
    config = CONFIG.with_name("rl_reinflow_vla.yaml")
    keys = [k for k in given if not k.startswith(("method.sac", "method.samples", "method.edits", "method.warmup"))]
    keys += ["method.fit_episodes=2", "method.epochs=1", "method.minibatch=2", "method.denoising_steps=1"]
    assert cli.main(["train", str(config), *keys, f"output_dir={tmp_path / 'run'}"]) == 0
    state = json.loads((tmp_path / "run/checkpoints/last/training_state/state.json").read_text())
    assert state["noise"][1] / state["noise"][0] == pytest.approx(2.5)
    assert state["noise"][1] == pytest.approx(noise.LADDER[-1] * 2.5**0.5)  # of no success a quarter is nothing
