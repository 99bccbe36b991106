"""The RaC loop with a simulated operator: roll out, intervene, aggregate, train, evaluate; iteration after iteration.

Iteration 0 is demonstrations and the policy trained on them. Iteration k rolls out the policy of iteration k-1 until
the operator has acted for a budget of frames, adds what was recorded to all earlier data, trains anew on all of it and
evaluates on fixed seeds. In mode ``teleop`` the operator demonstrates instead of intervening: the baseline of equal
human frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

import sim
from vla_stack import envs
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import Column
from vla_stack.data.labels import CONTROL_SOURCE, EPISODE_UID, frame_labels, label_columns
from vla_stack.data.layout import read_info, read_json, write_json
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import EpisodeFacts
from vla_stack.data.trainable import Trainable
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Mode, Phase, Segment
from vla_stack.methods.iterations import IterationFolder, table
from vla_stack.methods.practice import check_no_history
from vla_stack.methods.rac.episode import OperatedAgent, RolledOut
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.operator import OperatorConfig, SimulatedOperator
from vla_stack.methods.rac.scene import FEATURES
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.reading import find_device
from vla_stack.rollout.agents import expert_plan
from vla_stack.rollout.engine import Engine, run
from vla_stack.rollout.plan import Episode, Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import RobotSpec
from vla_stack.training.build import make_config
from vla_stack.training.checkpoint import PRETRAINED
from vla_stack.training.recipe import Recipe
from vla_stack.training.train import train

if TYPE_CHECKING:
    from vla_stack.methods.rac.recipe import Rac

SCENE = "scene"  # float32 [7] column: Scene.features
PATIENCE = 2  # times the task's time limit that a policy has: what recovers needs time to try again
EXECUTOR = ExecutorConfig(mode="sync")
NEVER = 1_000_000_000  # steps: the loop has limits of its own
DEMO_LIMIT = 3.0  # times the task's time limit that a demonstration may take
COLUMNS = {
    "iteration": "{iteration}",
    "human frames": "{human_frames}",
    "episodes": "{episodes}",
    "recovery:correction": "{ratio}",
    "success": "{success_rate:.0%}",
    "progress": "{progress:.2f}",
    "recoveries": "{recoveries:.2f}",
}


@dataclass(frozen=True)
class Operated:
    """Makes the agent of each episode; travels to workers.

    Attributes:
        mode, limit, familiar: See :class:`~vla_stack.methods.rac.episode.OperatedAgent`.
        operator: How the simulated operator is; None for nobody.
        seed: Its seed; its luck also depends on the number of the start.
    """

    mode: Mode
    limit: int
    familiar: FamiliarStates | None
    operator: OperatorConfig | None = None
    seed: int = 0

    def __call__(self, episode: Episode) -> OperatedAgent:
        who = None
        if self.operator is not None:
            expert, number = sim.make_expert(episode.env), episode.start.number
            who = SimulatedOperator(self.operator, expert, self.familiar, episode.robot.dt, self.seed, number)
        return OperatedAgent(episode, self.mode, self.limit, who, self.familiar)


class RacLoop:
    """One run; every step of it finds what an earlier, stopped run has left.

    The policy rolls out where it is trained.

    Args:
        recipe: The run.
        run_dir: Where it lies: ``data/`` is the aggregated dataset, ``iteration-k/`` policy, rollouts and record.

    Raises:
        UserError: There is no such device, or the policy cannot be trained: said before the first demonstration is
            recorded.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self.recipe, self.folder, self.data = recipe, IterationFolder(run_dir), run_dir / "data"
        self.method: Rac = recipe.method
        self.task = next(task for task in sim.TASKS.values() if task.id == recipe.task.id)
        self.device = find_device(recipe.device)
        config = make_config(recipe.policy, self.device)
        self.method.fits(config, recipe.policy)
        check_no_history(recipe.policy.type, getattr(base_config(config), "history_ages", ()))
        self.limit = self.task.max_episode_steps
        self.patience = PATIENCE * self.limit
        self.options = {**recipe.task.options, "max_episode_steps": NEVER}

    def run(self) -> list[dict[str, Any]]:
        """Do the iterations that are missing; returns all records."""
        while (k := len(records := self.folder.records())) <= self.method.iterations:
            about = self.collect(k)
            policy = self.train(k, self.recipe.data.interventions)
            self.folder.finish(k, about | self.evaluate(policy))
            print(table(self.folder.records(), COLUMNS), flush=True)
        return records

    # Steps of an iteration ------------------------------------------------------------------------------------------

    def collect(self, k: int) -> dict[str, Any]:
        """Record iteration ``k``'s episodes, as far as they are missing, and say what they are."""
        path = self.folder.path(k) / "rollouts.json"
        if path.exists():
            return read_json(path)
        robot, joints = self._robot()
        extra = label_columns(robot) | {SCENE: Column("float32", (FEATURES,))}
        about: dict[str, Any] = {"collected": 0, "discarded": 0, "takeovers": 0, "supervision_s": 0.0, "rewound": 0}
        counts = {s.name.lower(): 0 for s in Segment}
        familiar = self.familiar() if k else None
        with EpisodeRecorder(self.data, robot, "video", joints, extra) as recorder:
            have = self._uids()  # after the recorder has mended what a killed one left
            for episode, out in self._wanted(k, familiar):
                uid = int(np.random.SeedSequence((self.recipe.seed, k, episode)).generate_state(1, np.uint64)[0]) >> 2
                about["takeovers"] += out.takeovers
                about["supervision_s"] += out.supervision_s(robot.dt)
                if not _kept(out):
                    about["discarded"] += 1
                    continue
                about["collected"] += 1
                about["rewound"] += sum(f.labels["control_source"] == Control.AUTO_REWIND for f in out.frames)
                for segment in Segment:
                    counts[segment.name.lower()] += out.count(segment)
                if uid not in have:
                    self._record(recorder, k, out, uid, familiar)
        info, columns = read_info(self.data), open_dataset(self.data).columns
        human = int((columns[CONTROL_SOURCE] == Control.HUMAN).sum())
        ratio = f"1:{counts['correction'] / counts['recovery']:.1f}" if counts["recovery"] else "-"
        about |= {"frames": counts, "human_frames": human, "episodes": info["total_episodes"], "ratio": ratio}
        write_json(path, about)
        return about

    def train(self, k: int, interventions: Trainable, name: str = "train", episodes: int | None = None) -> Path:
        """Train on the data so far, or on its first ``episodes``; returns the policy directory."""
        run = self.folder.path(k) / name
        used = None if episodes is None else tuple(range(episodes))
        weights = self.recipe.data.weights if k else "uniform"  # iteration 0 is demonstrations alone
        data = replace(self.recipe.data, root=(str(self.data),), episodes=used)
        data = replace(data, interventions=interventions, weights=weights)
        seed = self.recipe.seed + 1000 * k
        quiet = replace(self.recipe.eval, every=0)  # the iteration's own evaluation follows
        plan = replace(self.recipe, name=f"{self.recipe.name}-{k}", data=data, seed=seed, eval=quiet)
        return train(plan, self.method.loss(), run, self.method.fits) / PRETRAINED

    def evaluate(self, policy_dir: Path) -> dict[str, Any]:
        """Roll a policy out alone, on the same seeds in every iteration."""
        policy, e = load_policy(policy_dir, str(self.device)), self.recipe.eval
        agent = Operated("rac", self.patience, self.familiar())
        starts = [Start(e.seed + episode) for episode in range(e.episodes)]
        plan = Plan(self.task.id, self.options, policy.spec, agent, executor=EXECUTOR, linger=None)
        records = sorted(run(policy, plan, starts, e.num_envs, e.workers, e.rollouts), key=lambda record: record.seed)
        return outcome([record.outcome for record in records], len(self.task.stages))

    def familiar(self) -> FamiliarStates:
        """The states of iteration 0."""
        dataset = open_dataset(self.data)
        demos = read_json(self.folder.path(0) / "rollouts.json")["episodes"]
        n = int(dataset.episode_to[demos - 1])
        columns = dataset.columns
        return FamiliarStates(columns[SCENE][:n], columns["subtask_index"][:n], columns["episode_index"][:n])

    # Parts ----------------------------------------------------------------------------------------------------------

    def _wanted(self, k: int, familiar: FamiliarStates | None) -> Iterator[tuple[int, RolledOut]]:
        """Episodes of iteration ``k`` in order, until there are enough demonstrations or human frames."""
        r = self.method
        rolls = k > 0 and r.mode != "teleop"
        policy = load_policy(self._policy_dir(k - 1), str(self.device)) if rolls else None
        human = 0
        goal = r.human_frames if k else r.demos
        unit = "human frames" if k else "demonstrations"
        with (
            tqdm(total=goal, desc=f"iteration {k}", unit=f" {unit}") as bar,
            Engine(self._plan(policy, familiar), r.num_envs, r.workers, r.rollouts) as engine,
        ):
            for first in itertools.count(0, r.num_envs):
                group = range(first, first + r.num_envs)
                starts = [Start(1_000_000 * (self.recipe.seed + 1) + 10_000 * k + n, 10_000 * k + n) for n in group]
                records = sorted(engine.run(policy, starts), key=lambda record: record.number)
                for episode, record in zip(group, records, strict=True):
                    yield episode, record.outcome
                    got = (record.outcome.human_frames if k else 1) if _kept(record.outcome) else 0
                    human += got
                    bar.update(got)
                    if human >= goal:
                        return
                if first > 200 * r.num_envs:
                    raise UserError(f"iteration {k}: {first} episodes gave {human} of {goal} {unit}", "set fewer")

    def _plan(self, policy: ChunkPolicy | None, familiar: FamiliarStates | None) -> Plan:
        """Episodes under the simulated operator: demonstrations where there is no policy."""
        r = self.method
        config = OperatorConfig(recover=r.recover, end=r.mode == "rac", rewind=r.rewind)
        if policy is None:
            agent = Operated("teleop", round(DEMO_LIMIT * self.limit), familiar, config, self.recipe.seed)
            return expert_plan(self.task.id, self.options, agent, {}, linger=None)
        mode: Mode = "hg_dagger" if r.mode == "hg_dagger" else "rac"
        agent = Operated(mode, self.patience, familiar, config, self.recipe.seed)
        return Plan(self.task.id, self.options, policy.spec, agent, executor=EXECUTOR, linger=None)

    def _robot(self) -> tuple[RobotSpec, tuple[str, ...]]:
        """The robot of the task, and the names of its joints."""
        one = envs.make(self.task.id, 1, None, self.options)
        names = tuple(f"joint_{i + 1}.pos" for i in range(len(one.row(0).unwrapped.joint_command)))
        robot = one.robot
        one.close()
        assert robot is not None
        return robot, names

    def _uids(self) -> set[int]:
        """Episodes of the dataset; the sidecar also has rows of commits that were never finished."""
        if not read_info(self.data)["total_episodes"]:
            return set()
        return set(open_dataset(self.data).columns[EPISODE_UID].tolist())

    def _policy_dir(self, k: int) -> Path:
        checkpoints = self.folder.path(k) / "train" / "checkpoints"
        return checkpoints / str((checkpoints / "last").readlink()) / PRETRAINED

    def _record(
        self, recorder: EpisodeRecorder, k: int, out: RolledOut, uid: int, familiar: FamiliarStates | None
    ) -> None:
        robot = recorder.spec
        for f in out.frames:
            score = familiar.score(f.features, f.subtask) if familiar else 0.0
            t = f.observation.t_capture_ns
            labels = frame_labels(robot, f.labels, t, subtask_index=f.subtask, in_dist_score=np.float32(score))
            recorder.add_frame(f.observation, f.action, f.joints, **labels | {SCENE: f.features})
        mode = "teleop" if k == 0 else self.method.mode
        facts = EpisodeFacts(str(out.phase), mode, k, out.supervision_s(robot.dt), "", out.seed)
        recorder.save_episode(out.success, uid=uid, facts=facts)


def _kept(out: RolledOut) -> bool:
    """Whether an episode becomes data: demonstrations that failed and discarded episodes do not."""
    return (
        bool(out.frames) and out.phase is not Phase.END_DISCARDED and (out.phase is not Phase.END_DEMO or out.success)
    )


def outcome(outs: Sequence[RolledOut], stages: int) -> dict[str, Any]:
    """What is kept of an evaluation; lists are by episode, in the order of their seeds."""
    success = [int(o.success) for o in outs]
    return {
        "success": success,
        "stage": [o.stage for o in outs],
        "ticks": [o.ticks for o in outs],
        "episode_recoveries": [o.recoveries for o in outs],
        "attempts": [o.attempts for o in outs],
        "success_rate": float(np.mean(success)),
        "progress": float(np.mean([o.stage / stages for o in outs])),
        "recoveries": float(np.mean([o.recoveries for o in outs])),
    }
