"""A world model as the backend of the imagined environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from sim.registry import TASKS, TaskInfo
from vla_stack.envs.making import check_fit, sim_options
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec
from vla_stack.training.run_dir import RECIPE
from vla_stack.world_model import guards
from vla_stack.world_model.clips import Recording, open_recording
from vla_stack.world_model.imagined_rows import ImaginedFrame, ImaginedRows
from vla_stack.world_model.memory import Memory
from vla_stack.world_model.model import End, WorldModel, resolve, shared
from vla_stack.world_model.quality import chunk_noise
from vla_stack.world_model.selection import Critics, choose


@dataclass(frozen=True)
class Start:
    """A real first frame.

    Attributes:
        pictures: Camera -> uint8 [H, W, 3].
        state: float32 [S].
        task: Instruction.
        pose: float32 [5], as the model was told it of recorded frames; None where an episode begins: as measured.
        before: float32 [5], the command before the frame; None likewise.
    """

    pictures: dict[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    task: str
    pose: NDArray[np.float32] | None = None
    before: NDArray[np.float32] | None = None


class Starts(Protocol):
    """Where real first frames come from."""

    def start(self, seed: int, options: dict[str, Any]) -> Start: ...
    def close(self) -> None: ...


class SimulatedStarts:
    """First frames of the simulator: the same seed begins the same scene as there."""

    def __init__(self, env_id: str, robot: RobotSpec) -> None:
        self._env = gym.make(env_id, **sim_options(robot))

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
    """Frames of a dataset: row ``options["start_index"]``, or the first frame of an episode that the seed draws.

    Episodes that are held out of training are drawn from where there are any.
    """

    def __init__(self, recording: Recording) -> None:
        r = self._recording = recording
        self._first = np.unique(r.start[r.held_out] if r.held_out.any() else r.start)

    def start(self, seed: int, options: dict[str, Any]) -> Start:
        r = self._recording
        drawn = np.random.default_rng(seed).choice(self._first)
        row = int(options.get("start_index", drawn))
        if not 0 <= row < len(r.end):
            raise UserError(f"start_index {row} is not in the data", f"it has frames 0 to {len(r.end) - 1}")
        pictures, task = {c: p[row] for c, p in r.pictures.items()}, r.tasks[r.task[row]]
        return Start(pictures, r.states[row], task, r.poses[row], r.before(np.array([row]))[0])

    def close(self) -> None: ...


class ImaginedChunk(NamedTuple):
    """A chunk as it was imagined.

    Attributes:
        commands: [n, 5], those that it was imagined for; the last one is held for what is left of it.
        pictures: uint8 [n, V, H, W, 3].
        poses: [n, 5].
        opening: [n], of the gripper, as the probe sees it.
        tripped: Guards that it trips.
        end: Its last frame.
    """

    commands: Tensor
    pictures: Tensor
    poses: Tensor
    opening: Tensor
    tripped: list[str]
    end: End

    def foresaw(self, commands: Sequence[Tensor]) -> bool:
        """Whether it was imagined for these commands, as far as they go."""
        return len(commands) <= len(self.commands) and torch.equal(
            self.commands[: len(commands)], torch.stack([*commands])
        )


@dataclass
class ImaginedRollout:
    """One rollout.

    Attributes:
        seed: Of its noise.
        memory: Ends of its chunks.
        task: Index of its instruction; None where the judges do not know it.
        before: Command before the present chunk, [5].
        commands: Those of the present chunk so far, [5] each.
        chunk: The present chunk, as it was imagined last.
        judged: The judges' states, after every frame that was shown.
        state: float32 [S], as the robot would measure it.
    """

    seed: int
    memory: Memory[End]
    task: int | None
    before: Tensor
    state: NDArray[np.float32]
    commands: list[Tensor] = field(default_factory=list)
    chunk: ImaginedChunk | None = None
    judged: list[Tensor] | None = None


class WorldBackend:
    """A :class:`vla_stack.world_model.imagined_rows.Backend`; every rollout is a function of its seed and its actions.

    Commands become the poses that would be measured (the adapter), poses become frames. A chunk is imagined when its
    first command comes, for the commands that are known ahead; where these end within it, the last one is held. It is
    imagined again when another command comes than was known; only whole chunks are remembered.

    The state is the pose that the adapter expects; the opening is the probe's, as nothing else sees what is held;
    joints follow by inverse kinematics (:mod:`vla_stack.world_model.tool`).

    Args:
        model: The world model.
        starts: First frames.
        rows: Number of rollouts.
        max_steps: Frames of an episode.
    """

    def __init__(self, model: WorldModel, starts: Starts, rows: int, max_steps: int) -> None:
        self.model, self._starts, self._max_steps = model, starts, max_steps
        self._rollouts: dict[int, ImaginedRollout] = {}
        self._streams = {row: np.random.default_rng(row) for row in range(rows)}

    @property
    def robot(self) -> RobotSpec:
        return self.model.robot

    @property
    def max_steps(self) -> int:
        return self._max_steps

    @property
    def stages(self) -> tuple[str, ...]:
        return ("done",)

    def begin(self, row: int, seed: int | None, options: dict[str, Any]) -> tuple[ImaginedFrame, str]:
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
        measured = self.model.tool.measured(state[None])
        pose = measured if start.pose is None else start.pose[None]
        before = torch.from_numpy(measured[0] if start.before is None else start.before).to(device)
        rollout = ImaginedRollout(seed, self.model.begin(pictures[None], pose)[0], task, before, state)
        self._rollouts[row] = rollout
        p = self._judge([rollout], torch.from_numpy(pictures[None, None]).to(device))[0]
        shown = {c: start.pictures[c] for c in self.model.cameras}
        return ImaginedFrame(shown, state, float(p[0])), start.task

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
        rollout = self._rollouts[row]
        if rollout.task is None:
            return 0
        commands = torch.stack([torch.stack(self._poses(rollout, chunk)) for chunk in candidates])
        return choose(self.model, rollout.memory, rollout.before, commands, rollout.task, seed, caution, critics)[0]

    def propose(self, row: int, critics: Critics) -> NDArray[np.float32]:
        """The chunk [H, A] of the critics' actor for a rollout at a chunk's end."""
        rollout = self._rollouts[row]
        return critics.propose(rollout.memory.current, rollout.task or 0)[0].cpu().numpy()

    def advance(
        self, rows: Sequence[int], actions: NDArray[np.float32], ahead: Sequence[NDArray[np.float32]] = ()
    ) -> list[ImaginedFrame]:
        rollouts = [self._rollouts[row] for row in rows]
        todo: dict[int, list[tuple[ImaginedRollout, Tensor]]] = {}  # a batch for each number of known commands
        for i, rollout in enumerate(rollouts):
            rollout.commands += self._poses(rollout, actions[i : i + 1])
            if rollout.chunk is None or not rollout.chunk.foresaw(rollout.commands):
                later = ahead[i][: self.model.horizon - len(rollout.commands)] if len(ahead) else ()
                commands = torch.stack([*rollout.commands, *self._poses(rollout, later)])
                todo.setdefault(len(commands), []).append((rollout, commands))
        for n in sorted(todo):
            self._imagine(*zip(*todo[n], strict=True))
        return self._show(rollouts)

    def close(self) -> None:
        self._starts.close()

    def _poses(self, rollout: ImaginedRollout, actions: Iterable[NDArray[np.float32]]) -> list[Tensor]:
        """Poses [5] that the next actions [A] of a rollout command, one after another."""
        at, poses = (rollout.commands[-1] if rollout.commands else rollout.before).cpu().numpy(), []
        for action in actions:
            at = self.model.tool.commanded(action, at)
            poses.append(torch.from_numpy(at).to(self.model.bank.device))
        return poses

    @torch.no_grad()
    def _imagine(self, rollouts: Sequence[ImaginedRollout], given: Sequence[Tensor]) -> None:
        """The present chunks of B rollouts, for commands [n, 5] each."""
        model, commands = self.model, torch.stack([*given])
        pose, before = torch.stack([d.memory.current.pose for d in rollouts]), torch.stack([d.before for d in rollouts])
        poses = model.heads.adapter(pose, before, commands)
        noise = torch.cat([chunk_noise(model, [d.seed], d.memory.chunks) for d in rollouts])
        latents, spread = model.chunk([d.memory for d in rollouts], poses, noise)
        pictures = model.vae.pictures(latents[:, : commands.shape[1]])
        seen = guards.seen_poses(model, pictures)
        measured = guards.readings(model, spread, latents, seen, poses, commands, pose)
        whole = commands.shape[1] == model.horizon
        for row, d in enumerate(rollouts):
            tripped = guards.tripped(model, measured, d.memory.chunks + 1, row)
            end = End(latents[row, -1], poses[row, -1], pictures[row, -1] if whole else None)
            d.chunk = ImaginedChunk(commands[row], pictures[row], poses[row], seen[row, :, 4], tripped, end)

    @torch.no_grad()
    def _show(self, rollouts: Sequence[ImaginedRollout]) -> list[ImaginedFrame]:
        """Judge the frames that newest commands lead to, all rollouts at once, and measure the robots in them.

        Guards end a rollout at a chunk's end, by which their limits were taken; but where a success is shown before, it
        has to pass them there.
        """
        chunks = [(d.chunk, len(d.commands) - 1) for d in rollouts if d.chunk is not None]
        pictures = torch.stack([chunk.pictures[at] for chunk, at in chunks])
        poses = torch.stack([chunk.poses[at] for chunk, at in chunks])
        p = self._judge(rollouts, pictures[:, None])[:, 0]
        opening = torch.stack([chunk.opening[at] for chunk, at in chunks]).clamp(0, 1)
        measured = torch.cat([poses[:, :4], opening[:, None]], -1).cpu().numpy()
        seen, frames = pictures.cpu().numpy(), []
        for row, (rollout, (chunk, at)) in enumerate(zip(rollouts, chunks, strict=True)):
            rollout.state = self.model.tool.state(measured[row], rollout.state)
            done, whole = bool(p[row] > self.model.config.limits.success), at + 1 == self.model.horizon
            shown = {c: seen[row, v] for v, c in enumerate(self.model.cameras)}
            tripped = chunk.tripped if whole or done else []
            frames.append(ImaginedFrame(shown, rollout.state, float(p[row]), done, False, tripped))
            if whole:
                rollout.memory.push(chunk.end)
                rollout.before, rollout.commands, rollout.chunk = rollout.commands[-1], [], None
        return frames

    @torch.no_grad()
    def _judge(self, rollouts: Sequence[ImaginedRollout], pictures: Tensor) -> NDArray[np.float32]:
        """Success probability [B, n] of pictures [B, n, V, H, W, 3]; 0 where the judges do not know the instruction."""
        p = np.zeros(pictures.shape[:2], np.float32)
        rows = [row for row, d in enumerate(rollouts) if d.task is not None]
        if rows:
            known = [rollouts[row] for row in rows]
            task = torch.tensor([d.task for d in known], device=pictures.device)
            # One state a judge, [1, B, width]; none of them at the first frame.
            before = None if known[0].judged is None else [
                torch.cat(states, 1) for states in zip(*(d.judged for d in known if d.judged), strict=True)
            ]  # fmt: skip
            of_known, after = self.model.heads.success(pictures[rows], task, before)
            p[rows] = of_known.cpu().numpy()
            for i, rollout in enumerate(known):
                rollout.judged = [state[:, i : i + 1] for state in after]
        return p


def make(
    name: str,
    num_envs: int,
    device: str = "cpu",
    render_mode: str = "",
    starts: str = "",
    max_episode_steps: int | None = None,
) -> ImaginedRows:
    """Rows of ``imagined:<name>``, for :func:`vla_stack.envs.make`.

    Args:
        name: A run directory, or a world model's.
        num_envs: Rows.
        device: Where it is imagined.
        render_mode: Rows render anyway.
        starts: A dataset with whose first frames episodes begin, and whose longest episode limits theirs. Without one
            they begin as the simulator's task does, or, of a robot that is no task of ``sim``, with those that the
            world model was trained on.
        max_episode_steps: Fewer control steps than that.

    Raises:
        UserError: There is no such world model or dataset, or it is of another robot.
    """
    model = shared(name, device)
    begins: Starts
    if not starts and any(info.id == model.config.env for info in TASKS.values()):
        begins, longest = simulated(model), max_steps_of(model)
    else:
        recording = _recorded(name, model, starts)
        begins, longest = RecordedStarts(recording), int((recording.end - recording.start).max())
    limit = min(longest, max_episode_steps or longest)
    return ImaginedRows(WorldBackend(model, begins, num_envs, limit), num_envs)


def _recorded(name: str, model: WorldModel, starts: str) -> Recording:
    """The given dataset, or the one that the world model's run says it learnt from."""
    folder = resolve(name)
    if not starts and folder.name == "model" and (folder.parent / RECIPE).is_file():
        starts = str(yaml.safe_load((folder.parent / RECIPE).read_text())["data"]["root"][0])
    if not starts:
        raise UserError(
            f"{name} is of no task of sim, and nothing says which data it is of",
            "give its first frames: vla eval --starts DATASET",
        )
    recording = open_recording(starts, model.cameras)
    check_fit(recording.robot, model.robot, starts)
    return recording


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
