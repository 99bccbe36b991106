"""Recordings of others become datasets in which every frame is what was newest at its moment, or nothing at all."""

from __future__ import annotations

import shutil
import sqlite3
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_bags as toy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from mcap.writer import Writer as McapWriter
from toy_bags import ACTION, FRONT, START_NS, STATE, TASK, WRIST

from vla_stack.data.bags import files, pictures
from vla_stack.data.bags.files import open_bag
from vla_stack.data.bags.importing import import_bags
from vla_stack.data.bags.mapping import BagMap
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.integrity import check
from vla_stack.data.video import decode
from vla_stack.errors import UserError
from vla_stack.ros_messages import decoder

RATE = 20.0
HOW = BagMap(STATE, ACTION, RATE, {"front": FRONT, "wrist": WRIST}, task_topic=TASK, grippers={"finger": (0.0, 0.04)})


def imported(tmp_path: Path, *bags: Path, how: BagMap = HOW):
    root = tmp_path / "out"
    import_bags(bags, root, how)
    return open_dataset(root)


def stamps_of(messages, topic: str) -> np.ndarray:
    return np.array([m.header.stamp.sec * 10**9 + m.header.stamp.nanosec for t, _, m in messages if t == topic])


@pytest.fixture(params=["mcap", "sqlite3"])
def storage(request: pytest.FixtureRequest) -> str:
    return request.param


def test_each_frame_is_the_newest_sample_at_its_tick_to_a_millisecond(tmp_path: Path, storage: str) -> None:
    messages = toy.session(3.0)
    dataset = imported(tmp_path, toy.write(tmp_path / "bag", messages, storage))
    assert dataset.num_episodes == 1 and check(dataset.root, deep=True) == []
    times = {topic: stamps_of(messages, topic) for topic in (STATE, ACTION, FRONT, WRIST)}
    # the first tick: when the last topic begins (the instruction has no header: its log time)
    first = max(START_NS, *(s[0] for s in times.values()))
    ticks = first + np.rint(np.arange(dataset.num_frames) * 1e9 / RATE).astype(np.int64)
    assert ticks[-1] <= min(times[t][-1] for t in (STATE, FRONT, WRIST)) < ticks[-1] + 1e9 / RATE
    newest = {topic: np.searchsorted(s, ticks, side="right") - 1 for topic, s in times.items()}
    state, action = dataset.columns["observation.state"], dataset.columns["action"]
    assert dataset.features["action"]["names"] == ["lift.pos", "elbow.pos", "finger.pos"]
    told = toy.told_time(times[STATE][newest[STATE]])
    np.testing.assert_array_equal(state, np.stack([-told, told, np.full_like(told, 0.5)], 1).astype(np.float32))
    age = toy.told_time(ticks) - state[:, 1]  # what the measurement itself says of its time
    assert (-1e-6 < age).all() and age.max() <= 1e-3 + 1e-6
    told = toy.told_time(times[ACTION][newest[ACTION]])
    np.testing.assert_array_equal(action, np.stack([told, told + 1, np.ones_like(told)], 1).astype(np.float32))
    np.testing.assert_allclose(dataset.columns["capture_time"], (ticks - first) * 1e-9, atol=1e-12)
    for camera, topic, offset in (("front", FRONT, 0), ("wrist", WRIST, 1000)):
        video = next((dataset.root / f"videos/observation.images.{camera}").rglob("*.mp4"))
        shown = [image for _, image in decode(video)]
        assert [toy.number_of(image) for image in shown] == (newest[topic] + offset).tolist()
        assert shown[0][1, 20, 0] > 150 > shown[0][1, 20, 2]  # red is red
    spec = read_robot_spec(dataset.root)
    assert spec.action == spec.state and [d.unit for d in spec.state] == ["rad", "rad", "ratio"]
    assert dataset.tasks == ("pick the cube",) and dataset.columns["next.success"].sum() == 1


def test_storages_and_plain_files_give_the_same_dataset(tmp_path: Path) -> None:
    messages = toy.session(0.6)
    bags = [toy.write(tmp_path / s, messages, s) for s in ("mcap", "sqlite3")]
    paths = [*bags, next(bags[0].glob("*.mcap")), next(bags[1].glob("*.db3"))]
    made = [imported(tmp_path / str(i), path) for i, path in enumerate(paths)]
    for dataset in made[1:]:
        for name, column in made[0].columns.items():
            np.testing.assert_array_equal(column, dataset.columns[name])
    both = imported(tmp_path, *paths[:2])
    assert both.episode_to.tolist() == [made[0].num_frames, 2 * made[0].num_frames]


def test_a_message_without_a_stamp_has_the_time_of_its_log(tmp_path: Path) -> None:
    messages = [
        (topic, START_NS + i * 10_000_000, toy.joint_state(None, ["a"], [i]))
        for i in range(30)
        for topic in "/s /a".split()
    ]
    bag = toy.write(tmp_path / "bag", messages)
    dataset = imported(tmp_path, bag, how=BagMap("/s", "/a", 50.0, task="wave"))
    np.testing.assert_array_equal(dataset.columns["observation.state"], np.arange(0, 30, 2))
    late = [(t, ns, replace(m, header=toy.header(ns + 5_000_000_000))) for t, ns, m in messages]
    shifted = [x if x[0] == "/s" else y for x, y in zip(messages, late, strict=True)]  # clocks that differ by 5 s
    bag = toy.write(tmp_path / "clocks", shifted)
    with pytest.raises(UserError, match="--log-time"):
        import_bags([bag], tmp_path / "no", BagMap("/s", "/a", 50.0, task="wave"))
    again = imported(tmp_path / "log", bag, how=BagMap("/s", "/a", 50.0, task="wave", log_time=True))
    np.testing.assert_array_equal(again.columns["action"], dataset.columns["action"])


def test_a_late_message_is_left_out_and_counted(tmp_path: Path) -> None:
    order = [0, 1, 3, 2, 4, 5]
    messages = [
        (topic, START_NS + k, toy.joint_state(START_NS + i * 10_000_000, ["a"], [i]))
        for k, i in enumerate(order)
        for topic in ("/s", "/a")
    ]
    how = BagMap("/s", "/a", 100.0, task="wave")
    done = import_bags([toy.write(tmp_path / "bag", messages)], tmp_path / "out", how)
    assert done.late == 2 and done.ages["state"] == pytest.approx(0.01)
    assert open_dataset(tmp_path / "out").columns["action"].tolist() == [0, 1, 1, 3, 4, 5]


def test_joints_of_several_nodes_on_one_topic_are_one_state(tmp_path: Path) -> None:
    messages = []
    for i in range(40):
        ns = START_NS + i * 10_000_000
        messages.append(("/s", ns, toy.joint_state(ns, ["a", "b"], [i, 10 * i])))
        messages.append(("/s", ns + 5_000_000, toy.joint_state(ns + 5_000_000, ["grip"], [i + 0.5])))
        messages.append(("/a", ns, toy.joint_state(ns, ["grip", "a"], [0, i])))
    bag = toy.write(tmp_path / "bag", messages)
    dataset = imported(tmp_path, bag, how=BagMap("/s", "/a", 100.0, task="wave", units={"grip": "m"}))
    assert dataset.features["observation.state"]["names"] == ["grip.pos", "a.pos", "b.pos"]  # the action's first
    state = dataset.columns["observation.state"]
    np.testing.assert_array_equal(state[:, 0], state[:, 1] + 0.5)
    np.testing.assert_array_equal(state[:, 2], 10 * state[:, 1])
    assert read_robot_spec(dataset.root).action[0].unit == "m"
    chosen = imported(tmp_path / "b", bag, how=BagMap("/s", "/a", 100.0, task="wave", joints=("a", "grip")))
    np.testing.assert_array_equal(chosen.columns["observation.state"], state[:, [1, 0]])


def test_a_gap_and_a_topic_split_episodes(tmp_path: Path) -> None:
    def rows(first: int, count: int) -> list:
        times = [START_NS + (first + i) * 10_000_000 for i in range(count)]
        return [(t, ns, toy.joint_state(ns, ["a"], [(ns - START_NS) / 1e7])) for ns in times for t in ("/s", "/a")]

    messages = rows(0, 100) + rows(300, 50)
    messages += [("/go", START_NS + ns, toy.string(text)) for ns, text in ((0, "one"), (405_000_000, "two"))]
    messages.sort(key=lambda m: m[1])
    bag = toy.write(tmp_path / "bag", messages)
    how = BagMap("/s", "/a", 100.0, task_topic="/go")
    assert imported(tmp_path / "1", bag, how=how).num_episodes == 1
    gaps = imported(tmp_path / "2", bag, how=replace(how, split_gap=0.1))
    starts = gaps.columns["observation.state"][gaps.episode_from]
    assert gaps.num_episodes == 2 and starts.tolist() == [0, 300] and gaps.num_frames == 110 + 50
    both = imported(tmp_path / "3", bag, how=replace(how, split_gap=0.1, split_topic="/go"))
    assert both.columns["observation.state"][both.episode_from].tolist() == [0, 41, 300]
    texts = [both.tasks[i] for i in both.columns["task_index"][both.episode_from]]
    assert texts == ["one", "two", "two"]


def tear(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.999])
def test_a_torn_file_is_one_line_and_nothing_stays(tmp_path: Path, storage: str, keep: float) -> None:
    whole, torn = (toy.write(tmp_path / n, toy.session(0.4, i), storage) for i, n in enumerate(("whole", "torn")))
    file = next(path for path in torn.iterdir() if path.suffix in (".mcap", ".db3"))
    tear(file, keep)
    with pytest.raises(UserError) as error:
        import_bags([whole, torn], tmp_path / "out", HOW)
    assert str(file) in error.value.message and "\n" not in str(error.value) and error.value.remedy
    assert sorted(p.name for p in tmp_path.iterdir()) == ["torn", "whole"]


def zeroed(message):
    message.data[30:] = 0
    return message


SHOT, POSE = toy.image(START_NS, toy.picture(3)), toy.joint_state(START_NS, toy.JOINTS[::-1], [0.0] * 3)


@pytest.mark.parametrize(
    ("topic", "bad", "word"),
    [
        (WRIST, zeroed(toy.compressed(START_NS, toy.picture(3))), "neither JPEG nor PNG"),
        (WRIST, toy.compressed(START_NS, toy.picture(3)[:8]), "is 24x8, the first was 24x16"),
        (FRONT, replace(SHOT, height=17), "17 rows"),
        (FRONT, replace(SHOT, encoding="16UC1"), "16UC1"),
        (FRONT, replace(SHOT, height=2**31, width=2**31), "too large"),
        (STATE, replace(POSE, name=["lift"], position=np.zeros(1)), "two sources"),
        (STATE, replace(POSE, position=np.zeros(1)), "3 names, 1 positions"),
        (STATE, replace(POSE, position=np.full(3, np.nan)), "joint 'lift' of '/joint_states' is nan"),
    ],
)
def test_a_damaged_message_is_named_with_file_and_topic(tmp_path: Path, topic: str, bad, word: str) -> None:
    late = START_NS + 150_000_000
    messages = [
        (t, ns, replace(bad, header=m.header) if t == topic and ns > late else m) for t, ns, m in toy.session(0.4)
    ]
    bag = toy.write(tmp_path / "bag", messages)
    with pytest.raises(UserError) as error:
        import_bags([bag], tmp_path / "out", HOW)
    assert word in error.value.message and topic in error.value.message and str(bag) in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["bag"]


def test_what_is_no_recording_and_what_is_not_in_it_is_said(tmp_path: Path) -> None:
    bag = toy.write(tmp_path / "bag", toy.session(0.2))
    (tmp_path / "ros1.bag").write_bytes(b"#ROSBAG V2.0\n")
    (tmp_path / "x.db3.zstd").write_bytes(zstandard.compress(b"x"))
    (tmp_path / "folder").mkdir()
    for name, word in (
        ("ros1.bag", "rosbags-convert"),
        ("x.db3.zstd", "zstd -d"),
        ("folder", "metadata.yaml"),
        ("-", "-"),
    ):
        with pytest.raises(UserError, match=word):
            open_bag(tmp_path / name)
    for how, word in (
        (replace(HOW, state="/nothing"), f"{STATE} \\(sensor_msgs/msg/JointState\\)"),
        (replace(HOW, state=FRONT), "it has to be sensor_msgs/msg/JointState"),
        (replace(HOW, joints=("wheel",)), "no joint 'wheel'"),
    ):
        with pytest.raises(UserError, match=word):
            import_bags([bag], tmp_path / "out", how)
    import_bags([bag], tmp_path / "out", HOW)
    with pytest.raises(UserError, match="vla data merge"):
        import_bags([bag], tmp_path / "out", HOW)


def mcap_of(path: Path, data: bytes) -> Path:
    """A file with one message of bytes that compress well."""
    with path.open("wb") as stream:
        writer = McapWriter(stream, use_statistics=False)
        writer.start()
        schema = writer.register_schema("std_msgs/msg/String", "ros2msg", b"string data")
        channel = writer.register_channel("/x", "cdr", schema)
        writer.add_message(channel, 1, data, 1)
        writer.finish()
    return path


def test_sizes_are_bounded_before_they_are_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_RECORD", 1 << 20)
    bomb = mcap_of(tmp_path / "bomb.mcap", bytes(2 << 20))
    with pytest.raises(UserError, match=r"bomb\.mcap is damaged \(a chunk claims"):
        list(open_bag(bomb).messages(["/x"]))
    liar = bytearray(bomb.read_bytes())  # the same chunk, which claims to be small
    position = next(i for i in range(len(liar) - 8) if liar[i] == 0x06 and i > 20)
    at = position + 9 + 16
    liar[at : at + 8] = struct.pack("<Q", 1 << 16)
    (tmp_path / "liar.mcap").write_bytes(liar)
    with pytest.raises(UserError, match="unpacks to more than 65536 bytes|too much memory"):
        list(open_bag(tmp_path / "liar.mcap").messages(["/x"]))
    huge = bytearray(mcap_of(tmp_path / "small.mcap", b"x" * 100).read_bytes())
    huge[position + 1 : position + 9] = struct.pack("<Q", 1 << 62)
    (tmp_path / "huge.mcap").write_bytes(huge)
    with pytest.raises(UserError, match="exceeds limit"):
        list(open_bag(tmp_path / "huge.mcap").messages(["/x"]))


def test_a_database_may_not_compute(tmp_path: Path) -> None:
    file = tmp_path / "view.db3"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE topics (id, name, type, serialization_format)")
        database.execute(
            "CREATE VIEW messages AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
            "SELECT id, 1 AS topic_id, 1 AS timestamp, x'00' AS data FROM n"
        )
    with pytest.raises(UserError, match="no tables"):
        open_bag(file).topics()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_are_an_error_of_ours_or_nothing(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    for storage in ("mcap", "sqlite3"):
        if not (folder / storage).exists():
            folder.mkdir(exist_ok=True)
            toy.write(folder / storage, toy.session(0.05), storage)
        source = next(p for p in (folder / storage).iterdir() if p.suffix in (".mcap", ".db3"))
        content = bytearray(source.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        file = folder / f"flipped{source.suffix}"
        file.write_bytes(content)
        try:
            import_bags([file], folder / "out", HOW)
        except UserError as e:
            assert "\n" not in str(e)
        shutil.rmtree(folder / "out", ignore_errors=True)


@pytest.mark.parametrize("encoding", ["rgb8", "bgr8"])
def test_rows_may_be_longer_than_their_pixels(encoding: str) -> None:
    message = toy.image(START_NS, toy.picture(77), encoding)
    decoded = decoder("sensor_msgs/msg/Image")(bytes(toy.STORE.serialize_cdr(message, message.__msgtype__)))
    np.testing.assert_array_equal(pictures.decode_image(decoded), toy.picture(77))


def test_a_png_says_its_size_before_it_is_decoded() -> None:
    message = toy.compressed(START_NS, toy.picture(5), "png")
    np.testing.assert_array_equal(pictures.decode_compressed(message_bytes(message)), toy.picture(5))
    message.data[16:24] = np.frombuffer(struct.pack(">II", 60000, 60000), np.uint8)
    with pytest.raises(ValueError, match="60000x60000 is empty or too large"):
        pictures.decode_compressed(message_bytes(message))


def message_bytes(message):
    """The same with bytes for its array, as our decoder gives it."""
    return replace(message, data=message.data.tobytes())


def test_memory_holds_no_recording(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    raw = replace(
        toy.image(START_NS, toy.picture(0), "rgb8"), height=256, width=256, step=768, data=picture.reshape(-1)
    )
    messages = []
    for i in range(300):
        ns = START_NS + i * 10_000_000
        messages += [(t, ns, toy.joint_state(ns, ["a"], [i])) for t in ("/s", "/a")]
        messages.append((FRONT, ns, replace(raw, header=toy.header(ns))))
    bag = toy.write(tmp_path / "bag", messages)
    del messages
    tracemalloc.start()
    import_bags([bag], tmp_path / "out", BagMap("/s", "/a", 100.0, {"front": FRONT}, task="wave"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    recorded = 300 * picture.nbytes
    assert peak < recorded / 2  # the recorder lets 64 pictures wait for the encoder


def test_a_map_is_refused_by_key() -> None:
    good = {"state": "/s", "action": "/a", "rate_hz": 30, "task": "pick"}
    assert BagMap.of(good, "map.yaml").rate_hz == 30.0
    for key, value in (
        ("rate_hz", 0),
        ("cameras", {"a/b": "/c"}),
        ("cameras", ["/c"]),
        ("units", {"a": "inch"}),
        ("grippers", {"a": [1, 1]}),
        ("joints", ["a", "a"]),
        ("log_time", "yes"),
    ):
        with pytest.raises(UserError, match=f"map.yaml: '{key}' is"):
            BagMap.of(good | {key: value}, "map.yaml")
    with pytest.raises(UserError, match="nearest option is 'state'"):
        BagMap.of(good | {"stat": "/s"}, "map.yaml")
    with pytest.raises(UserError, match="does not say 'action'"):
        BagMap.of({k: v for k, v in good.items() if k != "action"}, "map.yaml")
    with pytest.raises(UserError, match="no instructions"):
        BagMap.of({k: v for k, v in good.items() if k != "task"}, "map.yaml")
