"""GRAPE, again and again: roll out, judge by constraints, pair best against worst of a start, train, evaluate.

Zhang et al., arXiv:2411.19309, algorithm 1. Iteration 0 evaluates the policy that is to be aligned. Iteration k rolls
the policy of iteration k-1 out several times from each start, scores the rollouts (its own likelihood, the constraints
of the task under an objective, success), makes pairs and trains on them against that policy as the frozen reference.
Every step finds what a stopped run left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from vla_stack.data.layout import read_json, write_json
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
from vla_stack.evaluation.constraints.score import judge
from vla_stack.evaluation.constraints.spec import load_spec
from vla_stack.evaluation.constraints.trace import Trace
from vla_stack.methods.grape.pair_training import calibrate, self_scores, train_on_pairs
from vla_stack.methods.grape.rollouts import Sampler, roll_out
from vla_stack.methods.iterations import IterationFolder, table
from vla_stack.methods.practice import check_no_history, check_resumed
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.directory import resolve_policy
from vla_stack.policies.reading import find_device, read_config
from vla_stack.rollout.plan import Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.training.checkpoint import PRETRAINED
from vla_stack.training.recipe import Recipe

if TYPE_CHECKING:
    from vla_stack.methods.grape.recipe import Grape

COLUMNS = {
    "iteration": "{iteration}",
    "pairs": "{pairs}",
    "beta": "{beta:.3g}",
    "success": "{success_rate:.0%}",
    "collisions": "{collision_rate:.0%}",
    "steps": "{mean_steps:.1f}",
}


MADE_BY = "made_by.json"
FREE = ("iterations", "num_envs", "workers", "rollouts", "films", "micro", "log_every", "save_every", "keep", "wandb")


class GrapeLoop:
    """One run; every step of it finds what an earlier, stopped run has left.

    The policy rolls out where it is trained; its own likelihood of rollouts (``weights.self``) is
    computed on the CPU, for scores that do not hang on the device.

    Args:
        recipe: The run.
        run_dir: Where it lies: ``iteration-k/`` holds rollouts, scores, pairs, training and record.

    Raises:
        UserError: There is no such policy or device, the policy reads earlier observations, or the constraints cannot
            be read.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.recipe, self.folder = recipe, IterationFolder(run_dir)
        self.method: Grape = recipe.method
        self.spec = load_spec(Path(self.method.constraints)).with_objective(self.method.objective)
        self.start = resolve_policy(recipe.policy.pretrained)
        self.device = find_device(recipe.device)
        config = base_config(read_config(self.start, str(self.device)))
        check_no_history(recipe.policy.pretrained, getattr(config, "history_ages", ()))
        self.executor = ExecutorConfig(mode="sync", execute=self.method.execute)

    def _made_by(self) -> dict[str, Any]:
        """What rollouts, scores, pairs and policies that lie there were made by, as JSON has it."""
        recipe = self.recipe
        method = {f"method.{k}": v for k, v in asdict(self.method).items() if k not in FREE}
        about = {"task": asdict(recipe.task), "seed": recipe.seed, "policy.pretrained": recipe.policy.pretrained}
        made_by: dict[str, Any] = json.loads(json.dumps(method | about))
        return made_by

    def run(self) -> list[dict[str, Any]]:
        """Do the iterations that are missing; returns all records.

        Raises:
            UserError: Those that are there were made by other settings.
        """
        made_by, path = self._made_by(), self.folder.run_dir / MADE_BY
        if path.exists():
            check_resumed(made_by, read_json(path))
        elif not self.folder.records():  # older runs do not say
            write_json(path, made_by)
        while (k := len(records := self.folder.records())) <= self.method.iterations:
            about: dict[str, Any] = {"pairs": 0, "beta": 0.0}
            if k:
                self.roll_out(k)
                about = self.judge(k) | self.train(k)
            self.folder.finish(k, about | outcome(self.evaluate(self.policy_dir(k))))
            print(table(self.folder.records(), COLUMNS), flush=True)
        return records

    def policy_dir(self, k: int) -> Path:
        """Policy of iteration ``k``; iteration 0 has the one that is to be aligned."""
        if k == 0:
            return self.start
        checkpoints = self.folder.path(k) / "train" / "checkpoints"
        return checkpoints / str((checkpoints / "last").readlink()) / PRETRAINED

    # Steps of an iteration ------------------------------------------------------------------------------------------

    def roll_out(self, k: int) -> None:
        """Roll the policy of the iteration before out, as far as that is missing."""
        r, root = self.method, self.folder.path(k)
        first = r.start_seed + (k - 1) * r.starts
        every = [Start(first + i, n) for i in range(r.starts) for n in range(r.rollouts_per_start)]
        missing = [start for start in every if not rollout_path(root, *start).is_file()]
        if not missing:
            return
        sampler = Sampler(self.load(self.policy_dir(k - 1)), r.sigma)
        with tqdm(total=len(every), initial=len(every) - len(missing), desc=f"iteration {k}", unit=" rollouts") as bar:
            where = (r.num_envs, r.workers, r.rollouts)
            for rollout, _ in roll_out(sampler, self.recipe.task, missing, self.executor, *where):
                write_rollout(root, rollout)
                bar.update()

    def judge(self, k: int) -> dict[str, Any]:
        """Score iteration ``k``'s rollouts and make its pairs; returns what they are like."""
        r, root = self.method, self.folder.path(k)
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
            pairs = make_pairs(scored, p.how, p.m, p.delta, p.winner_succeeds, seed=1000 * self.recipe.seed + k)
            write_preferences(root, scored, pairs)
        facts = [rollout.facts for rollout in rollouts]
        return {
            "pairs": len(read_pairs(root)),
            "rollouts": len(facts),
            "rollout_success": float(np.mean([f.success for f in facts])),
            "rollout_collisions": float(np.mean([f.collided for f in facts])),
        }

    def train(self, k: int) -> dict[str, Any]:
        """Train on iteration ``k``'s pairs."""
        m, root, start = self.method, self.folder.path(k), self.policy_dir(k - 1)
        plan = replace(self.recipe, name=f"{self.recipe.name}-{k}", seed=self.recipe.seed + 1000 * k)
        beta = m.beta
        if not beta and m.preference:
            beta = calibrate(plan, self.folder.path(1), self.folder.path(1) / "calibration", self.start)
        train_on_pairs(plan, root, root / "train", start, beta or 1.0)
        return {"beta": beta}

    def evaluate(self, policy_dir: Path, seeds: Sequence[int] = ()) -> list[tuple[Facts, EpisodeRecord]]:
        """Episodes of a policy on the evaluation's seeds, in their order."""
        return self.episodes(self.load(policy_dir), seeds)

    def episodes(self, policy: ChunkPolicy, seeds: Sequence[int] = ()) -> list[tuple[Facts, EpisodeRecord]]:
        """As :meth:`evaluate`, of a policy that is loaded already."""
        e = self.recipe.eval
        starts = [Start(seed) for seed in seeds or range(e.seed, e.seed + e.episodes)]
        where = (e.num_envs, e.workers, e.rollouts)
        found = roll_out(Sampler(policy, remember=False), self.recipe.task, starts, self.executor, *where)
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
