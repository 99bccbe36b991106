"""A recorded episode as a LeRobot teleoperator: its commands again, one a control step, the last one held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

from robot_drivers.replay import recorded_actions
from vla_stack.schema import ACTION


@TeleoperatorConfig.register_subclass("vla_replay")
@dataclass(kw_only=True)
class VlaReplayConfig(TeleoperatorConfig):
    """``--teleop.root=DATASET --teleop.episode=0``: a dataset of the robot that is driven."""

    root: str
    episode: int = 0


class VlaReplay(Teleoperator):
    """Plays one episode once."""

    config_class = VlaReplayConfig
    name = "vla_replay"

    def __init__(self, config: VlaReplayConfig) -> None:
        super().__init__(config)
        data, self._actions = recorded_actions(config.root, config.episode)
        self._names: list[str] = data.features[ACTION]["names"]
        self._next = 0
        self._connected = False

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._names, float)

    @property
    def feedback_features(self) -> dict[str, Any]:
        return {}

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self._connected = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_action(self) -> dict[str, Any]:
        row = self._actions[min(self._next, len(self._actions) - 1)]
        self._next += 1
        return {name: float(x) for name, x in zip(self._names, row, strict=True)}

    def send_feedback(self, feedback: dict[str, Any]) -> None: ...

    def disconnect(self) -> None:
        self._connected = False
