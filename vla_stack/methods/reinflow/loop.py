"""ReinFlow from a trained policy: roll out with a noisy chain, update, evaluate without the noise; again and again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vla_stack import envs
from vla_stack.envs.making import observe as observation_of
from vla_stack.envs.state_env import EnvRecipe
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.advantages import Experience
from vla_stack.methods.reinflow.loss import Learner, ReinFlowConfig, observe
from vla_stack.methods.reinflow.rollouts import FINAL, Explorer, FinalObservation, Reward
from vla_stack.policies.anatomy import is_flow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.shipped import resolve_policy
from vla_stack.ray_cluster import Where
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import Engine
from vla_stack.rollout.plan import Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import wilson
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.log import truncate

EXECUTOR = ExecutorConfig(mode="sync")  # whole chunks, as the likelihood counts them
WEIGHTS = f"{ckpt.STATE}/learner.safetensors"
METRICS, CURVE = "metrics.jsonl", "curve.png"


@dataclass(frozen=True)
class ReinFlowRecipe:
    """A run.

    Attributes:
        loop: ``reinflow``: which loop of ``vla_stack.rounds`` this is.
        name: Of the run.
        policy: Policy to start from, a flow policy: directory, run, or shipped policy.
        env: gymnasium id, a benchmark's task, or ``imagined:`` and the run of a world model; what that imagines is
            evaluated on.
        env_options: Further keyword arguments of the environment, e.g. ``{max_episode_steps: 200}``.
        reward: ``success``: 1 at success, else 0; ``task``: the environment's own.
        judge: Directory of a world model whose judges say what success is in training; evaluations ask the task.
        method: Options of ReinFlow.
        iterations: Rounds of rollouts and update.
        episodes: Episodes an iteration.
        num_envs: Episodes that run at the same time.
        workers: Processes, or actors, that hold the environments; 0 keeps them in this one.
        rollouts: Where the workers are: ``local`` processes, or ``ray``.
        eval_every: Iterations between evaluations.
        eval_episodes: Episodes of an evaluation, on the same seeds every time.
        eval_seed: Seed of the first of them.
        save_every: Iterations between checkpoints.
        keep: Checkpoints kept.
        seed: Of scenes and noise in training, and of what is new in the network.
        device: Torch device.
        threads: CPU threads.
        output_dir: Run directory; empty makes ``outputs/rounds/<name>-<time>``.
    """

    loop: Literal["reinflow"] = "reinflow"
    name: str = "reinflow"
    policy: str = ""
    env: str = "sim/place-v0"
    env_options: dict[str, Any] = field(default_factory=dict)
    reward: Reward = "success"
    judge: str = ""
    method: ReinFlowConfig = field(default_factory=ReinFlowConfig)
    iterations: int = 60
    episodes: int = 48
    num_envs: int = 16
    workers: int = 0
    rollouts: Where = "local"
    eval_every: int = 10
    eval_episodes: int = 100
    eval_seed: int = 900_000
    save_every: int = 5
    keep: int = 1
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    output_dir: str = ""


class ReinFlowLoop:
    """One run, continued from its last checkpoint where it has one.

    Args:
        recipe: The run.
        run_dir: Where it lies.

    Raises:
        UserError: A value is out of range, there is no policy, it is no flow policy, or it does not fit the
            environment.
    """

    def __init__(self, recipe: ReinFlowRecipe, run_dir: Path) -> None:
        _check(recipe)
        torch.set_num_threads(recipe.threads)
        self.recipe, self.run_dir = recipe, run_dir
        self.policy = load_policy(_start(recipe.policy), recipe.device)
        network = self.policy.policy
        if not is_flow(network):
            raise UserError(f"{recipe.policy} is no flow policy", "train one with head=flow")
        config = base_config(network.config)
        steps = "num_steps" if hasattr(config, "num_steps") else "num_inference_steps"
        setattr(config, steps, recipe.method.denoising_steps)  # what the saved policy will be served with
        assert network.inference_steps == recipe.method.denoising_steps
        practised = f"judged:{recipe.judge}@{recipe.env}" if recipe.judge else recipe.env
        options = envs.options_for(practised, self.policy.spec, recipe.env_options)
        self.plan = Plan(practised, options, self.policy.spec, PolicyAgent, {FINAL: FinalObservation}, EXECUTOR)
        one = envs.make(practised, 1, self.policy.spec, options)
        raw, *_, info = one.reset([0], [0])[0]
        one.close()
        first = self.policy.preprocess([observation_of(raw, self.policy.spec.robot, info["task"], 0)])
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.learner = Learner(network, observe(network, first)[1].shape[-1], recipe.method).to(
                network.config.device
            )
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
        r = self.recipe
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
            evaluating = last or self.iteration % r.eval_every == 0
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
        return self.learner.update(data, generator, self.iteration < self.recipe.method.critic_warmup)

    def practise(self, seeds: Sequence[int]) -> Experience:
        """One episode a seed with the chain's noise, in the order of the seeds."""
        r, order = self.recipe, {seed: i for i, seed in enumerate(seeds)}
        if self._engine is None:
            self._engine = Engine(self.plan, r.num_envs, r.workers, r.rollouts)
        found = self._engine.run(self.explorer, [Start(s) for s in seeds])
        return self.explorer.experience(sorted(found, key=lambda record: order[record.seed]), r.reward)

    def evaluate(self) -> dict[str, Any]:
        """Success of the policy as it would be deployed: what ``vla eval --mode sync`` says of its directory.

        Where a world model judges or imagines the task, success is the task's own.
        """
        r = self.recipe
        result = evaluate(
            self.policy,
            EnvRecipe(r.env).real().id,
            r.eval_episodes,
            r.eval_seed,
            EXECUTOR,
            num_envs=r.num_envs,
            workers=r.workers,
            rollouts=r.rollouts,
            env_options={} if EnvRecipe(r.env).imagined else r.env_options,
        )
        success = [int(e.success) for e in result.episodes]
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
        ckpt.commit(self.run_dir / "checkpoints", self.iteration, fill, state, self.recipe.keep)

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
        axes.set(xlabel="environment steps", ylabel="success, %", ylim=(0, 100), title=self.recipe.env)
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
        return [int(s) >> 1 for s in entropy.generate_state(self.recipe.episodes)]

    def _generator(self, purpose: str, iteration: int) -> torch.Generator:
        words = np.random.SeedSequence((self.recipe.seed, iteration, *purpose.encode())).generate_state(2)
        return torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)

    def _record(self, values: dict[str, Any]) -> None:
        record = {"step": self.iteration, "env_steps": self.env_steps, **values}
        with (self.run_dir / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = {k: values[k] for k in ("rollout", "eval", "kl", "explained", "rollout_s", "update_s") if k in values}
        text = "  ".join(f"{k} {v:.3g}" for k, v in shown.items())
        print(f"iteration {self.iteration}/{self.recipe.iterations}  {self.env_steps} steps  {text}", flush=True)


def _check(r: ReinFlowRecipe) -> None:
    """Refuse what would fail later, or never and teach nothing; raises :class:`UserError`."""
    m = r.method
    ones = ("episodes", "num_envs", "eval_every", "eval_episodes", "save_every", "keep", "threads")
    least: dict[str, tuple[float, float]] = {key: (getattr(r, key), 1) for key in ones}
    least |= {key: (getattr(r, key), 0) for key in ("iterations", "seed", "eval_seed")}
    least |= {f"method.{key}": (getattr(m, key), 1) for key in ("denoising_steps", "epochs", "value_width")}
    least |= {"method.minibatch": (m.minibatch, 2)}  # gains are normalised over it
    least |= {f"method.{key}": (getattr(m, key), 0) for key in ("critic_warmup", "entropy", "bc")}
    for key, (value, bound) in least.items():
        if not value >= bound:
            raise UserError(f"'{key}' is {value}, expected at least {bound}", f"set {key}={bound} or more")
    defaults = ReinFlowConfig()
    for key in ("sigma_low", "limit", "clip", "actor_lr", "critic_lr", "target_kl", "clip_norm"):
        if not getattr(m, key) > 0.0:
            raise UserError(
                f"'method.{key}' is {getattr(m, key)}, expected more than 0",
                f"for example method.{key}={getattr(defaults, key)}",
            )
    if r.judge and EnvRecipe(r.env).imagined:
        raise UserError(f"env={r.env} has judges of its own", "leave 'judge' out")
    if not m.sigma_high >= m.sigma_low:
        raise UserError(
            f"'method.sigma_high' is {m.sigma_high}, expected at least method.sigma_low, {m.sigma_low}",
            f"set method.sigma_high={m.sigma_low} or more, or a lower method.sigma_low",
        )
    if not 0.0 < m.gamma <= 1.0:
        raise UserError(
            f"'method.gamma' is {m.gamma}, expected a discount in (0, 1]", f"for example method.gamma={defaults.gamma}"
        )
    if not 0.0 <= m.decay <= 1.0:
        raise UserError(
            f"'method.decay' is {m.decay}, expected a number in [0, 1]", f"for example method.decay={defaults.decay}"
        )
    if r.judge and r.reward == "task":
        raise UserError("'judge' says what success is, reward=task pays none", "set reward=success")
    if not r.policy:
        raise UserError("'policy' is missing", "give policy=DIR, a trained policy to start from")


def _start(policy: str) -> Path:
    """Directory of the policy to start from; says what makes one where there is none."""
    try:
        return resolve_policy(policy)
    except UserError as e:
        remedy = f"train one first: vla train configs/rl_start.yaml, whose header has the whole line; or {e.remedy}"
        raise UserError(e.message, remedy) from None


def _xy(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [x["env_steps"] for x in records], [100 * x[key] for x in records]


def main(recipe: ReinFlowRecipe, run_dir: Path) -> None:
    """``vla train`` of a recipe with ``loop: reinflow``."""
    policy = ReinFlowLoop(recipe, run_dir).run() / ckpt.PRETRAINED
    env = EnvRecipe(recipe.env).real().id
    print(f"curve: {run_dir / CURVE}; try it: vla eval --policy {policy} --env {env} --mode sync")


RECIPE = ReinFlowRecipe
