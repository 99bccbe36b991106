"""Auto-rewind: where it leads, how fast, and every reason for which it is refused (exact test 12)."""

import numpy as np
import pytest
from operator_fakes import RELEASED, Rig
from runtime_fakes import FakeDriver, label_chunk

from vla_stack.runtime.familiar import Familiar
from vla_stack.runtime.rewind import HAZARDS, RewindConfig, Rewinder
from vla_stack.schema import Dim, Observation, RobotSpec

CUBE = [0.4, 0.0, 0.02, 1.0, 0.0, 0.0, 0.0]
GRIPPER = Dim("gripper.pos", "ratio", 0.0, 1.0, 3.0, "gripper")
TOOL = (*(Dim(f"tcp_{a}.pos", "m", max_rate=0.5) for a in "xyz"), Dim("tcp_yaw.pos", "rad", max_rate=2.0, kind="angle"))
JOINTS = tuple(Dim(f"joint_{i}.pos", "rad", -3.0, 3.0, 1.5) for i in range(4))


def robot(dims, rate_hz) -> RobotSpec:
    return RobotSpec("test/arm", (*dims, GRIPPER), (*dims, GRIPPER), (), rate_hz)


def seen(state, t_ns=0) -> Observation:
    return Observation(np.asarray(state, np.float32), {}, "", 0, t_ns)


class Walk:
    """A robot that went along ``path`` [T, A], one tick each, and knows where its cube is."""

    def __init__(self, spec, path, familiar=None, status=lambda k: {"objects": {"cube": CUBE}}) -> None:
        self.spec, self.path, self.status = spec, np.asarray(path, np.float32), status
        self.rewinder = Rewinder(spec, familiar=familiar)
        self.dt_ns = round(1e9 * spec.dt)
        for k, state in enumerate(self.path):
            self.rewinder.observe(k * self.dt_ns, seen(state), status(k))
        self.k = len(self.path) - 1
        self.here = self.path[-1].copy()

    def plan(self) -> str:
        return self.rewinder.plan(self.k * self.dt_ns, seen(self.here))

    def back(self, follow=lambda here, command: command, status=None):
        """All commands [N, A] until rewinding ends, and why it did."""
        commands, last = [self.here.copy()], self.here.copy()
        while len(commands) < 5000:
            self.k += 1
            now = (status or self.status)(self.k)
            self.rewinder.observe(self.k * self.dt_ns, seen(self.here), now)
            command, why = self.rewinder.next(seen(self.here), now, last)
            if command is None:
                return np.array(commands, np.float64), why
            commands.append(command)
            last, self.here = command, np.float32(follow(self.here, command))
        raise AssertionError("rewinding does not end")


def wander(dims: int, ticks: int, seed: int, step: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.normal(0, step / 8, (ticks, dims)), axis=0).clip(-step, step)
    return np.column_stack([0.3 + np.cumsum(steps, axis=0), np.full(ticks, 0.7)])


@pytest.mark.parametrize("rate_hz", [10.0, 50.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dims", [TOOL, JOINTS], ids=["tool", "joints"])
def test_every_tick_keeps_the_speed_bounds_and_the_gripper_stays(dims, seed, rate_hz):
    walk = Walk(robot(dims, rate_hz), wander(4, round(4 * rate_hz), seed, 0.15 / rate_hz))
    assert walk.plan() == ""
    commands, why = walk.back()
    velocity = np.diff(commands, axis=0) * rate_hz
    config, slack = RewindConfig(), 1e-4
    limits = config.rate_fraction * np.minimum([d.max_rate for d in dims], 1.0)
    assert (np.abs(velocity[:, :4]) <= limits + slack).all()
    tip = (
        np.linalg.norm(velocity[:, :3], axis=1) if dims is TOOL else np.abs(velocity[:, :4]).sum(axis=1) * config.reach
    )
    assert tip.max() <= config.tip_speed + slack
    assert (commands[:, 4] == commands[0, 4]).all()
    np.testing.assert_allclose(commands[-1, :4], walk.path[0, :4], atol=1e-4)
    assert why == "rewound as far as is remembered"


def test_the_speed_rises_from_rest_by_no_more_than_the_ramp():
    path = np.column_stack([np.linspace(0, 0.3, 80), *[np.zeros(80)] * 3, np.ones(80)])
    walk = Walk(robot(TOOL, 20.0), path)
    walk.plan()
    speed = np.abs(np.diff(walk.back()[0][:, 0])) * 20.0
    assert speed[0] <= 0.1 / 0.3 / 20.0 + 1e-6 and np.diff(speed).max() <= 0.1 / 0.3 / 20.0 + 1e-6
    assert speed.max() == pytest.approx(0.1, abs=1e-4)


def test_an_angle_goes_back_along_the_shorter_arc():
    yaw = np.linspace(3.0, 3.4, 60)
    path = np.column_stack([*[np.zeros(60)] * 3, (yaw + np.pi) % (2 * np.pi) - np.pi, np.ones(60)])
    walk = Walk(robot(TOOL, 10.0), path)
    assert walk.plan() == ""
    commands = walk.back()[0]
    assert np.abs(np.diff(commands[1:, 3])).max() <= 0.03 + 1e-5
    assert (commands[-1, 3] - 3.0) % (2 * np.pi) == pytest.approx(0.0, abs=1e-4)


STRAIGHT = np.column_stack([np.linspace(0, 0.2, 60), *[np.zeros(60)] * 3, np.ones(60)])


def moved(k, shift=0.0, degrees=0.0):
    half = np.deg2rad(degrees) / 2
    pose = [CUBE[0] + shift, *CUBE[1:3], np.cos(half), 0.0, 0.0, np.sin(half)]
    return {"objects": {"cube": CUBE if k < 30 else pose}}


@pytest.mark.parametrize(
    ("status", "match"),
    [
        (lambda k: moved(k, shift=0.011), "cube was moved"),
        (lambda k: moved(k, degrees=5.5), "cube was moved"),
        (lambda k: {}, "not known where the objects are"),
        (lambda k: {} if k == 20 else {"objects": {"cube": CUBE}}, "not known where the objects are"),
        *((lambda k, h=h: {"objects": {}, "hazards": [h] if k == 40 else []}, text) for h, text in HAZARDS.items()),
    ],
)
def test_it_is_refused_where_going_back_would_not_undo(status, match):
    assert match in Walk(robot(TOOL, 10.0), STRAIGHT, status=status).plan()


def test_it_is_refused_after_a_gripper_was_switched_but_not_for_a_little_play():
    path = STRAIGHT.copy()
    path[30:, 4] = 0.96
    assert Walk(robot(TOOL, 10.0), path).plan() == ""
    path[30:, 4] = 0.9
    assert Walk(robot(TOOL, 10.0), path).plan() == "a gripper was switched"


def test_small_shifts_are_no_move():
    assert Walk(robot(TOOL, 10.0), STRAIGHT, status=lambda k: moved(k, 0.009, 4.5)).plan() == ""


def test_what_is_older_than_ten_seconds_is_forgotten():
    path = np.concatenate([STRAIGHT, np.repeat(STRAIGHT[-1:], 101, axis=0)])
    assert Walk(robot(TOOL, 10.0), path).plan() == "the robot has not moved"


def test_it_is_refused_to_a_robot_that_takes_deltas():
    spec = RobotSpec("test/arm", (*TOOL, GRIPPER), (*TOOL, GRIPPER), (), 10.0, "delta")
    assert "relative" in Walk(spec, STRAIGHT).plan()


@pytest.mark.parametrize(
    ("status", "match"),
    [
        (lambda k: {"objects": {"cube": CUBE}, "force": 25.0 if k > 65 else 0.0}, "25 N"),
        (lambda k: moved(k - 35, shift=0.02), "cube was moved"),
        (lambda k: {"objects": {"cube": CUBE}, "hazards": ["workspace_entered"] if k > 65 else []}, "somebody"),
        (lambda k: {} if k > 65 else {"objects": {"cube": CUBE}}, "not known"),
    ],
)
def test_it_ends_where_something_happens_on_the_way(status, match):
    walk = Walk(robot(TOOL, 10.0), STRAIGHT)
    assert walk.plan() == ""
    commands, why = walk.back(status=status)
    assert match in why and commands[-1, 0] > 0.1


def test_it_ends_where_the_robot_does_not_follow():
    walk = Walk(robot(TOOL, 10.0), STRAIGHT)
    walk.plan()
    commands, why = walk.back(follow=lambda here, command: here)
    assert why == "rewinding ended: the robot does not follow"
    assert commands[-1, 0] == pytest.approx(0.2 - 0.05, abs=0.011)


def test_it_stops_at_the_newest_familiar_state():
    rng = np.random.default_rng(0)
    demos = [np.column_stack([rng.uniform(0, 0.1, 50), rng.normal(0, 1e-3, (50, 3)), np.ones(50)]) for _ in range(6)]
    familiar = Familiar.of(demos)
    walk = Walk(robot(TOOL, 10.0), STRAIGHT, familiar)
    assert walk.plan() == ""
    commands, why = walk.back()
    assert why == "rewound to a familiar state"
    assert 0.08 < commands[-1, 0] < 0.13 and familiar.near(commands[-1:])[0]
    assert Familiar.from_message(familiar.to_message()).distance(STRAIGHT)[0] == familiar.distance(STRAIGHT)[0]
    assert Walk(robot(TOOL, 10.0), STRAIGHT[:20], familiar).plan() == "the robot is where demonstrations were"
    far = STRAIGHT + np.array([1.0, 0, 0, 0, 0])
    assert Walk(robot(TOOL, 10.0), far, familiar).plan() == "nothing familiar within the last seconds"


def test_the_95th_percentile_is_of_episodes_that_were_left_out():
    rng = np.random.default_rng(1)
    demos = [rng.normal(size=(40, 3)) for _ in range(5)]
    familiar = Familiar.of(demos)
    apart = []
    for i, demo in enumerate(demos):
        others = Familiar.of([d for j, d in enumerate(demos) if j != i])
        kept = Familiar(others.states * others.scale / familiar.scale, familiar.scale, familiar.radius)
        apart.append(kept.distance(demo))
    assert np.mean(np.concatenate(apart) <= 1.0) == pytest.approx(0.95, abs=0.01)


class Watched(FakeDriver):
    """Goes slowly enough to be followed, and knows of no object that could be moved."""

    def status(self):
        return {**super().status(), "objects": {}}


def back(k, stop=10**9):
    if k >= stop:
        return [RELEASED]
    return {0: ["start"], 20: ["takeover"], 21: [RELEASED]}.get(k, [{"rewind": True}] if k > 21 else [])


def crawl(request):
    chunk = label_chunk(request, scale=0.005)
    chunk.actions[:, 1] = 0.0
    return chunk


def test_in_the_loop_rewound_frames_are_recovery_by_auto_rewind():
    rig = Rig(back, driver=Watched, answer=crawl)
    log = rig.run(ticks=60)
    frames = [row for row in rig.port.rows if row.step > 20]
    assert frames and {row.labels["segment_type"] for row in frames} == {2}
    assert {row.labels["control_source"] for row in frames} == {2}
    assert rig.sent[20, 0] > 0.08 and rig.sent[-1, 0] == pytest.approx(0.0, abs=1e-5)
    assert np.abs(np.diff(rig.sent[20:, 0])).max() <= 0.01 + 1e-6
    assert rig.console.states[-1]["why"] == "rewound as far as is remembered"
    assert log.operator["takeovers"] == 1 and set(log.rids[20:]) == {-1}


def test_in_the_loop_it_ends_in_the_tick_in_which_the_key_is_let_go():
    rig = Rig(lambda k: back(k, stop=26), driver=Watched, answer=crawl)
    rig.run(ticks=40)
    assert np.flatnonzero(np.diff(rig.sent[20:, 0])).max() + 21 < 26
    assert set(rig.console.phases()[26:]) == {"hold"}


def test_in_the_loop_a_refusal_is_said_and_nothing_moves():
    rig = Rig(lambda k: [*back(k), *(["rewind"] if k == 21 else [])], answer=crawl)  # knows of no objects
    rig.run(ticks=40)
    assert "not known" in rig.console.replies["rewind@21"]["error"]
    assert (rig.sent[20:] == rig.sent[20]).all() and "no auto-rewind" in rig.console.states[-1]["why"]


def test_a_way_on_which_the_model_would_touch_something_is_refused():
    path = np.column_stack([np.linspace(0.0, 0.5, 60), *np.zeros((3, 60)), np.full(60, 0.7)])
    for touching, words in (
        (lambda q: frozenset(["hand, table"]), ""),  # touched already where it is
        (lambda q: frozenset(["hand, table"] if q[0] < 0.2 else []), "on the way back would touch: hand, table"),
        (lambda q: frozenset(), ""),
    ):
        walk = Walk(robot(JOINTS, 30.0), path)
        walk.rewinder = Rewinder(walk.spec, touching=touching)
        for k, state in enumerate(path):
            walk.rewinder.observe(k * walk.dt_ns, seen(state), walk.status(k))
        assert walk.plan() == words


def test_a_robot_that_is_commanded_in_velocities_is_not_rewound():
    """What it measured are speeds: sent again backwards they would drive it somewhere else."""
    spec = robot((Dim("x.vel", "m/s"), Dim("theta.vel", "rad/s")), 30.0)
    assert "commanded in velocities" in Walk(spec, wander(2, 60, 0, 0.01)).plan()
