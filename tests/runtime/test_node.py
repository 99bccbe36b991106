"""Real processes: node, control, simulator and server, and what happens when one of them is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mcap.reader import make_reader
from runtime_fakes import real_time_robot

from vla_stack.data.dataset import open_dataset
from vla_stack.errors import UserError
from vla_stack.rollout.records import load_records
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.node import RobotNode

HERE = Path(__file__).parent
PATIENCE_S = 120.0  # upper bound of waits; nothing depends on how long they take


class Server:
    """A policy server process that can be killed and started again at the same address."""

    def __init__(self, kind: str) -> None:
        self.kind, self.endpoint = kind, "tcp://127.0.0.1:*"
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(HERE / "label_server.py"), self.endpoint, self.kind]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        ready = self.process.stdout.readline().split()
        assert ready[0] == "READY"
        self.endpoint = ready[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def server(request):
    server = Server(request.param)
    yield server
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["numbers"], indirect=True)
def test_the_server_is_killed_and_comes_back(server):
    states = []

    def on_state(tick, state, why):
        states.append((tick, state))
        if states[-1][1] == "run" and len(states) == 1:
            server.kill()
        elif state == "stop" and server.process.returncode is not None:
            server.start()
        elif state == "run":
            node.abort()

    config = ExecutorConfig(mode="naive", execute=4)
    with RobotNode(server.endpoint, real_time_robot, config, rearm=lambda: True, on_state=on_state) as node:
        episode = node.run_episode(seed=0, max_ticks=600)
        names = [s for _, s in states]
        assert names[0] == names[-1] == "run" and "stop" in names  # a busy computer may skip the steps of HOLD
        assert node.counters["sessions renewed"] >= 1
        run = episode.rids >= 0
        # A skipped step has no row, so labels may run ahead of rows; they fall behind by what was waited for a chunk.
        assert (np.diff(episode.actions[run, 0]) > 0).all()
        second = node.run_episode(seed=1, max_ticks=600)  # until it runs
        assert second.summary["ticks"]["run"] > 0


@pytest.mark.parametrize("server", ["numbers"], indirect=True)
def test_a_control_process_that_dies_is_one_clear_line(server):
    def kill(tick, state, why):
        os.kill(node._process.pid, signal.SIGKILL)

    with RobotNode(server.endpoint, real_time_robot, on_state=kill) as node:
        with pytest.raises(UserError, match=r"control process ended \(exit code -9\)"):
            node.run_episode(seed=0, max_ticks=600)


def test_a_server_that_is_not_there_is_one_clear_line():
    with pytest.raises(UserError, match="nobody listens there -- start one with: vla serve"):
        with RobotNode("ipc:///tmp/vla-nobody-is-here", real_time_robot, hello_timeout_s=0.3):
            pass


def test_a_driver_that_fails_is_one_clear_line():
    with pytest.raises(UserError, match="the arm is not plugged in"):
        with RobotNode("ipc:///tmp/vla-nobody-is-here", broken_robot):
            pass


def broken_robot():
    raise UserError("the arm is not plugged in")


def vla_run(server, out, *more):
    command = [sys.executable, "-m", "vla_stack.cli", "run", "--server", server.endpoint, "--out", str(out)]
    command += ["--robot-arg", "image_size=32", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("server", ["arm"], indirect=True)
def test_vla_run_drives_the_simulated_arm_and_writes_records(server, tmp_path):
    more = ("--robot-arg", "max_episode_steps=12", "--record-video", "1", "--log", str(tmp_path / "run.mcap"))
    process = vla_run(server, tmp_path, "--episodes", "2", *more)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert "0 of 2 episodes succeeded: 0% (95 % interval 0% to 84%)" in output
    records = json.loads((tmp_path / "records.json").read_text())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert records["name"] == "sim/pick-v0" and summary["episodes"] == 2
    assert load_records(tmp_path / "records.json")[0].stages == tuple(records["stages"]) != ()
    for seed, episode in enumerate(records["episodes"]):
        assert episode["seed"] == seed
        assert "cube" in episode["instruction"]
        assert episode["steps"] == sum(episode["ticks"].values()) > 0
        assert episode["idle_ticks"] == episode["steps"] - episode["ticks"]["run"]
        assert sum(episode["lateness_ms"]["counts"]) >= episode["steps"] - episode["ticks"]["overrun"]
        assert 0 < episode["real_time_factor"] <= 1
    assert (tmp_path / records["episodes"][0]["video"]).stat().st_size > 0
    assert "video" not in records["episodes"][1]
    with (tmp_path / "run.mcap").open("rb") as stream:
        summary = make_reader(stream).get_summary()
    counts = {c.topic: summary.statistics.channel_message_counts[i] for i, c in summary.channels.items()}
    assert counts["/state"] == counts["/camera/front"] == counts["/camera/wrist"] > 0
    assert counts["/instruction"] == 2 and counts["/log"] >= 4
    assert f"log: {tmp_path / 'run.mcap'}, {sum(counts.values())} messages" in output


@pytest.mark.slow
@pytest.mark.parametrize("server", ["arm"], indirect=True)
def test_vla_run_says_that_its_robot_has_nothing_to_do(server, tmp_path):
    process = vla_run(server, tmp_path, "--robot-arg", "max_episode_steps=100000")
    lines = iter(process.stdout.readline, "")
    assert any("Hz, naive, policy stay" in line for line in lines)
    server.kill()
    line = next(line for line in lines if line.startswith("no action for "))
    assert "of the last" in line and "-- see what the server says" in line
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("server", ["numbers"], indirect=True)
def test_a_recorder_that_hangs_makes_no_tick_wait(server):
    over, frames = threading.Event(), []

    def hang(frame):
        assert over.wait(PATIENCE_S)  # were the robot to wait for this, its last steps would never be seen
        frames.append(frame)

    def on_observation(obs):
        if obs.step >= 30:
            over.set()

    with RobotNode(server.endpoint, real_time_robot, rearm=lambda: True) as node:
        episode = node.run_episode(seed=0, max_ticks=40, on_observation=on_observation, on_frame=hang)
    steps = [frame.obs.step for frame in frames]
    assert steps == sorted(set(steps)) and steps[-1] >= 30
    counted = len(frames) + sum(frame.labels["gap"] for frame in frames)
    ran = sum(episode.summary["ticks"].get(state, 0) for state in ("run", "hold"))
    assert ran - 3 <= counted <= ran  # before the first chunk there is no command, and a last gap has no next frame


@pytest.mark.parametrize("server", ["numbers"], indirect=True)
def test_a_call_for_help_reaches_the_robot_and_the_person_lets_it_go_on(server):
    states, asked = [], []

    def on_state(tick, state, why):
        states.append((state, why))
        if len(states) > 2 and state == "run":
            node.abort()

    def on_chunk(chunk):
        if states and not node.counters["calls for help"]:  # it moves
            node.call_for_help("look here")

    def may():
        asked.append(states[-1])
        return True

    with RobotNode(server.endpoint, real_time_robot, rearm=may, on_state=on_state) as node:
        node.run_episode(seed=0, max_ticks=2000, on_chunk=on_chunk)
    assert asked == [("hold", "look here")] and states[-1][0] == "run"


@pytest.mark.slow
@pytest.mark.parametrize("server", ["arm"], indirect=True)
def test_a_killed_run_loses_its_running_episode_alone(server, tmp_path):
    recording = ("--record", "episodic", "--root", str(tmp_path / "data"), "--robot-arg", "max_episode_steps=4")
    process = vla_run(server, tmp_path, "--episodes", "1000", *recording)
    lines = iter(process.stdout.readline, "")
    assert any("3/1000]" in line for line in lines)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    driven = load_records(tmp_path / "records.json")[0].episodes
    saved = open_dataset(tmp_path / "data").num_episodes
    assert 3 <= len(driven) <= saved <= len(driven) + 1
    again = vla_run(server, tmp_path, "--episodes", "1", *recording)  # goes on recording
    output, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0 and "1 episodes recorded" in output, output
    assert open_dataset(tmp_path / "data").num_episodes == saved + 1


@pytest.mark.slow
@pytest.mark.parametrize("server", ["arm"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_node_leaves_no_process_and_no_memory(server, number, tmp_path):
    process = vla_run(server, tmp_path, "--episodes", "1000", "--robot-arg", "max_episode_steps=3")
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("[") for line in lines)  # the first episode is over
    family = descendants(process.pid)
    memory = {name for pid in family for name in shared_memory(pid)}
    assert len(family) >= 2 and len(memory) == 2  # control and simulator; node to control and simulator to control
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    if number != signal.SIGKILL:
        assert process.returncode == 130, output
        assert "Traceback" not in output
    wait_for(lambda: not any(alive(pid) for pid in family))
    wait_for(lambda: not any(Path("/dev/shm", name).exists() for name in memory))


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = set(), [pid]
    while queue:
        queue += children.get(queue[0], [])
        found.update(children.get(queue.pop(0), []))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def shared_memory(pid: int) -> set[str]:
    return set(re.findall(r"/dev/shm/(psm_\w+)", Path(f"/proc/{pid}/maps").read_text()))


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
