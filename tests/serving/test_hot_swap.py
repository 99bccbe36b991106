"""Another policy beside the one that is served: who gets it, when, and what happens if it does not load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from serving_fakes import ROBOT, WAIT_S, GatedPolicy, TickPolicy, barrier, codes, collect, observation

from vla_stack.errors import UserError
from vla_stack.schema import Chunks
from vla_stack.serving import messages
from vla_stack.serving.client import POLICY_CHANGED, PolicyClient


class Release(TickPolicy):
    """Answers with its number everywhere."""

    def __init__(self, number: int, **spec) -> None:
        super().__init__(f"m{number}")
        self.number, self.spec = number, replace(self.spec, **spec)

    def infer(self, observations, seeds):
        return Chunks(np.full((len(observations), self.spec.horizon, len(ROBOT.action)), self.number, np.float32))


class Shelf:
    """What a server's ``load`` finds; ``None`` cannot be loaded."""

    def __init__(self, policy) -> None:
        self.policy = policy

    def load(self):
        if self.policy is None:
            raise UserError("the weights are cut off")
        return self.policy


@pytest.fixture
def shelf(servers):
    shelf = Shelf(Release(1))
    shelf.server = servers.start_with(shelf.load)
    return shelf


def put(shelf: Shelf, policy, client: PolicyClient) -> None:
    """Have the server load ``policy``, and wait until it has, for which ``client`` keeps its network going."""
    before = shelf.server.metrics.reloads.total()
    shelf.policy = policy
    shelf.server._load_beside()
    while shelf.server.metrics.reloads.total() == before:
        barrier(client)


def ask(client: PolicyClient, rid: int, epoch: int):
    assert client.request(observation(rid), rid=rid, epoch=epoch, origin=rid, seed=0)
    (item,) = collect(client, 1)
    return item


def test_each_robot_goes_over_at_its_own_next_epoch(shelf, connect):
    first, second = connect(shelf.server.endpoint), connect(shelf.server.endpoint)
    put(shelf, Release(2), first)
    third = connect(shelf.server.endpoint)
    for rid, client, number in ((1, first, 1), (1, second, 1), (1, third, 2)):
        chunk = ask(client, rid, 0)
        assert (chunk.actions[0, 0], chunk.model_version) == (number, f"m{number}")
    first.reset(1)
    chunk = ask(first, 2, 1)
    assert (chunk.actions[0, 0], chunk.model_version) == (2, "m2")
    assert first.policy == Release(2).spec and second.policy == Release(1).spec
    assert ask(second, 2, 0).model_version == "m1"
    assert ask(second, 3, 7).model_version == "m2"  # a request of a newer epoch is a reset as well
    assert not first.discarded and not second.discarded


def test_two_policies_are_never_computed_together(servers, connect):
    old, new = GatedPolicy(), GatedPolicy()
    shelf = Shelf(old)
    shelf.server = servers.start_with(shelf.load)
    robots = [connect(shelf.server.endpoint) for _ in range(3)]
    put(shelf, new, robots[0])
    robots[0].request(observation(9), rid=0, epoch=0, origin=9, seed=0)
    assert old.entered.acquire(timeout=WAIT_S)  # what comes now waits for its end
    for i, (robot, epoch) in enumerate(zip(robots, (0, 1, 0), strict=True)):
        robot.request(observation(i), rid=1, epoch=epoch, origin=i, seed=0)
        barrier(robot)
    for policy in (old, new):
        for _ in range(4):
            policy.gate.release()
    for robot in robots[1:]:
        collect(robot, 1)
    collect(robots[0], 2)
    assert sorted(map(sorted, old.batches)) == [[0, 2], [9]]
    assert new.batches == [[1]]


@pytest.mark.parametrize(
    ("change", "text"),
    [({"normalisation": "n2"}, "normalisation was 'n1', is 'n2'"), ({"horizon": 8}, "horizon was 4, is 8")],
)
def test_a_policy_that_does_not_fit_the_running_plan_needs_a_hello(shelf, connect, change, text):
    client = connect(shelf.server.endpoint)
    put(shelf, Release(2, **change), client)
    assert ask(client, 1, 0).model_version == "m1"  # the epoch ends as it began
    client.request(observation(2), rid=2, epoch=1, origin=2, seed=0)
    items = collect(client, 2)
    assert codes(items) == [("NO_SESSION", 2), (POLICY_CHANGED, -1)]
    assert text in items[0].text
    assert not client.connected
    assert client.hello(ROBOT, WAIT_S) == Release(2, **change).spec


def test_a_policy_that_does_not_load_changes_nothing(shelf, connect):
    client = connect(shelf.server.endpoint)
    put(shelf, None, client)
    client.reset(1)
    assert ask(client, 1, 1).model_version == "m1"
    assert shelf.server.metrics.reloads == {"failed": 1}
    put(shelf, Release(3), client)
    assert ask(client, 2, 2).model_version == "m3"


def test_a_robot_that_reconnects_within_an_epoch_keeps_its_policy(shelf, connect):
    client = connect(shelf.server.endpoint)
    client.reset(5)
    barrier(client)
    put(shelf, Release(2), client)
    again = PolicyClient(shelf.server.endpoint)
    again._sid, again._epoch, again._robot, again.policy = client._sid, 5, ROBOT, client.policy
    again._say_hello()
    while not again.connected:
        assert not again.poll(100)
    assert ask(again, 1, 5).model_version == "m1"
    assert ask(again, 2, 6).model_version == "m2"
    again.close()


def test_what_a_plan_rests_on():
    spec = Release(1).spec
    assert messages.plan_difference(Release(2).spec, spec) is None
    for change in (
        {"normalisation": "x"},
        {"horizon": 9},
        {"d_train_max": 1},
        {"extras": {"continues": ["rtc"]}},
        {"robot": replace(ROBOT, rate_hz=5.0)},
    ):
        assert messages.plan_difference(replace(spec, **change), spec)


SERVE = """
import json, sys
from pathlib import Path
from serving_fakes import TickPolicy
from vla_stack import cli
from vla_stack.verbs import serve
serve.load_directory = lambda path, *_: TickPolicy(json.loads((path / "config.json").read_text())["model"])
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("how", ["signal", "--follow"])
def test_the_verb_goes_over_to_the_newest_checkpoint(how, connect, tmp_path):
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "serve.jsonl"
    for name in ("100", "200"):
        (checkpoints / name / "pretrained_model").mkdir(parents=True)
        (checkpoints / name / "pretrained_model" / "config.json").write_text(json.dumps({"model": f"step {name}"}))
    (checkpoints / "last").symlink_to("100")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "--policy", str(tmp_path), "--endpoint", "tcp://127.0.0.1:*", "--log", str(log)]
        + ["--follow"] * (how == "--follow"),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    try:
        client = connect(process.stdout.readline().split()[1])
        assert ask(client, 1, 0).model_version == "step 100"
        (checkpoints / "new").symlink_to("200")
        (checkpoints / "new").replace(checkpoints / "last")
        if how == "signal":
            process.send_signal(signal.SIGHUP)
        while "reloaded" not in log.read_text():
            barrier(client)
        assert ask(client, 2, 0).model_version == "step 100"
        client.reset(1)
        assert ask(client, 3, 1).model_version == "step 200"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    session = client._sid[:8]
    assert [line["event"] for line in lines] == "ready hello chunk reloaded chunk reset swap chunk stopped".split()
    chunks = [line for line in lines if line["event"] == "chunk"]
    assert [(c["rid"], c["epoch"], c["model"]) for c in chunks] == [
        (1, 0, "step 100"),
        (2, 0, "step 100"),
        (3, 1, "step 200"),
    ]
    assert {line["session"] for line in lines if "session" in line} == {session}
    assert client._sid not in log.read_text()  # the whole id is a secret
