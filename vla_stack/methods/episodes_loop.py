"""The loop of methods that learn from whole episodes: practise, learn, evaluate as deployed; again and again.

A run directory holds ``metrics.jsonl``, ``curve.png`` and ``checkpoints/``, each of which holds a policy directory.
Episodes begin with an iteration and end in it, so a run that is stopped goes on from its last checkpoint and computes
what one that is not stopped computes.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vla_stack import envs
from vla_stack.envs.making import observe as observation_of
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.practice import judged, simulated
from vla_stack.policies.anatomy import is_flow
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout import engine
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Episode, Plan, Start, StepEvent
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Observation
from vla_stack.statistics import success_interval
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.log import truncate
from vla_stack.training.placement import use_threads
from vla_stack.training.recipe import Recipe

EXECUTOR = ExecutorConfig(mode="sync")  # whole chunks, as likelihoods and values count them
METRICS, CURVE = "metrics.jsonl", "curve.png"
FINAL = "final"  # name of :class:`FinalObservation` among a plan's recorders


class FinalObservation:
    """What an episode showed at its end, as its policy would see it: where a truncated one is bootstrapped."""

    def __init__(self, episode: Episode) -> None:
        self._robot = episode.plan.policy.robot
        self._last: StepEvent | None = None

    def step(self, event: StepEvent) -> None:
        self._last = event

    def result(self) -> Observation | None:
        if self._last is None:
            return None
        return observation_of(self._last.after.observation, self._robot, self._last.observation.task, self._last.k + 1)


class Lived(Protocol):
    """What an iteration's episodes were.

    Attributes:
        success: bool [e], of every episode.
        steps: Environment steps in all.
        count: Decisions in all.
    """

    @property
    def success(self) -> Tensor: ...
    @property
    def steps(self) -> int: ...
    @property
    def count(self) -> int: ...


class EpisodesLoop[L: Lived](ABC):
    """One run, continued from its last checkpoint where it has one.

    Args:
        recipe: The run; it starts from ``policy.pretrained``.
        run_dir: Where it lies.

    Raises:
        UserError: There is no policy, it is no flow policy, or it does not fit the environment.
    """

    explorer: engine.ChunkPolicy  # who acts in practice

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        use_threads(recipe.threads)
        self.recipe, self.run_dir = recipe, run_dir
        self.method: Any = recipe.method
        self.policy = load_policy(start_of(recipe.policy.pretrained), recipe.device)
        if not is_flow(self.policy.policy):
            raise UserError(f"{recipe.policy.pretrained} is no flow policy", "train one with head=flow")
        self._engine: engine.Engine | None = None
        self.iteration = self.env_steps = 0

    @cached_property
    def plan(self) -> Plan:
        """How it practises."""
        task = self.recipe.task
        practised = judged(task.id, self.method.judge)
        return Plan(practised, task.options, self.policy.spec, PolicyAgent, {FINAL: FinalObservation}, EXECUTOR)

    @cached_property
    def saved(self) -> Path | None:
        """The checkpoint that it goes on from, where there is one."""
        return ckpt.latest(self.run_dir / "checkpoints")

    # What a method does -----------------------------------------------------------------------------------------------

    @abstractmethod
    def experience(self, records: Sequence[EpisodeRecord]) -> L:
        """What episodes of the explorer were."""

    @abstractmethod
    def update(self, data: L, generator: torch.Generator) -> dict[str, float]:
        """Learn from an iteration's episodes; returns what to log."""

    @abstractmethod
    def deployed(self) -> ChunkPolicy:
        """The policy as it is saved now."""

    @abstractmethod
    def networks(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What training changes, which has to stay finite."""

    @abstractmethod
    def fill(self, directory: Path) -> None:
        """Write what training goes on from into a checkpoint."""

    @abstractmethod
    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Inverse of :meth:`fill`; returns the checkpoint's facts."""

    def facts(self) -> dict[str, Any]:
        """What else a checkpoint notes, plain JSON."""
        return {}

    def begin(self) -> None:  # noqa: B027  most have nothing to do
        """Whatever comes before the first iteration."""

    # The loop ---------------------------------------------------------------------------------------------------------

    def first(self) -> dict[str, Any]:
        """A preprocessed batch of one observation of the task."""
        one = envs.make(self.plan.env_id, 1, self.policy.spec, self.plan.options)
        raw, *_, info = one.reset([0], [0])[0]
        one.close()
        return self.policy.preprocess([observation_of(raw, self.policy.spec.robot, info["task"], 0)])

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        if self.saved is not None:
            state = self.load(self.saved)
            self.iteration, self.env_steps = state["step"], state["env_steps"]
        truncate(self.run_dir / METRICS, self.iteration or -1)  # the start is recorded until it is left

    def run(self) -> Path:
        """Do the iterations that are missing; returns the last checkpoint.

        Raises:
            UserError: A loss, a gradient or a weight is not finite; the last checkpoint stays what it was.
        """
        r, every = self.method, self.recipe.eval.every
        if self.iteration == 0:
            self._check_finite({})
            self.begin()
            self._record(self.evaluate())
            self.save()
        while self.iteration < r.iterations:
            began, cpu = time.monotonic(), time.process_time()
            generator = self._generator("rollout", self.iteration)
            data = self.practise(self._seeds(self.iteration))
            rolled = time.monotonic()
            metrics = self.update(data, generator)
            self._check_finite(metrics)
            self.iteration, self.env_steps = self.iteration + 1, self.env_steps + data.steps
            last = self.iteration == r.iterations
            values = {"rollout": float(data.success.float().mean()), "decisions": data.count, **metrics}
            seconds = {"rollout_s": round(rolled - began, 2), "update_s": round(time.monotonic() - rolled, 2)}
            seconds["cpu_s"] = round(time.process_time() - cpu, 2)  # without the evaluation, which learns nothing
            evaluating = last or (every > 0 and self.iteration % every == 0)
            self._record(values | (self.evaluate() if evaluating else {}) | seconds)
            if last or self.iteration % r.save_every == 0:
                self.save()
                self.plot()
        self.close()
        return ckpt.path(self.run_dir / "checkpoints", self.iteration)

    def close(self) -> None:
        """Close the environments; they open again when they are needed."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def practise(self, seeds: Sequence[int]) -> L:
        """One episode of the explorer a seed, in the order of the seeds."""
        r, order = self.method, {seed: i for i, seed in enumerate(seeds)}
        if self._engine is None:
            self._engine = engine.Engine(self.plan, r.num_envs, r.workers, r.rollouts)
        found = self._engine.run(self.explorer, [Start(s) for s in seeds])
        return self.experience(sorted(found, key=lambda record: order[record.seed]))

    def evaluate(self) -> dict[str, Any]:
        """Success of the policy as it would be deployed: what ``vla eval --mode sync`` says of its directory.

        Where a world model judges or imagines the task, success is the task's own.
        """
        task, e = simulated(self.recipe.task), self.recipe.eval
        result = evaluate(
            self.deployed(),
            task.id,
            e.episodes,
            e.seed,
            EXECUTOR,
            num_envs=e.num_envs,
            workers=e.workers,
            rollouts=e.rollouts,
            env_options=task.options,
        )
        success = [int(episode.success) for episode in result.episodes]
        return {"eval": float(np.mean(success)), "eval_success": success}

    def save(self) -> None:
        """Write a checkpoint: the policy directory, and what training needs beside it."""
        policy = self.deployed()

        def fill(directory: Path) -> None:
            for part in (policy.policy, policy.preprocessor, policy.postprocessor):
                part.save_pretrained(directory / ckpt.PRETRAINED)
            self.fill(directory)

        state = {"env_steps": self.env_steps} | self.facts()
        ckpt.commit(self.run_dir / "checkpoints", self.iteration, fill, state, self.method.keep)

    def plot(self) -> None:
        """Draw the learning curve."""
        from matplotlib.figure import Figure

        records = [json.loads(line) for line in (self.run_dir / METRICS).read_text().splitlines()]
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.add_subplot()
        rolled = [x for x in records if "rollout" in x]
        evaluated = [x for x in records if "eval" in x]
        axes.plot(*_xy(rolled, "rollout"), color="#56b4e9", linewidth=1, label="rollouts, with noise")
        x, y = _xy(evaluated, "eval")
        bounds = [success_interval(sum(e["eval_success"]), len(e["eval_success"])).interval for e in evaluated]
        axes.fill_between(x, [100 * b[0] for b in bounds], [100 * b[1] for b in bounds], color="#0072b2", alpha=0.2)
        axes.plot(x, y, "o-", color="#0072b2", label="evaluation, without; 95 % interval")
        axes.set(xlabel="environment steps", ylabel="success, %", ylim=(0, 100), title=self.recipe.task.id)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        figure.savefig(self.run_dir / CURVE, dpi=110)

    def _check_finite(self, metrics: dict[str, float]) -> None:
        bad = [k for k in ("loss", "value_loss", "td", "grad_norm") if not math.isfinite(metrics.get(k, 0.0))]
        bad += [f"the weight {k}" for k, p in self.networks() if not bool(p.isfinite().all())]
        if bad:
            raise UserError(
                f"{bad[0]} is not finite after {self.iteration} good iterations, nothing of it was saved",
                "lower the method's learning rates and resume; after none, look at the policy to start from",
            )

    def _seeds(self, iteration: int) -> list[int]:
        entropy = np.random.SeedSequence((self.recipe.seed, iteration))
        return [int(s) >> 1 for s in entropy.generate_state(self.method.episodes)]

    def _generator(self, purpose: str, iteration: int) -> torch.Generator:
        words = np.random.SeedSequence((self.recipe.seed, iteration, *purpose.encode())).generate_state(2)
        return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)

    def _record(self, values: dict[str, Any]) -> None:
        record = {"step": self.iteration, "env_steps": self.env_steps, **values}
        with (self.run_dir / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        keys = ("rollout", "eval", "kl", "explained", "td", "q", "entropy", "rollout_s", "update_s")
        text = "  ".join(f"{k} {values[k]:.3g}" for k in keys if k in values)
        print(f"iteration {self.iteration}/{self.method.iterations}  {self.env_steps} steps  {text}", flush=True)


def start_of(policy: str) -> Path:
    """Directory of the policy to start from; says what makes one where there is none."""
    try:
        return resolve_policy(policy)
    except UserError as e:
        remedy = f"train one first: vla train rl_start, whose header has the whole line; or {e.remedy}"
        raise UserError(e.message, remedy) from None


def _xy(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [x["env_steps"] for x in records], [100 * x[key] for x in records]
