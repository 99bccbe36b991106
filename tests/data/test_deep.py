"""``vla data check --deep`` names what changed in a dataset, with and without digests, and training refuses it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_robot import make

from vla_stack import cli
from vla_stack.data import digests
from vla_stack.data.dataset import open_dataset
from vla_stack.data.digests import DIGESTS
from vla_stack.data.integrity import check, repair
from vla_stack.errors import UserError

DATA = "data/chunk-000/file-001.parquet"
VIDEO = "videos/observation.images.front/chunk-000/file-001.mp4"


@pytest.fixture
def plain(root: Path) -> Path:
    """A dataset without digests, as others write them."""
    (root / DIGESTS).unlink()
    return root


def flip_exponent(root: Path, column: str, bit: int) -> None:
    """Flip one bit of a value of episode 1 and write the table anew, checksums and all."""
    table = pq.read_table(root / DATA)
    values = np.stack(table[column].to_numpy()).astype(np.float32)
    values.view(np.uint32)[2, 0] ^= 1 << bit
    new = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    digests.write_pages(table.set_column(table.column_names.index(column), column, new), root / DATA)


@pytest.mark.parametrize("mode", ["video", "image"])
def test_what_was_recorded_is_well(tmp_path: Path, mode: str, capsys) -> None:
    root = make(tmp_path / "d", mode=mode)
    assert check(root, deep=True) == []
    (root / DIGESTS).unlink()
    assert cli.main(["data", "check", str(root), "--deep"]) == 0
    assert "it keeps no digests" in capsys.readouterr().out
    assert cli.main(["data", "seal", str(root)]) == 0 and check(root, deep=True) == []
    make(root, (2,), mode, first=1)  # and a recorder goes on with them
    assert check(root, deep=True) == [] and digests.drop_damaged(root) == []


@pytest.mark.parametrize("name", [DATA, VIDEO, "meta/info.json", "meta/robot.json", "meta/stats.json", DIGESTS])
def test_a_flipped_bit_anywhere_is_named(root: Path, name: str) -> None:
    whole = (root / name).read_bytes()
    for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 12):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (root / name).write_bytes(data)
        assert any(name in problem for problem in check(root, deep=True)), bit
        if name != VIDEO:
            with pytest.raises(UserError, match=Path(name).name):
                open_dataset(root)
    (root / name).write_bytes(whole)
    assert check(root, deep=True) == []


def test_swapped_and_destroyed_videos_are_named_with_their_episode(root: Path) -> None:
    other = root / VIDEO.replace("001", "000")
    mine, theirs = (root / VIDEO).read_bytes(), other.read_bytes()
    (root / VIDEO).write_bytes(theirs)
    other.write_bytes(mine)
    found = check(root, deep=True)
    assert [f"{VIDEO} (episode 1)" in found[1], "file-000.mp4 (episode 0)" in found[0]] == [True, True]
    other.write_bytes(theirs)
    (root / VIDEO).write_bytes(mine[: len(mine) // 2])
    assert check(root, deep=True) == [f"{VIDEO} (episode 1) is not what was recorded: its SHA-256 differs"]


@pytest.mark.parametrize("column", ["action", "observation.state"])
@pytest.mark.parametrize("bit", [30, 29, 28, 27, 26, 24, 23])
def test_a_flipped_exponent_is_named_without_digests(plain: Path, column: str, bit: int) -> None:
    flip_exponent(plain, column, bit)
    assert any(DATA in problem and "episode 1" in problem and column in problem for problem in check(plain, deep=True))


def test_training_stops_at_an_action_that_no_robot_has(plain: Path) -> None:
    flip_exponent(plain, "action", 30)
    with pytest.raises(
        UserError, match=rf"{DATA}: 'action' is .*e\+3\d, which no robot has, in episode 1, frame 2.*copy"
    ):
        open_dataset(plain)


def test_a_rate_that_is_not_the_frames_is_named(plain: Path) -> None:
    info = json.loads((plain / "meta/info.json").read_text())
    (plain / "meta/info.json").write_text(json.dumps(info | {"fps": 50}))
    with pytest.raises(
        UserError, match=r"info.json says 50 frames per second, the frames of .*file-000.* are 0.1 s apart"
    ):
        open_dataset(plain)
    assert any("runs at 10 frames per second, meta/info.json says 50" in problem for problem in check(plain, deep=True))


@pytest.mark.parametrize("harm", ["short", "dark", "cut", "gone"])
def test_videos_are_compared_with_their_rows_without_digests(plain: Path, tmp_path: Path, harm: str) -> None:
    file = plain / VIDEO
    if harm == "short":
        make(tmp_path / "other", (2,))
        shutil.copy(tmp_path / "other" / VIDEO.replace("001", "000"), file)
    elif harm == "dark":  # the other camera's
        shutil.copy(plain / VIDEO.replace("front", "wrist"), file)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    else:
        file.unlink()
    assert any(f"{VIDEO} (episode 1): " in problem for problem in check(plain, deep=True))


def test_values_beyond_the_robots_limits_are_named(plain: Path) -> None:
    robot = json.loads((plain / "meta/robot.json").read_text())
    robot["action"][0] |= {"low": -0.1, "high": 0.1}
    (plain / "meta/robot.json").write_text(json.dumps(robot))
    found = [problem for problem in check(plain, deep=True) if "its limits are -0.1 to 0.1" in problem]
    assert found and "tcp_x.pos of 'action' is" in found[0] and "(episode 0, frame " in found[0]


def test_a_lost_line_leaves_files_without_a_digest(root: Path) -> None:
    lines = (root / DIGESTS).read_bytes().splitlines(keepends=True)
    (root / DIGESTS).write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    found = check(root, deep=True)
    assert f"{DIGESTS}: line {len(lines)} is damaged" in found
    assert "data/chunk-000/file-002.parquet (episode 2) has no digest in meta/digests.jsonl" in found
    repair(root)
    assert digests.drop_damaged(root) == []


def test_an_append_that_fails_leaves_no_half_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (root / DIGESTS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            digests.record(root, {"x": b"y"})
    assert (root / DIGESTS).read_bytes() == before
