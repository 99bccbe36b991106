"""The action expert: a transformer of its own weights that reads the prefix and denoises the action chunk.

Each layer's queries attend at once to the cached keys and values of the same prefix layer and to all action tokens, as
in pi0 (Black et al. 2024). Time enters through adaptive RMS norms, as in pi0.5 (2025) after DiT (Peebles and Xie 2023):
every norm has a scale, a shift and a gate that are linear in the time embedding and start at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vla_stack.policies.action_attention import NOISY_OFFSET, block_steps, same_block, sink_and_window
from vla_stack.policies.contract import Time
from vla_stack.policies.flow import per_token
from vla_stack.policies.transformer import Attention, PrefixContext, Rotary, mlp, rotate

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0


Rotation = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Geometry:
    """What the expert's layers share with the prefix's.

    Attributes:
        layers: Layers that have keys and values.
        heads: Query heads.
        head_dim: Width of one head.
        kv_heads: Heads of keys and values.
        frequencies: Of rotary positions, float [head_dim / 2]; None: the prefix's keys carry no positions.
    """

    layers: int
    heads: int
    head_dim: int
    kv_heads: int
    frequencies: Tensor | None = None


class TimeEmbedding(nn.Module):
    """Sine and cosine features of t over periods 4e-3 ... 4, through a two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        periods = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** torch.linspace(0.0, 1.0, width // 2)
        self.register_buffer("frequencies", 2.0 * math.pi / periods, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, t: Float[Tensor, "b h"]) -> Float[Tensor, "b h d"]:
        # At least float32, outside autocast: the fastest period is finer than bfloat16 resolves.
        phase = t.to(torch.promote_types(t.dtype, torch.float32))[..., None] * self.frequencies
        return self.mlp(torch.cat((phase.sin(), phase.cos()), dim=-1))


class AdaptiveNorm(nn.Module):
    """RMS norm with scale, shift and gate from the time embedding; identity with a closed gate at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.modulation = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Float[Tensor, "b h d"], condition: Float[Tensor, "b h_or_1 d"]) -> tuple[Tensor, Tensor]:
        scale, shift, gate = self.modulation(condition).chunk(3, dim=-1)
        return F.rms_norm(x, (self.width,)) * (1.0 + scale) + shift, gate


class ExpertBlock(nn.Module):
    """One layer of the expert."""

    def __init__(self, width: int, geometry: Geometry) -> None:
        super().__init__()
        self.norm1, self.norm2 = AdaptiveNorm(width), AdaptiveNorm(width)
        self.attention = Attention(width, geometry.heads, geometry.head_dim, geometry.kv_heads)
        self.mlp = mlp(width)

    def forward(
        self, x: Tensor, condition: Tensor, prefix_k: Tensor, prefix_v: Tensor, mask: Tensor, rotary: Rotation = None
    ) -> Tensor:
        y, gate = self.norm1(x, condition)
        q, k, v = self.attention.project(y)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        k, v = torch.cat((prefix_k, k), dim=2), torch.cat((prefix_v, v), dim=2)
        x = x + gate * self.attention.attend(q, k, v, mask)
        y, gate = self.norm2(x, condition)
        return x + gate * self.mlp(y)


class ActionExpert(nn.Module):
    """States of an action chunk given the prefix; ``head`` maps them to what the policy's head predicts.

    Action i has a learnt position of its own, or, where the prefix has rotary positions, the i-th after its last token.

    Args:
        horizon: Longest chunk; shorter ones are accepted.
        action_dim: Entries of one action.
        width: Width of an action token.
        geometry: Layers and heads, as in the prefix.
        window: Action tokens before its own that a token reads, by the Λ-mask (``action_attention.py``), which adds a
            sink at step 0 and shifts the positions of noisy tokens; None: all tokens read all.
    """

    def __init__(
        self, horizon: int, action_dim: int, width: int, geometry: Geometry, window: int | None = None
    ) -> None:
        super().__init__()
        rotary = geometry.frequencies
        rows = horizon if window is None else 1 + horizon + NOISY_OFFSET
        self.embed: nn.Module = nn.Linear(action_dim, width)
        self.positions = nn.Parameter(torch.randn(rows, width) * 0.02) if rotary is None else None
        self.sink = None if window is None else nn.Parameter(torch.randn(width) * 0.02)
        readable = None if window is None else sink_and_window(horizon, window)
        self.register_buffer("readable", readable, persistent=False)
        if window is not None:
            self.register_load_state_dict_pre_hook(from_plain)
        self.rotary = Rotary(rotary) if rotary is not None else None
        self.time = TimeEmbedding(width)
        self.blocks = nn.ModuleList(ExpertBlock(width, geometry) for _ in range(geometry.layers))
        self.norm = AdaptiveNorm(width)
        self.head: nn.Module = nn.Linear(width, action_dim)

    def forward(
        self,
        context: PrefixContext,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Final states of the action tokens, which :attr:`head` maps on; see ``FlowPolicy.action_states``."""
        lengths = (x.shape[1],) if blocks is None else tuple(blocks)
        y, t, own = self.embed(x), per_token(t), None
        steps = torch.arange(x.shape[1], device=x.device)[None]  # [1, n], or [b, n] with a sink
        if len(lengths) > 1:
            own, steps = same_block(lengths, x.device), block_steps(lengths, x.device)[None]
        if self.sink is not None:
            if own is not None or valid is not None:
                raise ValueError("with prefix_attention=lambda the tokens are one whole chunk")
            t = F.pad(t.expand(x.shape[:2]), (1, 0))  # the sink is clean, at step 0
            y = torch.cat((self.sink.to(y).expand(len(x), 1, -1), y), dim=1)
            steps = F.pad(1 + steps, (1, 0)) + NOISY_OFFSET * (t > 0.0)
            own = self.readable[: y.shape[1], : y.shape[1]]
        n, condition = y.shape[1], self.time(t)
        mask = F.pad(context.mask, (0, n), value=True)[:, None]  # [b, 1, m + n]
        if valid is not None:
            mask[:, :, -n:] = valid[:, None]
        if own is not None:
            mask = mask & F.pad(own, (context.mask.shape[1], 0), value=True)
        mask, rotary = additive(mask, y.dtype), None
        if self.positions is not None:
            y = y + self.positions[steps]
        elif self.rotary is not None:
            rotary = self.rotary(context.mask.sum(1, keepdim=True) + steps)
            y = y.to(torch.promote_types(y.dtype, torch.float32))  # what layers add up, also under autocast
        for block, (k, v) in zip(self.blocks, context.keys_values, strict=True):
            y = block(y, condition, k, v, mask, rotary)
        y, _ = self.norm(y, condition)
        return y[:, -x.shape[1] :]


def from_plain(expert: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Let an expert with the Λ-mask begin with the weights of one without: it keeps its new sink.

    Clean tokens begin with the plain positions, noisy ones with the same ones at the places they are shifted to.
    """
    if f"{prefix}sink" in state or not isinstance(expert, ActionExpert) or expert.sink is None:
        return
    plain = state.get(f"{prefix}positions")
    if plain is not None and expert.positions is not None:
        n = len(expert.positions) - 1 - NOISY_OFFSET
        if plain.shape != (n, *expert.positions.shape[1:]):
            return
        wide = expert.positions.detach().clone()
        wide[1 : 1 + n] = wide[-n:] = plain
        state[f"{prefix}positions"] = wide
    state[f"{prefix}sink"] = expert.sink.detach()


def additive(mask: Bool[Tensor, "b n m"], dtype: torch.dtype) -> Float[Tensor, "b n m"]:
    """A mask as what is added to scores, made once for all layers, each of which would convert a boolean one again."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


class Query(nn.Module):
    """In place of the action embedding: one learnt vector at every step, whatever the actions (pi_reg)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(width) * 0.02)

    def forward(self, x: Float[Tensor, "b n a"]) -> Float[Tensor, "b n d"]:
        return self.vector.expand(*x.shape[:2], -1)
