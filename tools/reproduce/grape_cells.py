"""Runs one cell of ``grape.py``: the policy that a seed begins with, or one arm of that seed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import sim
from vla_stack.data.layout import INFO, read_info
from vla_stack.data.preferences import ROLLOUTS
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.envs.making import observe
from vla_stack.evaluation.constraints.score import Weights
from vla_stack.methods.grape.loop import GrapeLoop
from vla_stack.methods.grape.recipe import Grape, PairRecipe
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.methods.iterations import RECORD
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import DataRecipe, EvalRecipe, PolicyRecipe, Recipe, TaskRecipe
from vla_stack.training.train import train

ROOT = Path(__file__).resolve().parent.parent.parent
TASK = "obstacle"
OBJECTIVES = ("success", "safety", "efficiency")
SEEING, IMAGE_SIZE = "generalist", 128  # the policy that a seed begins with where it sees pictures, and their size
NOISE = 0.6  # that chunks begin with: as it ships, with less, it does much the same in all tries
WEIGHTS = {"success": Weights(0.01, 1.0, 2.0), "safety": Weights(0.01, 4.0, 2.0), "efficiency": Weights(0.01, 4.0, 2.0)}
ANCHORS = {"proximal": 1.0, "sft": 10.0}
PACE = (1.0, 0.5)  # of demonstrators, which no observation says, as it does not say how high they pass


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; the defaults are the one that is reported.

    Attributes:
        demos: Demonstrations that a seed's policy is trained on.
        sft_steps: Updates of that training: few, so that there is something to improve.
        starts: Starts that are rolled out.
        rollouts: Rollouts from each.
        iterations: Iterations of an arm.
        updates: Updates of an iteration.
        batch: Pairs an update.
        lr: Of these updates.
        beta: Of the preference loss. On a seed that is not reported 20 updates without anchors opened a gap of 1 (beta
            0.7) and raised the error of winners by a third; a larger one keeps closer to the reference.
        episodes: Held-out starts.
        width: Of the policy.
        execute: Actions executed of a chunk of 8.
        num_envs: Episodes at a time.
        half_trained: The policy succeeds now and then; where it never does, all arms pair best with worst.
        images: From pictures and sentences: a seed's policy is the generalist, trained further on the demonstrations.
        above: Metres that the tool of one or another demonstrator passes above the wall. The generalist knows how it
            is done well: it takes worse ones than a policy without training does to come to a success of one half.
    """

    demos: int = 120
    sft_steps: int = 250
    starts: int = 64
    rollouts: int = 8
    iterations: int = 1
    updates: int = 80
    batch: int = 8
    lr: float = 1e-4
    beta: float = 5.0
    episodes: int = 300
    width: int = 64
    execute: int = 4
    num_envs: int = 16
    half_trained: bool = True
    images: bool = False
    above: tuple[float, ...] = (0.035, 0.0, -0.02)


IMAGES = Settings(images=True, episodes=200, above=(0.035, -0.01, -0.03))
TINY = {"demos": 4, "sft_steps": 3, "starts": 2, "rollouts": 3, "updates": 2, "batch": 2, "episodes": 3, "width": 16}
TINY |= {"num_envs": 3, "half_trained": False}


@dataclass(frozen=True)
class Arm:
    """What an arm changes: which pairs, what is minimised."""

    about: str
    objective: str = "success"
    how: str = "best_worst"
    method: tuple[tuple[str, float], ...] = ()


ARMS = {
    "filtered": Arm("SFT continued on successes", how="success", method=(("preference", 0.0), ("sft", 1.0))),
    **{f"grape-{o}": Arm(f"GRAPE, {o}", o, method=tuple(ANCHORS.items())) for o in OBJECTIVES},
    "random": Arm("random success and failure", how="random", method=tuple(ANCHORS.items())),
    **{f"tpo-{o}": Arm(f"TPO without anchors, {o}", o) for o in OBJECTIVES},
    "shuffled": Arm("best and worst, sides by chance", how="shuffled", method=tuple(ANCHORS.items())),
}
ORDER = (("filtered", "grape-safety", "grape-success", "grape-efficiency"), ("random",), ("tpo-safety",),
         ("tpo-success", "tpo-efficiency"), ("shuffled",))  # fmt: skip


def over_the_wall(task: Any, expert: Any, above: float) -> Callable[[], NDArray[np.float32]]:
    """A demonstrator who passes so many metres above the wall."""
    task.above = above
    return expert.act  # type: ignore[no-any-return]


def too_late(task: Any, expert: Any, seconds: float) -> Callable[[], NDArray[np.float32]]:
    """A demonstrator who reaches for where a moving object was so many seconds before it has it."""

    def act() -> NDArray[np.float32]:
        goal, held = task.expert_goal(), task.grasped(task.target)
        behind = 0.0 if held else seconds * task.data.joint(task.target).qvel[:3] * [0.0, 1.0, 0.0]
        return expert.towards(goal.position - behind, goal.yaw, goal.gripper)  # type: ignore[no-any-return]

    return act


FLAWS = {TASK: over_the_wall, "conveyor": too_late}


def demonstrate(settings: Settings, root: Path, name: str = TASK) -> None:
    """Record demonstrations of mixed quality: some brush the wall, some are slow. Continues what is there.

    Args:
        settings: ``above`` is what one or another demonstrator does, in the unit of the task's flaw.
        root: Of the dataset.
        name: Task.
    """
    observed: dict[str, Any] = {"image_size": IMAGE_SIZE} if settings.images else {"cameras": (), "privileged": True}
    env = gym.make(sim.TASKS[name].id, **observed, disable_env_checker=True)
    task: Any = env.unwrapped
    robot = task.spec_robot
    have = read_info(root)["total_episodes"] if (root / INFO).exists() else 0
    with EpisodeRecorder(root, robot, image_mode="image") as recorder:
        attempt = 0
        while recorder.num_episodes < settings.demos:
            attempt += 1
            rng = np.random.default_rng((7, attempt))
            flaw, pace = float(rng.choice(settings.above)), float(rng.choice(PACE))
            raw, info = env.reset(seed=2_000_000 + attempt)
            expert: Any = sim.make_expert(task, noise=0.3, seed=attempt)
            act = FLAWS[name](task, expert, flaw)
            frames, ended, k = [], False, 0
            while not ended:
                action, last = act(), task.tool_command
                action[:4] = last[:4] + pace * (action[:4] - last[:4])
                frames.append((observe(raw, robot, task.task, k), action))
                raw, _, terminated, truncated, info = env.step(expert.perturb(action))
                ended, k = bool(terminated or truncated), k + 1
            if not info["is_success"]:
                continue
            if have:  # recorded by an earlier run
                have -= 1
                continue
            for observation, action in frames:
                recorder.add_frame(observation, action)
            recorder.save_episode(True)
    env.close()


def start_policy(settings: Settings, seed: int, out: Path) -> Path:
    """The run whose policy a seed begins with: imitation, cut short; trained where that is missing."""
    demos, run = out / "demos", out / f"sft-seed{seed}"
    w = settings.width
    small = {"chunk_size": 8, "n_action_steps": settings.execute, "num_inference_steps": 4, "depth": 2, "width": w,
             "expert_width": w, "heads": 2, "head_dim": w // 2, "max_tokens": 12, "vocabulary": 320}  # fmt: skip
    start = (
        PolicyRecipe("vla", SEEING, {"noise_scale": NOISE}) if settings.images else PolicyRecipe("vla", options=small)
    )
    lr = {"lr": 1e-3, "backbone_lr_scale": 0.1} if settings.images else {"lr": 2e-3}
    plan = Recipe(
        name=run.name,
        policy=start,
        method=Imitation(
            draws=1 if settings.images else 2,
            optimizer=OptimizerRecipe(**lr, warmup_steps=min(30, settings.sft_steps - 1), final_lr_ratio=0.05),
            steps=settings.sft_steps,
            ema=0.98,
            log_every=50,
            save_every=settings.sft_steps,
            keep=1,
        ),
        data=DataRecipe(root=(str(demos),)),
        precision="auto",
        seed=seed,
        threads=1,
    )
    checkpoint = run / "checkpoints" / "last"
    if not checkpoint.exists():
        train(plan, plan.method.loss(), run)
    return run


def recipe(settings: Settings, name: str, seed: int, policy: Path) -> Recipe:
    """The loop of an arm and seed."""
    arm, s = ARMS[name], settings
    method = Grape(
        **{"draws": 4, **dict(arm.method)},  # type: ignore[arg-type]
        optimizer=OptimizerRecipe(lr=s.lr, weight_decay=0.0, warmup_steps=min(5, s.updates - 1), final_lr_ratio=0.1),
        steps=s.updates,
        batch_size=s.batch,
        log_every=10,
        save_every=s.updates,
        keep=1,
        constraints=str(ROOT / "vla_stack" / "configs" / "constraints" / f"{TASK}.yaml"),
        objective=arm.objective,  # type: ignore[arg-type]
        weights=WEIGHTS[arm.objective],
        pairs=PairRecipe(arm.how, winner_succeeds=True) if s.half_trained else PairRecipe(),  # type: ignore[arg-type]
        iterations=s.iterations,
        starts=s.starts,
        rollouts_per_start=s.rollouts,
        start_seed=100_000 + 10_000 * seed,
        num_envs=s.num_envs,
        execute=s.execute,
        beta=s.beta,
        calibration=20,
        films=0,
    )
    return Recipe(
        name=name,
        task=TaskRecipe(sim.TASKS[TASK].id),
        policy=PolicyRecipe(pretrained=str(policy)),
        method=method,
        eval=EvalRecipe(episodes=s.episodes, seed=900_000, num_envs=s.num_envs),
        precision="auto",
        seed=seed,
        threads=1,
    )


def run_base(settings: Settings, seed: int, out: Path) -> None:
    """Evaluate the policy that a seed begins with, and roll it out: all arms of the seed share these rollouts."""
    base = out / f"base-seed{seed}"
    loop = GrapeLoop(recipe(settings, "grape-success", seed, start_policy(settings, seed, out)), base)
    if not loop.folder.records():
        GrapeLoop(replace(loop.recipe, method=replace(loop.method, iterations=0)), base).run()
    loop.roll_out(1)


def run_cell(settings: Settings, name: str, seed: int, out: Path) -> None:
    """All iterations of an arm on a seed, from where an earlier run stopped."""
    base, run = out / f"base-seed{seed}", out / f"{name}-seed{seed}"
    if not run.exists():
        shutil.rmtree(partial := run.with_name(f"{run.name}.partial"), ignore_errors=True)
        (partial / "iteration-000").mkdir(parents=True)
        shutil.copy(base / "iteration-000" / RECORD, partial / "iteration-000" / RECORD)
        (partial / "iteration-001" / ROLLOUTS).mkdir(parents=True)
        for rollout in (base / "iteration-001" / ROLLOUTS).glob("*.safetensors"):
            os.link(rollout, partial / "iteration-001" / ROLLOUTS / rollout.name)
        partial.rename(run)
    GrapeLoop(recipe(settings, name, seed, out / f"sft-seed{seed}"), run).run()
