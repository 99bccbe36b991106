"""Nothing loaded is code: hostile datasets, runs, constraints and policies start no program and write nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_vla import make_policy, make_stats

from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

HERE = Path(__file__).resolve().parent
ROBOT = RobotSpec("toy", (Dim("x.pos", "m"),), (Dim("x.pos", "m"),), (Camera("front", 16, 16),), 10.0)


@pytest.mark.slow
def test_hostile_files_are_refused_or_read_as_data(tmp_path: Path) -> None:
    with EpisodeRecorder(tmp_path / "data", ROBOT) as recorder:
        for k in range(3):
            picture = {"front": np.full((16, 16, 3), 40 * k, np.uint8)}
            recorder.add_frame(Observation(np.zeros(1, np.float32), picture, "go", k, k), np.zeros(1, np.float32))
        recorder.save_episode(True)
    policy = make_policy()
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path / "policy")
    command = [sys.executable, str(HERE / "hostile_files.py")]
    command += [str(tmp_path / name) for name in ("all", "data", "policy")] + ["2"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["count"] >= 200
    assert seen["programs"] == [] and seen["writes"] == []
    assert seen["odd"] == [] and seen["kept"]
