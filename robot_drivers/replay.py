"""A recorded episode that plays like a robot: the same pictures and states at the same rate, whatever it is told.

For policies in the open loop (what would it have done here?), for cameras and network under load, and for tests.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import open_frames
from vla_stack.errors import UserError
from vla_stack.runtime.driver import Capabilities, Guard, Status
from vla_stack.schema import ACTION, OBS_STATE, SUCCESS, Observation, RobotSpec


class ReplayRobot:
    """An :class:`~vla_stack.runtime.driver.EpisodicDriver` over a dataset; episode ``seed`` modulo their number.

    Args:
        root: A LeRobotDataset that was recorded here (it has ``meta/robot.json``).
        task: Instruction in place of the recorded one.

    Attributes:
        sent: What it was told in this episode, float32 [A] each.
    """

    capabilities = Capabilities(guard=Guard.UNMOVED, simulated=True)
    stages: tuple[str, ...] = ()

    def __init__(self, root: str, task: str | None = None) -> None:
        self._root, self._task = Path(root), task
        self._spec: RobotSpec | None = None
        self.sent: list[NDArray[np.float32]] = []

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("the recorded robot has no description before connect()")
        return self._spec

    def connect(self) -> None:
        """Open the dataset; pictures are decoded once, beside it."""
        self._data = open_dataset(self._root)
        self._spec = read_robot_spec(self._root)
        cameras = [c.name for c in self._spec.cameras]
        sizes = {c.name: (c.height, c.width) for c in self._spec.cameras}
        self._frames = open_frames(self._data, cameras, progress=False, sizes=sizes)

    def reset(self, seed: int) -> str:
        episode = seed % self._data.num_episodes
        self._first, self._end = int(self._data.episode_from[episode]), int(self._data.episode_to[episode])
        self._t_0 = time.monotonic_ns()
        self._step = -1
        self.sent = []
        return self._task or self._data.tasks[int(self._data.columns["task_index"][self._first])]

    def read(self) -> Observation:
        """The frame that is due, at most half a step early."""
        dt_ns = round(1e9 * self.spec.dt)
        self._step = min((time.monotonic_ns() - self._t_0) // dt_ns, self._end - self._first - 1)
        row = self._first + self._step
        images = {name: np.array(frames[row]) for name, frames in self._frames.items()}
        state = self._data.columns[OBS_STATE][row].astype(np.float32)
        task = self._task or self._data.tasks[int(self._data.columns["task_index"][row])]
        due = self._t_0 + self._step * dt_ns
        over = self._step == self._end - self._first - 1
        return Observation(state, images, task, self._step, time.monotonic_ns() if over else due)

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        self.sent.append(np.array(action, np.float32))
        return action

    def hold(self) -> None: ...

    def stop(self) -> None: ...

    def status(self) -> Status:
        done = self._step >= self._end - self._first - 1
        success = self._data.columns.get(SUCCESS)
        return Status(is_success=bool(done and success is not None and success[self._end - 1]), done=done)

    def disconnect(self) -> None: ...


def recorded_actions(root: str | Path, episode: int) -> tuple[Dataset, NDArray[np.float32]]:
    """The dataset, and the commands float32 [T, A] of one of its episodes.

    Raises:
        UserError: There is no such episode.
    """
    data = open_dataset(root)
    if not 0 <= episode < data.num_episodes:
        raise UserError(f"{root} has no episode {episode}", f"it has 0 to {data.num_episodes - 1}")
    rows = slice(int(data.episode_from[episode]), int(data.episode_to[episode]))
    return data, data.columns[ACTION][rows].astype(np.float32)
