"""A world model as a thing: networks, scales and limits in one directory, and the step that imagines a chunk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec, SchemaError
from vla_stack.training.recipe_tree import build, plain
from vla_stack.world_model.config import PARTS
from vla_stack.world_model.dynamics import Dynamics, DynamicsConfig, Remembered
from vla_stack.world_model.heads import Heads, HeadsConfig
from vla_stack.world_model.memory import Memory, history_chunks
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.sight import Calibration, Sight, look, toward
from vla_stack.world_model.svd import SvdConfig
from vla_stack.world_model.svd import build as build_svd
from vla_stack.world_model.tool import tool_of
from vla_stack.world_model.vae import Vae, VaeConfig

CONFIG, BANK = "world_model.json", "bank.safetensors"
FEATURES = 10
SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "world_models"  # by tools/ship_world_model.py
DEFAULT = "pick"


@dataclass(frozen=True)
class Limits:
    """When a rollout is no longer to be believed (:mod:`vla_stack.world_model.guards`); infinite: never.

    Attributes:
        disagreement: Of the members.
        residual: Distance of the pose that is seen from the one that was told, metres.
        latent: Largest deviation of a latent channel's mean or spread from the data's.
        distance: To the nearest recorded (pose, action).
        chunks: Chunks of a rollout.
        success: Probability from which on a task counts as done.
    """

    disagreement: float = np.inf
    residual: float = np.inf
    latent: float = np.inf
    distance: float = np.inf
    chunks: float = np.inf
    success: float = 0.5


@dataclass(frozen=True)
class WorldConfig:
    """What a world model is of, and its shape.

    Attributes:
        env: gymnasium id that it imagines, whose first frames a rollout begins with; empty for a real robot.
        tasks: Instructions that its judges know.
        poses: Scale of positions.
        vae, dynamics, heads: Shapes.
        svd: Instead of autoencoder and transformer of our own.
        calibration: Where the cameras are; None where nobody knows.
        limits: Of the guards.
        kinematics: MJCF of the arm; empty for one that is known (:mod:`vla_stack.world_model.tool`).
    """

    env: str
    tasks: tuple[str, ...]
    poses: PoseScale
    vae: VaeConfig = field(default_factory=VaeConfig)
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    svd: SvdConfig | None = None
    calibration: Calibration | None = None
    limits: Limits = field(default_factory=Limits)
    kinematics: str = ""


@dataclass
class End:
    """The last frame of a chunk: latent [V, C, h, w] and pose [5], and what it looks like, uint8 [V, H, W, 3].

    Without its picture it is decoded once it is needed.
    """

    latent: Tensor
    pose: Tensor
    picture: Tensor | None = None


class WorldModel(nn.Module):
    """Autoencoder, dynamics and heads of one robot.

    Args:
        config: What it is of.
        robot: Its state, actions and cameras; all cameras of one square size.

    Raises:
        UserError: The cameras differ in size, or the size does not fit the autoencoder.
    """

    def __init__(self, config: WorldConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.robot, self.tool = robot, tool_of(robot, config.kinematics)
        sizes = {(c.height, c.width) for c in robot.cameras}
        size = robot.cameras[0].height
        views = len(robot.cameras)
        self.vae: Any = Vae(config.vae)
        self.dynamics: Dynamics
        grid = self.vae.factor * config.dynamics.patch
        if config.svd is not None:
            self.vae, self.dynamics, svd = build_svd(config.dynamics, config.svd, views, size)
            config, grid = replace(config, svd=svd), self.vae.factor
        if sizes != {(size, size)} or size % grid or size % 16:
            shapes = ", ".join(f"{c.name} {c.height}x{c.width}" for c in robot.cameras)
            raise UserError(
                f"the cameras are {shapes}", f"a world model needs square ones of a multiple of {max(grid, 16)}"
            )
        if config.svd is None:
            told = config.dynamics.conditioning != "none"
            moving = config.calibration.moving if config.calibration and told else None
            latent = size // self.vae.factor
            self.dynamics = Dynamics(config.dynamics, views, config.vae.channels, latent, moving, self.vae.factor)
        self.config = config
        self.heads = Heads(config.heads, views, max(1, len(config.tasks)), config.dynamics.future)
        self.register_buffer("bank", torch.zeros(0, FEATURES), persistent=False)  # (pose, command) of data

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.robot.cameras)

    @property
    def horizon(self) -> int:
        """Frames of a chunk."""
        return self.config.dynamics.future

    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the noise that one chunk begins with, [H + 1, V, C, h, w]."""
        d = self.dynamics
        return (self.horizon + 1, d.views, d.channels, d.size, d.size)

    def tokens(self, poses: Tensor, time: Tensor) -> Tensor:
        """Pose tokens [*, 11] of poses [*, 5] at times [*] in chunks from the current frame."""
        return self.config.poses.tokens(poses, time)

    @torch.no_grad()
    def look(self, sources: Tensor | None, poses: Tensor) -> Sight | None:
        """What calibrated cameras tell of clips.

        Args:
            sources: Pictures uint8 [B, 1 or 2, V, height, width, 3] of the first remembered and the current frame; of
                that alone where nothing is remembered. None will do where no camera is on the tool.
            poses: Of all frames [B, F, 5]; those of the future may not be known, but by their mean.

        Returns:
            None without calibration.
        """
        config, calibration = self.config.dynamics, self.config.calibration
        if calibration is None or not self.dynamics.calibrated:
            return None
        k = config.history
        told = poses if config.conditioning != "mean" else poses.mean(1, True).expand_as(poses)
        told = told[:, k + 1 :]
        seen = None
        if self.dynamics.moving and sources is not None:
            seen = look(calibration, sources, poses[:, [0, k] if k else [0]], told)
        return Sight(toward(calibration, told, self.dynamics.size), seen)

    @torch.no_grad()
    def begin(self, pictures: NDArray[np.uint8], poses: NDArray[np.float32]) -> list[Memory[End]]:
        """Rollouts from real frames: uint8 [B, V, H, W, 3], poses [B, 5]. The only time that pictures are encoded."""
        latents = self.vae.encode(torch.from_numpy(np.ascontiguousarray(pictures)).to(self.bank.device))
        at = torch.from_numpy(np.ascontiguousarray(poses)).to(self.bank.device)
        return [Memory(End(z, p), self.config.dynamics.history) for z, p in zip(latents, at, strict=True)]

    @torch.no_grad()
    def chunk(self, memories: Sequence[Memory[End]], poses: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Imagine H frames of some rollouts; nothing is remembered until the caller pushes their ends.

        Args:
            memories: B rollouts.
            poses: Future poses [B, n, 5], 1 <= n <= H; the last one is held.
            noise: Standard normal [B, H + 1, V, C, h, w].

        Returns:
            Latents [B, H, V, C, h, w] and how much the members disagree [B].
        """
        dynamics = self.config.dynamics
        held = torch.cat([poses, poses[:, -1:].expand(-1, dynamics.future - poses.shape[1], -1)], 1)
        past = [m.history() for m in memories]
        current = torch.stack([m.current.latent for m in memories])
        history = (
            torch.stack([torch.stack([e.latent for e in p]) for p in past])
            if dynamics.history
            else current[:, None][:, :0]
        )
        told = [torch.stack([*(e.pose for e in p), m.current.pose]) for p, m in zip(past, memories, strict=True)]
        time = torch.tensor(
            [
                [
                    *(c - m.chunks for c in history_chunks(m.chunks, dynamics.history)),
                    *np.arange(dynamics.future + 1) / dynamics.future,
                ]
                for m in memories
            ],
            dtype=torch.float32,
            device=noise.device,
        )
        poses = torch.cat([torch.stack(told), held], 1)
        sources = None
        if self.config.calibration is not None and self.dynamics.moving:
            ends = [(*p[:1], m.current) for p, m in zip(past, memories, strict=True)]
            sources = torch.stack(self._seen([e for some in ends for e in some])).unflatten(0, (len(memories), -1))
        remembered = Remembered.clean(history, current, self.look(sources, poses))
        latents, spread = self.dynamics.imagine(remembered, self.tokens(poses, time), noise)
        return latents[:, 1:], spread

    def _seen(self, ends: Sequence[End]) -> list[Tensor]:
        """Pictures uint8 [V, H, W, 3] of some frames."""
        new = list({id(e): e for e in ends if e.picture is None}.values())
        if new:
            for end, picture in zip(new, self.vae.pictures(torch.stack([e.latent for e in new])), strict=True):
                end.picture = picture
        return [e.picture for e in ends if e.picture is not None]

    def save(self, directory: Path, untrained: Sequence[str] = ()) -> None:
        """Write ``directory``; :func:`load` refuses a model of which parts are still ``untrained``."""
        directory.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            state = getattr(self, part).state_dict()
            save_file({k: v.contiguous() for k, v in state.items()}, directory / f"{part}.safetensors")
        save_file({"bank": self.bank}, directory / BANK)
        about = {
            "format": 1,
            "untrained": list(untrained),
            "robot": self.robot.to_json(),
            **plain(dataclasses.asdict(self.config)),
        }
        about["limits"] = {k: v if np.isfinite(v) else None for k, v in about["limits"].items()}
        (directory / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def resolve(name: str | Path) -> Path:
    """The directory of a world model that a person named: it, the run directory above it, or one of the package's.

    ``shipped`` is the default one of these.

    Raises:
        UserError: There is none.
    """
    for path in (Path(name), Path(name) / "model", SHIPPED / (DEFAULT if str(name) == "shipped" else name)):
        if (path / CONFIG).is_file():
            return path
    raise UserError(
        f"'{name}' holds no world model (no {CONFIG})",
        "give a run directory of `vla train world_model_tiny`",
    )


def load(name: str | Path, device: str | torch.device = "cpu") -> WorldModel:
    """Read a world model.

    Raises:
        UserError: It is not there, not trained to its end, or damaged.
    """
    path = resolve(name)
    try:
        about: dict[str, Any] = json.loads((path / CONFIG).read_text())
        robot = RobotSpec.from_json(about.pop("robot"))
        if (number := about.pop("format", None)) != 1:
            raise UserError(f"{path / CONFIG} has format {number}, this version reads 1", "update vla_stack")
        if untrained := about.pop("untrained", []):
            raise UserError(
                f"{path}: its {' and '.join(untrained)} are not trained yet", f"vla train --resume {path.parent}"
            )
        about["limits"] = {k: np.inf if v is None else v for k, v in about.get("limits", {}).items()}
        model = WorldModel(build(WorldConfig, about, str(path / CONFIG)), robot)
        for part in PARTS:
            weights = {k: v.float() for k, v in load_file(path / f"{part}.safetensors").items()}
            getattr(model, part).load_state_dict(weights)
        model.bank = load_file(path / BANK)["bank"].float()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError, SchemaError) as e:
        raise UserError(f"{path} is damaged ({' '.join(str(e).split())[:200]})", "copy or train it again") from None
    return model.to(device).eval()


@cache
def shared(name: str, device: str = "cpu") -> WorldModel:
    """:func:`load`, one copy in memory for all environments of a process."""
    return load(name, device)
