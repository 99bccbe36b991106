"""Scripted experts, of our tasks and of benchmarks, into a crash-safe dataset: an agent and a recorder of the engine.

Which episodes a dataset holds is a function of the task, the seed and the count alone: each attempt has its own
environment seed, attempts are rolled out by whichever worker is free, and recorded in the order of their numbers. A
stopped collection continues where it was.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vla_stack import envs
from vla_stack.data.chunks import chunk_columns
from vla_stack.data.dataset import CHUNK, CHUNK_GIVEN, CHUNK_STEPS, open_dataset
from vla_stack.data.features import Column, ImageMode
from vla_stack.data.layout import INFO, read_info, read_json, write_json
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.ray_cluster import Where
from vla_stack.rollout.agents import expert_plan
from vla_stack.rollout.engine import ChunkPolicy, run
from vla_stack.rollout.labelling import NO_JOINTS, CollectingAgent, Frame, FrameRecorder, can_branch
from vla_stack.rollout.plan import Attempts
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.schema import RobotSpec

SEED = "seed"  # int64 column: the environment seed of the episode, which replays it
COMMAND_SENT = "command.sent"  # float32 [A] column: the perturbed command that was executed; `action` is the label
BRANCH = 16  # actions of a chunk label
LINGER = 6  # control steps recorded after a success where a mixture is collected: what success looks like
RECORD = "meta/collect.json"  # task -> the other fields of its CollectConfig
ROWS = 8  # of environments that a policy answers at once
UNLUCKY = 1000  # attempts in a row that no episode is of: after them none is looked for
FRAMES = "frames"  # name of the recorder
HOPELESS = 50  # attempts without a single success before giving up


@dataclass(frozen=True)
class CollectConfig:
    """What to collect.

    Attributes:
        task: Name in ``sim.TASKS``, or the id of a benchmark's task, e.g. ``metaworld/push-v3``.
        seed: Seed of everything random.
        noise: Noise on the executed actions, see ``sim.Expert``; the recorded action is the clean one.
        branch: Actions of each frame's chunk label, see :mod:`vla_stack.data.branching`; 0 records none. Without noise
            or errors the series of actions is the expert's own, and there are none either.
        image_size: Height and width of the pictures, pixels.
        randomisation: Level of domain randomisation.
        keep_failures: Record unsuccessful episodes too.
        privileged: No cameras, but the poses of what the instruction is about in the state: see ``sim.privileged``;
            of the benchmarks, MetaWorld alone has them.
        mixed: What a world model learns from: the behaviours of ``sim.behaviours`` in their shares, failures included,
            and episodes go on for :data:`LINGER` steps after a success.
        moments: Frames that are recorded of each episode, in order, of random control steps; 0 records all. The episode
            is driven without pictures, so that in the same time many more scenes are seen. What is between them is
            not there: only the chunk labels say what the expert does.
        options: Further keyword arguments of the environment, e.g. ``{"cameras": ("top",)}``.
        errors: Share of stretches of an episode in which the arm errs, see ``sim.Expert``; of our tasks alone.
        policy: Who acts in the expert's place, as a directory or name; the expert labels the states in which it asks
            for a chunk, of failed episodes too (Ross et al., "DAgger", 2011), as long as it can still do the task from
            there. It says what is observed.
        delay: Most control steps by which the policy's chunks come late; each episode has a number of its own, from 0
            on. A label then begins with what the policy executes meanwhile (``chunk.given``), and the expert goes on
            from there: so a policy learns how to continue what a robot is doing, right or wrong.
    """

    task: str
    seed: int = 0
    noise: float = 0.0
    branch: int = BRANCH
    image_size: int = 64
    randomisation: int = 0
    keep_failures: bool = False
    privileged: bool = False
    mixed: bool = False
    moments: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    errors: float = 0.0
    policy: str = ""
    delay: int = 0

    def check(self) -> None:
        """Raise a :class:`UserError` for what does not go together, in the words of ``vla collect``."""
        from sim import external

        foreign, perturbed = external.is_external(self.task), self.noise or self.errors
        if self.branch < 0:
            raise UserError(f"--branch {self.branch} is negative", "0 records no chunk labels")
        if self.errors and (foreign or self.errors > 1):
            raise UserError(f"--errors {self.errors:g} is no share, or not of our tasks", "give --task and at most 1")
        if self.mixed and (foreign or perturbed):
            message = "--mixed is for our tasks (--task), and brings its own noise"
            raise UserError(message, "leave out --env and --noise")
        if self.moments and (foreign or self.mixed or not perturbed):
            message = "--moments needs the chunk labels of our tasks"
            raise UserError(message, "give --task and --noise, leave out --mixed")
        if self.policy and (foreign or self.mixed or perturbed or not self.branch):
            message = "--policy acts by itself, in our tasks, and the expert's chunks are its labels"
            raise UserError(message, "give --task, and leave out --noise, --errors, --mixed and --branch 0")
        if self.delay and not self.policy:
            raise UserError(f"--delay {self.delay} is of a policy's chunks", "give --policy")
        if self.privileged and self.options.get("cameras"):
            raise UserError("--privileged records no cameras", "leave out --cameras")

    def env_seed(self, attempt: int) -> int:
        """Environment seed of an attempt; hashed, so that neighbouring seeds and tasks share no episodes."""
        entropy = (self.seed, zlib.crc32(self.task.encode()), attempt)
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    @property
    def chunk_steps(self) -> int:
        """Actions of the chunk labels that are wanted; 0 for none."""
        return self.branch if (self.how or self.policy) and not self.mixed else 0

    @property
    def how(self) -> dict[str, float]:
        """How the expert is perturbed, as keyword arguments of what makes one."""
        return {name: value for name in ("noise", "errors") if (value := getattr(self, name)) > 0}

    @property
    def env_id(self) -> str:
        """Of the environment; raises :class:`UserError` where there is no such task."""
        import sim
        from sim import external

        if external.is_external(self.task):
            return self.task
        return sim.TASKS[self.task].id

    @property
    def env_options(self) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        options = {"image_size": self.image_size, **self.options}
        if self.env_id != self.task:
            options["randomisation"] = self.randomisation
        return options | ({"cameras": (), "privileged": True} if self.privileged else {})


def attempts(
    config: CollectConfig, first: int, workers: int, rollouts: Where = "local", policy: ChunkPolicy | None = None
) -> Generator[EpisodeRecord]:
    """Attempts in the order of their numbers, each with its list of ``labelling.Frame`` attached as :data:`FRAMES`."""
    linger = LINGER if config.mixed else 0
    agent = partial(CollectingAgent, config=config)
    plan = expert_plan(config.env_id, config.env_options, agent, {FRAMES: FrameRecorder}, linger)
    if policy is not None:
        plan = replace(plan, policy=policy.spec)
    rows = max(ROWS if policy else 1, workers)
    starts = Attempts(config.env_seed, first)
    order = iter(starts)
    early: dict[int, EpisodeRecord] = {}
    wanted = next(order).seed
    for record in run(policy, plan, starts, rows, workers, rollouts):
        early[record.seed] = record
        while wanted in early:
            yield early.pop(wanted)
            wanted = next(order).seed


def collect(
    config: CollectConfig,
    root: str | Path,
    episodes: int,
    workers: int = 2,
    image_mode: ImageMode = "video",
    rollouts: Where = "local",
) -> tuple[int, int]:
    """Record until a dataset holds a number of episodes of a task.

    Args:
        config: What to collect.
        root: Dataset folder; appended to if it exists.
        episodes: Episodes of this task that the dataset shall hold.
        workers: Processes that simulate; 0 simulates in this one.
        image_mode: How a new dataset stores pictures.
        rollouts: Where those are: on this machine, or actors on Ray. The dataset is the same.

    Returns:
        Attempts and successes of this call.

    Raises:
        UserError: The task is unknown, what is to be collected does not go together, the dataset was collected
            otherwise, the policy cannot act in it, or the expert keeps failing.
    """
    config.check()
    root, policy = Path(root), None
    if config.policy:
        from vla_stack.policies.chunk_policy import load_policy  # torch, which no expert needs

        policy = load_policy(config.policy, frozen=True)
        config = replace(config, options=envs.options_for(config.env_id, policy.spec, config.options))
        if config.delay > policy.spec.d_train_max:
            able = policy.spec.d_train_max
            message = f"--delay {config.delay}: {config.policy} can continue {able} actions that are executed meanwhile"
            raise UserError(message, "train it with policy.options.max_delay first, or give less")
    spec, joints, instructions, branched = _describe(config)
    have, attempt = _progress(config, root, instructions)
    if have >= episodes:
        return 0, 0
    names = tuple(d.name for d in spec.action)
    extra = {SEED: Column("int64"), COMMAND_SENT: Column("float32", (len(names),), names)}
    if branched:
        extra |= chunk_columns(config.chunk_steps, len(names), late=config.delay > 0)
    elif config.chunk_steps:
        print(f"{config.task}: its state cannot be saved, so frames get single labels and no chunks of them")
    tried = succeeded = 0
    keep = config.keep_failures or config.mixed or policy is not None
    with (
        EpisodeRecorder(root, spec, image_mode, joints, extra) as recorder,
        tqdm(total=episodes, initial=have, desc=f"{config.task:<8}", unit=" episodes") as bar,
        closing(attempts(config, attempt, workers, rollouts, policy)) as records,
    ):
        _write_record(config, root)
        for record in records:
            tried += 1
            frames = record.attached[FRAMES][: record.outcome]
            # Moments are of episodes in which the expert, driven to the end, succeeded; there are none of others.
            worked = bool(frames) if config.moments else record.success
            succeeded += worked
            if frames and (worked or keep):
                _record(recorder, record, frames, config.delay > 0)
                have += 1
                bar.update()
            bar.set_postfix_str(f"success {succeeded}/{tried} = {succeeded / tried:.0%}")
            if have >= episodes:
                break
            if tried >= HOPELESS and not succeeded and not keep:
                raise UserError(f"the expert of '{config.task}' failed {tried} times in a row", "lower --noise")
    return tried, succeeded


def _describe(config: CollectConfig) -> tuple[RobotSpec, tuple[str, ...], tuple[str, ...], bool]:
    """The robot of a task, the names of its joints where it reports their targets, the task's instructions, and whether
    its frames get chunk labels.
    """
    one = envs.make(config.env_id, 1, None, config.env_options)
    env = one.row(0)
    task: Any = env.unwrapped
    names = tuple(f"joint_{i + 1}.pos" for i in range(len(getattr(task, "joint_command", NO_JOINTS))))
    instructions = tuple(getattr(task, "task_variants", (task.task,)))
    described = task.spec_robot, names, instructions, config.chunk_steps > 0 and can_branch(env)
    one.close()
    return described


def _progress(config: CollectConfig, root: Path, instructions: tuple[str, ...]) -> tuple[int, int]:
    """Episodes of this task that a dataset holds already, and the first attempt that is not part of it."""
    if not (root / INFO).exists() or not read_info(root)["total_episodes"]:
        return 0, 0
    dataset = open_dataset(root)
    if SEED not in dataset.columns:
        raise UserError(f"{root} has no column '{SEED}': it was not recorded by `vla collect`", "choose another --root")
    first = dataset.episode_from
    seeds = set(dataset.columns[SEED][first].tolist())
    alike = np.isin(dataset.columns["task_index"][first], [i for i, t in enumerate(dataset.tasks) if t in instructions])
    foreign = set(dataset.columns[SEED][first][alike].tolist())  # of this task, or of one that asks for the same
    record = _read_record(root)
    before = record.pop(config.task, None)
    if before is not None and (differ := [k for k, v in _fields(config).items() if v != _fields(before)[k]]):
        if _recorded(before, seeds)[0] == 0:  # it was stopped before its first episode
            return 0, 0
        name = "policy" if "policy" in differ else differ[0]  # the options follow from it
        was, now = getattr(before, name), getattr(config, name)
        how = "of another seed" if name == "seed" else f"collected with {name} {was}, not {now}"
        raise UserError(f"{root}: its '{config.task}' episodes are {how}", "collect the same, or into another --root")
    count, attempt = _recorded(config, seeds)
    if not count and len(foreign) > sum(_recorded(other, foreign)[0] for other in record.values()):
        message = f"{root}: its episodes with the instructions of '{config.task}' are of another seed or task"
        raise UserError(message, "give the same --seed, or another --root")
    return count, attempt


def _recorded(config: CollectConfig, seeds: set[int]) -> tuple[int, int]:
    """How many of the episodes with these seeds are a collection's, and the attempt that follows its last one."""
    count = after = attempt = 0
    while attempt - after < UNLUCKY:
        attempt += 1
        if config.env_seed(attempt - 1) in seeds:
            count, after = count + 1, attempt
    return count, after


def _fields(config: CollectConfig) -> dict[str, Any]:
    """What is written down of a collection, as JSON has it."""
    fields = {k: v for k, v in asdict(config).items() if k != "task"}
    return json.loads(json.dumps(fields | {"branch": config.chunk_steps}))


def _read_record(root: Path) -> dict[str, CollectConfig]:
    """How the tasks of a dataset were collected, as far as it says so."""
    path = root / RECORD
    try:
        written = read_json(path) if path.exists() else {}
        return {t: CollectConfig(t, **({"branch": 0} | fields)) for t, fields in written.items()}
    except TypeError as e:
        raise UserError(f"{path} does not say how the episodes were collected ({e})", "restore it from a copy") from e


def _write_record(config: CollectConfig, root: Path) -> None:
    record = _read_record(root)
    if config.task not in record or _fields(record[config.task]) != _fields(config):
        write_json(root / RECORD, {t: _fields(c) for t, c in (record | {config.task: config}).items()})


def _record(recorder: EpisodeRecorder, record: EpisodeRecord, frames: list[Frame], late: bool) -> None:
    for frame in frames:
        chunk: dict[str, Any] = {CHUNK: frame.chunk.ravel(), CHUNK_STEPS: frame.chunk_steps} if frame.chunk.size else {}
        if chunk and late:
            chunk[CHUNK_GIVEN] = frame.given
        joints = frame.joints if frame.joints.size else None
        more = {SEED: record.seed, COMMAND_SENT: frame.sent, **chunk}
        recorder.add_frame(frame.observation, frame.action, joints, frame.reward, **more)
    recorder.save_episode(record.success)
