"""LeRobot devices, built in or from plug-ins, from the names and fields of their configs; imports LeRobot late."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Mapping
from typing import Any

from robot_drivers.lerobot_port import prepare
from vla_stack.errors import UserError, check_options


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
        raise UserError(
            f"a LeRobot {kind} needs the package '{e.name}'", "in the clone: pip install -e '.[hardware]'"
        ) from e
    if module is not None:
        importlib.import_module(module)
    # LeRobot's own discovery would import policy plug-ins too, which takes seconds and nobody here needs.
    for plugin in importlib.metadata.distributions():
        if (plugin.name or "").startswith((f"lerobot_{kind}_", "lerobot_camera_")):
            importlib.import_module(plugin.name)
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
        device = build(config)
    except UserError:
        raise
    except Exception as e:  # draccus and the devices raise what they like
        flag = "--teleop" if kind == "teleoperator" else f"--{kind}"
        raise UserError(f"{name}: {' '.join(str(e).split())}", f"compare with LeRobot's {flag}.* options") from e
    prepare(device)
    return device


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


def _factory(kind: str) -> Any:
    if kind == "camera":
        from lerobot.cameras import make_cameras_from_configs

        return lambda config: make_cameras_from_configs({"camera": config})["camera"]
    return getattr(importlib.import_module(f"lerobot.{kind}s.utils"), f"make_{kind}_from_config")
