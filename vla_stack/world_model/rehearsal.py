"""Episodes under varied conditions, imagined or simulated, and what of them a policy is fine-tuned on.

Policy improvement as in Ctrl-World (arXiv:2510.10125, algorithm 1): the arm is first driven to a random place, the
instruction is put in other words, the policy acts, and episodes that succeed (and that no guard ended) are recorded as
demonstrations. Agent and recorder are the engine's, and the same in both worlds, so a policy is improved and judged
under the same conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.envs.making import observe
from vla_stack.envs.vector import EnvStep
from vla_stack.rollout.plan import NO_COMMANDS, Agent, Decision, Episode, Query, Reply, StepEvent
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.schema import Observation, RobotSpec
from vla_stack.world_model.instructions import paraphrases
from vla_stack.world_model.poses import POSE
from vla_stack.world_model.tool import check_commands_poses

DRIVE_STEPS = 4  # control steps in which the arm is driven to where an episode begins
DRIVE = 0.05  # m, standard deviation of how far
REHEARSED = "rehearsed"  # name of a :class:`RehearsalRecorder` among a plan's recorders

Reword = Callable[[str, int], str]  # (instruction, seed) -> what the policy is given instead


def as_it_is(task: str, seed: int) -> str:
    """The instruction itself."""
    return task


def in_other_words(task: str, seed: int, given: Mapping[str, Sequence[str]] | None = None) -> str:
    """One of the instruction's paraphrases, by the seed; of those that are given for it, or of the fixed ones."""
    texts = (given or {}).get(task) or paraphrases(task)
    return texts[seed % len(texts)]


@dataclass(frozen=True)
class Varied:
    """Makes agents of episodes under varied conditions; where the arm is driven and the words follow from the seed.

    Attributes:
        agent: Makes who acts when the arm has been driven.
        reword: What it is given as its instruction.
        drive: Standard deviation in metres of how far the arm is driven; 0 leaves it where it is.
    """

    agent: Callable[[Episode], Agent]
    reword: Reword = as_it_is
    drive: float = DRIVE

    def __call__(self, episode: Episode) -> Agent:
        return _VariedAgent(self, episode)


class _VariedAgent:
    def __init__(self, varied: Varied, episode: Episode) -> None:
        self._agent, self._reword, self._seed = varied.agent(episode), varied.reword, episode.start.seed
        here = np.asarray(episode.first.observation["agent_pos"], np.float32)
        way = driving(here, episode.robot, self._seed, varied.drive)
        self._way = way if varied.drive else NO_COMMANDS

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if k < len(self._way):
            return Decision(self._way[k], ahead=self._way[k + 1 :])
        reworded = replace(observation, task=self._reword(observation.task, self._seed))
        return (yield from self._agent.act(k, reworded, now))

    def result(self) -> object:
        return self._agent.result()


def driving(state: NDArray[np.float32], robot: RobotSpec, seed: int, distance: float) -> NDArray[np.float32]:
    """Commands [DRIVE_STEPS, A] from where the tool is, [S], straight to a random place; the opening stays."""
    check_commands_poses(robot, "driving to a random place")
    offset = np.random.default_rng([seed, 7]).normal(0.0, distance, 3)
    chunk = np.repeat(state[None, :POSE], DRIVE_STEPS, 0)
    chunk[:, :3] += offset * np.linspace(1 / DRIVE_STEPS, 1, DRIVE_STEPS)[:, None]
    return np.clip(chunk, robot.action_low, robot.action_high).astype(np.float32)


class Rehearsed(NamedTuple):
    """What was seen and done after the arm was driven.

    Attributes:
        observations: T.
        actions: T commands, float32 [A].
        last: What the last one led to.
        guards: That ended trust in the episode, where it was imagined.
    """

    observations: list[Observation]
    actions: list[NDArray[np.float32]]
    last: Observation | None
    guards: tuple[str, ...]


class RehearsalRecorder:
    """The :class:`Rehearsed` of an episode.

    Args:
        episode: The episode.
        skip: Steps that are left out: those in which the arm is driven.
    """

    def __init__(self, episode: Episode, skip: int = DRIVE_STEPS) -> None:
        self._robot, self._skip = episode.plan.policy.robot, skip
        self._film = Rehearsed([], [], None, ())

    def step(self, event: StepEvent) -> None:
        film, seen = self._film, event.observation
        if event.k >= self._skip:
            film.observations.append(seen)
            film.actions.append(event.decision.command)
        last = observe(event.after.observation, self._robot, seen.task, event.k + 1)
        self._film = film._replace(last=last, guards=event.after.info.get("guards", ()))

    def result(self) -> Rehearsed:
        return self._film


def record(
    root: Path, robot: RobotSpec, episodes: Iterable[EpisodeRecord], most: int, reword: Reword = as_it_is
) -> int:
    """Append episodes that succeeded to a dataset, until it has ``most``; how many it has.

    Args:
        root: The dataset, which may exist.
        robot: Of the episodes.
        episodes: With their :class:`Rehearsed`; those that did not succeed are left out.
        most: Episodes of the dataset.
        reword: The instruction under which they are recorded. It may be another than the policy was given: hindsight,
            as success was judged by the instruction itself.
    """
    with EpisodeRecorder(root, robot, "image") as recorder:
        for episode in episodes:
            film: Rehearsed = episode.attached[REHEARSED]
            if not episode.success or not film.actions or recorder.num_episodes >= most:
                continue
            task = reword(episode.task, episode.seed)
            for observation, action in zip(film.observations, film.actions, strict=True):
                recorder.add_frame(replace(observation, task=task), action)
            recorder.save_episode(True)
        return recorder.num_episodes
