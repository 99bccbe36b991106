"""A robot without hardware, registered the way LeRobot plug-ins are."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from lerobot.cameras import CameraConfig
from lerobot.robots import Robot, RobotConfig
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig


@dataclass
class HandConfig:
    use_degrees: bool = False


@RobotConfig.register_subclass("vla_dummy")
@dataclass(kw_only=True)
class DummyConfig(RobotConfig):
    port: str
    calibrated: bool = True
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    use_degrees: bool = False
    hand: HandConfig = field(default_factory=HandConfig)


class Dummy(Robot):
    config_class = DummyConfig
    name = "vla_dummy"

    def __init__(self, config: DummyConfig):
        super().__init__(config)
        self.config, self.connected, self.broken, self.gone, self.deaf = config, False, False, False, False
        self.error: Exception = ConnectionError("incorrect status packet")
        self.disconnects = 0
        self.at = {"shoulder.pos": 90.0, "gripper.pos": 50.0}
        self.actions: list[dict[str, float]] = []
        self.bus = SimpleNamespace(motors={"shoulder": SimpleNamespace(model="m")}, model_resolution_table={"m": 4096})
        self.calibration = {"shoulder": SimpleNamespace(range_min=1024, range_max=3071)}

    @property
    def observation_features(self):
        return {"shoulder.pos": float, "gripper.pos": float, "top": (4, 6, 3), "top_depth": (4, 6, 1)}

    @property
    def action_features(self):
        return {"shoulder.pos": float, "gripper.pos": float}

    @property
    def is_connected(self):
        return self.connected

    @property
    def is_calibrated(self):
        return self.config.calibrated

    def connect(self, calibrate=True):
        if self.config.port == "nowhere" or self.gone:
            raise ConnectionError("no such port")
        self.connected = True

    def calibrate(self): ...

    def configure(self): ...

    def get_observation(self):
        if self.broken:
            raise self.error
        return {**self.at, "top": np.full((4, 6, 3), 7, np.uint8), "top_depth": np.zeros((4, 6, 1), np.uint16)}

    def send_action(self, action):
        if self.deaf:
            raise ConnectionError("port is in use")
        self.actions.append(dict(action))
        self.at = {name: float(np.clip(v, -100, 100)) for name, v in action.items()}
        return self.at

    def disconnect(self):
        self.disconnects += 1
        self.connected = False


@TeleoperatorConfig.register_subclass("vla_dummy_leader")
@dataclass(kw_only=True)
class DummyLeaderConfig(TeleoperatorConfig): ...


class DummyLeader(Teleoperator):
    config_class = DummyLeaderConfig
    name = "vla_dummy_leader"
    action_features = {"shoulder.pos": float, "gripper.pos": float}
    feedback_features = {}
    is_connected = False
    is_calibrated = True

    def __init__(self, config: DummyLeaderConfig):
        super().__init__(config)
        self.broken, self.at = False, {"shoulder.pos": 45.0, "gripper.pos": 25.0}
        self.error: Exception = ConnectionError("incorrect status packet")

    def connect(self, calibrate=True):
        self.is_connected = True

    def calibrate(self): ...

    def configure(self): ...

    def get_action(self):
        if self.broken:
            raise self.error
        return dict(self.at)

    def send_feedback(self, feedback): ...

    def disconnect(self):
        self.is_connected = False
