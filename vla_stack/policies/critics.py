"""Ensembles of state-action values that are computed together: one batched product a layer, not a loop.

An ensemble of E networks [Linear -> LayerNorm -> ReLU]* -> Linear is one stack of weights ``[E, in, out]``. Ensembles
of ten with random subsets for the target are what lets a critic take many steps for each step of the environment
(Chen et al., "Randomized Ensembled Double Q-Learning", 2021; layer norm: Ball et al., RLPD, arXiv:2302.02948).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

NORM_EPS = 1e-5  # what torch's layer norm adds to a variance; flax's adds 1e-6


class Ensemble(nn.Module):
    """E independent networks of one shape, evaluated in one call.

    Args:
        size: E.
        inputs: Width of the input.
        hidden: Widths of the hidden layers.
        outputs: Width of the output.
        layer_norm: Layer norm before each ReLU.
        generator: Source of the initial weights, uniform in +-1/sqrt(in) as those of ``nn.Linear``.
        norm_eps: Added to the variance of a layer norm.
    """

    def __init__(
        self,
        size: int,
        inputs: int,
        hidden: Sequence[int],
        outputs: int = 1,
        layer_norm: bool = True,
        generator: torch.Generator | None = None,
        norm_eps: float = NORM_EPS,
    ) -> None:
        super().__init__()
        widths = (inputs, *hidden, outputs)
        self.size, self.outputs, self.norm_eps = size, outputs, norm_eps
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
            bound = 1.0 / math.sqrt(fan_in)
            for into, rows in ((self.weights, fan_in), (self.biases, 1)):
                uniform = torch.rand(size, rows, fan_out, generator=generator)
                into.append(nn.Parameter((2.0 * uniform - 1.0) * bound))
        scales = [nn.Parameter(torch.ones(size, 1, w)) for w in hidden] if layer_norm else []
        shifts = [nn.Parameter(torch.zeros(size, 1, w)) for w in hidden] if layer_norm else []
        self.scales, self.shifts = nn.ParameterList(scales), nn.ParameterList(shifts)

    def forward(self, x: Float[Tensor, "*e b d"], subset: Tensor | None = None) -> Float[Tensor, "e b"]:
        """Outputs ``[E, b]``, or ``[E, b, outputs]`` where there are several; ``subset`` evaluates those alone.

        Inputs ``[E, b, d]`` are each network's own.
        """

        def of(parameter: Tensor) -> Tensor:
            return parameter if subset is None else parameter[subset]

        count = self.size if subset is None else len(subset)
        h = x.expand(count, *x.shape[-2:])
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if i == last and self.outputs == 1:  # a product of matrices of which one is a vector is ten times slower
                return (h * of(weight).transpose(1, 2)).sum(-1) + of(bias)[..., 0]
            h = torch.baddbmm(of(bias), h, of(weight))
            if i < last:
                if self.scales:
                    normalised = F.layer_norm(h, h.shape[-1:], eps=self.norm_eps)
                    h = torch.addcmul(of(self.shifts[i]), normalised, of(self.scales[i]))
                h = F.relu(h)
        return h


def sample_critics(num_critics: int, count: int, generator: torch.Generator) -> Tensor | None:
    """``count`` distinct critics, int64 [count]; None where that is all of them."""
    return None if count >= num_critics else torch.randperm(num_critics, generator=generator)[:count]


@torch.no_grad()
def polyak(target: nn.Module, source: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau source, in place."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)


def best(offered: Float[Tensor, "b n d"], values: Float[Tensor, "b n"]) -> Float[Tensor, "b d"]:
    """The candidate of each row's largest value."""
    chosen = values.argmax(1)[:, None, None].expand(-1, 1, offered.shape[2])
    return offered.gather(1, chosen)[:, 0]
