"""The log of a run says what happened, opens with the reference reader, and is never in the run's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pytest
from mcap.exceptions import McapError
from mcap.reader import NonSeekingReader, make_reader
from mcap_ros2.decoder import DecoderFactory
from runtime_fakes import real_time_robot, robot_spec
from test_node import Server

from vla_stack.data.bags.importing import import_bags
from vla_stack.data.bags.mapping import BagMap
from vla_stack.data.dataset import open_dataset
from vla_stack.errors import UserError
from vla_stack.ros_messages import stamp_ns
from vla_stack.runtime import run_log
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.frames import Frame
from vla_stack.runtime.node import RobotNode
from vla_stack.runtime.run_log import RunLog
from vla_stack.schema import ActionChunk, Observation

SPEC = robot_spec()


def observation(k: int) -> Observation:
    image = np.full((4, 6, 3), (200, 100, 10), np.uint8)
    t_ns = 1_000_000_000 + k * 100_000_000
    return Observation(np.array([k, 0.5], np.float32), {"front": image}, f"task {k // 3}", k, t_ns)


def frame(k: int, gap: int = 0) -> Frame:
    return Frame(observation(k), np.array([-k, 1], np.float32), None, {"gap": gap}, 1.05 + k * 0.1)


def read(path: Path) -> dict[str, list]:
    """Topic -> (log time, message), by the reference reader and the schemas in the file."""
    found: dict[str, list] = defaultdict(list)
    with path.open("rb") as stream:
        reader = make_reader(stream, validate_crcs=True, decoder_factories=[DecoderFactory()])
        for schema, channel, message, decoded in reader.iter_decoded_messages():
            assert channel.message_encoding == "cdr" and schema.encoding == "ros2msg"
            found[channel.topic].append((message.log_time, decoded))
    return found


def test_what_was_logged_is_read_by_the_reference_reader(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with RunLog(path, SPEC) as log:
        log.begin_episode("episode 0")
        for k in range(7):
            log.observation(observation(k))
            log.frame(frame(k))
        log.chunk(ActionChunk(np.arange(8, dtype=np.float32).reshape(4, 2), origin=6, k_obs=5))
        log.event("step 7: stop, camera", warn=True)
    found = read(path)
    assert log.lost == 0 and log.error is None and log.written == sum(map(len, found.values()))
    assert [m.data for _, m in found["/instruction"]] == ["task 0", "task 1", "task 2"]
    for k, (t_ns, state) in enumerate(found["/state"]):
        assert (state.name, state.position) == (["x.pos", "gripper.pos"], [k, 0.5]) and t_ns == stamp_ns(state)
        assert t_ns - found["/state"][0][0] == k * 100_000_000
        assert found["/action"][k][1].position == [-k, 1]
        assert found["/action"][k][0] - t_ns == 50_000_000
    times = [t_ns for t_ns, _ in found["/state"]]
    assert [t_ns for t_ns, _ in found["/camera/front"]] == times
    picture = found["/camera/front"][0][1]
    shown = cv2.imdecode(np.frombuffer(picture.data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    assert picture.format == "jpeg" and np.abs(shown.astype(int) - (200, 100, 10)).max() < 8
    ((arrived_ns, chunk),) = found["/chunk"]
    assert stamp_ns(chunk) == times[5] and chunk.joint_names == ["x.pos", "gripper.pos"]
    assert [p.positions for p in chunk.points] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [p.time_from_start.nanosec for p in chunk.points] == [100_000_000, 200_000_000, 300_000_000, 400_000_000]
    assert [(m.level, m.msg) for _, m in found["/log"]] == [(20, "episode 0"), (30, "step 7: stop, camera")]
    with pytest.raises(UserError, match="is there already"):
        RunLog(path, SPEC)


def test_nobody_waits_for_a_slow_disk_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 10 * observation(0).images["front"].nbytes)
    goes_on = threading.Event()
    with RunLog(tmp_path / "run.mcap", SPEC) as log:
        log._put(0, lambda: goes_on.wait())
        for k in range(30):
            log.observation(observation(k))
        log.frame(frame(0, gap=4))
        lost = log.lost
        goes_on.set()
    assert lost == 20 + 4
    found = read(tmp_path / "run.mcap")
    assert [m.position[0] for _, m in found["/state"]] == list(range(10)) and len(found["/action"]) == 1


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run.mcap", SPEC) as log:
        log._file.close()
        for k in range(2000):
            log.observation(observation(k))
        log._thread.join()
        log.observation(observation(2000))
    assert log.error is not None and log.written + log.lost > 2000


KILLED = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_run_log import SPEC, RunLog, observation
log = RunLog(Path(sys.argv[1]), SPEC)
for k in range(400):
    log.observation(observation(k))
log._put(0, lambda: print("written", flush=True))
log._thread.join()
"""


def test_a_killed_process_leaves_its_complete_chunks(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    code = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    process = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    states = []
    with path.open("rb") as stream, pytest.raises(McapError):  # the file has no end
        for _, _, _, message in NonSeekingReader(stream, decoder_factories=[DecoderFactory()]).iter_decoded_messages(
            "/state", log_time_order=False
        ):
            states.append(message.position[0])
    assert states == list(range(len(states))) and len(states) > 300  # the last chunk was not full


@pytest.mark.slow
def test_a_run_that_is_logged_becomes_a_dataset(tmp_path: Path) -> None:
    server = Server("numbers")
    try:
        with RobotNode(server.endpoint, real_time_robot, ExecutorConfig(mode="naive", execute=4)) as node:
            with RunLog(tmp_path / "run.mcap", node.robot) as log:
                episode = node.run_episode(0, 30, log.observation, log.frame, on_chunk=log.chunk)
    finally:
        server.kill()
    found = read(tmp_path / "run.mcap")
    sent = {tuple(action) for action in episode.actions.tolist()}
    logged = [tuple(m.position) for _, m in found["/action"]]
    assert logged and set(logged) <= sent and len(logged) + log.lost >= (episode.rids >= 0).sum()
    assert len(found["/chunk"]) == node.counters["chunks"] > 0
    assert all(stamp_ns(m) < t_ns for t_ns, m in found["/chunk"])
    how = BagMap("/state", "/action", 10.0, {"front": "/camera/front"}, task_topic="/instruction", units={"x.pos": "m"})
    import_bags([tmp_path / "run.mcap"], tmp_path / "data", how)
    dataset = open_dataset(tmp_path / "data")
    assert {tuple(a) for a in dataset.columns["action"].tolist()} <= set(logged)
    assert dataset.num_episodes == 1 and dataset.tasks == ("task",)
