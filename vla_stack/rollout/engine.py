"""Vector rollouts: many episodes, one policy, batched inference, paired seeds.

Each worker process advances its environments until every one of them wants a chunk; this process answers whichever
workers wait, in one batch, while the others simulate. With ``workers=0`` the environments live here.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from vla_stack.envs.making import make_env, options_for, robot_of, stages_of
from vla_stack.errors import UserError
from vla_stack.evaluation.metrics import boundary_discontinuity
from vla_stack.ray_cluster import Where, cluster
from vla_stack.rollout.episode import Episode, EpisodeConfig, Instruct, Query, Reply, run_episode
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.records import EpisodeRecord, EvalResult
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.link import ignored_interrupts
from vla_stack.schema import Chunks, Continuation, Observation, PolicySpec

DEATHS = 3  # of actors on Ray, one after another, without an episode finished
OnEpisode = Callable[[EpisodeRecord], None]


class ChunkPolicy(Protocol):
    """What an evaluation needs of a policy (``vla_stack.policies.load_policy`` returns one)."""

    @property
    def spec(self) -> PolicySpec: ...

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks: ...


def evaluate(
    policy: ChunkPolicy,
    env_id: str,
    episodes: int = 100,
    seed: int = 1000,
    executor: ExecutorConfig | None = None,
    latency: Latency = Latency(),
    instruct: Instruct = None,
    num_envs: int = 8,
    workers: int = 0,
    rollouts: Where = "local",
    env_options: dict[str, Any] | None = None,
    on_episode: OnEpisode | None = None,
) -> EvalResult:
    """Roll a policy out under the virtual clock.

    Episode i has seed ``seed + i`` whatever the number of environments, and the policy's noise follows from that seed
    and the tick, so two policies, or two latencies, meet the same scenes with the same luck.

    Args:
        policy: What is evaluated.
        env_id: Gymnasium id, e.g. ``sim/pick-v0``.
        episodes: Number of episodes.
        seed: Seed of the first.
        executor: Timeline rules; by default asynchronous, executing half the policy's horizon.
        latency: Time between a request and the first tick that its reply can serve.
        instruct: ``swap`` tells the policy another instruction than the one that success refers to.
        num_envs: Episodes that advance at the same time, the largest batch of the policy.
        workers: Processes that hold the environments; 0 keeps them in this one. Each imports the caller's main
            module again, so more than 0 pays where that is light, as ``vla eval`` is, or the evaluation long.
        rollouts: Where the workers are: processes of this machine, or actors on Ray. There, one that dies is replaced,
            and what it had not finished is rolled out again; records are the same in any case.
        env_options: Further keyword arguments of the environment.
        on_episode: Called with each record as it is finished, in no fixed order.

    Raises:
        UserError: The environment does not exist or does not fit the policy, or a worker died.
    """
    began = time.perf_counter()
    executor = executor or ExecutorConfig()
    options = options_for(env_id, policy.spec, env_options)
    config = EpisodeConfig(env_id, options, policy.spec, executor, latency, instruct)
    env = make_env(env_id, policy.spec, options)  # fails here, once, rather than in every worker
    robot, stages = robot_of(env, policy.spec), stages_of(env)
    env.close()
    seeds = range(seed, seed + episodes)
    if rollouts == "ray" and workers < 1:
        raise UserError("rollouts on Ray need at least one worker", "give --workers")
    records: list[EpisodeRecord] = []
    with cluster(workers) if rollouts == "ray" else nullcontext() as ray:
        groups = _open_groups(config, seeds, min(num_envs, episodes), workers, ray)
        try:
            while groups:
                _serve(policy, groups, records, on_episode)
        finally:
            for group in groups:
                group.close()
    result = EvalResult(
        name=env_id,
        label=describe(executor, latency, instruct),
        rate_hz=robot.rate_hz,
        episodes=tuple(sorted(records, key=lambda r: r.seed)),
        stages=stages,
        settings={
            "mode": executor.mode,
            "execute": executor.execute,
            "latency_s": latency.mean_s,
            "jitter": latency.jitter,
            "instruct": instruct,
            "seed": seed,
            "num_envs": num_envs,
            "env_options": options,
            "model_version": policy.spec.model_version,
        },
        wall_s=time.perf_counter() - began,
    )
    return replace(result, discontinuity=boundary_discontinuity(result, robot))


def _serve(
    policy: ChunkPolicy, groups: list[Group], records: list[EpisodeRecord], on_episode: OnEpisode | None
) -> None:
    """Answer every group that waits for the policy, in one batch; drop those that are done."""
    waiting = _ready(groups)
    queries: list[list[Query]] = []
    for group in waiting:
        wanted, finished = group.receive()
        queries.append(wanted)
        records += finished
        if on_episode is not None:
            for record in finished:
                on_episode(record)
    flat = [q for wanted in queries for q in wanted]
    replies: list[Reply] = []
    if flat:
        plans = [q.continuation for q in flat]
        chunks = policy.infer([q.observation for q in flat], [q.seed for q in flat], *([plans] if any(plans) else []))
        replies = [chunks.row(i) for i in range(len(chunks))]
    for group, wanted in zip(waiting, queries, strict=True):
        if wanted:
            group.send(replies[: len(wanted)])
            del replies[: len(wanted)]
        else:
            group.close()
            groups.remove(group)


class RolloutGroup:
    """Environments that advance together, each until it wants a chunk, and take the next seed when an episode ends."""

    def __init__(self, config: EpisodeConfig, seeds: Sequence[int], num_envs: int) -> None:
        self._config, self._seeds = config, list(reversed(seeds))
        self._envs = [make_env(config.env_id, config.policy, config.env_options) for _ in range(num_envs)]
        self._running: list[Episode | None] = [None] * num_envs
        self._waiting: list[int] = []
        self._records: list[EpisodeRecord] = []
        self._queries: list[Query] = []
        for slot in range(num_envs):
            self._begin(slot)

    def receive(self) -> tuple[list[Query], list[EpisodeRecord]]:
        """Chunks that are wanted (none when all episodes are done) and the episodes finished since the last call."""
        records, self._records = self._records, []
        return self._queries, records

    def send(self, replies: list[Reply]) -> None:
        """Answer all queries of the last :meth:`receive`, in its order, and advance to the next ones."""
        slots, self._waiting, self._queries = self._waiting, [], []
        for slot, reply in zip(slots, replies, strict=True):
            self._advance(slot, reply)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _begin(self, slot: int) -> None:
        if self._seeds:
            self._running[slot] = run_episode(self._envs[slot], self._config, self._seeds.pop())
            self._advance(slot, None)

    def _advance(self, slot: int, reply: Reply | None) -> None:
        episode = self._running[slot]
        assert episode is not None
        try:
            query = episode.send(reply)  # type: ignore[arg-type]  # None starts a coroutine
        except StopIteration as end:
            self._records.append(end.value)
            self._begin(slot)
        else:
            self._waiting.append(slot)
            self._queries.append(query)


class RemoteGroup:
    """A :class:`RolloutGroup` in a process of its own, which imports the simulator and no policy."""

    def __init__(self, config: EpisodeConfig, seeds: Sequence[int], num_envs: int) -> None:
        # Never fork: torch, EGL and ZeroMQ all own threads by now.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, config, list(seeds), num_envs), daemon=True)
        with ignored_interrupts():  # Ctrl-C is for this process; the other ends when its pipe does
            self._process.start()
        theirs.close()

    def receive(self) -> tuple[list[Query], list[EpisodeRecord]]:
        try:
            message = self.connection.recv()
        except EOFError:
            self._process.join(5)
            raise UserError(
                f"an environment process died (exit code {self._process.exitcode})", "try --workers 0 to see why"
            ) from None
        if isinstance(message, UserError):
            raise message
        if isinstance(message, str):
            raise RuntimeError(f"an environment process failed:\n{message}")
        return message

    def send(self, replies: list[Reply]) -> None:
        self.connection.send(replies)

    def close(self) -> None:
        self.connection.close()
        self._process.terminate()  # it has nothing to save, and tearing OpenGL down in order takes seconds
        self._process.join()


class RayGroup:
    """A :class:`RolloutGroup` in an actor on Ray. Where that dies, another one begins its unfinished episodes anew."""

    def __init__(self, ray: Any, config: EpisodeConfig, seeds: Sequence[int], num_envs: int) -> None:
        self._ray, self._config, self._left, self._num_envs = ray, config, list(seeds), num_envs
        self._deaths = 0
        self._begin()

    def receive(self) -> tuple[list[Query], list[EpisodeRecord]]:
        errors = self._ray.exceptions
        while True:
            try:
                queries, records = self._ray.get(self.pending)
                break
            except errors.RayActorError as e:
                self._deaths += 1
                if self._deaths == DEATHS:
                    raise UserError(f"environments on Ray keep dying: {e}", "try --rollouts local") from None
                self._begin()
            except errors.RayTaskError as e:
                if isinstance(e.cause, UserError):
                    raise e.cause from None
                raise RuntimeError(f"an environment process failed:\n{e}") from None
        if records:
            self._deaths = 0
        done = {r.seed for r in records}
        self._left = [seed for seed in self._left if seed not in done]
        return queries, records

    def send(self, replies: list[Reply]) -> None:
        self.actor.send.remote(replies)
        self.pending = self.actor.receive.remote()

    def close(self) -> None:
        self._ray.kill(self.actor)

    def _begin(self) -> None:
        make = self._ray.remote(num_cpus=1)(RolloutGroup)
        self.actor = make.remote(self._config, self._left, self._num_envs)
        self.pending = self.actor.receive.remote()

    @classmethod
    def ready(cls, groups: Sequence[RayGroup]) -> list[Group]:
        """Those that have something to be received, at least one; waits for it."""
        ray, pending = groups[0]._ray, {g.pending: g for g in groups}
        ray.wait([*pending])
        found, _ = ray.wait([*pending], num_returns=len(pending), timeout=0)
        return [pending[ref] for ref in found]


Group = RolloutGroup | RemoteGroup | RayGroup


def _work(connection: Connection, config: EpisodeConfig, seeds: list[int], num_envs: int) -> None:
    """Body of an environment process: report, wait for chunks, advance."""
    group = None
    try:
        group = RolloutGroup(config, seeds, num_envs)
        while True:
            queries, records = group.receive()
            connection.send((queries, records))
            if not queries:
                return
            group.send(connection.recv())
    except (EOFError, BrokenPipeError):
        pass  # the evaluation is over; whoever ended it has said why
    except UserError as e:
        connection.send(e)
    except Exception:
        connection.send(traceback.format_exc())
    finally:
        if group is not None:
            group.close()


def _open_groups(config: EpisodeConfig, seeds: Sequence[int], num_envs: int, workers: int, ray: Any) -> list[Group]:
    if num_envs < 1:
        return []
    if workers == 0:
        return [RolloutGroup(config, seeds, num_envs)]
    workers = min(workers, num_envs)
    shares = [(seeds[w::workers], len(range(w, num_envs, workers))) for w in range(workers)]
    return [RemoteGroup(config, *share) if ray is None else RayGroup(ray, config, *share) for share in shares]


def _ready(groups: list[Group]) -> list[Group]:
    if remote := [g for g in groups if isinstance(g, RayGroup)]:
        return RayGroup.ready(remote)
    by_connection = {g.connection: g for g in groups if isinstance(g, RemoteGroup)}
    if not by_connection:
        return list(groups)
    return [by_connection[c] for c in wait(list(by_connection))]  # type: ignore[index]


def describe(executor: ExecutorConfig, latency: Latency, instruct: Instruct) -> str:
    """A setting in a few words, e.g. ``naive, 100 ms``, with the executed steps where they are not the policy's own."""
    steps = f", {executor.execute} steps" if executor.execute else ""
    swap = ", wrong instruction" if instruct == "swap" else ""
    return f"{executor.mode}, {latency}{steps}{swap}"
