"""What all external environments share: the observation form, the episode's frame, and noise for their experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from sim.rendering import Renderer, cheapen
from vla_stack.errors import UserError
from vla_stack.schema import Camera, RobotSpec

Visuals = Literal["fast", "official"]
ImageSize = int | tuple[int, int]
NOISE_SHARE = 0.5  # share of steps that noise touches, as for the native experts


class BenchmarkEnv(gym.Env[dict[str, Any], NDArray[np.float32]], ABC):
    """One task of an external benchmark.

    Observation: ``{"pixels": {camera: uint8 [H, W, 3]}, "agent_pos": float32 [S]}``, the latter as named by
    ``spec_robot.state``; without cameras there are no ``pixels``. Actions are clipped to their range. An episode ends
    with success, as LeRobot's environments end it.

    Args:
        spec: What the robot measures and accepts.
        instruction: The task in words, as LeRobot words it.
        steps: Control steps after which the benchmark truncates an episode.
        render_mode: ``rgb_array`` makes :meth:`render` return a picture.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}
    stages: tuple[str, ...] = ()  # in order, where the benchmark grades progress; ``stage`` counts those reached
    stage: int = 0

    def __init__(self, spec: RobotSpec, instruction: str, steps: int, render_mode: str | None) -> None:
        self.spec_robot, self.task, self.default_steps = spec, instruction, steps
        self.task_description = instruction
        self.render_mode = render_mode
        self.metadata = {**self.metadata, "render_fps": round(spec.rate_hz)}
        self.action_space = spaces.Box(spec.action_low, spec.action_high, dtype=np.float32)
        observation: dict[str, spaces.Space] = {"agent_pos": spaces.Box(-10.0, 10.0, (len(spec.state),), np.float32)}
        if spec.cameras:
            pictures: dict[str, spaces.Space] = {
                c.name: spaces.Box(0, 255, (c.height, c.width, 3), np.uint8) for c in spec.cameras
            }
            observation["pixels"] = spaces.Dict(pictures)
        self.observation_space = spaces.Dict(observation)

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Set up the scene that ``seed`` stands for."""

    @abstractmethod
    def advance(self, action: NDArray[np.float64]) -> tuple[float, bool]:
        """Run one control step with a legal action; reward and success."""

    @abstractmethod
    def measure(self) -> NDArray[np.float64]:
        """The robot's own state [S]; nothing of the scene."""

    @abstractmethod
    def look(self, camera: str) -> NDArray[np.uint8]:
        """Picture [H, W, 3] of a camera."""

    def make_expert(self, noise: float, seed: int) -> BenchmarkExpert:
        """The benchmark's scripted expert for the episode that has just begun."""
        raise UserError(f"there is no scripted expert for '{self.task}'", "give recorded demonstrations instead")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.stage = 0
        self.begin(int(self.np_random.integers(2**31)) if seed is None else seed)
        return self._observe(), self._info(False)

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Advance one control step; a non-finite action raises ``ValueError``."""
        a = np.asarray(action, np.float64)
        if a.shape != self.action_space.shape or not np.isfinite(a).all():
            raise ValueError(f"action must be {self.action_space.shape} finite numbers, got {action}")
        reward, success = self.advance(np.clip(a, self.spec_robot.action_low, self.spec_robot.action_high))
        return self._observe(), float(reward), bool(success), False, self._info(bool(success))

    def _observe(self) -> dict[str, Any]:
        observation: dict[str, Any] = {"agent_pos": np.asarray(self.measure(), np.float32)}
        if self.spec_robot.cameras:
            observation["pixels"] = {c.name: self.look(c.name) for c in self.spec_robot.cameras}
        return observation

    def _info(self, success: bool) -> dict[str, Any]:
        return {"is_success": success, "task": self.task} | ({"stage": self.stage} if self.stages else {})


class BenchmarkExpert:
    """A scripted expert: clean labels, and noise on what is executed (Laskey et al., "DART", 2017).

    Args:
        scale: float [A], one standard deviation of the noise at ``noise=1``; 0 where none is wanted.
        noise: Standard deviation in units of ``scale``.
        seed: Seed of the noise.
    """

    def __init__(self, scale: NDArray[np.float64], noise: float, seed: int) -> None:
        self._sigma, self._rng = noise * scale, np.random.default_rng(seed)

    def act(self) -> NDArray[np.float32]:
        """The expert's action for the current state; once a control step."""
        raise NotImplementedError

    def perturb(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """The action to execute instead: half of the steps get noise."""
        noise = self._rng.normal(0.0, 1.0, len(action))
        if self._rng.random() > NOISE_SHARE:
            return action
        return (action + self._sigma * noise).astype(np.float32)


class Pictures:
    """Pictures of a MuJoCo model by the cameras of a robot's description, and one larger for films.

    Args:
        model: The scene.
        cameras: What is observed.
        visuals: ``fast`` leaves out shadows, reflections and antialiasing; ``official`` renders as the scene says.
        film: Camera of the film.
        render_size: Height and width of the film, pixels.
    """

    def __init__(
        self, model: mujoco.MjModel, cameras: tuple[Camera, ...], visuals: Visuals, film: str, render_size: tuple
    ) -> None:
        if visuals not in ("fast", "official"):
            raise UserError(f"visuals='{visuals}' does not exist", "use fast or official")
        if visuals == "fast":
            cheapen(model)
        known = [model.camera(i).name for i in range(model.ncam)]
        if unknown := [c.name for c in cameras if c.name not in known]:
            raise UserError(f"there is no camera '{unknown[0]}'", f"the scene has {', '.join(known)}")
        self._film_camera = film
        self._eyes = Renderer(model, cameras[0].height, cameras[0].width) if cameras else None
        self._film = Renderer(model, *render_size)

    def of(self, data: mujoco.MjData, camera: str) -> NDArray[np.uint8]:
        assert self._eyes is not None
        return self._eyes.render(data, camera)

    def film(self, data: mujoco.MjData) -> NDArray[np.uint8]:
        return self._film.render(data, self._film_camera)

    def close(self) -> None:
        if self._eyes is not None:
            self._eyes.close()
        self._film.close()


def cameras_of(names: tuple[str, ...], image_size: ImageSize) -> tuple[Camera, ...]:
    """Cameras of one picture size."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return tuple(Camera(name, height, width) for name in names)


def repeats(native_hz: int, control_hz: float, family: str) -> int:
    """Steps of the benchmark in one control step.

    Raises:
        UserError: The rate does not divide the benchmark's.
    """
    n = round(native_hz / control_hz)
    if n < 1 or not np.isclose(n * control_hz, native_hz):
        rates = ", ".join(f"{native_hz / i:g}" for i in range(1, 9) if native_hz % i == 0)
        raise UserError(f"control_hz={control_hz:g} does not divide {family}'s {native_hz} Hz", f"use {rates}")
    return n
