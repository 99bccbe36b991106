"""LeRobot's own commands on our parts: they train our policy on our data and run our checkpoint in our environment."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from lerobot_commands import stock

import sim  # noqa: F401  registers the environments
from vla_stack.cli import main
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import Observation

SMALL = {"width": 32, "expert_width": 32, "depth": 1}


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lerobot") / "pick"
    assert main(["collect", "--task", "pick", "--episodes", "3", "--root", str(root), "--workers", "1"]) == 0
    return root


def acts(policy_dir: Path) -> None:
    """Our loader takes the policy and it answers an observation of the environment it was trained for."""
    policy = load_policy(policy_dir)
    env = gym.make("sim/pick-v0")
    raw, info = env.reset(seed=0)
    spec = env.unwrapped.spec_robot  # type: ignore[attr-defined]
    assert policy.spec.robot.fingerprint() == spec.fingerprint()
    chunk = policy.infer([Observation(raw["agent_pos"], raw["pixels"], info["task"])], seeds=[0]).actions
    assert chunk.shape == (1, policy.spec.horizon, len(spec.action)) and np.isfinite(chunk).all()
    env.close()


@pytest.mark.slow
@pytest.mark.timeout(900)  # a command starts in ten seconds on an idle machine, in minutes on a crowded one
@pytest.mark.parametrize(
    "policy",
    [
        ["vla", *(f"--policy.{key}={value}" for key, value in SMALL.items())],
        ["moh", "--policy.horizons=[8, 16]", f"--policy.base={json.dumps({'type': 'vla', 'chunk_size': 16, **SMALL})}"],
    ],
    ids=lambda policy: policy[0],
)
def test_lerobot_train_trains_our_policy_and_we_load_it(
    demonstrations: Path, tmp_path: Path, policy: list[str]
) -> None:
    printed = stock(
        "lerobot-train",
        "--dataset.repo_id=local/pick",
        f"--dataset.root={demonstrations}",
        f"--policy.type={policy[0]}",
        *policy[1:],
        *("--policy.push_to_hub=false", "--policy.device=cpu", "--num_workers=0", "--env_eval_freq=0"),
        *("--steps=20", "--batch_size=4", "--log_freq=5", "--save_freq=20", f"--output_dir={tmp_path / 'run'}"),
    )
    losses = {int(step): float(loss) for step, loss in re.findall(r"step:(\d+) .*?loss:(\S+)", printed)}
    assert sorted(losses) == [5, 10, 15, 20] and np.isfinite(list(losses.values())).all()
    acts(tmp_path / "run/checkpoints/000020/pretrained_model")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a command starts in ten seconds on an idle machine, in minutes on a crowded one
def test_lerobot_eval_runs_our_checkpoint_in_our_environment(demonstrations: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    options = ", ".join(f"{key}: {value}" for key, value in SMALL.items())
    recipe.write_text(
        f"policy: {{options: {{{options}}}}}\nmethod: {{steps: 4, batch_size: 4}}\nthreads: 1\ndevice: cpu\n"
    )
    run_dir = tmp_path / "run"
    assert main(["train", str(recipe), f"data.root={demonstrations}", f"output_dir={run_dir}"]) == 0
    policy_dir = run_dir / "checkpoints/last/pretrained_model"
    acts(policy_dir)
    stock(
        "lerobot-eval",
        f"--policy.path={policy_dir}",
        *("--policy.device=cpu", "--env.type=vla_sim", "--env.task=pick", "--env.episode_length=12"),
        # In one process: LeRobot's asynchronous environments import all of LeRobot once more each.
        *("--eval.n_episodes=2", "--eval.batch_size=2", "--eval.use_async_envs=false"),
        f"--output_dir={tmp_path / 'eval'}",
    )
    result = json.loads((tmp_path / "eval/eval_info.json").read_text())
    assert result["overall"]["n_episodes"] == 2
    assert 0.0 <= result["overall"]["pc_success"] <= 100.0
