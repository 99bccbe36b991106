"""No command leaves the envelope, whatever comes in."""

import numpy as np
import pytest

from vla_stack.errors import UserError
from vla_stack.runtime.dispatch import State
from vla_stack.runtime.safety import SafetyConfig, SafetyEnvelope
from vla_stack.schema import Dim, RobotSpec

DIMS = (
    Dim("x.pos", "m", -0.5, 0.7, 0.9),
    Dim("yaw.pos", "rad", -1.8, 1.8, 3.0, "angle"),
    Dim("spin.pos", "rad", max_rate=2.0, kind="angle"),
    Dim("gripper.pos", "ratio", 0.0, 1.0, kind="gripper"),
)
ROBOT = RobotSpec("test/robot", DIMS, DIMS, (), rate_hz=30.0)
DT = ROBOT.dt
REST = np.array([0.1, 0.0, 0.0, 1.0])


def envelope(robot: RobotSpec = ROBOT, **config) -> SafetyEnvelope:
    e = SafetyEnvelope(robot, SafetyConfig(**config))
    e.reset(REST)
    return e


def adversary(rng: np.random.Generator, n: int) -> np.ndarray:
    """float [n, A]: noise, drifts, steps to and beyond the limits, wrong units, not-a-number."""
    kinds = [
        rng.normal(0, 0.3, (n, 4)),
        rng.uniform(-2.0, 2.0, (n, 4)),
        np.repeat(rng.choice([-0.5, 0.7, 1.8, -1.8, 0.0, 1.0], (n // 50 + 1, 4)), 50, axis=0)[:n],
        np.cumsum(rng.normal(0, 0.05, (n, 4)), axis=0),
        rng.choice([np.nan, np.inf, -np.inf, 1e30, 180.0, 0.0], (n, 4)),
    ]
    pick = np.repeat(rng.choice(5, n // 20 + 1, p=[0.3, 0.3, 0.2, 0.15, 0.05]), 20)[:n]
    return np.choose(pick[:, None], kinds)


@pytest.mark.parametrize("acceleration", [{}, {"x.pos": 2.0, "yaw.pos": 8.0, "gripper.pos": 40.0}])
def test_no_command_outside_the_envelope(acceleration):
    ticks, box = 10_000, {"x.pos": (-0.2, 0.6)}
    e = envelope(workspace=box, max_acceleration=acceleration, max_refusals=10**9)
    sent = [REST] + [e.filter(c).command for c in adversary(np.random.default_rng(0), ticks)]
    path = np.array(sent, np.float64)
    low, high = np.array([-0.2, -1.8, -np.inf, 0.0]), np.array([0.6, 1.8, np.inf, 1.0])
    rate = np.array([d.max_rate for d in DIMS])
    u = np.diff(path, axis=0)
    assert np.isfinite(path).all()
    assert ((path >= low) & (path <= high)).all()
    assert (np.abs(u) <= rate * DT).all()
    limit = np.array([acceleration.get(d.name, np.inf) for d in DIMS]) * DT**2
    assert (np.abs(np.diff(u, axis=0)) <= limit + 1e-6).all()  # float32 commands: 6e-8 of their size
    assert (np.ptp(path[:, [0, 1, 3]], axis=0) > 0.5).all()  # it moved
    assert {"position", "velocity", "not finite", "far outside"} <= set(e.counters)


def test_a_legal_command_passes_untouched():
    command = (REST + [0.01, 0.05, -0.05, -1.0]).astype(np.float32)
    verdict = envelope().filter(command)
    np.testing.assert_array_equal(verdict.command, command)
    assert (verdict.state, verdict.changes) == (State.RUN, ())


@pytest.mark.parametrize(
    ("command", "age", "reason"),
    [
        ([np.nan, 0, 0, 0], 0.0, "not finite"),
        ([0.1, 57.0, 0, 0], 0.0, "far outside"),
        ([0.1, 0.0, 0, 0], 0.2, "stale"),
        ([0.1, 0.0, 0], 0.0, "shape"),
    ],
)
def test_nonsense_holds_then_stops_until_reset(command, age, reason):
    e = envelope(max_refusals=3)
    verdicts = [e.filter(np.array(command, np.float32), age) for _ in range(4)]
    assert [v.state for v in verdicts] == [State.HOLD, State.HOLD, State.STOP, State.STOP]
    np.testing.assert_array_equal(verdicts[0].command, REST.astype(np.float32))
    assert verdicts[0].changes == (reason,)
    assert verdicts[2].command is None and e.counters[reason] == 3
    e.reset(REST)
    assert e.filter(REST).state is State.RUN


def test_refusals_must_be_in_a_row_to_stop():
    e = envelope(max_refusals=2)
    bad = np.full(4, np.nan)
    assert [e.filter(c).state for c in (bad, REST, bad, REST)] == [State.HOLD, State.RUN] * 2


def test_no_command_is_hold_where_it_stands():
    e = envelope()
    moved = e.filter(REST + [0.02, 0, 0, 0]).command
    verdict = e.filter(None)
    assert verdict.state is State.HOLD
    np.testing.assert_array_equal(verdict.command, moved)


BASE = (
    Dim("lift.pos", "rad", -1.0, 1.0, 2.0),
    Dim("x.vel", "m/s"),
    Dim("theta.vel", "rad/s", -2.0, 2.0, max_rate=4.0),
)


def base(**config) -> SafetyEnvelope:
    e = SafetyEnvelope(RobotSpec("test/base", BASE, BASE, (), rate_hz=30.0), SafetyConfig(**config))
    e.reset(np.array([0.0, 0.4, -0.5]))  # it was rolling when it was armed
    return e


def driven(e: SafetyEnvelope, command=(0.0, 0.3, 1.0), ticks: int = 90) -> None:
    for _ in range(ticks):
        verdict = e.filter(np.array(command))
    np.testing.assert_allclose(verdict.command, command)


@pytest.mark.parametrize("why", ["hold", "not finite", "trouble"])
def test_standing_still_is_no_velocity_where_velocities_are_commanded(why):
    e = base(max_refusals=10**9)
    np.testing.assert_array_equal(e.filter(None).command, [0, 0, 0])  # also right after arming
    driven(e)
    command = {"hold": None, "not finite": np.full(3, np.nan), "trouble": np.array([0.0, 0.3, 1.0])}[why]
    verdicts = [e.filter(command, trouble="camera" if why == "trouble" else "") for _ in range(20)]
    assert {v.state for v in verdicts} == {State.HOLD}
    sent = np.array([v.command for v in verdicts])
    assert (np.diff(sent, axis=0) <= 0).all() and (sent[0] > [-1, 0.25, 0.8]).all()  # a ramp, no jerk
    np.testing.assert_array_equal(sent[16:], np.zeros((4, 3)))  # after half a second
    driven(e)  # and it goes on


def test_a_limited_acceleration_slows_the_ramp_and_never_reverses():
    e = base(max_rate={"x.vel": 0.15}, max_acceleration={"theta.vel": 60.0})
    driven(e)
    sent = np.array([e.filter(None).command for _ in range(90)], np.float64)
    assert (np.diff(sent[:, 1]) >= -0.15 * DT - 1e-7).all() and 0.0 < sent[45, 1] and sent[-1, 1] == 0.0
    assert (sent[:, 2] >= 0.0).all() and sent[-1, 2] == 0.0
    assert (np.abs(np.diff(sent[:, 2], 2)) <= 60.0 * DT**2 + 1e-6).all()


def test_a_velocity_that_crosses_zero_comes_to_rest_all_the_same():
    e = base(max_acceleration={"theta.vel": 10.0})
    for _ in range(90):
        e.filter(np.array([0.0, 0.3, 2.0]))
    while e.filter(np.array([0.0, 0.3, -2.0])).command[2] > 0.05:
        pass  # turning round fast
    sent = np.array([e.filter(None).command for _ in range(90)])
    assert sent[:, 2].min() < 0 and not sent[-1].any()


def test_a_robot_that_could_not_stand_still_is_refused():
    with pytest.raises(UserError, match=r"limits of x\.vel leave out zero"):
        base(workspace={"x.vel": (0.1, 0.3)})


def test_an_endless_angle_takes_the_shorter_arc():
    e = envelope()
    e.reset(np.array([0.1, 0, 3.1, 1.0]))
    assert e.filter(np.array([0.1, 0, -3.1, 1.0])).command[2] > 3.1


def test_a_robot_a_step_outside_is_brought_inside_first():
    e = envelope()
    e.reset(np.array([0.72, 0, 0, 1.0]))
    assert e.filter(np.array([0.9, 0, 0, 1.0])).command[0] == np.float32(e.limits(0)[1])
    e.reset(np.array([0.72, 0, 0, 1.0]))
    verdict = e.filter(None)  # standing still too
    assert verdict.command[0] <= 0.7 and verdict.state is State.HOLD


def test_an_arm_on_its_stops_is_brought_inside_by_small_steps():
    dims = (Dim("a.pos", "rad", -1.7, 1.7, 6.0), Dim("b.pos", "rad", -1.7, 1.7, 6.0))
    spec = RobotSpec("test/arm", dims, dims, (), 120.0)  # 30 Hz, four commands a step
    e = SafetyEnvelope(spec, SafetyConfig(max_acceleration={"a.pos": 20.0, "b.pos": 20.0}))
    e.reset(np.array([1.75, -0.5]))
    verdicts = [e.filter(np.array([1.75, -0.5])) for _ in range(60)]
    sent = np.array([v.command for v in verdicts], np.float64)
    steps = np.diff(np.concatenate([[[1.75, -0.5]], sent]), axis=0)
    assert (np.abs(steps) <= 20.0 / 120.0**2 + 1e-6).all() and sent[-1, 0] == np.float32(e.limits(0)[1])
    assert (np.diff(sent[:, 0]) <= 1e-7).all() and np.abs(sent[:, 1] + 0.5).max() < 1e-6
    assert verdicts[0].changes == ("outside",) and "outside" not in verdicts[-1].changes
    e.reset(np.array([1.75, -0.5]))
    e.filter(None)
    at = e.filter(None).command
    for trouble, age_s in (("camera", 0.0), ("", 9.0)):  # it does not go on meanwhile
        verdict = e.filter(np.array([0.0, 0.0]), age_s, trouble)
        assert (verdict.command == at).all() and verdict.state is State.HOLD
    e.reset(np.array([1.9, 0.0]))  # more than a twentieth of its range
    assert e.filter(None).state is State.STOP


def test_a_robot_further_outside_is_not_armed():
    e = envelope()
    e.reset(np.array([0.9, 0, 0, 1.0]))
    for words in ("x.pos is 0.2 m outside its limits: move it inside", "stopped"):
        verdict = e.filter(np.array([0.1, 0, 0, 1.0]))
        assert verdict.command is None and verdict.state is State.STOP and verdict.changes[0].startswith(words)
    assert e.counters["outside"] == 1
    e.reset(REST)
    assert e.filter(REST).state is State.RUN


def test_it_brakes_before_a_limit():
    e = envelope(max_acceleration={"x.pos": 1.0})
    xs = [e.filter(np.array([0.7, 0, 0, 1.0])).command[0] for _ in range(120)]
    assert xs[-1] == pytest.approx(0.7, abs=1e-4)
    assert np.abs(np.diff(xs, 2)).max() <= 1.0 * DT**2 + 1e-6


def test_deltas_are_limited_one_by_one_and_held_at_zero():
    dims = (Dim("x.vel", "1", -1, 1, 15.0), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
    e = SafetyEnvelope(RobotSpec("test/delta", dims, dims, (), 30.0, "delta"))
    e.reset(np.array([0.3, 1.0]))
    for _ in range(3):
        np.testing.assert_allclose(e.filter(np.array([0.9, 0.0])).command, [0.5, 0.0])
    np.testing.assert_array_equal(e.filter(None).command, [0.0, 0.0])


def test_soft_start_grows_the_velocity_from_nothing():
    e = envelope(soft_start_s=0.1, max_rate={"x.pos": 0.6})  # three steps of 30 Hz
    xs = [REST[0], *(e.filter(np.array([0.7, 0, 0, 1.0])).command[0] for _ in range(5))]
    np.testing.assert_allclose(np.diff(xs), 0.6 * DT * np.array([1 / 3, 2 / 3, 1, 1, 1]), atol=1e-6)


def test_an_emergency_stop_lasts_until_it_is_armed_again():
    e = envelope()
    e.stop("e-stop")
    assert [e.filter(REST).state for _ in range(2)] == [State.STOP] * 2
    e.reset(REST)
    assert e.filter(REST).state is State.RUN and e.counters["e-stop"] == 1


def test_trouble_holds_for_as_long_as_it_lasts():
    e = envelope(max_refusals=2)
    assert [e.filter(REST, trouble="bus").state for _ in range(5)] == [State.HOLD] * 5
    assert e.filter(REST).state is State.RUN


def test_the_tool_slows_down_before_its_box_and_slides_no_further():
    e = SafetyEnvelope(
        ROBOT,
        SafetyConfig(tool_box={"x": (-0.3, 0.3)}, kinematics="test", max_acceleration={"x.pos": 2.0}),
        tool=lambda q: np.array([q[0], 0.0, 0.0]),
    )
    e.reset(REST)
    xs = [e.filter(np.array([0.7, 0, 0, 1.0])).command[0] for _ in range(90)]
    assert 0.295 < max(xs) <= 0.3 and np.abs(np.diff(xs, 2)).max() <= 2.0 * DT**2 + 1e-6


def test_a_tool_outside_its_box_is_brought_inside_or_not_armed():
    e = SafetyEnvelope(
        ROBOT,
        SafetyConfig(tool_box={"x": (-0.3, 0.3)}, kinematics="test", max_acceleration={"x.pos": 2.0}),
        tool=lambda q: np.array([q[0] + 0.1 * np.sin(q[1]), 0.0, 0.0]),
    )
    for past, enters in ((0.001, True), (0.002, True), (0.1, False)):  # m; a step from rest is 2.2 mm
        e.reset(np.array([0.3 + past, 0, 0, 1.0]))
        verdict = e.filter(np.array([0.65, 0, 0, 1.0]))
        assert (verdict.command is not None) == enters
        if enters:
            x, yaw = verdict.command[:2]
            assert x + 0.1 * np.sin(yaw) <= 0.3 and abs(x - 0.3 - past) <= 2.0 * DT**2
    assert verdict.changes[0].startswith("the tool is 100.1 mm outside its box")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"workspace": {"z.pos": (0, 1)}}, "no action dimension 'z.pos'"),
        ({"workspace": {"x.pos": (0.8, 0.9)}}, "leaves x.pos no room"),
        ({"max_acceleration": {"q": 1.0}}, "no action dimension 'q'"),
        ({"max_rate": {"q": 1.0}}, "max_rate: the robot has no action dimension 'q'"),
        ({"tool_box": {"x": (0, 1)}}, "needs a kinematic model"),
        ({"tool_box": {"w": (0, 1)}}, "no axis 'w'"),
    ],
)
def test_bad_limits_name_the_dimension(config, words):
    with pytest.raises(UserError, match=words):
        envelope(**config)


def test_unknown_position_cannot_be_armed():
    with pytest.raises(UserError, match="not finite"):
        envelope().reset(np.array([np.nan, 0, 0, 0]))
