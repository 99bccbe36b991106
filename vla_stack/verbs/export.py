"""``vla export``: a policy as ONNX graphs, for robots and servers without torch's kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_stack.policies.directory import resolve_policy

HELP = "Write a policy as ONNX graphs (a VLA: prefix and sampler step), checked against the original."
EXAMPLES = (
    "vla export --policy runs/pick --out runs/pick_onnx",
    "vla serve --policy runs/pick_onnx                      # or vla eval; the directory says what it is",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="shipped", help="policy or run directory (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")


def main(args: argparse.Namespace) -> int:
    source = resolve_policy(args.policy)
    from vla_stack.policies.onnx_export import export  # torch, which a mistyped name should not wait for

    manifest = export(source, args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir()) / 1e6
    print(f"{args.out}: {size:.1f} MB; against the original in float32: cosine {manifest.cosine:.6f}, "
          f"largest difference {manifest.max_error:.1e} (normalised actions)")  # fmt: skip
    if manifest.cosine_served < 1.0 - 1e-9:
        print(f"against the original in its own arithmetic: cosine {manifest.cosine_served:.6f}")
    return 0
