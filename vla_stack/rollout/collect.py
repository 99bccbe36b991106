"""``vla collect``: scripted experts, of our tasks and of benchmarks, in parallel processes, into a crash-safe dataset.

Which episodes a dataset holds is a function of the task, the seed and the count alone: each attempt has its own
environment seed, attempts are rolled out by whichever worker is free, and recorded in the order of their numbers. A
stopped collection continues where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vla_stack.data.branching import Branches
from vla_stack.data.chunks import chunk_columns
from vla_stack.data.dataset import CHUNK, CHUNK_STEPS, open_dataset
from vla_stack.data.features import Column, ImageMode
from vla_stack.data.layout import INFO, read_info, read_json, write_json
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.ray_cluster import Where, cluster
from vla_stack.schema import Observation, RobotSpec

if TYPE_CHECKING:
    import gymnasium as gym

HELP = "Record a scripted expert's episodes into a LeRobotDataset; run again to continue or to add episodes."
EXAMPLES = (
    "vla collect --task pick --episodes 200 --root datasets/pick",
    "vla collect --task pick place --episodes 100 --root datasets/two --noise 0.5 --workers 4",
    "vla collect --task pick --mixed --episodes 200 --root datasets/world   # for a world model",
    "vla collect --task pick --episodes 2000 --root datasets/pick --rollouts ray --workers 32",
    "vla collect --env metaworld/push-v3 metaworld/drawer-open-v3 --control-hz 20 --cameras topview gripperPOV "
    "--episodes 100 --root datasets/metaworld",
    "vla collect --env aloha/transfer_cube --control-hz 10 --episodes 100 --root datasets/aloha",
)

SEED = "seed"  # int64 column: the environment seed of the episode, which replays it
COMMAND_SENT = "command.sent"  # float32 [A] column: the perturbed command that was executed; `action` is the label
NO_JOINTS = np.zeros(0, np.float32)  # a benchmark's environment reports no joint targets
BRANCH = 16  # actions of a chunk label
LINGER = 6  # control steps recorded after a success where a mixture is collected: what success looks like
RECORD = "meta/collect.json"  # task -> the other fields of its CollectConfig
UNLUCKY = 1000  # attempts in a row that no episode is of: after them none is looked for
RESTARTS = 3  # of an actor on Ray
HOPELESS = 50  # attempts without a single success before giving up


@dataclass(frozen=True)
class CollectConfig:
    """What to collect.

    Attributes:
        task: Name in ``sim.TASKS``, or the id of a benchmark's task, e.g. ``metaworld/push-v3``.
        seed: Seed of everything random.
        noise: Noise on the executed actions, see ``sim.Expert``; the recorded action is the clean one.
        branch: Actions of each frame's chunk label, see :mod:`vla_stack.data.branching`; 0 records none. Without noise
            the series of actions is the expert's own, and there are none either.
        image_size: Height and width of the pictures, pixels.
        randomisation: Level of domain randomisation.
        keep_failures: Record unsuccessful episodes too.
        privileged: No cameras, but the poses of what the instruction is about in the state: see ``sim.privileged``;
            of the benchmarks, MetaWorld alone has them.
        mixed: What a world model learns from: the behaviours of ``sim.behaviours`` in their shares, failures included,
            and episodes go on for :data:`LINGER` steps after a success.
        options: Further keyword arguments of the environment, e.g. ``{"cameras": ("top",)}``.
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
    options: dict[str, Any] = field(default_factory=dict)

    def env_seed(self, attempt: int) -> int:
        """Environment seed of an attempt; hashed, so that neighbouring seeds and tasks share no episodes."""
        entropy = (self.seed, zlib.crc32(self.task.encode()), attempt)
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    @property
    def chunk_steps(self) -> int:
        """Actions of the chunk labels that are wanted; 0 for none."""
        return self.branch if self.noise > 0 and not self.mixed else 0

    def make_env(self) -> gym.Env:
        """The environment; raises :class:`UserError` where there is none or an option is not valid."""
        import gymnasium as gym

        import sim
        from sim import external

        options = {"image_size": self.image_size, **self.options}
        if self.privileged:
            options |= {"cameras": (), "privileged": True}
        if external.is_external(self.task):
            return external.make(self.task, **options)
        return gym.make(sim.TASKS[self.task].id, randomisation=self.randomisation, **options)


@dataclass(frozen=True)
class Rollout:
    """One attempt of an expert: T steps."""

    seed: int
    success: bool
    observations: list[Observation]
    actions: NDArray[np.float32]  # [T, A] clean labels
    sent: NDArray[np.float32]  # [T, A]
    joints: NDArray[np.float32]  # [T, J]
    rewards: NDArray[np.float32]  # [T]
    chunks: NDArray[np.float32]  # [T, H, A] chunk labels, H is 0 where there are none
    chunk_steps: NDArray[np.int64]  # [T]


class Simulator:
    """An environment and its experts, kept by each worker."""

    def __init__(self, config: CollectConfig) -> None:
        self._config, self._env = config, config.make_env()
        self._branches: Branches | None = None
        if config.chunk_steps and can_branch(self._env):
            twin = replace(config, options={**config.options, "cameras": ()}).make_env()
            self._branches = Branches(twin, expert_maker(config.task), config.chunk_steps)

    def roll(self, seed: int) -> Rollout:
        """The attempt of an environment seed."""
        from sim import behaviours

        env: Any = self._env
        config, branches = self._config, self._branches
        raw, info = env.reset(seed=seed)
        expert: Any
        if config.mixed:
            expert = behaviours.make_behaviour(env, behaviours.deal(seed), seed)
        else:
            expert = expert_maker(config.task)(env, noise=config.noise, seed=seed)
        if branches is not None:
            branches.begin(seed)
        no_chunk = np.zeros((0, env.action_space.shape[0]), np.float32), 0
        period_ns = round(1e9 / env.unwrapped.spec_robot.rate_hz)
        observations, steps = [], []
        linger, won = LINGER if config.mixed else 0, False
        for k in itertools.count():
            observations.append(Observation(raw["agent_pos"], raw.get("pixels", {}), info["task"], k, k * period_ns))
            action = expert.act()
            chunk, length = no_chunk if branches is None else branches.chunk(env)
            sent = expert.perturb(action)
            raw, reward, terminated, truncated, info = env.step(sent)
            joints = getattr(env.unwrapped, "joint_command", NO_JOINTS)
            steps.append((action, sent, joints, np.float32(reward), chunk, length))
            won = won or bool(info["is_success"])
            ended = terminated or won
            if truncated or (ended and linger == 0):
                break
            linger -= ended
        columns = [np.stack(column) for column in zip(*steps, strict=True)]
        return Rollout(seed, won, observations, *columns)


def expert_maker(task: str) -> Callable[..., Any]:
    """The function that makes a task's expert from its environment."""
    import sim
    from sim import external

    return external.make_expert if external.is_external(task) else sim.make_expert


def can_branch(env: gym.Env) -> bool:
    """Whether an environment's state can be saved and restored, as a branch of its expert needs."""
    return hasattr(env.unwrapped, "get_state")


class _Process:
    """The simulator of a worker process."""

    simulator: Simulator

    @classmethod
    def start(cls, config: CollectConfig) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls.simulator = Simulator(config)

    @classmethod
    def roll(cls, seed: int) -> Rollout:
        return cls.simulator.roll(seed)


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
        workers: Processes that simulate.
        image_mode: How a new dataset stores pictures.
        rollouts: Where those are: on this machine, or actors on Ray. The dataset is the same.

    Returns:
        Attempts and successes of this call.

    Raises:
        UserError: The task is unknown, the dataset was collected otherwise, or the expert keeps failing.
    """
    root = Path(root)
    spec, joints, instructions, branched = _describe(config)
    have, attempt = _progress(config, root, instructions)
    if have >= episodes:
        return 0, 0
    names = tuple(d.name for d in spec.action)
    extra = {SEED: Column("int64"), COMMAND_SENT: Column("float32", (len(names),), names)}
    if branched:
        extra |= chunk_columns(config.chunk_steps, len(names))
    elif config.chunk_steps:
        print(f"{config.task}: its state cannot be saved, so frames get single labels and no chunks of them")
    tried = succeeded = 0
    with (
        EpisodeRecorder(root, spec, image_mode, joints, extra) as recorder,
        tqdm(total=episodes, initial=have, desc=f"{config.task:<8}", unit=" episodes") as bar,
    ):
        _write_record(config, root)
        attempts = _on_ray(config, attempt, workers) if rollouts == "ray" else _in_processes(config, attempt, workers)
        for rollout in attempts:
            tried += 1
            succeeded += rollout.success
            if rollout.success or config.keep_failures or config.mixed:
                _record(recorder, rollout)
                have += 1
                bar.update()
            bar.set_postfix_str(f"success {succeeded}/{tried} = {succeeded / tried:.0%}")
            if have >= episodes:
                break
            if tried >= HOPELESS and not succeeded and not config.keep_failures:
                raise UserError(f"the expert of '{config.task}' failed {tried} times in a row", "lower --noise")
    return tried, succeeded


def _describe(config: CollectConfig) -> tuple[RobotSpec, tuple[str, ...], tuple[str, ...], bool]:
    """The robot of a task, the names of its joints where it reports their targets, the task's instructions, and whether
    its frames get chunk labels.
    """
    env = config.make_env()
    task: Any = env.unwrapped
    names = tuple(f"joint_{i + 1}.pos" for i in range(len(getattr(task, "joint_command", NO_JOINTS))))
    instructions = tuple(getattr(task, "task_variants", (task.task,)))
    described = task.spec_robot, names, instructions, config.chunk_steps > 0 and can_branch(env)
    env.close()
    return described


def _progress(config: CollectConfig, root: Path, instructions: tuple[str, ...]) -> tuple[int, int]:
    """Episodes of this task that a dataset holds already, and the first attempt that is not part of it."""
    if not (root / INFO).exists() or not read_info(root)["total_episodes"]:
        return 0, 0
    dataset = open_dataset(root)
    if SEED not in dataset.columns:
        raise UserError(f"{root} has no column '{SEED}': it was not recorded by `vla collect`", "choose another --root")
    first = dataset.episode_from
    alike = np.isin(dataset.columns["task_index"][first], [i for i, t in enumerate(dataset.tasks) if t in instructions])
    seeds = set(dataset.columns[SEED][first][alike].tolist())  # of this task, or of another one that asks for the same
    record = _read_record(root)
    before = record.pop(config.task, None)
    if before is not None and (differ := [k for k, v in _fields(config).items() if v != _fields(before)[k]]):
        if _recorded(before, seeds)[0] == 0:  # it was stopped before its first episode
            return 0, 0
        was, now = getattr(before, differ[0]), getattr(config, differ[0])
        how = "of another seed" if differ[0] == "seed" else f"collected with {differ[0]} {was}, not {now}"
        raise UserError(f"{root}: its '{config.task}' episodes are {how}", "collect the same, or into another --root")
    count, attempt = _recorded(config, seeds)
    if not count and len(seeds) > sum(_recorded(other, seeds)[0] for other in record.values()):
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


def _end_with_parent() -> None:
    """End this process when its parent is killed; a pool's workers would wait for ever for their next task."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_processes(config: CollectConfig, first: int, workers: int) -> Iterator[Rollout]:
    """Attempts in order, simulated ahead by as much as keeps the workers busy."""
    context = multiprocessing.get_context("spawn")  # a forked OpenGL context is not usable
    pool = ProcessPoolExecutor(workers, context, _Process.start, (config,))
    pending: deque[Future[Rollout]] = deque()
    attempts = itertools.count(first)
    try:
        while True:
            while len(pending) < 3 * workers:
                pending.append(pool.submit(_Process.roll, config.env_seed(next(attempts))))
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a simulation process died", "run `vla doctor`; fewer --workers need less memory") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(config: CollectConfig, first: int, workers: int) -> Iterator[Rollout]:
    """The same by actors on Ray. One that dies is started again, elsewhere if need be, and repeats what it was at."""
    attempts = itertools.count(first)
    with cluster(workers) as ray:
        make = ray.remote(num_cpus=1, max_restarts=RESTARTS, max_task_retries=RESTARTS)(Simulator)
        actors = [make.remote(config) for _ in range(workers)]
        turns, pending = itertools.cycle(actors), deque[Any]()
        try:
            while True:
                while len(pending) < 3 * workers:
                    pending.append(next(turns).roll.remote(config.env_seed(next(attempts))))
                yield ray.get(pending.popleft())
        except ray.exceptions.RayActorError as e:
            raise UserError(f"a simulator on Ray keeps dying: {e}", "try --rollouts local") from None
        finally:
            for actor in actors:
                ray.kill(actor)


def _record(recorder: EpisodeRecorder, rollout: Rollout) -> None:
    for k, obs in enumerate(rollout.observations):
        chunk = {CHUNK: rollout.chunks[k].ravel(), CHUNK_STEPS: rollout.chunk_steps[k]} if rollout.chunks.size else {}
        recorder.add_frame(
            obs,
            rollout.actions[k],
            rollout.joints[k] if rollout.joints.size else None,
            float(rollout.rewards[k]),
            **{SEED: rollout.seed, COMMAND_SENT: rollout.sent[k], **chunk},
        )
    recorder.save_episode(rollout.success)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", nargs="+", help="one or more of our tasks, recorded one after another")
    what.add_argument("--env", nargs="+", help="tasks of benchmarks: metaworld/<task>, aloha/transfer_cube")
    parser.add_argument("--episodes", type=int, default=200, help="episodes the dataset shall hold of each task (200)")
    parser.add_argument("--root", type=Path, required=True, help="dataset folder; continued if it exists")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="simulation processes (one per core)")
    parser.add_argument("--rollouts", choices=("local", "ray"), default="local", help="where they run (local)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="noise on executed actions, labels stay clean (0)")
    parser.add_argument(
        "--branch", type=int, default=BRANCH, metavar="H", help="actions of each frame's chunk label, with --noise (16)"
    )
    parser.add_argument("--image-size", type=int, default=64, help="pixels (64)")
    parser.add_argument("--image-mode", choices=("video", "image"), default="video", help="H.264 or PNG (video)")
    parser.add_argument("--cameras", nargs="+", help="which to record (the environment's default)")
    parser.add_argument("--control-hz", type=float, help="control steps a second (the environment's default)")
    modes = ("ee_abs", "joint_abs", "ee_delta")
    parser.add_argument("--control-mode", choices=modes, help="actions (ours: ee_abs, MetaWorld: ee_delta)")
    parser.add_argument("--visuals", choices=("fast", "official"), help="pictures of benchmarks (fast)")
    parser.add_argument("--randomisation", type=int, default=0, help="level of our tasks' domain randomisation (0)")
    parser.add_argument("--keep-failures", action="store_true", help="record unsuccessful episodes too")
    parser.add_argument(
        "--mixed", action="store_true", help="for a world model: experts, failures, random waypoints, looking away"
    )
    parser.add_argument(
        "--privileged", action="store_true", help="object poses in the state, no cameras: for experiments on algorithms"
    )


def main(args: argparse.Namespace) -> int:
    if args.episodes < 1 or args.workers < 1:
        raise UserError("--episodes and --workers must be at least 1")
    if args.branch < 0:
        raise UserError(f"--branch {args.branch} is negative", "0 records no chunk labels")
    if args.mixed and (args.env or args.noise):
        raise UserError("--mixed is for our tasks (--task), and brings its own noise", "leave out --env and --noise")
    if args.privileged and args.cameras:
        raise UserError("--privileged records no cameras", "leave out --cameras")
    if args.task and (args.control_mode or args.visuals):
        raise UserError("--control-mode and --visuals are for benchmarks (--env); our experts act in ee_abs")
    given = {name: getattr(args, name) for name in ("control_hz", "control_mode", "visuals")}
    given["cameras"] = args.cameras and tuple(args.cameras)
    options = {key: value for key, value in given.items() if value is not None}
    shared = (
        args.seed,
        args.noise,
        args.branch,
        args.image_size,
        args.randomisation,
        args.keep_failures,
        args.privileged,
    )
    for task in args.task or args.env:
        config = CollectConfig(task, *shared, args.mixed, options)
        try:
            collect(config, args.root, args.episodes, args.workers, args.image_mode, args.rollouts)
        except KeyboardInterrupt:
            print(f"\nstopped; every finished episode is in {args.root}. Run the same command to continue.")
            return 130
    info = read_info(args.root)
    print(f"{args.root}: {info['total_episodes']} episodes, {info['total_frames']} frames")
    return 0
