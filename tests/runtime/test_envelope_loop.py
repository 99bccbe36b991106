"""Random and adversarial policies through the whole control loop: no command leaves the envelope."""

from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        patch.syspath_prepend(str(TOOLS / "bench"))
        import envelope

        yield envelope


@pytest.mark.parametrize(
    "name", ["arm, tool commands", "arm, joint commands", "endless joint", "endless joint, four commands a step"]
)
def test_no_command_outside_the_envelope(bench, name, monkeypatch):
    case = bench.cases()[name]
    monkeypatch.setattr(bench, "EPISODE_TICKS", 150 // case.commands)
    plant, port, counters = bench.drive(case, ticks=24 * 150 // case.commands, seed=1)
    assert not any(bench.violations(case, plant).values())
    assert port.wild > 0.3 * port.asked  # they did try
    assert {"position", "velocity", "acceleration", "far outside"} <= set(counters)
    assert ("tool" in counters) == bool(case.safety.tool_box)


def test_the_check_itself_sees_a_violation(bench):
    case = bench.cases()["arm, joint commands"]
    plant, _, _ = bench.drive(case, ticks=100, seed=1)
    start, before, sent = plant.path[-1]
    plant.path.append((False, sent, sent + 1.0))
    found = bench.violations(case, plant)
    assert found["velocity"] == found["acceleration"] == 1
