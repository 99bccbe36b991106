"""What a mixture of horizons costs, and what packing its branches end to end saves over padding each to full length.

    python tools/bench/horizons.py [repeats]

The native VLA with random weights, one thread, chunks of 30 actions, 1 to 10 horizons at equal strides. Timed is the
suffix: everything after the prefix, which is encoded once whatever the number of branches. Inference is ten Euler
steps, for one observation (a robot) and for eight (an evaluation); a training step is forward and backward of the
paper's two error terms for 32. Times are of the processor, not of the wall; all are taken in turns, and their medians
count, so that nothing profits from a quiet moment.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.policies import flow
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.mixture_of_horizons import Mixture, fusion_weights, packed_states, padded_states
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.transformer import PrefixContext

H, BRANCHES, EULER_STEPS = 30, (1, 3, 5, 10), 10
OVERHEAD = "for one observation at width 128 much of an Euler step is the fixed cost of its operations, alike in both"
LAYOUTS = {"packed": packed_states, "padded": padded_states}
STATE, ACTION, IMAGE = 12, 5, (3, 64, 64)


def main(repeats: int) -> int:
    torch.set_num_threads(1)
    rows = [row for work in WORKS for row in measure(work, repeats)]
    print(f"{'branches':>8} {'work':<16}{'packed ms':>11}{'padded ms':>11}{'ratio':>7}{'over one':>10}")
    checks = []
    for r in rows:
        ratio, overhead = r["padded_ms"] / r["packed_ms"], r["over_one"]
        print(f"{r['branches']:>8} {r['work']:<16}{r['packed_ms']:>11.2f}{r['padded_ms']:>11.2f}{ratio:>7.2f}", end="")
        print(f"{overhead:>10.2f}")
        if r["branches"] > 1:
            name, bound = f"{r['work']}, {r['branches']} horizons", 1.5 if r["branches"] == max(BRANCHES) else None
            checks.append(Check(f"{name}: padded over packed", ratio, bound, why=OVERHEAD))
            checks.append(Check(f"{name}: over one horizon", overhead))
    write("horizons_layout", checks, {"threads": 1, "horizon": H, "repeats": repeats, "rows": rows})
    return 0


def measure(work: str, repeats: int) -> list[dict[str, Any]]:
    """Median times of both layouts and all numbers of branches, milliseconds."""
    batch, run = WORKS[work]
    x = torch.randn(batch, H, ACTION)
    cases = [(policy, encode(policy, batch), layout) for policy in map(make_policy, BRANCHES) for layout in LAYOUTS]
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(repeats + 1):
        for (policy, context, layout), taken in zip(cases, times, strict=True):
            begin = time.process_time()
            run(policy, layout, context, x)
            taken.append(1e3 * (time.process_time() - begin))
    medians = iter(statistics.median(t[1:]) for t in times)  # the first call allocates
    rows: list[dict[str, Any]] = []
    for branches, (packed, padded) in zip(BRANCHES, zip(medians, medians, strict=True), strict=True):
        rows.append({"work": work, "branches": branches, "packed_ms": packed, "padded_ms": padded})
        rows[-1]["over_one"] = packed / rows[0]["packed_ms"]
    return rows


def make_policy(branches: int) -> MohPolicy:
    features = {f"observation.images.{c}": PolicyFeature(FeatureType.VISUAL, IMAGE) for c in ("front", "wrist")}
    base = VlaConfig(
        chunk_size=H,
        device="cpu",
        input_features={**features, "observation.state": PolicyFeature(FeatureType.STATE, (STATE,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
    )
    torch.manual_seed(0)
    horizons = tuple(range(H // branches, H + 1, H // branches))
    return MohPolicy(MohConfig(base=base, horizons=horizons, device="cpu", push_to_hub=False))


def encode(policy: MohPolicy, batch: int) -> PrefixContext:
    """A prefix whose keys and values are leaves of the graph, so that the suffix alone is timed."""
    words = torch.ones(batch, policy.config.max_tokens, dtype=torch.int64)
    observations = {f"observation.images.{c}": torch.rand(batch, *IMAGE) for c in ("front", "wrist")}
    language = {"observation.language.tokens": words, "observation.language.attention_mask": words > 0}
    with torch.no_grad():
        context = policy.encode({**observations, **language, "observation.state": torch.randn(batch, STATE)})
    cache = tuple((k.requires_grad_(), v.requires_grad_()) for k, v in context.keys_values)
    return PrefixContext(cache, context.mask, context.summary)


def mix(policy: MohPolicy, layout: str, context: PrefixContext, x: torch.Tensor, t: torch.Tensor) -> Mixture:
    """``MohPolicy.mix`` over either layout, without the gate's noise."""
    tokens = LAYOUTS[layout](policy.base, policy.horizons, context, x, t)
    weights = fusion_weights(policy.horizons.unpack(policy.gate(tokens, None)), policy.horizons.valid, "gate")
    return Mixture(policy.horizons.unpack(policy.base.action_head(tokens)), weights)


def laid_out(policy: MohPolicy, layout: str, context: PrefixContext) -> PrefixContext:
    """The prefix as a layout reads it, once for all Euler steps."""
    return context.repeat(len(policy.horizons.lengths)) if layout == "padded" else context


@torch.no_grad()
def infer(policy: MohPolicy, layout: str, context: PrefixContext, x: torch.Tensor) -> None:
    context = laid_out(policy, layout, context)
    flow.euler(lambda y, t: mix(policy, layout, context, y, t).velocity, x, EULER_STEPS)


def train_step(policy: MohPolicy, layout: str, context: PrefixContext, x: torch.Tensor) -> None:
    mixture = mix(policy, layout, laid_out(policy, layout, context), x, torch.full((len(x),), 0.5))
    error = (mixture.velocity - x).square().mean()
    for n, h in enumerate(policy.horizons.lengths):
        error = error + (mixture.branches[:, n, :h] - x[:, :h]).square().mean()
    error.backward()


WORKS = {"inference of 1": (1, infer), "inference of 8": (8, infer), "training": (32, train_step)}

if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("repeats", type=int, nargs="?", default=15, help="of every measurement (default: %(default)d)")
    sys.exit(main(p.parse_args().repeats))
