"""An order of several policies on common starts: Bradley and Terry's strengths, and the ranks that stand firm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_stack.evaluation.sequential import Verdict

PRIOR = 0.5  # starts that each policy is taken to have won of each other: who never lost has a finite strength


@dataclass(frozen=True)
class Strength:
    """A policy's place.

    Attributes:
        value: Log odds of success over those of the mean policy.
        low, high: Interval of ``value`` at the number of starts that there are.
    """

    value: float
    low: float
    high: float


def bradley_terry(success: ArrayLike, confidence: float = 0.95) -> list[Strength]:
    """Strengths from who won which start (Bradley and Terry 1952, Biometrika 39:324).

    Policy i beats j on a start where i alone succeeds. If the odds of success are those of the policy over those of the
    start (Rasch 1960), then i wins a discordant start with probability sigma(value_i - value_j), whatever the starts:
    the difficulty of scenes cancels. One start gives several pairs that are not independent, so the covariance is the
    sandwich of the scores of starts.

    Args:
        success: [N, P], 1 or 0; NaN where a policy had not that start.
        confidence: Coverage.

    Returns:
        One of each policy; they add to 0.
    """
    outcome = np.asarray(success, float)
    won, lost = np.nan_to_num(outcome), np.nan_to_num(1 - outcome)
    count = outcome.shape[1]
    wins = won.T @ lost + PRIOR * (1 - np.eye(count))  # [P, P], of the row over the column
    value = np.zeros(count)
    for _ in range(100):
        chance = _sigma(value)
        step = np.linalg.solve(_information(wins, chance), (wins * chance.T - wins.T * chance).sum(1))
        value += np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-10:
            break
    upset = _sigma(value).T  # [P, P], that the row loses to the column
    score = won * (lost @ upset.T) - lost * (won @ upset)  # [N, P]
    score -= score.mean(0)
    n = len(outcome)
    bread = np.linalg.inv(_information(wins, upset.T)) - 1 / count**2
    covariance = bread @ (score.T @ score) @ bread * (n / max(n - 1, 1))
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * np.sqrt(np.diag(covariance).clip(0))
    return [Strength(float(v), float(v - h), float(v + h)) for v, h in zip(value, half, strict=True)]


def ranks(names: Sequence[str], verdicts: Mapping[tuple[str, str], Verdict]) -> dict[str, tuple[int, int]]:
    """The best and the worst rank that each policy can have, given which pairs are decided.

    All of them hold at once if the verdicts do: rank 1 is who nobody is better than.
    """
    better = {(a, b) for (a, b), v in verdicts.items() if v == "first"}
    better |= {(b, a) for (a, b), v in verdicts.items() if v == "second"}
    return {
        name: (1 + sum(b == name for _, b in better), len(names) - sum(a == name for a, _ in better)) for name in names
    }


def _sigma(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P, P]: that the row wins a discordant start against the column."""
    return 1 / (1 + np.exp(value[None, :] - value[:, None]))


def _information(wins: NDArray[np.float64], chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P, P], made regular in the direction of a common shift, which nothing depends on."""
    weight = (wins + wins.T) * chance * chance.T
    np.fill_diagonal(weight, 0.0)
    return np.diag(weight.sum(1)) - weight + 1 / len(wins)
