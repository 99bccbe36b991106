"""Any robot that LeRobot knows, built in or from a plug-in, as a :class:`~robot_drivers.driver.Driver`.

LeRobot robots speak degrees and percent; this side speaks radians and ratios. The conversion happens here and nowhere
else. A feature's unit follows from its name (``gripper.pos`` percent, other ``.pos`` degrees, ``.vel`` metres per
second, ``theta.vel`` degrees per second) unless ``units`` says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import pkgutil
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_drivers.watchdog import Watchdog
from vla_stack.errors import UserError
from vla_stack.schema import Camera, Dim, Observation, RobotSpec, Unit

# Unit of a feature -> (factor to SI, SI unit)
UNITS: dict[str, tuple[float, Unit]] = {
    "deg": (np.pi / 180, "rad"),
    "deg/s": (np.pi / 180, "rad/s"),
    "percent": (0.01, "ratio"),
    "mm": (0.001, "m"),
    "rad": (1.0, "rad"),
    "rad/s": (1.0, "rad/s"),
    "m": (1.0, "m"),
    "m/s": (1.0, "m/s"),
    "ratio": (1.0, "ratio"),
}


class LeRobotRobot:
    """A LeRobot robot.

    Args:
        robot_type: Name under which its config is registered, e.g. ``so101_follower``.
        task: The instruction for the policy.
        rate_hz: Control rate.
        module: Module to import first, which registers the robot's config; for plug-ins that are not installed as such.
        units: Feature -> unit in :data:`UNITS`, where its name does not say.
        limits: Feature -> (low, high) in SI; by default the calibrated range, half a turn either way without one.
        max_rate: Largest joint speed, rad/s.
        **config: Fields of the robot's config, as on LeRobot's command line: ``port``, ``id``, ``cameras``, ...
    """

    def __init__(
        self,
        robot_type: str,
        task: str = "",
        rate_hz: float = 30.0,
        module: str | None = None,
        units: Mapping[str, str] | None = None,
        limits: Mapping[str, tuple[float, float]] | None = None,
        max_rate: float = 2.0,
        **config: Any,
    ) -> None:
        self._task, self._rate_hz, self._max_rate = task, rate_hz, max_rate
        self._units, self._limits = dict(units or {}), dict(limits or {})
        self._robot = _make_robot(robot_type, module, config)
        self._lock = threading.RLock()
        self._watchdog: Watchdog | None = None
        self._spec: RobotSpec | None = None
        self._newest: Observation | None = None
        self.read_errors = 0

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("a LeRobot robot has no description before connect(): its limits are in its calibration")
        return self._spec

    def connect(self) -> None:
        """Connect and check the calibration.

        Raises:
            UserError: The robot does not answer, or is not calibrated.
        """
        robot = self._robot
        try:
            robot.connect(calibrate=False)  # calibration asks questions, and this process has no terminal
        except Exception as e:
            raise UserError(f"{robot.name} cannot be connected: {e}", "check port, power and cables") from e
        if not robot.is_calibrated:
            robot.disconnect()
            raise UserError(f"{robot.name} is not calibrated", "run lerobot-calibrate with the same type and id")
        self._spec = self._describe()
        self._watchdog = Watchdog(3 * self._spec.dt, self._stand_still, self._lock)

    def read(self) -> Observation:
        """Reads joints and newest camera frames. A failed reading returns the last one, whose age tells."""
        t_ns = time.monotonic_ns()
        try:
            with self._lock:
                raw = self._robot.get_observation()
        except Exception:
            self.read_errors += 1
            if self._newest is None:
                raise
            return self._newest
        state = np.array([raw[d.name] for d in self.spec.state], np.float64) * self._factors(self.spec.state)
        images = {c.name: np.ascontiguousarray(raw[c.name]) for c in self.spec.cameras}
        self._newest = Observation(state.astype(np.float32), images, self._task, 0, t_ns)
        return self._newest

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        factors = self._factors(self.spec.action)
        goal = {
            d.name: float(v) for d, v in zip(self.spec.action, np.asarray(action, np.float64) / factors, strict=True)
        }
        with self._lock:
            sent = self._robot.send_action(goal)
        if self._watchdog is not None:
            self._watchdog.feed()
        values = np.array([sent.get(name, value) for name, value in goal.items()], np.float64)
        return (values * factors).astype(np.float32)

    def hold(self) -> None:
        if self._watchdog is not None:
            self._watchdog.rest()
        with self._lock:
            self._stand_still()

    def stop(self) -> None:
        """Stand still with the motors on: an arm without brakes falls when they are off."""
        self.hold()

    def disconnect(self) -> None:
        if self._watchdog is not None:
            self._watchdog.end()
            self._watchdog = None
        if self._robot.is_connected:
            with self._lock, contextlib.suppress(Exception):
                self._stand_still()
            self._robot.disconnect()

    def _stand_still(self) -> None:
        """Command the measured position; zero where a velocity is commanded."""
        raw = self._robot.get_observation()
        self._robot.send_action({d.name: 0.0 if d.unit.endswith("/s") else raw[d.name] for d in self.spec.action})

    def _describe(self) -> RobotSpec:
        robot = self._robot
        action = list(robot.action_features)
        measured = [name for name, kind in robot.observation_features.items() if kind is float]
        for name in action:
            if name not in measured:
                raise UserError(f"{robot.name} commands '{name}' but does not measure it")
        shapes = {n: s for n, s in robot.observation_features.items() if isinstance(s, tuple) and s[-1] == 3}
        order = action + [name for name in measured if name not in action]
        return RobotSpec(
            name=f"lerobot/{robot.name}",
            state=tuple(self._dim(name) for name in order),
            action=tuple(self._dim(name) for name in action),
            cameras=tuple(Camera(name, height, width) for name, (height, width, _) in shapes.items()),
            rate_hz=self._rate_hz,
        )

    def _dim(self, name: str) -> Dim:
        unit = UNITS[self._unit(name)][1]
        if name.rpartition(".")[0].endswith("gripper"):
            low, high = self._limits.get(name, (0.0, 1.0))
            return Dim(name, unit, low, high, kind="gripper")
        default = _calibrated_range(self._robot, name) if unit == "rad" else (-np.inf, np.inf)
        low, high = self._limits.get(name, default)
        rate = self._max_rate if unit == "rad" else np.inf
        return Dim(name, unit, low, high, rate, "angle" if unit == "rad" else "position")

    def _unit(self, name: str) -> str:
        unit = self._units.get(name) or _usual_unit(name)
        if unit not in UNITS:
            raise UserError(
                f"the unit of '{name}' is unknown", f"give units={{'{name}': ...}}, one of {', '.join(UNITS)}"
            )
        return unit

    def _factors(self, dims: tuple[Dim, ...]) -> NDArray[np.float64]:
        return np.array([UNITS[self._unit(d.name)][0] for d in dims])


def _usual_unit(name: str) -> str:
    part, _, quantity = name.rpartition(".")
    if quantity == "pos":
        return "percent" if part.endswith("gripper") else "deg"
    if quantity == "vel":
        return "deg/s" if part == "theta" else "m/s"
    return ""


def _calibrated_range(robot: Any, name: str) -> tuple[float, float]:
    """Range of a joint in radians about its middle, which is where LeRobot puts zero degrees."""
    joint = name.rpartition(".")[0]
    bus, calibration = getattr(robot, "bus", None), getattr(robot, "calibration", {}).get(joint)
    if bus is None or calibration is None or joint not in bus.motors:
        return -np.pi, np.pi
    ticks = bus.model_resolution_table[bus.motors[joint].model] - 1
    half = (calibration.range_max - calibration.range_min) / 2 * 2 * np.pi / ticks
    return -half, half


def _make_robot(robot_type: str, module: str | None, config: dict[str, Any]) -> Any:
    """Build a LeRobot robot from the name and fields of its config; imports LeRobot."""
    try:
        import draccus
        import lerobot.cameras.opencv  # noqa: F401  (registers the camera type)
        import lerobot.robots as robots
        from lerobot.robots.utils import make_robot_from_config
    except ImportError as e:
        raise UserError(f"a LeRobot robot needs the package '{e.name}'", "pip install 'vla-stack[train]'") from e
    if module is not None:
        importlib.import_module(module)
    # LeRobot's own discovery would import policy plug-ins too, which takes seconds and nobody here needs.
    for plugin in importlib.metadata.distributions():
        if (plugin.name or "").startswith(("lerobot_robot_", "lerobot_camera_")):
            importlib.import_module(plugin.name)
    if robot_type not in robots.RobotConfig.get_known_choices():  # built-in configs register when they are imported
        for found in pkgutil.iter_modules(robots.__path__, robots.__name__ + "."):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    known = robots.RobotConfig.get_known_choices()
    if robot_type not in known:
        raise UserError(f"LeRobot knows no robot '{robot_type}'", f"it knows {', '.join(sorted(known))}")
    if config.get("use_degrees") is False:
        raise UserError(
            f"{robot_type}: use_degrees=False commands percent of a range, which has no SI unit", "leave it on"
        )
    try:
        return make_robot_from_config(draccus.decode(robots.RobotConfig, {"type": robot_type, **config}))
    except Exception as e:
        raise UserError(f"{robot_type}: {' '.join(str(e).split())}", "compare with LeRobot's --robot.* options") from e
