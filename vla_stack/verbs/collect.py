"""``vla collect``: scripted experts, of our tasks and of benchmarks, into a crash-safe dataset."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vla_stack.data.layout import read_info
from vla_stack.errors import UserError
from vla_stack.rollout.collect import BRANCH, CollectConfig, collect
from vla_stack.verbs.arguments import count, not_negative, positive, whole

HELP = "Record a scripted expert's episodes into a LeRobotDataset; run again to continue or to add episodes."
EXAMPLES = (
    "vla collect --task pick --episodes 200 --root data/pick",
    "vla collect --task pick place --episodes 100 --root data/two --noise 0.5 --workers 4",
    "vla collect --task pick --mixed --episodes 200 --root data/world   # for a world model",
    "vla collect --task pick --episodes 2000 --root data/pick --rollouts ray --workers 32",
    "vla collect --task pick_any shelf --noise 0.3 --errors 0.3 --moments 4 --episodes 9000 --root data/scenes",
    "vla collect --task pick --policy runs/pick --episodes 100 --root data/corrected   # DAgger",
    "vla collect --env metaworld/push-v3 metaworld/drawer-open-v3 --control-hz 20 --cameras topview gripperPOV "
    "--episodes 100 --root data/metaworld",
    "vla collect --env aloha/transfer_cube --control-hz 10 --episodes 100 --root data/aloha",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", nargs="+", help="one or more of our tasks, recorded one after another")
    what.add_argument("--env", nargs="+", help="tasks of benchmarks: metaworld/<task>, aloha/transfer_cube")
    parser.add_argument(
        "--episodes", type=count, default=200, help="episodes the dataset shall hold of each task (200)"
    )
    parser.add_argument("--root", type=Path, required=True, help="dataset folder; continued if it exists")
    parser.add_argument(
        "--workers", type=whole, default=os.cpu_count() or 1, help="simulation processes (one per core)"
    )
    parser.add_argument("--rollouts", choices=("local", "ray"), default="local", help="where they run (local)")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument(
        "--noise", type=not_negative, default=0.0, help="noise on executed actions, labels stay clean (0)"
    )
    parser.add_argument(
        "--errors",
        type=not_negative,
        default=0.0,
        metavar="SHARE",
        help="share of the time in which the arm is off, goes elsewhere or has the wrong gripper, labels stay clean: "
        "a policy learns what to do after a miss (0)",
    )
    parser.add_argument(
        "--branch",
        type=count,
        default=BRANCH,
        metavar="H",
        help="actions of each frame's chunk label, with --noise or --errors (16)",
    )
    parser.add_argument(
        "--moments",
        type=whole,
        default=0,
        metavar="N",
        help="record N random frames of each episode, and drive it without pictures between them: many more "
        "scenes in the same time, for policies without memory (0: all frames)",
    )
    parser.add_argument(
        "--policy",
        help="let this policy act, and record what the expert would do in each state in which it asks for a chunk, "
        "failed episodes included: train on that too, and it learns to get out of its own mistakes (DAgger)",
    )
    parser.add_argument(
        "--delay",
        type=whole,
        default=0,
        metavar="N",
        help="with --policy: its chunks come late by up to so many control steps, and labels say how to go on from "
        "what it executes meanwhile; for a policy that was trained with max_delay (0)",
    )
    parser.add_argument("--image-size", type=count, default=64, help="pixels (64)")
    parser.add_argument("--image-mode", choices=("video", "image"), default="video", help="H.264 or PNG (video)")
    parser.add_argument("--cameras", nargs="+", help="which to record (the environment's default)")
    parser.add_argument("--control-hz", type=positive, help="control steps a second (the environment's default)")
    modes = ("ee_abs", "joint_abs", "ee_delta")
    parser.add_argument("--control-mode", choices=modes, help="actions (ours: ee_abs, MetaWorld: ee_delta)")
    parser.add_argument("--visuals", choices=("fast", "official"), help="pictures of benchmarks (fast)")
    parser.add_argument("--randomisation", type=int, default=0, help="level of our tasks' randomisation, 0 to 3 (0)")
    parser.add_argument("--keep-failures", action="store_true", help="record unsuccessful episodes too")
    parser.add_argument(
        "--mixed", action="store_true", help="for a world model: experts, failures, random waypoints, looking away"
    )
    parser.add_argument(
        "--privileged", action="store_true", help="object poses in the state, no cameras: for experiments on algorithms"
    )


def main(args: argparse.Namespace) -> int:
    if args.episodes < 1 or args.workers < 1:
        raise UserError("--episodes and --workers must be at least 1")
    if args.task and (args.control_mode or args.visuals):
        raise UserError("--control-mode and --visuals are for benchmarks (--env); our experts act in ee_abs")
    given = {name: getattr(args, name) for name in ("control_hz", "control_mode", "visuals")}
    given["cameras"] = args.cameras and tuple(args.cameras)
    options = {key: value for key, value in given.items() if value is not None}
    shared = (
        args.seed,
        args.noise,
        args.branch,
        args.image_size,
        args.randomisation,
        args.keep_failures,
        args.privileged,
    )
    acting = args.policy or "", args.delay
    tasks = args.task or args.env
    configs = [CollectConfig(task, *shared, args.mixed, args.moments, options, args.errors, *acting) for task in tasks]
    for config in configs:
        config.check()  # all of them before the first one begins
    for config in configs:
        try:
            collect(config, args.root, args.episodes, args.workers, args.image_mode, args.rollouts)
        except KeyboardInterrupt:
            print(f"\nstopped; every finished episode is in {args.root}. Run the same command to continue.")
            return 130
    info = read_info(args.root)
    print(f"{args.root}: {info['total_episodes']} episodes, {info['total_frames']} frames")
    return 0
