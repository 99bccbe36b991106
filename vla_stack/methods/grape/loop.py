"""GRAPE: roll out, judge by constraints, pair best against worst of the same start, train, evaluate; round after round.

Zhang et al., arXiv:2411.19309, algorithm 1. Round 0 evaluates the policy that is to be aligned. Round k rolls the
policy of round k-1 out several times from each start, scores the rollouts (its own likelihood, the constraints of the
task under an objective, success), makes pairs and trains on them against that policy as the frozen reference. Every
step finds what a stopped run left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from vla_stack.data.preferences import (
    PAIRS,
    Facts,
    Scored,
    make_pairs,
    read_pairs,
    read_rollout,
    rollout_files,
    rollout_path,
    write_preferences,
    write_rollout,
)
from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.score import Weights, judge
from vla_stack.evaluation.constraints.spec import load_spec
from vla_stack.evaluation.constraints.trace import Trace
from vla_stack.methods.grape.pair_training import calibrate, self_scores, train_on_pairs
from vla_stack.methods.grape.rollouts import Sampler, roll_out
from vla_stack.methods.iterations import RoundFolder, table
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.device import find_device
from vla_stack.policies.shipped import resolve_policy
from vla_stack.rollout.plan import Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.training.checkpoint import PRETRAINED
from vla_stack.training.recipe import Recipe

COLUMNS = {
    "round": "{round}",
    "pairs": "{pairs}",
    "beta": "{beta:.3g}",
    "success": "{success_rate:.0%}",
    "collisions": "{collision_rate:.0%}",
    "steps": "{mean_steps:.1f}",
}


@dataclass(frozen=True)
class PairRecipe:
    """Which rollouts become pairs; see ``data.preferences.make_pairs``."""

    how: Literal["best_worst", "random", "shuffled", "success"] = "best_worst"
    m: int = 1
    delta: float = 0.0
    winner_succeeds: bool = False


@dataclass(frozen=True)
class GrapeRecipe:
    """A run of rounds.

    Attributes:
        loop: ``grape``: which loop of ``vla_stack.rounds`` this is.
        name: Of the run.
        policy: Policy to align: directory, run, or shipped policy.
        env: Environment of ``sim``.
        constraints: YAML file, see ``vla constraints``.
        objective: Preset of weights and thresholds: ``success``, ``safety`` or ``efficiency``.
        weights: Of the score's terms.
        pairs: Which rollouts become pairs.
        rounds: Rounds after round 0.
        starts: Starts that are rolled out in each round.
        rollouts: Rollouts from each start.
        start_seed: Seed of the first start; every round has starts of its own.
        execute: Actions executed of each chunk; null leaves it to the policy.
        beta: 0 calibrates it in round 1 with ``calibration`` updates.
        calibration: See there.
        sigma: Noise that is injected after each step of the flow's sampler in rollouts, whose chains are then kept and
            scored exactly; 0 rolls out as deployed and scores by the surrogate.
        episodes: Episodes of each evaluation.
        eval_seed: Seed of the first of them, the same in every round.
        num_envs: Episodes that run at the same time.
        films: Starts that the report shows before and after.
        seed: Of pairs and training.
        train: How each round trains; ``batch_size`` counts pairs.
        output_dir: Run directory; empty makes ``outputs/rounds/<name>-<time>``.
    """

    loop: Literal["grape"] = "grape"
    name: str = "grape"
    policy: str = "shipped"
    env: str = "sim/obstacle-v0"
    constraints: str = "configs/constraints/obstacle.yaml"
    objective: Literal["success", "safety", "efficiency"] = "success"
    weights: Weights = field(default_factory=Weights)
    pairs: PairRecipe = field(default_factory=PairRecipe)
    rounds: int = 3
    starts: int = 64
    rollouts: int = 8
    start_seed: int = 100_000
    execute: int | None = None
    beta: float = 0.0
    calibration: int = 40
    sigma: float = 0.0
    episodes: int = 100
    eval_seed: int = 900_000
    num_envs: int = 16
    films: int = 3
    seed: int = 0
    train: Recipe = field(default_factory=Recipe)
    output_dir: str = ""


class GrapeLoop:
    """One run; every step of it finds what an earlier, stopped run has left.

    The policy rolls out where it is trained, on ``train.device``; its own likelihood of rollouts (``weights.self``) is
    computed on the CPU, for scores that do not hang on the device.

    Args:
        recipe: The run.
        run_dir: Where it lies: ``round-k/`` holds rollouts, scores, pairs, training and record.

    Raises:
        UserError: There is no such policy or device, the constraints cannot be read, or evaluation and training share
            a start.
    """

    def __init__(self, recipe: GrapeRecipe, run_dir: Path) -> None:
        self.recipe, self.folder = recipe, RoundFolder(run_dir)
        self.spec = load_spec(Path(recipe.constraints)).with_objective(recipe.objective)
        self.start = resolve_policy(recipe.policy)
        self.device = find_device(recipe.train.device)
        trained_on = range(recipe.start_seed, recipe.start_seed + recipe.starts * max(1, recipe.rounds))
        measured_on = range(recipe.eval_seed, recipe.eval_seed + recipe.episodes)
        if shared := range(max(trained_on.start, measured_on.start), min(trained_on.stop, measured_on.stop)):
            raise UserError(
                f"'eval_seed' {recipe.eval_seed} evaluates on {len(shared)} of the starts, {shared[0]} to {shared[-1]}",
                "choose another eval_seed",
            )
        self.executor = ExecutorConfig(mode="sync", execute=recipe.execute)

    def run(self) -> list[dict[str, Any]]:
        """Do the rounds that are missing; returns all records."""
        while (k := len(records := self.folder.records())) <= self.recipe.rounds:
            about: dict[str, Any] = {"pairs": 0, "beta": 0.0}
            if k:
                self.roll_out(k)
                about = self.judge(k) | self.train(k)
            self.folder.finish(k, about | outcome(self.evaluate(self.policy_dir(k))))
            print(table(self.folder.records(), COLUMNS), flush=True)
        return records

    def policy_dir(self, k: int) -> Path:
        """Policy of round ``k``; round 0 has the one that is to be aligned."""
        if k == 0:
            return self.start
        checkpoints = self.folder.path(k) / "train" / "checkpoints"
        return checkpoints / str((checkpoints / "last").readlink()) / PRETRAINED

    # Steps of a round -----------------------------------------------------------------------------------------------

    def roll_out(self, k: int) -> None:
        """Roll the policy of the round before out, as far as that is missing."""
        r, root = self.recipe, self.folder.path(k)
        first = r.start_seed + (k - 1) * r.starts
        every = [Start(first + i, n) for i in range(r.starts) for n in range(r.rollouts)]
        missing = [start for start in every if not rollout_path(root, *start).is_file()]
        if not missing:
            return
        sampler = Sampler(self.load(self.policy_dir(k - 1)), r.sigma)
        with tqdm(total=len(every), initial=len(every) - len(missing), desc=f"round {k}", unit=" rollouts") as bar:
            for rollout, _ in roll_out(sampler, r.env, missing, self.executor, r.num_envs):
                write_rollout(root, rollout)
                bar.update()

    def judge(self, k: int) -> dict[str, Any]:
        """Score round ``k``'s rollouts and make its pairs; returns what they are like."""
        r, root = self.recipe, self.folder.path(k)
        rollouts = [read_rollout(path) for path in rollout_files(root)]
        if not (root / PAIRS).is_file():
            own = [0.0] * len(rollouts)
            if r.weights.self:
                own = self_scores(self.policy_dir(k - 1), rollouts, sigma=r.sigma or 0.1)
            scored = []
            for rollout, likelihood in zip(rollouts, own, strict=True):
                f, trace = rollout.facts, Trace.from_arrays(rollout.trace)
                j = judge(self.spec, trace, f.success, likelihood, r.weights)
                components = {"self": j.self, "external": j.external, "success": float(j.success)}
                stages = [{"name": s.name, "reached": s.reached, "ticks": s.ticks, "cost": s.cost} for s in j.stages]
                scored.append(Scored(f.id, f.task, f.seed, f.success, j.score, components, stages))
            p = r.pairs
            pairs = make_pairs(scored, p.how, p.m, p.delta, p.winner_succeeds, seed=1000 * r.seed + k)
            write_preferences(root, scored, pairs)
        facts = [rollout.facts for rollout in rollouts]
        return {
            "pairs": len(read_pairs(root)),
            "rollouts": len(facts),
            "rollout_success": float(np.mean([f.success for f in facts])),
            "rollout_collisions": float(np.mean([f.collided for f in facts])),
        }

    def train(self, k: int) -> dict[str, Any]:
        """Train on round ``k``'s pairs."""
        r, root, start = self.recipe, self.folder.path(k), self.policy_dir(k - 1)
        plan = replace(r.train, name=f"{r.name}-{k}", seed=r.seed + 1000 * k)
        if r.sigma:
            plan = replace(plan, method_options={**plan.method_options, "sigma": r.sigma})
        beta = r.beta
        if not beta and plan.method_options.get("preference", 1.0):
            beta = calibrate(plan, self.folder.path(1), self.folder.path(1) / "calibration", self.start, r.calibration)
        train_on_pairs(plan, root, root / "train", start, beta or 1.0)
        return {"beta": beta}

    def evaluate(self, policy_dir: Path, seeds: Sequence[int] = ()) -> list[tuple[Facts, EpisodeRecord]]:
        """Episodes of a policy on the evaluation's seeds, in their order."""
        return self.episodes(self.load(policy_dir), seeds)

    def episodes(self, policy: ChunkPolicy, seeds: Sequence[int] = ()) -> list[tuple[Facts, EpisodeRecord]]:
        """As :meth:`evaluate`, of a policy that is loaded already."""
        r = self.recipe
        starts = [Start(seed) for seed in seeds or range(r.eval_seed, r.eval_seed + r.episodes)]
        found = roll_out(Sampler(policy, remember=False), r.env, starts, self.executor, r.num_envs)
        return sorted(((rollout.facts, record) for rollout, record in found), key=lambda both: both[0].seed)

    def load(self, policy_dir: Path) -> ChunkPolicy:
        """A policy, where it rolls out."""
        return load_policy(policy_dir, str(self.device))


def outcome(episodes: Sequence[tuple[Facts, EpisodeRecord]]) -> dict[str, Any]:
    """What is kept of an evaluation; lists are by episode, in the order of their seeds."""
    facts = [f for f, _ in episodes]
    return {
        "success": [int(f.success) for f in facts],
        "collided": [int(f.collided) for f in facts],
        "steps": [f.steps for f in facts],
        "success_rate": float(np.mean([f.success for f in facts])),
        "collision_rate": float(np.mean([f.collided for f in facts])),
        "mean_steps": float(np.mean([f.steps for f in facts])),
    }


def main(recipe: GrapeRecipe, run_dir: Path) -> None:
    """``vla train`` of a recipe with ``loop: grape``."""
    from vla_stack.methods.grape.report import write_grape_report

    loop = GrapeLoop(recipe, run_dir)
    loop.run()
    print(f"report: {write_grape_report(loop)}")


RECIPE = GrapeRecipe
