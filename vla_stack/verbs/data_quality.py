"""``vla data quality``: which episodes a person should look at first, and a new dataset of the better ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.edit import check_select, select
from vla_stack.data.layout import write_json
from vla_stack.data.pending import left_out
from vla_stack.data.quality import quality, table
from vla_stack.errors import UserError
from vla_stack.verbs.arguments import device, positive

EXAMPLES = (
    "vla data quality data/pick    # rough, stalled, frozen, repeated, odd: what to look at first",
    "vla data quality data/pick --policy runs/pick --keep 0.9 --into data/clean    # the better nine tenths",
)


def add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    """What `vla data quality` takes beside the dataset, ``--into`` and ``--save``."""
    a = parser.add_argument
    a("--keep", type=positive, metavar="N", help="quality: write the N best episodes, or the share N below 1")
    a("--policy", help="quality: also ask a policy; its open-loop error is a score")
    a("--device", type=device, default="cpu", help="quality: where the policy runs (default: %(default)s)")


def judge(args: argparse.Namespace) -> int:
    """Scores as a table, as ``quality.json`` and as a picture; the selection where one is asked for."""
    from vla_stack.evaluation.plots import quality_plot

    root, folder = args.root[0], args.save or Path("outputs/quality", args.root[0].resolve().name)
    if (args.keep is None) != (args.into is None):
        raise UserError("--keep and --into need each other", "for example --keep 0.9 --into datasets/clean")
    dataset = open_dataset(root)
    if args.into is not None:
        check_select(root, args.into)  # before minutes of looking
    count = None if args.keep is None else _count(args.keep, dataset.num_episodes)
    found = quality(dataset, policy_error=_policy_error(args, dataset) if args.policy else None)
    about = {"data": str(root), "score": found.score.tolist(), "why": found.why, "copy_of": found.copy_of.tolist()}
    write_json(folder / "quality.json", {**about, "scores": {k: v.tolist() for k, v in found.scores.items()}})
    deviations = dict(zip(found.scores, found.deviations.tolist(), strict=True))
    (folder / "quality.svg").write_text(quality_plot(deviations))
    print(f"{root}: {dataset.num_episodes} episodes, the worst first\n\n{table(found)}\n")
    print(f"Figures: {folder / 'quality.json'}   picture: {folder / 'quality.svg'}")
    if count is not None:
        written = select(root, found.best(count), args.into)
        print(left_out(root) + f"{args.into}: {written} episodes. Next: vla data check {args.into}")
    return 0


def _count(keep: float, episodes: int) -> int:
    """How many episodes ``--keep`` means.

    Raises:
        UserError: There are not so many, or it would be none.
    """
    count = round(keep * episodes) if keep < 1 else int(keep)
    if not 1 <= count <= episodes or (keep >= 1 and count != keep):
        raise UserError(f"--keep {keep:g} of {episodes} episodes", f"a number from 1 to {episodes}, or a share below 1")
    return count


def _policy_error(args: argparse.Namespace, dataset: Dataset) -> NDArray[np.float64]:
    """Open-loop error of a policy in each episode, relative to standing still."""
    from vla_stack.policies.directory import resolve_policy

    path = resolve_policy(args.policy)  # before torch is loaded
    from vla_stack.evaluation.open_loop import LABELS, RECORDED, open_loop
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.reading import find_device

    policy = load_policy(path, str(find_device(args.device)), frozen=True)
    with tqdm(desc=f"asking {args.policy}", unit=" chunks", dynamic_ncols=True) as bar:
        found = open_loop(policy, dataset, dataset.num_episodes, on_chunks=bar.update)
    errors = found[LABELS if LABELS in found else RECORDED]
    return np.array([np.nanmean(errors.relative[errors.episode == e]) for e in range(dataset.num_episodes)])
