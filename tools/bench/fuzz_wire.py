"""A million hostile messages for the decoder, and some thousands for a server that serves a robot meanwhile.

    python tools/bench/fuzz_wire.py [messages]

Three quarters are edits of valid messages of every kind, one quarter is noise (``hostile.py``). What the decoder
accepts is read as every kind of content. Anything but ``WireError`` is a crash; resident memory may not grow with the
number of messages. The tests do the same with ten thousand.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from hostile import mutate, noise

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.schema import ActionChunk, Camera, Chunks, Continuation, Dim, Observation, PolicySpec, RobotSpec
from vla_stack.serving import messages, wire
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.server import PolicyServer, ServerConfig
from vla_stack.serving.wire import Code, Kind, Message, WireError

MESSAGES, TO_SERVER, SETTLED = 1_000_000, 20_000, 50_000
MIB = 1 << 20
DIMS = (Dim("x.pos", "m"), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
ROBOT = RobotSpec("bench/two", DIMS, DIMS, (Camera("front", 6, 8), Camera("wrist", 4, 4)), 10.0)
POLICY = PolicySpec(ROBOT, 4, "n", "m", d_train_max=2, extras={"continues": ["prefix"]})
ACTIONS = np.zeros((4, 2), np.float32)


def observation() -> Observation:
    images = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in ROBOT.cameras}
    return Observation(np.array([0.5, 1.0], np.float32), images, "pick", 5, 1000)


def valid() -> list[list[bytes]]:
    sid = "s" * 32
    kinds = [
        messages.hello(ROBOT, 3),
        messages.welcome(POLICY, sid, 3),
        messages.infer(observation(), sid, 1, 2, 5, 7),
        messages.infer(observation(), sid, 1, 2, 5, 7, Continuation("prefix", ACTIONS, 2, 2), 50),
        messages.chunk(ActionChunk(ACTIONS, 5, 5, 2, 1, sid), 1000),
        Message(Kind.PING, fields={"t0": 12345}),
        Message(Kind.PONG, sid, fields={"t0": 1, "t1": 2, "t2": 3}),
        Message(Kind.RESET, sid, 4),
        wire.error(Code.BUSY, "later", sid, 1, 2),
    ]
    return [[bytes(frame) for frame in wire.encode(message)] for message in kinds]


READERS: tuple[Callable[[Message], Any], ...] = (
    messages.read_hello,
    messages.read_welcome,
    lambda m: messages.read_infer(m, ROBOT),
    lambda m: messages.read_continuation(m, POLICY),
    lambda m: messages.read_chunk(m, POLICY),
)


def hostile(rng: np.random.Generator, seeds: list[list[bytes]]) -> list[bytes]:
    return noise(rng) if rng.random() < 0.25 else mutate(rng, seeds[rng.integers(len(seeds))])


def resident(process: str = "self") -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def decode_all(n: int) -> dict[str, Any]:
    rng, seeds, counts = np.random.default_rng(0), valid(), Counter[str]()
    before, begun = 0, time.monotonic()
    for i in range(n):
        if i == min(SETTLED, n // 10):
            before = resident()
        frames = hostile(rng, seeds)
        try:
            message = wire.decode(frames)
            counts["accepted"] += 1
        except WireError as e:
            counts[f"refused {e.code}"] += 1
            continue
        except Exception as e:
            counts[f"crash {type(e).__name__}"] += 1
            continue
        for read in READERS:
            try:
                read(message)
                counts["content read"] += 1
            except WireError:
                pass
            except Exception as e:
                counts[f"crash {type(e).__name__}"] += 1
    seconds = time.monotonic() - begun
    return {"messages": n, "counts": dict(counts), "grown_mib": (resident() - before) / MIB, "seconds": seconds}


class Still:
    spec = POLICY

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        return Chunks(np.zeros((len(observations), 4, 2), np.float32))


def serve(pipe: Any) -> None:
    server = PolicyServer(Still, "tcp://127.0.0.1:*", ServerConfig(max_rate_hz=float("inf")))
    pipe.send(server.endpoint)
    server.run()


def attack_server(n: int) -> dict[str, Any]:
    """Hostile messages from a stranger, in bursts; after each burst a robot asks for a chunk."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    endpoint = here.recv()
    robot = PolicyClient(endpoint)
    robot.hello(ROBOT)
    rng, seeds, zmq_context = np.random.default_rng(1), valid(), zmq.Context()
    stranger = zmq_context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    served, before, burst = 0, 0, 100
    for i in range(n // burst):
        for _ in range(burst):
            stranger.send_multipart(hostile(rng, seeds) or [b""])
            with suppress(zmq.Again):
                while True:
                    stranger.recv_multipart(zmq.NOBLOCK)
        robot.request(observation(), rid=i, epoch=0, origin=0, seed=0)
        end = time.monotonic() + 5.0
        while not (items := [x for x in robot.poll(100) if isinstance(x, ActionChunk)]) and time.monotonic() < end:
            pass
        served += len(items)
        if i == 20:
            before = resident(str(process.pid))
    grown = (resident(str(process.pid)) - before) / MIB
    alive = process.is_alive()
    robot.close()
    zmq_context.destroy(linger=0)
    process.kill()
    return {"messages": n, "robot_asked": n // burst, "robot_served": served, "grown_mib": grown, "alive": alive}


def main(n: int) -> int:
    decoder, server = decode_all(n), attack_server(min(n, TO_SERVER))
    crashes = sum(count for what, count in decoder["counts"].items() if what.startswith("crash"))
    checks = [
        Check(f"decoder: crashes in {n} hostile messages", crashes, 0, "<="),
        Check(
            "decoder: accepted messages, so that both sides of the border were visited",
            decoder["counts"]["accepted"],
            n / 100,
        ),
        Check("decoder: growth of resident memory, MiB", decoder["grown_mib"], 8.0, "<="),
        Check(
            "server under attack: requests of a robot not served",
            server["robot_asked"] - server["robot_served"],
            0,
            "<=",
        ),
        Check("server under attack: growth of resident memory, MiB", server["grown_mib"], 16.0, "<="),
    ]
    write("fuzz_wire", checks, {"decoder": decoder, "server": server}, seeds=[0, 1])
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument(
        "messages",
        type=int,
        nargs="?",
        default=MESSAGES,
        help="for the decoder; a share of them for the server (default: %(default)s)",
    )
    sys.exit(main(p.parse_args().messages))
