"""A checkpoint is there whole or not at all, whatever happens to the process or to the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from vla_stack.errors import UserError
from vla_stack.training import checkpoint as ckpt


class Killed(BaseException):
    """Stands for kill -9: nothing but what is on disk survives."""


def commit(root: Path, step: int, keep: int = 2) -> Path:
    def fill(directory: Path) -> None:
        (directory / "pretrained_model").mkdir()
        for name in ("config.json", "model.safetensors"):
            (directory / "pretrained_model" / name).write_text(f"{name} of step {step}")

    return ckpt.commit(root, step, fill, {"loader": [{"position": step}]}, keep)


def content(checkpoint: Path) -> str:
    return (checkpoint / "pretrained_model/model.safetensors").read_text()


def test_latest_is_the_newest_and_old_ones_go(tmp_path: Path) -> None:
    assert ckpt.latest(tmp_path) is None
    for step in (5, 10, 15):
        commit(tmp_path, step)
    assert ckpt.latest(tmp_path) == tmp_path / "000015"
    assert os.readlink(tmp_path / "last") == "000015"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000010", "000015", "last"]


CALLS = ("mkdir", "rename", "replace", "symlink", "fsync", "rmdir", "unlink")


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException | None = None) -> None:
    """Raise before the ``call``-th operation that changes the disk; of errors, that one alone."""
    count = 0

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > call and (error is None or count == call + 1):
                raise error or Killed
            return function(*args, **kwargs)

        return wrapped

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


def test_killed_while_a_checkpoint_of_the_same_step_replaces_it_leaves_one_of_them(tmp_path: Path) -> None:
    def commit_as(root: Path, name: str) -> Path:
        def fill(directory: Path) -> None:
            (directory / "pretrained_model").mkdir()
            (directory / "pretrained_model/model.safetensors").write_text(name)

        return ckpt.commit(root, 0, fill, {}, 1)

    outcomes = []
    for call in range(60):
        root = tmp_path / str(call)
        commit_as(root, "old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, call)
            try:
                commit_as(root, "new")
            except Killed:
                pass
        found = ckpt.latest(root)
        assert found == root / "000000"
        outcomes.append(content(found))
        commit_as(root, "last")  # and the next one cleans up
        assert sorted(p.name for p in root.iterdir()) == ["000000", "last"] and content(root / "000000") == "last"
    assert outcomes == sorted(outcomes, reverse=True) and {*outcomes} == {"old", "new"}


def test_killed_before_any_disk_operation_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    outcomes = []
    for call in range(60):
        root = tmp_path / str(call)
        commit(root, 5, keep=1)
        finished = True
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, call)
            try:
                commit(root, 10, keep=1)
            except Killed:
                finished = False
        found = ckpt.latest(root)
        assert found is not None
        assert content(found) == f"model.safetensors of step {int(found.name)}"
        outcomes.append((found.name, finished))
        commit(root, 15, keep=1)  # and the next one cleans up
        assert sorted(p.name for p in root.iterdir()) == ["000015", "last"]
    assert {name for name, _ in outcomes} == {"000005", "000010"}
    assert outcomes[-1] == ("000010", True)


def test_a_full_disk_ends_in_one_line_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    said = 0
    for call in range(30):
        root = tmp_path / str(call) / "checkpoints"
        commit(root, 5)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, call, OSError(errno.ENOSPC, "No space left on device"))
            try:
                commit(root, 10)
            except UserError as e:
                said += 1
                assert "No space left on device" in str(e) and f"vla train --resume {root.parent}" in str(e)
            except OSError:  # while what was replaced is cleared away
                pass
        found = ckpt.latest(root)
        assert found is not None and content(found) == f"model.safetensors of step {int(found.name)}"
        commit(root, 15)
        assert ckpt.latest(root) == root / "000015"
    assert said > 5


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "state"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, harm: str) -> None:
    commit(tmp_path, 5)
    file = commit(tmp_path, 10) / "pretrained_model/model.safetensors"
    if harm == "truncate":
        file.write_text("model")
    elif harm == "flip":
        file.write_text(content(tmp_path / "000010").replace("m", "n"))
    elif harm == "delete":
        file.unlink()
    else:
        (tmp_path / "000010/training_state/state.json").write_text("{")
    with pytest.warns(UserWarning, match="000010 is damaged"):
        assert ckpt.latest(tmp_path) == tmp_path / "000005"
    commit(tmp_path, 10)
    assert ckpt.latest(tmp_path) == tmp_path / "000010"


@pytest.mark.filterwarnings("ignore:checkpoint")
@pytest.mark.parametrize(("keep", "left"), [(1, ["000006", "last"]), (2, ["000004", "000006", "last"])])
def test_after_a_fall_back_what_is_written_stays_and_the_damaged_one_goes(
    tmp_path: Path, keep: int, left: list[str]
) -> None:
    commit(tmp_path, 4)
    (commit(tmp_path, 8) / "pretrained_model/model.safetensors").write_text("model")
    assert ckpt.latest(tmp_path) == tmp_path / "000004"
    assert commit(tmp_path, 6, keep) == ckpt.latest(tmp_path) == (tmp_path / "last").resolve()
    assert sorted(p.name for p in tmp_path.iterdir()) == left


@pytest.mark.filterwarnings("ignore:checkpoint")
def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    (commit(tmp_path, 5) / "pretrained_model/config.json").unlink()
    with pytest.raises(UserError, match="every checkpoint"):
        ckpt.latest(tmp_path)
