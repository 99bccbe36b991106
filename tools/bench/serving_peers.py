"""The other servers of ``tools/bench/serving.py``: an echo, a websocket server in openpi's manner, LeRobot's own."""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq

from vla_stack.schema import Observation

HORIZON, ACTIONS = 50, 32


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# --- bare ZeroMQ ---------------------------------------------------------------------------------------------------


def serve_echo(pipe: Any, payload: str, endpoint: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    reply = np.zeros((HORIZON, ACTIONS), np.float32)
    while True:
        frames = router.recv_multipart(copy=False)
        router.send_multipart([frames[0], frames[1], reply], copy=False)


class Echo:
    """Carries the same bytes in the same frames and does nothing with them."""

    def __init__(self, payload: str, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)

    def round_trip(self, obs: Observation) -> Any:
        self._socket.send_multipart([b"h" * 200, obs.state, *obs.images.values()], copy=False)
        return self._socket.recv_multipart(copy=False)

    def close(self) -> None:
        self._socket.close(linger=0)


# --- websocket and msgpack, as openpi serves -----------------------------------------------------------------------


def pack(body: Any) -> bytes:
    import msgpack

    def array(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {b"__nd__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
        return value

    return bytes(msgpack.packb(body, default=array))


def unpack(data: bytes) -> Any:
    import msgpack

    def array(value: dict) -> Any:
        if b"__nd__" in value:
            return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
        return value

    return msgpack.unpackb(data, object_hook=array)


def serve_websocket(pipe: Any, payload: str, endpoint: str) -> None:
    import asyncio

    from websockets.asyncio.server import ServerConnection, serve

    async def handle(connection: ServerConnection) -> None:
        async for message in connection:
            unpack(message)  # type: ignore[arg-type]
            await connection.send(pack({"actions": np.zeros((HORIZON, ACTIONS), np.float32)}))

    async def main() -> None:
        async with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
            pipe.send(f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}")
            await server.serve_forever()

    asyncio.run(main())


class Websocket:
    """One message of msgpack with the arrays inside each way; the synchronous client, compression off."""

    def __init__(self, payload: str, address: str) -> None:
        from websockets.sync.client import connect

        self._connection = connect(address, compression=None, max_size=None)

    def round_trip(self, obs: Observation) -> Any:
        self._connection.send(pack({"state": obs.state, "prompt": obs.task, **obs.images}))
        return unpack(self._connection.recv())  # type: ignore[arg-type]

    def close(self) -> None:
        self._connection.close()


# --- LeRobot's asynchronous inference, its own code on both ends ---------------------------------------------------


def elsewhere() -> contextlib.AbstractContextManager[None]:
    """For imports that make a folder of logs in the working directory."""
    return contextlib.chdir(tempfile.gettempdir())


def serve_lerobot(pipe: Any, payload: str, endpoint: str) -> None:
    from concurrent import futures

    import grpc
    import torch
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.transport import services_pb2_grpc

    with elsewhere():
        from lerobot.async_inference.policy_server import PolicyServer

    class Null(PolicyServer):
        """Everything but the policy: no conversion to tensors, no processors, no model."""

        def _predict_action_chunk(self, observation_t: Any) -> Any:
            chunk = list(torch.zeros(HORIZON, ACTIONS))
            return self._time_action_chunk(observation_t.get_timestamp(), chunk, observation_t.get_timestep())

    logging.disable(logging.INFO)
    port = free_port()
    # Its default would sleep until 33 ms have passed.
    policy_server = Null(PolicyServerConfig(host="127.0.0.1", port=port, inference_latency=0.0))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(policy_server, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    server.wait_for_termination()


class LeRobot:
    """An observation is streamed by one call, its chunk is fetched by another."""

    def __init__(self, payload: str, address: str) -> None:
        import grpc
        from lerobot.transport import services_pb2, services_pb2_grpc
        from lerobot.transport.utils import grpc_channel_options

        with elsewhere():
            from lerobot.async_inference.robot_client import RobotClient

        logging.disable(logging.INFO)
        self._channel = grpc.insecure_channel(address, grpc_channel_options(initial_backoff="0.0333s"))
        self._stub = services_pb2_grpc.AsyncInferenceStub(self._channel)
        self._empty, self._step = services_pb2.Empty(), 0
        self._robot = SimpleNamespace(running=True, stub=self._stub, logger=RobotClient.logger)  # no hardware
        self._send = RobotClient.send_observation
        self._stub.Ready(self._empty)

    def round_trip(self, obs: Observation) -> Any:
        from lerobot.async_inference.helpers import TimedObservation
        from lerobot.transport.utils import bytes_to_python_object

        self._step += 1
        joints = {f"joint_{i}.pos": float(x) for i, x in enumerate(obs.state)}
        raw = {**joints, **obs.images, "task": obs.task}
        timed = TimedObservation(timestamp=time.time(), timestep=self._step, observation=raw, must_go=True)
        self._send(self._robot, timed)  # type: ignore[arg-type]
        return bytes_to_python_object(self._stub.GetActions(self._empty).data)

    def close(self) -> None:
        self._channel.close()
