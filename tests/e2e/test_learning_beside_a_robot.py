"""A robot, a server and a learner as three programs: what the robot records comes back to it as another policy."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from robot_drivers import make_driver
from vla_stack.cli import main
from vla_stack.console.run_recording import RunRecording
from vla_stack.data.dataset import open_dataset
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.frames import version_number
from vla_stack.runtime.node import RobotNode
from vla_stack.verbs.demo import VLA, server

pytestmark = pytest.mark.slow

TINY = (
    *("vision_channels=[4, 8]", "vision_maps=2", "width=16", "expert_width=16", "depth=2", "heads=2", "head_dim=8"),
    *("chunk_size=6", "n_action_steps=3", "num_inference_steps=2"),
)
LEARNER = (
    "method={name: expo_vla, live: LIVE, iterations: 9, episodes: 1, warmup: 1, samples: 2, edits: 1, save_every: 1, "
    "keep: 3, sac: {actor: [8], critic: [8], num_critics: 2, batch: 4, utd: 1, layer_norm: true}}"
)
TICKS, EPISODES = 8, 60  # of an episode; after so many nothing is to be expected any more


def test_the_policy_that_drives_is_the_one_that_was_learnt_meanwhile(tmp_path: Path) -> None:
    data, start, run, live = (tmp_path / name for name in ("data", "start", "run", "live"))
    collect(CollectConfig("pick", image_size=32), data, 2, workers=1, image_mode="image")
    options = [f"policy.options.{option}" for option in TINY]
    small = ["method.steps=1", "method.batch_size=4", "threads=1", "device=cpu", "precision=fp32"]
    assert main(["train", "pick", f"data.root={data}", f"output_dir={start}", *options, *small]) == 0
    words = [f"policy={start}", f"data.root={data}", f"output_dir={run}", LEARNER.replace("LIVE", str(live))]
    with (tmp_path / "learner.log").open("wb") as log:
        learner = subprocess.Popen([*VLA, "train", "rl_robot", *words], stdout=log, stderr=log)
    try:
        while not (run / "checkpoints" / "last").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"the learner ended with {learner.wait(0.1)}: {(tmp_path / 'learner.log').read_text()}")
        driver = partial(make_driver, "sim", task="pick", image_size=32)
        with server(run, tmp_path / "server.log", "--follow", "--max-batch", "1") as endpoint:
            how = ExecutorConfig(mode="sync")
            with RobotNode(endpoint, driver, how, rearm=lambda: True) as node:
                first = node.model_version
                with RunRecording(live, node.robot, node.joints) as recording:
                    for seed in range(EPISODES):
                        recording.begin(seed)
                        node.run_episode(seed, TICKS, None, recording.frame)
                        recording.end(success=seed % 2 == 0)
                        if node.counters["policies swapped"]:
                            break
                assert node.counters["policies swapped"] and node.model_version != first
                versions = version_number(first), version_number(node.model_version)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(60) == 0, (tmp_path / "learner.log").read_text()
    finally:
        learner.kill()
        learner.wait()
    data = open_dataset(live)
    own, last = data.columns["policy_version"], data.episode_from[-1]  # the server changes policies as one begins
    assert (set(own[:last].tolist()), set(own[last:].tolist())) == ({versions[0]}, {versions[1]})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learnt = rows[-1]["step"]
    assert 1 <= learnt <= data.num_episodes and rows[-1]["env_steps"] <= learnt * TICKS
    assert resolve_policy(str(run)).parent.resolve().name == f"{learnt:06d}"
