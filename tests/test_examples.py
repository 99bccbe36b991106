"""The packages of ``examples/``, installed as packages, do what their READMEs say without touching a file here."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from vla_stack import registry
from vla_stack.cli import main
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.schema import Chunks, PolicySpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
KINDS = {"tasks": "hover", "robots": "spring", "policies": "line", "environments": "cart"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the packages as pip lays them out: the module, and what the package says of itself."""
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


def test_all_are_registered(installed, capsys):
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
