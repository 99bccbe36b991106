"""openpi's websocket protocol in front of our policies, asked by openpi's unmodified client.

    python tools/bench/openpi.py [--episodes 50] [--frames 1000000] [--stock websocket_policy_server.py]

Four parts. Success of the shipped policy behind both protocols, over the same starts. Round trips of two 224 px
pictures with a policy that takes no time and with the shipped policy's time, the protocols taking turns. Damaged and
random messages to a live server, which then must still answer a good one. And a simulated robot driven by openpi's own
server class, where ``--stock`` names its file (it is in no package).
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from serving import ANY, BURST, Null, Ours, observation, robot
from serving_peers import ACTIONS, HORIZON

from results import Check, parser, write
from vla_stack.schema import ActionChunk, Chunks, Observation, PolicySpec
from vla_stack.serving.clients import Client, open_client
from vla_stack.serving.endpoint import OpenpiAddress
from vla_stack.serving.openpi import Keys, pack, unpack

PAYLOAD = "2x224x224"
TASK = "sim/pick-v0"
START = 50_000  # seed of the first episode
POLICY_S = 0.012  # of a chunk of the shipped policy, about


class Slow(Null):
    """A policy that computes as long as the shipped one."""

    def infer(self, observations: Any, seeds: Any) -> Chunks:
        end, matrix = time.perf_counter() + POLICY_S, np.ones((128, 128), np.float32)
        while time.perf_counter() < end:  # outside of the interpreter's lock, as torch computes
            matrix @ matrix
        return super().infer(observations, seeds)


def served(pipe: Any, make: Callable[[], Any], openpi: bool) -> None:
    """Main function of a server's process."""
    from vla_stack.serving.openpi import Openpi
    from vla_stack.serving.server import PolicyServer, ServerConfig
    from vla_stack.serving.websocket_server import WebsocketServer

    config = ServerConfig(max_rate_hz=1e9, idle_s=1e6)

    def ready(_: Any) -> None:
        pipe.send(server.endpoint)

    server: PolicyServer | WebsocketServer
    if openpi:
        server = WebsocketServer(make, Openpi({}), "ws://127.0.0.1:*", config, on_ready=ready)
    else:
        server = PolicyServer(make, ANY, config, on_ready=ready)
    server.run()


class Server:
    """A server in a process of its own; a context manager that gives its endpoint."""

    def __init__(self, make: Callable[[], Any], openpi: bool) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=served, args=(theirs, make, openpi))

    def __enter__(self) -> str:
        self.process.start()
        return str(self._pipe.recv())

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join()


class Stock:
    """openpi's client on the bench's payload."""

    def __init__(self, endpoint: str) -> None:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy

        self._policy, self._keys = WebsocketClientPolicy(endpoint), Keys.of(robot(PAYLOAD), {})

    def round_trip(self, obs: Observation) -> Any:
        return self._policy.infer(self._keys.message(obs))["actions"]


def shipped() -> Any:
    import torch

    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.directory import resolve_policy

    torch.set_num_threads(1)
    return load_policy(resolve_policy("shipped"))


class Remote:
    """What a simulation asks through a connection, one observation at a time."""

    def __init__(self, spec: PolicySpec, ask: Callable[[Observation, int], np.ndarray]) -> None:
        self.spec, self._ask = spec, ask

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        return Chunks(np.stack([self._ask(o, s) for o, s in zip(observations, seeds, strict=True)]))


def outcomes(spec: PolicySpec, ask: Callable[[Observation, int], np.ndarray], episodes: int) -> list[bool]:
    """Of the simulated robot, whose chunks ``ask`` gets; from pictures, the same starts each time."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.runtime.executor import ExecutorConfig

    executor = ExecutorConfig(mode="sync", execute=spec.horizon // 2)
    result = evaluate(Remote(spec, ask), TASK, episodes, START, executor, num_envs=1)
    return [bool(o) for o in result.outcomes]


def through(client: Client) -> Callable[[Observation, int], np.ndarray]:
    """One chunk at a time of a client of ours that has said hello."""
    count = iter(range(1 << 30))

    def ask(obs: Observation, seed: int) -> np.ndarray:
        client.request(obs, next(count), 0, 0, seed)
        while not (items := client.poll(1000)):
            pass
        assert isinstance(items[0], ActionChunk), items[0]
        return items[0].actions

    return ask


def successes(endpoint: str, openpi: bool, episodes: int) -> list[bool]:
    """Outcomes of the shipped policy behind a protocol; openpi's by its own client."""
    with closing(open_client(OpenpiAddress(endpoint) if openpi else endpoint)) as client:
        spec = client.hello(None)
        assert spec is not None
        if not openpi:
            client.hello(spec.robot)
            return outcomes(spec, through(client), episodes)
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    stock, keys = WebsocketClientPolicy(endpoint), Keys.of(spec.robot, {})
    return outcomes(spec, lambda obs, _: np.asarray(stock.infer(keys.message(obs))["actions"]), episodes)


def trips(requests: int, policy: Callable[[], Any]) -> dict[str, float]:
    """Median round trip by protocol, milliseconds; they take turns in bursts."""
    with Server(policy, False) as ours, Server(policy, True) as theirs:
        arms = {"vla": Ours(PAYLOAD, ours), "openpi": Stock(theirs)}
        obs, times = observation(PAYLOAD), {name: [] for name in arms}
        for burst in range(max(2, requests // BURST)):
            for name, arm in arms.items():
                for _ in range(BURST):
                    begun = time.perf_counter()
                    arm.round_trip(obs)
                    if burst:  # the first warms up
                        times[name].append(time.perf_counter() - begun)
        arms["vla"].close()
    return {name: float(np.median(seconds)) * 1e3 for name, seconds in times.items()}


def fuzz(frames: int) -> dict[str, Any]:
    """What becomes of damaged and random messages, and of the server that got them."""
    from websockets.sync.client import connect

    rng = np.random.default_rng(0)
    spec = robot(PAYLOAD)
    keys = Keys.of(spec, {})
    small = {name: np.zeros((8, 8, 3), np.uint8) for name in keys.cameras}
    good = pack(keys.message(Observation(np.zeros(len(spec.state), np.float32), small, "pick")))
    counts = {"refused": 0, "answered": 0, "dropped": 0}
    server = Server(null, True)
    with server as endpoint:
        peer = connect(endpoint, compression=None, max_size=None)
        peer.recv()
        for _ in range(frames):
            damaged = bytearray(good)
            for _ in range(rng.integers(1, 4)):
                kind, at = rng.integers(4), int(rng.integers(len(damaged))) if damaged else 0
                if kind == 0:
                    damaged[at : at + 1] = bytes([int(rng.integers(256))])
                elif kind == 1:
                    del damaged[at : at + int(rng.integers(1, 64))]
                elif kind == 2:
                    damaged[at:at] = rng.bytes(int(rng.integers(1, 16)))
                else:
                    damaged = bytearray(rng.bytes(int(rng.integers(0, 64))))
            try:
                peer.send(bytes(damaged))
                counts["answered" if isinstance(peer.recv(), bytes) else "refused"] += 1
            except Exception:  # whatever ends a connection is counted, and fails the check below if the server went too
                counts["dropped"] += 1
                peer = connect(endpoint, compression=None, max_size=None)
                peer.recv()
        peer.send(good)
        alive = server.process.is_alive() and unpack(peer.recv())["actions"].shape == (HORIZON, ACTIONS)
    return {**counts, "alive": bool(alive)}


def null() -> Null:
    """A policy that takes no time."""
    return Null(PAYLOAD)


def slow() -> Slow:
    """A policy that takes the shipped one's time."""
    return Slow(PAYLOAD)


def driven_by_stock(file: Path, episodes: int) -> list[bool]:
    """Outcomes of a simulated robot on openpi's own server, which serves the shipped policy."""
    described = importlib.util.spec_from_file_location("stock_server", file)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    policy = shipped()
    keys = Keys.of(policy.spec.robot, {})
    seed = iter(range(1 << 30))

    class Adapter:
        def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
            seen = keys.observation(obs, policy.spec.robot, 0, 0)
            return {"actions": policy.infer([seen], [next(seed)]).actions[0]}

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    threading.Thread(
        target=module.WebsocketPolicyServer(Adapter(), "127.0.0.1", port).serve_forever, daemon=True
    ).start()
    with closing(open_client(OpenpiAddress(f"ws://127.0.0.1:{port}"))) as client:
        spec = client.hello(policy.spec.robot)
        assert spec is not None
        return outcomes(spec, through(client), episodes)


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--episodes", type=int, default=50)
    p.add_argument("--requests", type=int, default=2000, help="round trips a protocol and policy")
    p.add_argument("--frames", type=int, default=1_000_000, help="hostile messages")
    p.add_argument("--stock", type=Path, help="openpi's src/openpi/serving/websocket_policy_server.py")
    args = p.parse_args()
    data: dict[str, Any] = {}
    ended = {}
    for name, openpi in (("vla", False), ("openpi", True)):
        with Server(shipped, openpi) as endpoint:
            ended[name] = successes(endpoint, openpi, args.episodes)
    data["success"] = {name: sum(o) for name, o in ended.items()}
    data["bare_ms"] = trips(args.requests, null)
    data["policy_ms"] = trips(max(100, args.requests // 4), slow)
    data["fuzz"] = fuzz(args.frames)
    ratios = {what: data[what]["openpi"] / data[what]["vla"] for what in ("bare_ms", "policy_ms")}
    checks = [
        Check(f"{TASK}, {args.episodes} episodes: successes by openpi's client minus ours",
              data["success"]["openpi"] - data["success"]["vla"], 0, ">="),
        Check(f"2x224 px, a policy of {POLICY_S * 1e3:.0f} ms: median round trip over our protocol's",
              ratios["policy_ms"], 1.1, "<="),
        Check("2x224 px, a policy of no time: the same", ratios["bare_ms"]),
        Check(f"{args.frames} hostile messages: servers that ended", int(not data["fuzz"]["alive"]), 0, "<="),
    ]  # fmt: skip
    if args.stock:
        data["stock"] = sum(driven_by_stock(args.stock, args.episodes))
        checks.append(
            Check(f"{args.episodes} episodes on openpi's own server: successes minus those on ours",
                  data["stock"] - data["success"]["vla"], 0, ">=")
        )  # fmt: skip
    write("openpi", checks, {"episodes": args.episodes, "frames": args.frames, **data})
    return 0


if __name__ == "__main__":
    sys.exit(main())
