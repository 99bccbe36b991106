"""A mixture of robots with a pretrained backbone, co-trained on image-text pairs."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from small_backbone import make_paligemma, make_smolvlm

from vla_stack.cli import main
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

ROBOTS = {"two": (2, "front"), "three": (3, "top")}
OPTIONS = {"chunk_size": 4, "n_action_steps": 2, "num_inference_steps": 2, "expert_width": 16}
OPTIONS |= {"backbone_dtype": "float32"}


def record(root: Path, dims: int, camera: str) -> Path:
    names = tuple(Dim(f"j{i}.pos", "rad") for i in range(dims))
    spec = RobotSpec("test/arm", names, names, (Camera(camera, 32, 32),), 10.0)
    rng = np.random.default_rng(dims)
    with EpisodeRecorder(root, spec, image_mode="image") as recorder:
        for step in range(8):
            image = rng.integers(0, 256, (32, 32, 3), np.uint8)
            state = rng.normal(size=dims).astype(np.float32)
            recorder.add_frame(Observation(state, {camera: image}, "go", step, step * 10**8), state + np.float32(0.1))
        recorder.save_episode(success=True)
    return root


@pytest.fixture(scope="module", params=[make_smolvlm, make_paligemma], ids=["smolvlm", "paligemma"])
def recipe_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("co_training")
    backbone = request.param(base / "backbone", layers=2)
    pairs = base / "pairs"
    pairs.mkdir()
    lines = []
    for i, colour in enumerate(((0, 0, 255), (255, 0, 0), (0, 255, 0))):
        assert cv2.imwrite(str(pairs / f"{i}.png"), np.full((24, 40, 3), colour, np.uint8))
        lines.append(json.dumps({"file_name": f"{i}.png", "prompt": "Which?", "answer": ("red", "blue", "green")[i]}))
    (pairs / "metadata.jsonl").write_text("\n".join(lines))
    sources = [
        {"root": str(record(base / name, dims, camera)), "embodiment": name, "cameras": {"front": camera}}
        for name, (dims, camera) in ROBOTS.items()
    ]
    recipe = {
        "policy": {"options": OPTIONS | {"backbone": str(backbone), "keep_language_head": True}},
        "data": {"sources": sources, "text_pairs": {"root": str(pairs), "weight": 0.5, "batch_size": 2}},
        "method": {
            "optimizer": {"lr": 1e-3, "warmup_steps": 1, "final_lr_ratio": 1.0},
            **{"batch_size": 4, "log_every": 1, "save_every": 2},
        },
        **{"threads": 1, "device": "cpu"},
    }
    path = base / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def test_it_trains_resumes_and_drives_both_robots(recipe_file: Path) -> None:
    whole, cut = recipe_file.parent / "whole", recipe_file.parent / "cut"
    assert main(["train", str(recipe_file), f"output_dir={whole}", "method.steps=4"]) == 0
    assert main(["train", str(recipe_file), f"output_dir={cut}", "method.steps=2"]) == 0
    assert main(["train", "--resume", str(cut), "method.steps=4"]) == 0
    ends = [(run / "checkpoints/last/pretrained_model/model.safetensors").read_bytes() for run in (whole, cut)]
    assert ends[0] == ends[1]
    log = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(record["language_loss"] > 0 for record in log)
    assert log[-1]["samples/two"] + log[-1]["samples/three"] == 16
    for name, (dims, camera) in ROBOTS.items():
        policy = load_policy(whole / "checkpoints/last/pretrained_model", embodiment=name)
        image = np.zeros((32, 32, 3), np.uint8)
        seen = Observation(np.zeros(dims, np.float32), {camera: image}, "go")
        assert policy.infer([seen], seeds=[0]).actions.shape == (1, 4, dims)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.options.keep_language_head=false", "set policy.options.keep_language_head=true"),
        ("policy.options={}", "'data.text_pairs' is set and the policy has no backbone"),
    ],
)
def test_a_policy_that_cannot_speak_is_refused(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(["train", str(recipe_file), f"output_dir={recipe_file.parent / 'none'}", override]) == 1
    assert message in capsys.readouterr().err
