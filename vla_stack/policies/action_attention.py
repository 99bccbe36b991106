"""Which action tokens may read which: chunks laid end to end, and the Λ-shaped mask of prefix conditioning.

Λ-mask: Xiaomi-Robotics-0 (2026, arXiv:2602.12684), section on asynchronous execution. With attention among all action
tokens a policy that is given the actions under way can copy them into the steps that follow, and heed what it sees no
more. So attention is causal and short: an action token reads the vision-language prefix with the state, a learnt sink
and the ``window`` action tokens before it; late tokens reach the given actions through others alone. The positions of
noisy tokens are shifted by ``NOISY_OFFSET``, which tells them from clean ones at the same step.

From the paper: causal, sink, window, an offset of 10, and up to 6 given actions, uniformly. Not verified: the window's
size (a re-implementation has 3, our default), and whether given actions are held to the window too; here they are, so
that the mask is the same for all tokens.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Bool, Int
from torch import Tensor

NOISY_OFFSET = 10


@functools.lru_cache(maxsize=16)
def same_block(blocks: tuple[int, ...], device: torch.device) -> Bool[Tensor, "n n"]:
    """True where two tokens belong to the same one of several chunks laid end to end.

    Kept, so that the steps of a sampler do not each make and copy it.
    """
    with torch.inference_mode(False):  # what is kept must serve training too
        # Not repeat_interleave, whose length depends on data: a compiled sampler would be in pieces.
        index = torch.tensor([n for n, length in enumerate(blocks) for _ in range(length)], device=device)
        return index[:, None] == index[None, :]


@functools.lru_cache(maxsize=16)
def block_steps(blocks: tuple[int, ...], device: torch.device) -> Int[Tensor, " n"]:
    """Steps of the tokens of several chunks laid end to end; kept like :func:`same_block`."""
    with torch.inference_mode(False):
        return torch.cat([torch.arange(h) for h in blocks]).to(device)


def sink_and_window(horizon: int, window: int) -> Bool[Tensor, "n n"]:
    """Λ-mask over a sink and ``horizon`` action tokens, n = horizon + 1, a row a reader.

    Action token j reads the sink, itself and the ``window`` action tokens before it; the sink reads itself.
    """
    index = torch.arange(horizon + 1)
    behind = index[:, None] - index
    return (behind >= 0) & ((behind <= window) | (index == 0))
