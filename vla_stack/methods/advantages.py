"""What an on-policy learner keeps of one iteration: whole episodes, a row a decision, and their advantages.

Episodes lie one after another. A decision is a chunk of which ``executed`` actions were carried out; its reward is
their discounted sum and what follows counts gamma to their number, so a chunk is one step of a semi-Markov process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vla_stack.policies.transformer import PrefixContext


@dataclass(frozen=True)
class Experience:
    """Rows of whole episodes, in the order in which they were lived.

    Attributes:
        context: The policy's prefix of every row, without gradients.
        inputs: float [r, f], what noise and value networks read.
        state: float [r, s], normalised states, from which a policy makes anew what training moves of its prefix.
        chain: float [r, k+1, h, w], points of the noisy chain; the last one is the chunk.
        executed: int [r], actions of the chunk that were carried out.
        reward: float [r], discounted sum over them.
        discount: float [r], what the following value counts: gamma to the power of ``executed``, 0 where the episode
            terminated.
        last: bool [r], the last row of an episode, terminated or truncated.
        final_inputs: float [r, f], inputs of the observation after a truncated row, zero elsewhere. It is the episode's
            own last observation, not the first of the next.
        success: bool [e], of every episode.
        steps: Environment steps in all.
    """

    context: PrefixContext
    inputs: Float[Tensor, "r f"]
    state: Float[Tensor, "r s"]
    chain: Float[Tensor, "r k h w"]
    executed: Int[Tensor, " r"]
    reward: Float[Tensor, " r"]
    discount: Float[Tensor, " r"]
    last: Bool[Tensor, " r"]
    final_inputs: Float[Tensor, "r f"]
    success: Bool[Tensor, " e"]
    steps: int

    @property
    def count(self) -> int:
        """Decisions."""
        return len(self.executed)

    @property
    def succeeded(self) -> Bool[Tensor, " r"]:
        """Rows of successful episodes."""
        episode = torch.cumsum(self.last.long(), 0) - self.last.long()
        return self.success[episode]


def following(value: Float[Tensor, " r"], final: Float[Tensor, " r"], last: Bool[Tensor, " r"]) -> Float[Tensor, " r"]:
    """Value of what comes after each row: of the next row, or, at an episode's end, of its own final observation."""
    return torch.where(last, final, value.roll(-1))


def advantages(
    reward: Float[Tensor, " r"],
    discount: Float[Tensor, " r"],
    last: Bool[Tensor, " r"],
    value: Float[Tensor, " r"],
    after: Float[Tensor, " r"],
    gae_lambda: float,
) -> Float[Tensor, " r"]:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16) over decisions.

    A_i = delta_i + follow_i lambda A_{i+1} with delta_i = r_i + follow_i V'_i - V_i. The recursion stops at every
    episode's end; a truncated one (``discount`` > 0) still bootstraps from V', a terminated one does not.

    Args:
        reward: As in :class:`Experience`.
        discount: Likewise.
        last: Likewise.
        value: V of each row's observation.
        after: V' from :func:`following`.
        gae_lambda: lambda, for each decision.
    """
    delta = reward + discount * after - value
    keep = torch.where(last, 0.0, discount * gae_lambda)
    out, running = torch.empty_like(delta), delta.new_zeros(())
    for i in range(len(delta) - 1, -1, -1):
        running = delta[i] + keep[i] * running
        out[i] = running
    return out
