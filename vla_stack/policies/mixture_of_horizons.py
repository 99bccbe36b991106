"""Mixture of horizons: one policy predicts the chunk's first h actions for several h at once, a gate mixes them.

"Mixture of Horizons in Action Chunking" (arXiv:2511.19433v2, ICML 2026). Every branch n runs the same action
transformer on the first h_n tokens of the same noisy chunk, over the same prefix; a linear gate on the final token
states weighs the branches step by step. Branches know of their horizon only through the tokens they may read, so action
attention must be bidirectional. Flow time here is 1 at noise, where the paper has 0.

The branches are laid end to end in one sequence of sum(h) tokens whose attention stays inside each branch: no padding
and no copies of the prefix's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vla_stack.policies.contract import Context, FlowPolicy, Time

Fusion = Literal["gate", "mean", "last"]
Rule = Literal["code", "paper", "votes"]
NOISE_FLOOR = 0.01
VOTE_QUANTILE = 0.95  # of the distances over the first steps: how near the fused action is near enough for a vote


class Mixture(NamedTuple):
    """Predictions of all branches at one point of the flow.

    Attributes:
        branches: float [b, n, h, a], velocities of each branch; 0 beyond the branch's horizon.
        weights: float [b, n, h], at least float32; they sum to 1 over the branches and are exactly 0 beyond a horizon.
    """

    branches: Tensor
    weights: Tensor

    def cut(self, action_dim: int, lacking: Bool[Tensor, "b a"] | None = None) -> Mixture:
        """Without the padding of actions, which neither losses nor distances count.

        Args:
            action_dim: Dimensions to keep.
            lacking: Those among them that a sample's embodiment does not have; set to 0.
        """
        branches = self.branches[..., :action_dim]
        return Mixture(branches if lacking is None else branches.masked_fill(lacking[:, None, None], 0.0), self.weights)

    @property
    def velocity(self) -> Float[Tensor, "b h a"]:
        """The fused velocity."""
        return (self.weights[..., None] * self.branches).sum(1)

    @property
    def distance(self) -> Float[Tensor, "b n h"]:
        """L1 distance of each branch from the fused velocity."""
        return (self.branches - self.velocity[:, None]).abs().sum(-1)

    @property
    def disagreement(self) -> Float[Tensor, "b h"]:
        """Mean L1 distance of the branches from the fused velocity, by their weights."""
        return (self.weights * self.distance).sum(1)


class Horizons(nn.Module):
    """The horizons of a mixture, and where the tokens of its branches lie.

    Args:
        horizons: Branch lengths in ascending order; the last one is the policy's own chunk length.
    """

    valid: Tensor  # bool [n, h], steps that a branch has
    steps: Tensor  # int [m], step in the chunk of each packed token, m = sum(horizons)
    slots: Tensor  # int [m], its place in the flattened [n, h]

    def __init__(self, horizons: Sequence[int]) -> None:
        super().__init__()
        self.lengths = tuple(horizons)
        steps = torch.arange(self.lengths[-1])
        valid = steps < torch.tensor(self.lengths)[:, None]
        self.register_buffer("valid", valid, persistent=False)
        self.register_buffer("steps", steps.repeat(len(self.lengths), 1)[valid], persistent=False)
        self.register_buffer("slots", valid.flatten().nonzero()[:, 0], persistent=False)

    def unpack(self, tokens: Float[Tensor, "b m *d"]) -> Float[Tensor, "b n h *d"]:
        """Tokens of branches end to end as one row a branch, 0 beyond its horizon."""
        n, h = self.valid.shape
        rows = tokens.new_zeros(tokens.shape[0], n * h, *tokens.shape[2:])
        return rows.index_copy(1, self.slots, tokens).unflatten(1, (n, h))


def packed_states(
    policy: FlowPolicy, horizons: Horizons, context: Context, x: Float[Tensor, "b h a"], t: Time
) -> Float[Tensor, "b m d"]:
    """Final states of all branches' tokens end to end, from one sequence with one block a branch."""
    t = t if t.ndim == 1 else t[:, horizons.steps]
    return policy.action_states(context, x[:, horizons.steps], t, blocks=horizons.lengths)


def padded_states(
    policy: FlowPolicy, horizons: Horizons, context: Context, x: Float[Tensor, "b h a"], t: Time
) -> Float[Tensor, "b m d"]:
    """The same from one padded row a branch, as in the paper's own code.

    What :func:`packed_states` is held against, in tests and benchmarks. ``context`` has each observation once a branch:
    ``context.repeat(n)``.
    """
    n = len(horizons.lengths)
    valid = horizons.valid.repeat(len(x), 1)
    states = policy.action_states(context, x.repeat_interleave(n, 0), t.repeat_interleave(n, 0), valid=valid)
    return states.unflatten(0, (len(x), n)).flatten(1, 2)[:, horizons.slots]


class Gate(nn.Module):
    """Weights of the branches, one linear layer on token states that all branches share.

    In training the scores carry noise whose scale is a second linear layer, as in sparse mixtures of experts (Shazeer
    et al. 2017); the paper's text leaves it out, its parameter count and its code have it.

    Args:
        width: Width of the states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)
        self.spread = nn.Linear(width, 1)

    def forward(self, states: Float[Tensor, "b m d"], generator: torch.Generator | None) -> Float[Tensor, "b m"]:
        """Scores in at least float32, also under autocast; noisy where there is a generator."""
        dtype = torch.promote_types(states.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            states = states.to(dtype)
            scores = _linear(self.score, states)
            if generator is not None:
                noise = torch.randn(scores.shape, generator=generator, device=generator.device).to(scores)
                scores = scores + noise * (F.softplus(_linear(self.spread, states)) + NOISE_FLOOR)
        return scores


def _linear(layer: nn.Linear, states: Float[Tensor, "b m d"]) -> Float[Tensor, "b m"]:
    return F.linear(states, layer.weight.to(states.dtype), layer.bias.to(states.dtype))[..., 0]


def fusion_weights(
    scores: Float[Tensor, "b n h"], valid: Bool[Tensor, "n h"], fusion: Fusion
) -> Float[Tensor, "b n h"]:
    """Weights of the branches at each step.

    Args:
        scores: The gate's; read where ``valid``.
        valid: Steps that a branch has; every step has the last branch.
        fusion: ``gate``: softmax over the branches that have the step; ``mean``: equal weights for them;
            ``last``: the longest branch alone, a plain policy that was trained with shorter ones beside it.
    """
    if fusion == "mean":
        return (valid.to(scores) / valid.sum(0)).expand_as(scores)
    if fusion == "last":
        return torch.zeros_like(scores).index_fill(1, torch.tensor([len(valid) - 1], device=scores.device), 1.0)
    # The dtype's smallest number, not -inf: its exponential is exactly 0 and never meets another -inf.
    return scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(1)


def load_balance(
    weights: Float[Tensor, "b n h"], lengths: Sequence[int], real: Bool[Tensor, "b h"]
) -> Float[Tensor, ""]:
    """Squared coefficient of variation of the branches' mean use, averaged over intervals of steps.

    An interval lies between two consecutive horizons, so the same branches are active on all of its steps; one with a
    single active branch has nothing to balance. Variance is unbiased, as in the paper's PyTorch code.

    Args:
        weights: The gate's weights.
        lengths: Branch lengths in ascending order.
        real: Steps within the episode; the others do not count.
    """
    terms = []
    for start, stop in pairwise((0, *sorted(set(lengths)))):
        first = next(n for n, h in enumerate(lengths) if h > start)
        if len(lengths) - first > 1:
            m = real[:, None, start:stop]
            usage = (weights[:, first:, start:stop] * m).sum((0, 2)) / m.sum().clamp(min=1)
            terms.append(usage.var() / (usage.mean().square() + 1e-10))
    return torch.stack(terms).mean() if terms else weights.new_zeros(())


def consensus_steps(
    disagreement: Float[Tensor, "b h"],
    lengths: Sequence[int],
    ratio: float,
    min_steps: int = 5,
    min_active: int = 5,
    rule: Literal["code", "paper"] = "code",
    given: Bool[Tensor, "b h"] | None = None,
) -> Int[Tensor, " b"]:
    """How many actions of each chunk to execute before a new one is asked for (Alg. 1, dynamic inference).

    The first ``min_steps`` are executed in any case; further ones as long as enough branches predict them and these
    disagree less than ``ratio`` times their mean disagreement over the first ``min_steps``. The threshold is relative
    to the chunk: across one rollout it varies twofold (Table 11).

    Where a chunk's first actions were given, all of this begins after them: what branches say there is held to nothing
    by training, and the robot is past them when the chunk arrives.

    Args:
        disagreement: d_k, accumulated over the denoising steps.
        lengths: Branch lengths.
        ratio: r; 0 always gives ``min_steps``.
        min_steps: n.
        min_active: m.
        rule: ``code`` wants more than m active branches and d_k below the threshold, as the authors' code does and
            their published rollouts show (at horizons 3, 6 ... 30 no more than 15 steps are executed); ``paper`` wants
            at least m and at most the threshold, as in their text (18).
        given: Actions at the start of each chunk that were given; None: none were. They count in the result.
    """
    h = disagreement.shape[1]
    step = torch.arange(h, device=disagreement.device)[None]
    step = step if given is None else step - given.sum(1, keepdim=True)  # of those that were not given
    first = (step >= 0) & (step < min_steps)
    threshold = ratio * torch.where(first, disagreement, 0.0).sum(1, keepdim=True) / first.sum(1, keepdim=True)
    active = torch.tensor([sum(k < length for length in lengths) for k in range(h)], device=disagreement.device)
    if rule == "code":
        agree = (active > min_active) & (disagreement < threshold)
    else:
        agree = (active >= min_active) & (disagreement <= threshold)
    return ((step < min_steps) | agree).cumprod(1).sum(1)


def vote_steps(
    distance: Float[Tensor, "b n h"],
    lengths: Sequence[int],
    ratio: float = 1.0,
    min_steps: int = 1,
    max_steps: int = 20,
) -> Int[Tensor, " b"]:
    """How many actions of each chunk to execute, by votes of the branches: the rule of the authors' one-step policy.

    A branch votes for a step where it lies nearer to the fused action than ``ratio`` times the 95 % quantile of all
    branches' distances over the first ``min_steps``. These are executed in any case; further ones as long as more than
    two thirds of several active branches vote for them (of their number, rounded down).

    Args:
        distance: Of :class:`Mixture`, of actions; read where a branch has the step.
        lengths: Branch lengths.
        ratio: 1 in the authors' code.
        min_steps: Theirs is 1.
        max_steps: Most actions that are executed.
    """
    step = torch.arange(distance.shape[2], device=distance.device)
    valid = step < torch.tensor(lengths, device=distance.device)[:, None]
    first = distance[:, :, :min_steps][:, valid[:, :min_steps]]
    threshold = ratio * first.quantile(VOTE_QUANTILE, dim=1)
    votes, active = ((distance < threshold[:, None, None]) & valid).sum(1), valid.sum(0)
    agree = (active > 1) & (votes > 2 * active // 3)
    return ((step < min_steps) | agree).cumprod(1).sum(1).clamp(max=max(min_steps, max_steps))
