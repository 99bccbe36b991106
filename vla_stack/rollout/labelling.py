"""Who acts in a collection, and what is kept of it: an expert, or a policy whose every state an expert labels."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vla_stack import envs
from vla_stack.data.branching import Branches
from vla_stack.envs import EnvStep
from vla_stack.errors import UserError
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.plan import Decision, Episode, Query, Reply, StepEvent
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Observation

if TYPE_CHECKING:
    import gymnasium as gym

    from vla_stack.rollout.collect import CollectConfig

NO_JOINTS = np.zeros(0, np.float32)  # a benchmark's environment reports no joint targets


class Frame(NamedTuple):
    """What is recorded of one step.

    Attributes:
        observation: Before it.
        action: float32 [A], the clean label.
        sent: float32 [A], what was executed.
        joints: float32 [J], targets that realised it.
        reward: The environment's.
        chunk: float32 [H, A], chunk label; H is 0 where there is none.
        chunk_steps: Valid length of that.
        given: How many of its first actions are not the expert's.
    """

    observation: Observation
    action: NDArray[np.float32]
    sent: NDArray[np.float32]
    joints: NDArray[np.float32]
    reward: float
    chunk: NDArray[np.float32]
    chunk_steps: int
    given: int = 0


class CollectingAgent:
    """Who acts in a collection; labels are the clean action and, where states can be saved, the expert's chunk."""

    _branches: WeakKeyDictionary[Any, Branches] = WeakKeyDictionary()  # of each row's environment: a twin is dear

    def __init__(self, episode: Episode, config: CollectConfig) -> None:
        from sim import behaviours

        env, seed = episode.env, episode.start.seed
        self._expert: Any
        if config.mixed:
            self._expert = behaviours.make_behaviour(env, behaviours.deal(seed), seed)
        else:
            self._expert = expert_maker(config.task)(env, seed=seed, **config.how)
        self._env, self._branch = env, None
        if config.chunk_steps and can_branch(env):
            if env not in self._branches:
                twin = envs.make(config.env_id, 1, None, {**config.env_options, "cameras": ()}).row(0)
                self._branches[env] = Branches(twin, expert_maker(config.task), config.chunk_steps)
            self._branch = self._branches[env]
            self._branch.begin(seed)
        self._no_chunk = np.zeros((0, len(episode.robot.action)), np.float32), 0
        self._labelled: list[NDArray[np.float64]] = []  # states in which a policy asked
        self._policy = None
        if config.policy:
            late = int(np.random.default_rng((seed, 2)).integers(config.delay + 1)) / episode.robot.rate_hz
            mode = ExecutorConfig("prefix" if config.delay else "naive")
            plan = replace(episode.plan, latency=Latency(late), executor=mode)
            self._policy = PolicyAgent(episode._replace(plan=plan))
        # Of each control step the state to jump to before it; None where it is recorded.
        self._schedule: list[NDArray[np.float64] | None] | None = None
        if config.moments:
            self._schedule = self._moments(config, seed)

    def _moments(self, config: CollectConfig, seed: int) -> list[NDArray[np.float64] | None]:
        """Random states of an episode that is driven without pictures.

        The engine shows the agent what the last step showed: one step from the state before brings a state's pictures.
        """
        if self._branch is None:
            message = f"{config.task}: --moments needs chunk labels"
            raise UserError(message, "give --noise and --branch, of a task of ours")
        states = self._branch.drive(seed, **config.how)  # none where it failed
        self._branch.begin(seed)
        drawn = np.random.default_rng((seed, 1)).permutation(len(states))[: config.moments]
        return [entry for k in sorted(drawn.tolist()) for entry in ([None] if k == 0 else [states[k - 1], None])]

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if self._policy is not None:
            return (yield from self._follow(self._policy.act(k, observation, now)))
        recorded = True
        if self._schedule is not None:
            if k >= len(self._schedule):
                return None
            recorded = (state := self._schedule[k]) is None
            if state is not None:
                self._env.unwrapped.set_state(state)
        action = self._expert.act()
        chunk, length = self._no_chunk if self._branch is None or not recorded else self._branch.chunk(self._env)
        return Decision(self._expert.perturb(action), label=(action, chunk, length) if recorded else None)

    def _follow(self, acting: Generator[Query, Reply, Decision | None]) -> Generator[Query, Reply, Decision | None]:
        """What the policy does, with the expert's label where it asks for a chunk: there it will have to know it.

        Where chunks come late, what is executed until then is the policy's, and the label says what is to follow it.
        """
        reply: Any = None  # which begins a generator
        label = None
        while True:
            try:
                query = acting.send(reply)
            except StopIteration as done:
                return done.value and done.value._replace(label=label)
            more = query.continuation
            given = list(more.actions[: more.delay]) if more is not None else []
            chunk: tuple[NDArray[np.float32], int] = self._no_chunk
            if self._branch is not None:
                self._labelled.append(self._env.unwrapped.get_state())  # type: ignore[attr-defined]
                chunk = self._branch.chunk(self._env, given)
            label = self._expert.act(), *chunk, len(given)
            reply = yield query

    def result(self) -> int | None:
        """How many of a policy's frames teach something; None for all.

        Where the expert cannot do the task any more, as with what has fallen over, it presses on: no label of that.
        """
        return self._branch.mended(self._labelled) if self._branch is not None and self._labelled else None


class FrameRecorder:
    """The frames of an episode of a :class:`CollectingAgent`."""

    def __init__(self, episode: Episode) -> None:
        self._task = episode.env.unwrapped
        self._frames: list[Frame] = []

    def step(self, event: StepEvent) -> None:
        if event.decision.label is None:
            return
        action, chunk, length, *given = event.decision.label
        joints = getattr(self._task, "joint_command", NO_JOINTS)
        sent = event.decision.command
        self._frames.append(Frame(event.observation, action, sent, joints, event.after.reward, chunk, length, *given))

    def result(self) -> list[Frame]:
        return self._frames


def expert_maker(task: str) -> Callable[..., Any]:
    """The function that makes a task's expert from its environment."""
    import sim
    from sim import external

    return external.make_expert if external.is_external(task) else sim.make_expert


def can_branch(env: gym.Env) -> bool:
    """Whether an environment's state can be saved and restored, as a branch of its expert needs."""
    return hasattr(env.unwrapped, "get_state")
