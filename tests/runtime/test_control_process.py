"""The control process, in this one: what it says before it runs an episode."""

import multiprocessing as mp
from dataclasses import asdict

import pytest
from runtime_fakes import real_time_robot

from vla_stack.runtime.control_process import OperatorPipes, control_process
from vla_stack.runtime.link import Link
from vla_stack.runtime.safety import SafetyConfig


@pytest.mark.parametrize(
    ("safety", "words"),
    [
        (SafetyConfig(robot="lerobot/some_other_robot"), "these limits are for 'lerobot/some_other_robot'"),
        (SafetyConfig(robot="test/robot", max_rate={"knee.pos": 1.0}), "no action dimension 'knee.pos'"),
    ],
)
def test_limits_of_another_robot_are_refused(safety, words):
    ours, theirs = mp.Pipe()
    link = Link(ours)
    setup = {"policy": None, "executor": {}, "slots": "none", "slot_count": 1, "familiar": None}
    link.send("setup", safety=asdict(safety), **setup)
    control_process(theirs, real_time_robot)
    messages = link.receive(timeout_s=60.0)
    assert [m["kind"] for m in messages] == ["ready", "failed"]
    assert words in messages[1]["error"]


def test_an_e_stop_is_taken_before_everything_that_was_queued():
    (operator, commands), (stops, estop) = mp.Pipe(), mp.Pipe()
    pipes, said = OperatorPipes(Link(commands), Link(estop)), 0
    while Link(operator).post("event", id=str(said), name="start"):  # as many as the pipe holds
        said += 1
    Link(stops).send("estop")
    heard = pipes.receive()
    assert heard[0]["kind"] == "estop" and len(heard) == said + 1 > 50
