"""A two-camera toy robot and recordings of it, small enough that every test makes its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vla_stack.data.features import Column
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

JOINTS = ("joint_1.pos", "joint_2.pos")
EXTRA = {"intervention": Column("bool"), "force": Column("float32", (3,))}
HEIGHT, WIDTH = 16, 24
ACTION = (Dim("tcp_x.pos", "m"), Dim("gripper.pos", "ratio", kind="gripper"))
SPEC = RobotSpec(
    name="toy",
    state=(*ACTION, Dim("joint_1.pos", "rad")),
    action=ACTION,
    cameras=(Camera("front", HEIGHT, WIDTH), Camera("wrist", HEIGHT, WIDTH)),
    rate_hz=10.0,
)


def picture(episode: int, step: int, camera: int) -> np.ndarray:
    """Smooth, so that video keeps it, and different for every frame."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([x * 4 + 10 * step, y * 8 + 7 * episode, np.full_like(x, 60 * camera + 20)], -1).astype(np.uint8)


def frames(episode: int, length: int) -> Iterator[tuple[Observation, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(episode)
    for k in range(length):
        images = {c.name: picture(episode, k, i) for i, c in enumerate(SPEC.cameras)}
        state = rng.normal(size=3).astype(np.float32)
        obs = Observation(state, images, f"task {episode % 2}", k, 1_000_000_000 + k * 100_300_000)
        yield obs, rng.normal(size=2).astype(np.float32), rng.normal(size=2).astype(np.float32)


def record(recorder: EpisodeRecorder, episode: int, length: int) -> None:
    for obs, action, joints in frames(episode, length):
        recorder.add_frame(obs, action, joints, 0.25, intervention=episode == 1, force=np.full(3, obs.step, np.float32))
    recorder.save_episode(success=episode != 2)


def make(root: Path, lengths: tuple[int, ...] = (6, 4, 5), mode: str = "video", first: int = 0) -> Path:
    with EpisodeRecorder(root, SPEC, mode, JOINTS, EXTRA) as recorder:  # type: ignore[arg-type]
        for i, length in enumerate(lengths):
            record(recorder, first + i, length)
    return root
