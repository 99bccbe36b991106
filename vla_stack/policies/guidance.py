"""Real-time chunking: a new chunk is sampled so that it continues the one that the robot is executing.

Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025, arXiv:2506.07339), Algorithm 1
and equations 2-5: inpainting by pseudo-inverse guidance (Song et al. 2023), no training. The paper's time tau runs from
noise 0 to data 1; here t = 1 - tau, so its velocity is minus ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vla_stack.policies.contract import Time

Schedule = Literal["exp", "linear", "ones", "zeros"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Velocity = Callable[[Float[Tensor, "b h a"], Time], Float[Tensor, "b h a"]]


class Guide(NamedTuple):
    """What a new chunk should agree with, in the policy's normalised action space.

    Attributes:
        actions: float [b, h, a]; the rest of the running chunk, re-indexed so that step 0 is the new chunk's origin.
        weights: float [b, h]; how firmly, 0 where nothing is known (:func:`soft_mask`).
    """

    actions: Tensor
    weights: Tensor


def soft_mask(horizon: int, delay: int, execute: int, schedule: Schedule = "exp") -> Float[Tensor, " h"]:
    """Weights of the guide's steps (eq. 5).

    1 on the steps that will be over before the new chunk arrives, falling to 0 towards the end of the old chunk, and 0
    on its last ``execute`` steps, which the old chunk does not cover.

    Args:
        horizon: Steps of a chunk, H.
        delay: Steps until the new chunk takes over, d.
        execute: Steps between the origins of the two chunks, s; d <= s <= H - d.
        schedule: How they fall in between: ``exp`` is eq. 5, ``linear`` without its exponential; ``ones`` do not fall,
            ``zeros`` are a hard mask of the first ``delay`` steps. The authors' ablations.
    """
    i = torch.arange(horizon, dtype=torch.float64)
    c = ((horizon - execute - i) / (horizon - execute - delay + 1)).clamp(0.0, 1.0)
    falling = {"exp": c * torch.expm1(c) / (torch.e - 1.0), "linear": c, "ones": torch.ones_like(c)}
    soft = falling.get(schedule, torch.zeros_like(c))
    return torch.where(i < delay, 1.0, torch.where(i < horizon - execute, soft, 0.0)).float()


def guidance_weight(t: float, beta: float) -> float:
    """Strength of the correction at time t, ``min(beta, (1 - tau) / (tau r^2))``; beta where tau = 0 (eq. 2 and 4)."""
    tau = 1.0 - t
    return beta if tau <= 0.0 or t <= 0.0 else min(beta, (tau**2 + t**2) / (tau * t))


def guided_euler(
    velocity: Velocity,
    noise: Float[Tensor, "b h a"],
    guide: Guide,
    steps: int = 10,
    beta: float | None = None,
    jacobian: Literal["full", "identity"] = "full",
    real: Bool[Tensor, "#b 1 a"] | None = None,
) -> Float[Tensor, "b h a"]:
    """Sample a chunk that agrees with ``guide`` where its weights say so.

    At each step the denoised estimate A(x) = x - t v(x, t) is compared with the guide, and the error is carried back to
    x by a vector-Jacobian product through the network (``full``, the paper's form, about 2.5 times the cost of a plain
    step) or as it is (``identity``, dA/dx taken for 1, as cheap as plain sampling).

    Args:
        velocity: Velocity field. For ``full`` it must be differentiable: no ``torch.inference_mode`` around the call.
        noise: The sample at t = 1.
        guide: What to agree with. A sample whose weights are all 0 is sampled as without a guide.
        steps: Euler steps, n.
        beta: Largest guidance weight; n by default. For n = beta the error of a fixed velocity field is removed
            exactly by the first step; larger values overshoot.
        jacobian: How the error is carried back.
        real: Entries of an action that are to agree; the others are padding. None: all.
    """
    x, dt = noise, 1.0 / steps
    weights = guide.weights[..., None].to(noise) * (1.0 if real is None else real.to(noise))
    for i in range(steps):
        t = 1.0 - i * dt
        time = noise.new_full(noise.shape[:1], t)
        if jacobian == "full":
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                v = velocity(point, time)
                error = ((guide.actions - (point - t * v)) * weights).detach()
                (correction,) = torch.autograd.grad(point - t * v, point, error)
            v = v.detach()
        else:
            v = velocity(x, time)
            correction = (guide.actions - (x - t * v)) * weights
        x = x - dt * v + dt * guidance_weight(t, steps if beta is None else beta) * correction
    return x
