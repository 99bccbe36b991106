"""End-to-end training speed: ``vla train pick`` against stock ``lerobot-train``, same policy, data, batch and loss.

    python tools/bench/train.py [repeats] [--former REVISION]

All are run as they are installed, in turns and twice, so that none profits from a quiet moment alone; the best run of
each counts, and of the other its best number of loader workers. Both train the native VLA with the recipe's options on
pictures as they are (without augmentation) with one draw of noise an observation, as LeRobot's loop does; ours in the
precision and the number of processes that its recipe asks for, LeRobot's in what it has. Speed is that of the steady
state, from the second log record on, as each tool reports it itself: its own clock around loading, processing and
updating, which for LeRobot leaves out what happens between two updates (its progress bar). Start-up is reported apart:
the time from the start of the command to its end that is not steady state, which includes one checkpoint. Our loss is
held against that of the same recipe in float32 in one process. With ``--former``, the same recipe is trained by an
earlier revision of this repository as well. Last, a profile says where the CPU time of a step goes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write

BIN = Path(sys.executable).parent
STEPS, LOG, BATCH = 100, 10, 64
THREADS = os.cpu_count() or 1
# Waiting threads sleep: without it either tool is several times slower on a machine that does anything else.
ENV = os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
# What the policy's own `forward` computes for lerobot-train, of pictures as they are.
SAME = ("method.draws=1", "data.augmentation.strength=0", f"method.batch_size={BATCH}", "device=cpu")
PLAIN = ("processes=1", "precision=fp32")
OPTIONS = ("--policy.chunk_size=12", "--policy.n_action_steps=4", "--policy.noise_scale=0.4", "--policy.bpe_dropout=0")

CONVOLUTIONS = ("aten::mkldnn_convolution", "aten::convolution_backward")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
PROFILED = 10  # steps of one process's share of a batch


def main(repeats: int, former: str) -> int:
    with tempfile.TemporaryDirectory() as tmp:
        base = Path(tmp)
        data = base / "pick"
        collect = ["collect", "--task", "pick", "--episodes", "120", "--root", str(data)]
        subprocess.run([BIN / "vla", *collect], check=True, env=ENV, capture_output=True)
        runs = []
        with checked_out(former, base / "former") as tree:
            for i in range(repeats):
                runs.append(ours("vla train pick", data, base / f"ours-{i}"))
                runs.append(ours("in float32 in one process", data, base / f"plain-{i}", *PLAIN))
                if tree:
                    runs.append(ours(f"revision {former}", data, base / f"former-{i}", tree=tree))
                runs += [stock(data, base / f"stock-{workers}-{i}", workers) for workers in (0, 2)]
        share = parts(base / "ours-0" / "checkpoints" / "last" / "pretrained_model")
    runs.sort(key=lambda r: -r["samples_per_s"])

    def best(begin: str) -> dict[str, Any]:
        return next(r for r in runs if r["tool"].startswith(begin))

    mine, peer, plain = best("vla train"), best("lerobot-train"), best("in float32")
    speed = mine["samples_per_s"]
    checks = [
        Check("samples/s of vla train pick over lerobot-train", speed / peer["samples_per_s"], 4.0),
        Check("loss of its second half over that in float32 in one process", mine["loss"] / plain["loss"], 1.05, "<="),
        Check("samples/s over its own in float32 in one process", speed / plain["samples_per_s"]),
        Check("start-up of lerobot-train over vla train", peer["startup_s"] / mine["startup_s"]),
        Check("vla train pick, samples/s", speed),
        Check(f"{peer['tool']}, samples/s", peer["samples_per_s"]),
        *(Check(f"share of a step's CPU time in {name}", value) for name, value in share.items()),
    ]
    if former:
        old = best("revision")
        ratio = speed / old["samples_per_s"]
        checks.insert(1, Check(f"samples/s over revision {former}", ratio, 2.0, why=why(share)))
        checks.insert(3, Check(f"loss over revision {former}", mine["loss"] / old["loss"], 1.05, "<="))
    write("train", checks, {"threads": THREADS, "batch_size": BATCH, "image_size": 64, "steps": STEPS, "runs": runs})
    return 0


def why(share: dict[str, float]) -> str:
    """What is left to make faster."""
    heavy = share["convolutions"] + share["products of matrices"]
    return (
        f"{heavy:.0%} of a step are convolutions and products of matrices in bfloat16, which PyTorch does no "
        "faster; the rest is spread over small operations"
    )


def parts(policy_dir: Path) -> dict[str, float]:
    """Where a process's CPU time of a step of the flow loss goes, by kind of operator, on random samples."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from vla_stack.policies.modeling_vla import VlaPolicy
    from vla_stack.policies.reading import read_config, read_processors
    from vla_stack.schema import ACTION, ACTION_IS_PAD, OBS_STATE
    from vla_stack.training.build import preprocessed

    torch.set_num_threads(1)
    config, size = read_config(policy_dir, "cpu"), BATCH // 2
    pre, _ = read_processors(policy_dir, config, "cpu")
    policy = VlaPolicy.from_pretrained(policy_dir, config=config).train()
    pictures = {
        key: torch.randint(256, (size, *config.input_features[key].shape[1:], 3), dtype=torch.uint8)
        for key in config.camera_keys
    }
    batch = preprocessed(
        {
            **pictures,
            OBS_STATE: torch.rand(size, *config.robot_state_feature.shape),
            ACTION: torch.rand(size, config.chunk_size, *config.action_feature.shape),
            ACTION_IS_PAD: torch.zeros(size, config.chunk_size, dtype=torch.bool),
            "task": ["pick up the red cube"] * size,
        },
        pre,
    )
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = policy(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            step()
    spent = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    kinds = {"convolutions": CONVOLUTIONS, "products of matrices": PRODUCTS}
    found = {kind: sum(spent.get(name, 0.0) for name in names) / sum(spent.values()) for kind, names in kinds.items()}
    return found | {"everything else": 1.0 - sum(found.values())}


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path | None]:
    """An earlier revision of this repository in a folder of its own, while it is measured."""
    if not revision:
        yield None
        return
    git = ["git", "-C", str(Path(__file__).resolve().parent), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), revision], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def ours(tool: str, data: Path, out: Path, *options: str, tree: Path | None = None) -> dict[str, Any]:
    """One run of ``vla train pick``, or of the same in another source tree."""
    steps = (f"method.steps={STEPS}", f"method.log_every={LOG}")
    recipe = str(next(tree.rglob("configs/pick.yaml"))) if tree else "pick"
    where = {"PYTHONPATH": str(tree)} if tree else {}
    seconds, _ = timed(
        "vla", "train", recipe, f"data.root={data}", f"output_dir={out}", *SAME, *steps, *options, **where
    )
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records]
    found = summary(tool, seconds, [r["samples_per_s"] for r in records])
    return found | {"loss": sum(losses[len(losses) // 2 :]) / (len(losses) - len(losses) // 2)}


def stock(data: Path, out: Path, workers: int) -> dict[str, Any]:
    """One run of ``lerobot-train``."""
    seconds, printed = timed(
        "lerobot-train",
        *("--dataset.repo_id=local/pick", f"--dataset.root={data}", f"--output_dir={out}"),
        *("--policy.type=vla", "--policy.device=cpu", "--policy.push_to_hub=false", *OPTIONS),
        *(f"--steps={STEPS}", f"--batch_size={BATCH}", f"--log_freq={LOG}", f"--num_workers={workers}"),
        *("--env_eval_freq=0", f"--save_freq={STEPS}"),
    )
    # The printed smp/s is rounded; updt_s + data_s is what it is made of.
    windows = dict(re.findall(r"step:(\d+) (.*)", printed))  # LeRobot prints some lines to both streams
    times = [float(t) for w in windows.values() for t in [sum(map(float, re.findall(r"(?:updt_s|data_s):(\S+)", w)))]]
    return summary(f"lerobot-train, {workers} workers", seconds, [BATCH / t for t in times])


def timed(command: str, *args: str, **environment: str) -> tuple[float, str]:
    begin = time.monotonic()
    done = subprocess.run([BIN / command, *args], env=ENV | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-3000:]}")
    return time.monotonic() - begin, done.stdout + done.stderr


def summary(tool: str, seconds: float, rates: list[float]) -> dict[str, Any]:
    """Steady speed is that of all windows but the first, by their total time."""
    assert len(rates) == STEPS // LOG, f"{tool}: {len(rates)} log records"
    times = [LOG * BATCH / rate for rate in rates]
    steady = (len(rates) - 1) * LOG * BATCH / sum(times[1:])
    return {
        "tool": tool,
        "samples_per_s": steady,
        "windows": rates,
        "startup_s": seconds - sum(times),
        "wall_s": seconds,
    }


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("repeats", type=int, nargs="?", default=2, help="of every tool (default: %(default)d)")
    p.add_argument("--former", default="", metavar="REVISION", help="of this repository, to be measured beside")
    args = p.parse_args()
    sys.exit(main(args.repeats, args.former))
