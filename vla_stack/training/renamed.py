"""Keys and values of old recipes, each with what it is called now: they are answered by one line, and not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vla_stack.errors import UserError

SAME = (  # keys that moved into ``method`` under their own name
    *("steps", "batch_size", "accumulate", "optimizer", "ema", "log_every", "save_every", "keep", "wandb"),
    *("constraints", "objective", "weights", "pairs", "starts", "start_seed", "execute", "beta", "calibration"),
    *("sigma", "films", "mode", "recover", "rewind", "demos", "human_frames"),
    *("iterations", "reward", "judge", "horizon", "gamma", "offline", "scenes", "operator"),
    *("generated", "vae_from", "vae", "dynamics", "heads", "svd"),
)
RENAMED = {
    **{key: f"method.{key}" for key in SAME},
    "loop": "method.name",
    "world_model": "method=world_model with method.start, tiny or svd",
    "method_options": "method, whose keys its options are",
    "rounds": "method.iterations",
    "rollouts": "method.rollouts, or eval.rollouts of evaluations",
    "num_envs": "method.num_envs, or eval.num_envs of evaluations",
    "episodes": "eval.episodes, or method.episodes for what an iteration learns from",
    "env": "task, with task.options",
    "env_options": "task.options",
    "eval_every": "eval.every",
    "eval_episodes": "eval.episodes",
    "eval_seed": "eval.seed",
    "eval_envs": "eval.num_envs",
    "wsrl": "method.name=wsrl, whose keys its settings are",
    "expo": "method.name=expo, whose keys its settings are",
    "ray": "method: method.workers, method.fragment, method.max_lag",
    "train": "the recipe itself: train.policy is policy, train.data is data, train.steps is method.steps",
    "privileged": "task.options={cameras: [], privileged: true}",
    "image_size": "task.options.image_size",
    "method.decay": "method.gae_lambda",
    "method.sac.members": "method.sac.num_critics",
    "stages": "three keys: method.train_vae, method.train_dynamics, method.train_heads",
    "method.stages": "three keys: method.train_vae, method.train_dynamics, method.train_heads",
}
VALUES = {("method.reward", "own"): "task"}


def check_names(tree: Mapping[str, Any], source: str) -> None:
    """Raise a :class:`UserError` for the first key or value of an old recipe, naming the new one."""
    for name, value in _entries(tree):
        if name in RENAMED:
            raise UserError(f"{source}: '{name}' is no longer a key", f"it is now {RENAMED[name]}; docs/recipes.md")
        if isinstance(value, str) and (new := VALUES.get((name, value))):
            raise UserError(f"{source}: '{name}={value}' is no longer a value", f"it is now {new}; docs/recipes.md")


def _entries(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a mapping's keys and of those below them."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
