"""A fleet on one server: robots that ask twice a second, a policy of 60 + 5·B milliseconds for a batch of B.

    python tools/bench/fleet.py [--seconds 20] [--robots 10 40 100]

The policy is a stand-in that waits, so that what is measured is the server: which requests it puts together, and whom
it lets wait. Robots ask on a grid of half a second each, spread evenly, and can use an answer until they ask anew; a
request that is overtaken or refused counts as unanswered, an answer that is late as an answer. All robots live in one
process, which waits on all their connections at once. Everything runs on loopback, with requests of a state and no
pictures; ``network.py`` measures pictures.

A batch of B takes 60 + 5·B ms, so no batch, however large, gives 200 chunks/s: what 100 robots at 2 Hz ask is more than
this policy can compute. The best that is in time for half a second is what the checks compare with.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.schema import ActionChunk, Chunks, Dim, Observation, PolicySpec, RobotSpec
from vla_stack.serving.client import PolicyClient

HORIZON, ACTIONS, PERIOD_S, MAX_BATCH = 50, 7, 0.5, 64
FIXED_S, EACH_S = 0.060, 0.005
DIMS = tuple(Dim(f"joint_{i}.pos", "rad") for i in range(ACTIONS))
ROBOT = RobotSpec("bench/arm", DIMS, DIMS, (), 50.0)


class Waiting:
    """60 + 5·B milliseconds."""

    spec = PolicySpec(ROBOT, HORIZON, "n", "m")

    def infer(self, observations: Any, seeds: Any) -> Chunks:
        time.sleep(FIXED_S + EACH_S * len(observations))
        return Chunks(np.zeros((len(observations), HORIZON, ACTIONS), np.float32))


def serve(pipe: Any, max_batch: int) -> None:
    from vla_stack.serving.server import PolicyServer, ServerConfig

    config = ServerConfig(max_sessions=256, max_batch=max_batch)
    server = PolicyServer(Waiting, "tcp://127.0.0.1:*", config)
    pipe.send(server.endpoint)
    server.run()


def drive(endpoint: str, robots: int, seconds: float) -> dict[str, Any]:
    """What robots got: milliseconds of each answer, chunks of each robot, and the longest time without one."""
    clients = [PolicyClient(endpoint) for _ in range(robots)]
    for client in clients:
        client.hello(ROBOT, 60.0)
    obs = Observation(np.zeros(ACTIONS, np.float32), {}, "pick")
    start = time.monotonic() + 0.2
    due = [start + PERIOD_S * i / robots for i in range(robots)]
    asked: list[dict[int, float]] = [{} for _ in clients]
    answers: list[list[tuple[float, float]]] = [[] for _ in clients]  # when, how long it took
    rid = [0] * robots
    by_fd = {client._socket.fileno(): i for i, client in enumerate(clients)}
    poller = select.poll()
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    end, requests, late = start + seconds, 0, []
    while (now := time.monotonic()) < end:
        for i in range(robots):
            if now >= due[i]:
                late.append(now - due[i])
                asked[i][rid[i]] = due[i]  # from when it was due: being late here is no gift
                requests += clients[i].request(obs, rid[i], 0, 0, 0, slack_ms=round(1e3 * (PERIOD_S - late[-1])))
                rid[i], due[i] = rid[i] + 1, due[i] + PERIOD_S
        for fd, _ in poller.poll(max(0.0, (min(due) - time.monotonic()) * 1e3)):
            i = by_fd[fd]
            for item in clients[i].poll():
                begun = asked[i].pop(item.rid, None)
                if isinstance(item, ActionChunk) and begun is not None:
                    answers[i].append((time.monotonic(), time.monotonic() - begun))
    for client in clients:
        client.close()
    settled = start + min(2.0, seconds / 4)
    ms = [1e3 * took for each in answers for when, took in each if when > settled]
    times = [[settled, *(when for when, _ in each if when > settled), end] for each in answers]
    gaps = [float(np.diff(each).max()) for each in times]
    counts = [len(each) - 2 for each in times]
    quantiles = dict(zip(("p50_ms", "p95_ms", "p99_ms"), np.percentile(ms, (50, 95, 99)).tolist(), strict=True))
    return quantiles | {
        "chunks_per_s": len(ms) / (end - settled),
        "asked_per_s": robots / PERIOD_S,
        "answered": len(ms) / (end - settled) / (robots / PERIOD_S),
        "least_of_a_robot": min(counts) / (sum(counts) / robots),
        "longest_gap_s": max(gaps),
        "bench_late_p99_ms": float(np.percentile(late, 99) * 1e3),
    }


def arm(robots: int, max_batch: int, seconds: float) -> dict[str, Any]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, max_batch), daemon=True)
    server.start()
    try:
        row = drive(ours.recv(), robots, seconds)
    finally:
        server.kill()
        server.join()
    print(f"{robots} robots, batches of {max_batch}" + "".join(f"  {k} {v:.3g}" for k, v in row.items()), flush=True)
    return row


def reachable(robots: int) -> float:
    """Most chunks/s that a policy can give such robots in time, batch after batch: those of a batch of B are asked for
    before it begins and due after it ends, so they came within ``PERIOD_S`` less its time.
    """
    asked = robots / PERIOD_S
    rates = []
    for n in range(1, MAX_BATCH + 1):
        took = FIXED_S + EACH_S * n
        rates.append(min(n, asked * max(0.0, PERIOD_S - took)) / took)
    return min(asked, max(rates))


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--seconds", type=float, default=20.0)
    p.add_argument("--robots", type=int, nargs="+", default=[10, 40, 100])
    args = p.parse_args()
    data: dict[str, Any] = {"seconds": args.seconds, "before": {}, "now": {}}
    for robots in args.robots:
        data["before"][robots] = arm(robots, 8, args.seconds)  # the batches of `vla serve` where nothing is said
        data["now"][robots] = arm(robots, MAX_BATCH, args.seconds)
    checks: list[Check] = []
    data["load"] = os.getloadavg()[0]
    busy = f"{data['load']:.0f} processes shared {os.cpu_count()} cores"
    for robots in args.robots:
        now, then, most = data["now"][robots], data["before"][robots], reachable(robots)
        checks += [
            Check(
                f"{robots} robots at 2 Hz, batches up to {MAX_BATCH}: p99 of answers, ms",
                now["p99_ms"],
                500,
                "<=",
                why=busy,
            ),
            Check(
                f"{robots} robots: chunks/s over what such a policy can give in time",
                now["chunks_per_s"] / most,
                0.9,
                why=f"{most:.0f} of {now['asked_per_s']:.0f} chunks/s can be in time; {busy}",
            ),
            Check(f"{robots} robots: requests answered in time, of those asked", now["answered"]),
            Check(
                f"{robots} robots: chunks of the robot with fewest, over the mean",
                now["least_of_a_robot"],
                0.5,
                why=busy,
            ),
            Check(f"{robots} robots: longest time without a chunk, s", now["longest_gap_s"], 2.5, "<=", why=busy),
            Check(f"{robots} robots: p50 over that of batches up to 8", now["p50_ms"] / then["p50_ms"]),
        ]
    write("fleet", checks, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
