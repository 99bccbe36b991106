"""Who acts in practice, and what its episodes were; and demonstrations, as if it had decided in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.labels import CONTROL_SOURCE, reach
from vla_stack.data.valued import fingerprint
from vla_stack.envs.making import check_fit
from vla_stack.errors import UserError
from vla_stack.evaluation.recorded import observations as recorded
from vla_stack.evaluation.recorded import recorded_robot
from vla_stack.intervention import Control
from vla_stack.methods.episodes_loop import FINAL
from vla_stack.methods.on_flow.decisions import Decisions, episode, gathered, joined, row
from vla_stack.methods.practice import Reward, chunks_of, ended, unpaid
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.policies.decided import Decided
from vla_stack.rollout.collect import COMMAND_SENT
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.schema import ACTION, CAPTURE_TIME, SUCCESS, Chunks, Continuation, Observation, PolicySpec

HOLD_S = 0.5  # as long as a robot waits for its next chunk
BATCH = 64  # observations of a dataset that are encoded at once


@dataclass(frozen=True)
class Lived:
    """An iteration's episodes; see :class:`~vla_stack.methods.episodes_loop.Lived`."""

    decisions: Decisions
    success: Tensor
    steps: int

    @property
    def count(self) -> int:
        return len(self.decisions)


@dataclass
class Explorer:
    """The policy as it explores, as the engine asks it; remembers decisions by the seed of their noise.

    Attributes:
        policy: What acts.
        alone: Whether its base acts as it is.
    """

    policy: ChunkPolicy
    alone: bool = True
    _decisions: dict[int, Decided] = field(default_factory=dict)

    @property
    def spec(self) -> PolicySpec:
        return self.policy.spec

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """Commands of one chunk an observation; plans are not continued."""
        decided = self.decide(observations, seeds)
        self._decisions |= {seed: row(decided, i) for i, seed in enumerate(seeds)}
        return Chunks(self.policy.postprocessor(decided.chunk).float().numpy())

    @torch.no_grad()
    def decide(self, observations: Sequence[Observation], seeds: Sequence[int]) -> Decided:
        """What the policy decides, by the seeds of its noise."""
        return self.policy.policy.decide(self.policy.preprocess(observations), self.policy.noise(seeds), self.alone)

    def experience(self, records: Sequence[EpisodeRecord], reward: Reward, gamma: float) -> Lived:
        """What episodes were; forgets the decisions.

        Args:
            records: Episodes, with :class:`~vla_stack.methods.episodes_loop.FinalObservation` among their recorders.
            reward: See :func:`~vla_stack.methods.practice.chunks_of`.
            gamma: Discount of a step.
        """
        asked = [record for record in records if (record.chunks != IDLE).any()]
        cut = [record for record in asked if not ended(record, reward)]
        seeds = [int(np.random.SeedSequence((r.seed, r.steps)).generate_state(1)[0]) for r in cut]
        final = self.decide([r.attached[FINAL] for r in cut], seeds) if cut else None
        ends = {record.seed: i for i, record in enumerate(cut)}
        parts: list[Decisions] = []
        for record in asked:
            chunks = list(chunks_of(record, reward, gamma))
            rows = [self._decisions[chunk.noise] for chunk in chunks]
            if final is not None and record.seed in ends:
                rows.append(row(final, ends[record.seed]))
            parts.append(Decisions.of(gathered(rows), *episode(rows, chunks, ended(record, reward), gamma)))
        self._decisions.clear()
        whole = joined(parts)
        success = torch.tensor([record.success for record in records])
        return Lived(whole, success, sum(record.steps for record in records))


def demonstrations(
    explorer: Explorer,
    root: Path,
    episodes: Sequence[int] | None,
    steps: int,
    reward: Reward,
    gamma: float,
    kept: Path,
    about: str,
) -> Decisions:
    """Recorded episodes as decisions, see :func:`recorded_episode`; who begins anew finds them in a file.

    Args:
        explorer: Who decides.
        root: Dataset of the policy's robot.
        episodes: Which; None: all.
        steps: Actions of a chunk that are executed.
        reward: ``step`` or ``success``.
        gamma: Discount of a step.
        kept: The file; safetensors.
        about: What else the decisions follow from: the policy and the method.

    Raises:
        UserError: There is no such dataset, it does not fit the policy, or it does not say what succeeded.
    """
    dataset = open_recorded(explorer.policy, root)
    chosen = list(range(dataset.num_episodes) if episodes is None else episodes)
    of = f"{about} {fingerprint(dataset)} {chosen} {steps} {reward} {gamma}"
    if kept.exists():
        with safe_open(kept, "pt") as file:
            if file.metadata()["of"] == of:
                return Decisions(**{name: file.get_tensor(name) for name in file.keys()})
    each = tqdm(chosen, desc=f"looking at {root.name}", unit=" episodes", mininterval=1.0)
    whole = joined(recorded_episode(explorer, dataset, n, steps, reward, gamma).decisions for n in each)
    if not len(whole):
        raise UserError(f"{root}: no decision can be made of its episodes", "record some that succeed")
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(".partial")
    save_file({name: x.contiguous() for name, x in whole.state_dict().items()}, partial, {"of": of})
    os.replace(partial, kept)
    return whole


def open_recorded(policy: ChunkPolicy, root: Path, known: Dataset | None = None) -> Dataset:
    """A dataset of the policy's robot that says what succeeded; ``known``: see :func:`open_dataset`.

    Raises:
        UserError: It is none.
    """
    dataset = open_dataset(root, known)
    check_fit(recorded_robot(dataset), policy.spec.robot, str(root))
    if SUCCESS not in dataset.columns:
        raise UserError(f"{root} has no column '{SUCCESS}': nobody recorded what succeeded", "record it with `vla`")
    return dataset


class Recorded(NamedTuple):
    """An episode of a dataset.

    Attributes:
        decisions: As if it had been decided at each of its frames.
        human: bool [r], whether a person gave all actions of a decision.
        success: Whether it succeeded.
        steps: Frames up to then.
    """

    decisions: Decisions
    human: NDArray[np.bool_]
    success: bool
    steps: int


def recorded_episode(
    explorer: Explorer, dataset: Dataset, number: int, steps: int, reward: Reward, gamma: float
) -> Recorded:
    """A recorded episode as decisions, one at each frame, with what the policy saw and would have offered there.

    A decision's actions are the ``steps`` commands from its frame on, as the policy normalises them; the commands that
    were sent, where a dataset tells them from the labels. What follows is the frame after them, so decisions overlap
    and every frame teaches. Success ends an episode; of one without, the decisions that reach its end are left out, and
    everywhere those that something interrupts: a hold, which is not recorded, may come after them, for :data:`HOLD_S`.

    A person who takes over says that the policy is failing: what it decided up to then has failed for good, whatever
    comes of the episode (after RLIF, Luo et al. 2024, arXiv:2311.12996). Else to be helped would be as good as success.
    """
    theirs = by_hand(dataset, number)
    until = _taken_over(theirs)
    rows, actions, success = _recorded(explorer, dataset, number, until)
    n, first = len(rows), int(dataset.episode_from[number])
    at = np.arange(n if success else max(0, n - steps))
    taken = np.minimum(steps, np.minimum(until[at], n) - at)
    ended, lost = success & (at + taken == n), (at + taken == until[at]) & (until[at] < n)
    whole = reach(dataset, np.ones(dataset.num_frames, bool))[first + at] >= taken
    if CAPTURE_TIME in dataset.columns:
        t = dataset.columns[CAPTURE_TIME][first : first + n]
        whole &= ended | lost | (t[np.minimum(at + taken, n - 1)] - t[at + taken - 1] <= HOLD_S)
    at, taken, ended, lost = at[whole], taken[whole], ended[whole], lost[whole]
    reward_of = [_paid(int(k), bool(e), bool(f), reward, gamma) for k, e, f in zip(taken, ended, lost, strict=True)]
    after = np.where(ended | lost, at, np.minimum(at + taken, n - 1))
    known = gathered(rows)._replace(actions=actions)
    discount = np.where(ended | lost, 0.0, gamma**taken)
    decisions = Decisions.of(known, at.tolist(), after.tolist(), reward_of, discount.tolist())
    counted = np.concatenate([[0], np.cumsum(theirs)])
    return Recorded(decisions, counted[at + taken] - counted[at] == taken, success, n)


def _paid(steps: int, success: bool, lost: bool, reward: Reward, gamma: float) -> float:
    paid = np.full(steps, float(unpaid(reward)))
    paid[-1] += float(success)
    for_good = lost * gamma**steps * unpaid(reward) / (1.0 - gamma)  # what an endless failure goes on earning
    return float((paid * gamma ** np.arange(steps)).sum() + for_good)


def by_hand(dataset: Dataset, number: int) -> NDArray[np.bool_]:
    """Of each frame of an episode whether a person acted."""
    frames = slice(int(dataset.episode_from[number]), int(dataset.episode_to[number]))
    source = dataset.columns.get(CONTROL_SOURCE, np.zeros(dataset.num_frames, np.int64))
    return source[frames] == Control.HUMAN


def _taken_over(by_hand: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Of each frame the later one at which a person takes over from who acts in it; the end where nobody does."""
    n = len(by_hand)
    until = np.full(n + 1, n)
    for i in reversed(range(n)):
        until[i] = i if by_hand[i] else until[i + 1]
    return np.where(by_hand, n, until[:n])


def _recorded(
    explorer: Explorer, dataset: Dataset, number: int, until: NDArray[np.int64]
) -> tuple[list[Decided], Tensor, bool]:
    """What the policy would have decided at the frames of an episode up to its success, what was done there up to
    frame ``until`` [n], its last command repeated, and whether it succeeded."""
    policy, first, end = explorer.policy, int(dataset.episode_from[number]), int(dataset.episode_to[number])
    success = np.flatnonzero(dataset.columns[SUCCESS][first:end])
    end = first + int(success[0]) + 1 if len(success) else end
    commands = np.asarray(dataset.columns.get(COMMAND_SENT, dataset.columns[ACTION])[first:end], np.float32)
    seen = recorded(dataset, policy.spec, [number], 1, once=True)
    made, actions = [], []
    for batch in _batches(len(commands)):
        some = [observation for _, observation in islice(seen, len(batch))]
        decided = explorer.decide(some, [first + int(i) for i in batch])
        last = np.minimum(until[batch], len(commands)) - 1
        ahead = np.minimum(batch[:, None] + np.arange(policy.spec.horizon), last[:, None])
        done = policy.preprocess(some, commands[ahead])[ACTION].flatten(1)[:, : decided.actions.shape[1]]
        made += [row(decided, i) for i in range(len(some))]
        actions.append(policy.policy.bounded(done))
    return made, torch.cat(actions), bool(len(success))


def _batches(n: int) -> Iterator[NDArray[np.int64]]:
    return iter(np.array_split(np.arange(n), max(1, -(-n // BATCH))))
