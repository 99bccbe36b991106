"""A dataset of LeRobot's own writer, of an SO-101 in degrees or in percent of its joints' ranges, in SI units."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from robot_drivers.lerobot_units import describe
from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset, read_episode_rows
from vla_stack.data.features import read_robot_spec
from vla_stack.data.layout import STATS, read_json
from vla_stack.lerobot_units import factors
from vla_stack.serving.messages import robot_difference

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
NAMES = [f"{name}.pos" for name in (*JOINTS, "gripper")]
CALIBRATION = {
    name: {"id": i + 1, "drive_mode": i % 2, "homing_offset": 0, "range_min": 900 + 10 * i, "range_max": 3100 - 30 * i}
    for i, name in enumerate((*JOINTS, "gripper"))
}
RNG = np.random.default_rng(0)
TICKS = np.stack([RNG.uniform(c["range_min"], c["range_max"], 12) for c in CALIBRATION.values()], 1)


def spoken(mode: str) -> np.ndarray:
    """The same ticks as LeRobot normalises them: degrees about the middle, or percent of the range; percent last."""
    low, high = (np.array([c[key] for c in CALIBRATION.values()]) for key in ("range_min", "range_max"))
    part = (TICKS - low) / (high - low)
    values = (TICKS - (low + high) / 2) * 360 / 4095
    if mode == "percent":
        turned = np.array([-1.0 if c["drive_mode"] else 1.0 for c in CALIBRATION.values()])
        values = (part * 200 - 100) * turned
    values[:, -1] = part[:, -1] * 100
    return values.astype(np.float32)


def written(root: Path, values: np.ndarray, names: list[str] | None = NAMES) -> Path:
    """Two episodes of six frames."""
    vector = {"dtype": "float32", "shape": (values.shape[1],), "names": names}
    camera = {"dtype": "image", "shape": (32, 48, 3), "names": ["height", "width", "channels"]}
    features = {"observation.images.front": camera, "observation.state": vector, "action": vector}
    dataset = LeRobotDataset.create(
        "local/theirs", 30, features, root=root, robot_type="so101_follower", use_videos=False
    )
    for i, row in enumerate(values):
        picture = np.full((32, 48, 3), i, np.uint8)
        dataset.add_frame(
            {"observation.images.front": picture, "observation.state": row, "action": row, "task": "do it"}
        )
        if i % 6 == 5:
            dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return root


def test_degrees_become_radians_and_percent_ratios_and_the_arm_is_that_of_the_driver(tmp_path: Path) -> None:
    source, target = written(tmp_path / "theirs", spoken("degrees")), tmp_path / "ours"
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    assert main(["data", "import", str(source), "--root", str(target)]) == 0
    assert main(["data", "check", str(target), "--deep"]) == 0
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before

    want = (spoken("degrees") * factors(NAMES, {})).astype(np.float32)
    dataset = open_dataset(target)
    for key in ("observation.state", "action"):
        np.testing.assert_allclose(dataset.columns[key], want, atol=1e-6)
        np.testing.assert_allclose(read_json(target / STATS)[key]["max"], want.max(0), atol=1e-6)
        for row, of in zip(read_episode_rows(target, with_stats=True), (want[:6], want[6:]), strict=True):
            np.testing.assert_allclose(row[f"stats/{key}/mean"], of.mean(0), atol=1e-5)
    theirs = LeRobotDataset("local/ours", root=target)
    np.testing.assert_allclose(theirs[7]["action"], want[7], atol=1e-6)

    robot = read_robot_spec(target)
    driver = tuple(describe(name, {}, {}, 2.0, (-1.0, 1.0)) for name in NAMES)
    assert robot_difference(type(robot)("so101", driver, driver, robot.cameras, 30.0), robot) is None
    assert [dim.kind for dim in robot.action] == [dim.kind for dim in driver]


def test_percent_of_calibrated_ranges_become_the_same_radians(tmp_path: Path) -> None:
    file = tmp_path / "arm.json"
    file.write_text(json.dumps(CALIBRATION))
    found = []
    for mode, more in (("degrees", ()), ("percent", ("--calibration", str(file)))):
        source, target = written(tmp_path / mode, spoken(mode)), tmp_path / f"si-{mode}"
        assert main(["data", "import", str(source), "--root", str(target), *more]) == 0
        found.append(open_dataset(target).columns["action"])
    np.testing.assert_allclose(*found, atol=1e-5)


def test_each_of_two_arms_has_a_calibration_of_its_own(tmp_path: Path) -> None:
    wider = {
        name: {**c, "range_min": c["range_min"] - 100, "range_max": c["range_max"] + 100}
        for name, c in CALIBRATION.items()
    }
    for name, of in (("a", CALIBRATION), ("b", wider)):
        (tmp_path / f"{name}.json").write_text(json.dumps(of))
    both = np.tile(spoken("percent"), 2)
    source = written(tmp_path / "theirs", both, [f"{arm}_{name}" for arm in ("left", "right") for name in NAMES])
    files = [f"--calibration={arm}_={tmp_path / name}.json" for arm, name in (("left", "a"), ("right", "b"))]
    assert main(["data", "import", str(source), "--root", str(tmp_path / "ours"), *files]) == 0
    left, right = np.split(open_dataset(tmp_path / "ours").columns["action"], 2, axis=1)
    np.testing.assert_allclose(left, spoken("degrees") * factors(NAMES, {}), atol=1e-5)
    ranges = np.array([[c[n]["range_max"] - c[n]["range_min"] for n in JOINTS] for c in (CALIBRATION, wider)])
    np.testing.assert_allclose(right[:, :5] / left[:, :5], np.tile(ranges[1] / ranges[0], (12, 1)), rtol=1e-4)


@pytest.mark.parametrize(
    "names, values, more, message",
    [
        (NAMES, spoken("degrees") * 6, (), "'shoulder_pan.pos' would be from .* degrees -- say what it is"),
        (NAMES, spoken("degrees") - 120 * (np.arange(6) == 5), (), "'gripper.pos' would be from .* percent"),
        (["a", *NAMES[1:]], spoken("degrees"), (), "the unit of 'a' is unknown"),
        (None, spoken("degrees"), (), "'observation.state' does not name its dimensions"),
        (NAMES, spoken("percent"), ("--calibration", "arm.json"), "has no 'elbow_flex'"),
        (NAMES, spoken("percent"), ("--calibration", "odd.json"), "is no calibration of LeRobot's"),
        (NAMES, spoken("degrees"), ("--rate", "30"), "--rate is for recordings of ROS"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path, monkeypatch, capsys, names, values, more, message):
    monkeypatch.chdir(tmp_path)
    Path("arm.json").write_text(json.dumps({name: CALIBRATION[name] for name in JOINTS[:2]}))
    Path("odd.json").write_text(json.dumps({"shoulder_pan": 3}))
    source = written(tmp_path / "theirs", values.astype(np.float32), names)
    assert main(["data", "import", str(source), "--root", "ours", *more]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["arm.json", "odd.json", "theirs"]


def test_what_is_in_si_units_already_is_not_converted_twice(tmp_path: Path, capsys) -> None:
    source = written(tmp_path / "theirs", spoken("degrees"))
    assert main(["data", "import", str(source), "--root", str(tmp_path / "ours")]) == 0
    assert main(["data", "import", str(tmp_path / "ours"), "--root", str(tmp_path / "again")]) == 1
    assert "says what the dataset's numbers mean" in capsys.readouterr().err
