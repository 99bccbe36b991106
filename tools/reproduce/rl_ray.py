"""Two rollout actors on Ray, one of which is killed half-way, against two environments in the learner's process.

    python tools/reproduce/rl_ray.py --jobs 1     # runs what is missing, then reports
    python tools/reproduce/rl_ray.py --report     # reports what is there
    python tools/reproduce/rl_ray.py --smoke      # the whole path at toy size; the figures mean nothing

Asked for: the same learning curve within the interval. The learner is RLPD, the quickest of ``wsrl.py`` on picking;
episodes differ, as actors draw scenes and noise of their own, and act on weights that are up to two versions old.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import rl_grid  # noqa: E402
from rl_cells import Arm  # noqa: E402
from rl_report import arms_of, plot  # noqa: E402
from wsrl import FROM_NOTHING  # noqa: E402

from results import ROOT, Check, write  # noqa: E402
from vla_stack.methods.off_policy.loop import OffPolicyLoop  # noqa: E402
from vla_stack.methods.off_policy.workers import RayRollouts, Rollouts  # noqa: E402
from vla_stack.rollout.records import EpisodeRecord  # noqa: E402
from vla_stack.training.stop import Stop  # noqa: E402


class Bereft(OffPolicyLoop):
    """Loses an actor half-way: its process is killed."""

    _actors: RayRollouts | None = None

    def _rollouts(self, stop: Stop) -> Rollouts:
        rollouts = super()._rollouts(stop)
        assert isinstance(rollouts, RayRollouts)
        self._actors = rollouts
        return rollouts

    def _note(self, finished: list[EpisodeRecord]) -> None:
        super()._note(finished)
        if self._actors is not None and self.step >= self.method.steps // 2:
            import ray

            ray.kill(self._actors.actors[0])
            self._actors = None


ARMS = {
    "local": Arm("in the learner's process", ("method.num_envs=2",), pretrained=False),
    "ray": Arm("two actors, one killed", ("method.rollouts=ray", "method.workers=2"), pretrained=False, loop=Bereft),
}
GRID = rl_grid.Grid(
    name="rl_ray",
    config=ROOT / "vla_stack" / "configs" / "rl_wsrl.yaml",
    tasks={"pick": ("method.arm=rlpd", *FROM_NOTHING, "method.steps=4000", "eval.every=250")},
    arms=ARMS,
    order=(("local", "ray"),),
    smoke=(
        *(
            "method.offline.episodes=3",
            "method.warmup=8",
            "method.sac.batch=8",
            "method.sac.actor=[8]",
            "method.sac.critic=[8]",
        ),
        *(
            "method.steps=24",
            "eval.every=12",
            "eval.episodes=2",
            "eval.num_envs=2",
            "task.options.max_episode_steps=4",
            "method.fragment=2",
        ),
    ),
)


def report(grid: rl_grid.Grid, name: str, records: rl_grid.Records, kept: dict[str, Any]) -> None:
    checks: list[Check] = []
    tasks = {task: arms_of(records, task, list(ARMS)) for task in grid.tasks}
    for task, arms in tasks.items():
        for arm, runs in arms.items():
            rate = float(runs.success.mean())
            checks.append(Check(f"{task}: {ARMS[arm].about}, success, mean of the curve", rate))
            last = float(runs.success[:, -1].mean())
            checks.append(Check(f"{task}: {ARMS[arm].about}, success at the end", last, interval=runs.at(-1)))
        if seeds := sorted(set.intersection(*(set(runs.seeds) for runs in arms.values()))) if len(arms) == 2 else []:
            apart = arms["ray"].of(seeds).minus(arms["local"].of(seeds))
            what, why = f"{task}: mean of the curve, actors minus in the learner's process, {len(seeds)} seeds", "apart"
            checks.append(Check(f"{what}: lower end", apart.low, 0.0, "<=", apart, why))
            checks.append(Check(f"{what}: upper end", apart.high, 0.0, ">=", apart, why))
    lost = [max(p.get("lost_actors", 0) for p in r["curve"]) for r in records if r["arm"] == "ray"]
    if lost:
        checks.append(
            Check("runs that went on after an actor was killed, of all", sum(n >= 1 for n in lost) / len(lost), 1.0)
        )
    data = {task: {arm: runs.curve() for arm, runs in arms.items()} for task, arms in tasks.items()}
    write(name, checks, {"tasks": data, **kept}, sorted({r["seed"] for r in records}))
    plot(name, {t: t for t in tasks}, tasks, {k: a.about for k, a in ARMS.items()})


if __name__ == "__main__":
    sys.exit(rl_grid.main(GRID, __doc__, report))
