"""`vla data import` takes its topics from arguments or a file, and says what it made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import toy_bags as toy

from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset


def test_arguments_and_a_file_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bag, root = toy.write(tmp_path / "bag", toy.session(0.6)), tmp_path / "out"
    topics = ["--state", toy.STATE, "--action", toy.ACTION, "--task", "lift it", "--gripper", "finger=0:0.04"]
    camera = ["--camera", f"front={toy.FRONT}", "--rate", "25", "--unit", "lift=m", "--joints", "lift,finger"]
    assert main(["data", "import", str(bag), "--root", str(root), *topics, *camera]) == 0
    said = capsys.readouterr().out
    assert f"{bag}: 1 episodes" in said and "frames at 25 Hz. Oldest sample: state 1 ms, action" in said
    (tmp_path / "map.yaml").write_text(
        f"state: {toy.STATE}\naction: {toy.ACTION}\nrate_hz: 10\ntask: lift it\ncameras: {{front: {toy.FRONT}}}\n"
        "joints: [lift, finger]\nunits: {lift: m}\ngrippers: {finger: [0.0, 0.04]}\n"
    )
    file = ["--map", str(tmp_path / "map.yaml"), "--rate", "25"]  # arguments win
    assert main(["data", "import", str(bag), "--root", str(tmp_path / "file"), *file]) == 0
    one, other = open_dataset(root), open_dataset(tmp_path / "file")
    for name, column in one.columns.items():
        np.testing.assert_array_equal(column, other.columns[name])
    assert main(["data", "check", str(root), "--deep"]) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--root"),
        (["--root", "x"], "--state"),
        (["--root", "x", "--state", "/s", "--action", "/a", "--rate", "30"], "no instructions"),
        (["--root", "x", "--gripper", "finger=0"], "--gripper finger=0"),
        (["--root", "x", "--camera", "front"], "--camera front"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture, arguments, word: str) -> None:
    assert main(["data", "import", str(tmp_path / "bag.mcap"), *arguments]) == 1
    said = capsys.readouterr().err
    assert word in said and said.count("\n") == 1


def test_without_the_extra_its_name_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in [m for m in sys.modules if m.startswith(("vla_stack.data.bags", "mcap"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcap.exceptions", None)
    monkeypatch.setitem(sys.modules, "mcap", None)
    assert main(["data", "import", str(tmp_path / "x.mcap"), "--root", str(tmp_path / "d")]) == 1
    assert 'pip install "vla-stack[bags]"' in capsys.readouterr().err
