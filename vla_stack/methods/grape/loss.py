"""GRAPE: preferences between whole trajectories, as one loss (TPO, trajectory-wise preference optimisation).

Zhang et al., "GRAPE: Generalizing Robot Policy via Preference Alignment" (arXiv:2411.19309v2), eqs. 2-6. A pair is a
better and a worse rollout of one instruction *from one initial state*, for only then the partition function cancels.
A *decision* is an executed chunk. What stands for the log-probability of a decision is in ``likelihood.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.methods.grape.likelihood import score, shared_draws

PAIR, SIDE, DECISION = "pair", "side", "decision"  # columns of a batch, one row a decision
WINNER, LOSER = 0, 1
Aggregate = Literal["sum", "mean", "truncate_min", "window"]
TARGET_MARGIN = 0.75  # median |z| that beta is calibrated to


def tpo(
    ratio: Float[Tensor, "b 2 t"],
    mask: Bool[Tensor, "b 2 t"],
    beta: float,
    aggregate: Aggregate = "sum",
    window: int = 8,
) -> dict[str, Tensor]:
    """The loss of eq. 6 and its anchor, from log-ratios ``log pi(a_t|o_t) - log pi_ref(a_t|o_t)`` of decisions.

    S = sum_t ratio;  z = beta (S_winner - S_loser);  L_TPO = mean softplus(-z);
    L_prox = -1/2 mean sum_y [log sigma(beta S_y) + log sigma(-beta S_y)]   (RPRO of HyVLA-0.5 / FlowPRO,
    arXiv:2606.05468): holds both policies together, where L_TPO alone may lower winner and loser alike.

    Args:
        ratio: Winner, then loser, of each pair; anything, NaN too, where ``mask`` is false.
        mask: Decisions that exist.
        beta: Strength of the tie to the reference, in the units of the log-ratio.
        aggregate: ``sum``; ``mean`` over the decisions; ``truncate_min`` cuts the longer side to the length of the
            shorter; ``window`` compares stretches of ``window`` decisions, stride 1, each by its own sigmoid (with
            ``window=1`` this is step-wise DPO).
        window: See there.

    Returns:
        ``tpo`` and ``proximal``, scalars, and ``margin`` z [b, w], ``sums`` S [b, 2, w] and ``counted`` bool [b, w]: of
        each window, one a pair in all other aggregates.
    """
    sums, counted = aggregated(torch.where(mask, ratio, 0.0), mask, aggregate, window)
    margin = beta * (sums[:, WINNER] - sums[:, LOSER])
    n = counted.sum().clamp(min=1)
    reward = beta * sums
    preferred = torch.where(counted, F.softplus(-margin), 0.0).sum() / n
    tie = 0.5 * (F.softplus(-reward) + F.softplus(reward)).sum(1)
    return {
        "tpo": preferred,
        "proximal": torch.where(counted, tie, 0.0).sum() / n,
        "margin": margin,
        "sums": sums,
        "counted": counted,
    }


def aggregated(
    ratio: Float[Tensor, "b 2 t"], mask: Bool[Tensor, "b 2 t"], aggregate: Aggregate, window: int
) -> tuple[Float[Tensor, "b 2 w"], Bool[Tensor, "b w"]]:
    """Sums of decisions' log-ratios as ``aggregate`` says, and which windows there are; see :func:`tpo`."""
    every = mask.any(2).all(1, keepdim=True)  # a side without a decision says nothing
    if aggregate == "sum":
        return ratio.sum(2, keepdim=True), every
    if aggregate == "mean":
        return ratio.sum(2, keepdim=True) / mask.sum(2, keepdim=True).clamp(min=1), every
    shorter = mask.sum(2).amin(1)  # [b]
    if aggregate == "truncate_min":
        kept = mask.cumsum(2) <= shorter[:, None, None]
        return torch.where(kept, ratio, 0.0).sum(2, keepdim=True), every
    order = (~mask).to(torch.int8).argsort(dim=2, stable=True)  # decisions first, padding last
    ratio = F.pad(ratio.gather(2, order), (0, max(0, window - ratio.shape[2])))
    kept = torch.arange(ratio.shape[2], device=ratio.device) < shorter[:, None]
    sums = torch.where(kept[:, None], ratio, 0.0).unfold(2, window, 1).sum(-1)
    start = torch.arange(sums.shape[2], device=ratio.device)
    return sums, every & ((start + window <= shorter[:, None]) | (start == 0))


def loss(
    policy: Any,
    batch: dict[str, Any],
    generator: torch.Generator,
    reference: Reference | None = None,
    beta: float = 0.1,
    aggregate: Aggregate = "sum",
    window: int = 8,
    preference: float = 1.0,
    proximal: float = 0.0,
    sft: float = 0.0,
    draws: int = 4,
    sigma: float = 0.1,
    micro: int = 256,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``preference L_TPO + proximal L_prox + sft e(winner)``; plain TPO ``(1, 0, 0)``, filtered imitation ``(0, 0,
    1)``.

    The gradient is exact at the memory of ``micro`` decisions. L is a function of sums of log-ratios, so its gradient
    is that of each decision's log-probability times a number that needs all of them: a first pass without a graph finds
    the numbers, a second one goes through the decisions again, some at a time, with the same noise. Here that is
    ``torch.utils.checkpoint`` around the score of ``micro`` rows.

    Args:
        policy: The policy; put into evaluation mode, for dropout or a gate's noise would differ from the reference.
        batch: Preprocessed rows, one a decision: observations, ``action`` [n, h, a] as sampled, ``action_is_pad``
            [n, h] true on what was not executed, ``pair``, ``side`` and ``decision`` [n]; ``chain`` [n, k+1, h, d]
            where decisions are scored by the likelihood of their sampling chain.
        generator: Source of (t, noise), shared by policy and reference and by the two sides of a pair.
        reference: The frozen policy.
        beta: See :func:`tpo`; that of flow heads depends on the units of the error: :func:`calibrated_beta`.
        aggregate: See :func:`tpo`.
        window: See :func:`tpo`.
        preference: Weight of L_TPO.
        proximal: Weight of L_prox.
        sft: Weight of the imitation error of the winners' decisions, its mean over them.
        draws: (t, noise) pairs a decision, for flow heads.
        sigma: Noise of each step of ``chain``, in normalised actions.
        micro: Decisions whose activations are held at a time.

    Returns:
        The loss, and its terms, the log-ratios of winners and of losers, the median |z| and the share of pairs with
        z > 0, detached.

    Raises:
        UserError: The batch has no pairs, or the head has no likelihood.
    """
    if reference is None or PAIR not in batch:
        remedy = "vla train grape_success rolls a policy out and makes them"
        raise UserError("method 'grape' learns from preference pairs, this data has none", remedy)
    policy.eval()
    pair, side, decision = batch[PAIR], batch[SIDE], batch[DECISION]
    noise = shared_draws(policy, batch["action"], pair, decision, draws, generator)
    with torch.no_grad(), reference.active(policy):
        fixed = score(policy, batch, noise, sigma, micro)
    now = score(policy, batch, noise, sigma, micro, fixed.spread)

    shape = (int(pair.max()) + 1, 2, int(decision.max()) + 1)
    ratio = now.log_prob.new_zeros(shape).index_put((pair, side, decision), now.log_prob - fixed.log_prob)
    mask = torch.zeros(shape, dtype=torch.bool, device=ratio.device)
    mask[pair, side, decision] = True
    terms = tpo(ratio, mask, beta, aggregate, window)
    won = side == WINNER
    imitated = torch.where(won, now.error, 0.0).sum() / won.sum().clamp(min=1)
    value = preference * terms["tpo"] + proximal * terms["proximal"] + sft * imitated

    sums, z = terms["sums"].detach(), terms["margin"].detach()[terms["counted"]]
    logged = {
        "tpo": terms["tpo"],
        "proximal": terms["proximal"],
        "sft": imitated,
        "ratio_winner": sums[:, WINNER].mean(),
        "ratio_loser": sums[:, LOSER].mean(),
        "gap": (sums[:, WINNER] - sums[:, LOSER]).abs().median(),
        "margin": z.abs().median(),
        "accuracy": (z > 0).float().mean(),
    }
    return value, {name: x.detach() for name, x in logged.items()}


class Reference:
    """The policy that preferences are measured against: the values of what is trained, as they were.

    Only trained parameters are kept, so under LoRA the reference is the adapters' initial values (which add nothing)
    and costs no second copy of the weights.

    Args:
        values: Parameter name -> value; copied.
    """

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = {name: value.detach().clone() for name, value in values.items()}

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[None]:
        """Within, the policy computes as the reference; no graph may reach from within to without."""
        self._exchange(policy)
        try:
            yield
        finally:
            self._exchange(policy)

    def _exchange(self, policy: nn.Module) -> None:
        for name in self.values:
            parameter = policy.get_parameter(name)
            kept = self.values[name].to(parameter.device)
            self.values[name], parameter.data = parameter.data, kept
        torch.clear_autocast_cache()  # which keeps bf16 copies of parameters by the object, whatever its data is now


def calibrated_beta(gap: float) -> float:
    """beta for which a typical pair ends with |z| of ``TARGET_MARGIN``.

    Adam's steps do not depend on the scale of the gradient, so the ``gap`` |S_winner - S_loser| (median) that a policy
    opens in some number of updates at a tiny beta, where sigma(-z) is 1/2 throughout, is what it opens at any other
    until |z| is about 1. Derived here; no paper gives a rule.

    Raises:
        UserError: The gap is 0: nothing was learnt.
    """
    if not gap > 0:
        raise UserError("beta cannot be calibrated: the pilot updates changed nothing", "set beta, or raise lr")
    return TARGET_MARGIN / gap
