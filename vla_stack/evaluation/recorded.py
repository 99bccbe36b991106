"""A recorded dataset as a policy would have met it: its robot, and its frames as observations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from vla_stack.data.dataset import Dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import open_frames
from vla_stack.data.layout import ROBOT
from vla_stack.data.on_demand import in_passing
from vla_stack.history import History
from vla_stack.lerobot_units import dimension_names
from vla_stack.schema import ACTION, OBS_STATE, Camera, Dim, Observation, PolicySpec, RobotSpec


def recorded_robot(dataset: Dataset) -> RobotSpec:
    """The robot of a dataset, with the cameras that it has pictures of; nameless where nobody described it."""
    known = (dataset.root / ROBOT).is_file()
    robot = read_robot_spec(dataset.root) if known else nameless_robot(dataset, "")
    return replace(robot, cameras=tuple(Camera(c, *dataset.image_size(c)) for c in dataset.cameras))


def nameless_robot(dataset: Dataset, name: str) -> RobotSpec:
    """A robot of which no more is known than the names of its numbers."""

    def dims(key: str) -> tuple[Dim, ...]:
        if key not in dataset.features:
            return ()
        feature = dataset.features[key]
        numbered = [f"{key}_{i}" for i in range(feature["shape"][0])]
        return tuple(Dim(name, "1") for name in dimension_names(feature) or numbered)

    return RobotSpec(f"lerobot/{name or 'robot'}", dims(OBS_STATE), dims(ACTION), (), dataset.fps)


def observations(
    dataset: Dataset, policy: PolicySpec, episodes: Iterable[int], every: int, once: bool = False
) -> Iterator[tuple[int, Observation]]:
    """What a policy that decides every ``every`` frames would have been asked, in recording order.

    Args:
        dataset: An open dataset, of a robot that fits the policy.
        policy: What the policy reads; its history is of those decisions.
        episodes: Indices.
        every: Frames between decisions; the first is an episode's first frame.
        once: Nobody will look at these episodes again: their pictures are not kept on the disk.

    Yields:
        Row of the dataset, and the observation there.
    """
    cameras = [camera.name for camera in policy.robot.cameras]
    kept = {} if once else open_frames(dataset, cameras)
    states = dataset.columns.get(OBS_STATE, np.zeros((dataset.num_frames, 0), np.float32))
    for episode in episodes:
        first, history = int(dataset.episode_from[episode]), History(policy.history)
        rows = range(first, int(dataset.episode_to[episode]), every)
        films = (in_passing(dataset, c, episode, rows) if once else map(kept[c].__getitem__, rows) for c in cameras)
        for row, *images in zip(rows, *films, strict=True):
            task, seen = dataset.tasks[dataset.columns["task_index"][row]], dict(zip(cameras, images, strict=True))
            yield row, history.beside(Observation(states[row].astype(np.float32), seen, task, row - first))
