"""Pending episodes: undo never edits the dataset, and death at any system call loses at most the running episode."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from labelled_toy import add_episode, make_labelled, open_labelled
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import EXTRA, JOINTS, SPEC, frames

from vla_stack.data.dataset import open_dataset
from vla_stack.data.integrity import check
from vla_stack.data.pending import count_pending
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import EpisodeFacts, read_facts
from vla_stack.errors import UserError

CHILD = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from labelled_toy import add_episode, make_labelled, open_labelled

def die_at(n):
    calls = 0
    def dying(call):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == n and n % 2:
                os._exit(9)
            try:
                return call(*args, **kwargs)
            finally:
                if calls == n:
                    os._exit(9)
        return wrapped
    for name in ("replace", "fsync", "link", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))

start = make_labelled(Path(sys.argv[2]) / "000", (("00", True),))
with open_labelled(start) as recorder:
    for uid in (7, 8):
        add_episode(recorder, "123", uid)
        recorder.save_episode(False, pending=True, uid=uid)
for n in range(1, 400):
    root = shutil.copytree(start, start.with_name(f"{n:03d}"))
    log = os.open(root.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    child = os.fork()
    if child == 0:
        die_at(n)
        with open_labelled(root) as recorder:
            add_episode(recorder, "1123", 9)
            recorder.save_episode(True, pending=True, uid=9)
            os.write(log, b"9")
            recorder.commit(7)
            recorder.discard(8)
            recorder.undo(8)
        os._exit(0)
    os.close(log)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


def digest(root: Path) -> str:
    """Hash of every file of a dataset, by name and content."""
    out = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        out.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return out.hexdigest()


@pytest.mark.slow
def test_death_at_every_step_loses_no_ended_episode(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path)], check=True)
    roots = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    assert len(roots) > 40
    seen: set[frozenset] = set()
    for root in roots[1:]:
        files = frozenset(str(p.relative_to(root)) for p in root.rglob("*") if p.parent.name != ".recording")
        if files in seen:
            continue
        seen.add(files)
        discarded = any(p.name.endswith("8.discarded") for p in (root / ".pending").glob("*"))
        with open_labelled(root) as recorder:
            committed = sorted(set(open_dataset(root).columns["episode_uid"].tolist()))
            known = [*committed, *recorder.pending]
            assert len(known) == len(set(known))  # nothing twice
            assert {1, 7} <= set(known) and (discarded or 8 in known)
            assert 9 in known or not root.with_suffix(".log").read_bytes()
            for uid in recorder.pending:
                recorder.commit(uid)
            assert recorder.num_episodes == len(known) and recorder.pending == []
        assert check(root) == []
        assert set(read_facts(root)) >= set(known)


def test_discard_and_undo_leave_the_dataset_as_keeping_does(tmp_path: Path) -> None:
    digests = []
    for undone in (False, True):
        root = make_labelled(tmp_path / str(undone), (("000", True),))
        with open_labelled(root) as recorder:
            before = digest(root)
            add_episode(recorder, "1223", 5)
            assert recorder.save_episode(True, pending=True, uid=5, facts=EpisodeFacts("end_intervened", "rac", 1)) == 5
            if undone:
                recorder.discard(5, "by mistake")
                assert recorder.pending == []
                recorder.undo(5)
            add_episode(recorder, "11", 6)  # the next one is running while the operator decides
            assert recorder.commit(5) == 1
            recorder.discard_episode()
        digests.append(digest(root))
        assert before != digests[-1]
        assert read_facts(root)[5]["n_recoveries"] == 1 and read_facts(root)[5]["human_frames"] == 3
    assert digests[0] == digests[1]


def test_pending_episodes_wait_for_the_next_recorder_and_discarded_ones_do_not(tmp_path: Path) -> None:
    root = make_labelled(tmp_path / "d", (("00", True),))
    with open_labelled(root) as recorder:
        for uid in (3, 4):
            add_episode(recorder, "1123", uid)
            recorder.save_episode(False, pending=True, uid=uid)
        recorder.discard(3, "bad")
        with pytest.raises(UserError, match="not pending"):
            recorder.commit(3)
        assert count_pending(root) == 1
    with open_labelled(root) as recorder:
        assert recorder.pending == [4]
        with pytest.raises(UserError, match="not discarded"):
            recorder.undo(3)
        assert recorder.commit(4) == 1
    assert LeRobotDataset("local/toy", root=root, video_backend="pyav").num_episodes == 2
    facts = read_facts(root)
    assert facts[3]["outcome"] == "discarded" and facts[3]["discard_reason"] == "bad" and 4 in facts


def refuse(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("module", "name"), [(os, "replace"), (os, "fsync")])
def test_a_full_disk_is_named_and_the_decision_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module, name: str
) -> None:
    root = make_labelled(tmp_path / "d", (("00", True),))
    with open_labelled(root) as recorder:
        add_episode(recorder, "1123", 5)
        recorder.save_episode(False, pending=True, uid=5)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(UserError, match=r"-5 could not be discarded \(.*No space.*\) -- free disk space"):
                recorder.discard(5)
        assert recorder.pending == [5]
        recorder.discard(5)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(UserError, match=r"-5.discarded could not be restored \(.*No space"):
                recorder.undo(5)
        recorder.undo(5)
        assert recorder.commit(5) == 1


@pytest.mark.parametrize(("module", "name"), [(os, "replace"), (shutil, "rmtree")])
def test_discarded_episodes_that_could_not_be_deleted_are_so_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module, name: str
) -> None:
    root = make_labelled(tmp_path / "d", (("00", True),))
    with open_labelled(root) as recorder:
        add_episode(recorder, "1123", 5)
        recorder.save_episode(False, pending=True, uid=5)
        recorder.discard(5, "bad")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(UserError, match=r"-5.discarded could not be deleted"):
                recorder._pending.purge()
    assert list((root / ".pending").iterdir()) == [] and read_facts(root)[5]["discard_reason"] == "bad"


def test_a_committed_episode_is_pending_no_longer_whatever_is_left_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_labelled(tmp_path / "d", (("00", True),))
    with open_labelled(root) as recorder:
        add_episode(recorder, "1123", 5)
        recorder.save_episode(False, pending=True, uid=5)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
            assert recorder.commit(5) == 1
        assert recorder.pending == []
    assert list((root / ".pending").iterdir()) == [] and read_facts(root)[5]["outcome"] != "discarded"
    assert check(root) == []


def test_pending_needs_label_columns(tmp_path: Path) -> None:
    with EpisodeRecorder(tmp_path / "d", SPEC, "image", JOINTS, EXTRA) as recorder:
        obs, action, joints = next(frames(0, 1))
        recorder.add_frame(obs, action, joints, intervention=False, force=action.repeat(2)[:3])
        with pytest.raises(UserError, match="episode_uid"):
            recorder.save_episode(True, pending=True)
