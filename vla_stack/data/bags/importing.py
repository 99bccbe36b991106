"""``vla data import``: recordings of others become a LeRobotDataset, all of them or none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vla_stack import locks
from vla_stack.data.bags.files import Bag, open_bag
from vla_stack.data.bags.mapping import BagMap
from vla_stack.data.bags.pictures import decode_compressed, decode_image
from vla_stack.data.bags.resampling import Ticks, resample
from vla_stack.data.bags.series import check_topics, decode_one, read_recording
from vla_stack.data.features import ImageMode
from vla_stack.data.layout import sync_folder
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.ros_messages import IMAGE, decoder
from vla_stack.schema import Camera, Observation, RobotSpec


@dataclass
class Imported:
    """What was made of the recordings.

    Attributes:
        episodes: How many.
        frames: How many.
        ages: Source -> largest age of a sample behind a frame, seconds.
        late: Topics' messages left out because their time was before that of an earlier one.
    """

    episodes: int
    frames: int
    ages: dict[str, float]
    late: int


def import_bags(
    paths: Sequence[Path],
    root: Path,
    how: BagMap,
    image_mode: ImageMode = "video",
    on_bag: Callable[[Path, int], None] = lambda path, episodes: None,
) -> Imported:
    """Make a new dataset of recordings, in their order.

    Every topic is read once for its times and numbers; then each camera's pictures are streamed, so that memory holds
    one picture a camera, whatever the length. An episode counts as a success: recordings do not say.

    Args:
        paths: .mcap and .db3 files, and rosbag2 folders.
        root: The dataset; must not be there yet.
        how: Which topic is what.
        image_mode: ``video`` or ``image``, as :class:`~vla_stack.data.recorder.EpisodeRecorder` takes it.
        on_bag: Called with each recording that is done, and how many episodes it gave.

    Raises:
        UserError: A recording is damaged or lacks what ``how`` names. There is no dataset then.
    """
    bags = [open_bag(path) for path in paths]
    kinds = [check_topics(bag, how) for bag in bags]
    total = Imported(0, 0, {}, 0)
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(_all_or_nothing(root))
        recorder: EpisodeRecorder | None = None
        for bag, kind in zip(bags, kinds, strict=True):
            recording = read_recording(bag, how, kind)
            ticks = resample(bag, how, recording)
            with contextlib.ExitStack() as open_cameras:
                cameras = {
                    name: open_cameras.enter_context(contextlib.closing(_Camera(bag, topic, kind[topic])))
                    for name, topic in how.cameras.items()
                }
                for first, end in ticks.episodes:
                    if recorder is None:
                        recorder = stack.enter_context(_recorder(work, how, ticks, cameras, first, image_mode))
                    _record(recorder, bag, how, ticks, cameras, first, end)
            for name, age in ticks.ages.items():
                total.ages[name] = max(age, total.ages.get(name, 0.0))
            series = (*recording.state, *recording.action, *recording.cameras.values(), recording.tasks)
            total.late += sum(s.late for s in series if s is not None)
            on_bag(bag.path, len(ticks.episodes))
        if recorder is None:
            raise UserError(f"{paths[0]}: no episode has two frames", "a lower --split-gap cuts more; leave it out")
        total.episodes, total.frames = recorder.num_episodes, recorder.num_frames
    return total


class _Camera:
    """Pictures of one topic by their place in it, going forward; one is held at a time."""

    def __init__(self, bag: Bag, topic: str, kind: str) -> None:
        self.topic = topic
        self._bag, self._messages, self._next = bag, bag.messages([topic]), 0
        decode, picture = decoder(kind), decode_image if kind == IMAGE else decode_compressed
        self._decode: Callable[[bytes], NDArray[np.uint8]] = lambda data: picture(decode(data))
        self._picture: NDArray[np.uint8] | None = None

    def at(self, row: int) -> NDArray[np.uint8]:
        """Picture ``row``, uint8 [H, W, 3]; not before the one asked for last."""
        if self._picture is None or row >= self._next:
            data = b""
            while self._next <= row:
                data = next(self._messages).data
                self._next += 1
            self._picture = decode_one(self._bag, self.topic, self._decode, data)
        return self._picture

    def close(self) -> None:
        self._messages.close()


def _recorder(
    root: Path, how: BagMap, ticks: Ticks, cameras: dict[str, _Camera], tick: int, image_mode: ImageMode
) -> EpisodeRecorder:
    """A recorder for the robot of the first recording; its first pictures say how large they are."""
    sizes = {name: camera.at(int(ticks.rows[name][tick])).shape for name, camera in cameras.items()}
    spec = RobotSpec(
        how.robot,
        state=tuple(how.dim(name) for name in ticks.state_names),
        action=tuple(how.dim(name) for name in ticks.action_names),
        cameras=tuple(Camera(name, height, width) for name, (height, width, _) in sizes.items()),
        rate_hz=how.rate_hz,
    )
    return EpisodeRecorder(root, spec, image_mode)


def _record(
    recorder: EpisodeRecorder,
    bag: Bag,
    how: BagMap,
    ticks: Ticks,
    cameras: dict[str, _Camera],
    first: int,
    end: int,
) -> None:
    """Record one episode: ticks ``first`` to ``end - 1``."""
    spec = recorder.spec
    for kind, names, dims in (("state", ticks.state_names, spec.state), ("action", ticks.action_names, spec.action)):
        if (here := tuple(how.dim(name) for name in names)) != dims:
            odd = next((d.name for d in here if d not in dims), "another order")
            raise UserError(f"{bag.path}: its {kind} differs from the first recording's ('{odd}')", "say --joints")
    for tick in range(first, end):
        images = {name: camera.at(int(ticks.rows[name][tick])) for name, camera in cameras.items()}
        for c in spec.cameras:
            if images[c.name].shape[:2] != (c.height, c.width):
                height, width = images[c.name].shape[:2]
                what = f"a picture on '{cameras[c.name].topic}' is {width}x{height}, the first was {c.width}x{c.height}"
                raise UserError(f"{bag.path}: {what}", "import recordings of one size together")
        obs = Observation(ticks.state[tick], images, ticks.tasks[tick], tick - first, int(ticks.stamps[tick]))
        recorder.add_frame(obs, ticks.action[tick])
    recorder.save_episode(success=True)


@contextlib.contextmanager
def _all_or_nothing(root: Path) -> Iterator[Path]:
    """A folder beside ``root`` that takes its place if all goes well; otherwise nothing is left of it."""
    if root.exists():
        raise UserError(
            f"{root} is there already", f"import into a new folder, then: vla data merge {root} NEW --into ALL"
        )
    work = root.with_name(f".{root.name}.importing")
    with locks.writing(work):
        shutil.rmtree(work / "dataset", ignore_errors=True)  # of an import that was killed
        try:
            yield work / "dataset"
            os.rename(work / "dataset", root)
            sync_folder(root.parent)
        finally:
            shutil.rmtree(work / "dataset", ignore_errors=True)
    with contextlib.suppress(OSError):
        work.rmdir()  # where it was there before
