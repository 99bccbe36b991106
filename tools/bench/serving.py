"""Round trips of an observation and its chunk through the policy server, beside its peers on the same bytes.

    python tools/bench/serving.py [requests per arm and payload]

Every arm is a server in a process of its own on loopback with a policy that takes no time. The arms take turns in
short bursts within one run, so that what else the machine does meets all alike. Figures are ratios to *echo*: bare
ZeroMQ (ROUTER and DEALER, raw multipart, no copies) that carries the same bytes and does nothing with them.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, write
from vla_stack.schema import Camera, Chunks, Dim, Observation, PolicySpec, RobotSpec

HORIZON, ACTIONS, BURST = 50, 32, 20
PAYLOADS = {"2x224x224": (2, 224, 224), "3x480x640": (3, 480, 640)}


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


class Null:
    """A policy that takes no time."""

    def __init__(self, payload: str) -> None:
        self.spec = PolicySpec(robot(payload), HORIZON, "-", "-")

    def infer(self, observations: Any, seeds: Any) -> Chunks:
        return Chunks(np.zeros((len(observations), HORIZON, ACTIONS), np.float32))


# --- ours ---------------------------------------------------------------------------------------------------------


def serve_ours(pipe: Any, payload: str, endpoint: str) -> None:
    from vla_stack.serving.server import PolicyServer, ServerConfig

    server = PolicyServer(lambda: Null(payload), endpoint, ServerConfig(max_rate_hz=math.inf))
    pipe.send(server.endpoint)
    server.run()


class Ours:
    def __init__(self, payload: str, address: str) -> None:
        from vla_stack.serving.client import PolicyClient

        self._client, self._rid = PolicyClient(address), 0
        self._client.hello(robot(payload))

    def round_trip(self, obs: Observation) -> np.ndarray:
        self._rid += 1
        while not self._client.request(obs, self._rid, 0, 0, 0):
            pass
        while True:
            for item in self._client.poll(1000):
                return item.actions  # type: ignore[union-attr]

    def close(self) -> None:
        self._client.close()


# --- peers --------------------------------------------------------------------------------------------------------


def serve_echo(pipe: Any, payload: str, endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    pipe.send(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    reply = np.zeros((HORIZON, ACTIONS), np.float32)
    while True:
        frames = socket.recv_multipart(copy=False)
        socket.send_multipart([frames[0], frames[1], reply], copy=False)


class Echo:
    def __init__(self, payload: str, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)

    def round_trip(self, obs: Observation) -> Any:
        self._socket.send_multipart([b"h" * 200, obs.state, *obs.images.values()], copy=False)
        return self._socket.recv_multipart(copy=False)

    def close(self) -> None:
        self._socket.close(linger=0)


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"__nd__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    return value


def _unpack_array(value: dict) -> Any:
    return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"]) if "__nd__" in value else value


def serve_websocket(pipe: Any, payload: str, endpoint: str) -> None:
    import msgpack
    from aiohttp import WSMsgType, web

    async def handle(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=0, compress=False)
        await ws.prepare(request)
        async for message in ws:
            if message.type is WSMsgType.BINARY:
                msgpack.unpackb(message.data, object_hook=_unpack_array)
                reply = {"actions": np.zeros((HORIZON, ACTIONS), np.float32)}
                await ws.send_bytes(msgpack.packb(reply, default=_pack_array))
        return ws

    import asyncio
    import socket

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        await asyncio.Event().wait()

    asyncio.run(main())


class Websocket:
    """As openpi serves: one WebSocket message of msgpack with arrays inside, each way."""

    def __init__(self, payload: str, address: str) -> None:
        import asyncio

        import aiohttp

        self._loop = asyncio.new_event_loop()

        async def connect() -> None:
            self._session = aiohttp.ClientSession()
            self._ws = await self._session.ws_connect(address, max_msg_size=0)

        self._loop.run_until_complete(connect())

    def round_trip(self, obs: Observation) -> Any:
        import msgpack

        body = {"state": obs.state, "prompt": obs.task, **obs.images}

        async def exchange() -> bytes:
            await self._ws.send_bytes(msgpack.packb(body, default=_pack_array))
            return await self._ws.receive_bytes()

        return msgpack.unpackb(self._loop.run_until_complete(exchange()), object_hook=_unpack_array)

    def close(self) -> None:
        self._loop.run_until_complete(self._ws.close())
        self._loop.run_until_complete(self._session.close())


ARMS: dict[str, tuple[Callable, Callable[[str, str], Arm], str]] = {
    "echo tcp": (serve_echo, Echo, "tcp://127.0.0.1:*"),
    "ours tcp": (serve_ours, Ours, "tcp://127.0.0.1:*"),
    "ours ipc": (serve_ours, Ours, "ipc:///tmp/vla-bench-serving"),
    "websocket + msgpack": (serve_websocket, Websocket, ""),
}


def measure(payload: str, requests: int) -> dict[str, list[float]]:
    """Seconds of each round trip, by arm."""
    context = mp.get_context("spawn")
    obs, clients, servers = observation(payload), {}, []
    for name, (serve, client, endpoint) in ARMS.items():
        ours, theirs = context.Pipe()
        servers.append(context.Process(target=serve, args=(theirs, payload, endpoint), daemon=True))
        servers[-1].start()
        clients[name] = client(payload, ours.recv())
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    try:
        for burst in range(-2, max(1, requests // BURST)):
            for name, arm in clients.items():
                for _ in range(BURST):
                    begin = time.perf_counter()
                    arm.round_trip(obs)
                    if burst >= 0:
                        seconds[name].append(time.perf_counter() - begin)
    finally:
        for arm in clients.values():
            arm.close()
        for server in servers:
            server.kill()
    return seconds


def main(requests: int) -> None:
    checks, data = [], {}
    for payload in PAYLOADS:
        seconds = measure(payload, requests)
        ms = {name: dict(zip(("p50", "p95", "p99"), (np.percentile(s, (50, 95, 99)) * 1e3).tolist(), strict=True))
              for name, s in seconds.items()}  # fmt: skip
        data[payload] = ms
        for name, row in ms.items():
            print(f"{payload}  {name:20}" + "".join(f"  {k} {v:7.3f} ms" for k, v in row.items()))
        ours = ms["ours tcp"]["p50"]
        checks.append(
            Check(f"{payload}: ours over tcp / bare echo, p50", float(ours / ms["echo tcp"]["p50"]), 1.5, "<=")
        )
        peer = ms["websocket + msgpack"]["p50"]
        checks.append(Check(f"{payload}: ours over tcp / websocket, p50", float(ours / peer), 0.5, "<="))
    write("serving", checks, data, seeds=[0])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
