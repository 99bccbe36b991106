"""Round trips of an observation and its chunk through the policy server, beside its peers on the same bytes.

    python tools/bench/serving.py [requests per arm and payload]

Every arm is a server in a process of its own on loopback with a policy that takes no time. The arms take turns in
short bursts within one run, so that what else the machine does meets all alike. Figures are ratios to *echo*: bare
ZeroMQ (ROUTER and DEALER, raw multipart, no copies) that carries the same bytes and does nothing
with them. Then 1, 4 and 8 robots at once, each a process that asks again as soon as it is answered.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_peers as peers
from serving_peers import ACTIONS, HORIZON

from results import Check, parser, write
from vla_stack.schema import ActionChunk, Camera, Chunks, Dim, Observation, PolicySpec, RobotSpec

BURST, FLEET_S = 20, 4.0
PAYLOADS = {"2x224x224": (2, 224, 224), "3x480x640": (3, 480, 640)}
FLEETS = (1, 4, 8)


class Arm(Protocol):
    """One client with its server."""

    def round_trip(self, obs: Observation) -> Any: ...
    def close(self) -> None: ...


def robot(payload: str) -> RobotSpec:
    n, height, width = PAYLOADS[payload]
    dims = tuple(Dim(f"joint_{i}.pos", "rad") for i in range(ACTIONS))
    return RobotSpec("bench/arm", dims, dims, tuple(Camera(f"camera_{i}", height, width) for i in range(n)), 50.0)


def observation(payload: str) -> Observation:
    rng = np.random.default_rng(0)
    spec = robot(payload)
    images = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in spec.cameras}
    return Observation(np.zeros(ACTIONS, np.float32), images, "pick up the red cube", 0, 0)


def megabytes(payload: str) -> float:
    n, height, width = PAYLOADS[payload]
    return (n * height * width * 3 + 4 * ACTIONS + 4 * HORIZON * ACTIONS) / 1e6


class Null:
    """A policy that takes no time."""

    def __init__(self, payload: str) -> None:
        self.spec = PolicySpec(robot(payload), HORIZON, "-", "-")

    def infer(self, observations: Any, seeds: Any) -> Chunks:
        return Chunks(np.zeros((len(observations), HORIZON, ACTIONS), np.float32))


# --- ours ---------------------------------------------------------------------------------------------------------


def serve_ours(pipe: Any, payload: str, endpoint: str, keys: Any = None) -> None:
    from vla_stack.serving.server import PolicyServer, ServerConfig

    # Robots of this bench ask without pause, and then wait for others without a sign of life.
    config = ServerConfig(max_rate_hz=1e9, idle_s=1e6)
    server = PolicyServer(lambda: Null(payload), endpoint, config, on_ready=lambda _: gc.freeze(), keys=keys)
    pipe.send(server.endpoint)
    server.run()


def serve_encrypted(pipe: Any, payload: str, endpoint: str) -> None:
    from vla_stack.serving.keys import KeyFolder, Role

    keys = KeyFolder(key_folder())
    identity = keys.create("bench")
    keys.allow(identity.public, "bench", Role.ROBOT)
    serve_ours(pipe, payload, endpoint, keys)


def key_folder() -> str:
    """The one of this run; servers are children of the process that measures."""
    return os.environ["BENCH_KEYS"]


class Ours:
    def __init__(self, payload: str, address: str, keys: Any = None) -> None:
        from vla_stack.serving.client import PolicyClient

        self._client, self._rid = PolicyClient(address, keys), 0
        self._client.hello(robot(payload))

    def round_trip(self, obs: Observation) -> np.ndarray:
        asked = False
        while True:
            if not asked:
                self._rid += 1
                asked = self._client.request(obs, self._rid, 0, 0, 0)
            for item in self._client.poll(1000 if asked else 1):
                if isinstance(item, ActionChunk):
                    return item.actions
                if item.code != "NO_SESSION":  # the connection was lost while others started: the client says HELLO
                    raise RuntimeError(item)
                asked = False

    def close(self) -> None:
        self._client.close()


class Sent(Ours):
    """Over a Unix socket, but without shared memory for the pictures."""

    def __init__(self, payload: str, address: str) -> None:
        from vla_stack.serving import pixels

        folder, pixels.FOLDER = pixels.FOLDER, Path("/nonexistent")
        super().__init__(payload, address)
        pixels.FOLDER = folder


def encrypted(payload: str, address: str) -> Ours:
    from vla_stack.serving.keys import KeyFolder

    keys = KeyFolder(key_folder())
    keys.trust(address.removeprefix("tcp://"), keys.identity().public)
    return Ours(payload, address, keys)


ANY = "tcp://127.0.0.1:*"
ARMS: dict[str, tuple[Callable, Callable[[str, str], Arm], str]] = {
    "echo tcp": (peers.serve_echo, peers.Echo, ANY),
    "ours tcp": (serve_ours, Ours, ANY),
    "ours ipc": (serve_ours, Sent, "ipc://sent"),
    "ours shared memory": (serve_ours, Ours, "ipc://shared"),
    "ours tcp + CURVE": (serve_encrypted, encrypted, ANY),
    "websocket + msgpack": (peers.serve_websocket, peers.Websocket, ""),
    "LeRobot gRPC": (peers.serve_lerobot, peers.LeRobot, ""),
}


# --- measuring ----------------------------------------------------------------------------------------------------


def start(name: str, payload: str, folder: str) -> tuple[Any, Any]:
    """Server process of an arm and the pipe that tells its address."""
    serve, _, endpoint = ARMS[name]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    address = endpoint.replace("ipc://", f"ipc://{folder}/{payload}-")
    process = context.Process(target=serve, args=(theirs, payload, address))
    process.start()
    theirs.close()
    return process, ours


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentiles(seconds: list[float]) -> dict[str, float]:
    return dict(zip(("p50", "p95", "p99"), (np.percentile(seconds, (50, 95, 99)) * 1e3).tolist(), strict=True))


def measure(payload: str, requests: int, folder: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a round trip, by arm, with what it moves and what its server computes meanwhile."""
    os.environ["BENCH_KEYS"] = tempfile.mkdtemp(dir=folder)
    started = {name: start(name, payload, folder) for name in ARMS}
    clients = {name: ARMS[name][1](payload, pipe.recv()) for name, (_, pipe) in started.items()}
    obs, servers = observation(payload), {name: process for name, (process, _) in started.items()}
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    gc.freeze()
    bursts, warm = max(1, requests // BURST), 2
    try:
        for burst in range(-warm, bursts):
            if burst == 0:
                before = {name: cpu_seconds(server.pid) for name, server in servers.items()}
            for name, arm in clients.items():
                for _ in range(BURST):
                    begin = time.perf_counter()
                    arm.round_trip(obs)
                    if burst >= 0:
                        seconds[name].append(time.perf_counter() - begin)
        after = {name: cpu_seconds(server.pid) for name, server in servers.items()}
    finally:
        for arm in clients.values():
            arm.close()
        for server in servers.values():
            server.kill()
    rows = {}
    for name, each in seconds.items():
        used, wall = after[name] - before[name], sum(each)
        rows[name] = percentiles(each) | {
            "MB_per_s": megabytes(payload) * len(each) / wall,
            "server_cpu_ms": used / len(each) * 1e3,
        }
    return rows


def ask_for_a_while(pipe: Any, name: str, payload: str, address: str) -> None:
    """One robot of a fleet."""
    obs, arm = observation(payload), ARMS[name][1](payload, address)
    for _ in range(BURST):
        arm.round_trip(obs)
    gc.freeze()
    pipe.send("ready")
    pipe.recv()
    seconds, until = [], time.perf_counter() + FLEET_S
    while (begin := time.perf_counter()) < until:
        arm.round_trip(obs)
        seconds.append(time.perf_counter() - begin)
    pipe.send(seconds)
    arm.close()


def fleet(name: str, payload: str, robots: int, folder: str) -> dict[str, float]:
    """Round trips of several robots at once on one server."""
    context = mp.get_context("spawn")
    server, pipe = start(name, payload, folder)
    address, pipes = pipe.recv(), []
    for _ in range(robots):
        ours, theirs = context.Pipe()
        context.Process(target=ask_for_a_while, args=(theirs, name, payload, address), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    before = cpu_seconds(server.pid)
    for pipe in pipes:
        pipe.send("go")
    seconds = [s for pipe in pipes for s in pipe.recv()]
    used = cpu_seconds(server.pid) - before
    server.kill()
    rate = len(seconds) / FLEET_S
    return percentiles(seconds) | {"MB_per_s": megabytes(payload) * rate, "server_cpu": used / FLEET_S}


def main(requests: int) -> None:
    checks: list[Check] = []
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for payload in PAYLOADS:
            rows = data[payload] = measure(payload, requests, folder)
            for name, row in rows.items():
                print(f"{payload}  {name:20}" + "".join(f"  {k} {v:8.3f}" for k, v in row.items()), flush=True)
            p50 = {name: row["p50"] for name, row in rows.items()}
            ours, least = p50["ours tcp"], p50["LeRobot gRPC"] / p50["websocket + msgpack"]
            more, share = ours - p50["echo tcp"], p50["echo tcp"] / p50["websocket + msgpack"]
            why = (
                f"{more:.2f} ms of Python at both ends, whatever the size; the echo alone takes {share:.2f} of the peer"
            )
            checks += [
                Check(f"{payload}: ours over tcp / bare echo, p50", ours / p50["echo tcp"], 1.5, "<=", why=why),
                Check(
                    f"{payload}: ours over tcp / websocket, p50", ours / p50["websocket + msgpack"], 0.5, "<=", why=why
                ),
                Check(f"{payload}: LeRobot gRPC / websocket, p50", least, 1.0),
                Check(f"{payload}: LeRobot gRPC / ours over tcp, p50", p50["LeRobot gRPC"] / ours, 1.0),
                Check(f"{payload}: ours, with CURVE / without, p50", p50["ours tcp + CURVE"] / ours),
                Check(f"{payload}: ours, ipc / tcp, p50", p50["ours ipc"] / ours),
                Check(f"{payload}: ours, shared memory / tcp, p50", p50["ours shared memory"] / ours),
            ]
        data["fleet"] = {}
        for name in ("ours tcp", "echo tcp"):
            for robots in FLEETS:
                row = data["fleet"][f"{name}, {robots} robots"] = fleet(name, "2x224x224", robots, folder)
                print(f"{name}, {robots} robots" + "".join(f"  {k} {v:8.3f}" for k, v in row.items()), flush=True)
    write("serving", checks, data, seeds=[0])


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument(
        "requests", type=int, nargs="?", default=1500, help="for each arm and payload (default: %(default)s)"
    )
    main(p.parse_args().requests)
