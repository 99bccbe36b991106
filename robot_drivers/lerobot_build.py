"""LeRobot devices, built in or from plug-ins, from the names and fields of their configs; imports LeRobot late."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from robot_drivers.lerobot_port import arms, prepare
from vla_stack.errors import UserError, check_options
from vla_stack.registry import import_lerobot_plugins


def make_lerobot(kind: str, name: str, fields: Mapping[str, Any], module: str | None = None) -> Any:
    """A LeRobot device, not connected.

    Args:
        kind: ``robot``, ``teleoperator`` or ``camera``.
        name: Type under which its config is registered, e.g. ``so101_follower``.
        fields: Of its config, as on LeRobot's command line (``--robot.port=...`` is ``{"port": ...}``).
        module: To import first, which registers the config; for plug-ins that are not installed as such.

    Raises:
        UserError: LeRobot is not installed, knows no such type, or the fields are not its config's.
    """
    try:
        import draccus
        import lerobot.cameras.opencv
        import lerobot.cameras.zmq  # noqa: F401  (registers camera types)

        package = importlib.import_module(f"lerobot.{kind}s")
        registry = getattr(package, f"{kind.capitalize()}Config")
        build = _factory(kind)
    except ImportError as e:
        raise UserError(f"a LeRobot {kind} needs the package '{e.name}'", 'pip install "vla-stack[hardware]"') from e
    if module is not None:
        importlib.import_module(module)
    import_lerobot_plugins(kind, "camera")
    if name not in registry.get_known_choices():  # built-in configs register when they are imported
        for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    known = registry.get_known_choices()
    if name not in known:
        raise UserError(f"LeRobot knows no {kind} '{name}'", f"it knows {', '.join(sorted(known))}")
    check_options(name, fields, [f.name for f in dataclasses.fields(known[name]) if f.init])
    try:
        config = draccus.decode(registry, {"type": name, **fields})
        _choose_degrees(config, fields, name)
        _keep_torque(config)
        device = build(config)
    except UserError:
        raise
    except Exception as e:  # draccus and the devices raise what they like
        flag = "--teleop" if kind == "teleoperator" else f"--{kind}"
        raise UserError(f"{name}: {' '.join(str(e).split())}", f"compare with LeRobot's {flag}.* options") from e
    prepare(device)
    return device


def take_cameras(robot: Any) -> dict[str, Any]:
    """Take a robot's cameras from it, by their features' names, so that it reads joints alone.

    None where it would not do without them.
    """
    features = robot.observation_features
    holders = [robot, *(arm for arm in arms(robot).values() if arm is not robot)]
    before = [dict(c) if isinstance(c := getattr(holder, "cameras", None), dict) else {} for holder in holders]
    taken = {}
    for prefix, arm in arms(robot).items():
        cameras = getattr(arm, "cameras", None)
        for key, camera in cameras.items() if isinstance(cameras, dict) else ():
            taken[key if key in features else prefix + key] = camera  # an arm may hold a camera of the whole robot
    for holder, cameras in zip(holders, before, strict=True):
        if cameras:
            holder.cameras.clear()
        holder.__dict__.pop("observation_features", None)  # a cached property
    if any(isinstance(kind, tuple) and name in taken for name, kind in robot.observation_features.items()):
        for holder, cameras in zip(holders, before, strict=True):
            if cameras:
                holder.cameras.update(cameras)
            holder.__dict__.pop("observation_features", None)
        return {}
    return taken


def _choose_degrees(config: Any, given: Mapping[str, Any], name: str) -> None:
    """Switch ``use_degrees`` on where a config, or one inside it, has it: some default to percent.

    Raises:
        UserError: It was switched off.
    """
    for field in dataclasses.fields(config):
        value, mine = getattr(config, field.name), given.get(field.name)
        if field.name == "use_degrees":
            if mine is not None and not value:
                text = f"{name}: use_degrees=False commands percent of a range, which has no SI unit"
                raise UserError(text, "leave it on")
            config.use_degrees = True
        elif dataclasses.is_dataclass(value):
            _choose_degrees(value, mine if isinstance(mine, Mapping) else {}, name)


def _keep_torque(config: Any) -> None:
    """No arm of a robot switches its motors off because a program ends: without brakes it would fall."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "disable_torque_on_disconnect":
            config.disable_torque_on_disconnect = False
        elif dataclasses.is_dataclass(value):
            _keep_torque(value)


def _factory(kind: str) -> Any:
    if kind == "camera":
        from lerobot.cameras import make_cameras_from_configs

        return lambda config: make_cameras_from_configs({"camera": config})["camera"]
    return getattr(importlib.import_module(f"lerobot.{kind}s.utils"), f"make_{kind}_from_config")
