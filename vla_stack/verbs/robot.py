"""``vla robot``: calibrate a robot, check that it is ready, move one joint a little, offer it, let it go."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from robot_drivers.jog import jog
from vla_stack.errors import UserError
from vla_stack.runtime.clock import RealClock
from vla_stack.runtime.driver import Driver, EpisodicDriver, Releasing, SelfChecking
from vla_stack.runtime.limits import check_limits, describe_limits, make_envelope
from vla_stack.schema import Observation, RobotSpec
from vla_stack.verbs.arguments import number, positive
from vla_stack.verbs.robot_arguments import (
    add_robot_arguments,
    driver_maker,
    key_values,
    robot_limits,
    robot_safety,
)

LOOKS = 3  # at a robot that shows a fault
HELP = "Calibrate a robot, check that it is ready, move one of its joints, offer it to another computer, let it go."
EXAMPLES = (
    "vla robot calibrate --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm",
    "vla robot calibrate --teleop.type=so101_leader --teleop.port=/dev/ttyACM1 --teleop.id=hand",
    "vla robot check --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm --write limits.yaml",
    "vla robot check --robot sim --task pick",
    "vla robot jog --robot sim --joint tcp_z.pos --by 0.03",
    "vla robot serve --robot sim --endpoint tcp://127.0.0.1:5570   # and from another computer, with keys:",
    "vla run --robot remote --robot-arg endpoint=tcp://arm.lab:5570",
    "vla robot release --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm    # it falls: hold it",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("calibrate", "check", "jog", "serve", "release"))
    add_robot_arguments(parser)
    add = parser.add_argument
    add("--teleop", help="calibrate: a teleoperator instead; lerobot")
    add("--teleop-arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the teleoperator")
    add(
        "--seconds",
        type=positive,
        default=2.0,
        help=f"check: how long to read; {LOOKS} times at most until no fault shows (default: %(default)s)",
    )
    add("--write", type=Path, metavar="FILE", help="check: write the robot's present limits there, to be edited")
    add("--endpoint", default="tcp://127.0.0.1:5570", help="serve: where to listen (default: %(default)s)")
    add("--joint", help="jog: action dimension")
    add("--by", type=number, help="jog: how far, in the dimension's SI unit")


def main(args: argparse.Namespace) -> int:
    if args.what == "calibrate":
        return _calibrate(args)
    if args.what == "jog" and (args.joint is None or args.by is None):
        raise UserError("jog needs a joint and a distance", "e.g. --joint tcp_z.pos --by 0.03")
    if args.what == "check" and args.write:
        check_new(args.write)  # before the arm is looked at
    driver = driver_maker(args)()
    if args.what == "release":
        return _release(args, driver)
    try:
        driver.connect()
        if limits := robot_limits(args):
            check_limits(limits, driver.spec)
        if isinstance(driver, EpisodicDriver) and args.what != "jog":  # its control loop does
            driver.reset(0)
        return {"check": _check, "jog": _jog, "serve": _serve}[args.what](args, driver)
    finally:
        driver.disconnect()


def _calibrate(args: argparse.Namespace) -> int:
    from robot_drivers.lerobot_calibrate import calibrate

    kind, pairs, key = "robot", args.robot_arg, "robot_type"
    if args.teleop:
        kind, pairs, key = "teleoperator", args.teleop_arg, "teleop_type"
    config = key_values(pairs)
    name, module = config.pop(key, None), config.pop("module", None)
    if name is None:
        raise UserError("only LeRobot devices are calibrated", "give --robot.type=... or --teleop.type=...")
    path, lines = calibrate(kind, str(name), config, module)
    print("\n".join(lines))
    if kind == "robot":
        print(f"calibration written to {path}. Next: vla robot check with the same arguments")
    else:
        print(f"calibration written to {path}. Next: vla teleop")
    return 0


def _check(args: argparse.Namespace, driver: Driver) -> int:
    spec = driver.spec
    print(f"{spec.name}: {len(spec.action)} commands, {len(spec.state)} measured values, {spec.rate_hz:g} Hz")
    for camera in spec.cameras:
        print(f"camera {camera.name}: {camera.width} x {camera.height}")
    print(describe_limits(spec, robot_safety(args)))
    print(driver.capabilities.guard.value)
    looks = [_look(driver, args.seconds)]
    while looks[-1].faults and len(looks) < LOOKS:  # what stalled while it began, or for a moment, comes round
        looks.append(_look(driver, args.seconds))
    look = looks[-1]
    for dim, value in zip(spec.action, look.obs.state, strict=False):
        mark = "" if dim.low <= value <= dim.high else "   outside its limits: move it back by hand first"
        print(f"{dim.name:<22}{value:>10.3f} {dim.unit}{mark}")
    print(
        f"{len(look.took_ms)} readings at {look.rate_hz:.1f} Hz, {np.median(look.took_ms):.1f} ms each "
        f"(99 %: {np.quantile(look.took_ms, 0.99):.1f} ms), at most {max(look.ages_ms):.0f} ms old"
    )
    for why in dict.fromkeys(why for earlier in looks[:-1] for why in earlier.faults.values()):
        print(f"at first: {why}")
    for why in look.faults.values():
        print(f"FAULT {why}")
    if args.write:
        write_limits(args.write, spec)
        print(f"limits written to {args.write}: edit them, and give them as --limits {args.write}")
    ready = not look.faults
    print("ready. Next: vla robot jog, vla teleop or vla run with the same arguments" if ready else "not ready")
    return 0 if ready else 1


@dataclass(frozen=True)
class _Look:
    """Readings at the robot's rate: how long each took, how old it was, and what was wrong meanwhile, by kind."""

    obs: Observation
    took_ms: list[float]
    ages_ms: list[float]
    rate_hz: float
    faults: dict[str, str]


def _look(driver: Driver, seconds: float) -> _Look:
    clock, dt_ns = RealClock(), round(1e9 * driver.spec.dt)
    took_ms, ages_ms, faults = [], [], dict[str, str]()
    t_0 = clock.now_ns()
    obs = driver.read()
    for k in range(max(1, round(seconds * driver.spec.rate_hz))):
        clock.sleep_until_ns(t_0 + (k + 1) * dt_ns)
        before = time.perf_counter()
        obs = driver.read()
        took_ms.append((time.perf_counter() - before) * 1e3)
        ages_ms.append((clock.now_ns() - obs.t_capture_ns) * 1e-6)
        if isinstance(driver, SelfChecking) and driver.fault:
            faults[driver.fault.kind] = driver.fault.why
    return _Look(obs, took_ms, ages_ms, len(took_ms) / ((clock.now_ns() - t_0) * 1e-9), faults)


def _jog(args: argparse.Namespace, driver: Driver) -> int:
    """Move one dimension by a distance and back, through the envelope; say how well it followed."""
    names = [d.name for d in driver.spec.action]
    if args.joint not in names:
        raise UserError(f"there is no '{args.joint}'", f"the robot has {', '.join(names)}")
    i = names.index(args.joint)
    print(f"moving {args.joint} by {args.by:g} and back", flush=True)
    moved = jog(driver, make_envelope(driver.spec, robot_safety(args)), i, args.by)
    unit, asked = driver.spec.action[i].unit, moved.start + args.by
    print(f"{args.joint}: {moved.start:.3f} -> {moved.there:.3f} (asked for {asked:.3f}) -> {moved.back:.3f} {unit}")
    off, short = abs(moved.there - asked), abs(moved.back - moved.start)
    if off >= 0.2 * abs(args.by):
        print(f"it is {off:.3f} {unit} off: a load, a limit, or a blocked joint")
    elif short >= 0.2 * abs(args.by):
        print(f"it follows there, but is {short:.3f} {unit} from its start: a load, or a blocked joint")
    else:
        print("it follows")
    return 0


def _release(args: argparse.Namespace, driver: Driver) -> int:
    if not isinstance(driver, Releasing):
        raise UserError(f"robot '{args.robot}' has no torque that could be switched off")
    driver.release()
    print("its torque is off")
    return 0


def _serve(args: argparse.Namespace, driver: Driver) -> int:
    from robot_drivers.remote_service import MAX_BYTES, serve_driver
    from vla_stack.serving.admission import Admission
    from vla_stack.serving.endpoint import is_local
    from vla_stack.serving.keys import KeyFolder
    from vla_stack.serving.listener import Listener

    admission = None if is_local(args.endpoint) else Admission(KeyFolder())
    listener = Listener(args.endpoint, admission, MAX_BYTES)
    try:
        print(f"{driver.spec.name} at {args.endpoint}; Ctrl-C ends; {driver.capabilities.guard.value}", flush=True)
        envelope = make_envelope(driver.spec, robot_safety(args))
        serve_driver(driver, envelope, listener, lambda: True, admission=admission)
    except KeyboardInterrupt:
        print("\nended: the robot holds")
    finally:
        listener.close()
    return 0


def check_new(path: Path) -> None:
    """Raise ``UserError`` where a limits file would overwrite another, or has no folder to lie in."""
    if path.exists():
        raise UserError(f"{path} exists", "give another name, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", "make it, or give another name")


def write_limits(path: Path, spec: RobotSpec) -> None:
    """A limits file with what the robot may do at present; nothing is overwritten.

    Raises:
        UserError: The file exists.
    """
    check_new(path)
    dims = {}
    for d in spec.action:
        bounds = {"low": d.low, "high": d.high, "max_rate": d.max_rate}
        values = {k: round(float(v), 4) for k, v in bounds.items() if np.isfinite(v)}
        if d.unit == "rad":
            values["max_acceleration"] = 20.0
        elif d.unit == "m":
            values["max_acceleration"] = 5.0
        dims[d.name] = values
    content = {"robot": spec.name, "dimensions": dims, "soft_start_s": 1.0}
    path.write_text("# SI units; see docs/robots.md\n" + yaml.safe_dump(content, sort_keys=False))
