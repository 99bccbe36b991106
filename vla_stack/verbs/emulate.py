"""``vla emulate``: hardware that is software, for trying everything before the parcel arrives."""

from __future__ import annotations

import argparse
import json
import select
import signal
import sys
from pathlib import Path

from robot_drivers.so101_emulator import FAULTS, ID, Emulator
from vla_stack.errors import UserError
from vla_stack.locks import LOCK, locked
from vla_stack.verbs.arguments import positive, whole

HELP = "Emulate an SO-101 (bus, servos, arm, cameras) that LeRobot's drivers and `vla run` take for a real one."
EXAMPLES = (
    "vla emulate so101",
    "vla emulate so101 --leader --task so101_pick",
    "vla emulate so101 --uncalibrated        # then: lerobot-calibrate --robot.type=so101_follower --robot.port=...",
    'echo "loss 0.1" | vla emulate so101      # commands are read from the terminal: type help',
)
RATE_HZ = 10.0  # of control
COMMANDS = """commands:
  reset [SEED]             lay the scene out anew, arm at its start
  status                   success, stage, joint angles, what the bus has seen
  hand ARM MOTION          take the follower or leader: middle, sweep (for calibration), expert (leader), go
  FAULT [VALUE] [ARM]      loss P, corruption P, latency S, unplug, power, freeze JOINT, overload JOINT, heat JOINT,
                           camera NAME; joints count from 0
  mend                     repair everything
  quit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("robot", choices=("so101",), help="what to emulate")
    add("--leader", action="store_true", help="a leader arm as well")
    add("--task", default="so101_pick", help="scene around the follower (default: %(default)s)")
    add("--folder", type=Path, default=Path("outputs/so101"), help="ports and calibrations (default: %(default)s)")
    add("--uncalibrated", action="store_true", help="servos as new, horns mounted anyhow")
    add("--image-size", type=whole, default=64, help="of the cameras, pixels; 0 for no cameras (default: %(default)s)")
    add("--fps", type=positive, default=30.0, help="of the cameras (default: %(default)s)")
    add("--seed", type=whole, default=0, help="of the first scene, the horns and the faults (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    emulator = Emulator(
        args.folder, args.task, args.leader, not args.uncalibrated, args.fps, args.image_size, args.seed
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    # Ports are links, which a second emulator would turn towards itself while a driver reads from the first.
    with locked(args.folder / LOCK, args.folder, "quit that emulator, or give another --folder"), emulator:
        print(emulator.reset(args.seed), flush=True)
        print(next_steps(emulator, not args.uncalibrated), flush=True)
        try:
            _console(emulator)
        except KeyboardInterrupt:
            pass
    print("\nThe emulated arm is gone; its calibration files stay in", args.folder)
    return 0


def write_options(emulator: Emulator) -> dict[str, Path]:
    """A file of command-line options for each arm, to be given as ``@FILE``; they lie beside its port."""
    files = {}
    for arm in emulator.ports:
        device = "robot" if arm == "follower" else "teleop"
        fields = {"type": f"so101_{arm}", **emulator.device(arm)}
        if arm == "follower":
            fields |= {"rate_hz": RATE_HZ, "cameras": json.dumps(emulator.cameras)}
        files[arm] = emulator.folder / f"{arm}.txt"
        files[arm].write_text("".join(f"--{device}.{key}={value}\n" for key, value in fields.items()))
    return files


def next_steps(emulator: Emulator, calibrated: bool) -> str:
    """What to run now, in another terminal."""
    files = write_options(emulator)
    lines = [f"{name} at {port}, its options in {files[name]}" for name, port in emulator.ports.items()]
    lines += [f"camera {name}: {json.dumps(options)}" for name, options in emulator.cameras.items()]
    lines.append("\nnow, for example:")
    follower = _flags("robot", "follower", emulator)
    if not calibrated:
        lines.append(f"  lerobot-calibrate {follower}   # ENTER: `hand follower middle`, then `hand follower sweep`")
    elif "leader" in emulator.ports:
        lines.append(
            f"  lerobot-teleoperate {follower} {_flags('teleop', 'leader', emulator)}   # then: hand leader expert"
        )
        lines.append(
            f"  vla teleop @{files['follower']} @{files['leader']} --task 'pick up the red cube' --root data/mine"
        )
    lines.append(f"  vla run @{files['follower']} --task 'pick up the red cube'")
    return "\n".join([*lines, "", COMMANDS])


def obey(emulator: Emulator, line: str) -> str:
    """Carry out one line of the console; returns what to print.

    Raises:
        UserError: There is no such command, or it lacks something.
    """
    verb, *words = line.split()
    try:
        if verb == "reset":
            return emulator.reset(int(words[0]) if words else 0)
        if verb == "status":
            return json.dumps({k: v for k, v in emulator.status().items() if k != "kind"})
        if verb == "hand":
            emulator.hand(words[0], words[1])
        elif verb == "mend":
            emulator.mend()
        elif verb in FAULTS:
            arm = words.pop() if words and words[-1] in emulator.ports else "follower"
            emulator.inject(verb, words[0] if words else None, arm)
        else:
            return COMMANDS
    except (IndexError, ValueError):
        raise UserError(f"'{line}' lacks something", "type help") from None
    return "done"


def _console(emulator: Emulator) -> None:
    """Obey lines of the terminal until `quit`; without a terminal, until a signal."""
    while True:
        if not select.select([sys.stdin], [], [], 1.0)[0]:
            emulator.status()  # raises where the emulator is gone
            continue
        line = sys.stdin.readline()
        if not line:
            signal.pause()
        elif line.strip() == "quit":
            return
        elif line.strip():
            try:
                print(obey(emulator, line), flush=True)
            except UserError as e:
                print(e, flush=True)


def _flags(prefix: str, arm: str, emulator: Emulator) -> str:
    device = emulator.device(arm)
    return (
        f"--{prefix}.type=so101_{arm} --{prefix}.port={device['port']} --{prefix}.id={ID} "
        f"--{prefix}.calibration_dir={device['calibration_dir']}"
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
