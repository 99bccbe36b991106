"""LeRobot's own lerobot-record and lerobot-rollout, unmodified, drive our simulated arm in real time."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from lerobot_commands import stock

from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset
from vla_stack.schema import ACTION, OBS_STATE

ROBOT = ("--robot.type=vla_robot", "--robot.driver=sim", "--robot.task=pick", "--robot.options={image_size: 64}")


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lerobot_robot") / "pick"
    assert main(["collect", "--task", "pick", "--episodes", "2", "--root", str(root), "--workers", "1"]) == 0
    return root


def commands_sent(printed: str) -> int:
    found = re.search(r"VlaRobot: (\d+) commands sent", printed)
    assert found, printed[-2000:]
    return int(found[1])


@pytest.mark.slow
@pytest.mark.timeout(900)  # a command starts in ten seconds on an idle machine, in minutes on a crowded one
def test_lerobot_record_records_our_robot(demonstrations: Path, tmp_path: Path) -> None:
    root = tmp_path / "recorded"
    printed = stock(
        "lerobot-record",
        *ROBOT,
        *("--teleop.type=vla_replay", f"--teleop.root={demonstrations}"),
        *("--dataset.repo_id=local/recorded", f"--dataset.root={root}", "--dataset.push_to_hub=false"),
        *("--dataset.num_episodes=2", "--dataset.episode_time_s=2", "--dataset.reset_time_s=0", "--dataset.fps=10"),
        *("--dataset.single_task=pick the cube", "--play_sounds=false"),
    )
    assert commands_sent(printed) > 0
    ours, theirs = open_dataset(demonstrations), open_dataset(root)
    for key in (OBS_STATE, ACTION):
        assert theirs.features[key]["names"] == ours.features[key]["names"]
    assert theirs.cameras == ours.cameras and theirs.num_episodes == 2
    assert np.ptp(theirs.columns[OBS_STATE][:, :3], axis=0).max() > 0.02  # metres: it moved


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lerobot_rollout_runs_our_policy_on_our_robot(demonstrations: Path, tmp_path: Path) -> None:
    # LeRobot's rollout runs no policy with relative actions, its own neither.
    recipe, run_dir = tmp_path / "small.yaml", tmp_path / "run"
    recipe.write_text(
        "policy: {options: {width: 32, expert_width: 32, depth: 1, use_relative_actions: false}}\n"
        "method: {steps: 4, batch_size: 4}\nthreads: 1\ndevice: cpu\n"
    )
    assert main(["train", str(recipe), f"data.root={demonstrations}", f"output_dir={run_dir}"]) == 0
    printed = stock(
        "lerobot-rollout",
        f"--policy.path={run_dir / 'checkpoints/last/pretrained_model'}",
        *ROBOT,
        *("--policy.device=cpu", "--strategy.type=base", "--task=pick the cube", "--fps=10", "--duration=4"),
        *("--play_sounds=false", "--return_to_initial_position=false"),
    )
    assert commands_sent(printed) > 0
