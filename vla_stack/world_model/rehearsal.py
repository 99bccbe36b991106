"""Episodes under varied conditions, imagined or simulated, and what of them a policy is fine-tuned on.

Policy improvement as in Ctrl-World (arXiv:2510.10125, algorithm 1): the arm is first driven to a random place, the
instruction is put in other words, the policy acts, and episodes that succeed (and that no guard ended) are recorded as
demonstrations. The class of the environment is the same for both worlds, so a policy is improved and judged under the
same conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.schema import Observation, RobotSpec
from vla_stack.world_model.imagined_env import ImaginedVectorEnv
from vla_stack.world_model.instructions import paraphrases
from vla_stack.world_model.poses import POSE

DRIVE_STEPS = 4  # control steps in which the arm is driven to where an episode begins
PERIOD_NS = 100_000_000
DRIVE = 0.05  # m, standard deviation of how far

# What robots know, their seeds, and the step: chunks of commands [N, n, A]. Asked for the episodes that still run.
Act = Callable[[Sequence[Observation], NDArray[np.int64], int], NDArray[np.float32]]
Tell = Callable[[str, int], str]  # (instruction, seed) -> what the policy is told


@dataclass
class Episode:
    """What was done: T observations, with the instruction as it was told, T commands [A], and what was seen last.

    ``task`` is the instruction that success is judged by.
    """

    seed: int
    task: str
    observations: list[Observation] = field(default_factory=list)
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    success: bool = False
    guards: tuple[str, ...] = ()
    last: Observation | None = None


def as_it_is(task: str, seed: int) -> str:
    """The instruction itself."""
    return task


def in_other_words(task: str, seed: int, given: Mapping[str, Sequence[str]] | None = None) -> str:
    """One of the instruction's paraphrases, by the seed; of those that are given for it, or of the fixed ones."""
    texts = (given or {}).get(task) or paraphrases(task)
    return texts[seed % len(texts)]


def roll(
    env: ImaginedVectorEnv, act: Act, seeds: Sequence[int], tell: Tell = as_it_is, drive: float = 0.0
) -> list[Episode]:
    """One episode of every environment.

    Args:
        env: Imagined or simulated; without autoreset it does not go on with what is over.
        act: The policy.
        seeds: One for each environment; a scene, where the arm is driven, and the words follow from it.
        tell: What the policy is told.
        drive: Standard deviation in metres of how far the arm is driven before the policy acts; that is not recorded.
    """
    obs, info = env.reset(seed=[int(s) for s in seeds])
    told = [tell(task, int(s)) for task, s in zip(info["task"], seeds, strict=True)]
    episodes = [Episode(int(s), task) for s, task in zip(seeds, info["task"], strict=True)]
    over: NDArray[np.bool_] = np.zeros(len(episodes), bool)
    if drive:
        obs, _, terminated, truncated, info = env.step(driving(obs["agent_pos"], env.backend.robot, seeds, drive))
        over = terminated | truncated
    step = 0
    while not over.all():
        before = info["steps"]
        now = [_observation(obs, i, told[i], step) for i in range(len(episodes))]
        running = np.flatnonzero(~over)
        acted = act([now[i] for i in running], np.asarray(seeds)[running], step)
        chunk = np.zeros((len(episodes), *acted.shape[1:]), np.float32)
        chunk[running] = acted
        obs, _, terminated, truncated, info = env.step(chunk)
        for i in running:
            episode, films, states = episodes[i], info["frames"][i], info["states"][i]
            for k in range(info["steps"][i] - before[i]):
                episode.observations.append(now[i])
                episode.actions.append(chunk[i, k])
                pictures, t = {c: p[k] for c, p in films.items()}, step + k + 1
                now[i] = episode.last = Observation(states[k], pictures, told[i], t, t * PERIOD_NS)
            episode.success, episode.guards = bool(info["is_success"][i]), info["guards"][i]
        over |= terminated | truncated
        step += chunk.shape[1]
    return episodes


def driving(
    states: NDArray[np.float32], robot: RobotSpec, seeds: Sequence[int], distance: float
) -> NDArray[np.float32]:
    """Commands [N, DRIVE_STEPS, A] from where tools are, [N, S], straight to random places; the opening stays."""
    offset = np.stack([np.random.default_rng([int(s), 7]).normal(0.0, distance, 3) for s in seeds])
    share = np.linspace(1 / DRIVE_STEPS, 1, DRIVE_STEPS)[None, :, None]
    chunk = np.repeat(states[:, None, :POSE], DRIVE_STEPS, 1)
    chunk[..., :3] += offset[:, None] * share
    return np.clip(chunk, robot.action_low, robot.action_high).astype(np.float32)


def record(root: Path, robot: RobotSpec, episodes: Sequence[Episode], most: int, relabel: Tell | None = None) -> int:
    """Append episodes that succeeded to a dataset, until it has ``most``; how many it has.

    Args:
        root: The dataset, which may exist.
        robot: Of the episodes.
        episodes: Those that did not succeed are left out.
        most: Episodes of the dataset.
        relabel: Has them recorded under another instruction than what was told: hindsight, as success was judged by
            the instruction itself.
    """
    with EpisodeRecorder(root, robot, "image") as recorder:
        for episode in episodes:
            if not episode.success or recorder.num_episodes >= most:
                continue
            for observation, action in zip(episode.observations, episode.actions, strict=True):
                task = observation.task if relabel is None else relabel(episode.task, episode.seed)
                recorder.add_frame(replace(observation, task=task), action)
            recorder.save_episode(True)
        return recorder.num_episodes


def _observation(obs: dict[str, Any], row: int, task: str, step: int) -> Observation:
    pictures = {c: p[row] for c, p in obs["pixels"].items()}
    return Observation(obs["agent_pos"][row], pictures, task, step, step * PERIOD_NS)
