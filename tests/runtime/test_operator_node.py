"""A robot node without a policy server, driven through the real channels: processes, sockets, threads."""

import contextlib
import re
import threading
import time
from functools import partial

import numpy as np
import pytest
from runtime_fakes import FakeDriver, real_time_robot
from test_node import Server

from robot_drivers import make_driver
from vla_stack.errors import UserError
from vla_stack.runtime.frames import Frame, FrameQueue
from vla_stack.runtime.node import Operator, RobotNode
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.rewind import RewindConfig
from vla_stack.schema import Observation

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 400.0  # upper bound of waits; nothing depends on how long they take


class Person(threading.Thread):
    """Drives on a thread of its own, as ``script`` (a generator that yields between two looks) says."""

    def __init__(self, endpoint, script) -> None:
        super().__init__()
        self.client, self.script, self.error = OperatorClient(endpoint), script, None
        self.velocity, self.engaged, self.rewind = None, False, False
        self.start()

    def run(self) -> None:
        deadline, asked = time.monotonic() + PATIENCE_S, 0.0
        try:
            for _ in self.script(self):
                holds = not self._must_let_go()
                self.client.teleop(self.velocity, engaged=self.engaged and holds, rewind=self.rewind and holds)
                self.client.poll(10)
                if self.client.state.get("lease") == "" and time.monotonic() > asked + 0.5:
                    self.client.event("acquire")  # the lease ends after a second of silence
                    asked = time.monotonic()
                assert time.monotonic() < deadline, self.client.state
        except BaseException as e:
            self.error = e
            with contextlib.suppress(UserError):
                self.client.call("discard", 60.0)  # or the node waits for a hand that will not come
        finally:
            self.client.close()

    def _must_let_go(self) -> bool:
        """On a busy computer the hand may be late: let go for five ticks, hold again for five, until it is taken."""
        return self.client.state.get("phase") == "hold" and self.client.state["tick"] // 5 % 2 == 0

    def ask(self, name):
        while True:
            wanted = self.client.event(name)
            while wanted not in self.client.replies:
                yield
            reply = self.client.replies.pop(wanted)
            if reply.error != "acquire the lease first":
                return reply

    def until(self, condition):
        while not condition(self.client.state):
            yield


def finish(person: Person) -> None:
    person.join()
    if person.error is not None:
        raise person.error


def endpoint(tmp_path) -> str:
    return f"ipc://{tmp_path}/op"


def test_a_demonstration_through_the_channels_to_the_frames(tmp_path):
    seen, frames = [], []

    def script(p):
        assert (yield from p.ask("acquire")).ok
        assert (yield from p.ask("start")).ok
        p.velocity, p.engaged = [0.5, 0.0], True
        yield from p.until(lambda s: s.get("phase") == "teleop" and s["state"][0] > 0.4)
        seen.append(sorted(p.client.frames))
        p.engaged = False
        # On a busy computer the hand may have been late, and the robot in hold, before it let go.
        yield from p.until(lambda s: s["phase"] == "hold" and s["why"].endswith(("dead-man released", " old")))
        stood = p.client.state["action"]
        yield from p.until(lambda s, k=p.client.state["tick"]: s["tick"] > k + 3)
        assert p.client.state["action"] == stood
        assert (yield from p.ask("success")).phase == "end_demo"

    def slow(frame):
        frames.append(frame)
        time.sleep(0.15)  # longer than a control step

    with RobotNode(None, real_time_robot, operator=Operator(endpoint(tmp_path))) as node:
        person = Person(endpoint(tmp_path), script)
        episode = node.run_episode(seed=0, on_frame=slow)
        finish(person)
    steps = [frame.obs.step for frame in frames]
    assert steps == sorted(set(steps)) and sum(f.labels["gap"] for f in frames) == 0
    assert len(frames) == episode.summary["operator"]["human frames"] and seen == [["front"]]
    moving = np.array([f.action[0] for f in frames])
    np.testing.assert_allclose(np.diff(moving), 0.05, atol=1e-5)
    sent = episode.actions  # one row a tick that was run; all of them stored ones among them
    assert all((sent == f.action).all(axis=1).any() for f in frames)
    assert {f.labels["segment_type"] for f in frames} == {0} and episode.summary["operator"]["mode"] == "teleop"


def test_a_stranger_stops_the_robot_and_the_holder_rearms_it(tmp_path):
    def script(p):
        yield from p.ask("acquire")
        yield from p.ask("start")
        p.velocity, p.engaged = [0.5, 0.0], True
        yield from p.until(lambda s: s.get("phase") == "teleop")
        stranger = OperatorClient(endpoint(tmp_path))
        stranger.estop()
        stranger.close()
        yield from p.until(lambda s: s["phase"] == "estop" and s["run"] == "stop")
        assert not (yield from p.ask("engage")).ok
        assert (yield from p.ask("rearm")).phase == "hold"
        assert (yield from p.ask("discard")).phase == "end_discarded"

    with RobotNode(None, real_time_robot, operator=Operator(endpoint(tmp_path))) as node:
        person = Person(endpoint(tmp_path), script)
        episode = node.run_episode(seed=0)
        finish(person)
    assert episode.summary["operator"]["phase"] == "end_discarded" and episode.summary["ticks"]["stop"] > 0


def test_a_recording_that_fails_ends_the_episode_with_its_reason(tmp_path):
    def script(p):
        yield from p.ask("acquire")
        yield from p.ask("start")
        p.engaged = True
        while not failed.is_set():
            yield

    failed = threading.Event()

    def full(frame):
        failed.set()
        raise UserError("the disk is full")

    with RobotNode(None, real_time_robot, operator=Operator(endpoint(tmp_path))) as node:
        person = Person(endpoint(tmp_path), script)
        with pytest.raises(UserError, match="the disk is full"):
            node.run_episode(seed=0, on_frame=full)
        finish(person)


@pytest.fixture
def still():
    """A policy server that tells the simulated arm to stay where it is."""
    server = Server("arm")
    yield server
    server.kill()


@pytest.mark.slow
def test_the_whole_protocol_on_the_simulated_arm(still, tmp_path):
    """Policy, takeover, a hand, auto-rewind, the hand again, correction, end; rewinding is executed, never set."""
    at = {}

    def script(p):
        yield from p.ask("acquire")
        yield from p.ask("start")
        yield from p.until(lambda s: s.get("phase") == "auto" and s["tick"] > 5)
        assert (yield from p.ask("takeover")).phase == "hold"
        at["taken"], taken_ns = np.array(p.client.state["state"][:3]), p.client.state["t_ns"]
        p.velocity, p.engaged = [0.05, 0.02, 0.05, 0.0, 0.0], True
        yield from p.until(lambda s: s["phase"] == "recovery" and s["state"][0] > at["taken"][0] + 0.04)
        p.engaged = False
        yield from p.until(lambda s: s["phase"] == "hold")
        assert (yield from p.ask("rewind")).ok
        at["far"], p.rewind = np.array(p.client.state["state"][:3]), True
        at["remembered"] = p.client.state["t_ns"] - taken_ns < RewindConfig().window_s * 1e9  # not on a busy computer
        yield from p.until(lambda s: s["why"] == "rewound as far as is remembered")
        at["back"], p.rewind = np.array(p.client.state["state"][:3]), False
        yield
        p.velocity, p.engaged = None, True
        yield from p.until(lambda s: s["phase"] == "recovery" and s["control_source"] == 1)
        while not (yield from p.ask("recovered")).ok:
            yield
        yield from p.until(lambda s: s["phase"] == "correction")
        while not (yield from p.ask("subtask_done")).ok:
            yield

    frames = []
    make = partial(make_driver, "sim", task="pick", image_size=32, max_episode_steps=10**6)
    with RobotNode(still.endpoint, make, operator=Operator(endpoint(tmp_path))) as node:
        assert node.joints == tuple(f"joint_{i}.pos" for i in range(1, 8))
        person = Person(endpoint(tmp_path), script)
        episode = node.run_episode(seed=0, on_frame=frames.append)
        finish(person)
    assert np.linalg.norm(at["far"] - at["taken"]) > 0.04
    assert np.linalg.norm(at["back"] - at["taken"]) < (0.01 if at["remembered"] else 0.04)
    labels = "".join(str(f.labels["segment_type"]) for f in frames)
    assert re.fullmatch("1+2+3+", labels) and episode.summary["operator"]["phase"] == "end_intervened"
    assert [f.labels["gap"] for f in frames] == [0] * len(frames)
    back = [f.action for f in frames if f.labels["control_source"] == 2]
    assert np.linalg.norm(np.diff(back, axis=0)[:, :3], axis=1).max() <= 0.01 + 1e-5  # 0.10 m/s at 10 Hz
    assert all(f.joint_command is not None and f.joint_command.shape == (7,) for f in frames)


def test_without_a_policy_only_teleoperation_works(tmp_path):
    with pytest.raises(UserError, match="neither a policy nor an operator"):
        RobotNode(None, real_time_robot)
    node = RobotNode(None, real_time_robot, operator=Operator(endpoint(tmp_path)))
    with pytest.raises(UserError, match="'rac' needs a policy server"):
        node.run_episode(seed=0, mode="rac")


def test_frames_that_find_no_room_are_counted_in_the_next_one():
    gate, written = threading.Event(), []

    def write(frame):
        gate.wait(PATIENCE_S)
        written.append(frame)

    queue = FrameQueue(write)
    big = {"front": np.broadcast_to(np.uint8(0), (1 << 12, 1 << 12, 3))}  # 48 MB by its shape: the least number fits
    for step in range(100):
        queue.put(Frame(Observation(np.zeros(1, np.float32), big, "", step), np.zeros(1), None, {"gap": 0}, 0.0))
    lost = queue.lost
    gate.set()
    while len(written) < 100 - lost:
        time.sleep(0.001)
    queue.put(Frame(Observation(np.zeros(1, np.float32), {}, "", 100), np.zeros(1), None, {"gap": 2}, 0.0))
    queue.close()
    steps = [f.obs.step for f in written]
    assert lost > 0 and steps == [*range(100 - lost), 100]
    assert written[-1].labels["gap"] == lost + 2 and queue.lost == lost + 2


def test_joint_targets_belong_to_the_step_that_they_realised():
    from operator_fakes import RELEASED, Rig, hand

    class Jointed(FakeDriver):
        joints = ("joint_1.pos",)

        @property
        def joint_command(self):
            return np.float32([self.at[0] * 2])

    rig = Rig(lambda k: ["start", RELEASED] if k == 0 else [hand()], driver=Jointed, policy=False)
    rig.run("teleop", ticks=10)
    assert len(rig.port.rows) == 9
    for row in rig.port.rows:
        assert row.joint_command[0] == row.action[0] * 2
