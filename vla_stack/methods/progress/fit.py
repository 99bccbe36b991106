"""Values of the frames of datasets, and what else a run of ``progress`` leaves.

head.safetensors     a head that was fitted to all episodes
frames.safetensors   of each dataset, by what is in it: ``value``, ``advantage``, ``success`` and ``done`` [N]
progress.json        the policy that was read, T, and how good the values are on episodes that they were not fitted to
progress.png         values over time of some episodes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor
from tqdm import tqdm

from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.layout import read_json, write_json
from vla_stack.data.valued import FACTS, FRAMES, fingerprint
from vla_stack.envs.making import check_fit
from vla_stack.errors import UserError
from vla_stack.evaluation.recorded import observations, recorded_robot
from vla_stack.methods.episodes_loop import start_of
from vla_stack.methods.practice import check_resumed
from vla_stack.methods.progress.value import Bins, Floats, ValueHead, advantages, steps_left, train
from vla_stack.policies.anatomy import is_flow
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.schema import SUCCESS
from vla_stack.training.placement import use_threads
from vla_stack.training.recipe import Recipe

if TYPE_CHECKING:
    from vla_stack.methods.progress.recipe import Progress

HEAD, PICTURE = "head.safetensors", "progress.png"
BATCH = 64
BINS, HIDDEN = 32, 128  # of the time that is left; width of the hidden layer
NEAR = 3  # frames around a success in which its detection counts
SHOWN = 8  # episodes of the picture


def fit(recipe: Recipe, method: Progress, run_dir: Path) -> None:
    """Value all frames of the recipe's datasets; does nothing where that is done.

    Raises:
        UserError: The policy is no flow policy, or a dataset is of another robot, or says nothing of success; or what
            is done was done otherwise.
    """
    how = asdict(method) | {"seed": recipe.seed}
    if (run_dir / FACTS).exists():
        check_resumed(how, read_json(run_dir / FACTS).get("how", how))
        return
    use_threads(recipe.threads)
    policy = load_policy(start_of(recipe.policy.pretrained), recipe.device)
    if not is_flow(policy.policy):
        raise UserError(f"{recipe.policy.pretrained} is no flow policy, nothing of what it sees can be read")
    datasets = [open_dataset(root) for root in recipe.data.root]
    for dataset in datasets:
        check_fit(recorded_robot(dataset), policy.spec.robot, str(dataset.root))
        if SUCCESS not in dataset.columns:
            raise UserError(f"{dataset.root} has no column '{SUCCESS}': nobody recorded what succeeded")
    seen = torch.cat([features(policy, dataset) for dataset in datasets])
    first, end, success = _joined(datasets)
    left = steps_left(success, first, end)
    won = np.isfinite(left[end - 1])
    if won.all() or not won.any():
        which = "succeeded" if won.all() else "failed"
        print(f"all {len(won)} episodes {which}: values tell time, and nothing of failure")
    bins = Bins(BINS, float(np.quantile((end - first)[won], 0.95)) if won.any() else float((end - first).max()))
    told = crossed(seen, bins, left, first, end, method, recipe.seed)
    n = policy.spec.horizon  # what a frame teaches is a whole chunk, so it is worth what all of that gains
    made = {"value": told[0], "advantage": advantages(told[0], left, first, end, n, bins.horizon)}
    made |= {"success": told[1], "done": told[2]}
    head = _fitted(seen, bins.of(left), bins, method, recipe.seed)
    frames: dict[str, NDArray[np.float32]] = {}
    at = 0
    for dataset in datasets:
        part = slice(at, at := at + dataset.num_frames)
        frames |= {f"{fingerprint(dataset)}.{name}": x[part].astype(np.float32) for name, x in made.items()}
    run_dir.mkdir(parents=True, exist_ok=True)
    save_file(frames, run_dir / FRAMES)
    save_tensors(head.state_dict(), run_dir / HEAD)
    _draw(run_dir / PICTURE, made["value"], won, first, end)
    facts = quality(made, left, first, end)
    print(", ".join(f"{name} {value:.3g}" for name, value in facts.items()))
    about = {"policy": policy.spec.model_version, "horizon": bins.horizon, "bins": bins.count, "ahead": n}
    write_json(run_dir / FACTS, {**about, "how": how, "hidden": HIDDEN, "width": seen.shape[1], "held_out": facts})


@torch.no_grad()
def features(policy: ChunkPolicy, dataset: Dataset) -> Tensor:
    """What a policy observes at every frame, float [N, f]."""
    found = []
    asked = observations(dataset, policy.spec, range(dataset.num_episodes), 1)
    with tqdm(total=dataset.num_frames, desc=f"looking at {dataset.root.name}", unit=" frames", mininterval=1.0) as bar:
        for batch in _batches(asked):
            given = policy.preprocess(batch) | policy.recall(batch)
            found.append(policy.policy.observed(policy.policy.encode(given), given))
            bar.update(len(batch))
    return torch.cat(found)


def crossed(
    seen: Tensor, bins: Bins, left: Floats, first: NDArray[np.int64], end: NDArray[np.int64], r: Progress, seed: int
) -> tuple[Floats, Floats, Floats]:
    """What heads say of frames [N] of episodes that they were not fitted to; see :meth:`ValueHead.told`."""
    order = np.random.default_rng(seed).permutation(len(first))
    fold = np.repeat(order % min(r.folds, len(first)), end - first)
    out = np.zeros((3, len(left)))
    for k in range(fold.max() + 1):
        rest, mine = (torch.from_numpy(np.flatnonzero(rows)) for rows in (fold != k, fold == k))
        if not len(rest):
            raise UserError("one episode is too few: it would be valued by what was learnt from itself", "record more")
        head = _fitted(seen[rest], bins.of(left)[rest.numpy()], bins, r, seed + 1 + k)
        with torch.no_grad():
            out[:, mine.numpy()] = torch.stack(head.told(seen[mine])).double().cpu().numpy()
    return out[0], out[1], out[2]


def quality(
    made: dict[str, Floats], left: Floats, first: NDArray[np.int64], end: NDArray[np.int64]
) -> dict[str, float]:
    """How good values are: the share of pairs of a success and a failure that their mean tells apart; how far off the
    time that is left, as a correlation; and F1 of noticing success, within some frames of it, failures included."""
    won = np.isfinite(left[end - 1])
    mean = np.array([made["success"][a:b].mean() for a, b in zip(first, end, strict=True)])
    facts = {}
    if won.any() and not won.all():
        pairs = mean[won][:, None] - mean[~won][None, :]
        facts["auc"] = float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
    timed = np.isfinite(left)
    if timed.any():
        facts["time"] = float(np.corrcoef(made["value"][timed], -left[timed])[0, 1])
    hits = false = 0
    for a, b, success in zip(first, end, won, strict=True):
        if len(at := np.flatnonzero(made["done"][a:b] > 0.5)):
            right = bool(success) and left[a + at[0]] <= NEAR
            hits, false = hits + right, false + (not right)
    facts["done_f1"] = 2 * hits / max(1, hits + false + int(won.sum()))
    return facts


def _fitted(seen: Tensor, bins: NDArray[np.int64], kinds: Bins, r: Progress, seed: int) -> ValueHead:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = ValueHead(seen.shape[1], HIDDEN, kinds).to(seen.device)
    train(seen, bins, head, r.steps, r.batch_size, r.lr, seed)
    return head


def _joined(datasets: list[Dataset]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """First frames and ends of all episodes, and which frames succeed, as of one dataset."""
    before = np.cumsum([0, *(d.num_frames for d in datasets)])
    first = np.concatenate([d.episode_from + n for d, n in zip(datasets, before, strict=False)])
    end = np.concatenate([d.episode_to + n for d, n in zip(datasets, before, strict=False)])
    return first, end, np.concatenate([d.columns[SUCCESS].ravel() for d in datasets]).astype(bool)


def _batches(asked: Iterator[tuple[int, Any]]) -> Iterator[list[Any]]:
    batch = []
    for _, observation in asked:
        batch.append(observation)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _draw(file: Path, values: Floats, won: NDArray[np.bool_], first: NDArray[np.int64], end: NDArray[np.int64]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for success, colour, label in ((True, "#0072b2", "succeeds"), (False, "#d55e00", "fails")):
        for i, e in enumerate(np.flatnonzero(won == success)[:SHOWN]):
            axes.plot(values[first[e] : end[e]], color=colour, linewidth=1, label=label if not i else None)
    axes.set(xlabel="frame", ylabel="value, in times that successes need", title="episodes that were held out")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
