"""The loop as functions, for a notebook or a program of your own: ``import vla_stack as vla``.

    import vla_stack as vla

    policy = vla.load_policy("shipped")
    print(vla.rollout(policy, "sim/pick-v0", episodes=20).success)

Each function is what the verb of the same name calls, so files, seeds and figures are the same. All raise
:class:`~vla_stack.errors.UserError` with one line that names what is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_stack.data.dataset import Dataset
    from vla_stack.envs.vector import VectorEnv
    from vla_stack.policies.chunk_policy import ChunkPolicy
    from vla_stack.rollout.engine import ChunkPolicy as AnyPolicy
    from vla_stack.rollout.records import EvalResult


@dataclass(frozen=True)
class Rollouts:
    """Episodes of one policy in one environment.

    Attributes:
        success: Share of the episodes that succeeded.
        interval: Its Wilson 95 % interval.
        result: Everything that ``vla eval`` reports of them, one record an episode.
    """

    success: float
    interval: tuple[float, float]
    result: EvalResult


def load_policy(name: str | Path = "shipped", device: str = "cpu", embodiment: str | None = None) -> ChunkPolicy:
    """A policy for inference: its ``infer`` gives one chunk of commands an observation.

    Args:
        name: A policy or run directory, ``shipped``, or a repository of the hub.
        device: Torch device, or ``auto``.
        embodiment: Which robot to drive, where the policy was trained on several.
    """
    from vla_stack.policies.chunk_policy import load_policy as load

    return load(name, device, embodiment, frozen=True)


def make_env(env_id: str, num_envs: int = 1, policy: AnyPolicy | None = None, **options: Any) -> VectorEnv:
    """Rows of an environment: a task of ours, a benchmark's, any gymnasium id, or a world model's.

    Args:
        env_id: For example ``sim/pick-v0``, ``metaworld/push-v3``, ``imagined:shipped``.
        num_envs: Rows.
        policy: The policy that is to act in it: cameras, size, rate and control mode then follow from it.
        options: Keyword arguments of the environment.
    """
    from vla_stack.envs.making import make

    return make(env_id, num_envs, policy.spec if policy is not None else None, options)


def rollout(policy: AnyPolicy, env_id: str, episodes: int = 100, seed: int = 1000, **settings: Any) -> Rollouts:
    """Roll a policy out under the virtual clock.

    Args:
        policy: Of :func:`load_policy`, or your own with ``spec`` and ``infer``.
        env_id: As for :func:`make_env`.
        episodes: How many; episode i has seed ``seed + i``.
        seed: Of the first episode.
        settings: Further arguments of :func:`vla_stack.evaluation.evaluate.evaluate`: ``latency``, ``workers``, ...
    """
    from vla_stack.evaluation.evaluate import evaluate

    result = evaluate(policy, env_id, episodes, seed, **settings)
    return Rollouts(result.success_rate, result.interval, result)


def collect(task: str, episodes: int, root: str | Path, workers: int = 0, **config: Any) -> Dataset:
    """Record a scripted expert until a dataset holds a number of its episodes.

    Args:
        task: A task of ours, such as ``pick``, or of a benchmark, such as ``metaworld/push-v3``.
        episodes: Episodes of this task that the dataset shall hold.
        root: Its folder; continued if it exists.
        workers: Processes that simulate; 0 simulates in this one.
        config: Further fields of :class:`vla_stack.rollout.collect.CollectConfig`: ``noise``, ``image_size``, ...
    """
    from vla_stack.data.dataset import open_dataset as opened
    from vla_stack.rollout.collect import CollectConfig
    from vla_stack.rollout.collect import collect as record

    record(CollectConfig(task, **config), root, episodes, workers)
    return opened(root)


def train(recipe: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Train by a recipe.

    Args:
        recipe: Its name (``vla recipes``), a YAML file, or a method.
        overrides: As on the command line: ``("data.root=data/pick", "method.steps=500")``.

    Returns:
        The run directory, which :func:`load_policy` takes.
    """
    from vla_stack.training.recipe import make
    from vla_stack.training.recipes import find_recipe
    from vla_stack.training.run_dir import begun, default_dir

    made = make(*find_recipe(str(recipe), list(overrides)))
    run_dir = default_dir(made)
    with begun(made, run_dir, resume=False):
        made.method.run(made, run_dir)
    return run_dir


def serve(policy: str | Path = "shipped", endpoint: str = "tcp://127.0.0.1:5555", device: str = "cpu") -> None:
    """Serve a policy to robots until SIGINT or SIGTERM; call it in the main thread.

    Args:
        policy: As for :func:`load_policy`.
        endpoint: Where to listen; off loopback, keys are required (``vla keys``).
        device: Torch device.
    """
    from vla_stack.verbs import serve as verb

    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    verb.main(parser.parse_args(["--policy", str(policy), "--endpoint", endpoint, "--device", device]))


def open_dataset(root: str | Path) -> Dataset:
    """A recorded dataset: its features, episodes, columns and the robot that it was recorded on."""
    from vla_stack.data.dataset import open_dataset as opened

    return opened(root)
