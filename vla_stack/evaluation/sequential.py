"""Which of two policies is better, from common starts, with the right to look after every one of them.

Start i gives x_i = b_i - a_i, one of -1, 0, 1. A bettor who holds the mean of x for ``d`` and stakes the share ``s``
has, after n starts, the fortune prod(1 + s (x_i - d)), a non-negative martingale from 1 where the mean is ``d``; so has
the mean over several stakes, :func:`evidence`. By Ville's inequality it ever reaches 1/alpha with probability alpha at
most. So whatever is read off it holds at every number of starts at once: one may stop at any look, and go on after any
stop.

At d = 0 only discordant starts, which one policy wins and the other loses, change the fortune: McNemar's test, run as a
sequence. Sources: Ville 1939; Waudby-Smith and Ramdas 2024, JRSS-B 86:1-27, section 4 (bounded means by betting);
mixtures over stakes: Robbins 1970. Snyder et al. 2025 (arXiv:2503.10966) compare policies so on starts that are not
paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

STAKES = (np.arange(32) + 0.5) / 32  # shares of the largest stake that cannot ruin the bettor, each as likely
Side = Literal["above", "below", "both"]
Verdict = Literal["first", "second", "same", "open"]


@dataclass(frozen=True)
class PairedTest:
    """What common starts say of a second policy against a first one.

    Attributes:
        wins, ties, losses: Starts that the second alone won, that ended alike, that the first alone won.
        p: Of the hypothesis that both succeed as often; holds at any stopping time.
        same_p: Of the hypothesis that they differ by ``margin`` or more; likewise.
        low, high: Interval of the difference second - first at ``1 - alpha``; likewise.
        leader: Who was ahead when ``p`` was reached.
        margin: Difference that would matter, as a share of the starts.
    """

    wins: int
    ties: int
    losses: int
    p: float
    same_p: float
    low: float
    high: float
    leader: Literal["first", "second"]
    margin: float

    @property
    def starts(self) -> int:
        return self.wins + self.ties + self.losses

    @property
    def difference(self) -> float:
        """Success of the second minus that of the first; 0 without starts."""
        return (self.wins - self.losses) / max(self.starts, 1)

    def verdict(self, alpha: float) -> Verdict:
        """At an error of ``alpha``: which is better, that none is by ``margin``, or that more starts are needed."""
        if self.p <= alpha:
            return self.leader
        return "same" if self.same_p <= alpha else "open"


def paired_test(first: ArrayLike, second: ArrayLike, margin: float = 0.1, alpha: float = 0.05) -> PairedTest:
    """Test two policies on the starts that both had.

    Args:
        first, second: [N] successes on the same starts, in the order in which the starts were meant to come; not in
            that in which episodes ended, for short ones end early.
        margin: Difference that would matter, in (0, 1).
        alpha: One minus the coverage of the interval.

    Raises:
        ValueError: They are not of the same starts.
    """
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired outcomes need two equal vectors, got shapes {a.shape} and {b.shape}")
    wins, losses = np.cumsum(b & ~a), np.cumsum(a & ~b)
    ties = np.arange(1, a.size + 1) - wins - losses
    best, lead = 0.0, 0
    if a.size:
        fortune = evidence(wins, ties, losses)
        at = int(fortune.argmax())
        best, lead = max(0.0, float(fortune[at])), int(wins[at] - losses[at])
    closer: tuple[tuple[float, Side], ...] = ((margin, "below"), (-margin, "above"))
    apart = [float(evidence(wins, ties, losses, d, side).max(initial=0.0)) for d, side in closer]
    counts = (int(wins[-1]), int(ties[-1]), int(losses[-1])) if a.size else (0, 0, 0)
    return PairedTest(
        *counts,
        p=float(np.exp(-best)),
        same_p=float(np.exp(-min(apart))),
        low=_end(*counts, np.log(1 / alpha), -1.0),
        high=_end(*counts, np.log(1 / alpha), 1.0),
        leader="second" if lead > 0 else "first",
        margin=margin,
    )


def evidence(
    wins: ArrayLike, ties: ArrayLike, losses: ArrayLike, d: float = 0.0, side: Side = "both"
) -> NDArray[np.float64]:
    """Logarithm of the fortune of who bets against a difference of ``d``.

    Args:
        wins, ties, losses: [...] how many of x were 1, 0, -1.
        d: The mean of x that is doubted, within (-1, 1).
        side: Where the bettor means the mean to be; a supermartingale where it is on the other one.

    Returns:
        [...]; at least log(1/alpha) at some time with probability alpha at most, if the mean is ``d``.
    """
    up, down = STAKES / (1 + d), -STAKES / (1 - d)
    stakes = {"above": up, "below": down, "both": np.concatenate([up, down])}[side]
    log = sum(
        np.multiply.outer(np.asarray(count, float), np.log1p(stakes * (x - d)))
        for count, x in ((wins, 1), (ties, 0), (losses, -1))
    )
    return np.logaddexp.reduce(log, axis=-1) - np.log(len(stakes))


def _end(wins: int, ties: int, losses: int, limit: float, far: float) -> float:
    """Where the differences that are not refuted end, by bisection from the observed one towards ``far``.

    They are an interval around it: the fortune is at most 1 at the observed mean, and convex in d (a mean of products
    of (1 - g) + g (1 ± x) / (1 ± d), each of which is log-convex).
    """
    inside, outside = (wins - losses) / max(wins + ties + losses, 1), far
    for _ in range(40):
        middle = (inside + outside) / 2
        if abs(middle) < 1 and evidence(wins, ties, losses, middle) < limit:
            inside = middle
        else:
            outside = middle
    return float(outside)
