"""``vla policy``: what a trained policy is, before it is served or trained further."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.policies.directory import resolve_policy
from vla_stack.policies.signing import make_key, sign, verify
from vla_stack.verbs.arguments import count, device, whole

HELP = "Look into a policy (parameters, inputs, normalisation, latency, memory), sign or check it, or import one."
EXAMPLES = (
    "vla policy info shipped",
    "vla policy key release.pem                        # once: a private key; prints the public one",
    "vla policy sign runs/pick --key release.pem    # without --key: digests alone, after a change by hand",
    "vla policy verify runs/pick --key 'PUBLIC KEY'",
    "vla policy info runs/pick --device cuda --repeats 50",
    "vla policy info runs/pick --json > policy.json",
    "vla policy import model.safetensors --stats norm_stats.json --out runs/moh",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("info", "key", "sign", "verify", "import"))
    parser.add_argument(
        "policy",
        help="LeRobot policy directory, a run directory, or the name of a shipped policy; key: file to write; "
        "import: weights of a checkpoint of Timsty1/MixtureOfHorizons, as safetensors",
    )
    parser.add_argument("--key", help="sign: file of a private key; verify: the public key that has to have signed it")
    parser.add_argument("--embodiment", help="which robot, of a policy that drives several")
    parser.add_argument(
        "--device", default="cpu", type=device, help="torch device that is measured, or auto (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=whole, default=20, help="timed calls, 0: none (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="import: the checkpoint's norm_stats.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="import: policy directory to write")
    parser.add_argument(
        "--horizons",
        type=count,
        nargs="+",
        default=range(3, 31, 3),
        metavar="H",
        help="import: branch lengths of its training (default: 3 6 ... 30)",
    )
    parser.add_argument(
        "--cameras",
        nargs="+",
        default=("base_0_rgb", "left_wrist_0_rgb"),
        metavar="NAME",
        help="import: its cameras in the order of its training (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    if args.what == "key":
        print(f"public key: {make_key(Path(args.policy))}")
        return 0
    if args.what == "import":
        return _import(args)
    directory = resolve_policy(args.policy)
    if args.what == "sign":
        signer = sign(directory, Path(args.key) if args.key else None)
        print(f"{directory}: {f'signed by {signer}' if signer else 'digests recorded, not signed'}")
        return 0
    if args.what == "verify":
        signer = verify(directory, args.key)
        print(f"{directory}: all files are what was saved, {f'signed by {signer}' if signer else 'not signed'}")
        return 0
    return _info(args, directory)


def _import(args: argparse.Namespace) -> int:
    for name in ("stats", "out"):
        if getattr(args, name) is None:
            raise UserError(f"import needs --{name}", "vla policy import model.safetensors --stats FILE --out DIR")
    from vla_stack.policies.moh_checkpoint import Checkpoint, import_checkpoint

    checkpoint = Checkpoint(Path(args.policy), args.stats, tuple(args.horizons), tuple(args.cameras))
    with contextlib.redirect_stdout(io.StringIO()):
        import_checkpoint(checkpoint, args.out)
    print(f"{args.out}: vla policy info {args.out}")
    return 0


def _info(args: argparse.Namespace, directory: Path) -> int:
    from vla_stack.policies.anatomy import describe, measure
    from vla_stack.policies.chunk_policy import load_policy

    with contextlib.redirect_stdout(io.StringIO()):  # LeRobot announces what it loads
        policy = load_policy(directory, args.device, args.embodiment)
        report = {"path": str(directory), **describe(policy)} | (measure(policy, args.repeats) if args.repeats else {})
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0


def show(report: dict[str, Any]) -> None:
    """The report as tables."""
    from rich.console import Console

    console = Console()
    console.print(f"[bold]{report['type']}[/] {report['path']}", highlight=False, soft_wrap=True)
    for make in (about, *([part_table] if report["parameters"] else []), feature_table, cost_table):
        console.print(make(report))


def about(report: dict[str, Any]) -> Any:
    from rich.table import Table

    robot = report["robot"]
    cameras = ", ".join(f"{c['name']} {c['height']}x{c['width']}" for c in robot["cameras"]) or "none"
    rows = {
        "class": report["class"],
        "weights": report["model_version"],
        "robot": f"{robot['name']}, {robot['action_kind']} actions at {robot['rate_hz']:g} Hz",
        "embodiment": f"{report['embodiment']} of {', '.join(report['embodiments'])}" if report["embodiments"] else "",
        "cameras": cameras,
        "actions": " ".join(d["name"] for d in robot["action"]),
        "chunk": f"{report['horizon']} actions, {report['executed']} executed by default"
        + (", learnt relative to the state" if report["relative_actions"] else ""),
        "horizons": ", ".join(map(str, report["horizons"])),
        "sampling": f"{report['euler_steps']} Euler steps" if report["euler_steps"] else "one call",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def part_table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    whole = report["parameters"]
    table = Table("part", title="parameters", title_justify="left")
    table.add_column("all", justify="right")
    table.add_column("trained", justify="right")
    for row in (*whole["parts"], {"part": "together", **whole}):
        table.add_row(row["part"], number(row["total"]), number(row["trainable"]))
    return table


def feature_table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("", title="features", title_justify="left")
    table.add_column("feature", no_wrap=True)
    for column in ("shape", "normalisation", "from ... to, over the entries"):
        table.add_column(column)
    for kind in ("inputs", "outputs"):
        for row in report[kind]:
            shape = "x".join(map(str, row["shape"]))
            table.add_row(kind[:-1], row["key"], shape, row["normalisation"], spans(row["statistics"]))
    return table


def cost_table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("cost", "", title="cost at batch 1", title_justify="left")
    for dtype, size in report["weights_bytes"].items():
        table.add_row(f"weights, {dtype}", bytes_(size))
    for name, ms in report.get("latency_ms", {}).items():
        table.add_row(f"{name}, median of {report['repeats']}", f"{ms:.1f} ms on {report['device']}")
    if "peak_bytes" in report:
        table.add_row("peak of the process, or of the GPU's tensors", bytes_(report["peak_bytes"]))
    return table


def spans(numbers: dict[str, list[float]]) -> str:
    """Smallest and largest entry of each statistic that normalisation uses."""
    return ", ".join(f"{name} {min(x):.3g} ... {max(x):.3g}" for name, x in numbers.items())


def number(n: int) -> str:
    """A count with three digits and its unit: 12.3 M."""
    power = min(3, int(math.log10(n) // 3)) if n else 0
    return f"{n / 1000**power:.4g}{('', ' k', ' M', ' G')[power]}"


def bytes_(n: int) -> str:
    return f"{number(n)}B" if n >= 1000 else f"{n} B"
