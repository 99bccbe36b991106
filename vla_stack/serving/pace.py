"""How long batches take, and which of the waiting requests make the next one.

Where all that wait are in time however many are computed together, all are taken. Where they are not, the batch is
the one that gets most chunks to robots in time for each second of computing; what is left over stays until its robot
asks anew or its time is over. So a server that is asked for more than it can compute answers as much of it as it can,
in time, and not everything too late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

MARGIN = 1.1  # of an estimate, for what a busy computer adds and the way back
GROWTH, SHARE = 1.2, 0.2  # one slow batch, of a computer that was busy, raises an estimate by a fifth at most


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes that a policy is warmed up at, and that a compiled one is given: powers of two up to ``most``, and that."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


class Pace:
    """What a policy was seen to take by size of batch.

    Args:
        most: Largest batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, float] = {}
        self._table: list[float] = []  # [n - 1]: nanoseconds to allow for a batch of n

    def note(self, size: int, ns: float) -> None:
        """A batch of ``size`` has taken ``ns`` nanoseconds."""
        known = self._seen.get(size)
        self._seen[size] = ns if known is None or ns < known else min(known + SHARE * (ns - known), GROWTH * known)
        sizes = sorted(self._seen)
        guess = np.interp(np.arange(1, self._most + 1), sizes, [self._seen[n] for n in sizes])
        self._table = (MARGIN * np.minimum.accumulate(guess[::-1])[::-1]).tolist()  # fewer take no longer

    def next(self, slacks: Sequence[int]) -> tuple[int, int]:
        """How many of the waiting requests are computed now, and from which one on they are in time.

        Args:
            slacks: Nanoseconds until each one's answer is due, ascending.

        Returns:
            Index of the first that is, and how many to take of those from there on.
        """
        count = min(self._most, len(slacks))
        best, chosen = 0.0, (0, count)
        if not self._table or slacks[0] >= self._table[count - 1]:
            return chosen
        for n in range(1, count + 1):
            begin = bisect_left(slacks, self._table[n - 1])
            number = min(n, len(slacks) - begin)
            rate = number / max(1.0, self._table[n - 1])
            if rate > best:
                best, chosen = rate, (begin, number)
        return chosen
