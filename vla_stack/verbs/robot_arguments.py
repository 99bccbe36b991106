"""Which robot, with which arguments and limits: command-line options that several verbs share.

LeRobot's own flags work as well: ``--robot.type=so101_follower --robot.port=/dev/ttyACM0`` is
``--robot lerobot --robot-arg robot_type=so101_follower --robot-arg port=/dev/ttyACM0``, and ``--teleop.*`` likewise.
``@arm.txt`` stands for the options in that file, one a line, as they would stand on the command line without quotes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from robot_drivers import Driver, driver_type, make_driver
from robot_drivers.dry_run import dry_run
from vla_stack.errors import UserError
from vla_stack.registry import ROBOTS
from vla_stack.runtime.driver import Capabilities
from vla_stack.runtime.executor import MODES, ExecutorConfig
from vla_stack.runtime.limits import SOFT_START_S, Limits, read_limits
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.verbs.arguments import count, positive


def add_robot_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--robot", default="sim", help=f"{', '.join(ROBOTS.names())} or module:Class (default: %(default)s)")
    add(
        "--robot-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the driver; repeatable. @FILE stands for options in a file, one a line",
    )
    add("--task", help="sim: name of the task (default: pick); otherwise: the instruction")
    add("--limits", type=Path, metavar="FILE", help="limits of this robot; `vla robot check --write` makes one")


def add_execution_arguments(parser: argparse.ArgumentParser, mode: str) -> None:
    """How a policy's chunks become motion; ``mode`` is the flag that names it."""
    add = parser.add_argument
    add(mode, default="naive", choices=MODES, help="how chunks become motion (default: %(default)s)")
    add("--execute", type=count, help="steps between requests, at least (default: the policy's n_action_steps)")
    add("--hold-s", type=positive, help="HOLD becomes STOP after this long (default: 0.5, in sync 5)")
    add(
        "--interpolate",
        type=count,
        default=1,
        metavar="N",
        help="commands a control step, those between on the way to the next action (default: 1; where the robot can)",
    )


def capabilities(args: argparse.Namespace) -> Capabilities:
    """What the robot that was named can do.

    Raises:
        UserError: There is no such robot.
    """
    return driver_type(args.robot).capabilities


def execution(args: argparse.Namespace, mode: str, seed: int = 0) -> ExecutorConfig:
    """What :func:`add_execution_arguments` were given.

    Raises:
        UserError: The robot cannot do it.
    """
    if args.interpolate != 1 and not capabilities(args).interpolates:  # it takes the newest at its own steps
        raise UserError(f"--interpolate: robot '{args.robot}' takes one command a control step", "leave it out")
    return ExecutorConfig(mode, args.execute, hold_s=args.hold_s, interpolate=args.interpolate, seed=seed)


def options_of(file: Path) -> list[str]:
    """The options in a file, one a line; empty lines and those that begin with ``#`` are none.

    Raises:
        UserError: It cannot be read, or a line is no option.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not a text"
        raise UserError(f"@{file}: {why}", "@FILE stands for the options in a file, one a line") from None
    for number, line in enumerate(lines, 1):
        if line and line[0] not in "-#":
            raise UserError(
                f"{file}, line {number}: '{line[:40]}' is no option", "write one option a line, --KEY=VALUE"
            )
    return [line for line in lines if line and not line.startswith("#")]


def translate_flags(argv: Sequence[str]) -> list[str]:
    """The options of ``@FILE`` in its place, LeRobot's ``--robot.KEY=VALUE`` and ``--teleop.KEY=VALUE`` as ours.

    Raises:
        UserError: There is no such file, or a flag has no value.
    """
    argv = [option for text in argv for option in (options_of(Path(text[1:])) if text.startswith("@") else [text])]
    out: list[str] = []
    for i, text in enumerate(argv):
        device = next((d for d in ("robot", "teleop") if text.startswith(f"--{d}.")), None)
        if device is None:
            out.append(text)
            continue
        key, equals, value = text.removeprefix(f"--{device}.").partition("=")
        if not equals:
            raise UserError(f"{text}: there is no '='", f"write {text}={argv[i + 1] if i + 1 < len(argv) else 'VALUE'}")
        if key == "type":
            out += [f"--{device}", "lerobot", f"--{device}-arg", f"{device}_type={value}"]
        else:
            out += [f"--{device}-arg", f"{key}={value}"]
    return out


def key_values(pairs: Sequence[str], option: str = "--robot-arg") -> dict[str, Any]:
    """KEY=VALUE pairs, values read as YAML.

    Raises:
        UserError: One is not KEY=VALUE.
    """
    out: dict[str, Any] = {}
    for text in pairs:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{option} {text}: there is no '='", "write KEY=VALUE")
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            out[key] = value  # e.g. a path with a colon
    return out


def driver_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the driver from ``--task``, ``--robot-arg`` and ``--limits``."""
    out: dict[str, Any] = {}
    if task := args.task or capabilities(args).task:
        out["task"] = task
    out |= key_values(args.robot_arg)
    if (limits := robot_limits(args)) and limits.max_load:
        if not capabilities(args).loads:
            raise UserError(f"{args.limits}: max_load: robot '{args.robot}' reports no loads", "remove it")
        out["max_load"] = limits.max_load
    return out


def recorded_options(args: argparse.Namespace, root: Path | None) -> dict[str, Any]:
    """Arguments of the driver with which its pictures and rate are those of a dataset that is continued."""
    from vla_stack.data.features import read_robot_spec  # a robot that is only run needs no dataset library
    from vla_stack.data.layout import INFO

    return capabilities(args).like(read_robot_spec(root)) if root and (root / INFO).exists() else {}


def robot_limits(args: argparse.Namespace) -> Limits | None:
    """The limits file, if there is one."""
    return read_limits(args.limits) if args.limits else None


def robot_safety(args: argparse.Namespace) -> SafetyConfig:
    """Limits of the file, for the robot that it names; real robots start softly unless the file says otherwise."""
    soft_start_s = 0.0 if capabilities(args).simulated else SOFT_START_S
    limits = robot_limits(args)
    if limits is None:
        return SafetyConfig(soft_start_s=soft_start_s)
    if "soft_start_s" in yaml.safe_load(args.limits.read_text()):
        soft_start_s = limits.safety.soft_start_s
    return replace(limits.safety, robot=limits.robot, soft_start_s=soft_start_s)


def driver_maker(args: argparse.Namespace, dry: bool = False, **more: Any) -> partial[Driver]:
    """A picklable function that builds the driver; ``more`` are arguments that the command line wins over."""
    return partial(_make, args.robot, {**more, **driver_arguments(args)}, dry)


def _make(name: str, arguments: dict[str, Any], dry: bool) -> Driver:
    driver = make_driver(name, **arguments)
    return dry_run(driver) if dry else driver
