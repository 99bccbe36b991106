"""What recorded episodes say about constraints before anything is ranked by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from vla_stack.evaluation.constraints.score import external, stage_costs, tick_costs
from vla_stack.evaluation.constraints.spec import Spec
from vla_stack.evaluation.constraints.trace import Trace, Traced


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


def expert_episodes(task: str, count: int, seed: int = 0) -> tuple[list[Trace], list[bool]]:
    """Episodes of a task of ``sim`` to try constraints on: half by its expert, half by one that stops half way."""
    import sim

    env = Traced(gym.make(sim.TASKS[task].id, cameras=(), disable_env_checker=True))
    traces, success = [], []
    for episode in range(count):
        env.reset(seed=seed + episode)
        expert: Any = sim.make_expert(env.unwrapped, seed=seed + episode)  # type: ignore[arg-type]
        info: dict[str, Any] = {"is_success": False}
        stop = sim.TASKS[task].max_episode_steps if episode % 2 == 0 else 6
        action, ended, k = None, False, 0
        while not ended:
            action = expert.act() if k < stop or action is None else action
            _, _, terminated, truncated, info = env.step(action)
            ended, k = bool(terminated or truncated), k + 1
        traces.append(env.trace())
        success.append(bool(info["is_success"]))
    env.close()
    return traces, success
