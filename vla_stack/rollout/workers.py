"""Where episodes run: in this process, in processes of this machine, or in actors on Ray.

All three speak alike: ``begin`` names episodes, ``receive`` gives the chunks that are wanted and the episodes that have
finished, ``send`` answers them, and the group goes on to where it needs an answer again. Workers import the simulator
and no policy.

One rule for deaths: a worker that dies is replaced, and what it had not finished is begun anew; after :data:`DEATHS`
deaths in one place without a finished episode in between there is no further one.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np

from vla_stack import envs
from vla_stack.envs.vector import EnvStep
from vla_stack.errors import UserError
from vla_stack.rollout.episode import Running, run_episode
from vla_stack.rollout.plan import Decision, Episode, Plan, Query, Reply, Start, StepEvent
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.link import ignored_interrupts

DEATHS = 3
Received = tuple[list[Query], list[EpisodeRecord], bool]  # the last: whether everything is done


class Group(Protocol):
    """Episodes that advance together."""

    def begin(self, starts: Iterable[Start]) -> None: ...
    def receive(self) -> Received: ...
    def send(self, replies: Sequence[Reply]) -> None: ...
    def close(self) -> None: ...


class LocalGroup:
    """Rows of a vector environment that advance together, and take the next start when an episode ends.

    Args:
        plan: What is run.
        num_envs: Rows.
    """

    def __init__(self, plan: Plan, num_envs: int) -> None:
        self._plan = plan
        self._starts: Iterator[Start] = iter(())
        self._envs = envs.make(plan.env_id, num_envs, plan.policy, plan.options)
        self._robot = self._envs.robot or plan.policy.robot
        self._running: dict[int, Running] = {}
        self._queries: dict[int, Query] = {}
        self._decisions: dict[int, Decision] = {}
        self._records: list[EpisodeRecord] = []
        self.events: list[tuple[int, StepEvent]] = []  # of the last control step, by row

    def begin(self, starts: Iterable[Start]) -> None:
        """Begin a run of these episodes, in this order; they may be endless. All before have finished."""
        self._starts = iter(starts)
        self._begin(range(self._envs.num_envs))

    def receive(self) -> Received:
        """Advance to where every row wants a chunk, an episode has finished, or everything is done."""
        while not self._records and len(self._queries) < len(self._running):
            self.advance()
        records, self._records = self._records, []
        queries = [] if len(self._queries) < len(self._running) else list(self._queries.values())
        return queries, records, self.done

    def send(self, replies: Sequence[Reply]) -> None:
        """Answer the queries of the last :meth:`receive`, in its order; none where it gave none."""
        if replies:
            rows, self._queries = list(self._queries), {}
            for row, reply in zip(rows, replies, strict=True):
                self._resume(row, reply)
            self._begin([row for row in rows if row not in self._running])

    @property
    def wanted(self) -> list[Query]:
        """Chunks that some rows want now."""
        return list(self._queries.values())

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run."""
        return not self._running

    def advance(self) -> None:
        """One control step of every row that has decided."""
        decided, self._decisions, self.events = self._decisions, {}, []
        actions = np.stack([decision.command for decision in decided.values()])
        steps = self._envs.step(list(decided), actions, [decision.ahead for decision in decided.values()])
        for row, step in zip(decided, steps, strict=True):
            self._resume(row, step)
        self._begin([row for row in decided if row not in self._running])

    def taken(self) -> list[EpisodeRecord]:
        """Episodes that finished since the last call."""
        records, self._records = self._records, []
        return records

    def close(self) -> None:
        self._envs.close()

    def _begin(self, rows: Iterable[int]) -> None:
        while begun := [(row, start) for row, start in zip(rows, self._starts, strict=False)]:
            firsts = self._envs.reset([row for row, _ in begun], [start.seed for _, start in begun])
            for (row, start), first in zip(begun, firsts, strict=True):
                episode = Episode(self._envs.row(row), self._robot, start, self._plan, first, row)
                self._running[row] = run_episode(episode, partial(self._note, row))
                self._resume(row, None)
            rows = [row for row, _ in begun if row not in self._running]  # stopped before their first step

    def _note(self, row: int, event: StepEvent) -> None:
        self.events.append((row, event))

    def _resume(self, row: int, answer: Reply | EnvStep | None) -> None:
        try:
            wanted = self._running[row].send(answer)  # type: ignore[arg-type]  # None starts a coroutine
        except StopIteration as end:
            self._records.append(end.value)
            del self._running[row]
        else:
            if isinstance(wanted, Query):
                self._queries[row] = wanted
            else:
                self._decisions[row] = wanted


class _Share:
    """What a worker elsewhere has left to do, and how often it has died."""

    def __init__(self, starts: Iterable[Start]) -> None:
        self._left, self._deaths = starts, 0
        self._done: set[Start] = set()

    def left(self) -> Iterable[Start]:
        return self._left if not self._done else _Without(self._left, frozenset(self._done))

    def finished(self, records: Sequence[EpisodeRecord]) -> None:
        if records:
            self._deaths = 0
        self._done |= {Start(r.seed, r.number) for r in records}

    def died(self, how: str) -> None:
        """Raises :class:`UserError` where another worker would be no better."""
        self._deaths += 1
        if self._deaths == DEATHS:
            raise UserError(f"an environment process keeps dying ({how})", "try --workers 0 to see why")


class _Without:
    """Starts without some; can be pickled, and begun again, like what it is made of."""

    def __init__(self, starts: Iterable[Start], done: frozenset[Start]) -> None:
        self._starts, self._done = starts, done

    def __iter__(self) -> Iterator[Start]:
        return (start for start in self._starts if start not in self._done)


class ProcessGroup:
    """A :class:`LocalGroup` in a process of its own."""

    def __init__(self, plan: Plan, num_envs: int) -> None:
        self._plan, self._num_envs = plan, num_envs
        self._start()

    def begin(self, starts: Iterable[Start]) -> None:
        self._share = _Share(starts)
        self.send(starts)

    def receive(self) -> Received:
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, ConnectionResetError):
                self._process.join(5)
                self._share.died(f"exit code {self._process.exitcode}")
                self.connection.close()
                self._start()
                self.send(self._share.left())
                continue
            if isinstance(message, UserError):
                raise message
            if isinstance(message, str):
                raise RuntimeError(f"an environment process failed:\n{message}")
            self._share.finished(message[1])
            return message

    def send(self, replies: Any) -> None:
        try:
            self.connection.send(replies)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died: the next `receive` finds out, and begins anew what was under way

    def close(self) -> None:
        self.connection.close()
        self._process.terminate()  # it has nothing to save, and tearing OpenGL down in order takes seconds
        self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # never fork: torch, EGL and ZeroMQ all own threads by now
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._plan, self._num_envs), daemon=True)
        with ignored_interrupts():  # Ctrl-C is for this process; the other ends when its pipe does
            self._process.start()
        theirs.close()


class RayGroup:
    """A :class:`LocalGroup` in an actor on Ray."""

    def __init__(self, ray: Any, plan: Plan, num_envs: int) -> None:
        self._ray, self._plan, self._num_envs = ray, plan, num_envs
        self._start()

    def begin(self, starts: Iterable[Start]) -> None:
        self._share = _Share(starts)
        self._begin(starts)

    def receive(self) -> Received:
        errors = self._ray.exceptions
        while True:
            try:
                message: Received = self._ray.get(self.pending)
                break
            except errors.RayActorError as e:
                self._share.died(str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__)
                self._start()
                self._begin(self._share.left())
            except errors.RayTaskError as e:
                if isinstance(e.cause, UserError):
                    raise e.cause from None
                raise RuntimeError(f"an environment process failed:\n{e}") from None
        self._share.finished(message[1])
        return message

    def send(self, replies: Sequence[Reply]) -> None:
        self.actor.send.remote(replies)
        self.pending = self.actor.receive.remote()

    def close(self) -> None:
        self._ray.kill(self.actor)

    def _start(self) -> None:
        self.actor = self._ray.remote(num_cpus=1)(LocalGroup).remote(self._plan, self._num_envs)

    def _begin(self, starts: Iterable[Start]) -> None:
        self.actor.begin.remote(starts)
        self.pending = self.actor.receive.remote()

    @classmethod
    def ready(cls, groups: Sequence[RayGroup]) -> list[Group]:
        """Those that have something to be received, at least one; waits for it."""
        ray, pending = groups[0]._ray, {g.pending: g for g in groups}
        ray.wait([*pending])
        found, _ = ray.wait([*pending], num_returns=len(pending), timeout=0)
        return [pending[ref] for ref in found]


def open_groups(plan: Plan, num_envs: int, workers: int, ray: Any) -> list[Group]:
    """Groups that share rows evenly.

    Args:
        plan: What is run.
        num_envs: Rows in all.
        workers: Processes or actors; 0 keeps all rows in this process.
        ray: Ray, where workers are actors; None for processes.
    """
    if workers == 0:
        return [LocalGroup(plan, num_envs)]
    workers = min(workers, num_envs)
    shares = [len(range(w, num_envs, workers)) for w in range(workers)]
    return [ProcessGroup(plan, rows) if ray is None else RayGroup(ray, plan, rows) for rows in shares]


def ready(groups: Sequence[Group]) -> list[Group]:
    """Groups that have something to be received, at least one; waits for it."""
    if remote := [g for g in groups if isinstance(g, RayGroup)]:
        return RayGroup.ready(remote)
    by_connection = {g.connection: g for g in groups if isinstance(g, ProcessGroup)}
    if not by_connection:
        return list(groups)
    return [by_connection[c] for c in wait(list(by_connection))]  # type: ignore[index]


def _work(connection: Connection, plan: Plan, num_envs: int) -> None:
    """Body of an environment process: take episodes, report, wait for chunks, advance."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    group = None
    try:
        group = LocalGroup(plan, num_envs)
        while True:
            group.begin(connection.recv())
            while True:
                message = group.receive()
                connection.send(message)
                if message[2]:
                    break
                group.send(connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over; whoever ended it has said why
    except UserError as e:
        connection.send(e)
    except Exception:
        connection.send(traceback.format_exc())
    finally:
        if group is not None:
            group.close()


def _end_with_parent() -> None:
    """End this process when its parent is killed; it would wait for ever for its next answer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
