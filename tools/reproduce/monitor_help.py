"""What is a call for help worth? The generalist alone, and with a person who comes when its monitor calls.

    python tools/reproduce/monitor_help.py                  # resumes; a cell is an arm on a task
    python tools/reproduce/monitor_help.py --smoke          # the same code, tiny, nothing written
    python tools/reproduce/monitor_help.py --report

From pictures and sentences, on tasks that the generalist does sometimes; for each a monitor is fitted to its successes
on other starts, as ``vla monitor fit`` does, and asked as on a robot. Where it calls, the arm holds until a simulated
person (``methods/rac/human.py``: reaction time, a trembling hand, a slow link) takes over, does the task's next stage
and lets go; then the policy goes on, and may need help again. Beside it, on the same starts: a *clock*, which calls
when an episode lasts longer than 95 % of the successes that the monitor was fitted to; and the monitor's own calls made
in *other* episodes, at the same times where these still run, which tells what it is worth to know which episode needs
them.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from claims import Cell, adopt, claimed, published, run_cells, same_settings
from monitor import Clock
from numpy.typing import NDArray

import sim
from results import ROOT, Check, parser, write
from vla_stack import envs
from vla_stack.data.layout import read_json, write_json
from vla_stack.envs.vector import EnvStep
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.monitoring import Listening, fit, watched
from vla_stack.methods.rac.human import Human, HumanConfig
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Decision, Episode, Plan, Query, Reply, Start
from vla_stack.runtime.monitor import Decided, Monitor, Watch
from vla_stack.schema import Observation
from vla_stack.statistics import drawn_interval, paired_interval, success_interval

POLICY = "generalist"
ARMS = ("alone", "monitor", "clock", "others")
FIT_SEED, TEST_SEED = 50_000, 60_000
ALPHA = 0.05
GIVE_UP_S = 15.0  # of one piece of help
DRAWS = 4000  # bootstrap resamples of the starts


@dataclass(frozen=True)
class Settings:
    """Size of the experiment."""

    tasks: tuple[str, ...] = ("stack", "drawer", "pick_any", "shelf")
    fitted: int = 100  # episodes whose successes a monitor knows
    starts: int = 100
    longer: float = 2.0  # times a task's own time limit, of every arm, so that there is time for help
    alpha: float = ALPHA


SMOKE = Settings(("pick", "place"), 12, 3, 1.2, 0.5)


@dataclass(frozen=True)
class Helped:
    """Makes the agent of each episode.

    Attributes:
        monitor: Calls where it says so; None: not.
        limit: Steps since the start, or since help, after which a clock calls; None: not.
        calls: Seed of a start -> steps at which a call is made.
    """

    monitor: Monitor | None = None
    limit: int | None = None
    calls: dict[int, list[int]] | None = None

    def __call__(self, episode: Episode) -> HelpedAgent:
        return HelpedAgent(episode, self)


class HelpedAgent:
    """A policy, and a person who does one stage of the task when called; its result is what the person did."""

    def __init__(self, episode: Episode, how: Helped) -> None:
        self._how, self._env, self._dt = how, episode.env.unwrapped, episode.robot.dt
        self._policy = PolicyAgent(episode)
        self._watch = Watch(how.monitor) if how.monitor else None
        self._seed, self._low, self._high = episode.start.seed, episode.robot.action_low, episode.robot.action_high
        self._human = Human(HumanConfig(), self._dt, 0, self._seed)
        self._expert = sim.make_expert(episode.env)
        self._due, self._since, self._stage = -1, 0, 0  # when the person acts, since when nobody has, where that began
        self._acting = False
        self.frames, self.calls = 0, list[int]()

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if self._acting and self._is_done(k, now):
            self._acting, self._since = False, k
            self._policy.resume(k, self._env.tool_command.astype(np.float32))
            if self._watch is not None:
                self._watch.resume(k)
        if self._due < 0 and not self._acting:
            decision, called = yield from self._watched(k, observation, now)
            if not called:
                return decision
            self.calls.append(k)
            self._due = k + self._human.reaction_ticks()
            self._stage = int(now.info["stage"])
        if self._due > k:
            return Decision(self._env.tool_command.astype(np.float32))  # the robot holds
        if self._due >= 0:
            self._due, self._acting, self._since = -1, True, k
            self._human.engage(self._env.tool_command)
        self.frames += 1
        command = self._human.move(self._expert.act().astype(np.float64), k)
        return Decision(np.clip(command, self._low, self._high).astype(np.float32))

    def result(self) -> dict[str, Any]:
        return {"frames": self.frames, "calls": self.calls}

    def _is_done(self, k: int, now: EnvStep) -> bool:
        return int(now.info["stage"]) > self._stage or (k - self._since) * self._dt > GIVE_UP_S

    def _watched(
        self, k: int, observation: Observation, now: EnvStep
    ) -> Generator[Query, Reply, tuple[Decision | None, bool]]:
        """What the policy does, and whether help is called for."""
        called = self._how.limit is not None and k - self._since >= self._how.limit
        called |= self._how.calls is not None and k in self._how.calls.get(self._seed, ())
        steps, reply = self._policy.act(k, observation, now), None
        while True:
            try:
                query = steps.send(reply)  # type: ignore[arg-type]  # a generator begins with None
            except StopIteration as end:
                return end.value, called
            reply = yield query
            if self._watch is not None:
                called |= bool(self._watch.decided(Decided(k, observation.state, reply[0], k)))


def fitted(task: str, s: Settings, policy: Any, out: Path) -> tuple[Monitor, int]:
    """The monitor of a task, and its clock's limit in steps; fitted once."""
    file, clock = out / "monitors" / f"{task}.json", out / "monitors" / f"{task}-clock.json"
    with claimed(file.with_suffix(".lock"), wait=True):
        if not clock.exists():
            listening, env = Listening(policy), f"sim/{task}-v0"
            options = {"max_episode_steps": most(task, s)}
            result = evaluate(listening, env, s.fitted, FIT_SEED, num_envs=5, env_options=options)
            episodes = [watched(listening, e) for e in result.episodes]
            fit(episodes, policy.spec.robot.dt, s.alpha, policy.spec.model_version).save(file)
            successes = sum(e.success for e in episodes)
            write_json(clock, {"limit": Clock(episodes).limit, "successes": successes, "of": len(episodes)})
    return Monitor.load(file), int(read_json(clock)["limit"])


def most(task: str, s: Settings) -> int:
    """Time limit of an episode, control steps."""
    return round(s.longer * next(t.max_episode_steps for t in sim.TASKS.values() if t.id == f"sim/{task}-v0"))


def measured(cell: Cell, s: Settings, policy: Any, out: Path, done: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """One arm on one task: outcomes, what the person did, and when the calls were made, by start."""
    monitor, limit = fitted(cell.task, s, policy, out)
    seeds = range(TEST_SEED, TEST_SEED + s.starts)
    how = {"alone": Helped(), "monitor": Helped(monitor), "clock": Helped(limit=limit)}
    if cell.arm == "others":
        calls = done[Cell(cell.task, "monitor", cell.seed)]["calls"]
        how["others"] = Helped(calls={seed: calls[i - s.starts // 2] for i, seed in enumerate(seeds)})
    env = f"sim/{cell.task}-v0"
    options = envs.options_for(env, policy.spec, {"max_episode_steps": most(cell.task, s)})
    plan = Plan(env, options, policy.spec, how[cell.arm])
    records = sorted(run(policy, plan, [Start(seed) for seed in seeds], 5), key=lambda record: record.seed)
    return {
        **asdict(cell),
        "outcomes": [int(r.success) for r in records],
        "frames": [r.outcome["frames"] for r in records],
        "calls": [r.outcome["calls"] for r in records],
        "steps": [r.steps for r in records],
    }


def report(records: list[dict[str, Any]], s: Settings) -> list[Check]:
    """Success and human frames of each arm, over the tasks that all arms have done."""
    by: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for r in records:
        by[r["arm"]][r["task"]] = r
    tasks = [task for task in s.tasks if all(task in by[arm] for arm in ARMS)]
    if not tasks:
        return []
    won = {arm: np.concatenate([by[arm][task]["outcomes"] for task in tasks]) for arm in ARMS}
    frames = {arm: np.concatenate([by[arm][task]["frames"] for task in tasks]) for arm in ARMS}
    checks = []
    for arm in ARMS:
        n = len(won[arm])
        rate = success_interval(int(won[arm].sum()), n)
        checks.append(Check(f"{arm}: success, {len(tasks)} tasks", rate.value, interval=rate))
        for task in tasks:
            checks.append(Check(f"{arm}: success, {task}", float(np.mean(by[arm][task]["outcomes"]))))
        if arm != "alone":
            called = np.mean([bool(c) for task in tasks for c in by[arm][task]["calls"]])
            checks.append(Check(f"{arm}: share of episodes with a call", float(called)))
            checks.append(Check(f"{arm}: human frames an episode", float(frames[arm].mean())))
    gain = paired_interval(won["alone"], won["monitor"])
    why = "" if gain.low > 0 else "no gain could be told"
    checks.append(Check("monitor minus alone: success, lower end", gain.low, 0.0, ">", gain, why))
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(won["alone"]), size=len(won["alone"])) for _ in range(DRAWS)]
    worth = {arm: _worth(won, frames, arm, draws) for arm in ARMS[1:]}
    for arm, (value, several) in worth.items():
        interval = drawn_interval(value, several, "starts", len(won[arm]))
        checks.append(Check(f"{arm}: successes more for 100 human frames", value, interval=interval))
    for arm in ARMS[2:]:
        value = worth["monitor"][0] - worth[arm][0]
        apart = drawn_interval(value, worth["monitor"][1] - worth[arm][1], "starts", len(won[arm]))
        bound = 0.0 if arm == "others" else None
        why = (
            "" if apart.low > 0 else "other episodes that still run at such a time are those that fail: time tells them"
        )
        name = f"monitor minus {arm}: successes more for 100 human frames, lower end"
        checks.append(Check(name, apart.low, bound, ">", apart, why if bound is not None else ""))
    return checks


def _worth(
    won: dict[str, NDArray[np.int64]], frames: dict[str, NDArray[np.int64]], arm: str, draws: list[NDArray[np.int64]]
) -> tuple[float, NDArray[np.float64]]:
    """Successes that an arm has more than the policy alone, for 100 human frames: of all starts, and of each draw."""

    def of(rows: NDArray[np.int64] | slice) -> float:
        more, spent = (won[arm] - won["alone"])[rows].sum(), frames[arm][rows].sum()
        return float(100 * more / spent) if spent else math.nan

    return of(slice(None)), np.array([of(rows) for rows in draws])


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "reproduce" / "monitor_help")
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    s = SMOKE if args.smoke else Settings()
    same_settings(args.out, asdict(s))
    adopt("monitor_help", args.out, asdict(s))
    policy = None if args.report else load_policy(resolve_policy("shipped" if args.smoke else POLICY), frozen=True)
    cells = [Cell(task, arm, 0) for task in s.tasks for arm in ARMS]
    done: dict[Cell, dict[str, Any]] = {}

    def cell(todo: Cell) -> dict[str, Any]:
        for r in run_cells([], lambda _: {}, args.out):
            done[Cell(r["task"], r["arm"], r["seed"])] = r
        return measured(todo, s, policy, args.out, done)

    records = run_cells([] if args.report else cells, cell, args.out)
    if not records:
        sys.exit(f"{args.out} holds no cells yet")
    checks = report(records, s)
    if not args.smoke:
        write("monitor_help", checks, published(asdict(s), records), seeds=[FIT_SEED, TEST_SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())
