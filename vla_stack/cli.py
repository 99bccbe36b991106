"""The ``vla`` command: each verb is one call into a room.

A verb's module is imported only when that verb is asked for, so ``vla run --help`` on a robot computer starts
without torch. Such a module offers ``HELP`` (one line), ``EXAMPLES`` (shell lines), ``add_arguments(parser)`` and
``main(args) -> int``.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

# Numeric libraries start one spinning thread per core in every process; with several processes on a small machine that
# makes everything slower, measurably so (a tiny policy's training step went from 60 ms to 1.6 s). A person's own
# setting wins, and training raises torch's own thread count where it owns the machine.
for _var in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_var, "1")
if not sys.stderr.isatty():  # in a log file every redraw of a progress bar is a line
    os.environ.setdefault("TQDM_MININTERVAL", "10")
os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform.startswith("linux") else "glfw")

VERBS = {  # verb -> what it does; the registry says where it is
    "doctor": "check this machine: rendering, video, ports, versions",
    "collect": "record scripted experts into a LeRobotDataset",
    "data": "inspect, check, repair, label, merge and view datasets; import ROS bags",
    "recipes": "list the recipes that ship, or show one",
    "train": "train a policy from a recipe",
    "policy": "look into a policy: parameters, normalisation, latency, memory",
    "eval": "roll a policy out in simulation and report success",
    "compare": "say which of several policies is better, and stop when that is known",
    "monitor": "fit what calls for help when a policy is about to fail",
    "constraints": "check, propose and explain the constraints of a task",
    "imagine": "drive the robot that a world model imagines, from a page",
    "export": "write a policy as ONNX graphs",
    "serve": "serve a policy over ZeroMQ",
    "keys": "keys for policy servers and robots on different machines",
    "run": "run a robot (simulated or real) against a policy server",
    "robot": "calibrate a robot, check it, move a joint",
    "teleop": "drive a robot by hand and record demonstrations",
    "emulate": "an SO-101 without hardware, for LeRobot's drivers and `vla run`",
    "console": "drive or supervise a robot from a browser and record it",
    "report": "one page of a project: what changed between its runs, what improved",
    "demo": "the whole loop: collect, train, serve, run, report",
}
LOADING_VERBS = (
    "train",
    "policy",
    "eval",
    "compare",
    "monitor",
    "imagine",
    "export",
    "serve",
    "demo",
)  # of policies and run directories
ENDING_VERBS = ("doctor", "collect", "train", "policy", "eval", "monitor", "export", "report", "demo")  # ask nothing
ROBOT_VERBS = ("run", "compare", "robot", "teleop", "console")  # take LeRobot's --robot.* flags as well
READER_LEFT = 128 + 13  # what a shell makes of SIGPIPE
EXTRAS = {  # package -> the smallest extra of pyproject.toml that brings it
    **dict.fromkeys(("mujoco", "gymnasium", "cv2"), "robot"),
    **dict.fromkeys(("torch", "lerobot", "safetensors", "huggingface_hub", "draccus", "rich", "num2words"), "train"),
    **dict.fromkeys(("transformers", "diffusers", "datasets", "peft", "pandas", "onnxruntime", "onnx"), "train"),
    **dict.fromkeys(("matplotlib", "tensorboard", "pyarrow", "av"), "train"),
    **dict.fromkeys(("aiohttp", "cryptography"), "console"),
    **dict.fromkeys(("mcap", "mcap_ros2", "zstandard", "lz4"), "bags"),
    "zenoh": "ros2",
    "ray": "scale",
    "rerun": "viz",
}


def _usage() -> str:
    rows = "\n".join(f"  {verb:<12}{text}" for verb, text in VERBS.items())
    return (
        f"usage: vla <verb> [options]\n\n{rows}\n\n`vla <verb> --help` shows the options and examples of a verb; "
        "`vla --list` what is registered, ours and installed packages'."
    )


def _list(kinds: Sequence[str]) -> int:
    """Print what is registered: name, where it is, and which package brings it."""
    from vla_stack import registry

    known = {kind.kind: kind for kind in registry.ALL if kind is not registry.VERBS}
    for kind in kinds or known:
        found = known.get(kind)
        if found is None:
            print(f"vla --list: there is no kind '{kind}'; the kinds are {', '.join(known)}", file=sys.stderr)
            return 2
        print(kind)
        for entry in found.entries().values():
            print(f"  {entry.name:<22}{entry.target:<58}{entry.package}")
    return 0


def _absent(verb: str, e: ModuleNotFoundError) -> int:
    """Name the extra that brings a package which is not installed; what no extra brings is an error of ours."""
    package = (e.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise e
    extra = EXTRAS[package]
    if extra == "robot" and verb in LOADING_VERBS:  # torch would be missed next
        extra = "train"
    if package in ("pyarrow", "av"):  # of recording, which is possible without what training takes
        extra = {"teleop": "hardware", "data": "hardware", "console": "console"}.get(verb, "train")
    print(f"vla {verb}: needs the package '{package}' -- pip install \"vla-stack[{extra}]\"", file=sys.stderr)
    return 1


def _parser(verb: str, module: Any) -> argparse.ArgumentParser:
    """Of a verb's module."""
    parser = argparse.ArgumentParser(
        prog=f"vla {verb}",
        description=module.HELP,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    if verb in LOADING_VERBS:
        parser.add_argument(
            "--trust",
            action="append",
            default=[],
            metavar="NAME",
            help="let a file name this class, step or policy type",
        )
    return parser


def _reader_left() -> bool:
    """Whether nobody reads stdout any more, as after ``| head``; what is still to be written is then dropped."""
    stdout, poll = sys.stdout.fileno(), select.poll()
    poll.register(stdout, 0)
    if not poll.poll(0):  # it was another pipe that broke
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


def main(argv: list[str] | None = None) -> int:
    """Entry point of the ``vla`` command; returns the process's exit code."""
    try:
        code = _obey(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_left():
            raise
        return READER_LEFT


def _obey(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        from vla_stack.version import __version__

        print(__version__)
        return 0
    if argv[0] == "--list":
        return _list(argv[1:])
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        print(f"vla: there is no verb '{verb}'; the verbs are {', '.join(VERBS)}", file=sys.stderr)
        return 2
    from vla_stack import registry
    from vla_stack.errors import UserError
    from vla_stack.schema import SchemaError
    from vla_stack.trust import trust
    from vla_stack.waiting import waiting

    if verb in ROBOT_VERBS:
        from vla_stack.verbs.robot_arguments import translate_flags

    atexit.register(gc.freeze)  # Python's last look for cycles among torch's objects: seconds, and all go anyway
    try:
        with ExitStack() as stack:
            stack.enter_context(waiting(f"vla {verb}", verb in ENDING_VERBS))
            module = registry.VERBS.get(verb)
            args = _parser(verb, module).parse_args(translate_flags(rest) if verb in ROBOT_VERBS else rest)
            if verb in LOADING_VERBS:
                trust(args.trust)
            if verb == "robot":  # LeRobot's calibrations ask on the terminal
                stack.close()
            return int(module.main(args) or 0)
    except ModuleNotFoundError as e:
        return _absent(verb, e)
    except (UserError, SchemaError) as e:
        if os.environ.get("VLA_TRACEBACK"):
            raise
        print(f"vla {verb}: {e}", file=sys.stderr)
        return 1
    except OSError as e:  # of a file that a person named, or of a full disk
        if isinstance(e, BrokenPipeError) and _reader_left():
            return READER_LEFT
        if os.environ.get("VLA_TRACEBACK") or e.errno is None:
            raise
        where = f"{e.filename}: " if e.filename is not None else ""
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        print(f"vla {verb}: {where}{e.strerror}{' -- free disk space and try again' * full}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nvla {verb}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
