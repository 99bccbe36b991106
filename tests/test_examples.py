"""The packages of ``examples/``, installed as packages, do what their READMEs say without touching a file here."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from as_installed import ROOT, environment, lay_out, python, vla
from lerobot.configs import FeatureType, PolicyFeature
from safetensors.torch import load_file

from vla_stack import registry
from vla_stack.cli import main
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.schema import ACTION, OBS_STATE, Chunks, Observation, PolicySpec
from vla_stack.serving.client import PolicyClient

EXAMPLES = ROOT / "examples"
KINDS = {"tasks": "hover", "robots": "spring", "policies": "line", "environments": "cart", "methods": "grpo"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the five packages as pip lays them out: the module, and what the package says of itself."""
    site = tmp_path_factory.mktemp("site")
    for project in EXAMPLES.iterdir():
        lay_out(project, site)
    return site


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(site)


def test_all_five_are_registered(installed, capsys):
    assert main(["--list", *KINDS]) == 0
    shown = capsys.readouterr().out
    for kind, name in KINDS.items():
        entry = next(k for k in registry.ALL if k.kind == kind).entry(name)
        assert entry.package in shown and entry.target in shown and entry.package != registry.PACKAGE


@pytest.mark.slow
@pytest.mark.timeout(900)  # several processes start, each in seconds on an idle machine
def test_a_policy_type_is_trained_by_lerobot_and_here_evaluated_and_served_without_an_import(site, tmp_path):
    root, run, own = tmp_path / "hover", tmp_path / "run", tmp_path / "own"
    vla(site, f"collect --task hover --episodes 2 --root {root} --workers 1")
    line = ["--policy.type=line", "--policy.chunk_size=4", "--policy.n_action_steps=4", "--policy.push_to_hub=false"]
    some = ["--steps=2", "--batch_size=4", "--policy.device=cpu", "--num_workers=0", "--env_eval_freq=0"]
    data = ["--dataset.repo_id=local/hover", f"--dataset.root={root}", f"--output_dir={run}"]
    python(site, Path(sys.executable).parent / "lerobot-train", *data, *line, *some, "--wandb.enable=false")
    policy = next(run.glob("checkpoints/*/pretrained_model"))
    scene = f"--env sim/hover-v0 --episodes 2 --max-steps 5 --workers 0 --videos 0 --out {tmp_path / 'report'}"
    printed = vla(
        site,
        f"eval --policy {policy} {scene}",
        f"train own_loss policy={policy} data.root={root} method.steps=2 method.batch_size=4 threads=1 device=cpu "
        f"output_dir={own}",
        f"eval --policy {own} {scene}",
    )
    assert printed.count("sim/hover-v0") >= 2
    assert all('"type": "line"' in (made / "config.json").read_text() for made in (policy, resolve_policy(own)))

    endpoint = f"ipc://{tmp_path}/vla.sock"
    command = [sys.executable, "-m", "vla_stack.cli", "serve", "--policy", str(own), "--endpoint", endpoint]
    with subprocess.Popen(command, env=environment(site), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert any(printed.startswith("READY") for printed in server.stdout)
            client = PolicyClient(endpoint)
            robot = client.hello(None).robot
            client.hello(robot)
            pictures = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in robot.cameras}
            seen = Observation(np.zeros(len(robot.state), np.float32), pictures, "")
            assert client.request(seen, rid=1, epoch=0, origin=0, seed=7)
            answers = []
            while not answers:
                answers = client.poll(timeout_ms=1000)
            client.close()
            assert answers[0].actions.shape == (4, len(robot.action)) and np.isfinite(answers[0].actions).all()
        finally:
            server.terminate()


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
