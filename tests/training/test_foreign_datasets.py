"""Datasets of LeRobot's own writer, with other names, orders and columns than ours: in use, not only opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from training_fakes import SIDE

from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.layout import ROBOT, write_json
from vla_stack.data.trainable import trainable
from vla_stack.evaluation.recorded import recorded_robot
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import Observation, past_key
from vla_stack.training.augmentation import augmented, is_picture
from vla_stack.training.recipe import Augmentation

STATE, ACTION, CAMERA = 3, 2, "observation.image"
SHAPE = (SIDE, SIDE, 3)


def written(root: Path, without: str = "", shape: tuple[int, int, int] = SHAPE) -> Path:
    """Three episodes with one camera, and neither a robot nor success."""
    channels_first = shape[0] == 3
    features = {
        CAMERA: {
            "dtype": "image",
            "shape": shape,
            "names": ["channels", "height", "width"] if channels_first else ["height", "width", "channels"],
        },
        "observation.state": {"dtype": "float32", "shape": (STATE,), "names": None},
        "action": {"dtype": "float32", "shape": (ACTION,), "names": None},
    }
    features.pop(without, None)
    dataset = LeRobotDataset.create("local/theirs", 10, features, root=root, use_videos=False)
    rng = np.random.default_rng(0)
    for _ in range(3):
        for _ in range(8):
            frame: dict[str, Any] = {
                CAMERA: rng.integers(0, 256, shape, np.uint8),
                "observation.state": rng.normal(size=STATE).astype(np.float32),
                "action": rng.normal(size=ACTION).astype(np.float32),
            }
            frame.pop(without, None)
            dataset.add_frame({**frame, "task": "do it"})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    assert main(["data", "check", str(root), "--deep"]) == 0
    return root


def train(recipe_file: Path, root: Path, run_dir: Path, *more: str) -> int:
    plain = ["method.steps=2", "policy.options.use_relative_actions=false"]
    return main(["train", str(recipe_file), f"data.root={root}", f"output_dir={run_dir}", *plain, *more])


@pytest.mark.parametrize("several", [False, True])
def test_a_camera_of_another_name_is_trained_on_and_served(several: bool, recipe_file: Path, tmp_path: Path) -> None:
    root = written(tmp_path / "theirs")
    named = [f"data.root=[{root},{written(tmp_path / 'more')}]", f"data.cameras=[{CAMERA}]"] if several else []
    assert train(recipe_file, root, tmp_path / "run", *named) == 0
    policy = load_policy(tmp_path / "run/checkpoints/last/pretrained_model")
    assert [c.name for c in policy.spec.robot.cameras] == [CAMERA]
    seen = [Observation(np.zeros(STATE, np.float32), {CAMERA: np.full(SHAPE, v, np.uint8)}, "do it") for v in (0, 255)]
    black, white = policy.infer(seen, seeds=[0, 0]).actions
    assert np.isfinite(black).all() and not np.array_equal(black, white)


def test_its_pictures_are_augmented_and_its_past_has_a_key_of_its_own() -> None:
    batch = {CAMERA: torch.zeros(2, SIDE, SIDE, 3, dtype=torch.uint8), f"{CAMERA}_is_pad": torch.zeros(2, dtype=bool)}
    assert [key for key in batch if is_picture(key, batch[key])] == [CAMERA]
    changed = augmented({CAMERA: batch[CAMERA] + 128}, Augmentation(), torch.Generator().manual_seed(0))
    assert not torch.equal(changed[CAMERA], batch[CAMERA] + 128)
    assert past_key(CAMERA) == f"observation.past.{CAMERA}" and past_key("observation.images.a") == "observation.past.a"


def test_episodes_whose_success_nobody_recorded_are_imitated(recipe_file: Path, tmp_path: Path) -> None:
    root = written(tmp_path / "theirs")
    write_json(root / ROBOT, recorded_robot(open_dataset(root)).to_json())
    assert read_robot_spec(root) and main(["data", "backfill", str(root)]) == 0
    assert trainable(open_dataset(root), "rac").all()  # type: ignore[union-attr]
    assert train(recipe_file, root, tmp_path / "run") == 0


def test_without_actions_there_is_nothing_to_learn_or_view(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = written(tmp_path / "theirs", without="action")
    assert train(recipe_file, root, tmp_path / "run") == 1
    assert f"data.root[0]: {root} has no column 'action'" in capsys.readouterr().err
    assert main(["data", "view", str(root), "--episode", "0", "--save", str(tmp_path / "x.rrd")]) == 1
    assert f"{root} has no column 'action'" in capsys.readouterr().err


def test_pictures_with_their_channels_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path / "theirs", shape=(3, 48, 64))
    assert main(["data", "info", str(root)]) == 0
    assert f"{CAMERA}: 64x48, image" in capsys.readouterr().out


def test_a_view_is_saved_into_a_folder_that_is_made(tmp_path: Path) -> None:
    file = tmp_path / "new" / "episode.rrd"
    assert main(["data", "view", str(written(tmp_path / "theirs")), "--episode", "0", "--save", str(file)]) == 0
    assert file.stat().st_size
