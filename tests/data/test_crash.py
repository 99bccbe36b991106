"""Death at any system call of save_episode costs at most that episode, and the folder opens without help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import make

from vla_stack.data.dataset import open_dataset
from vla_stack.data.integrity import check, repair

# Forks one child for each system call that changes the dataset. The child records a second episode and dies at that
# call, before or after it, as kill -9 would have it: no handler and no `finally` runs.
CHILD = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from toy_robot import make

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
    for name in ("replace", "fsync", "link", "unlink"):
        setattr(os, name, dying(getattr(os, name)))

start = make(Path(sys.argv[2]) / "000", (3,), sys.argv[3])
for n in range(1, 200):
    root = shutil.copytree(start, start.with_name(f"{n:03d}"))
    child = os.fork()
    if child == 0:
        die_at(n)
        make(root, (4,), sys.argv[3], first=1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


@pytest.mark.slow
def test_death_at_every_step_of_a_commit(tmp_path: Path, mode: str) -> None:
    folder = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", CHILD, folder, str(tmp_path), mode], check=True)
    roots = sorted(tmp_path.iterdir())
    assert len(roots) > 15  # every rename, flush and removal of the commit had its turn
    counts: list[int] = []
    seen: set[frozenset] = set()
    for root in roots:
        episodes = open_dataset(root).num_episodes  # ours opens what the death left,
        files = frozenset(p.relative_to(root) for p in root.rglob("*.*") if p.parent.name != ".recording") | {episodes}
        counts.append(episodes)
        if files in seen:  # the rest takes its time: once for each distinct state
            continue
        seen.add(files)
        dataset = LeRobotDataset("local/toy", root=root, video_backend="pyav")  # and so does LeRobot's
        assert dataset.num_episodes == episodes
        assert dataset[len(dataset) - 1]["action"].shape == (2,)
        make(root, (2,), mode, first=2)  # recording continues and clears what was left
        assert check(root) == []
        assert open_dataset(root).num_episodes == episodes + 1
    assert counts == sorted(counts)  # there is one moment of commitment
    assert {1, 2} == set(counts)


def test_repair_takes_back_an_uncommitted_episode(tmp_path: Path, mode: str) -> None:
    root = make(tmp_path / "d", (3, 2), mode)
    info = (root / "meta/info.json").read_bytes()
    whole = {name: column.copy() for name, column in open_dataset(root).columns.items()}
    make(root, (4,), mode, first=2)
    (root / "meta/info.json").write_bytes(info)
    assert any("never committed" in p for p in check(root))
    assert open_dataset(root).num_episodes == 2  # readable even so
    report = repair(root)
    assert (report.episodes_before, report.episodes, report.frames) == (2, 2, 5)
    assert check(root) == []
    assert repair(root).actions == ()
    for name, column in open_dataset(root).columns.items():
        np.testing.assert_array_equal(column, whole[name])
