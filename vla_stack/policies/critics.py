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

        count = self.size if subset is None else len(subset)
        return self._rest(self._product(x.expand(count, *x.shape[-2:]), 0, subset), subset)

    def judge(
        self, obs: Float[Tensor, "b o"], actions: Float[Tensor, "b n d"], subset: Tensor | None = None
    ) -> Float[Tensor, "e b n"]:
        """:meth:`forward` of several actions an observation: their first products have the observation's in common."""
        (weight, bias), (b, n, d) = (chosen(p[0], subset) for p in (self.weights, self.biases)), actions.shape
        seen = torch.baddbmm(bias, obs.expand(len(weight), *obs.shape), weight[:, :-d])  # [E, b, w]
        done = torch.matmul(actions.reshape(b * n, d), weight[:, -d:]).unflatten(1, (b, n))
        return self._rest((seen[:, :, None] + done).flatten(1, 2), subset).reshape(-1, b, n)

    def _product(self, h: Tensor, i: int, subset: Tensor | None) -> Tensor:
        """Of layer ``i``."""
        weight, bias = chosen(self.weights[i], subset), chosen(self.biases[i], subset)
        if i == len(self.weights) - 1 and self.outputs == 1:  # a matrix times a vector is ten times slower
            return (h * weight.transpose(1, 2)).sum(-1) + bias[..., 0]
        return torch.baddbmm(bias, h, weight)

    def _rest(self, h: Tensor, subset: Tensor | None) -> Tensor:
        """What follows the first layer's product."""
        for i in range(1, len(self.weights)):
            if self.scales:
                normalised = F.layer_norm(h, h.shape[-1:], eps=self.norm_eps)
                shift, scale = chosen(self.shifts[i - 1], subset), chosen(self.scales[i - 1], subset)
                h = torch.addcmul(shift, normalised, scale)
            h = self._product(F.relu(h), i, subset)
        return h


def chosen(parameter: Tensor, subset: Tensor | None) -> Tensor:
    """The parameters of the networks in ``subset``, of all where there is none."""
    return parameter if subset is None else parameter[subset]


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
