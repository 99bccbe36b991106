"""ReinFlow: PPO on a flow policy through the exact likelihood of its noisy Euler chain.

Zhang, Yu, et al., "ReinFlow: Fine-tuning Flow Matching Policy with Online Reinforcement Learning" (2025,
arXiv:2505.22094). The policy's prefix is frozen and computed once a decision, but for pi0's state token, which the
action expert makes: it is made anew. The expert, the noise and a value on detached features are trained. Where the
authors' code and paper differ, this follows the code: the ratio is that of the mean log-probability an entry of the
chain, hence the small clip range. Differences from the code: chunks that end with the episode count the executed steps
alone, a truncated episode bootstraps from its own final observation, the discount is one for each environment step, and
log-probabilities are not clamped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vla_stack.methods.advantages import Experience, advantages, following
from vla_stack.policies import flow
from vla_stack.policies.chain import chain_log_prob, sample_chain, times
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.transformer import PrefixContext

if TYPE_CHECKING:
    from vla_stack.methods.reinflow.recipe import ReinFlow

WIDTH = 128  # of the value's two hidden layers
FREQUENCIES = 4  # of the time that the noise's size is told
HOLD, FINAL = 0.35, 0.3  # learn_decay: share of iterations at the full bound, and how far down it then goes


class NoiseNet(nn.Module):
    """Size of the noise injected after each Euler step, from time and observation, within bounds.

    ``log sigma^2 = lo + (hi - lo)(tanh z + 1)/2`` with lo, hi the logarithms of the squared bounds, so z = 0 gives
    their geometric mean; the last layer starts there. Time enters as fixed sines and cosines, the observation detached:
    noise moves no parameter of the policy.

    Args:
        features: Width of the observation's features.
        shape: Steps and entries of a chunk's noise, (h, w).
        low: Least standard deviation, in normalised action units.
        high: Largest standard deviation. May be changed between iterations, never between a rollout and its update.
        hidden: Widths of the hidden layers.
    """

    def __init__(
        self, features: int, shape: tuple[int, int], low: float, high: float, hidden: tuple[int, ...] = (64, 64)
    ) -> None:
        super().__init__()
        self.low, self.high, self.shape = low, high, shape
        widths = (features + 2 * FREQUENCIES, *hidden)
        layers = [m for a, b in zip(widths, widths[1:], strict=False) for m in (nn.Linear(a, b), nn.Tanh())]
        last = nn.Linear(widths[-1], shape[0] * shape[1])
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*layers, last)
        self.register_buffer("frequencies", 0.5 * math.pi * 2.0 ** torch.arange(FREQUENCIES), persistent=False)

    def forward(self, features: Float[Tensor, "b f"], steps: int) -> Float[Tensor, "b k h w"]:
        """Standard deviations of all steps of a chain of ``steps``."""
        features = features.detach().to(self.network[0].weight.dtype)
        features = F.layer_norm(features, features.shape[-1:])
        phase = times(steps, features)[:, None] * self.frequencies
        time = torch.cat((phase.sin(), phase.cos()), dim=-1)
        rows = torch.cat(
            (features[:, None].expand(-1, steps, -1), time[None].to(features).expand(len(features), -1, -1)), dim=-1
        )
        return self.bounded(self.network(rows)).unflatten(-1, self.shape)

    def bounded(self, z: Tensor) -> Tensor:
        """Standard deviations of the network's raw outputs."""
        lo, hi = math.log(self.low), math.log(self.high)
        return torch.exp(lo + (hi - lo) * 0.5 * (torch.tanh(z) + 1.0))


class Learner(nn.Module):
    """A flow policy, the noise of its chain, a value, and their optimiser.

    Args:
        policy: A flow policy; what its ``encode`` alone reads stays as it is, except what its ``renewed`` reads.
        inputs: Width of the second of :func:`observe`.
        config: Options.
    """

    def __init__(self, policy: Any, inputs: int, config: ReinFlow) -> None:
        super().__init__()
        self.policy, self.config = policy, config
        self.noise = NoiseNet(inputs, (policy.horizon, policy.noise_dim), config.sigma_low, config.sigma_high)
        self.value = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.Mish(), nn.Linear(WIDTH, WIDTH), nn.Mish(), nn.Linear(WIDTH, 1)
        )
        self.noise.requires_grad_(config.sigma_schedule != "fixed")
        self.bounds = (config.sigma_low, config.sigma_high)
        self.actor = [p for m in (policy, self.noise) for p in m.parameters() if p.requires_grad]
        self.critic = list(self.value.parameters())
        groups = [{"params": self.actor, "lr": config.actor_lr}, {"params": self.critic, "lr": config.critic_lr}]
        self.optimizer = torch.optim.AdamW(
            groups, weight_decay=0.0, fused=self.critic[0].device.type in ("cpu", "cuda")
        )
        self._anchor = [copy.deepcopy(policy).requires_grad_(False)] if config.bc else []  # in a list: not a submodule

    # Acting -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(
        self,
        context: PrefixContext,
        inputs: Float[Tensor, "b f"],
        noise: Float[Tensor, "b h w"],
        generator: torch.Generator | Sequence[torch.Generator],
    ) -> Float[Tensor, "b k+1 h w"]:
        """A noisy chain for each observation; see :func:`vla_stack.policies.chain.sample_chain`."""
        return sample_chain(self.policy, context, noise, self.std(inputs), generator, self.config.limit)

    def std(self, inputs: Float[Tensor, "b f"]) -> Float[Tensor, "b k h w"]:
        """Standard deviations of the chain's noise."""
        return self.noise(inputs, self.config.denoising_steps)

    def schedule(self, progress: float) -> None:
        """Set the noise's upper bound for an iteration, at ``progress`` in [0, 1]; before its rollouts."""
        low, high = self.bounds
        if self.config.sigma_schedule == "learn_decay":
            fall = 0.5 - 0.5 * math.cos(math.pi * max(0.0, progress - HOLD) / (1.0 - HOLD))
            self.noise.high = high - FINAL * fall * (high - low)

    def set_noise(self, low: float, high: float) -> None:
        """Other bounds of the noise; never between a rollout and its update."""
        self.bounds = (low, high)
        self.noise.low, self.noise.high = low, high

    # Learning ---------------------------------------------------------------------------------------------------------

    def update(self, data: Experience, generator: torch.Generator, warmup: bool) -> dict[str, float]:
        """One iteration's optimiser steps; in warm-up the value's alone. Returns what to log."""
        c, logged = self.config, []
        with torch.no_grad():
            value, final = self.value(data.inputs)[:, 0], self.value(data.final_inputs)[:, 0]
            advantage = advantages(
                data.reward, data.discount, data.last, value, following(value, final, data.last), c.gae_lambda
            )
            target, old = advantage + value, self.log_probs(data)
        stopped = warmup
        for _ in range(c.epochs):
            for rows in minibatches(len(advantage), c.minibatch, generator):
                self.optimizer.zero_grad()
                error = 0.5 * (self.value(data.inputs[rows])[:, 0] - target[rows]).square().mean()
                loss, metrics = error, {"value_loss": error.detach()}
                if not stopped:
                    actor, more = self.actor_loss(data, rows, old[rows], advantage[rows])
                    loss, metrics = loss + actor, metrics | more
                loss.backward()
                nn.utils.clip_grad_norm_(self.critic, c.clip_norm)
                metrics |= {"loss": loss.detach(), "grad_norm": nn.utils.clip_grad_norm_(self.actor, c.clip_norm)}
                self.optimizer.step()
                logged.append(metrics)
                stopped = stopped or float(metrics.get("kl", 0.0)) > c.target_kl
        keys = dict.fromkeys(k for m in logged for k in m)
        means = {k: sum(float(m[k]) for m in logged if k in m) / sum(k in m for m in logged) for k in keys}
        several = len(advantage) > 1  # one row alone has no unbiased variance
        explained = 1.0 - float((target - value).var(unbiased=several) / target.var(unbiased=several).clamp(min=1e-9))
        return means | {"value": float(value.mean()), "explained": explained, "sigma": float(self.std_mean(data))}

    def actor_loss(
        self, data: Experience, rows: Tensor, old: Float[Tensor, " b"], advantage: Float[Tensor, " b"]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's clipped objective on the chain, its entropy, and the distance to the pretrained policy."""
        c = self.config
        counted, std = self.counted(data, rows), self.std(data.inputs[rows])
        context = renewed(self.policy, data, rows)
        new = mean_entry(chain_log_prob(self.policy, context, data.chain[rows], std, c.limit), counted)
        log_ratio = new - old  # of an entry: the geometric mean of the chain's
        ratio = log_ratio.exp()
        advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=len(advantage) > 1) + 1e-8)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1.0 - c.clip, 1.0 + c.clip) * advantage).mean()
        steps = c.denoising_steps
        entropy = mean_entry(std.log(), counted).mean() * steps / (steps + 1)  # up to a constant
        loss = loss - c.entropy * entropy
        with torch.no_grad():
            entries = counted.sum((1, 2)) * (steps + 1)
            kl = 0.5 * (log_ratio * entries).square().mean()
            clipped = ((ratio - 1.0).abs() > c.clip).float().mean()
        metrics = {"kl": kl, "clipped": clipped, "ratio_off": (ratio.detach() - 1.0).abs().max()}
        if self._anchor:
            distance = self.distance(data, rows)
            loss, metrics = loss + c.bc * distance, metrics | {"bc": distance.detach()}
        return loss, metrics

    def distance(self, data: Experience, rows: Tensor) -> Tensor:
        """Mean squared distance between the pretrained and the present policy's chunk from shared noise."""

        def chunk(policy: Any) -> Tensor:
            context = renewed(policy, data, rows)
            return flow.euler(lambda x, t: policy.velocity(context, x, t), data.chain[rows, 0], steps)

        (anchor,), steps, counted = self._anchor, self.config.denoising_steps, self.counted(data, rows)
        now = chunk(self.policy)
        with torch.no_grad():
            then = chunk(anchor)
        return flow.mean_error((now - then).square(), counted)

    @torch.no_grad()
    def log_probs(self, data: Experience) -> Float[Tensor, " r"]:
        """Log-probability an entry of every stored chain, as the learner computes it before its first step."""
        out = []
        for rows in torch.arange(len(data.executed)).split(self.config.minibatch):
            context, std = renewed(self.policy, data, rows), self.std(data.inputs[rows])
            entries = chain_log_prob(self.policy, context, data.chain[rows], std, self.config.limit)
            out.append(mean_entry(entries, self.counted(data, rows)))
        return torch.cat(out)

    @torch.no_grad()
    def std_mean(self, data: Experience) -> Tensor:
        return self.std(data.inputs[: self.config.minibatch]).mean()

    def counted(self, data: Experience, rows: Tensor) -> Bool[Tensor, "b h w"]:
        """Entries of a chunk that were carried out; padding of actions, dimensions that the robot does not have, and
        steps after the episode's end, were not."""
        _, _, h, w = data.chain.shape
        steps = torch.arange(h, device=data.chain.device) < data.executed[rows, None]
        dims = torch.arange(w, device=data.chain.device) < self.policy.action_dim
        if (has_dim := data.context.has_dim) is not None:
            dims = dims & F.pad(has_dim[rows], (0, w - has_dim.shape[1]))[:, None]
        return steps[:, :, None] & dims


@torch.no_grad()
def observe(policy: Any, batch: dict[str, Any]) -> tuple[PrefixContext, Float[Tensor, "b f"]]:
    """A policy's prefix of a preprocessed batch, and what noise and value read: pooled features and the state."""
    context = policy.encode(batch)
    return context, policy.observed(context, batch)


def renewed(policy: FlowPolicy, data: Experience, rows: Tensor) -> PrefixContext:
    """Stored prefixes as ``policy`` would make them now; training moves a part of pi0's, which has gradients."""
    return policy.renewed(data.context.rows(rows), data.state[rows])


def mean_entry(entries: Float[Tensor, "b n h w"], counted: Bool[Tensor, "b h w"]) -> Float[Tensor, " b"]:
    """Mean of the entries that count, over all points of a chain."""
    chosen = torch.where(counted[:, None], entries, 0.0).sum((1, 2, 3))
    return chosen / (entries.shape[1] * counted.sum((1, 2)))


def minibatches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows in random order, in batches of nearly equal size, none much larger than ``size``, and none of one row alone.

    An advantage that is normalised over one row says nothing.
    """
    count = max(1, min(round(n / size), n // 2))
    return iter(torch.randperm(n, generator=generator).tensor_split(count))
