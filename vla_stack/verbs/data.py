"""``vla data``: what is in a dataset, whether it is whole, and how to make it whole again."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from vla_stack.data import digests
from vla_stack.data.compact import compact
from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.edit import backfill, merge, relabel
from vla_stack.data.features import read_robot_spec
from vla_stack.data.frame_cache import cache_folder
from vla_stack.data.integrity import check, repair
from vla_stack.data.labels import CONTROL_SOURCE, SEGMENT_TYPE
from vla_stack.data.layout import ROBOT, read_info
from vla_stack.data.pending import count_pending, left_out
from vla_stack.data.preference_view import view_pair
from vla_stack.data.preferences import PAIRS
from vla_stack.data.store import clear_staging, locked
from vla_stack.data.view import view
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.lerobot_units import dimension_names
from vla_stack.schema import SUCCESS
from vla_stack.verbs import data_import, data_quality
from vla_stack.verbs.arguments import whole

HELP = (
    "Inspect, check, seal, repair, label, judge, merge, compact or view a LeRobotDataset v3, whoever wrote it; import "
    "ROS bags."
)
EXAMPLES = (
    "vla data info data/pick",
    "vla data check data/pick      # every file, every video's length; exit code 1 if something is wrong",
    "vla data check data/pick --deep    # every byte, picture and number: digests, limits, statistics",
    "vla data seal data/pick       # digests of all files as they are now; recorders keep their own",
    "vla data repair data/pick     # back to the last good episode after a crash",
    "vla data backfill data/pick   # add the columns of interventions to demonstrations",
    "vla data relabel data/rac --episode 3 --frames 10:25 --segment recovery",
    "vla data merge data/pick data/rac --into data/all",
    "vla data compact data/all     # many episodes to a file, as LeRobot packs them; --into NEW leaves the old one",
    "vla data view data/rac --episode 3            # in Rerun; --save FILE.rrd writes a file instead",
    "vla data view runs/grape/iteration-001 --episode 3   # a pair of preferences, winner and loser",
    *data_quality.EXAMPLES,
    *data_import.EXAMPLES,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=VERBS)
    parser.add_argument("root", type=Path, nargs="+", help="dataset folder; several for merge; recordings for import")
    parser.add_argument(
        "--episode", type=whole, default=0, help="relabel, view: which one, or which pair of preferences (0)"
    )
    parser.add_argument("--deep", action="store_true", help="check: decode every picture, compare every number")
    parser.add_argument("--frames", help="relabel: first and one past the last, e.g. 10:25")
    parser.add_argument("--segment", choices=[s.name.lower() for s in Segment], help="relabel: what they are")
    parser.add_argument("--into", type=Path, help="merge, quality, compact: the new dataset")
    parser.add_argument("--save", type=Path, help="view: .rrd file to write; quality: folder (outputs/quality/DATASET)")
    data_quality.add_quality_arguments(parser)
    data_import.add_import_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if len(args.root) > 1 and args.what not in ("merge", "import"):
        raise UserError(f"`vla data {args.what}` takes one dataset, {len(args.root)} are given")
    return VERBS[args.what](args)


def _size(folder: Path) -> str:
    total = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return f"{total / 1e6:.1f} MB" if total < 1e9 else f"{total / 1e9:.2f} GB"


def _info(args: argparse.Namespace) -> int:
    root = args.root[0]
    dataset = open_dataset(root)
    lengths = dataset.episode_to - dataset.episode_from
    seconds = dataset.num_frames / dataset.fps
    print(f"{root}: LeRobotDataset {dataset.info['codebase_version']}, {_size(root)}")
    if (root / ROBOT).exists():
        robot = read_robot_spec(root)
        print(f"  robot     {robot.name}, {robot.action_kind} actions at {robot.rate_hz:g} Hz")
    elif kind := dataset.info.get("robot_type"):
        print(f"  robot     {kind}, in units that nobody says; for a real one: vla data import {root} --root NEW")
    print(f"  episodes  {dataset.num_episodes}, {lengths.min()} to {lengths.max()} frames (mean {lengths.mean():.0f})")
    print(f"  frames    {dataset.num_frames} at {dataset.fps:g} fps, {seconds / 60:.1f} min")
    if SUCCESS in dataset.columns:
        won = int(dataset.columns[SUCCESS][dataset.episode_to - 1].sum())
        print(f"  success   {won}/{dataset.num_episodes}")
    if SEGMENT_TYPE in dataset.columns:
        kinds = np.bincount(dataset.columns[SEGMENT_TYPE], minlength=len(Segment))
        counts = [f"{s.name.lower()} {kinds[s]}" for s in Segment if kinds[s]]
        human = int((dataset.columns[CONTROL_SOURCE] == Control.HUMAN).sum())
        print(f"  labels    {', '.join(counts)} frames; {human} by a person")
    if waiting := count_pending(root):
        print(f"  pending   {waiting} episodes that nobody has kept or discarded yet")
    for camera, key in dataset.cameras.items():
        height, width = dataset.image_size(camera)
        print(f"  camera    {camera}: {width}x{height}, {dataset.features[key]['dtype']}")
    if cache_folder(root).exists():
        print(f"  cache     {cache_folder(root)}, {_size(cache_folder(root))} of decoded frames; may be deleted")
    _print_tasks(dataset)
    print("  columns")
    for name, column in dataset.columns.items():
        names = ", ".join(dimension_names(dataset.features[name]) or ())
        print(f"    {name:<20}{column.dtype}{list(column.shape[1:]) or ''}  {names}".rstrip())
    return 0


def _print_tasks(dataset: Dataset) -> None:
    episodes = np.bincount(dataset.columns["task_index"][dataset.episode_from], minlength=len(dataset.tasks))
    for task, count in zip(dataset.tasks, episodes, strict=True):
        print(f"  task      {task!r}: {count} episodes")


def _check(args: argparse.Namespace) -> int:
    root = args.root[0]
    problems = check(root, args.deep)
    for problem in problems:
        print(f"  {problem}")
    if problems:
        print(f"{root}: {len(problems)} problems -- run `vla data repair {root}`, or restore what is named from a copy")
        return 1
    sealed = digests.read(root) is not None
    print(f"{root}: nothing wrong" + ("" if sealed else f"; it keeps no digests, see: vla data seal {root}"))
    return 0


def _seal(args: argparse.Namespace) -> int:
    root = args.root[0]
    read_info(root)
    with locked(root):
        count = digests.seal(root)
    clear_staging(root)
    print(f"{root}: {count} files recorded as they are now")
    return 0


def _repair(args: argparse.Namespace) -> int:
    root = args.root[0]
    report = repair(root)
    for action in report.actions:
        print(f"  {action}")
    lost = report.episodes_before - report.episodes
    outcome = f"{report.episodes} episodes, {report.frames} frames"
    if lost:
        outcome += f"; {lost} episodes could not be saved"
    print(f"{root}: {'repaired' if report.actions else 'nothing to repair'}, {outcome}")
    return 0


def _backfill(args: argparse.Namespace) -> int:
    added = backfill(args.root[0])
    print(f"{args.root[0]}: {f'added {", ".join(added)}' if added else 'has all label columns'}")
    return 0


def _relabel(args: argparse.Namespace) -> int:
    first, colon, last = (args.frames or "").partition(":")
    if not (colon and first.isdigit() and last.isdigit() and args.segment):
        raise UserError("say which frames are what", "for example --episode 3 --frames 10:25 --segment recovery")
    segment = Segment[args.segment.upper()]
    changed = relabel(args.root[0], args.episode, range(int(first), int(last)), segment)
    print(f"{args.root[0]}: {changed} frames of episode {args.episode} are {args.segment} now")
    return 0


def _merge(args: argparse.Namespace) -> int:
    if args.into is None or len(args.root) < 2:
        raise UserError("merge needs two datasets and --into", EXAMPLES[7])
    count = merge(args.root, args.into)
    print("".join(map(left_out, args.root)) + f"{args.into}: {count} episodes. Next: vla data check {args.into}")
    return 0


def _compact(args: argparse.Namespace) -> int:
    done = compact(args.root[0], args.into)
    print(f"{args.into or args.root[0]}: {done.episodes} episodes in {done.after} files, {done.before} before")
    return 0


def _view(args: argparse.Namespace) -> int:
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
    pair = (args.root[0] / PAIRS).is_file()
    frames = (view_pair if pair else view)(args.root[0], args.episode, args.save)
    print(
        f"{frames} frames of {'pair' if pair else 'episode'} {args.episode}"
        + (f" -> {args.save}; open with: rerun {args.save}" if args.save else "")
    )
    return 0


VERBS = {
    "info": _info,
    "check": _check,
    "seal": _seal,
    "repair": _repair,
    "backfill": _backfill,
    "relabel": _relabel,
    "merge": _merge,
    "compact": _compact,
    "quality": data_quality.judge,
    "view": _view,
    "import": data_import.run_import,
}
