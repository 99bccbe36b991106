"""Stored episodes, offline training, then one actor-learner loop: for WSRL, EXPO and their baselines.

A run directory holds ``offline.safetensors`` (the stored episodes), ``metrics.jsonl``, ``learning_curve.png`` and
``checkpoints/``. A checkpoint begins new episodes, and online there is one at each evaluation alone: a run that is
stopped in between goes on from the last, and so computes what one that is not stopped computes, bit for bit on a CPU
(with rollouts in this process). With an operator a stop saves where it is: nobody does again what a person did.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.learning_curve import draw_curve
from vla_stack.methods.off_policy import learner as learners
from vla_stack.methods.off_policy.collecting import (
    EXECUTOR,
    Acting,
    Collector,
    options_of,
    plan_of,
    practised,
    rows_of,
)
from vla_stack.methods.off_policy.deployed import Seen, Vector, deployed, frozen_policy, save
from vla_stack.methods.off_policy.human_intervention import at_endpoint
from vla_stack.methods.off_policy.learner import Learner
from vla_stack.methods.off_policy.stored import stored, success_rate
from vla_stack.methods.off_policy.workers import SEEDS, Begin, LocalRollouts, RayRollouts, Rollouts, SceneSampler
from vla_stack.methods.practice import LIMIT, check_resumed, simulated, time_limit, unpaid
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.policies.reading import find_device
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Agent, Episode, Plan, Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.operator_port import OperatorPort
from vla_stack.schema import RobotSpec
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.log import Log, Window, truncate
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import plain
from vla_stack.training.stop import Stop

if TYPE_CHECKING:
    from vla_stack.methods.off_policy.recipe import OffPolicy

OFFLINE_SAVE = 2000  # steps of offline training between checkpoints
RECENT = 20  # episodes that the logged training success is of
UNLIMITED = 1000  # steps that an episode is taken to last at most where its environment has no time limit


def make_learner(recipe: Recipe, offline: ReplayBuffer, capacity: int) -> Learner:
    """The learner of a recipe, with an empty buffer of ``capacity`` control steps an environment."""
    method: OffPolicy = recipe.method
    obs, action = (offline.columns[name].shape[1] for name in ("obs", "action"))
    store = ReplayBuffer(capacity, obs, action, method.slots, method.gamma, offline.tail)
    return method.learner(offline, store, recipe.seed, str(find_device(recipe.device)))


def make_worker(recipe: Recipe, robot: RobotSpec, scale: tuple[Vector, Vector]) -> tuple[Learner, Begin]:
    """What an actor elsewhere needs: a learner that only acts, on its CPU, and what begins episodes with it."""
    method: OffPolicy = recipe.method
    seen = Seen(robot, *scale, frozen_policy(method.features))
    nothing = ReplayBuffer(1, len(seen.mean), len(robot.action), 1, method.gamma)
    learner = make_learner(dataclasses.replace(recipe, device="cpu"), nothing, 1)
    return learner, partial(collector, method, Acting(learner, seen), plan_of(practised(recipe), method, robot))


def collector(method: OffPolicy, acting: Acting, plan: Plan, starts: Iterable[Start]) -> Collector:
    """Begin episodes."""
    return Collector(acting, plan, method.reward, starts, method.num_envs)


def check_evaluations(recipe: Recipe, limit: int) -> None:
    """Refuse evaluations so close together that no episode between them would reach its limit.

    Raises:
        UserError: They are.
    """
    method, every = recipe.method, recipe.eval.every
    least = method.num_envs * limit
    if method.rollouts == "local" and every < least:
        raise UserError(
            f"'eval.every' is {every}, and an evaluation begins new episodes: in {method.num_envs} environments none "
            f"would reach its limit of {limit} steps",
            f"set eval.every={least} or more, or task.options.{LIMIT}={max(1, every // method.num_envs)}",
        )


def experience_of(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe that decide what its stored experience is, as JSON has them."""
    method = dataclasses.asdict(recipe.method)
    own = ("reward", "judge", "features", "offline", "horizon", "gamma", "num_envs")
    about = {"task": dataclasses.asdict(recipe.task), "data.root": recipe.data.root, "seed": recipe.seed}
    return plain(about | {key: method[key] for key in own})


def grown(store: ReplayBuffer, steps: int) -> ReplayBuffer:
    """The same store with room for more control steps."""
    obs, action = (store.columns[name].shape[1] for name in ("obs", "action"))
    larger = ReplayBuffer(store.capacity + steps, obs, action, store.slots, store.gamma, store.tail)
    larger.load_state_dict(store.state_dict())
    return larger


def keep_interventions(demos: ReplayBuffer, transition: Transition) -> None:
    """Add what a person did in the first environment to the demonstrations; each intervention is an episode there."""
    if transition.source[0] == Source.HUMAN:
        demos.add(transition.rows(slice(1)))
    else:
        demos.cut()


class OffPolicyLoop:
    """One run; continues what an earlier, stopped run has left in its directory.

    Args:
        recipe: The run.
        run_dir: Where it lies.

    Raises:
        UserError: A value is out of range, values do not go together, or Ray is asked for and not installed.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        torch.set_num_threads(recipe.threads or 1)
        self.recipe, self.run_dir = recipe, run_dir
        self.method: OffPolicy = recipe.method
        self.task = simulated(recipe.task)  # where experts act, and what is evaluated on
        frozen = frozen_policy(self.method.features)
        rows = rows_of(self.task, self.method, frozen)
        limit = time_limit(rows.row(0)) or UNLIMITED
        check_evaluations(recipe, limit)
        self.checkpoint = ckpt.latest(run_dir / "checkpoints")
        facts: dict[str, Any] = {}
        if self.checkpoint is not None:
            facts = json.loads((self.checkpoint / ckpt.STATE / "state.json").read_text())
            check_resumed(experience_of(recipe), facts.get("experience", {}))
        root = Path(*recipe.data.root) if recipe.data.root else None
        offline, self.scale = stored(run_dir / "offline.safetensors", self.method, self.task, root, rows, frozen)
        assert rows.robot is not None
        self.seen = Seen(rows.robot, *self.scale, frozen)
        rows.close()
        self.offline_success = success_rate(offline)
        if self.method.operator:
            offline = grown(offline, self.method.steps)
        self.learner = make_learner(recipe, offline, max(1, -(-self.method.steps // self.method.slots)) + limit)
        self.scenes = SceneSampler(self.method.scenes, recipe.seed) if self.method.scenes else None
        self.episodes = self.version = 0
        self.recent: list[bool] = []
        self.started = False  # whether the offline training is done and evaluated
        self._port: OperatorPort | None = None
        if self.checkpoint is not None:
            learners.load(self.learner, self.checkpoint / ckpt.STATE)
            self.episodes, self.version, self.started = facts["episodes"], facts["version"], facts["started"]
            self.recent = facts.get("recent", [])
            if self.scenes is not None:
                self.scenes.counts[:] = facts["scenes"]
            if self.method.operator:
                for row in self.learner.store.rows():
                    keep_interventions(offline, self.learner.store.at(row))

    @property
    def step(self) -> int:
        """Control steps online so far."""
        return self.learner.store.total

    def run(self) -> None:
        """Offline training, then online, until the recipe's steps are done or a signal asks to stop.

        Raises:
            KeyboardInterrupt: A signal asked to stop; what is not saved will be computed again.
        """
        r, every = self.method, self.recipe.eval.every
        if not self.started:
            truncate(self.run_dir / "metrics.jsonl", -1)  # a first record that no checkpoint followed
        with Stop() as stop, Log(self.run_dir, r.steps, self.step, r.wandb, self.recipe.name) as log:
            if not self.started:
                self._pretrain(stop)
                self._report(log, {})
                self.started = True
                self._save()
            rollouts = self._rollouts(stop)
            try:
                while self.step < r.steps:
                    end = min(r.steps, (self.step // every + 1) * every)
                    means = self._until(end, rollouts, log, stop)
                    self.episodes = rollouts.episodes
                    if self.step >= end:
                        self._cut()
                        self._report(log, means)
                        self._save()
                    elif r.operator:  # without an evaluation, whose steps are those of the grid
                        self._cut()
                        self._save()
                    if stop.asked:
                        raise KeyboardInterrupt
                    rollouts.restart()
            finally:
                rollouts.close()
                if self._port is not None:
                    self._port.close()

    def evaluate(self) -> dict[str, float]:
        """Success and return of what would be saved now, in the task itself, as ``vla eval --mode sync`` has them."""
        e, reward = self.recipe.eval, self.method.reward
        result = evaluate(
            deployed(self.learner, self.seen),
            self.task.id,
            e.episodes,
            e.seed,
            EXECUTOR,
            num_envs=e.num_envs,
            workers=e.workers,
            rollouts=e.rollouts,
            env_options=options_of(self.task, self.method),
        )
        returns = unpaid(reward) * np.array([episode.steps for episode in result.episodes]) + result.outcomes
        if reward == "task":
            returns = np.array([episode.rewards.sum() for episode in result.episodes])
        return {"success": result.success_rate, "return": float(np.mean(returns))}

    # Parts ----------------------------------------------------------------------------------------------------------

    def _pretrain(self, stop: Stop) -> None:
        """What is missing of the offline training, with a checkpoint now and then."""
        learner, window, path = self.learner, Window(), self.run_dir / "pretraining.jsonl"
        truncate(path, learner.pretrained)
        with path.open("a") as file:
            while learner.pretrained < learner.pretrain_steps:
                window.add(learner.pretrained, learner.pretrain())
                if learner.pretrained % self.method.log_every == 0:
                    record = {"step": learner.pretrained, **window.means()}
                    file.write(json.dumps(record) + "\n")
                    told = "  ".join(f"{k} {v:.4g}" for k, v in record.items() if k != "step")
                    print(f"offline {learner.pretrained}/{learner.pretrain_steps}  {told}", flush=True)
                if stop.asked or learner.pretrained % OFFLINE_SAVE == 0:
                    file.flush()
                    self._save()
                if stop.asked:
                    raise KeyboardInterrupt

    def _until(self, end: int, rollouts: Rollouts, log: Log, stop: Stop) -> dict[str, float]:
        """Act and learn until a number of control steps, or until a stop is asked for; returns what there is to log."""
        learner, window, horizon = self.learner, Window(), self.method.horizon
        while self.step < end and not stop.asked:
            for fragment in rollouts.collect(learner, self.version):
                for transition in fragment.steps:
                    before = self.step
                    learner.store.add(transition, fragment.slots)
                    if self.method.operator:
                        keep_interventions(learner.offline, transition)
                    for _ in range(self.step // horizon - before // horizon):  # one update for each executed chunk
                        window.add(self.step, learner.update())
                    for _ in fragment.slots:
                        log.advance()
                self._note(fragment.finished)
            self.version += 1
        return window.means() | {"lag": float(rollouts.lag), "lost_actors": float(rollouts.lost)}

    def _cut(self) -> None:
        """Close what is open: a checkpoint follows, which begins new episodes."""
        self.learner.store.cut()
        if self.method.operator:  # an intervention across it is two episodes among the demonstrations as well
            self.learner.offline.cut()

    def _note(self, finished: list[EpisodeRecord]) -> None:
        self.recent = [*self.recent, *(episode.success for episode in finished)][-RECENT:]
        if self.scenes is not None:
            for episode in finished:
                self.scenes.record(episode.seed - self._first_seed, episode.success)

    def _report(self, log: Log, means: dict[str, float]) -> None:
        """Evaluate, log, and draw the curve."""
        evaluated = {f"eval/{name}": value for name, value in self.evaluate().items()}
        recent = {"train/success": float(np.mean(self.recent))} if self.recent else {}
        log.record(self.step, means | recent | evaluated)
        draw_curve(self.run_dir, self.method.reward != "task", self.recipe.eval.episodes)

    def _save(self) -> None:
        counts = self.scenes.counts.tolist() if self.scenes is not None else []
        state = {"episodes": self.episodes, "version": self.version, "scenes": counts, "started": self.started}
        state |= {"recent": [bool(success) for success in self.recent]}
        state |= {"experience": experience_of(self.recipe)}

        def fill(directory: Path) -> None:
            learners.save(self.learner, directory / ckpt.STATE)
            save(deployed(self.learner, self.seen), directory / ckpt.PRETRAINED)

        self.checkpoint = ckpt.commit(self.run_dir / "checkpoints", self.step, fill, state, 1)

    @property
    def _first_seed(self) -> int:
        return SEEDS * (self.recipe.seed + 1)

    def _episode_seed(self, number: int) -> int:
        return self._first_seed + (self.scenes.draw(number) if self.scenes is not None else number)

    def _rollouts(self, stop: Stop) -> Rollouts:
        r, robot = self.method, self.seen.robot
        agent: Callable[[Episode], Agent] = PolicyAgent
        if r.rollouts == "ray":
            make = partial(make_worker, self.recipe, robot, self.scale)
            how = (r.workers, r.num_envs, self._episode_seed, self.episodes, r.fragment, r.max_lag)
            return RayRollouts(make, *how)
        if r.operator:
            agent, self._port = at_endpoint(self.recipe.task.id, robot, r.operator, lambda: stop.asked)
        plan = plan_of(practised(self.recipe), r, robot, agent)
        begin = partial(collector, r, Acting(self.learner, self.seen), plan)
        return LocalRollouts(begin, r.num_envs, self._episode_seed, self.episodes)


def main(recipe: Recipe, run_dir: Path) -> None:
    """Train to the end."""
    loop = OffPolicyLoop(recipe, run_dir)
    loop.run()
    if recipe.method.reward != "task":
        limit = f" --max-steps {loop.task.options[LIMIT]}" if loop.task.options.get(LIMIT) else ""
        seeds = f"--seed {recipe.eval.seed} --episodes {recipe.eval.episodes}"
        print(f"its evaluation: vla eval --policy {run_dir} --env {loop.task.id} --mode sync {seeds}{limit}")
