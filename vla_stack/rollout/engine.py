"""The engine: policy, environments and a virtual clock in, steps and episodes out.

The only place beside a robot's control process that steps a policy. Evaluation, recording, preferences, transitions and
on-policy chains attach to it as recorders, or read what it yields.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

from vla_stack.errors import UserError
from vla_stack.ray_cluster import Where, cluster
from vla_stack.rollout.plan import Attempts, Plan, Query, Reply, Start, StepEvent
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.rollout.workers import Group, LocalGroup, open_groups, ready
from vla_stack.schema import Chunks, Continuation, Observation, PolicySpec


class ChunkPolicy(Protocol):
    """What the engine needs of a policy (:func:`vla_stack.policies.load_policy` returns one)."""

    @property
    def spec(self) -> PolicySpec: ...

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks: ...


class Engine:
    """Environments that stay open for run after run.

    A policy's noise follows from an episode's start and the control step, so a record depends on neither ``num_envs``
    nor where it ran. Each worker advances its rows until all of them want a chunk; this process answers whichever
    workers wait, in one batch, while the others simulate.

    Args:
        plan: What all episodes share.
        num_envs: Episodes that advance at the same time, the largest batch of the policy.
        workers: Processes that hold the environments; 0 keeps them in this one. Each imports the caller's main
            module again, so more than 0 pays where that is light, or the run long.
        rollouts: Where the workers are: processes of this machine, or actors on Ray.

    Raises:
        UserError: An environment does not exist or does not fit the policy, or Ray is not there.
    """

    def __init__(self, plan: Plan, num_envs: int = 8, workers: int = 0, rollouts: Where = "local") -> None:
        if rollouts == "ray" and workers < 1:
            raise UserError("rollouts on Ray need at least one worker", "give --workers")
        self._cluster = cluster(workers) if rollouts == "ray" else nullcontext()
        ray = self._cluster.__enter__()
        self._groups = open_groups(plan, num_envs, workers, ray)

    def run(self, policy: ChunkPolicy | None, starts: Sequence[Start] | Attempts) -> Iterator[EpisodeRecord]:
        """Whole episodes, in the order in which they end.

        Args:
            policy: Answers queries; None where nobody asks any, as experts do not.
            starts: Which episodes. Where they are endless, or enough at some point, close the engine.

        Raises:
            UserError: Workers keep dying.
        """
        busy = list(self._groups)
        for w, group in enumerate(busy):
            group.begin(starts[w :: len(busy)])
        while busy:
            yield from _serve(policy, busy)

    def close(self) -> None:
        for group in self._groups:
            group.close()
        self._groups = []
        self._cluster.__exit__(None, None, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run(
    policy: ChunkPolicy | None,
    plan: Plan,
    starts: Sequence[Start] | Attempts,
    num_envs: int = 8,
    workers: int = 0,
    rollouts: Where = "local",
) -> Iterator[EpisodeRecord]:
    """One run of an engine of its own; see :class:`Engine`."""
    if not isinstance(starts, Attempts):
        num_envs = min(num_envs, len(starts))
    if num_envs:
        with Engine(plan, num_envs, workers, rollouts) as engine:
            yield from engine.run(policy, starts)


def stream(
    policy: ChunkPolicy, plan: Plan, starts: Iterable[Start], num_envs: int = 1
) -> Generator[tuple[list[tuple[int, StepEvent]], list[EpisodeRecord]], None, None]:
    """Every control step of every row, as it happens: what a learner that updates between steps attaches to.

    Yields:
        (row, event) of each row, and the episodes that ended with this step.
    """
    group = LocalGroup(plan, num_envs)
    try:
        group.begin(starts)
        while True:
            while queries := group.wanted:
                group.send(_answer(policy, queries))
            if group.done:
                return
            group.advance()
            yield group.events, group.taken()
    finally:
        group.close()


def _serve(policy: ChunkPolicy | None, busy: list[Group]) -> list[EpisodeRecord]:
    """Answer every group that waits, in one batch; drop those that are done."""
    waiting = ready(busy)
    queries: list[list[Query]] = []
    records: list[EpisodeRecord] = []
    for group in waiting:
        wanted, finished, done = group.receive()
        queries.append(wanted)
        records += finished
        if done:
            busy.remove(group)
    replies = _answer(policy, [q for wanted in queries for q in wanted])
    for group, wanted in zip(waiting, queries, strict=True):
        if group in busy:
            group.send(replies[: len(wanted)])
            del replies[: len(wanted)]
    return records


def _answer(policy: ChunkPolicy | None, queries: Sequence[Query]) -> list[Reply]:
    if not queries:
        return []
    assert policy is not None, "somebody asks for chunks, and nobody gives any"
    plans = [q.continuation for q in queries]
    chunks = policy.infer([q.observation for q in queries], [q.seed for q in queries], *([plans] if any(plans) else []))
    return [chunks.row(i) for i in range(len(chunks))]
