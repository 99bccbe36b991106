"""What a policy around a flow policy decided for a batch of observations, with what a learner keeps of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Decided(NamedTuple):
    """Decisions.

    Attributes:
        seen: float [b, f], what values and actors read of each observation.
        actions: float [b, d], what the values are of: the executed steps of the chunk, or the noise that it began with.
        chunk: float [b, h, a], the chunk, normalised.
        drawn: float [b, n, d], of the base's chunks that there were to choose from the steps that may be executed.
    """

    seen: Tensor
    actions: Tensor
    chunk: Tensor
    drawn: Tensor
