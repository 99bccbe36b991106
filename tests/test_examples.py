"""The packages of ``examples/``, installed as packages, do what their READMEs say without touching a file here."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from safetensors.torch import load_file

from vla_stack import registry
from vla_stack.cli import main
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import ACTION, OBS_STATE, Chunks, Observation, PolicySpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
KINDS = {"tasks": "hover", "robots": "spring", "policies": "line", "environments": "cart", "methods": "grpo"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the five packages as pip lays them out: the module, and what the package says of itself."""
    site = tmp_path_factory.mktemp("site")
    for project in EXAMPLES.iterdir():
        told = tomllib.loads((project / "pyproject.toml").read_text())
        name, module = told["project"]["name"], told["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"][0]
        shutil.copy(project / module, site)
        info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        groups = told["project"]["entry-points"].items()
        lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in entries.items()) for group, entries in groups]
        (info / "entry_points.txt").write_text("\n".join(lines))
    return site


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(site)


def python(site: Path, *args: object) -> str:
    """Run Python where the packages are installed; returns what it printed."""
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *map(str, args)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_all_five_are_registered(installed, capsys):
    assert main(["--list", *KINDS]) == 0
    shown = capsys.readouterr().out
    for kind, name in KINDS.items():
        entry = next(k for k in registry.ALL if k.kind == kind).entry(name)
        assert entry.package in shown and entry.target in shown and entry.package != registry.PACKAGE


@pytest.mark.slow
@pytest.mark.timeout(900)  # several processes start, each in seconds on an idle machine
def test_a_task_is_recorded_and_a_policy_type_trained_on_it_by_lerobot_is_ours_too(site, tmp_path):
    root, run = tmp_path / "hover", tmp_path / "run"
    vla = ("-m", "vla_stack.cli")
    python(site, *vla, "collect", "--task", "hover", "--episodes", "2", "--root", root, "--workers", "1")
    line = ["--policy.type=line", "--policy.chunk_size=4", "--policy.n_action_steps=4", "--policy.push_to_hub=false"]
    some = ["--steps=2", "--batch_size=4", "--policy.device=cpu", "--num_workers=0", "--env_eval_freq=0"]
    data = ["--dataset.repo_id=local/hover", f"--dataset.root={root}", f"--output_dir={run}"]
    python(site, Path(sys.executable).parent / "lerobot-train", *data, *line, *some, "--wandb.enable=false")
    policy = next(run.glob("checkpoints/*/pretrained_model"))
    scene = ("--env", "sim/hover-v0", "--episodes", "2", "--out", tmp_path / "report")
    assert "hover" in python(site, *vla, "eval", "--policy", policy, *scene)
    assert '"type": "line"' in (policy / "config.json").read_text()


def test_a_robot_is_checked(installed, capsys):
    assert main(["robot", "check", "--robot", "spring", "--seconds", "0.3"]) == 0
    assert "example/spring: 1 commands, 1 measured values, 20 Hz" in capsys.readouterr().out


class Pushes:
    """Drives a cart to the origin, from what it sees alone."""

    def __init__(self, robot):
        self.spec = PolicySpec(robot, horizon=4, normalisation="", model_version="", extras={"n_action_steps": 1})

    def infer(self, observations, seeds, continuations=()):
        return Chunks(np.stack([np.full((4, 1), -5.0 * o.state[1], np.float32) for o in observations]))


def test_an_environment_answers_for_all_rows(installed):
    from vla_example_environment import ROBOT

    results = [evaluate(Pushes(ROBOT), "cart:0.5", episodes=5, num_envs=n) for n in (1, 5)]
    assert results[0].episodes == results[1].episodes and results[0].success_rate == 1.0


@pytest.fixture
def cart_policy(installed, tmp_path):
    """Directory of a small flow policy for the cart, as it is before any training."""
    from small_vla import make_policy
    from vla_example_environment import ROBOT

    from vla_stack.policies.processor_vla import make_vla_pre_post_processors

    features = {
        "input_features": {OBS_STATE: PolicyFeature(FeatureType.STATE, (2,))},
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (1,))},
    }
    named = {"action_feature_names": ["x.vel"], "robot": ROBOT.to_json(), "use_relative_actions": False}
    policy = make_policy(**features, **named)
    stats = {
        key: {"mean": np.zeros(n, np.float32), "std": np.ones(n, np.float32)}
        for key, n in ((OBS_STATE, 2), (ACTION, 1))
    }
    for part in (policy, *make_vla_pre_post_processors(policy.config, stats)):
        part.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_grpo_trains_and_leaves_a_policy_for_every_other_verb(cart_policy, tmp_path, capsys):
    run, options = tmp_path / "run", ["method.iterations=2", "method.starts=2", "method.group=3", "method.epochs=1"]
    assert main(["train", "grpo", f"policy={cart_policy}", "task=cart:0.5", f"output_dir={run}", *options]) == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    trained, start = (load_file(d / "model.safetensors") for d in (run / "pretrained_model", cart_policy))
    assert any((trained[name] != start[name]).any() for name in start)
    out = ["--out", str(tmp_path / "report")]
    assert main(["eval", "--policy", str(run / "pretrained_model"), "--env", "cart:0.5", "--episodes", "2", *out]) == 0
    assert main(["train", "grpo", "task=cart:0.5"]) == 1
    assert "grpo starts from a flow policy" in capsys.readouterr().err


def test_grpo_makes_what_does_better_than_its_group_more_likely(cart_policy):
    from vla_example_grpo import Explorer, Grpo

    explorer, seeds = Explorer(load_policy(cart_policy), sigma=0.3), [11, 12, 13, 14]
    explorer.infer([Observation(np.array([0.0, 0.3], np.float32), {}, "")] * 4, seeds)
    decisions = [explorer.seen[seed] for seed in seeds]
    observations, chains = [d[0] for d in decisions], torch.stack([d[1] for d in decisions])
    records, advantages = (
        [SimpleNamespace(noise=np.array([0, seed])) for seed in seeds],
        np.array([1.0, -1.0, 0.5, -0.5]),
    )
    optimizer = torch.optim.Adam(explorer.policy.policy.parameters(), 1e-3)
    before = explorer.log_prob(observations, chains).detach()
    Grpo(epochs=1).update(explorer, optimizer, records, advantages)
    gained = (explorer.log_prob(observations, chains) - before).detach().numpy()
    assert float(gained @ advantages) > 0.0 and not explorer.seen
