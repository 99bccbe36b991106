"""What recorded episodes say about constraints before anything is ranked by them."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

import sim
from vla_stack.envs import EnvStep
from vla_stack.evaluation.constraints.score import external, stage_costs, tick_costs
from vla_stack.evaluation.constraints.spec import Spec
from vla_stack.evaluation.constraints.trace import Trace, TraceRecorder
from vla_stack.rollout.agents import ExpertAgent, expert_plan
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Decision, Episode, Query, Reply, Start
from vla_stack.schema import Observation

STOP = 6  # steps, before anything has been done


def problems(spec: Spec, traces: Sequence[Trace], success: Sequence[bool]) -> list[str]:
    """What is wrong, one line each; nothing where constraints fit the episodes.

    Costs have to be finite and not the same in all ticks of all episodes, each stage has to be reached by some success,
    and successes must not score less by R_ext than failures do.
    """
    out = []
    for stage in spec.stages:
        for cost in stage.costs:
            ticks = np.concatenate([tick_costs(cost, t) for t in traces])
            place = f"stage '{stage.name}', cost '{cost.type}'"
            if not np.isfinite(ticks).all():
                out.append(f"{place}: not finite in {int((~np.isfinite(ticks)).sum())} ticks")
            elif np.ptp(ticks) == 0.0 and cost.type not in ("duration", "contact_count"):
                out.append(f"{place}: {ticks[0]:g} in every tick of every episode, so it ranks nothing")
    if out:
        return out
    found = [stage_costs(spec, t) for t in traces]
    won = [s for s, ok in zip(found, success, strict=True) if ok]
    lost = [s for s, ok in zip(found, success, strict=True) if not ok]
    if not won:
        return ["no recorded episode succeeds, so nothing can be said about the stages"]
    for i, stage in enumerate(spec.stages):
        if not any(s[i].reached for s in won):
            out.append(f"stage '{stage.name}': no successful episode reaches it")
    if lost and (a := float(np.mean([*map(external, won)]))) < (b := float(np.mean([*map(external, lost)]))):
        out.append(f"failures score more than successes: mean R_ext {b:.3f} against {a:.3f}")
    return out


class _Halfway(ExpertAgent):
    """Every other episode it stops after :data:`STOP` steps and repeats its last action."""

    def __init__(self, episode: Episode) -> None:
        super().__init__(episode, sim.make_expert, 0.0)
        self._stop, self._last = STOP if episode.start.number % 2 else None, Decision(np.zeros(0, np.float32))

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if self._stop is None or k < self._stop:
            decision = yield from super().act(k, observation, now)
            assert decision is not None
            self._last = decision
        return self._last


def expert_episodes(task: str, count: int, seed: int = 0) -> tuple[list[Trace], list[bool]]:
    """Episodes of a task of ``sim`` to try constraints on: half by its expert, half by one that stops half way."""
    plan = expert_plan(sim.TASKS[task].id, {"cameras": ()}, _Halfway, {"trace": TraceRecorder})
    records = sorted(run(None, plan, [Start(seed + n, n) for n in range(count)], num_envs=1), key=lambda r: r.number)
    return [r.attached["trace"] for r in records], [r.success for r in records]
