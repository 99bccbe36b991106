"""A collection is a function of task, seed and count, whoever did the work and however often it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from vla_stack.cli import main
from vla_stack.data import ChunkLoader, open_dataset
from vla_stack.data.collect import CollectConfig, collect
from vla_stack.errors import UserError

CONFIG = CollectConfig("pick", seed=3, noise=0.3, image_size=16)


@pytest.mark.slow
def test_same_episodes_whatever_the_workers_and_the_stops(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    collect(CONFIG, tmp_path / "one", 4, workers=1, image_mode="image")
    collect(CONFIG, tmp_path / "two", 2, workers=2, image_mode="image")  # stopped half-way
    tried, succeeded = collect(CONFIG, tmp_path / "two", 4, workers=2, image_mode="image")
    assert succeeded == 2 <= tried
    one, two = (open_dataset(tmp_path / name) for name in ("one", "two"))
    assert one.tasks == two.tasks and one.columns.keys() == two.columns.keys()
    for name in one.columns:
        np.testing.assert_array_equal(one.columns[name], two.columns[name], err_msg=name)
    frames = np.arange(one.num_frames)
    a, b = (ChunkLoader(d, 1, 1, progress=False).gather(frames) for d in (one, two))
    np.testing.assert_array_equal(a["observation.images.wrist"], b["observation.images.wrist"])

    assert one.columns["next.success"][one.episode_to - 1].all()
    assert (one.columns["command.sent"] != one.columns["action"]).any()  # the label stays clean
    assert collect(CONFIG, tmp_path / "one", 4) == (0, 0)
    with pytest.raises(UserError, match="of another seed"):
        collect(CollectConfig("pick", seed=4, image_size=16), tmp_path / "one", 5)

    assert main(["data", "info", str(tmp_path / "one")]) == 0
    assert "success   4/4" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "one")]) == 0
    min((tmp_path / "one/data").glob("*/*.parquet")).unlink()
    assert main(["data", "check", str(tmp_path / "one")]) == 1
    assert "holds 0 of its" in capsys.readouterr().out
    assert main(["data", "repair", str(tmp_path / "one")]) == 1
    assert "episodes after it are intact" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_collection_leaves_no_process_behind(tmp_path: Path) -> None:
    command = ["collect", "--task", "pick", "--privileged", "--episodes", "1000000", "--root", str(tmp_path / "d")]
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from vla_stack.cli import main; main(sys.argv[1:])", *command],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"TQDM_MININTERVAL": "0"},
    )  # fmt: skip
    assert process.stderr is not None
    while "success 1/1" not in process.stderr.readline():  # the progress bar: workers are at work
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert workers and not psutil.wait_procs(workers, timeout=60)[1]


def test_an_unknown_task_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task 'juggle' -- the tasks are pick"):
        collect(CollectConfig("juggle"), tmp_path / "d", 1)


def test_options_of_benchmarks_are_refused_for_our_tasks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["collect", "--task", "pick", "--control-mode", "ee_delta", "--root", str(tmp_path / "d")]) == 1
    assert "--control-mode and --visuals are for benchmarks" in capsys.readouterr().err


def test_attempt_seeds_differ_between_tasks_seeds_and_attempts() -> None:
    seeds = [CollectConfig(t, s).env_seed(i) for t in ("pick", "place") for s in (0, 1) for i in range(500)]
    assert len(set(seeds)) == len(seeds)
