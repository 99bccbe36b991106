"""What a command imports before its first word: a fresh process must not load what its policy does not need."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vla_stack.cli import main

HEAVY = ("transformers", "diffusers", "datasets", "torchvision", "pandas", "scipy", "peft", "torch._dynamo")
REPORT = f"""
import json, sys
def heavy(): return [name for name in {HEAVY!r} if name in sys.modules]
"""


def fresh(code: str, *args: object) -> dict[str, object]:
    """What the last line of a new process says, as JSON."""
    done = subprocess.run([sys.executable, "-c", REPORT + code, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


RUN = """
from vla_stack.cli import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "heavy": heavy()}))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "pick_onnx"
    assert main(["export", "--policy", "shipped", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("kind", ["shipped", "exported"])
def test_an_evaluation_loads_its_own_policy_alone(kind: str, exported: Path, tmp_path: Path) -> None:
    policy = exported if kind == "exported" else "shipped"
    short = ["--episodes", 1, "--max-steps", 12, "--workers", 0, "--videos", 0, "--out", tmp_path / "report"]
    assert fresh(RUN, "eval", "--policy", policy, *short) == {"code": 0, "heavy": []}


@pytest.mark.parametrize("kind", ["shipped", "exported"])
def test_a_server_loads_its_own_policy_alone(kind: str, exported: Path) -> None:
    serve = ["serve", "--policy", exported if kind == "exported" else "shipped", "--endpoint", "tcp://127.0.0.1:*"]
    command = [sys.executable, "-c", REPORT + RUN, *map(str, serve)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("READY")
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.communicate()[0]) == {"code": 0, "heavy": []}
    finally:
        process.kill()
        process.wait()


AFTERWARDS = """
from vla_stack.lerobot_core import PreTrainedConfig, PreTrainedPolicy, lerobot_types, make_pre_post_processors
import lerobot.policies.factory as factory
before = heavy()
import lerobot.policies
from lerobot.policies import ACTConfig, GrootConfig, PreTrainedPolicy as real
from lerobot import configs, envs, processor
print(json.dumps({
    "before": before,
    "same": real is PreTrainedPolicy and configs.PreTrainedConfig is PreTrainedConfig,
    "types": set(PreTrainedConfig.get_known_choices()) == set(lerobot_types()),
    "steps": "tokenizer_processor" in processor.ProcessorStepRegistry.list(),
    "later": [isinstance(GrootConfig(), factory.GrootConfig), isinstance(ACTConfig(), factory.GrootConfig)],
    "features": factory.env_to_policy_features(envs.PushtEnv()) == envs.env_to_policy_features(envs.PushtEnv()),
}))
"""


def test_lerobots_initialisers_run_when_somebody_imports_its_packages() -> None:
    said = fresh(AFTERWARDS)
    assert said.pop("before") == [] and said.pop("later") == [True, False]
    assert said == {"same": True, "types": True, "steps": True, "features": True}
