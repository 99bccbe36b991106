"""``vla data``: what is in a dataset, whether it is whole, and how to make it whole again."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import cache_folder
from vla_stack.data.integrity import check, repair
from vla_stack.data.layout import ROBOT
from vla_stack.schema import SUCCESS

HELP = "Inspect, check or repair a LeRobotDataset v3, whoever wrote it."
EXAMPLES = (
    "vla data info datasets/pick",
    "vla data check datasets/pick      # every file, every video's length; exit code 1 if something is wrong",
    "vla data repair datasets/pick     # back to the last good episode after a crash",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("info", "check", "repair"))
    parser.add_argument("root", type=Path, help="dataset folder")


def main(args: argparse.Namespace) -> int:
    return {"info": _info, "check": _check, "repair": _repair}[args.what](args.root)


def _size(folder: Path) -> str:
    total = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return f"{total / 1e6:.1f} MB" if total < 1e9 else f"{total / 1e9:.2f} GB"


def _info(root: Path) -> int:
    dataset = open_dataset(root)
    lengths = dataset.episode_to - dataset.episode_from
    seconds = dataset.num_frames / dataset.fps
    print(f"{root}: LeRobotDataset {dataset.info['codebase_version']}, {_size(root)}")
    if (root / ROBOT).exists():
        robot = read_robot_spec(root)
        print(f"  robot     {robot.name}, {robot.action_kind} actions at {robot.rate_hz:g} Hz")
    print(f"  episodes  {dataset.num_episodes}, {lengths.min()} to {lengths.max()} frames (mean {lengths.mean():.0f})")
    print(f"  frames    {dataset.num_frames} at {dataset.fps:g} fps, {seconds / 60:.1f} min")
    if SUCCESS in dataset.columns:
        won = int(dataset.columns[SUCCESS][dataset.episode_to - 1].sum())
        print(f"  success   {won}/{dataset.num_episodes}")
    for camera, key in dataset.cameras.items():
        ft = dataset.features[key]
        print(f"  camera    {camera}: {ft['shape'][1]}x{ft['shape'][0]}, {ft['dtype']}")
    if cache_folder(root).exists():
        print(f"  cache     {cache_folder(root)}, {_size(cache_folder(root))} of decoded frames; may be deleted")
    _print_tasks(dataset)
    print("  columns")
    for name, column in dataset.columns.items():
        names = ", ".join(dataset.features[name].get("names") or ())
        print(f"    {name:<20}{column.dtype}{list(column.shape[1:]) or ''}  {names}".rstrip())
    return 0


def _print_tasks(dataset: Dataset) -> None:
    episodes = np.bincount(dataset.columns["task_index"][dataset.episode_from], minlength=len(dataset.tasks))
    for task, count in zip(dataset.tasks, episodes, strict=True):
        print(f"  task      {task!r}: {count} episodes")


def _check(root: Path) -> int:
    problems = check(root)
    for problem in problems:
        print(f"  {problem}")
    if problems:
        print(f"{root}: {len(problems)} problems -- run `vla data repair {root}`")
        return 1
    print(f"{root}: nothing wrong")
    return 0


def _repair(root: Path) -> int:
    report = repair(root)
    for action in report.actions:
        print(f"  {action}")
    lost = report.episodes_before - report.episodes
    outcome = f"{report.episodes} episodes, {report.frames} frames"
    if lost:
        outcome += f"; {lost} episodes could not be saved"
    print(f"{root}: {'repaired' if report.actions else 'nothing to repair'}, {outcome}")
    return 0
