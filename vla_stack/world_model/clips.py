"""Episodes as a world model learns them: pictures for the autoencoder, clips of latents for the dynamics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import open_frames
from vla_stack.errors import UserError
from vla_stack.rollout.collect import COMMAND_SENT
from vla_stack.schema import ACTION, OBS_STATE, REWARD, SUCCESS, RobotSpec
from vla_stack.world_model.memory import history_chunks
from vla_stack.world_model.poses import executed_poses
from vla_stack.world_model.tool import kinematics_beside, tool_of
from vla_stack.world_model.vae import Vae

HELD_OUT = 10  # every tenth episode is for validation
FRESH = 0.15  # of clips, rollouts that begin there: all they remember is the current frame (Ctrl-World, section 3)


@dataclass(frozen=True)
class Recording:
    """A dataset of N frames as the world model sees it.

    Attributes:
        robot: What was recorded; its cameras in the order in which they are imagined.
        tasks: Instructions by index.
        pictures: Camera -> uint8 [N, H, W, 3].
        states: float32 [N, S].
        measured: float32 [N, 5], where the tool was in each frame, and how open the gripper.
        commands: float32 [N, 5], where it was sent after each frame.
        poses: float32 [N, 5], see :mod:`vla_stack.world_model.poses`.
        success: bool [N], whether the task is done in the frame.
        task: int64 [N].
        start: int64 [N], first frame of the frame's episode.
        end: int64 [N], one past its last frame.
        held_out: bool [N], for validation alone.
        kinematics: MJCF of the arm; empty for one that is known (:mod:`vla_stack.world_model.tool`).
    """

    robot: RobotSpec
    tasks: tuple[str, ...]
    pictures: dict[str, NDArray[np.uint8]]
    states: NDArray[np.float32]
    measured: NDArray[np.float32]
    commands: NDArray[np.float32]
    poses: NDArray[np.float32]
    success: NDArray[np.bool_]
    task: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    kinematics: str = ""

    def before(self, frames: NDArray[np.int64]) -> NDArray[np.float32]:
        """The command before each frame [*], float32 [*, 5]; the measured pose where an episode begins."""
        begun = (frames > self.start[frames])[..., None]
        return np.where(begun, self.commands[frames - 1], self.measured[frames]).astype(np.float32)

    def stacked(self, frames: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Pictures of all cameras, uint8 [*, V, H, W, 3], of frames int [*]."""
        return np.stack([p[frames] for p in self.pictures.values()], axis=frames.ndim)


def open_recording(root: str | Path, cameras: tuple[str, ...] = ()) -> Recording:
    """Open a dataset of ``vla collect``.

    Args:
        root: Its folder.
        cameras: Which to imagine; all by default.

    Raises:
        UserError: It is not readable, has no such camera, or its robot is not one that the model can be told poses of.
    """
    dataset, robot = open_dataset(root), read_robot_spec(Path(root))
    kinematics = kinematics_beside(Path(root))
    tool = tool_of(robot, kinematics)
    named = {c.name: c for c in robot.cameras}
    if not named:
        raise UserError(f"{root} has no cameras: there is nothing to imagine", "record it without --privileged")
    pictures = open_frames(dataset, cameras or tuple(named))
    robot = replace(robot, cameras=tuple(named[c] for c in pictures))
    columns, length = dataset.columns, dataset.episode_to - dataset.episode_from
    measured = tool.measured(columns[OBS_STATE])
    commands = measured.copy()  # what an episode's first command comes after
    begins = np.isin(np.arange(dataset.num_frames), dataset.episode_from)
    for k, action in enumerate(columns.get(COMMAND_SENT, columns[ACTION])):
        commands[k] = tool.commanded(action, measured[k] if begins[k] else commands[k - 1])
    odd = np.arange(dataset.num_episodes) % HELD_OUT == HELD_OUT - 1
    return Recording(
        robot,
        dataset.tasks,
        dict(pictures),
        columns[OBS_STATE],
        measured,
        commands,
        executed_poses(measured, commands, dataset.episode_from),
        done_frames(dataset),
        columns["task_index"],
        np.repeat(dataset.episode_from, length),
        dataset.frame_end,
        np.repeat(odd, length),
        kinematics,
    )


def done_frames(dataset: Dataset) -> NDArray[np.bool_]:
    """Frames in which the task is done, bool [N].

    A reward of 0 or 1 says so of the frame after it, where an episode went on after success (``vla collect --mixed``).
    One that ended with its success is done in its last frame, but for the one step that nobody saw. Other rewards pay
    progress, and say nothing of success.
    """
    columns, n = dataset.columns, dataset.num_frames
    reward = columns.get(REWARD, np.zeros(n, np.float32)).reshape(n)
    done = np.append(False, reward[:-1] > 0) & np.isin(reward, (0.0, 1.0)).all()
    done[dataset.episode_from] = False
    won = columns.get(SUCCESS, np.zeros(n, bool)).reshape(n).astype(bool)
    for a, b in zip(dataset.episode_from, dataset.episode_to, strict=True):
        done[b - 1] |= won[b - 1] and not done[a:b].any()
    return done


def clip_index(
    now: NDArray[np.int64], recording: Recording, history: int, future: int, fresh: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Frames of the clips around ``now`` [B]: int64 [B, K + 1 + H].

    History is what a rollout would remember that began 0 to H - 1 frames after the episode did and is now at a chunk's
    end, or that begins now where ``fresh`` [B] says so. Past the episode's end the last frame is repeated.
    """
    start, end = recording.start[now], recording.end[now]
    if fresh is not None:
        start = np.where(fresh, now, start)
    chunks, offset = np.divmod(now - start, future)
    past = np.array([history_chunks(int(n), history) for n in chunks], np.int64).reshape(len(now), history)
    past = (start + offset)[:, None] + past * future
    ahead = np.minimum(now[:, None] + np.arange(future + 1), end[:, None] - 1)
    return np.concatenate([past, ahead], 1)


class FrameLoader:
    """Endless batches ``{"pictures": uint8 [B, H, W, 3]}`` of training frames of all cameras; position is its state."""

    def __init__(self, recording: Recording, batch_size: int, seed: int) -> None:
        self._recording, self._batch_size, self._seed = recording, batch_size, seed
        self._frames, self._position = np.flatnonzero(~recording.held_out), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, self._position])
        self._position += 1
        views = list(self._recording.pictures.values())
        frames = rng.choice(self._frames, self._batch_size)
        which = rng.integers(len(views), size=self._batch_size)
        return {"pictures": np.stack([views[v][f] for v, f in zip(which, frames, strict=True)])}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


class ClipLoader:
    """Endless batches of clips of latents.

    Each batch holds ``latents`` float32 [B, F, V, C, h, w], ``poses`` float32 [B, F, 5], ``time`` float32 [B, F] (in
    chunks from the current frame), ``valid`` bool [B, H + 1], and ``sources`` uint8 [B, 1 or 2, V, height, width, 3],
    the pictures of the first remembered and of the current frame. In a share ``held`` of clips the poses after a random
    future frame repeat that one's, and the frames after it do not count. A share :data:`FRESH` remembers nothing but
    the current frame, as rollouts do that begin in the middle of an episode.

    Args:
        recording: The data.
        latents: Of all its frames, [N, V, C, h, w].
        history: K.
        future: H.
        batch_size: B.
        seed: Of the order.
        held: See above.
    """

    def __init__(
        self,
        recording: Recording,
        latents: torch.Tensor,
        history: int,
        future: int,
        batch_size: int,
        seed: int,
        held: float = 0.0,
    ) -> None:
        self._recording, self._latents, self._shape = recording, latents, (history, future)
        self._batch_size, self._seed, self._held, self._position = batch_size, seed, held, 0
        frames = np.arange(len(recording.end))
        self._starts = np.flatnonzero(~recording.held_out & (frames + 1 < recording.end))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, self._position])
        self._position += 1
        now = rng.choice(self._starts, self._batch_size)
        future = self._shape[1]
        known = np.where(rng.random(len(now)) < self._held, rng.integers(1, future + 1, len(now)), future)
        fresh = rng.random(len(now)) < FRESH
        return clip_batch(self._recording, self._latents, now, *self._shape, known, fresh)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


def clip_batch(
    recording: Recording,
    latents: torch.Tensor,
    now: NDArray[np.int64],
    history: int,
    future: int,
    known: NDArray[np.int64],
    fresh: NDArray[np.bool_] | None = None,
) -> dict[str, Any]:
    """The batch of clips around frames ``now`` [B], of which ``known`` [B] future poses are told; see ClipLoader.

    ``fresh`` [B] are rollouts that begin there.
    """
    index = clip_index(now, recording, history, future, fresh)
    ahead = np.arange(future + 1)
    last = np.minimum(ahead, known[:, None])
    told = np.concatenate([index[:, :history], np.take_along_axis(index[:, history:], last, 1)], 1)
    time = (index - now[:, None]) / future
    time[:, history:] = ahead / future
    sources = index[:, [0, history] if history else [0]]
    return {
        "latents": latents[torch.from_numpy(index)].numpy(),
        "sources": recording.stacked(sources),
        "poses": recording.poses[told],
        "time": time.astype(np.float32),
        "valid": (ahead <= known[:, None]) & (now[:, None] + ahead < recording.end[now, None]),
    }


@torch.no_grad()
def encode_all(vae: Vae, recording: Recording, device: torch.device, batch: int = 128) -> torch.Tensor:
    """Latents [N, V, C, h, w] of a whole recording, on the CPU."""
    parts = []
    frames = np.arange(len(recording.end))
    for i in range(0, len(frames), batch):
        pictures = torch.from_numpy(recording.stacked(frames[i : i + batch])).to(device)
        parts.append(vae.encode(pictures).cpu())
    return torch.cat(parts)
