"""The fault matrix: a robot that runs on a policy server, and everything that can happen to the two.

    python tools/bench/faults.py [name of a row ...]

Each row starts a real server (`vla serve` with a policy of labels) and a real robot node with its control process,
waits until the robot moves, does harm, and undoes it. Then the robot has to move again by itself, an operator
re-arming it where it has stopped, and to drive a second episode. What the robot was told to do is judged by its own
journal (``fault_robot.py``): commands outside a limit, and commands made for another episode, an earlier step or from
an observation that is too old. A row passes with none of either, no HOLD longer than it may be, and no restart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from fault_proxy import Mangle, Proxy, delay, duplicate, fuzz, loss, nonsense, oversize, reorder, truncate
from fault_robot import RATE, SPEC, LabelRobot, Verdict, judge, jump_wall_clock
from hostile import mutate, noise

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.errors import UserError
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.node import RobotNode
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.keys import KeyFolder, Role

HERE = Path(__file__).resolve().parent
HOLD_S = 0.5 + 1.5 / RATE  # the executor's, the control step in which it is noticed, and half a one for rounding
CAP_TICKS, STEADY_TICKS = 600, 15  # longest first episode; steps of motion after which a robot has recovered
CONFIG = {"model": 1, "normalisation": "a", "latency_s": 0.02}


class Rig:
    """A server that can be harmed, and what a robot's node says.

    Attributes:
        directory: The policy, its switches, the robot's journal and the server's log.
        endpoint: Of the server.
        moves: Set while the robot moves.
        healed: Set when the harm is undone.
    """

    def __init__(self, directory: Path, endpoint: str, **config: Any) -> None:
        self.directory, self.endpoint = directory, endpoint
        self.moves, self.healed = threading.Event(), threading.Event()
        self.states: list[tuple[int, str]] = []  # tick, state; of the episode that runs
        self._since = 0  # last tick of the harm
        self.configure(**config)

    def configure(self, **config: Any) -> None:
        """Change the policy that is loaded next."""
        (self.directory / "config.json").write_text(json.dumps(CONFIG | config))

    def start(self, keys: str = "server") -> None:
        command = [sys.executable, str(HERE / "fault_robot.py"), str(self.directory), "--endpoint", self.endpoint]
        command += ["--log", str(self.directory / "serve.jsonl")]
        environment = {**os.environ, "VLA_KEYS": str(self.directory / keys)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().decode().split()
        if words[:1] != ["READY"]:
            raise RuntimeError("the server did not start")
        if self.endpoint.endswith("*"):
            self.endpoint = words[1]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def log(self, event: str) -> list[dict[str, Any]]:
        lines = (self.directory / "serve.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def switch(self, name: str, seconds: float) -> None:
        """Let a switch of the policy or the robot be on for a while."""
        (self.directory / name).touch()
        time.sleep(seconds)
        (self.directory / name).unlink()

    def on_state(self, tick: int, state: str, why: str) -> None:
        self.states.append((tick, state))
        (self.moves.set if state == "run" else self.moves.clear)()

    def settled(self, tick: int) -> bool:
        """Whether the harm is undone and the robot has moved for long enough since."""
        if not self.healed.is_set():
            self._since = tick
            return False
        return self.moves.is_set() and tick - max(self._since, self.states[-1][0]) >= STEADY_TICKS

    def longest_hold(self, end: int) -> float:
        """Longest HOLD of a robot that moved before it, seconds."""
        spans = zip(self.states, [*self.states[1:], (end, "")], [(0, ""), *self.states], strict=False)
        return (
            max((after[0] - k for (k, s), after, before in spans if s == "hold" and before[1] == "run"), default=0)
            / RATE
        )


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        name: What happens.
        harm: Does it, and undoes it; runs beside the robot once that moves. With a proxy: how messages are mangled for
            ``seconds``.
        seconds: See ``harm``.
        config: Of the policy.
        keys: Both ends have keys.
        ends: Text of the error that must end the second episode: the robot must not go on by itself.
        expect: More that must be true afterwards; raises AssertionError.
    """

    name: str
    harm: Callable[[Rig], None] | Mangle
    seconds: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    keys: bool = False
    ends: str = ""
    expect: Callable[[Rig, Verdict, Counter[str]], None] = lambda rig, verdict, counts: None


def run(row: Row) -> dict[str, Any]:
    """Do it; everything measured, and ``wrong``: what falls short, empty where nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), "tcp://127.1:5599" if row.keys else "tcp://127.0.0.1:*", **row.config)
        if row.keys:
            make_keys(rig)
        if row.name.startswith("wall"):
            (rig.directory / "wall").touch()
        rig.start()
        proxy = Proxy(rig.endpoint) if row.seconds else None
        if proxy:
            proxy.start()
        try:
            return drive(row, rig, proxy)
        finally:
            if proxy:
                proxy.close()
            rig.process.kill()
            rig.process.wait()


def drive(row: Row, rig: Rig, proxy: Proxy | None) -> dict[str, Any]:
    def harm() -> None:
        rig.moves.wait()
        time.sleep(0.5)
        if proxy:
            proxy.mangle = row.harm  # type: ignore[assignment]
            time.sleep(row.seconds)
            proxy.mangle = None
        else:
            row.harm(rig)  # type: ignore[call-arg, arg-type]
        rig.healed.set()

    def watch(obs: Any) -> None:
        if rig.settled(obs.step):
            node.abort()

    recovered, error, hold, stops, ticks = False, "", 0.0, 0, Counter[str]()
    node = RobotNode(
        proxy.endpoint if proxy else rig.endpoint,
        partial(LabelRobot, rig.directory),
        ExecutorConfig(mode="naive", execute=5),
        rearm=rig.healed.is_set,
        on_state=rig.on_state,
    )
    begun = time.monotonic()
    with node:
        threading.Thread(target=harm, daemon=True).start()
        try:
            for seed, cap in ((1, CAP_TICKS), (2, 25)):
                rig.states.clear()
                episode = node.run_episode(seed, cap, watch if seed == 1 else None)
                hold = max(hold, rig.longest_hold(episode.summary["steps"]))
                stops += sum(state == "stop" for _, state in rig.states)
                ticks.update(episode.summary["ticks"])
                recovered = rig.healed.is_set() and rig.moves.is_set() and bool(ticks["run"])
                recovered = recovered and (seed == 2 or episode.summary["steps"] < CAP_TICKS)
                if not recovered:
                    break
        except UserError as e:
            error, recovered = str(e), bool(row.ends) and row.ends in str(e)
    verdict = judge(rig.directory)
    found = {
        "row": row.name,
        "commands": verdict.commands,
        "outside": verdict.outside,
        "stale": verdict.stale,
        "hold_s": round(hold, 3),
        "stops": stops,
        "recovered": recovered,
        "by_person": bool(row.ends),
        "seconds": round(time.monotonic() - begun, 1),
        "ticks": dict(ticks),
        "node": dict(node.counters),
        "proxy": dict(proxy.counts) if proxy else {},
    }
    return found | {"wrong": shortcomings(row, rig, verdict, found, error)}


def shortcomings(row: Row, rig: Rig, verdict: Verdict, found: dict[str, Any], error: str) -> str:
    wrong = [f"{found[key]} commands {key}" for key in ("outside", "stale") if found[key]]
    if found["hold_s"] > HOLD_S:
        wrong.append(f"held for {found['hold_s']} s")
    if not found["recovered"]:
        wrong.append(error or "did not move again")
    if row.seconds and not sum(found["proxy"].values()):
        wrong.append("nothing happened to any message")
    try:
        row.expect(rig, verdict, Counter(found["node"]))
    except AssertionError as e:
        wrong.append(str(e))
    return "; ".join(wrong)


# -- harm --------------------------------------------------------------------------------------------------------------


def killed(rig: Rig) -> None:
    rig.kill()
    time.sleep(2.0)
    rig.start()


def restarted(rig: Rig) -> None:
    rig.kill()
    rig.start()


def drained(rig: Rig) -> None:
    rig.kill(signal.SIGTERM)
    rig.start()


def frozen(rig: Rig) -> None:
    rig.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    rig.process.send_signal(signal.SIGCONT)


def another_key(rig: Rig) -> None:
    """First a robot whose key is not allowed, then a server that does not own the key that the robot trusts."""
    rogue = PolicyClient(rig.endpoint, KeyFolder(rig.directory / "rogue"))
    try:
        rogue.hello(SPEC, timeout_s=1.5)
        raise AssertionError("a robot with another key was let in")
    except UserError:
        rogue.close()
    rig.kill()
    rig.start(keys="impostor")
    time.sleep(2.0)
    rig.kill()
    rig.start()


def another_version(rig: Rig) -> None:
    rig.kill()
    rig.configure(wire=99)
    rig.start()
    time.sleep(2.0)
    rig.kill()
    rig.configure()
    rig.start()


def flooded(rig: Rig) -> None:
    """Three peers send noise, edited messages and oversized frames as fast as they can."""
    rng, context, end = np.random.default_rng(0), zmq.Context(), time.monotonic() + 3.0
    valid = [b"\x81\xa1v\x02", b"x" * 24]
    peers = [context.socket(zmq.DEALER) for _ in range(3)]
    for peer in peers:
        peer.connect(rig.endpoint)
    while time.monotonic() < end:
        for peer, frames in zip(peers, (noise(rng), mutate(rng, valid), [bytes(9 << 20)]), strict=True):
            try:
                if frames and (len(frames[0]) < 1 << 20 or rng.random() < 0.01):
                    peer.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                pass
    context.destroy(linger=0)


def reloaded(rig: Rig, **config: Any) -> None:
    rig.configure(**config)
    rig.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 10.0
    while not (rig.log("reloaded") + rig.log("reload failed")) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)


def clock_jumps(rig: Rig) -> None:
    """Server and control process have had jumping clocks since they began; so has this process, the node's, now."""
    true = time.time
    jump_wall_clock()
    time.sleep(3.0)
    time.time = true


def one_model_an_episode(rig: Rig, verdict: Verdict, counts: Counter[str]) -> None:
    assert verdict.models == {1: [1], 2: [2]}, f"models by episode are {verdict.models}"
    moved = {line["epoch"]: line["model"] for line in rig.log("chunk")}
    assert moved == {1: "model 1", 2: "model 2"}, f"the audit log says {moved}"


def old_model(rig: Rig, verdict: Verdict, counts: Counter[str]) -> None:
    assert set(sum(verdict.models.values(), [])) == {1}, f"models by episode are {verdict.models}"


def make_keys(rig: Rig) -> None:
    """Keys of server, robot and an impostor of the server; this process is the robot."""
    folders = {name: KeyFolder(rig.directory / name) for name in ("server", "impostor", "robot", "rogue")}
    public = {name: folder.create(name).public for name, folder in folders.items()}
    for name in ("server", "impostor"):
        folders[name].allow(public["robot"], "robot", Role.ROBOT)
    for name in ("robot", "rogue"):
        folders[name].trust(rig.endpoint, public["server"])
    os.environ["VLA_KEYS"] = str(rig.directory / "robot")


ROWS = (
    Row("nothing", lambda rig: None),
    Row("server killed (SIGKILL), back after 2 s", killed),
    Row("server stopped for 2.5 s (SIGSTOP)", frozen),
    Row("server killed and restarted while it computes", restarted, config={"latency_s": 0.3}),
    Row("server drained (SIGTERM) and restarted", drained),
    Row("policy stalls for 3 s", lambda rig: rig.switch("stall", 3.0)),
    *(Row(f"{share:.0%} of messages lost", loss(share), 6.0) for share in (0.01, 0.1, 0.3)),
    *(Row(f"{ms} ms of delay", delay(ms / 1000), 5.0) for ms in (50, 200, 500)),
    Row("replies out of order", reorder, 5.0),
    Row("messages duplicated, some seconds later", duplicate, 5.0),
    Row("truncated messages", truncate, 5.0),
    Row("oversized frames, too many frames", oversize, 5.0),
    Row("fuzzed messages", fuzz, 5.0),
    Row("three peers flood the server", flooded),
    Row("wrong keys: of a robot, of the server", another_key, keys=True),
    Row("server of another wire version", another_version),
    Row("wall clock jumps by an hour either way", clock_jumps),
    Row("other weights (SIGHUP)", partial(reloaded, model=2), expect=one_model_an_episode),
    Row("weights that do not load (SIGHUP)", partial(reloaded, model=None), expect=old_model),
    Row(
        "policy of another normalisation (SIGHUP)",
        partial(reloaded, model=2, normalisation="b"),
        ends="normalisation was 'a', is 'b'",
        expect=old_model,
    ),
    Row("camera frozen for 2 s", lambda rig: rig.switch("freeze", 2.0)),
    Row("policy answers NaN for 2 s", lambda rig: rig.switch("nan", 2.0)),
    Row("chunks with NaN, infinity, 1e30 from the wire", nonsense, 5.0),
)


def main(names: list[str]) -> int:
    rows = [row for row in ROWS if not names or any(name in row.name for name in names)]
    print(f"{'fault':<48}{'commands':>9}{'outside':>9}{'stale':>7}{'HOLD s':>8}{'stops':>7}  recovered", flush=True)
    found = []
    for row in rows:
        found.append(result := run(row))
        how = "no" if not result["recovered"] else "by a person" if result["by_person"] else "yes"
        figures = f"{result['commands']:>9}{result['outside']:>9}{result['stale']:>7}{result['hold_s']:>8.2f}"
        print(f"{row.name:<48}{figures}{result['stops']:>7}  {how}  {result['wrong']}", flush=True)
    checks = [Check(f"shortcomings: {f['row']}", failures(f), 0, "<=", why=f["wrong"]) for f in found]
    if not names:
        write("faults", checks, {"hold_bound_s": HOLD_S, "rate_hz": RATE, "rows": found})
    return int(any(f["wrong"] for f in found))


def failures(f: dict[str, Any]) -> int:
    """Commands outside a limit or stale, and one for whatever else falls short."""
    other = bool(f["wrong"]) and not (f["outside"] + f["stale"])
    return int(f["outside"] + f["stale"] + other)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("names", nargs="*", metavar="name", help="of rows, or parts of names (default: all rows)")
    sys.exit(main(p.parse_args().names))
