"""``vla export``: a policy as ONNX graphs, which a CPU computes faster, and for servers without torch."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from vla_stack.errors import UserError
from vla_stack.policies.directory import SIGNATURE, resolve_policy
from vla_stack.training.run_dir import RECIPE

HELP = "Write a policy as ONNX graphs, checked against the original: beside its weights, or without them."
EXAMPLES = (
    "vla export --policy runs/pick                          # beside the weights; vla serve takes the graph on a CPU",
    "vla export --policy runs/pick --int8                   # faster again; a chunk differs a little",
    "vla export --policy runs/pick --out runs/pick_onnx",
    "vla serve --policy runs/pick_onnx                      # or vla eval; the directory says what it is",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="shipped", help="policy or run directory (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="another directory, without weights (default: beside the weights)")
    parser.add_argument("--int8", action="store_true", help="multiply with matrices in 8 bits")


def main(args: argparse.Namespace) -> int:
    if args.out is not None and (args.out / RECIPE).is_file():  # whose recipe and log a policy's files would hide
        raise UserError(f"--out: {args.out} is a run", f"give a directory of its own: --out {args.out}_onnx")
    source = resolve_policy(args.policy)
    signed = args.out is None and (source / SIGNATURE).is_file()
    from vla_stack.policies.onnx_export import export, export_beside  # torch, for which a mistyped name need not wait

    print(f"writing the graph of {source}: half a minute to two", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):  # on which LeRobot reports what it loads
        manifest = export(source, args.out, args.int8) if args.out else export_beside(source, args.int8)
    where = args.out or source
    size = sum(f.stat().st_size for f in where.glob("*.onnx*")) / 1e6
    print(f"{where}: graphs of {size:.1f} MB; against the original in float32: cosine {manifest.cosine:.6f}, "
          f"largest difference {manifest.max_error:.1e} (normalised actions)")  # fmt: skip
    if manifest.cosine_served < 1.0 - 1e-9:
        print(f"against the original in its own arithmetic: cosine {manifest.cosine_served:.6f}")
    if signed:
        print(f"its signature was of the weights alone; anew: vla policy sign {source} --key FILE")
    return 0
