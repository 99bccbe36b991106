"""Three 640x480 cameras over links of 1 Gbit/s and 200 Mbit/s, with keys; and what pictures in JPEG do to success.

    python tools/bench/network.py [--requests 200] [--episodes 100] [--local 1000]

A link is two network namespaces of this script's own, a veth pair between them and ``tc`` at both ends (token bucket,
no delay beyond it); they are gone when it ends. It needs root, ``ip`` and ``tc``. The policy takes no time and reads
224 px pictures, as pi0 does, so a round trip is what the network and the wire add to inference. Pictures are frames
of the simulation with a camera's noise, as JPEG's size depends on what is in them. In each form the same requests
take turns. Where the machine does other things meanwhile, its load is kept beside the figures, and what both ends
computed for a request, one after the other, with its bytes over the link's rate says what an idle one would take.

Success is that of the shipped policy on paired starts, its pictures through the codec and not. Round trips of two 224
px pictures on this machine stand beside openpi's manner (msgpack over a websocket), and keys beside none.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving as bench
from serving_peers import ACTIONS, HORIZON

from results import Check, parser, write
from vla_stack.errors import UserError
from vla_stack.schema import ActionChunk, Camera, Chunks, Dim, Observation, PolicySpec, RobotSpec
from vla_stack.statistics import paired_interval

SERVER, PORT = "10.213.7.1", 5555
LINKS = {"1 Gbit/s": ("1gbit", 8.0, 1e6), "200 Mbit/s": ("200mbit", 15.0, 2e5)}  # rate, ms that are asked, bits a ms
FORMS = ("camera", "raw", "jpeg", "auto")
TASK, START = "sim/pick-v0", 60_000
STARTS = 7  # of the servers on this machine
NOISE = 4.0  # grey levels, of a camera indoors
DIMS = tuple(Dim(f"joint_{i}.pos", "rad") for i in range(ACTIONS))
ROBOT = RobotSpec("bench/arm", DIMS, DIMS, tuple(Camera(f"camera_{i}", 480, 640) for i in range(3)), 50.0)


class Null:
    """A policy that takes no time and reads pictures as pi0 does."""

    def __init__(self) -> None:
        from vla_stack.images import touching

        reads = {c.name: touching((c.height, c.width), (224, 224)) for c in ROBOT.cameras}
        self.spec = PolicySpec(ROBOT, HORIZON, "-", "-", reads={name: r for name, r in reads.items() if r})

    def infer(self, observations: Any, seeds: Any) -> Chunks:
        return Chunks(np.zeros((len(observations), HORIZON, ACTIONS), np.float32))


def scenes(count: int) -> list[Observation]:
    """What three cameras see of the simulation, with noise."""
    from vla_stack.envs.making import construct

    rng, cameras = np.random.default_rng(0), ("front", "wrist")
    env = construct(TASK, image_size=640, cameras=cameras)  # it renders squares
    try:
        seen = [env.reset(seed=START + i)[0]["pixels"][camera][80:560] for i in range(2 * count) for camera in cameras]
    finally:
        env.close()
    noisy = [np.clip(p + rng.normal(0, NOISE, p.shape), 0, 255).astype(np.uint8) for p in seen]
    found = []
    for i in range(count):
        images = {c.name: noisy[3 * i + k] for k, c in enumerate(ROBOT.cameras)}
        found.append(Observation(np.zeros(ACTIONS, np.float32), images, "pick up the red cube", i, i))
    return found


# --- a link -------------------------------------------------------------------------------------------------------


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(words)}: {done.stderr.strip()}", "the bench needs root and its own namespaces")


@contextmanager
def link(rate: str) -> Iterator[tuple[str, str]]:
    """Two namespaces with a veth pair of that rate each way; their names, the server's first."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(f"'{tool}' is missing", "install iproute2")
    names = tuple(f"vla-bench-{os.getpid()}-{end}" for end in ("server", "robot"))
    ends = (("veth-s", f"{SERVER}/24"), ("veth-r", "10.213.7.2/24"))
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh(
            "ip",
            "link",
            "add",
            "veth-s",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth-r",
            "netns",
            names[1],
        )
        for name, (device, address) in zip(names, ends, strict=True):
            inside = ("ip", "netns", "exec", name)
            sh(*inside, "ip", "addr", "add", address, "dev", device)
            sh(*inside, "ip", "link", "set", device, "up")
            sh(*inside, "ip", "link", "set", "lo", "up")
            shape = ("rate", rate, "burst", "64kb", "latency", "50ms")
            sh(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield names  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def child(name: str, role: str, *arguments: str) -> subprocess.Popen[str]:
    """This script in another role, inside a namespace."""
    words = ("ip", "netns", "exec", name, sys.executable, __file__, "--role", role, *arguments)
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def serve(folder: str) -> None:
    from vla_stack.serving.keys import KeyFolder
    from vla_stack.serving.server import PolicyServer, ServerConfig

    config = ServerConfig(max_rate_hz=1e9, idle_s=1e6)
    PolicyServer(
        Null, f"tcp://{SERVER}:{PORT}", config, on_ready=lambda _: print("READY", flush=True), keys=KeyFolder(folder)
    ).run()


def ask(client: Any, obs: Observation, rid: int) -> float:
    """Milliseconds of a round trip."""
    begun = time.perf_counter()
    assert client.request(obs, rid, 0, 0, 0)
    while not (items := client.poll(1000)):
        pass
    assert isinstance(items[0], ActionChunk), items[0]
    return 1e3 * (time.perf_counter() - begun)


def busy(process: int) -> float:
    """Milliseconds that a process has computed, by the kernel's clock of it (clock_getcpuclockid(3))."""
    return 1e3 * time.clock_gettime((~process << 3) | 2)


def robot(folder: str, requests: int, server: int) -> None:
    """Print round trips by form, the forms taking turns, and what both ends computed for one."""
    import json

    from vla_stack.serving import wire
    from vla_stack.serving.client import PolicyClient
    from vla_stack.serving.keys import KeyFolder
    from vla_stack.serving.pictures import Pictures

    sent: list[int] = []
    encode = wire.encode

    def counted(message: wire.Message) -> list[bytes | memoryview]:
        frames = encode(message)
        if message.kind is wire.Kind.INFER:
            sent.append(sum(map(len, frames)))
        return frames

    wire.encode = counted
    state, seen = np.zeros(ACTIONS, np.float32), []
    for i, file in enumerate(sorted(Path(folder).glob("*.npz"))):
        with np.load(file, allow_pickle=False) as images:
            seen.append(Observation(state, dict(images), "pick up the red cube", i, i))
    clients = {}
    for form in FORMS:
        keys = KeyFolder(f"{folder}/robot-{form}")
        clients[form] = PolicyClient(f"tcp://{SERVER}:{PORT}", keys, Pictures.parse(form))
        clients[form].hello(ROBOT, 60.0)
    gc.freeze()
    ms: dict[str, list[float]] = {form: [] for form in FORMS}
    cpu: dict[str, list[float]] = {form: [] for form in FORMS}
    size: dict[str, list[int]] = {form: [] for form in FORMS}
    for n in range(-5, requests):
        for form, client in clients.items():
            before = busy(server) + busy(os.getpid())
            took = ask(client, seen[n % len(seen)], n + 5)
            if n >= 0:
                ms[form].append(took)
                cpu[form].append(busy(server) + busy(os.getpid()) - before)
                size[form].append(sent[-1])
            client.ping()  # a robot does, twice a second
            client.poll(0)
    rows = {}
    for form in FORMS:
        quantiles = dict(zip(("p5", "p50", "p95"), np.percentile(ms[form], (5, 50, 95)).tolist(), strict=True))
        rows[form] = quantiles | {"kB": float(np.mean(size[form])) / 1e3, "cpu": float(np.median(cpu[form]))}
    chosen = str(clients["auto"].sends)
    print(json.dumps({"rows": rows, "chosen": chosen}), flush=True)
    for client in clients.values():
        client.close()


def over(rate: str, requests: int, seen: list[Observation]) -> dict[str, Any]:
    """Round trips of each form through a link of that rate, encrypted."""
    import json

    from vla_stack.serving.keys import KeyFolder, Role

    with tempfile.TemporaryDirectory() as folder, link(rate) as (there, here):
        server_keys = KeyFolder(f"{folder}/server")
        public = server_keys.create("server").public
        for form in FORMS:
            mine = KeyFolder(f"{folder}/robot-{form}")
            server_keys.allow(mine.create(form).public, form, Role.ROBOT)
            mine.trust(f"{SERVER}:{PORT}", public)
        for i, obs in enumerate(seen):
            np.savez(f"{folder}/{i}.npz", **obs.images)
        server = child(there, "serve", f"{folder}/server")
        try:
            assert server.stdout is not None and "READY" in server.stdout.readline()
            asking = child(here, "robot", folder, str(requests), str(server.pid))
            said, _ = asking.communicate(timeout=600)
            return dict(json.loads(said.splitlines()[-1]))
        finally:
            server.kill()
            server.wait()


# --- success ------------------------------------------------------------------------------------------------------


class Coded:
    """A policy that sees its pictures through the codec; ``None`` leaves them as they are."""

    def __init__(self, policy: Any, quality: int | None) -> None:
        self.spec, self._policy, self._quality = policy.spec, policy, quality

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        return self._policy.infer([self._seen(o) for o in observations], seeds, continuations)

    def _seen(self, obs: Observation) -> Observation:
        from vla_stack.serving import jpeg
        from vla_stack.serving.pictures import How, Pictures, sendable

        if self._quality is None:
            return obs
        made, compressed = sendable(obs.images, self.spec.reads, Pictures(How.JPEG, self._quality))
        return replace(obs, images=made | {camera: jpeg.expand(picture) for camera, picture in compressed.items()})


def success(episodes: int) -> dict[str, list[bool]]:
    """Outcomes of the shipped policy on the same starts, by form of its pictures."""
    from openpi import shipped

    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.runtime.executor import ExecutorConfig
    from vla_stack.serving.pictures import QUALITY

    policy, ended = shipped(), {}
    executor = ExecutorConfig(mode="sync", execute=policy.spec.horizon // 2)
    for name, quality in (("raw", None), ("jpeg", QUALITY)):
        result = evaluate(Coded(policy, quality), TASK, episodes, START, executor, num_envs=5)
        ended[name] = [bool(o) for o in result.outcomes]
    return ended


def sealing(size: int, repeats: int = 50) -> dict[str, float]:
    """Milliseconds in which a request is sealed, at p5: CURVE's cipher and two that peers have."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
    from nacl.bindings import crypto_box_afternm

    data, key = os.urandom(size), os.urandom(32)
    ways: dict[str, Callable[[], bytes]] = {
        "CURVE": lambda: crypto_box_afternm(data, bytes(24), key),
        "ChaCha20-Poly1305": lambda: ChaCha20Poly1305(key).encrypt(bytes(12), data, None),
        "AES-256-GCM": lambda: AESGCM(key).encrypt(bytes(12), data, None),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, seal in ways.items():
            begun = time.perf_counter()
            seal()
            found[name].append(1e3 * (time.perf_counter() - begun))
    return {name: float(np.percentile(ms, 5)) for name, ms in found.items()}


def local(requests: int) -> list[dict[str, dict[str, float]]]:
    """Round trips of two 224 px pictures on this machine, of each start of the servers: which cores the system gives
    two processes that talk to each other decides more than what they say."""
    wanted = ("ours tcp", "ours shared memory", "ours tcp + CURVE", "websocket + msgpack")
    arms = dict(bench.ARMS)
    bench.ARMS = {name: arms[name] for name in wanted}
    try:
        found = []
        for _ in range(STARTS):
            with tempfile.TemporaryDirectory() as folder:
                found.append(bench.measure("2x224x224", requests, folder))
        return found
    finally:
        bench.ARMS = arms


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--requests", type=int, default=200, help="round trips a form and link")
    p.add_argument("--episodes", type=int, default=100)
    p.add_argument("--local", type=int, default=500, help="round trips a way and start on this machine")
    p.add_argument("--role", nargs="+", help="of a process that this script starts")
    args = p.parse_args()
    if args.role:
        role, folder, *rest = args.role
        serve(folder) if role == "serve" else robot(folder, int(rest[0]), int(rest[1]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every finally: no namespace is left behind
    data: dict[str, Any] = {"links": {}}
    checks = []
    seen = scenes(8)
    for name, (rate, asked, bits) in LINKS.items():
        row = data["links"][name] = over(rate, args.requests, seen) | {"load": os.getloadavg()[0]}
        print(name, row, flush=True)
        forms = row["rows"]
        alone = forms["auto"]["cpu"] + 8e3 * forms["auto"]["kB"] / bits
        checks += [
            Check(f"{name}, three 640x480 cameras, keys: ms above inference, p50", forms["auto"]["p50"], asked, "<=",
                  why=f"{row['load']:.0f} processes shared {os.cpu_count()} cores"),
            Check(f"{name}, three 640x480 cameras, keys: ms above inference, p5", forms["auto"]["p5"], asked, "<=",
                  why=f"{row['load']:.0f} processes shared {os.cpu_count()} cores"),
            Check(f"{name}: pictures as cameras give them over that, p5", forms["camera"]["p5"] / forms["auto"]["p5"]),
            Check(f"{name}: the same, computed: CPU of both ends, one after the other, and bytes over rate, ms",
                  alone, asked, "<="),
            Check(f"{name}: kB of a request", forms["auto"]["kB"]),
        ]  # fmt: skip
    here = data["local"] = local(args.local)

    def ratio(name: str, other: str) -> float:
        return float(np.median([rows[name]["p50"] / rows[other]["p50"] for rows in here]))

    where = "2x224 px, this machine"
    checks += [
        Check(f"{where}: shared memory over openpi's websocket, p50",
              ratio("ours shared memory", "websocket + msgpack"), 0.5, "<="),
        Check(f"{where}: TCP over openpi's websocket, p50", ratio("ours tcp", "websocket + msgpack")),
        Check(f"{where}: with keys over without, p50", ratio("ours tcp + CURVE", "ours tcp"), 1.5, "<=",
              why="0.30 MB are sealed and opened, beside the copies that plain TCP makes"),
        Check(f"{where}: starts of the servers, of whose ratios this is the median", STARTS),
    ]  # fmt: skip
    sealed = data["sealing 0.45 MB, ms"] = sealing(450_000)
    checks += [
        Check(f"0.45 MB sealed by {name}: time over CURVE's, p5", ms / sealed["CURVE"])
        for name, ms in sealed.items()
        if name != "CURVE"
    ]
    ended = data["success"] = success(args.episodes)
    change = paired_interval(ended["raw"], ended["jpeg"])
    name = f"{TASK}, {args.episodes} paired starts: success through JPEG minus raw"
    checks.append(Check(name, change.value, 0.0, interval=change))
    write("network", checks, data, seeds=[START])
    return 0


if __name__ == "__main__":
    sys.exit(main())
