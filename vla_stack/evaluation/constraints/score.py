"""What an episode is worth: its stages, what they cost, and the score of GRAPE (arXiv:2411.19309, eqs. 8 to 10).

R_ext = prod_i exp(-C_i);   R = lambda_self R_self + lambda_ext R_ext + lambda_success I.

By itself R_ext ranks as the sum of costs does; the exponential bounds what it counts beside the other terms. A stage
that was never reached costs its ``unreached_penalty``, or failing early would be cheap.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.costs import CONDITIONS, cost_types
from vla_stack.evaluation.constraints.spec import Cost, Spec
from vla_stack.evaluation.constraints.trace import Trace

Floats = NDArray[np.float64]
_REDUCE: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "last": lambda c: c[-1]}


@dataclass(frozen=True)
class Weights:
    """lambda_1, lambda_2, lambda_3. R_self is a mean over decisions, so that long episodes are not worth less.

    The paper's lambda_2 of 0.01 makes R_ext worth no more than one nat of R_self; a custom objective needs more.

    Attributes:
        self: Of the policy's own log-probability of the rollout.
        external: Of what the constraints say.
        success: Of success.
    """

    self: float = 0.01
    external: float = 1.0
    success: float = 2.0


@dataclass(frozen=True)
class StageCost:
    """What a stage cost, C_i, and each of its costs' part of that; ``ticks`` it took, 0 where it was not reached."""

    name: str
    reached: bool
    ticks: int
    cost: float
    parts: tuple[float, ...]


@dataclass(frozen=True)
class Judgement:
    """An episode's stages and scores."""

    stages: tuple[StageCost, ...]
    external: float
    self: float
    success: bool
    score: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def segment(spec: Spec, trace: Trace) -> NDArray[np.int64]:
    """Stage of each tick [T], non-decreasing; -1 before the first one has begun, their number of stages when all are
    over.

    A stage begins when the one before is done and its own ``enter`` holds; several may pass in one tick.
    """
    n = len(trace)

    def all_of(conditions: dict[str, tuple[Any, ...]]) -> NDArray[np.bool_]:
        found = [_call(CONDITIONS[name], trace, *values) for name, values in conditions.items()]
        return np.logical_and.reduce([np.ones(n, bool), *found])

    enter = [all_of(s.enter) for s in spec.stages]
    done = [all_of(s.done) for s in spec.stages]
    out, stage = np.empty(n, np.int64), -1
    for t in range(n):
        if stage < 0 and enter[0][t]:
            stage = 0
        while 0 <= stage < len(done) and done[stage][t] and (stage + 1 == len(done) or enter[stage + 1][t]):
            stage += 1
        out[t] = stage
    return out


def tick_costs(cost: Cost, trace: Trace) -> Floats:
    """What each tick costs [T], before anything is reduced."""
    return _call(cost_types()[cost.type], trace, **cost.arguments)


def stage_costs(spec: Spec, trace: Trace) -> tuple[StageCost, ...]:
    """C_i of every stage. A tick belongs to the stage that was current when it began."""
    at = segment(spec, trace)
    began = np.concatenate([np.minimum(at[:1], 0), at[:-1]])
    out = []
    for i, stage in enumerate(spec.stages):
        reached = bool((at >= i).any())
        inside = began == i
        parts = []
        for cost in stage.costs:
            ticks = tick_costs(cost, trace)[inside]
            value = float(_REDUCE[cost.reduce](ticks)) if len(ticks) else 0.0
            parts.append(cost.weight * max(0.0, value - cost.tau) / cost.scale)
        total = sum(parts) if reached else stage.unreached_penalty
        out.append(StageCost(stage.name, reached, int(inside.sum()), total, tuple(parts)))
    return tuple(out)


def external(stages: tuple[StageCost, ...]) -> float:
    """R_ext in (0, 1]."""
    return float(np.exp(-sum(s.cost for s in stages)))


def judge(spec: Spec, trace: Trace, success: bool, self_score: float, weights: Weights) -> Judgement:
    """Score an episode.

    Args:
        spec: The constraints.
        trace: What happened.
        success: Whether the task was done, I.
        self_score: R_self, the mean log-probability of its decisions under the policy.
        weights: Of the three terms.
    """
    stages = stage_costs(spec, trace)
    value = external(stages)
    score = weights.self * self_score + weights.external * value + weights.success * success
    return Judgement(stages, value, self_score, success, score)


def _call(function: Any, trace: Trace, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(trace, *args, **kwargs)
    except KeyError as e:
        known = ", ".join(sorted(trace.points))
        raise UserError(
            f"'{function.__name__}' speaks of {e}, the episode does not have it", f"it has {known}"
        ) from None
