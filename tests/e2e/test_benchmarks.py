"""A benchmark from its expert's demonstrations to a measured policy, on the smallest settings."""

from __future__ import annotations

import json

import pytest

from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset

CAMERA = {"metaworld/reach-v3": "corner2", "aloha/transfer_cube": "top"}
TINY = "{chunk_size: 8, n_action_steps: 4, width: 16, expert_width: 16, depth: 1, heads: 1, head_dim: 16}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("metaworld/reach-v3", ["--control-hz", "20", "--control-mode", "ee_abs"]),
        ("metaworld/reach-v3", ["--control-hz", "20"]),
        ("aloha/transfer_cube", ["--control-hz", "5"]),
    ],
)
def test_collect_train_evaluate(env_id, options, tmp_path, capsys):
    data, run = tmp_path / "data", tmp_path / "run"
    collect = ["collect", "--env", env_id, *options, "--episodes", "2", "--image-size", "16", "--noise", "0.2"]
    assert main([*collect, "--root", str(data), "--workers", "1", "--image-mode", "image"]) == 0
    dataset = open_dataset(data)
    assert dataset.num_episodes == 2 and dataset.columns["next.success"][dataset.episode_to - 1].all()
    assert "command.joints" not in dataset.columns  # a benchmark reports none

    settings = ["method.steps=2", "method.batch_size=4", "threads=1", f"output_dir={run}", f"policy.options={TINY}"]
    recipe = env_id.partition("/")[0]
    assert main(["train", f"vla_stack/configs/{recipe}.yaml", f"data.root={data}", *settings]) == 0
    policy = run / "checkpoints" / "last" / "pretrained_model"
    config = json.loads((policy / "config.json").read_text())
    assert config["use_relative_actions"] is (config["robot"]["action_kind"] == "absolute")

    report = tmp_path / "report"
    arguments = ["--env", env_id, "--episodes", "1", "--videos", "0", "--workers", "0", "--out", str(report)]
    assert main(["eval", "--policy", str(policy), *arguments]) == 0
    (result,) = json.loads((report / "report.json").read_text())["results"]
    assert result["settings"]["env_options"]["cameras"] == [CAMERA[env_id]] and len(result["episodes"]) == 1
