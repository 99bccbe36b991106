"""A policy's graphs against the weights beside it: actions, success in closed loop, latency on a CPU.

    python tools/bench/onnx_backend.py [episodes]

The shipped policy on sim/pick-v0, the same seeds for all. Cosines are of normalised actions, on observations of the
simulator. Latency is of all of ``infer``, from raw pictures to commands, on one thread: of torch, of the graph between
processors in torch, of what ``vla serve`` takes by default on a CPU, the graph without torch, and of that graph with
matrices in 8 bits (``vla export --int8``).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_stack.envs import make
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.policies.onnx_export import export
from vla_stack.schema import Observation, PolicySpec
from vla_stack.statistics import paired_interval
from vla_stack.verbs.serve import load_directory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write

ENV, SEED, BATCHES, REPEATS, ROUNDS = "sim/pick-v0", 1000, (1, 8), 15, 4


def observations(spec: PolicySpec, n: int) -> list[Observation]:
    """Beginnings of episodes."""
    env: Any = make(ENV, 1, spec).row(0)
    found = []
    for seed in range(n):
        obs, info = env.reset(seed=seed)
        found.append(Observation(obs["agent_pos"], obs["pixels"], info["task"]))
    env.close()
    return found


def normalised(policy: ChunkPolicy, seen: list[Observation]) -> torch.Tensor:
    """Chunks before the postprocessor, [n, h * a], from the same noise whatever computes."""
    inner = policy.policy
    noise = torch.randn(len(seen), inner.horizon, inner.noise_dim, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return inner.predict_action_chunk(policy.preprocess(seen), noise=noise).float().flatten(1)


def latencies(policies: dict[str, Any], seen: list[Observation]) -> dict[str, float]:
    """Median milliseconds of a batch, the policies in turns."""
    taken: dict[str, list[float]] = {name: [] for name in policies}
    for turn in range(ROUNDS + 1):
        for name, policy in policies.items():
            for _ in range(REPEATS):
                begin = time.perf_counter()
                policy.infer(seen, range(len(seen)))
                if turn:  # the first one warms up
                    taken[name].append((time.perf_counter() - begin) * 1e3)
    return {name: float(np.median(ms)) for name, ms in taken.items()}


def main(episodes: int) -> None:
    torch.set_num_threads(1)
    source = resolve_policy("shipped")
    with tempfile.TemporaryDirectory() as name:
        export(source, Path(name) / "int8", int8=True)
        int8 = {"onnx": load_policy(Path(name) / "int8"), "served": load_directory(Path(name) / "int8", "cpu", 1)}
    policies = {"torch": load_policy(source, frozen=True), "onnx": load_policy(source, graphs=True)}
    policies["int8"] = int8["onnx"]
    seen = observations(policies["torch"].spec, 32)
    exact, *chunks = (normalised(policy, seen) for policy in policies.values())
    cosine, cosine_int8 = (torch.nn.functional.cosine_similarity(exact, c).min().item() for c in chunks)
    error, error_int8 = ((exact - c).abs().max().item() for c in chunks)
    served = {"served": load_directory(source, "cpu", threads=1), "served int8": int8["served"]}
    computed = {"torch": policies["torch"], "onnx": policies["onnx"], **served}
    ms = {n: latencies(computed, seen[:n]) for n in BATCHES}
    print(f"cosine {cosine:.7f}, in 8 bits {cosine_int8:.5f}, ms {ms}", flush=True)
    results = {name: evaluate(policy, ENV, episodes, SEED) for name, policy in policies.items()}
    success = {name: result.outcomes for name, result in results.items()}
    rate = {name: float(np.mean(each)) for name, each in success.items()}

    def minus_torch(what: str, name: str) -> Check:
        less = paired_interval(success["torch"], success[name])
        return Check(f"{what}, {episodes} paired episodes", less.value, -0.01, interval=less)

    checks = [
        Check("cosine of actions, ONNX and torch, least of 32 observations", cosine, 0.999),
        Check("largest difference of normalised actions", error, 1e-3, "<="),
        minus_torch("success of ONNX minus torch", "onnx"),
        *(Check(f"latency, ONNX / torch, batch {n}, one thread", ms[n]["onnx"] / ms[n]["torch"]) for n in BATCHES),
        Check("a chunk as it is served by default, one thread, ms", ms[1]["served"], 8, "<="),
        *(
            Check(f"served by default / torch, batch {n}, one thread", ms[n]["served"] / ms[n]["torch"])
            for n in BATCHES
        ),
        Check("in 8 bits: cosine of actions, least of 32 observations", cosine_int8, 0.99),
        Check("in 8 bits: largest difference of normalised actions", error_int8),
        minus_torch("in 8 bits: success minus torch", "int8"),
        Check("in 8 bits: a chunk as it is served, one thread, ms", ms[1]["served int8"], 4, "<="),
        *(Check(f"in 8 bits / torch, batch {n}, one thread", ms[n]["served int8"] / ms[n]["torch"]) for n in BATCHES),
    ]
    data = {
        "success": rate,
        "episodes_that_differ": {n: int(np.sum(success[n] != success["torch"])) for n in ("onnx", "int8")},
        "latency_ms": {str(n): each for n, each in ms.items()},
    }
    write("onnx", checks, data, seeds=[SEED])


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("episodes", type=int, nargs="?", default=100, help="of the closed loop (default: %(default)s)")
    main(p.parse_args().episodes)
