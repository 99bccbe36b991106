"""The judge of the fault matrix sees what it must, and one row of the matrix from end to end."""

import sys
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / "bench"))
    monkeypatch.setenv("PYTHONPATH", str(TOOLS / "bench"), prepend=":")
    import fault_robot
    import faults

    yield fault_robot, faults
    for name in ("faults", "fault_robot", "fault_proxy", "hostile"):
        del sys.modules[name]


GOOD = [(0.0, -1, -1, 1, 0), (0.1, 0, 0, 1, 1), (0.2, 1, 0, 1, 1), (0.2, 1, 0, 1, 1)]


@pytest.mark.parametrize(
    ("commands", "outside", "stale"),
    [
        ([(0.25, 5, 4, 1, 1)], 0, 0),
        ([(0.55, 2, 0, 1, 1)], 1, 0),  # over its limit, and too fast
        ([(0.0, 2, 0, 1, 1)], 1, 0),  # too fast alone
        ([(np.nan, 2, 0, 1, 1)], 1, 0),
        ([(0.2, 2, 0, 0, 1)], 0, 1),  # made for another episode
        ([(0.2, 0, 0, 1, 1)], 0, 1),  # made for an earlier step
        ([(0.2, 60, 20, 1, 1)], 0, 1),  # two seconds old
    ],
)
def test_the_judge_sees_what_a_robot_was_told(tools, tmp_path, commands, outside, stale):
    robot = tools[0].LabelRobot(tmp_path)
    robot.reset(0)
    for command in GOOD + commands:
        robot.write(np.array(command, np.float32))
    verdict = tools[0].judge(tmp_path)
    assert (verdict.commands, verdict.outside, verdict.stale) == (5, outside, stale)
    assert verdict.models[1] == [1]


@pytest.mark.slow
def test_a_policy_is_swapped_between_two_episodes_of_a_real_robot_node(tools):
    faults = tools[1]
    (row,) = [row for row in faults.ROWS if row.name.startswith("other weights")]
    found = faults.run(row)
    assert found["wrong"] == ""
    assert found["node"]["policies swapped"] == 1
