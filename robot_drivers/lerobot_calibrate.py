"""Calibration of LeRobot devices, in a terminal: LeRobot's own procedure, its result read back and explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robot_drivers.lerobot_build import make_lerobot
from vla_stack.errors import UserError


def calibrate(kind: str, name: str, config: dict[str, Any], module: str | None = None) -> tuple[Path, list[str]]:
    """Calibrate a robot or teleoperator; asks questions on the terminal.

    Args:
        kind: ``robot`` or ``teleoperator``.
        name: Type of its config, e.g. ``so101_follower``.
        config: Fields of its config: ``port``, ``id``, ...; cameras are left alone.
        module: Module that registers the type, for plug-ins that are not installed as such.

    Returns:
        The file that was written, and a line a motor.

    Raises:
        UserError: The device does not answer, or a joint was hardly moved.
    """
    device = make_lerobot(kind, name, {k: v for k, v in config.items() if k != "cameras"}, module)
    if config.get("id") is None:
        raise UserError("a calibration belongs to one device", "give it a name: id=NAME, and the same one later")
    try:
        device.connect(calibrate=False)
        device.calibrate()
    except UserError:  # another program has its port
        raise
    except (KeyboardInterrupt, EOFError):
        raise UserError("calibration was interrupted: nothing was written", "start it again") from None
    except Exception as e:
        text = " ".join(str(e).split())
        raise UserError(f"{name} cannot be calibrated: {text}", "check port, power and cables, move all joints") from e
    finally:
        if device.is_connected:
            device.disconnect()
    lines = [
        f"{joint:<16} ticks {c.range_min} to {c.range_max}, {(c.range_max - c.range_min) * 360 / 4096:.0f} degrees"
        for joint, c in device.calibration.items()
        if hasattr(c, "range_min")
    ]
    return Path(device.calibration_fpath), lines
