"""ReinFlow from a trained policy: roll out with a noisy chain, update, evaluate without the noise; again and again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vla_stack import envs
from vla_stack.envs.making import observe as observation_of
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.advantages import Experience
from vla_stack.methods.practice import judged, simulated
from vla_stack.methods.reinflow.loss import Learner, observe
from vla_stack.methods.reinflow.rollouts import FINAL, Explorer, FinalObservation
from vla_stack.policies.anatomy import is_flow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.device import find_device
from vla_stack.policies.shipped import resolve_policy
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import Engine
from vla_stack.rollout.plan import Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import wilson
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.log import truncate
from vla_stack.training.placement import use_threads
from vla_stack.training.recipe import Recipe

if TYPE_CHECKING:
    from vla_stack.methods.reinflow.recipe import ReinFlow

EXECUTOR = ExecutorConfig(mode="sync")  # whole chunks, as the likelihood counts them
WEIGHTS = f"{ckpt.STATE}/learner.safetensors"
METRICS, CURVE = "metrics.jsonl", "curve.png"


class ReinFlowLoop:
    """One run, continued from its last checkpoint where it has one.

    Args:
        recipe: The run.
        run_dir: Where it lies.

    Raises:
        UserError: There is no policy, it is no flow policy, or it does not fit the environment.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        use_threads(recipe.threads)
        self.recipe, self.run_dir = recipe, run_dir
        self.method: ReinFlow = recipe.method
        self.policy = load_policy(_start(recipe.policy.pretrained), str(find_device(recipe.device)))
        network = self.policy.policy
        if not is_flow(network):
            raise UserError(f"{recipe.policy.pretrained} is no flow policy", "train one with head=flow")
        config = base_config(network.config)
        steps = "num_steps" if hasattr(config, "num_steps") else "num_inference_steps"
        setattr(config, steps, self.method.denoising_steps)  # what the saved policy will be served with
        assert network.inference_steps == self.method.denoising_steps
        practised = judged(recipe.task.id, self.method.judge)
        options = envs.options_for(practised, self.policy.spec, recipe.task.options)
        self.plan = Plan(practised, options, self.policy.spec, PolicyAgent, {FINAL: FinalObservation}, EXECUTOR)
        one = envs.make(practised, 1, self.policy.spec, options)
        raw, *_, info = one.reset([0], [0])[0]
        one.close()
        first = self.policy.preprocess([observation_of(raw, self.policy.spec.robot, info["task"], 0)])
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.learner = Learner(network, observe(network, first)[1].shape[-1], self.method).to(network.config.device)
        self.explorer = Explorer(self.policy, self.learner)
        self._engine: Engine | None = None
        self.iteration = self.env_steps = 0
        if (saved := ckpt.latest(run_dir / "checkpoints")) is not None:
            self._load(saved)
        truncate(run_dir / METRICS, self.iteration or -1)  # the start is evaluated, and recorded, until it is left

    def run(self) -> Path:
        """Do the iterations that are missing; returns the last checkpoint.

        Raises:
            UserError: A loss, a gradient or a weight is not finite; the last checkpoint stays what it was.
        """
        r, every = self.method, self.recipe.eval.every
        if self.iteration == 0:
            self._check_finite({})
            self._record(self.evaluate())
            self.save()
        while self.iteration < r.iterations:
            began = time.monotonic()
            self.learner.schedule(self.iteration / r.iterations)
            generator = self._generator("rollout", self.iteration)
            data = self.practise(self._seeds(self.iteration))
            rolled = time.monotonic()
            metrics = self.update(data, generator)
            self._check_finite(metrics)
            self.iteration, self.env_steps = self.iteration + 1, self.env_steps + data.steps
            last = self.iteration == r.iterations
            values = {"rollout": float(data.success.float().mean()), "decisions": len(data.executed), **metrics}
            seconds = {"rollout_s": round(rolled - began, 2), "update_s": round(time.monotonic() - rolled, 2)}
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

    def update(self, data: Experience, generator: torch.Generator) -> dict[str, float]:
        """Learn from an iteration's episodes."""
        return self.learner.update(data, generator, self.iteration < self.method.critic_warmup)

    def practise(self, seeds: Sequence[int]) -> Experience:
        """One episode a seed with the chain's noise, in the order of the seeds."""
        r, order = self.method, {seed: i for i, seed in enumerate(seeds)}
        if self._engine is None:
            self._engine = Engine(self.plan, r.num_envs, r.workers, r.rollouts)
        found = self._engine.run(self.explorer, [Start(s) for s in seeds])
        return self.explorer.experience(sorted(found, key=lambda record: order[record.seed]), r.reward)

    def evaluate(self) -> dict[str, Any]:
        """Success of the policy as it would be deployed: what ``vla eval --mode sync`` says of its directory.

        Where a world model judges or imagines the task, success is the task's own.
        """
        task, e = simulated(self.recipe.task), self.recipe.eval
        result = evaluate(
            self.policy,
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
        """Write a checkpoint: the policy directory without the noise, and what training needs beside it."""

        def fill(directory: Path) -> None:
            for part in (self.policy.policy, self.policy.preprocessor, self.policy.postprocessor):
                part.save_pretrained(directory / ckpt.PRETRAINED)
            tensors = {k: p.detach().contiguous() for k, p in self.learner.named_parameters() if not k.startswith("_")}
            save_file(tensors, directory / WEIGHTS)
            ckpt.save_state(directory, self.learner, self.learner.optimizer, None)

        state = {"env_steps": self.env_steps}
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
        bounds = [wilson(sum(e["eval_success"]), len(e["eval_success"])) for e in evaluated]
        axes.fill_between(x, [100 * b[0] for b in bounds], [100 * b[1] for b in bounds], color="#0072b2", alpha=0.2)
        axes.plot(x, y, "o-", color="#0072b2", label="evaluation, without; 95 % interval")
        axes.set(xlabel="environment steps", ylabel="success, %", ylim=(0, 100), title=self.recipe.task.id)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        figure.savefig(self.run_dir / CURVE, dpi=110)

    def _load(self, saved: Path) -> None:
        state = ckpt.load_state(saved, self.learner, self.learner.optimizer, None)
        weights = load_file(saved / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self.learner.named_parameters():
                parameter.copy_(weights[name])
        self.iteration, self.env_steps = state["step"], state["env_steps"]

    def _check_finite(self, metrics: dict[str, float]) -> None:
        bad = [k for k in ("loss", "value_loss", "grad_norm") if not math.isfinite(metrics.get(k, 0.0))]
        bad += [f"the weight {k}" for k, p in self.learner.named_parameters() if not bool(p.isfinite().all())]
        if bad:
            raise UserError(
                f"{bad[0]} is not finite after {self.iteration} good iterations, nothing of it was saved",
                "lower method.actor_lr or method.critic_lr and resume; after none, look at the policy to start from",
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
        shown = {k: values[k] for k in ("rollout", "eval", "kl", "explained", "rollout_s", "update_s") if k in values}
        text = "  ".join(f"{k} {v:.3g}" for k, v in shown.items())
        print(f"iteration {self.iteration}/{self.method.iterations}  {self.env_steps} steps  {text}", flush=True)


def _start(policy: str) -> Path:
    """Directory of the policy to start from; says what makes one where there is none."""
    try:
        return resolve_policy(policy)
    except UserError as e:
        remedy = f"train one first: vla train rl_start, whose header has the whole line; or {e.remedy}"
        raise UserError(e.message, remedy) from None


def _xy(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [x["env_steps"] for x in records], [100 * x[key] for x in records]
