"""Any driver of ours as a LeRobot robot. Names are those of our datasets, values SI, as our datasets have them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig

from robot_drivers import EpisodicDriver, make_driver
from vla_stack.runtime.clock import RealClock
from vla_stack.runtime.dispatch import Dispatch, State
from vla_stack.runtime.driver import Driver
from vla_stack.runtime.limits import SOFT_START_S, make_envelope
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.runtime.stopping import Outlet
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
    """One driver behind the safety envelope. The control rate is the driver's: run LeRobot's loop at the same one.

    A fault, or an envelope that refuses to go on, stops it, and it stays so until it is connected again: LeRobot's
    loops have nobody whom they could ask.
    """

    config_class = VlaRobotConfig
    name = "vla_robot"

    def __init__(self, config: VlaRobotConfig) -> None:
        super().__init__(config)
        self.config = config
        self._driver = self._make()
        self._seed = config.seed
        self._connected = self._left = False
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
        if self._left:  # a driver is connected once
            self._driver, self._left = self._make(), False
            self.__dict__.pop("_spec", None)
        soft_start_s = 0.0 if self._driver.capabilities.simulated else SOFT_START_S
        self._envelope = make_envelope(self._spec, SafetyConfig(soft_start_s=soft_start_s))
        self._outlet = Outlet(self._driver, None, self._envelope, RealClock(), None, self._announce)
        self._begin()
        self._connected = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        if isinstance(self._driver, EpisodicDriver) and self._driver.status()["done"]:
            self._seed += 1
            self._begin()
        else:
            self._newest = self._driver.read()
        obs = self._newest
        return {d.name: float(x) for d, x in zip(self._spec.state, obs.state, strict=True)} | obs.images

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Send a command after the safety envelope; returns the one in force, where it is stopped to stand still."""
        command = np.array([float(action[d.name]) for d in self._spec.action], np.float32)
        _, _, sent = self._outlet.send(self._sent, Dispatch(command, State.RUN), command, self._newest, "")
        if sent is None:
            sent = self._spec.standstill(self._newest.state)
        else:
            self._sent += 1
        return {d.name: float(x) for d, x in zip(self._spec.action, sent, strict=True)}

    def disconnect(self) -> None:
        self._driver.hold()
        self._driver.disconnect()
        self._connected, self._left = False, True
        logger.info(f"{self}: {self._sent} commands sent, {dict(self._envelope.counters)} limited")

    def _make(self) -> Driver:
        return make_driver(self.config.driver, task=self.config.task, **self.config.options)

    def _begin(self) -> None:
        if isinstance(self._driver, EpisodicDriver):
            self._driver.reset(self._seed)
        self._newest = self._driver.read()
        self._outlet.begin(self._newest)

    def _announce(self, k: int, state: State, why: str) -> None:
        """Say once that the robot stands still and why; which commands were limited is counted."""
        if state is State.STOP:
            logger.error(f"{self} is stopped after {k} commands, until it is connected again: {why}")
        elif state is State.HOLD:
            logger.warning(f"{self} holds after {k} commands: {why}")
