"""The tasks as LeRobot environments: importing this makes ``--env.type=vla_sim --env.task=pick`` known to LeRobot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

import sim
from sim.arm import CAMERAS
from vla_stack.errors import UserError


@EnvConfig.register_subclass("vla_sim")
@dataclass
class VlaSimEnv(EnvConfig):
    """A ``sim`` task; the fields are the arguments of :class:`sim.env.ArmEnv`.

    Attributes:
        task: Name of a task, e.g. ``pick``.
        fps: Control steps per second.
        episode_length: Control steps after which an episode is truncated; the task's own limit where unset.
    """

    task: str | None = "pick"
    fps: int = 10
    control_mode: str | None = None
    image_size: int = 64
    visuals: str = "fast"
    randomisation: int = 0
    cameras: list[str] = field(default_factory=lambda: list(CAMERAS))
    privileged: bool = False
    tool_target: bool = False
    episode_length: int | None = None
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.task is None or self.task not in sim.TASKS:
            raise UserError(f"env.task={self.task!r} is unknown", f"choose one of {', '.join(sim.TASKS)}")
        arm = sim.TASKS[self.task].arm
        mode = self.control_mode or arm.control_mode
        shown = tuple(self.cameras), self.image_size, float(self.fps), self.privileged, self.tool_target
        spec = arm.spec(mode, *shown)  # type: ignore[arg-type]
        self.features = {
            ACTION: PolicyFeature(FeatureType.ACTION, (len(spec.action),)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (len(spec.state),)),
        }
        self.features_map = {ACTION: ACTION, "agent_pos": OBS_STATE}
        for camera in spec.cameras:
            key = f"pixels/{camera.name}"
            self.features[key] = PolicyFeature(FeatureType.VISUAL, (camera.height, camera.width, 3))
            self.features_map[key] = f"{OBS_IMAGES}.{camera.name}"

    @property
    def package_name(self) -> str:
        return "sim"

    @property
    def gym_id(self) -> str:
        return sim.TASKS[str(self.task)].id

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {
            "control_mode": self.control_mode,
            "control_hz": float(self.fps),
            "image_size": self.image_size,
            "visuals": self.visuals,
            "randomisation": self.randomisation,
            "cameras": tuple(self.cameras),
            "privileged": self.privileged,
            "tool_target": self.tool_target,
            "render_mode": "rgb_array",
            "max_episode_steps": self.episode_length or sim.TASKS[str(self.task)].limit(self.fps),
        }
