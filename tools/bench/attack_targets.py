"""The ends that ``attacks.py`` attacks, each the main function of a process, and how who belongs there uses them."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing as mp
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pages

from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.schema import Camera, Chunks, Dim, Observation, PolicySpec, RobotSpec
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.dialer import Dialer
from vla_stack.serving.keys import KeyFolder, client_keys

DIMS = (Dim("x.pos", "m", -1, 1, 0.5), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
ROBOT = RobotSpec("bench/arm", DIMS, DIMS, (), 50.0)
PICTURES = RobotSpec("bench/arm", DIMS, DIMS, (Camera("front", 128, 128), Camera("wrist", 128, 128)), 20.0)
PATIENCE_S, EVERY_S = 20.0, 0.01
Asking = tuple[Callable[[], None], Callable[[], None]]  # one round trip; leave
GATEWAY = "gateway"


class NullPolicy:
    """A policy that takes no time."""

    spec = PolicySpec(ROBOT, 4, "-", "-")

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        return Chunks(np.zeros((len(observations), 4, 2), np.float32))


class Arm:
    """A robot that does nothing."""

    spec, fault = ROBOT, None

    def read(self) -> Any: ...
    def hold(self) -> None: ...
    def stop(self) -> None: ...


# -- ends, each the main function of a process -------------------------------------------------------------------------


def serve_policy(pipe: Any, keys: KeyFolder | None) -> None:
    from vla_stack.serving.server import PolicyServer

    def on_ready(_: PolicySpec) -> None:
        gc.freeze()  # as `vla serve` does
        pipe.send(server.endpoint)

    server = PolicyServer(lambda: NullPolicy(), "tcp://127.0.0.1:*", keys=keys, on_ready=on_ready)
    server.run()


def serve_robot(pipe: Any, keys: KeyFolder | None) -> None:
    from robot_drivers.remote_service import MAX_BYTES, serve_driver
    from vla_stack.runtime.limits import make_envelope
    from vla_stack.runtime.safety import SafetyConfig
    from vla_stack.serving.admission import Admission
    from vla_stack.serving.listener import Listener

    admission = Admission(keys) if keys else None
    listener = Listener("tcp://127.0.0.1:*", admission, MAX_BYTES)
    pipe.send(listener.endpoint)
    arm: Any = Arm()
    serve_driver(arm, make_envelope(ROBOT, SafetyConfig()), listener, lambda: True, admission=admission)


def serve_operator(pipe: Any, keys: KeyFolder | None) -> None:
    from vla_stack.runtime.link import Link
    from vla_stack.runtime.operator_port import OperatorPort

    control, theirs = mp.Pipe()
    stops, estop = mp.Pipe()
    endpoint = f"tcp://127.0.0.1:{20_000 + 5 * (os.getpid() % 2000)}"  # five in a row that no connection is given
    port = OperatorPort(theirs, estop, ROBOT, endpoint, keys)
    pipe.send(endpoint)
    links = Link(control), Link(stops)
    while True:
        for message in links[0].receive(0.01):
            if message["kind"] == "event":
                links[0].send("reply", id=message["id"], ok=True, error="", phase="auto", tick=7)
        links[1].receive()
        port.tell(alive=True)


def serve_gateway(pipe: Any, keys: KeyFolder | None) -> None:
    """A gateway and, as threads, the node behind it: 20 states and pairs of pictures a second."""
    from vla_stack.console.access import Access
    from vla_stack.console.door import opened
    from vla_stack.console.gateway import About, Gateway
    from vla_stack.runtime.link import Link
    from vla_stack.runtime.operator_port import OperatorPort

    control, theirs = mp.Pipe()
    stops, estop = mp.Pipe()
    folder = tempfile.TemporaryDirectory()
    endpoint = f"ipc://{folder.name}/op"
    facts = {"recording": {"pending": None, "error": ""}}
    port = OperatorPort(theirs, estop, PICTURES, endpoint, facts=facts)
    noise = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)

    def drive() -> None:
        links, tick = (Link(control), Link(stops)), 0
        while True:
            for message in links[0].receive(PICTURES.dt):
                if message["kind"] == "event":
                    links[0].send("reply", id=message["id"], ok=True, error="", phase="auto", tick=tick)
            links[1].receive()
            tick += 1
            links[0].send("state", phase="auto", tick=tick, run="run", why="")
            images = dict.fromkeys((c.name for c in PICTURES.cameras), noise)
            port.show(Observation(np.zeros(2, np.float32), images, "", tick, time.monotonic_ns()))

    async def serve() -> None:
        access = Access("127.0.0.1", 20_000 + 2 * (os.getpid() % 5000), False)
        gateway = Gateway(OperatorClient(endpoint), About(PICTURES, (), "teleop", Path(folder.name)), access)
        async with opened(gateway.app(), gateway.door, "127.0.0.1", access.port):
            pipe.send(access)
            await asyncio.Event().wait()

    threading.Thread(target=drive, daemon=True).start()
    asyncio.run(serve())


# -- peers that belong there: one round trip, by a connection that is kept or by a new one -----------------------------


def ask_policy(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = PolicyClient(endpoint, keys)
    client.hello(None if keys and newcomer else ROBOT, PATIENCE_S)  # one key drives one robot

    def ask() -> None:
        before, end = client.last_pong_ns, time.monotonic() + PATIENCE_S
        client.ping()
        while client.last_pong_ns == before:
            client.poll(50)
            if time.monotonic() > end:
                raise TimeoutError

    return ask, client.close


def ask_robot(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    dialer = Dialer(endpoint, client_keys(endpoint, keys))
    return partial(_ask, dialer, msgpack.packb({"kind": "hello", "token": ""})), dialer.close


def _ask(dialer: Dialer, message: bytes) -> None:
    end, sent = time.monotonic() + PATIENCE_S, False
    while not dialer.receive(0.05 if sent else 0.002):
        sent = sent or dialer.send([message])
        if time.monotonic() > end:
            raise TimeoutError


def ask_events(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = OperatorClient(endpoint, keys)

    def ask() -> None:
        client.call("acquire", PATIENCE_S)

    return ask, client.close


def ask_estop(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = OperatorClient(endpoint, keys)
    return client.estop, client.close


def ask_state(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = OperatorClient(endpoint, keys)

    def ask() -> None:
        before, end = client.state.get("t_sent_ns"), time.monotonic() + PATIENCE_S
        while client.state.get("t_sent_ns") == before:
            client.poll(20)
            if time.monotonic() > end:
                raise TimeoutError

    return ask, client.close


def ask_page(access: Any, keys: KeyFolder | None, newcomer: bool) -> Asking:
    page = pages.Page(access, pages.session(access))
    if newcomer:
        return lambda: _first_picture(page), page.close
    return page.round_trip, page.close


def _first_picture(page: pages.Page) -> None:
    page.wait_for(lambda message: "camera" in message)


@dataclass(frozen=True)
class Target:
    """A socket.

    Attributes:
        serve: The process behind it.
        ask: How who belongs there uses it.
        channel: Of an operator's endpoint, empty elsewhere.
        every_s: Between two of its questions.
        member: Whose key it uses.
    """

    serve: Callable[[Any, KeyFolder | None], None]
    ask: Callable[[Any, KeyFolder | None, bool], Asking]
    channel: str = ""
    every_s: float = EVERY_S
    member: str = "operator"


TARGETS = {
    "policy server": Target(serve_policy, ask_policy, member="robot"),
    "robot service": Target(serve_robot, ask_robot, every_s=0.12),
    "operator events": Target(serve_operator, ask_events, "event"),
    "operator e-stop": Target(serve_operator, ask_estop, "estop", 0.15),
    "operator state": Target(serve_operator, ask_state, "state"),
    "operator pictures": Target(serve_operator, ask_events, "video"),
    "operator hand": Target(serve_operator, ask_events, "teleop"),
    GATEWAY: Target(serve_gateway, ask_page),
}
