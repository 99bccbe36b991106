"""Flow matching over action chunks, in the one time convention of this project.

t = 1 is noise and t = 0 is data: ``x_t = t * noise + (1 - t) * actions``, with velocity ``u = noise - actions``, so a
sampler walks from t = 1 down to 0 (Lipman et al., "Flow Matching for Generative Modeling", 2023, optimal-transport
path; direction as in pi0, Black et al. 2024). Time is one number a sample, ``[b]``, or one an action token, ``[b, h]``:
a token at t = 0 is a clean action that the others may condition on (training-time real-time chunking).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vla_stack.policies.contract import Context, FlowPolicy, Time
from vla_stack.schema import ACTION, ACTION_DIM_IS_PAD, ACTION_IS_PAD

# Beta(1.5, 1) dwells on the noisy end, where the action is still undecided; the offset keeps t off 0, where the
# target says nothing about the noise (pi0, appendix B).
BETA, T_MIN = 1.5, 0.001


class ActionPrefix(NamedTuple):
    """Actions that are already fixed, in the policy's normalised action space.

    Attributes:
        actions: float [b, h, a]; read where ``mask`` is true.
        mask: bool [b, h]; true on the fixed steps.
    """

    actions: Tensor
    mask: Tensor


def sample_time(batch: int, generator: torch.Generator, device: torch.device | str) -> Float[Tensor, " b"]:
    """Draw training times, ``0.999 * Beta(1.5, 1) + 0.001``, by inverting the distribution function x**1.5."""
    uniform = torch.rand(batch, generator=generator, device=generator.device).to(device)
    return uniform.pow(1.0 / BETA) * (1.0 - T_MIN) + T_MIN


def sample_prefix(
    batch: int, horizon: int, max_delay: int, generator: torch.Generator, device: torch.device | str
) -> Bool[Tensor, "b h"]:
    """Steps that are given as clean actions in training: the first d of each chunk, d uniform in 0 ... max_delay.

    So a policy learns to continue what the robot executes while it computes (Black et al. 2025, "Training-Time Action
    Conditioning for Efficient Real-Time Chunking", arXiv:2512.05964).
    """
    delay = torch.randint(max_delay + 1, (batch, 1), generator=generator, device=generator.device)
    return (torch.arange(horizon, device=generator.device) < delay).to(device)


def sample_noise(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Standard normal noise from an explicit generator, drawn where the generator lives."""
    return torch.randn(shape, generator=generator, device=generator.device).to(device)


def per_token(t: Time) -> Float[Tensor, "b h_or_1"]:
    """Time as ``[b, h]``, or ``[b, 1]`` for one time a sample, so that both broadcast over tokens."""
    return t[:, None] if t.ndim == 1 else t


def interpolate(actions: Float[Tensor, "b h a"], noise: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
    """The point x_t on the straight path between data (t = 0) and noise (t = 1).

    Noise may be wider than actions, for policies that pad them: beyond its own entries an action is 0.
    """
    t = per_token(t)[..., None]
    return t * noise + (1.0 - t) * F.pad(actions, (0, noise.shape[-1] - actions.shape[-1]))


def target(actions: Float[Tensor, "b h a"], noise: Float[Tensor, "b h a"]) -> Float[Tensor, "b h a"]:
    """The velocity dx_t/dt that the network regresses; of padding there is none."""
    return noise[..., : actions.shape[-1]] - actions


def squared_error(
    policy: FlowPolicy,
    context: Context,
    actions: Float[Tensor, "b h a"],
    noise: Float[Tensor, "b h a"],
    t: Time,
) -> Float[Tensor, "b h a"]:
    """Unreduced flow-matching error of a policy at given noise and time, in float32."""
    velocity = policy.velocity(context, interpolate(actions, noise, t), t)[..., : actions.shape[-1]]
    return (velocity - target(actions, noise)).square()


def valid_entries(batch: dict[str, Any]) -> Bool[Tensor, "b h a"]:
    """Entries of a batch's action chunks that count in a loss.

    Padding are the steps past an episode's end (``action_is_pad`` [b, h]) and, in a mixture of embodiments, the
    dimensions that a sample's embodiment does not have (``action_dim_is_pad`` [b, a]; absent for a single one).
    """
    valid = (~batch[ACTION_IS_PAD])[..., None].expand_as(batch[ACTION])
    dims = batch.get(ACTION_DIM_IS_PAD)
    return valid if dims is None else valid & ~dims[:, None]


def masked_mean(error: Float[Tensor, "b h a"], valid: Bool[Tensor, "b h a"]) -> Float[Tensor, " b"]:
    """Mean error of each sample over its valid entries; a sample that is all padding contributes zero."""
    return torch.where(valid, error, 0.0).sum(dim=(1, 2)) / valid.sum(dim=(1, 2)).clamp(min=1)


def mean_error(error: Float[Tensor, "b h a"], valid: Bool[Tensor, "b h a"]) -> Float[Tensor, ""]:
    """Mean error over all valid entries of a batch; 0 where there are none. Others have no gradient."""
    return torch.where(valid, error, 0.0).sum() / valid.sum().clamp(min=1)


def error_by_source(
    error: Float[Tensor, "b h a"], valid: Bool[Tensor, "b h a"], batch: dict[str, Any]
) -> dict[str, Float[Tensor, ""]]:
    """Mean error of each dataset of a mixed batch, for logs, detached; none for a batch of one dataset.

    Args:
        error: Of b rows, or of several draws for each row in turn.
        valid: Likewise.
        batch: Its ``source`` says of which dataset a row is, ``sources`` which of them it has rows of.
    """
    named = batch.get("sources", ())
    rows = batch["source"].repeat_interleave(len(error) // len(batch["source"])) if named else None
    return {f"loss/{name}": mean_error(error.detach(), valid & (rows == i)[:, None, None]) for i, name in named}


def euler(
    velocity: Callable[[Float[Tensor, "b h a"], Time], Float[Tensor, "b h a"]],
    noise: Float[Tensor, "b h a"],
    steps: int = 10,
    prefix: ActionPrefix | None = None,
) -> Float[Tensor, "b h a"]:
    """Integrate dx/dt = velocity(x, t) from t = 1 to t = 0 in equal steps.

    With ``prefix``, its tokens are at t = 0 throughout, and x is set to the prefix before *and after* every step:
    without the second, the last update would move the prefix.

    Args:
        velocity: Velocity field; called with time ``[b]``, or ``[b, h]`` when there is a prefix.
        noise: The sample at t = 1.
        steps: Number of evaluations of ``velocity``.
        prefix: Actions to keep; returned bit for bit.
    """
    x, dt = noise, 1.0 / steps
    if prefix is not None:
        x = torch.where(prefix.mask[..., None], prefix.actions, x)
    for i in range(steps):
        t = torch.full(noise.shape[:1], 1.0 - i * dt, dtype=noise.dtype, device=noise.device)
        if prefix is not None:
            t = torch.where(prefix.mask, 0.0, t[:, None])
        x = x - dt * velocity(x, t)
        if prefix is not None:
            x = torch.where(prefix.mask[..., None], prefix.actions, x)
    return x
