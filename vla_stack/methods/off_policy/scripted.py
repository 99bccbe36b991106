"""Stored episodes, of a noisy scripted expert with its failures, or recorded: what offline learning begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from vla_stack.errors import UserError
from vla_stack.methods.off_policy import recorded
from vla_stack.methods.off_policy.state_env import StateEnv, Vector, normalised
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition

LEAST_STD = 0.01  # of an entry that hardly moves
TRIES, MORE_TRIES = 10, 20  # attempts for each episode that is kept, and beyond: an expert that never succeeds ends


@dataclass(frozen=True)
class OfflineRecipe:
    """Which episodes.

    Attributes:
        root: Dataset folder that they come from, see ``training.recorded``; empty asks the scripted expert of the task.
        episodes: How many are kept; of a dataset at most, the first ones, so that a number beyond its own takes all.
        noise: Noise of the expert, in turns; see ``sim.make_expert``.
        failures: Whether unsuccessful episodes are kept.
        seed: Of the expert's episodes.
    """

    root: str = ""
    episodes: int = 40
    noise: tuple[float, ...] = (0.3, 0.6, 1.0)
    failures: bool = True
    seed: int = 0


def record(env: StateEnv, recipe: OfflineRecipe, gamma: float) -> ReplayBuffer:
    """Episodes of the expert, with Monte-Carlo returns. Observations are as the environment gives them.

    Raises:
        UserError: The environment has no expert, or it hardly ever succeeds where failures are not kept.
    """
    tail = env.recipe.tail / (1.0 - gamma)
    store = ReplayBuffer(recipe.episodes * env.limit, env.obs_dim, env.action_dim, 1, gamma, tail)
    kept = attempt = 0
    one = np.ones(1, np.int64)
    with tqdm(total=recipe.episodes, desc="expert", unit=" episodes") as bar:
        while kept < recipe.episodes:
            if attempt == TRIES * recipe.episodes + MORE_TRIES:
                raise UserError(
                    f"the expert of {env.recipe.id} succeeded in {kept} of {attempt} episodes of {env.limit} steps, "
                    f"'method.offline.episodes' is {recipe.episodes}",
                    "set method.offline.failures=true, a larger task.options.max_episode_steps, or less noise",
                )
            seed = int(np.random.SeedSequence((recipe.seed, attempt)).generate_state(1)[0]) >> 1
            steps, obs, over = [], env.reset(seed), False
            act = env.expert(recipe.noise[kept % len(recipe.noise)], seed)
            while not over:
                action = act()
                after, reward, terminated, truncated = env.step(action)
                ends = np.array([[terminated], [truncated]])
                values = (obs[None], action[None], np.full(1, reward), ends[0], ends[1], after[None])
                steps.append(Transition(*values, 0 * one, 0 * one, int(Source.OFFLINE) * one))
                obs, over = after, terminated or truncated
            attempt += 1
            if env.success or recipe.failures:
                kept += 1
                bar.update()
                for step in steps:
                    store.add(step)
    return store


def stored(
    path: Path, env: StateEnv, recipe: OfflineRecipe, gamma: float
) -> tuple[ReplayBuffer, tuple[Vector, Vector]]:
    """The episodes of a file, filled where it is missing, normalised; and mean and deviation [o] of that.

    Raises:
        UserError: The episodes cannot be had, see :func:`record` and ``recorded.read``.
    """
    if not path.exists():
        if recipe.root:
            store = recorded.read(env, Path(recipe.root), recipe.episodes, recipe.failures, gamma)
        else:
            store = record(env, recipe, gamma)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(store.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    tail = env.recipe.tail / (1.0 - gamma)
    state = load_file(path)
    store = ReplayBuffer(len(state["column.reward"]), env.obs_dim, env.action_dim, 1, gamma, tail)
    store.load_state_dict(state)
    seen = store.columns["obs"][store.rows()]
    if not len(seen):  # an environment without an expert is observed as it is
        return store, (np.zeros(env.obs_dim, np.float32), np.ones(env.obs_dim, np.float32))
    scale = seen.mean(0), np.maximum(seen.std(0), LEAST_STD)
    for name in ("obs", "next_obs"):
        store.columns[name][:] = normalised(store.columns[name], *scale)
    return store, scale


def success_rate(store: ReplayBuffer) -> float:
    """Share of the stored episodes that succeeded, where success ends them."""
    rows = store.rows()
    ends = store.columns["terminated"][rows], store.columns["truncated"][rows]
    return float(ends[0].sum() / max(1, (ends[0] | ends[1]).sum()))
