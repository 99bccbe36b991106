"""Any driver of ours as a LeRobot robot. Names are those of our datasets, values SI, as our datasets have them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig

from robot_drivers import EpisodicDriver, make_driver
from vla_stack.runtime.driver import SelfChecking
from vla_stack.runtime.limits import make_envelope
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import Camera, RobotSpec

logger = logging.getLogger(__name__)


@RobotConfig.register_subclass("vla_robot")
@dataclass(kw_only=True)
class VlaRobotConfig(RobotConfig):
    """``--robot.driver=sim --robot.task=pick --robot.options='{image_size: 96}'``.

    Attributes:
        driver: Name in the registry of robots.
        task: The driver's ``task``.
        options: Further arguments of the driver.
        seed: Of the first episode's scene; a scene whose task is done is followed by the next seed's.
    """

    driver: str = "sim"
    task: str = "pick"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


class VlaRobot(Robot):
    """One driver behind the safety envelope. The control rate is the driver's: run LeRobot's loop at the same one."""

    config_class = VlaRobotConfig
    name = "vla_robot"

    def __init__(self, config: VlaRobotConfig) -> None:
        super().__init__(config)
        self.config = config
        self._driver = make_driver(config.driver, task=config.task, **config.options)
        self._episodic = self._driver if isinstance(self._driver, EpisodicDriver) else None
        self._seed = config.seed
        self._connected = False
        self._sent = 0

    @cached_property
    def _spec(self) -> RobotSpec:
        self._driver.connect()  # LeRobot asks for features before it connects; only the device knows them
        return self._driver.spec

    @property
    def observation_features(self) -> dict[str, Any]:
        cameras = {c.name: (c.height, c.width, 3) for c in self._spec.cameras}
        return {d.name: float for d in self._spec.state} | cameras

    @property
    def action_features(self) -> dict[str, Any]:
        return {d.name: float for d in self._spec.action}

    @property
    def cameras(self) -> dict[str, Camera]:
        """What LeRobot counts to size its image writers."""
        return {c.name: c for c in self._spec.cameras}

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return True  # a driver that needs a calibration has it when it is connected

    def connect(self, calibrate: bool = True) -> None:
        self._envelope = make_envelope(self._spec, SafetyConfig())
        self._begin()
        self._connected = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        if self._episodic is not None and self._episodic.status()["done"]:
            self._seed += 1
            self._begin()
        obs = self._driver.read()
        return {d.name: float(x) for d, x in zip(self._spec.state, obs.state, strict=True)} | obs.images

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Send a command after the safety envelope; returns what was sent."""
        if isinstance(self._driver, SelfChecking) and self._driver.fault is not None and self._driver.fault.stop:
            logger.warning(f"{self}: {self._driver.fault.why}")
            self._driver.stop()
            self._envelope.reset(self._driver.read().state[: len(self._spec.action)])  # it goes on from where it is
            return action
        verdict = self._envelope.filter(np.array([float(action[d.name]) for d in self._spec.action]))
        if verdict.command is None:
            self._driver.stop()
            return action
        sent = self._driver.write(verdict.command)
        self._sent += 1
        return {d.name: float(x) for d, x in zip(self._spec.action, sent, strict=True)}

    def disconnect(self) -> None:
        self._driver.hold()
        self._driver.disconnect()
        self._connected = False
        logger.info(f"{self}: {self._sent} commands sent, {dict(self._envelope.counters)} limited")

    def _begin(self) -> None:
        if self._episodic is not None:
            self._episodic.reset(self._seed)
        self._envelope.reset(self._driver.read().state[: len(self._spec.action)])
