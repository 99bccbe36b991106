"""Loop ``off_policy``: stored episodes, offline training, then one actor-learner loop, for WSRL, EXPO, baselines.

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
from typing import Any

import numpy as np
import torch

from vla_stack.envs import options_for
from vla_stack.envs.from_vector import FromVector
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.expo import Expo
from vla_stack.methods.learning_curve import draw_curve
from vla_stack.methods.off_policy import learner as learners
from vla_stack.methods.off_policy.collecting import Acting, Collector
from vla_stack.methods.off_policy.deployed import Seen, deployed, save
from vla_stack.methods.off_policy.frozen_features import frozen_features
from vla_stack.methods.off_policy.human_intervention import at_endpoint
from vla_stack.methods.off_policy.learner import Learner
from vla_stack.methods.off_policy.recipe import OffPolicyRecipe, check_evaluations, check_resumed
from vla_stack.methods.off_policy.rollout_workers import SEEDS, Begin, LocalRollouts, RayRollouts, Rollouts
from vla_stack.methods.off_policy.scene_sampling import SceneSampler
from vla_stack.methods.off_policy.scripted import stored, success_rate
from vla_stack.methods.off_policy.state_env import EnvRecipe, StateEnv, Vector
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.methods.wsrl import Wsrl
from vla_stack.policies.device import find_device
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Agent, Episode, Plan, Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.operator_port import OperatorPort
from vla_stack.schema import PolicySpec, RobotSpec
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.log import Log, Window, truncate
from vla_stack.training.recipe_tree import plain
from vla_stack.training.stop import Stop

OFFLINE_SAVE = 2000  # steps of offline training between checkpoints
EXECUTOR = ExecutorConfig("sync")  # whole chunks
RECENT = 20  # episodes that the logged training success is of


def make_learner(recipe: OffPolicyRecipe, offline: ReplayBuffer, capacity: int) -> Learner:
    """The learner of a recipe, with an empty buffer of ``capacity`` control steps an environment."""
    device = str(find_device(recipe.device))
    obs, action = (offline.columns[name].shape[1] for name in ("obs", "action"))
    store = ReplayBuffer(capacity, obs, action, recipe.slots, recipe.gamma, offline.tail)
    if recipe.method == "wsrl":
        return Wsrl(recipe.wsrl, offline, store, recipe.horizon, recipe.seed, device)
    return Expo(recipe.expo, offline, store, recipe.horizon, recipe.seed, device)


def plan_of(r: OffPolicyRecipe, robot: RobotSpec, agent: Callable[[Episode], Agent] = PolicyAgent) -> Plan:
    """What is practised: whole chunks, as they are one action to the critics."""
    spec = PolicySpec(robot, r.horizon, extras={"n_action_steps": r.horizon})
    options = options_for(r.env.practised, spec, r.env.extra)
    return Plan(r.env.practised, options, spec, agent, executor=EXECUTOR)


def collector(r: OffPolicyRecipe, acting: Acting, plan: Plan, starts: Iterable[Start]) -> Collector:
    """Begin episodes."""
    return Collector(acting, plan, r.env.reward, starts, r.num_envs)


def make_worker(r: OffPolicyRecipe, robot: RobotSpec, scale: tuple[Vector, Vector]) -> tuple[Learner, Begin]:
    """What an actor elsewhere needs: a learner that only acts, on its CPU, and what begins episodes with it."""
    seen = Seen(robot, *scale, frozen_features(r.env.features).policy if r.env.features else None)
    learner = make_learner(
        dataclasses.replace(r, device="cpu"), ReplayBuffer(1, len(seen.mean), len(robot.action), 1, r.gamma), 1
    )
    return learner, partial(collector, r, Acting(learner, seen), plan_of(r, robot))


def seen_in(recipe: EnvRecipe, scale: tuple[Vector, Vector]) -> Seen:
    """What policies that learn in an environment observe."""
    env = StateEnv(recipe)
    robot = getattr(env.env.unwrapped, "spec_robot", None) or FromVector(env.env, recipe.id).spec_robot
    env.close()
    return Seen(robot, *scale, frozen_features(recipe.features).policy if recipe.features else None)


def grown(store: ReplayBuffer, steps: int) -> ReplayBuffer:
    """The same store with room for more control steps."""
    obs, action = (store.columns[name].shape[1] for name in ("obs", "action"))
    larger = ReplayBuffer(store.capacity + steps, obs, action, store.slots, store.gamma, store.tail)
    larger.load_state_dict(store.state_dict())
    return larger


def keep_interventions(demos: ReplayBuffer, transition: Transition) -> None:
    """Add what a person did in the first environment to the demonstrations; each intervention is an episode there."""
    if transition.source[0] != Source.HUMAN:
        demos.cut()
        return
    first = {name: getattr(transition, name)[:1] for name in Transition._fields[:-1]}
    demos.add(Transition(**first))


class OffPolicyLoop:
    """One run; continues what an earlier, stopped run has left in its directory.

    Args:
        recipe: The run.
        run_dir: Where it lies.

    Raises:
        UserError: A value is out of range, values do not go together, or Ray is asked for and not installed.
    """

    def __init__(self, recipe: OffPolicyRecipe, run_dir: Path) -> None:
        torch.set_num_threads(recipe.threads)
        self.recipe, self.run_dir = recipe, run_dir
        env = StateEnv(recipe.env.real() if recipe.env.imagined else recipe.env)  # experts act in the simulator
        check_evaluations(recipe, env.limit)
        self.checkpoint = ckpt.latest(run_dir / "checkpoints")
        facts: dict[str, Any] = {}
        if self.checkpoint is not None:
            facts = json.loads((self.checkpoint / ckpt.STATE / "state.json").read_text())
            check_resumed(recipe, facts["recipe"])
        offline, self.scale = stored(run_dir / "offline.safetensors", env, recipe.offline, recipe.gamma)
        env.close()
        self.offline_success = success_rate(offline)
        if recipe.operator:
            offline = grown(offline, recipe.steps)
        self.learner = make_learner(recipe, offline, max(1, -(-recipe.steps // recipe.slots)) + env.limit)
        self.seen = seen_in(recipe.env.real(), self.scale)
        self.scenes = SceneSampler(recipe.scenes, recipe.seed) if recipe.scenes else None
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
            if recipe.operator:
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
        r = self.recipe
        if not self.started:
            truncate(self.run_dir / "metrics.jsonl", -1)  # a first record that no checkpoint followed
        with Stop() as stop, Log(self.run_dir, r.steps, self.step, r.wandb, r.name) as log:
            if not self.started:
                self._pretrain(stop)
                self._report(log, {})
                self.started = True
                self._save()
            rollouts = self._rollouts(stop)
            try:
                while self.step < r.steps:
                    end = min(r.steps, (self.step // r.eval_every + 1) * r.eval_every)
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
        r, policy = self.recipe, deployed(self.learner, self.seen)
        result = evaluate(
            policy,
            r.env.real().id,
            r.eval_episodes,
            r.eval_seed,
            EXECUTOR,
            num_envs=r.eval_envs,
            env_options=r.env.extra,
        )
        returns = r.env.tail * np.array([e.steps for e in result.episodes]) + result.outcomes
        if r.env.reward == "own":
            returns = np.array([e.rewards.sum() for e in result.episodes])
        return {"success": result.success_rate, "return": float(np.mean(returns))}

    # Parts ----------------------------------------------------------------------------------------------------------

    def _pretrain(self, stop: Stop) -> None:
        """What is missing of the offline training, with a checkpoint now and then."""
        learner, window, path = self.learner, Window(), self.run_dir / "pretraining.jsonl"
        truncate(path, learner.pretrained)
        with path.open("a") as file:
            while learner.pretrained < learner.pretrain_steps:
                window.add(learner.pretrained, learner.pretrain())
                if learner.pretrained % self.recipe.log_every == 0:
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
        learner, window, horizon = self.learner, Window(), self.recipe.horizon
        while self.step < end and not stop.asked:
            for fragment in rollouts.collect(learner, self.version):
                for transition in fragment.steps:
                    before = self.step
                    learner.store.add(transition, fragment.slots)
                    if self.recipe.operator:
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
        if self.recipe.operator:  # an intervention across it is two episodes among the demonstrations as well
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
        draw_curve(self.run_dir, self.recipe.env.reward != "own", self.recipe.eval_episodes)

    def _save(self) -> None:
        counts = self.scenes.counts.tolist() if self.scenes is not None else []
        state = {"episodes": self.episodes, "version": self.version, "scenes": counts, "started": self.started}
        state |= {"recent": [bool(success) for success in self.recent]}
        state |= {"recipe": plain(dataclasses.asdict(self.recipe))}

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
        r = self.recipe
        agent: Callable[[Episode], Agent] = PolicyAgent
        if r.rollouts == "ray":
            make = partial(make_worker, r, self.seen.robot, self.scale)
            how = (r.ray.workers, r.num_envs, self._episode_seed, self.episodes, r.ray.fragment, r.ray.max_lag)
            return RayRollouts(make, *how)
        if r.operator:
            agent, self._port = at_endpoint(r.env.id, self.seen.robot, r.operator, lambda: stop.asked)
        begin = partial(collector, r, Acting(self.learner, self.seen), plan_of(r, self.seen.robot, agent))
        return LocalRollouts(begin, r.num_envs, self._episode_seed, self.episodes)


def main(recipe: OffPolicyRecipe, run_dir: Path) -> None:
    """Train to the end."""
    OffPolicyLoop(recipe, run_dir).run()
    if recipe.env.reward != "own":
        limit = f" --max-steps {recipe.env.limit}" if recipe.env.limit else ""
        seeds = f"--seed {recipe.eval_seed} --episodes {recipe.eval_episodes}"
        print(f"its evaluation: vla eval --policy {run_dir} --env {recipe.env.real().id} --mode sync {seeds}{limit}")
