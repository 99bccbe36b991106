"""Earlier observations as tokens of the prefix, for a policy with a history.

Each is encoded once, by the encoders of the present pictures, and what is kept of it are the few tokens that these make
of a picture. Its age in control steps and whether it is the episode's first are added to them; the action expert and
the rest of the prefix read them like any others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vla_stack.history import recalled
from vla_stack.schema import IMAGE_TOKENS, PAST_AGE

PAST_TOKENS = "observation.past_tokens"  # float32 [b, p, n, d], in place of earlier pictures
LONGEST, WAVES = 1024.0, 8  # control steps of the slowest wave's half period in log(1 + age), and their number


class PastEncoder(nn.Module):
    """Adds to tokens of earlier observations when they were.

    Args:
        width: Width of a token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies", math.pi * 2.0 ** torch.arange(WAVES) / math.log1p(LONGEST), persistent=False
        )
        self.age = nn.Linear(2 * WAVES, width)
        self.first = nn.Parameter(torch.randn(width) * 0.5)

    def forward(
        self, tokens: Float[Tensor, "b p n d"], age: Float[Tensor, "b p"]
    ) -> tuple[Float[Tensor, "b m d"], Bool[Tensor, "b m"]]:
        """Tokens of the prefix, and which of them are there. The first of the ``p`` is the episode's first."""
        phase = torch.log1p(age)[..., None] * self.frequencies
        when = self.age(torch.cat((phase.sin(), phase.cos()), dim=-1))
        when = torch.cat((when[:, :1] + self.first, when[:, 1:]), dim=1)
        mask = (age > 0)[..., None].expand(tokens.shape[:3])
        return (tokens + when[:, :, None]).flatten(1, 2), mask.flatten(1)


class Recollection:
    """What ``select_action`` remembers of the episodes of a batch: tokens of its decisions, by control step.

    Args:
        ages: As :func:`vla_stack.history.history_ages` gives them.
    """

    def __init__(self, ages: Sequence[int]) -> None:
        self._ages, self.step = tuple(ages), 0
        self._steps: list[int] = []
        self._tokens: list[Tensor] = []

    def beside(self, present: Float[Tensor, "b n d"]) -> dict[str, Tensor]:
        """Entries of the batch for what is recalled now; ``present`` is remembered from now on."""
        b, shape = len(present), (len(present), len(self._ages), *present.shape[1:])
        tokens, age = present.new_zeros(shape), present.new_zeros(b, len(self._ages))
        for slot, i in enumerate(recalled(self._steps, self.step, self._ages)):
            if i is not None:
                tokens[:, slot], age[:, slot] = self._tokens[i], self.step - self._steps[i]
        self._steps.append(self.step)
        self._tokens.append(present)
        return {IMAGE_TOKENS: present, PAST_TOKENS: tokens, PAST_AGE: age}

    def clear(self) -> None:
        """An episode begins."""
        self.step, self._steps, self._tokens = 0, [], []
