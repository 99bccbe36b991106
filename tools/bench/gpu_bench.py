"""What the benches of a GPU share: figures that fail one by one, time and peak memory."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from vla_stack.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write

GB = 1e9
MEASURE_S = 8.0  # after so long no further repetition begins


class Figures:
    """Rows of figures by section; a row that fails says why and takes no other with it.

    Args:
        device: Where everything is computed.
        deadline_s: Seconds after which no further row begins; a machine is lent for a time.
    """

    def __init__(self, device: torch.device, deadline_s: float) -> None:
        self.device = device
        self.sections: dict[str, dict[str, dict[str, Any]]] = {}
        self._end = time.perf_counter() + deadline_s

    @contextmanager
    def row(self, section: str, name: str) -> Iterator[dict[str, Any]]:
        """One row to be filled in; printed when it is over, so that a run that is killed loses only what it was at.

        What is raised within is written into the row, as ``failed``, and goes no further.
        """
        row: dict[str, Any] = {}
        self.sections.setdefault(section, {})[name] = row
        begin = time.perf_counter()
        if begin > self._end:  # not in the try: the rows that follow are left out too
            del self.sections[section][name]
            raise TimeoutError(f"no time was left from '{name}' on: run it alone with --only, or give more --seconds")
        try:
            yield row
        except Exception as e:
            row["failed"] = f"{type(e).__name__}: {e}"[:2000]
            traceback.print_exc()
        row["took_s"] = time.perf_counter() - begin
        print(json.dumps({section: {name: row}}), flush=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def failures(self) -> list[str]:
        """What failed and why, a line each."""
        rows = ((f"{s}, {n}", row) for s, of in self.sections.items() for n, row in of.items())
        return [
            f"{name}: {row['failed'].splitlines()[0][:200].replace('|', '/')}" for name, row in rows if "failed" in row
        ]

    def check(
        self, title: str, section: str, name: str, key: str, bound: float | None = None, sense: str = "<="
    ) -> list[Check]:
        """A figure as a check; none where it could not be measured."""
        value = self.sections.get(section, {}).get(name, {}).get(key)
        return [] if value is None else [Check(title, value, bound, sense)]

    def median_ms(self, call: Callable[[], Any], repeats: int) -> float:
        """Median time of a call, to the end of its work on the device; a few calls before are not counted.

        Peak memory counts from here on: what was needed to get here, to compile for instance, is not part of it.
        """
        warmup = max(1, repeats // 5)
        for _ in range(warmup):
            call()
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < repeats and (not times or time.perf_counter() - begin < MEASURE_S):
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def peak_gb(self) -> float:
        """Most memory that torch held since :meth:`median_ms` began to count, GB of 10^9 bytes; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / GB if self.device.type == "cuda" else 0.0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def tried_out(smoke: bool) -> AbstractContextManager[Any]:
    """A smoke run traces and does not generate code: a C++ compiler would take a minute for it."""
    return torch.compiler.set_stance("default", force_backend="eager") if smoke else nullcontext()


def run(
    name: str,
    doc: str | None,
    sections: Mapping[str, Callable[[Figures, bool], None]],
    checks: Callable[[Figures], Sequence[Check]],
    arguments: list[str],
    seconds: float,
) -> int:
    """The command line of a bench.

    Args:
        name: Of the result file.
        doc: What the bench says of itself.
        sections: What fills figures in, given whether it is only tried out.
        checks: Of the figures.
        arguments: Of the command.
        seconds: How long rows may begin.

    Returns:
        Exit status: 1 if a row failed.

    Raises:
        UserError: There is no GPU, and it is no smoke run.
    """
    p = parser(doc)
    p.add_argument("--smoke", action="store_true", help="tiny models on the CPU, nothing written")
    p.add_argument("--only", nargs="+", choices=sections, help="some sections; written to --out alone")
    p.add_argument("--out", type=Path, help=f"result file (default: docs/results/{name}.json)")
    p.add_argument("--seconds", type=float, default=seconds, help="no row begins later (default: %(default)g)")
    args = p.parse_args(arguments)
    if not args.smoke and not torch.cuda.is_available():
        raise UserError(
            "this bench needs a CUDA device", f"python tools/bench/{name}.py --smoke runs its code on a CPU"
        )
    figures = Figures(torch.device("cpu" if args.smoke else "cuda"), args.seconds)
    for section in args.only or sections:
        begin = time.perf_counter()
        try:
            sections[section](figures, args.smoke)
        except Exception as e:  # between rows
            traceback.print_exc()
            figures.sections.setdefault(section, {})["the rest"] = {"failed": f"{type(e).__name__}: {e}"[:2000]}
        print(f"{section}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    failed = figures.failures()
    if not args.smoke and (args.out or not args.only):
        data = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **figures.sections}
        every = [
            *checks(figures),
            Check("rows that could not be measured", len(failed), 0, "<=", why="; ".join(failed)),
        ]
        write(name, every, data, path=args.out)
    return 1 if failed else 0
