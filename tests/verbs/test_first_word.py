"""What a command imports before its first word: a fresh process must not load what its policy does not need."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_stack.cli import main
from vla_stack.schema import ActionChunk, Observation
from vla_stack.serving.client import PolicyClient

LIBRARIES = ("transformers", "diffusers", "datasets", "torchvision", "pandas", "scipy", "peft", "pyarrow", "sympy")
PARTS = (
    "torch._dynamo",
    "torch._inductor",
    "torch._meta_registrations",
    "torch.export",
    "httpx._main",
    "rich",
    "click",
)
TORCH = ("torch", "lerobot", "huggingface_hub", "onnx", "matplotlib", "mujoco", "gymnasium")  # no exported policy needs
BOUND = 350 << 20  # bytes
CHUNKS = 50
REPORT = f"""
import json, sys
def loaded(*names): return [name for name in names if name in sys.modules]
def heavy(): return loaded(*{LIBRARIES + PARTS!r})
def torch_too(): return loaded(*{TORCH!r})
"""


def fresh(code: str, *args: object) -> Any:
    """What the last line of a new process says, as JSON."""
    done = subprocess.run([sys.executable, "-c", REPORT + code, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


RUN = """
from vla_stack.cli import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "heavy": heavy(), "torch": torch_too()}))
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
    said = fresh(RUN, "eval", "--policy", policy, *short)
    assert (said["code"], said["heavy"]) == (0, [])


def test_a_training_loads_no_libraries_of_other_policies(tmp_path: Path) -> None:
    brief = "--task pick --episodes 1 --workers 1 --image-size 16 --image-mode image --root"
    assert main(["collect", *brief.split(), str(tmp_path / "data")]) == 0
    few = "method.steps=1 method.batch_size=2 processes=1 threads=1 device=cpu eval.every=0"
    said = fresh(RUN, "train", "pick", f"data.root={tmp_path / 'data'}", f"output_dir={tmp_path / 'run'}", *few.split())
    assert said["code"] == 0
    assert not {"transformers", "diffusers", "torchvision", "peft"} & set(said["heavy"])


@pytest.mark.parametrize("kind", ["shipped", "exported", "torch"])
def test_a_server_loads_its_own_policy_alone_and_its_memory_is_bounded(kind: str, exported: Path) -> None:
    policy = {"shipped": ["shipped"], "exported": [exported], "torch": ["shipped", "--backend", "torch"]}[kind]
    serve = ["serve", "--policy", *policy, "--endpoint", "tcp://127.0.0.1:*"]
    command = [sys.executable, "-c", REPORT + RUN, *map(str, serve)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[0] == "READY"
        if sys.platform.startswith("linux"):
            before = memory(process.pid)
            take_chunks(ready[1])
            after = memory(process.pid)
            bounded = "Anonymous" if kind == "torch" else "Rss"  # of torch's libraries the machine has one copy
            assert after[bounded] <= BOUND, (before, after)
            assert after["Anonymous"] - before["Anonymous"] < BOUND / 10, (before, after)
        process.send_signal(signal.SIGTERM)
        said = json.loads(process.communicate()[0])
        assert said.pop("torch") == (["torch", "lerobot", "huggingface_hub"] if kind == "torch" else [])
        assert said == {"code": 0, "heavy": []}
    finally:
        process.kill()
        process.wait()


def memory(pid: int) -> dict[str, int]:
    """Bytes by kind, as Linux counts them."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return {name.removesuffix(":"): int(size) << 10 for name, size, *_ in lines}


def take_chunks(endpoint: str) -> None:
    client = PolicyClient(endpoint)
    policy = client.hello(None)
    client.hello(policy.robot)
    for rid in range(1, CHUNKS + 1):
        images: dict[str, Any] = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in policy.robot.cameras}
        state = np.zeros(len(policy.robot.state), np.float32)
        seen = Observation(state, images, "pick up the red cube", step=rid, t_capture_ns=time.monotonic_ns())
        assert client.request(seen, rid, epoch=0, origin=rid, seed=rid)
        while not (answers := client.poll(timeout_ms=100)):
            pass
        assert [type(answer) for answer in answers] == [ActionChunk]
    client.close()


AFTERWARDS = """
from vla_stack.lerobot_core import PreTrainedConfig, PreTrainedPolicy, lerobot_types, make_pre_post_processors
import lerobot.policies.factory as factory
before = loaded("transformers", "diffusers", "datasets", "torchvision", "torch._dynamo")
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


LATER = """
from vla_stack.light_torch import import_torch
import_torch()
import torch
before = heavy()
exported = torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),)).module()(torch.ones(2, 3)).shape
compiled = torch.compile(torch.nn.Linear(3, 3), backend="eager")(torch.ones(2, 3)).shape
print(json.dumps({"before": before, "exported": exported, "compiled": compiled,
    "registered": "torch._meta_registrations" in sys.modules}))
"""
META = """
from vla_stack.light_torch import import_torch
import_torch()
import transformers, torch
with torch.device("meta"):  # for which this has a kernel in Python alone
    print(json.dumps(torch.cholesky_inverse(torch.ones(3, 3)).shape))
"""


def test_what_torch_was_imported_without_comes_when_it_is_used() -> None:
    said = fresh(LATER)
    assert said == {"before": [], "exported": [2, 3], "compiled": [2, 3], "registered": True}
    assert fresh(META) == [3, 3]
