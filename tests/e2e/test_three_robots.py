"""Three datasets with different cameras and action sizes: one policy that trains, resumes, and drives each robot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from vla_stack.cli import main
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.rollout.records import load_records
from vla_stack.schema import Observation

pytestmark = pytest.mark.slow

ROBOTS = {
    "arm7_tool": {"image_size": 32},
    "arm7_joints": {"image_size": 32, "options": {"control_mode": "joint_abs", "cameras": ("front",)}},
    "arm7_wrist": {"image_size": 24, "options": {"control_mode": "ee_delta", "cameras": ("wrist",)}},
}
SMALL = {"chunk_size": 6, "n_action_steps": 3, "num_inference_steps": 2, "vision_channels": [4, 8], "vision_maps": 2}
TINY = SMALL | {"width": 16, "expert_width": 16, "depth": 2, "heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe that ships, with small data, policy and budget."""
    base = tmp_path_factory.mktemp("mixture")
    recipe = yaml.safe_load((Path(__file__).parents[2] / "vla_stack/configs/mixture.yaml").read_text())
    for source in recipe["data"]["sources"]:
        root = base / source["embodiment"]
        collect(CollectConfig("pick", **ROBOTS[source["embodiment"]]), root, 2, workers=1, image_mode="image")
        source["root"] = str(root)
    recipe["policy"]["options"] |= TINY
    recipe |= {"threads": 1, "device": "cpu", "precision": "fp32"}
    recipe |= {"eval": {"every": 4, "envs": ["arm7_joints@sim/pick-v0"], "episodes": 1}}
    recipe["method"] |= {"batch_size": 12, "log_every": 2, "save_every": 2}
    recipe["method"]["optimizer"] |= {"warmup_steps": 2, "final_lr_ratio": 1.0}
    path = base / "mixture.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def run(recipe_file: Path) -> Path:
    out = recipe_file.parent / "run"
    assert main(["train", str(recipe_file), f"output_dir={out}", "method.steps=4"]) == 0
    return out


def weights(run: Path) -> bytes:
    return (run / "checkpoints/last/pretrained_model/model.safetensors").read_bytes()


def test_it_trains_and_resumes_bit_for_bit(recipe_file: Path, run: Path) -> None:
    cut = recipe_file.parent / "cut"
    assert main(["train", str(recipe_file), f"output_dir={cut}", "method.steps=2", "eval.every=0"]) == 0
    assert weights(cut) != weights(run)
    assert main(["train", "--resume", str(cut), "method.steps=4"]) == 0
    assert weights(cut) == weights(run)
    logs = [[json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in (cut, run)]
    resumed, whole = (next(r for r in log if r["step"] == 4 and "loss" in r) for log in logs)
    drawn = [resumed[f"samples/{name}"] for name in ROBOTS]
    assert sum(drawn) == 4 * 12 and min(drawn) > 0
    for key in [f"{what}/{name}" for what in ("loss", "samples") for name in ROBOTS]:
        assert resumed[key] == whole[key] > 0
    assert "eval/arm7_joints@sim/pick-v0/success" in logs[1][-1]


@pytest.mark.parametrize(
    ("name", "dims", "cameras"), [("arm7_tool", 5, 2), ("arm7_joints", 8, 1), ("arm7_wrist", 5, 1)]
)
def test_it_drives_each_robot(run: Path, tmp_path: Path, name: str, dims: int, cameras: int) -> None:
    policy = load_policy(run / "checkpoints/last/pretrained_model", embodiment=name)
    robot = policy.spec.robot
    assert (len(robot.action), len(robot.cameras)) == (dims, cameras)
    images = {c.name: np.full((c.height, c.width, 3), 90, np.uint8) for c in robot.cameras}
    state = np.zeros(len(robot.state), np.float32)
    assert policy.infer([Observation(state, images, "pick up the red cube")], seeds=[0]).actions.shape == (1, 6, dims)
    command = ["eval", "--policy", str(run), "--embodiment", name, "--episodes", "2", "--workers", "0", "--videos", "0"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert [len(r.episodes) for r in load_records(tmp_path / "report.json")] == [2]


def test_it_says_which_robots_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--policy", str(run), "--episodes", "1"]) == 1
    assert "choose one with --embodiment: arm7_tool, arm7_joints, arm7_wrist" in capsys.readouterr().err
    assert main(["eval", "--policy", str(run), "--embodiment", "arm8", "--episodes", "1"]) == 1
    assert "has no embodiment 'arm8'" in capsys.readouterr().err


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_mixture_is_trained_on(recipe_file: Path, run: Path, newcomer: bool) -> None:
    """Robots that it knows keep their statistics, also those that it does not see; others get their own."""
    out, start = recipe_file.parent / f"tuned-{newcomer}", run / "checkpoints/last/pretrained_model"
    recipe = yaml.safe_load(recipe_file.read_text())
    tool, joints, _ = recipe["data"]["sources"]
    recipe["data"]["sources"] = [joints, tool | {"embodiment": "newcomer"}] if newcomer else [joints]
    recipe["policy"] = {"pretrained": str(start)}
    path = recipe_file.parent / "tuned.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert main(["train", str(path), f"output_dir={out}", "method.steps=2", "eval.every=0"]) == 0
    assert weights(out) != weights(run)
    folders = (start, out / "checkpoints/last/pretrained_model")
    (before,), (after,) = (list(folder.glob("*embodiment*.safetensors")) for folder in folders)
    tables = [load_file(file) for file in (before, after)]
    for key, table in tables[0].items():
        assert (tables[1][key][:3] == table).all()
        if newcomer:  # the data of arm7_tool by another name
            assert (tables[1][key][3] == table[0]).all()
    policy = load_policy(out / "checkpoints/last/pretrained_model", embodiment="newcomer" if newcomer else "arm7_wrist")
    assert policy.spec.extras["embodiment"] in ("newcomer", "arm7_wrist")
