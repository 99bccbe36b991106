"""A world model as the backend of the imagined environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sim.arm import ARM7, InverseKinematics
from sim.registry import TASKS, TaskInfo
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec
from vla_stack.world_model import guards
from vla_stack.world_model.clips import Recording
from vla_stack.world_model.imagined_env import Frames
from vla_stack.world_model.imagined_rows import ImaginedRows
from vla_stack.world_model.memory import Memory
from vla_stack.world_model.model import End, WorldModel, shared
from vla_stack.world_model.poses import POSE
from vla_stack.world_model.quality import chunk_noise
from vla_stack.world_model.selection import Critics, choose

IMAGINED = "imagined:"  # of an environment's id, followed by a world model's directory


@dataclass(frozen=True)
class Start:
    """A real first frame: camera -> uint8 [H, W, 3], state float32 [S], instruction."""

    pictures: dict[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    task: str


class Starts(Protocol):
    """Where real first frames come from."""

    def start(self, seed: int, options: dict[str, Any]) -> Start: ...
    def close(self) -> None: ...


class SimulatedStarts:
    """First frames of the simulator: the same seed begins the same scene as there."""

    def __init__(self, env_id: str, robot: RobotSpec) -> None:
        cameras = tuple(c.name for c in robot.cameras)
        self._env = gym.make(env_id, cameras=cameras, image_size=robot.cameras[0].height, control_hz=robot.rate_hz)

    def start(self, seed: int, options: dict[str, Any]) -> Start:
        if "start_index" in options:
            raise UserError("first frames are the simulator's, 'start_index' is a row of a dataset", "give a seed")
        raw, info = self._env.reset(
            seed=seed, options={k: options[k] for k in ("variant", "instruction") if k in options}
        )
        return Start(raw["pixels"], raw["agent_pos"], info["task"])

    def close(self) -> None:
        self._env.close()


class RecordedStarts:
    """Frames of a dataset: row ``options["start_index"]``, or the first frame of an episode that the seed draws."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def start(self, seed: int, options: dict[str, Any]) -> Start:
        r = self._recording
        drawn = np.random.default_rng(seed).choice(np.unique(r.start))
        row = int(options.get("start_index", drawn))
        if not 0 <= row < len(r.end):
            raise UserError(f"start_index {row} is not in the data", f"it has frames 0 to {len(r.end) - 1}")
        return Start({c: p[row] for c, p in r.pictures.items()}, r.states[row], r.tasks[r.task[row]])

    def close(self) -> None: ...


@dataclass
class Dream:
    """One rollout.

    Attributes:
        seed: Of its noise.
        memory: Ends of its chunks.
        task: Index of its instruction; None where the judges do not know it.
        before: Command before the present chunk, [5].
        commands: Those of the present chunk so far, [5] each.
        judged: The judges' states, after every frame that was shown.
        state: float32 [S], as the robot would measure it.
    """

    seed: int
    memory: Memory[End]
    task: int | None
    before: Tensor
    state: NDArray[np.float32]
    commands: list[Tensor] = field(default_factory=list)
    judged: list[Tensor] | None = None


class Dreams:
    """A :class:`vla_stack.world_model.imagined_env.Backend`; every rollout is a function of its seed and its actions.

    Commands become the poses that would be measured (the adapter), poses become frames. Where commands end within a
    chunk, the last one is held and the frames so far are shown; only whole chunks are remembered.

    The state is the pose that the adapter expects; the opening is the probe's, as nothing else sees what is held;
    joints follow by inverse kinematics.

    Args:
        model: The world model.
        starts: First frames.
        rows: Number of rollouts.
        max_steps: Frames of an episode.
    """

    def __init__(self, model: WorldModel, starts: Starts, rows: int, max_steps: int) -> None:
        self.model, self._starts, self._max_steps = model, starts, max_steps
        self._dreams: dict[int, Dream] = {}
        self._streams = {row: np.random.default_rng(row) for row in range(rows)}
        self._ik = InverseKinematics(ARM7)

    @property
    def robot(self) -> RobotSpec:
        return self.model.robot

    @property
    def max_steps(self) -> int:
        return self._max_steps

    @property
    def stages(self) -> tuple[str, ...]:
        return ("done",)

    def begin(self, row: int, seed: int | None, options: dict[str, Any]) -> tuple[Frames, str]:
        if seed is not None:
            self._streams[row] = np.random.default_rng(seed)
        else:
            seed = int(self._streams[row].integers(2**31))
        start = self._starts.start(seed, options)
        pictures = np.stack([start.pictures[c] for c in self.model.cameras])
        state = np.array(start.state, np.float32)
        device = self.model.bank.device
        tasks = self.model.config.tasks
        task = tasks.index(start.task) if start.task in tasks else None
        pose = torch.from_numpy(state[:POSE].copy()).to(device)
        dream = Dream(seed, self.model.begin(pictures[None], state[None, :POSE])[0], task, pose, state)
        self._dreams[row] = dream
        p = self._judge([dream], torch.from_numpy(pictures[None, None]).to(device))[0]
        first = {c: start.pictures[c][None] for c in self.model.cameras}
        no = np.zeros(1, bool)
        return Frames(first, state[None], p, no, no), start.task

    def choose(
        self,
        row: int,
        candidates: NDArray[np.float32],
        seed: int,
        caution: float = 0.5,
        critics: Critics | None = None,
    ) -> int:
        """Which of chunks [n, L, A] a rollout at a chunk's end should carry out; the first where no judge knows it.

        See :func:`vla_stack.world_model.selection.choose`.
        """
        dream = self._dreams[row]
        if dream.task is None:
            return 0
        commands = torch.from_numpy(candidates[..., :POSE].copy()).to(self.model.bank.device)
        return choose(self.model, dream.memory, dream.before, commands, dream.task, seed, caution, critics)[0]

    def propose(self, row: int, critics: Critics) -> NDArray[np.float32]:
        """The chunk [H, A] of the critics' actor for a rollout at a chunk's end."""
        dream = self._dreams[row]
        return critics.propose(dream.memory.current, dream.task or 0)[0].cpu().numpy()

    def advance(self, rows: Sequence[int], actions: NDArray[np.float32]) -> list[Frames]:
        films: list[list[Frames]] = [[] for _ in rows]
        todo = [list(torch.from_numpy(a[:, :POSE].copy()).to(self.model.bank.device)) for a in actions]
        while any(todo):
            # Rollouts may be at different places of their chunks: those that go equally far go together.
            room = {i: self.model.horizon - len(self._dreams[rows[i]].commands) for i, left in enumerate(todo) if left}
            takes = {i: min(room[i], len(todo[i])) for i in room}
            reach = {i: len(self._dreams[rows[i]].commands) + takes[i] for i in takes}
            for n in sorted(set(reach.values())):
                group = [i for i in takes if reach[i] == n]
                for i in group:
                    self._dreams[rows[i]].commands += todo[i][: takes[i]]
                    del todo[i][: takes[i]]
                dreams = [self._dreams[rows[i]] for i in group]
                pictures, poses, trips = self._imagine(dreams, n)
                for m in {takes[i] for i in group}:  # frames that are newly shown
                    alike = [g for g, i in enumerate(group) if takes[i] == m]
                    shown = self._frames(
                        [dreams[g] for g in alike],
                        pictures[alike, n - m :],
                        poses[alike, n - m :],
                        [trips[g] for g in alike],
                    )
                    for g, frames in zip(alike, shown, strict=True):
                        films[group[g]].append(frames)
        return [_joined(parts) for parts in films]

    def close(self) -> None:
        self._starts.close()

    @torch.no_grad()
    def _imagine(self, dreams: list[Dream], n: int) -> tuple[Tensor, Tensor, list[list[str]]]:
        """Pictures [B, n, V, H, W, 3], poses [B, n, 5] and tripped guards of B dreams with ``n`` commands each."""
        model = self.model
        commands = torch.stack([torch.stack(d.commands) for d in dreams])
        pose, before = torch.stack([d.memory.current.pose for d in dreams]), torch.stack([d.before for d in dreams])
        poses = model.heads.adapter(pose, before, commands)
        noise = torch.cat([chunk_noise(model, [d.seed], d.memory.chunks) for d in dreams])
        latents, spread = model.chunk([d.memory for d in dreams], poses, noise)
        pictures = model.vae.pictures(latents[:, :n])
        measured = guards.readings(model, spread, latents, pictures, poses, commands, pose)
        trips = [guards.tripped(model, measured, d.memory.chunks + 1, row) for row, d in enumerate(dreams)]
        if n == model.horizon:
            for row, dream in enumerate(dreams):
                dream.memory.push(End(latents[row, -1], poses[row, -1]))
                dream.before, dream.commands = commands[row, -1], []
        return pictures, poses, trips

    @torch.no_grad()
    def _frames(self, dreams: list[Dream], pictures: Tensor, poses: Tensor, trips: list[list[str]]) -> list[Frames]:
        """Judge newly shown pictures [B, n, V, H, W, 3], all dreams at once, and measure the robots in them.

        Guards end a rollout at a chunk's end, by which their limits were taken; but where a success is shown before, it
        has to pass them there.
        """
        p = self._judge(dreams, pictures)
        opening = self.model.heads.probe(pictures.flatten(0, 1))[:, 4].clamp(0, 1).unflatten(0, pictures.shape[:2])
        told = torch.cat([poses[..., :4], opening[..., None]], -1).cpu().numpy()
        seen = pictures.cpu().numpy()
        out = []
        for row, dream in enumerate(dreams):
            states = []
            for pose in told[row]:
                joints = self._ik.solve(pose[:4].astype(np.float64), dream.state[POSE : POSE + len(ARM7.joints)])
                dream.state = np.concatenate([pose, joints]).astype(np.float32)
                states.append(dream.state)
            films = {c: seen[row, :, v] for v, c in enumerate(self.model.cameras)}
            done = p[row] > self.model.config.limits.success
            counts = not dream.commands or done.any()
            out.append(Frames(films, np.stack(states), p[row], done, np.zeros_like(done), trips[row] if counts else []))
        return out

    @torch.no_grad()
    def _judge(self, dreams: list[Dream], pictures: Tensor) -> NDArray[np.float32]:
        """Success probability [B, n] of pictures [B, n, V, H, W, 3]; 0 where the judges do not know the instruction."""
        p = np.zeros(pictures.shape[:2], np.float32)
        rows = [row for row, d in enumerate(dreams) if d.task is not None]
        if rows:
            known = [dreams[row] for row in rows]
            task = torch.tensor([d.task for d in known], device=pictures.device)
            # One state a judge, [1, B, width]; none of them at the first frame.
            before = None if known[0].judged is None else [
                torch.cat(states, 1) for states in zip(*(d.judged for d in known if d.judged), strict=True)
            ]  # fmt: skip
            of_known, after = self.model.heads.success(pictures[rows], task, before)
            p[rows] = of_known.cpu().numpy()
            for i, dream in enumerate(known):
                dream.judged = [state[:, i : i + 1] for state in after]
        return p


def make(name: str, num_envs: int, device: str = "cpu", render_mode: str = "") -> ImaginedRows:
    """Rows of ``imagined:<name>``, for :func:`vla_stack.envs.make`; a run directory, or a world model's.

    Raises:
        UserError: There is no such world model, or it was not of a task of ``sim`` and has no first frames.
    """
    model = shared(name, device)
    return ImaginedRows(Dreams(model, simulated(model), num_envs, max_steps_of(model)), num_envs)


def _joined(parts: list[Frames]) -> Frames:
    """Films end to end."""
    pictures = {c: np.concatenate([f.pictures[c] for f in parts]) for c in parts[0].pictures}

    def column(name: str) -> Any:
        return np.concatenate([getattr(f, name) for f in parts])

    tripped = [g for f in parts for g in f.tripped]
    return Frames(pictures, column("states"), column("success"), column("done"), column("ended"), tripped)


def simulated(model: WorldModel) -> SimulatedStarts:
    """First frames of the task that a model was trained on; raises as :func:`task_of`."""
    return SimulatedStarts(task_of(model).id, model.robot)


def max_steps_of(model: WorldModel) -> int:
    """Frames of an episode of the task that a model was trained on; raises as :func:`task_of`."""
    return task_of(model).limit(model.robot.rate_hz)


def task_of(model: WorldModel) -> TaskInfo:
    """The simulated task that a model was trained on.

    Raises:
        UserError: It was trained on none, but on a real robot's episodes.
    """
    known = {info.id: info for info in TASKS.values()}
    if model.config.env not in known:
        raise UserError(f"the world model is of '{model.config.env}'", f"give one of {', '.join(sorted(known))}")
    return known[model.config.env]
