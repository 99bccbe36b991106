"""Exponential moving average of the weights (Polyak & Juditsky, 1992), the version that is served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vla_stack.training.placement import here


class Ema:
    """Average of a set of parameters, ``avg <- d * avg + (1 - d) * weights`` after every optimiser step.

    The decay d rises to ``decay`` as min(decay, (1 + n) / (10 + n)) over steps n, so that the random initial weights
    are forgotten in short runs too.

    Args:
        parameters: The parameters to follow; they are kept by reference.
        decay: Decay in the long run, in (0, 1).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._live = list(parameters)
        self._average: list[Tensor] = []
        self.restart()

    def restart(self) -> None:
        """Set the average to the present weights."""
        self._average = [here(p.detach()).clone() for p in self._live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step ``step`` (counted from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, [here(p.detach()) for p in self._live], 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the parameters hold the average. Nothing is copied: storages change places, but for
        parameters of which this process has a part alone.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for i, parameter in enumerate(self._live):
            if isinstance(parameter, DTensor):  # whoever gathers it keeps its storage
                part = here(parameter.detach())
                before = part.clone()
                part.copy_(self._average[i])
                self._average[i] = before
            else:
                parameter.data, self._average[i] = self._average[i], parameter.data
