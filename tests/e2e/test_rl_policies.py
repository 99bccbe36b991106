"""What RL leaves is a LeRobot policy directory: evaluated as in training, served, run by LeRobot."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from lerobot.scripts import lerobot_eval

import sim.lerobot_env  # noqa: F401  registers `vla_sim` with LeRobot
from vla_stack import envs
from vla_stack.cli import main
from vla_stack.envs.making import observe
from vla_stack.methods.off_policy.loop import OffPolicyLoop
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.schema import Observation
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.server import PolicyServer
from vla_stack.training.recipe import make
from vla_stack.verbs.serve import load_directory

LIMIT, EPISODES, SEED = 10, 4, 31
SAC = {"actor": [16], "critic": [16], "num_critics": 3, "batch": 8, "utd": 2, "layer_norm": True}
TINY = {
    "task": {"id": "sim/pick-v0", "options": {"max_episode_steps": LIMIT}},
    "eval": {"every": 10, "episodes": EPISODES, "seed": SEED, "num_envs": 3},
    "device": "cpu",
}
SHARED = {"offline": {"episodes": 3, "noise": [0.3]}, "horizon": 2, "steps": 20}
WSRL = {"sac": SAC, "offline_steps": 3, "warmup": 6, "cal_ql": {"draws": 2}}
EXPO = {"sac": SAC, "base": [16], "base_steps": 30, "samples": 3, "edits": 2}
METHODS = {
    "wsrl": {"name": "wsrl", **WSRL},
    "rlpd": {"name": "wsrl", **WSRL, "arm": "rlpd"},
    "cal_ql": {"name": "wsrl", **WSRL, "arm": "cal_ql"},
    "expo": {"name": "expo", **EXPO},
}


@pytest.fixture(scope="module", params=METHODS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp(request.param)
    OffPolicyLoop(make({**TINY, "method": SHARED | METHODS[request.param]}, "test"), run_dir).run()
    return run_dir


def pretrained(run: Path) -> Path:
    return run / "checkpoints/last/pretrained_model"


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 4])
def test_vla_eval_prints_what_training_logged(run: Path, tmp_path: Path, num_envs: int) -> None:
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    flags = f"--policy {run} --env sim/pick-v0 --mode sync --seed {SEED} --episodes {EPISODES} --max-steps {LIMIT}"
    assert (
        main(["eval", *flags.split(), *f"--num-envs {num_envs} --workers 0 --videos 0 --out {tmp_path}".split()]) == 0
    )
    episodes = json.loads((tmp_path / "report.json").read_text())["results"][0]["episodes"]
    assert np.mean([e["success"] for e in episodes]) == logged["eval/success"]
    assert np.mean([e["success"] - e["steps"] for e in episodes]) == logged["eval/return"]


@pytest.mark.slow
def test_it_is_served(run: Path) -> None:
    server = PolicyServer(lambda: load_directory(pretrained(run), "cpu", 1), "tcp://127.0.0.1:*")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        client = PolicyClient(server.endpoint)
        policy = load_policy(pretrained(run))
        rows = envs.make("sim/pick-v0", 1, policy.spec)
        assert rows.robot is not None and client.hello(rows.robot).model_version == policy.spec.model_version
        first = rows.reset([0], [0])[0]
        rows.close()
        observation = observe(first.observation, rows.robot, first.info["task"], 0)
        assert client.request(observation, rid=1, epoch=0, origin=0, seed=7)
        answers: list = []
        while not answers:
            answers = client.poll(timeout_ms=1000)
        np.testing.assert_allclose(answers[0].actions, policy.infer([observation], [7]).actions[0], atol=1e-6)
        client.close()
    finally:
        server.stop()
        thread.join()


@pytest.mark.slow
def test_it_exports(run: Path, tmp_path: Path) -> None:
    assert main(["export", "--policy", str(run), "--out", str(tmp_path)]) == 0
    policy, exported = load_policy(pretrained(run)), load_policy(tmp_path)
    rng = np.random.default_rng(0)
    seen = [Observation(rng.normal(size=len(policy.spec.robot.state)).astype(np.float32), {}, "") for _ in range(3)]
    wanted, got = (p.infer(seen, [1, 2, 3]).actions for p in (policy, exported))
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.slow
def test_lerobot_eval_runs_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        f"--policy.path={pretrained(run)}",
        *("--policy.device=cpu", "--env.type=vla_sim", "--env.task=pick", "--env.control_mode=ee_delta"),
        *("--env.cameras=[]", "--env.privileged=true", "--env.tool_target=true", f"--env.episode_length={LIMIT}"),
        *("--eval.n_episodes=2", "--eval.batch_size=2", "--eval.use_async_envs=false"),
        f"--output_dir={tmp_path}",
    ]
    monkeypatch.setattr(sys, "argv", ["lerobot-eval", *arguments])
    lerobot_eval.main()
    assert json.loads((tmp_path / "eval_info.json").read_text())["overall"]["n_episodes"] == 2
