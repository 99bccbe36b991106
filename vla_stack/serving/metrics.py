"""Counters and latency histograms of the server, and the loopback HTTP page that shows them.

Prometheus text format 0.0.4. Written by the network thread, read by the HTTP threads.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vla_stack.errors import UserError

# Seconds. From a null policy on loopback (0.1 ms) to a large policy on a CPU (seconds).
BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
STAGES = ("decode", "queue", "infer", "encode", "total")


class Metrics:
    """Everything that is counted.

    Attributes:
        received: Messages by kind.
        rejected: Refusals by reason.
        reloads: Policies loaded while another one was served, by outcome.
        batches: Inferences by number of requests.
        delays: Session -> control steps of its plan that it expects to be over when its chunk arrives.
        sessions: Open sessions.
        ready: Whether requests are being answered.
        labels: Labels of ``vla_model_info``, e.g. model version.
    """

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.reloads: Counter[str] = Counter()
        self.batches: Counter[int] = Counter()
        self.delays: dict[str, int] = {}
        self.sessions = 0
        self.ready = False
        self.labels: dict[str, str] = {}
        self._lock = threading.Lock()
        self._counts = {stage: [0] * (len(BUCKETS) + 1) for stage in STAGES}
        self._sums = dict.fromkeys(STAGES, 0.0)

    def receive(self, kind: str) -> None:
        with self._lock:
            self.received[kind] += 1

    def reject(self, reason: str) -> None:
        with self._lock:
            self.rejected[reason] += 1

    def reload(self, outcome: str) -> None:
        with self._lock:
            self.reloads[outcome] += 1

    def batch(self, size: int) -> None:
        with self._lock:
            self.batches[size] += 1

    def delay(self, session: str, ticks: int | None) -> None:
        """Note what a session expects; None: it is over."""
        with self._lock:
            if ticks is None:
                self.delays.pop(session[:8], None)
            else:
                self.delays[session[:8]] = ticks

    def observe(self, *nanoseconds: tuple[str, int]) -> None:
        """Add latencies, each to the histogram of its stage."""
        with self._lock:
            for stage, ns in nanoseconds:
                self._counts[stage][bisect_left(BUCKETS, ns * 1e-9)] += 1
                self._sums[stage] += ns * 1e-9

    def render(self) -> str:
        """The page at ``/metrics``."""
        with self._lock:
            lines = ["# TYPE vla_messages_total counter"]
            lines += [_line("vla_messages_total", {"kind": k}, n) for k, n in sorted(self.received.items())]
            lines.append("# TYPE vla_rejected_total counter")
            lines += [_line("vla_rejected_total", {"reason": k}, n) for k, n in sorted(self.rejected.items())]
            lines.append("# TYPE vla_reloads_total counter")
            lines += [_line("vla_reloads_total", {"outcome": k}, n) for k, n in sorted(self.reloads.items())]
            lines.append("# TYPE vla_batches_total counter")
            lines += [_line("vla_batches_total", {"size": str(k)}, n) for k, n in sorted(self.batches.items())]
            lines.append("# TYPE vla_delay_ticks gauge")
            lines += [_line("vla_delay_ticks", {"session": k}, n) for k, n in sorted(self.delays.items())]
            lines += _gpu_memory()
            lines.append("# HELP vla_stage_seconds Latency of a request by stage; total is receipt to reply.")
            lines.append("# TYPE vla_stage_seconds histogram")
            for stage in STAGES:
                lines += self._histogram(stage)
            lines += ["# TYPE vla_sessions gauge", _line("vla_sessions", {}, self.sessions)]
            lines += ["# TYPE vla_ready gauge", _line("vla_ready", {}, int(self.ready))]
            lines += ["# TYPE vla_model_info gauge", _line("vla_model_info", self.labels, int(self.ready))]
        return "\n".join(lines) + "\n"

    def _histogram(self, stage: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._counts[stage], strict=True):
            total += count
            lines.append(_line("vla_stage_seconds_bucket", {"stage": stage, "le": bound}, total))
        lines.append(_line("vla_stage_seconds_sum", {"stage": stage}, self._sums[stage]))
        lines.append(_line("vla_stage_seconds_count", {"stage": stage}, total))
        return lines


def _gpu_memory() -> list[str]:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # loaded with the policy, or not at all
    if cuda is None or not cuda.is_initialized():
        return []
    used = [
        _line("vla_gpu_memory_bytes", {"device": str(i)}, cuda.memory_reserved(i)) for i in range(cuda.device_count())
    ]
    return ["# TYPE vla_gpu_memory_bytes gauge", *used]


def _line(name: str, labels: dict[str, str], value: float) -> str:
    def quote(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inside = ",".join(f'{key}="{quote(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


class MetricsPage:
    """``/healthz``, ``/readyz`` and ``/metrics`` on 127.0.0.1, GET only.

    Args:
        metrics: What to show.
        alive: Whether the network loop still turns.
        port: TCP port, 0 for any free one.

    Raises:
        UserError: The port is in use.
    """

    def __init__(self, metrics: Metrics, alive: Callable[[], bool], port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0  # seconds a silent connection may hold its thread

            def do_GET(self) -> None:
                ok = {"/healthz": alive(), "/readyz": metrics.ready, "/metrics": True}.get(self.path)
                status = 404 if ok is None else 200 if ok else 503
                body = (metrics.render() if self.path == "/metrics" else f"{'ok' if ok else 'no'}\n").encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass  # a scrape every few seconds is not news

        try:
            self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as e:
            raise UserError(f"cannot bind metrics port {port}: {e}", "choose another one; 0 takes any free") from None
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, name="vla-metrics", daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
