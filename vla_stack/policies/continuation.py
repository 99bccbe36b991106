"""Chunks that continue what a robot is doing while the policy computes.

Every way is a function of ``encode`` and ``velocity``, and so works for any flow policy:

rtc: Guided sampling towards the plan, with the network's Jacobian (``guidance.py``).
rtc_identity: The same with the identity in its place; no backward pass.
bid: Bidirectional decoding's backward coherence (Liu et al. 2024, arXiv:2408.17355): of several sampled chunks, the one
    that stays closest to the plan; with a second, weaker policy (``Continuing.weak``) also forward contrast.
prefix: The steps that will be over are given as clean actions, as the policy was trained to take them
    (``max_delay``; Black et al. 2025, arXiv:2512.05964). Costs nothing.

A mixture of horizons also tells how far the branches of a chunk sampled so agree, and with it how much to execute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy, NoisePolicy
from vla_stack.policies.guidance import Guide, Schedule, Velocity, guided_euler, soft_mask
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.schema import ACTION_DIM_IS_PAD, Continuation

BID_SAMPLES, BID_KEPT = 16, 4


@dataclass(frozen=True)
class Continuing:
    """How plans are continued, where a mode leaves it open; the authors' ablations and BID's second half.

    Attributes:
        schedule: Weights of the plan's steps, of ``rtc``, ``rtc_identity`` and ``bid``; see :func:`soft_mask`.
        beta: Largest guidance weight of ``rtc`` and ``rtc_identity``; None: the number of Euler steps. The authors' 5.
        weak: Of ``bid``: a weaker policy of the same sizes for the forward contrast; None leaves it out.
    """

    schedule: Schedule = "exp"
    beta: float | None = None
    weak: Any = None


class Continued(NamedTuple):
    """Chunks that continue plans.

    Attributes:
        chunk: float [b, h, a], normalised.
        disagreement: float [b, h] of a mixture of horizons (``modeling_moh.Sample``), else None.
        given: bool [b, h], steps at the start that were given as clean actions and so have no disagreement; None: none.
    """

    chunk: Tensor
    disagreement: Tensor | None = None
    given: Tensor | None = None


def continuing_modes(policy: Any) -> list[str]:
    """The ways in which a policy can continue a plan; an exported one has no velocity to ask, but takes prefixes."""
    flows = isinstance(policy, FlowPolicy) and not policy.one_step
    takes_prefix = isinstance(policy, NoisePolicy) and policy.max_delay > 0
    return ["rtc", "rtc_identity", "bid"] * flows + ["prefix"] * takes_prefix


def continue_chunk(
    policy: Any,
    batch: dict[str, Any],
    noise: Float[Tensor, "b h a"],
    plan: Float[Tensor, "b h a"],
    continuations: Sequence[Continuation],
    seeds: Sequence[int],
    mode: str,
    how: Continuing = Continuing(),
) -> Continued:
    """Sample chunks that continue plans, all in the same way.

    Args:
        policy: The policy.
        batch: Preprocessed batch of b observations.
        noise: Where sampling starts.
        plan: The plans, normalised as the policy's actions are, one step of the new chunk a row; read where there is
            one.
        continuations: What is known of each plan.
        seeds: One an observation, for further noise.
        mode: ``rtc``, ``rtc_identity``, ``bid`` or ``prefix``.
        how: What the mode leaves open.
    """
    horizon = noise.shape[1]
    plan = F.pad(plan, (0, noise.shape[2] - plan.shape[2]))
    if mode == "prefix":
        mask = torch.stack([torch.arange(horizon) < c.delay for c in continuations]).to(noise.device)
        prefix = flow.ActionPrefix(plan, mask)
        if isinstance(policy, MohPolicy):
            chunk, disagreement = policy.sample(batch, noise, prefix)
            return Continued(chunk, disagreement, mask)
        return Continued(policy.predict_action_chunk(batch, noise=noise, prefix=prefix))
    weights = torch.stack([soft_mask(horizon, c.delay, c.execute, how.schedule) for c in continuations]).to(noise)
    known = torch.stack([torch.arange(horizon) < len(c.actions) for c in continuations]).to(noise)
    guide = Guide(plan, weights * known)
    if mode == "bid":
        return closest(policy, batch, noise, guide, seeds, how.weak)
    jacobian: Literal["full", "identity"] = "full" if mode == "rtc" else "identity"
    velocity = _velocity(policy, batch)
    real = _real(policy, batch, noise)
    chunk = guided_euler(velocity, noise, guide, policy.inference_steps, how.beta, jacobian, real)
    return Continued(chunk[..., : policy.action_dim], getattr(velocity, "disagreement", None))


def _real(policy: Any, batch: dict[str, Any], noise: Float[Tensor, "b h a"]) -> Bool[Tensor, "#b 1 a"]:
    """Entries of an action that its robot has. Padding means nothing to it, so nothing is to agree there."""
    real = (torch.arange(noise.shape[2], device=noise.device) < policy.action_dim)[None, None]
    lacking = batch.get(ACTION_DIM_IS_PAD)
    return real if lacking is None else real & ~F.pad(lacking, (0, noise.shape[2] - lacking.shape[1]))[:, None]


def _velocity(policy: Any, batch: dict[str, Any], repeats: int = 1) -> Velocity:
    """The velocity for each observation, ``repeats`` times in a row; a mixture's notes how far its branches agree."""
    context = policy.encode(batch)
    context = context if repeats == 1 else context.repeat(repeats)
    if isinstance(policy, MohPolicy):
        return policy.measured_velocity(context, batch, repeats)
    return lambda x, t: policy.velocity(context, x, t)


def closest(
    policy: Any,
    batch: dict[str, Any],
    noise: Float[Tensor, "b h a"],
    guide: Guide,
    seeds: Sequence[int],
    weak: Any = None,
    kept: int = BID_KEPT,
) -> Continued:
    """Of several chunks an observation, the one at the smallest weighted distance from the guide.

    With ``weak`` the distance to what the policy itself would do counts too (forward contrast): the summed distance to
    the ``kept`` chunks that fit the guide best, less that to as many of the weaker policy's, over the number sampled.

    Args:
        policy: The policy.
        batch: Preprocessed batch of b observations.
        noise: Of the first chunk of each observation.
        guide: What the chunk should agree with.
        seeds: One an observation, for the other chunks' noise, which both policies start from.
        weak: A weaker policy of the same sizes, an early checkpoint for instance; None leaves the contrast out.
        kept: K, chunks of either policy that are compared with.
    """
    b, n = len(noise), BID_SAMPLES
    # The first is the one that sampling without a plan would give; seeds are shifted so that it is not drawn twice.
    generators = [torch.Generator().manual_seed(seed ^ 1) for seed in seeds]
    others = (
        torch.stack([torch.randn(n - 1, *noise.shape[1:], generator=g) for g in generators]).to(noise)
        * policy.noise_scale
    )
    starts = torch.cat((noise[:, None], others), dim=1).flatten(0, 1)
    real = _real(policy, batch, noise)[:, None]

    def sampled(velocity: Velocity, steps: int) -> tuple[Tensor, Tensor]:
        """Chunks [b, n, h, a] and their weighted distances from the guide [b, n]."""
        chunks = flow.euler(velocity, starts, steps).unflatten(0, (b, n))
        error = (chunks - guide.actions[:, None]) * real
        return chunks, (error.norm(dim=-1) * guide.weights[:, None]).sum(-1)

    def best(chunks: Tensor, distance: Tensor) -> Tensor:
        """The ``kept`` of them that are closest to the guide, [b, k, h, a]."""
        rows = distance.topk(min(kept, n), dim=1, largest=False).indices
        return chunks[torch.arange(b, device=chunks.device)[:, None], rows]

    velocity = _velocity(policy, batch, n)
    chunks, distance = sampled(velocity, policy.inference_steps)
    if weak is not None:
        good, bad = best(chunks, distance), best(*sampled(_velocity(weak, batch, n), weak.inference_steps))
        to_good, to_bad = (
            ((chunks[:, :, None] - x[:, None]) * real[:, None]).norm(dim=-1).sum((2, 3)) for x in (good, bad)
        )
        distance = distance + (to_good - to_bad) / n
    pick = (torch.arange(b, device=chunks.device), distance.argmin(1))
    disagreement = getattr(velocity, "disagreement", None)
    return Continued(
        chunks[pick][..., : policy.action_dim],
        None if disagreement is None else disagreement.unflatten(0, (b, n))[pick],
    )
