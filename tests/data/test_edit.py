"""A dataset made of others is there with all its episodes or not at all, and holds none of them twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from labelled_toy import add_episode, make_labelled, open_labelled
from toy_robot import make

from vla_stack.cli import main
from vla_stack.data import edit
from vla_stack.data.compact import compact
from vla_stack.data.dataset import open_dataset
from vla_stack.data.edit import backfill, merge, select
from vla_stack.data.integrity import check
from vla_stack.errors import UserError


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path / "one", (6, 4)), make(tmp_path / "two", (5, 3), first=2)


@pytest.mark.parametrize("kind", ["merge", "select"])
def test_killed_in_the_middle(tmp_path: Path, parts: tuple[Path, Path], kind: str) -> None:
    """The process dies after an episode; nothing has the new dataset's name, and another try succeeds."""
    target = tmp_path / "all"
    writing = (lambda: merge(parts, target)) if kind == "merge" else (lambda: select(parts[0], [0, 1], target))
    for how in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: (_ for _ in ()).throw(KeyboardInterrupt)):
        if (child := os.fork()) == 0:
            commit = edit.EpisodeStore.commit
            edit.EpisodeStore.commit = lambda *a, how=how, commit=commit: (commit(*a), list(how() or ()))  # type: ignore
            with contextlib.suppress(BaseException):
                writing()
            os._exit(1)
        os.waitpid(child, 0)
        assert not target.exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []  # an interrupt takes away what is left
    assert writing() == (4 if kind == "merge" else 2)
    assert check(target, deep=True) == [] and {p.name for p in tmp_path.iterdir()} == {"one", "two", "all"}


def test_a_packed_or_damaged_source_is_named_before_anything_is_written(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit, "built", lambda *a: pytest.fail("writing has begun"))
    one, two = parts
    video = two / "videos/observation.images.front/chunk-000/file-001.mp4"
    video.rename(tmp_path / "away.mp4")
    with pytest.raises(UserError, match=r"two/.*file-001.mp4 holds 0 frames, 3 are needed -- run `vla data check"):
        merge([one, two], tmp_path / "all")
    (tmp_path / "away.mp4").rename(video)
    compact(two)
    with pytest.raises(UserError, match=r"two/.* holds several episodes -- merge with"):
        merge([one, two], tmp_path / "all")
    with pytest.raises(UserError, match="holds several episodes"):
        select(two, [1], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_place_that_is_taken_is_left_as_it_is(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    target = tmp_path / "all"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="all exists -- merge into a new folder"):
        merge(parts, target)
    (target / "notes.txt").unlink()
    assert merge(parts, target) == 4 and check(target) == []


@pytest.mark.parametrize("alike", ["itself", "link", "copy", "backfilled"])
def test_no_episode_is_merged_twice(tmp_path: Path, parts: tuple[Path, Path], alike: str) -> None:
    one, again = parts[0], tmp_path / "again"
    if alike == "itself":
        again = one
    elif alike == "link":
        again.symlink_to(one)
    else:
        shutil.copytree(one, again)
    if alike == "backfilled":
        backfill(again)
    with pytest.raises(UserError, match=r"episode 0 of .* is in more than one of the datasets.* -- name each once"):
        merge([one, parts[1], again], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_pending_episodes_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_labelled(tmp_path / "one", (("00", True),)), tmp_path / "two"
    with open_labelled(two) as recorder:
        add_episode(recorder, "111", 6)
        recorder.save_episode(True, uid=6)
        add_episode(recorder, "123", 7)
        recorder.save_episode(False, pending=True, uid=7)
    assert main(["data", "merge", str(one), str(two), "--into", str(tmp_path / "all")]) == 0
    said = capsys.readouterr().out
    assert f"{two}: left out 1 pending episodes" in said and f"{one}: left" not in said
    assert open_dataset(tmp_path / "all").num_episodes == 2
