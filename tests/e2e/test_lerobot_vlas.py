"""SmolVLA, pi0, pi0.5, ACT and Diffusion Policy, tiny, through the whole loop: train, resume, evaluate, serve."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from lerobot.policies.factory import get_policy_class
from safetensors.torch import load_file
from tiny_vlas import KINDS, tiny_options, tiny_pi

import sim  # noqa: F401  registers the environments
from vla_stack.cli import main
from vla_stack.data.stats import load_stats
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.anatomy import made_up
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import Observation
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.server import PolicyServer, ServerConfig

RESNET: dict[str, Any] = {"pretrained_backbone_weights": None}
ACT = RESNET | {"chunk_size": 6, "n_action_steps": 4, "dim_model": 32, "n_heads": 2, "dim_feedforward": 32}
ACT |= {"n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4}
DIFFUSION = RESNET | {"use_group_norm": True, "n_obs_steps": 1, "horizon": 8, "n_action_steps": 4, "n_groups": 4}
DIFFUSION |= {"down_dims": (8, 16), "diffusion_step_embed_dim": 16, "spatial_softmax_num_keypoints": 8}
DIFFUSION |= {"use_separate_rgb_encoder_per_camera": False, "num_inference_steps": 2, "do_mask_loss_for_padding": True}
PLAIN = {"act": ACT, "diffusion": DIFFUSION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tiny")
    with tiny_pi(path):
        yield path


def small(kind: str, folder: Path) -> dict[str, Any]:
    return PLAIN.get(kind) or tiny_options(kind, folder) | {"max_state_dim": 12}


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "pick"
    arguments = ["--task", "pick", "--episodes", "3", "--root", str(root), "--workers", "1"]
    assert main(["collect", *arguments]) == 0
    return root


def train(
    directory: Path, data: Path, kind: str, options: dict[str, Any], *overrides: str, fails: bool = False
) -> Path:
    """Two steps of training; returns the run directory."""
    recipe = directory / "recipe.yaml"
    policy = {"type": kind, "options": {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}}
    method = {"name": "imitation" if kind in KINDS else "own_loss", "steps": 2, "batch_size": 2}
    recipe.write_text(yaml.safe_dump({"method": method, "policy": policy, "threads": 1, "device": "cpu"}))
    run = directory / "run"
    assert main(["train", str(recipe), f"data.root={data}", f"output_dir={run}", *overrides]) == fails
    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/pretrained_model/model.safetensors")


def acts_in_its_environment(policy_dir: Path) -> None:
    policy = load_policy(policy_dir)
    result = evaluate(policy, "sim/pick-v0", episodes=1, seed=3)
    assert len(result.episodes) == 1 and result.episodes[0].steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *PLAIN])
def test_train_resume_and_evaluate(kind: str, folder: Path, demonstrations: Path, tmp_path: Path) -> None:
    options = small(kind, folder)
    run = train(tmp_path, demonstrations, kind, options)
    policy_dir = run / "checkpoints/last/pretrained_model"
    robot = gym.make("sim/pick-v0").unwrapped.spec_robot  # type: ignore[attr-defined]
    policy = load_policy(policy_dir)
    assert policy.spec.robot.fingerprint() == robot.fingerprint()
    observations = [made_up(policy, seed) for seed in range(3)]
    together = policy.infer(observations, [4, 5, 4]).actions
    assert together.shape == (3, policy.spec.horizon, len(robot.action)) and np.isfinite(together).all()
    np.testing.assert_allclose(policy.infer(observations[1:2], [5]).actions[0], together[1], atol=1e-4)
    rollout = ["--env", "sim/pick-v0", "--episodes", "1", "--workers", "0", "--videos", "0"]
    assert main(["eval", "--policy", str(run), *rollout, "--out", str(tmp_path / "eval")]) == 0
    assert json.loads((tmp_path / "eval/report.json").read_text())["results"][0]["episodes"][0]["steps"] > 0

    assert main(["train", "--resume", str(run), "method.steps=3"]) == 0
    (tmp_path / "straight").mkdir()
    straight = train(tmp_path / "straight", demonstrations, kind, options, "method.steps=3")
    resumed = weights(run)
    for name, value in weights(straight).items():
        assert torch.equal(resumed[name], value), name


def test_relative_actions_and_fine_tuning(folder: Path, demonstrations: Path, tmp_path: Path) -> None:
    """pi0.5 learns actions relative to the state, with their statistics; then half of it is trained on from there."""
    options = small("pi05", folder) | {"use_relative_actions": True}
    run = train(tmp_path, demonstrations, "pi05", options)
    policy_dir = run / "checkpoints/last/pretrained_model"
    policy = load_policy(policy_dir)
    relative = np.array(["gripper" not in d.name for d in policy.spec.robot.action])
    stats = load_stats(demonstrations, policy.spec.horizon, relative=relative)["action.relative"]
    normaliser = load_file(next(policy_dir.glob("policy_preprocessor*normalizer*.safetensors")))
    np.testing.assert_allclose(normaliser["action.q01"], stats["q01"], rtol=1e-6)

    env = gym.make("sim/pick-v0")
    raw, info = env.reset(seed=0)
    here, there = raw["agent_pos"], raw["agent_pos"].copy()
    there[0] += 1e-4  # the text has 256 bins a dimension: the same words, another origin
    chunks = policy.infer([Observation(s, raw["pixels"], info["task"]) for s in (here, there)], seeds=[0, 0]).actions
    np.testing.assert_allclose((chunks[1] - chunks[0])[:, 0], 1e-4, atol=2e-5)

    (tmp_path / "tuned").mkdir()
    frozen = ["policy.options={train_expert_only: true, dtype: bfloat16}", f"policy.pretrained={policy_dir}"]
    tuned = train(tmp_path / "tuned", demonstrations, "pi05", {}, *frozen)
    before, after = weights(run), weights(tuned)
    changed = {name for name in after if not torch.equal(after[name].float(), before[name].to(after[name]).float())}
    assert changed and all("gemma_expert" in name or "_proj" in name or "time_mlp" in name for name in changed)
    assert not any(".paligemma." in name for name in changed)
    assert after["model.action_in_proj.weight"].dtype == torch.float32
    acts_in_its_environment(tuned / "checkpoints/last/pretrained_model")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvla", "pi05"])
def test_adapters_of_low_rank(
    kind: str, folder: Path, demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved directory is plain; a resumed run equals an uninterrupted one, average included."""
    for name in ("base", "none", "straight", "resumed"):
        (tmp_path / name).mkdir()
    base = train(tmp_path / "base", demonstrations, kind, small(kind, folder)) / "checkpoints/last/pretrained_model"
    schedule = (
        "method.optimizer={lr: 0.01, warmup_steps: 1, final_lr_ratio: 1.0}"  # the same whatever the number of steps
    )
    lora = [f"policy.pretrained={base}", "policy.lora={rank: 2}", schedule]
    train(tmp_path / "none", demonstrations, kind, {}, *lora, "policy.lora.targets=nothing", fails=True)
    assert "policy.lora.targets fits no layer" in capsys.readouterr().err
    straight = train(tmp_path / "straight", demonstrations, kind, {}, *lora, "method.steps=4")
    resumed = train(tmp_path / "resumed", demonstrations, kind, {}, *lora)
    assert main(["train", "--resume", str(resumed), "method.steps=4"]) == 0
    before, after, again = load_file(base / "model.safetensors"), weights(straight), weights(resumed)
    assert before.keys() == after.keys() == again.keys()
    for name in after:
        assert torch.equal(after[name], again[name]), name
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert any("mlp.up_proj" in n for n in changed) and any(".k_proj" in n for n in changed)
    assert "model.action_in_proj.weight" in changed and not any("vision" in name for name in changed)

    policy_dir = straight / "checkpoints/last/pretrained_model"
    stock = get_policy_class(kind).from_pretrained(policy_dir)
    for name, value in stock.state_dict().items():
        if name in after:
            assert torch.equal(value, after[name]), name
    acts_in_its_environment(policy_dir)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvla", "pi05"])
def test_recipes_fine_tune(kind: str, folder: Path, demonstrations: Path, tmp_path: Path) -> None:
    """`vla_stack/configs/<kind>.yaml` as it is, but for tiny weights, short chunks and two steps."""
    base = train(tmp_path, demonstrations, kind, small(kind, folder)) / "checkpoints/last/pretrained_model"
    short = ["policy.options.chunk_size=9", "policy.options.n_action_steps=4", "method.steps=2", "method.batch_size=2"]
    where = [f"policy.pretrained={base}", f"data.root={demonstrations}", f"output_dir={tmp_path / 'tuned'}"]
    recipe = Path(__file__).parents[2] / f"vla_stack/configs/{kind}.yaml"
    assert main(["train", str(recipe), *short, *where, "method.accumulate=1", "device=cpu", "threads=1"]) == 0
    policy_dir = tmp_path / "tuned/checkpoints/last/pretrained_model"
    assert load_policy(policy_dir).spec.horizon == 9
    acts_in_its_environment(policy_dir)


def test_what_the_hub_does_not_give_is_said(
    demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"policy: {{type: smolvla}}\ndata: {{root: {demonstrations}}}\n")
    assert main(["train", str(recipe), f"output_dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vla train: policy 'smolvla' needs a file of the hub: ") and "policy.options" in error


def test_methods_say_what_they_need(demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"policy: {{type: act}}\ndata: {{root: {demonstrations}}}\n")
    assert main(["train", str(recipe), f"output_dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "method 'imitation' needs a flow policy, 'act' is none -- set method=own_loss" in error
    assert main(["train", str(recipe), "policy.lora.rank=4"]) == 1
    assert "'policy.lora' needs weights to adapt -- give policy.pretrained=DIR" in capsys.readouterr().err


def test_serving(folder: Path, demonstrations: Path, tmp_path: Path) -> None:
    """A client gets over the wire what the policy answers in person."""
    run = train(tmp_path, demonstrations, "smolvla", small("smolvla", folder))
    policy = load_policy(run / "checkpoints/last/pretrained_model")
    env = gym.make("sim/pick-v0")
    raw, info = env.reset(seed=0)
    observation = Observation(raw["agent_pos"], raw["pixels"], info["task"])
    server = PolicyServer(lambda: policy, "tcp://127.0.0.1:*", ServerConfig())
    thread = threading.Thread(target=server.run)
    thread.start()
    client = PolicyClient(server.endpoint)
    try:
        assert client.hello(env.unwrapped.spec_robot, 60).horizon == policy.spec.horizon  # type: ignore[attr-defined]
        assert client.request(observation, rid=1, epoch=0, origin=0, seed=7)
        replies: list[Any] = []
        while not replies:
            replies = client.poll(timeout_ms=1000)
        np.testing.assert_allclose(replies[0].actions, policy.infer([observation], [7]).actions[0], atol=1e-5)
    finally:
        client.close()
        server.stop()
        thread.join()
