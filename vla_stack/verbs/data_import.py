"""``vla data import``: its arguments, and the words that follow; recordings of ROS, datasets of LeRobot's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vla_stack.data.layout import INFO
from vla_stack.errors import UserError
from vla_stack.verbs.arguments import not_negative, number, positive

EXAMPLES = (
    "vla data import run1/ run2.mcap --root data/mine --state /joint_states --action /arm/command \\\n"
    "      --camera front=/camera/image_raw --rate 30 --task 'pick the cube'    # rosbag2 folders, .db3, .mcap",
    "vla data import night.mcap --root data/night --map map.yaml --split-gap 2    # topics in a file",
    "vla data import data/lerobot --root data/mine    # a dataset of LeRobot's: degrees and percent in SI units",
)

BAGS = (  # arguments that say something of a recording of ROS alone
    *("map", "state", "action", "rate_hz", "camera", "task", "task_topic", "joints", "gripper"),
    *("split_topic", "split_gap", "log_time"),
)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of import; what is not given is absent, so that a file may say it."""
    add = parser.add_argument_group("import", "rosbag2, MCAP, or a dataset of LeRobot's, as a new dataset").add_argument
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    add("--root", dest="target", type=Path, metavar="DATASET", help="the new dataset")
    add("--map", type=Path, metavar="FILE.yaml", help="the keys below in a file; arguments win")
    add("--state", **absent, metavar="TOPIC", help="JointState as measured")
    add("--action", **absent, metavar="TOPIC", help="JointState as commanded")
    add("--rate", dest="rate_hz", type=positive, **absent, help="frames per second of the dataset")
    add("--camera", action="append", **absent, metavar="NAME=TOPIC", help="Image or CompressedImage; repeatable")
    add("--task", **absent, help="instruction")
    add("--task-topic", **absent, metavar="TOPIC", help="String with the instruction, in place of --task")
    add("--joints", **absent, metavar="A,B,...", help="take these, in this order (all of the action's)")
    add("--unit", action="append", **absent, metavar="JOINT=UNIT", help="where it is not rad, or LeRobot's; repeatable")
    add("--gripper", action="append", **absent, metavar="JOINT=CLOSED:OPEN", help="a gripper's range; repeatable")
    add("--split-topic", **absent, metavar="TOPIC", help="each message begins an episode")
    add("--split-gap", type=not_negative, **absent, metavar="SECONDS", help="silence that ends an episode")
    add(
        "--calibration",
        action="append",
        **absent,
        metavar="[PREFIX=]ARM.json",
        help="LeRobot's of the arm, where data are in +-100; of two arms, left_=A.json and right_=B.json",
    )
    add("--log-time", action="store_true", **absent, help="time of recording, not of the header")


def run_import(args: argparse.Namespace) -> int:
    """Import, and say what came of it."""
    if args.target is None:
        raise UserError("import needs --root DATASET", "for example --root datasets/mine")
    if any((root / INFO).exists() for root in args.root):
        return _run_import_lerobot(args)
    if hasattr(args, "calibration"):
        raise UserError("--calibration is for a dataset of LeRobot's", "a ROS recording's joints are in rad, or --unit")
    from vla_stack.data.bags.importing import import_bags  # here: the extra `bags` is not in every installation
    from vla_stack.data.bags.mapping import BagMap, read_map

    how = BagMap.of((read_map(args.map) if args.map else {}) | _given(args), str(args.map or "the command line"))
    done = import_bags(args.root, args.target, how, on_bag=lambda path, n: print(f"  {path}: {n} episodes", flush=True))
    oldest = ", ".join(f"{name} {age * 1e3:.0f} ms" for name, age in done.ages.items())
    print(
        f"{args.target}: {done.episodes} episodes, {done.frames} frames at {how.rate_hz:g} Hz. Oldest sample: {oldest}"
    )
    if done.late:
        print(f"  {done.late} messages left out: their time was before that of an earlier one")
    return 0


def _run_import_lerobot(args: argparse.Namespace) -> int:
    """Import a dataset of LeRobot's, and say what its numbers are now."""
    from vla_stack.data.si_units import import_lerobot

    source, *others = args.root
    if others:
        raise UserError("one dataset of LeRobot's is imported at a time", "then: vla data merge")
    if given := [name for name in BAGS if getattr(args, name, None)]:
        option = f"--{given[0].removesuffix('_hz').replace('_', '-')}"
        raise UserError(f"{source} is a dataset of LeRobot's, {option} is for recordings of ROS", "leave it out")
    units = dict(_pair("--unit", text) for text in getattr(args, "unit", ()))
    files = [text.rpartition("=") for text in getattr(args, "calibration", ())]
    done = import_lerobot(source, args.target, units, {arm: Path(file) for arm, _, file in files})
    print(f"{args.target}: {done.episodes} episodes of {done.robot.name} at {done.robot.rate_hz:g} Hz, commands from")
    for dim, low, high in zip(done.robot.action, done.low, done.high, strict=True):
        print(f"  {dim.name:<24}{low:8.3f} to {high:6.3f} {dim.unit}")
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Keys of a map, as arguments say them."""
    plain = ("state", "action", "rate_hz", "task", "task_topic", "split_topic", "split_gap", "log_time")
    values = {key: getattr(args, key) for key in plain if hasattr(args, key)}
    if hasattr(args, "joints"):
        values["joints"] = args.joints.split(",")
    for key, name in (("cameras", "camera"), ("units", "unit"), ("grippers", "gripper")):
        if hasattr(args, name):
            values[key] = dict(_pair(f"--{name}", text) for text in getattr(args, name))
    if "grippers" in values:
        values["grippers"] = {joint: _ends(joint, text) for joint, text in values["grippers"].items()}
    return values


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name and value):
        raise UserError(f"{option} {text} cannot be read", "write NAME=VALUE")
    return name, value


def _ends(joint: str, text: str) -> list[float]:
    closed, _, opened = text.partition(":")
    try:
        return [number(closed), number(opened)]
    except argparse.ArgumentTypeError:
        raise UserError(f"--gripper {joint}={text} cannot be read", "write JOINT=CLOSED:OPEN") from None
