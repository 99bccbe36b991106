"""Films of episodes, made after the evaluation by replaying recorded actions with better pictures.

The same seed and the same actions give the same episode, so nothing has to be filmed in advance: the rollouts render
what the policy needs, and the few episodes that a report shows are rendered again, larger and with shadows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack import envs
from vla_stack.envs import VectorEnv
from vla_stack.envs.making import is_benchmark, is_task
from vla_stack.errors import UserError
from vla_stack.rollout.records import EpisodeRecord, EvalResult

SIM_CAMERA = {"cameras": (), "visuals": "pretty", "render_size": (320, 426)}
BENCHMARK_CAMERA = SIM_CAMERA | {"visuals": "official"}


class Diverged(RuntimeError):
    """A replay did not show the episode that was recorded."""


def film(result: EvalResult, folder: Path, per_outcome: int) -> EvalResult:
    """Film the first few successes and the first few failures of a result.

    Args:
        result: Fresh from an evaluation, actions included.
        folder: Where the mp4 files go.
        per_outcome: How many of each.

    Returns:
        The result with the paths of the films in its records. An environment without ``rgb_array`` has none, and an
        episode whose replay ends differently is left out, with a note.
    """
    chosen = [e for want in (True, False) for e in [e for e in result.episodes if e.success is want][:per_outcome]]
    env = _film_env(result) if chosen else None
    if env is None:
        return result
    seen = envs.make(result.name, 1, None, dict(result.settings.get("env_options", {})))
    folder.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in f"{result.name}-{result.label}")
    paths: dict[int, str] = {}
    notes = list(result.notes)
    with closing(env), closing(seen):
        for episode in chosen:
            path = folder / f"{slug}-{episode.seed}.mp4"
            try:
                frames = replay(env, episode, seen)
            except Diverged as e:
                notes.append(f"No film: {e}.")
                continue
            write_mp4(frames, path, result.rate_hz)
            paths[episode.seed] = str(path)
    episodes = tuple(replace(e, video=paths.get(e.seed, e.video)) for e in result.episodes)
    return replace(result, episodes=episodes, notes=tuple(notes))


def replay(env: VectorEnv, episode: EpisodeRecord, seen: VectorEnv | None = None) -> list[NDArray[np.uint8]]:
    """Pictures uint8 [H, W, 3] of an episode: one before each action and one at the end.

    Args:
        env: Renders.
        episode: What is replayed.
        seen: The environment of the episode as it was; what its cameras show stands beside each picture, enlarged.

    Raises:
        Diverged: The replay ended differently, so it would show something that did not happen.
    """
    now = env.reset([0], [episode.seed])[0]
    beside = [seen.reset([0], [episode.seed])[0].observation] if seen else []
    frames: list[Any] = [env.render(0)]
    for action in episode.actions:
        now = env.step([0], action[None])[0]
        frames.append(env.render(0))
        beside += [seen.step([0], action[None])[0].observation] if seen else []
    if bool(now.info["is_success"]) is not episode.success:
        raise Diverged(f"the replay of seed {episode.seed} ended differently: the environment is not deterministic")
    return (
        [_beside(f, [*o.get("pixels", {}).values()]) for f, o in zip(frames, beside, strict=True)] if seen else frames
    )


def _beside(frame: NDArray[np.uint8], images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """``images`` one below the other to the right of ``frame``, each pixel enlarged as it is."""
    column, height = [], frame.shape[0] // max(1, len(images))
    for image in images:
        h, w = image.shape[:2]
        rows, columns = np.arange(height) * h // height, np.arange(height * w // h) * h // height
        column.append(image[rows][:, columns])
    if not column:
        return frame
    width = min(part.shape[1] for part in column)
    right = np.vstack([part[:, :width] for part in column])
    return np.hstack([frame[: len(right)], right])


def _film_env(result: EvalResult) -> VectorEnv | None:
    options = dict(result.settings.get("env_options", {}))
    if is_task(result.name):
        options |= SIM_CAMERA
    elif is_benchmark(result.name):
        options |= BENCHMARK_CAMERA
    try:
        env = envs.make(result.name, 1, None, {**options, "render_mode": "rgb_array"})
        env.reset([0], [0])
    except (TypeError, gym.error.Error, UserError):
        return None
    if env.render(0) is None:
        env.close()
        return None
    return env


def write_mp4(frames: Sequence[NDArray[np.uint8]] | Iterable[NDArray[np.uint8]], path: Path, rate_hz: float) -> None:
    """Write frames uint8 [H, W, 3] as H.264, which every browser plays.

    Args:
        frames: Pictures of one size.
        path: The file; complete or not there at all.
        rate_hz: Frames per second.
    """
    import av

    partial = path.with_suffix(".part.mp4")
    with av.open(str(partial), "w", options={"movflags": "faststart"}) as out:
        stream: Any = None
        for frame in frames:
            height, width = (n - n % 2 for n in frame.shape[:2])  # 4:2:0 wants even sizes
            if stream is None:
                stream = out.add_stream("libx264", rate=Fraction(rate_hz).limit_denominator(1000))
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
                stream.options = {"crf": "26", "preset": "veryfast"}
            picture = np.ascontiguousarray(frame[:height, :width])
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    os.replace(partial, path)
