"""The prefix transformer and what it shares with the action expert: attention over cached keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]  # each [b, kv_heads, n, head_dim]


@dataclass(frozen=True)
class PrefixContext:
    """Keys and values that the expert reads, layer by layer.

    Attributes:
        keys_values: One pair a layer, each float [b, kv_heads, n, head_dim]; keys are rotated where positions are.
        mask: bool [b, n], false on padding.
        summary: float [b, d], mean of the last layer's tokens.
        has_dim: bool [b, a], true on the action dimensions that each sample's embodiment has; None where all have all.
    """

    keys_values: tuple[KeyValue, ...]
    mask: Tensor
    summary: Tensor
    has_dim: Tensor | None = None

    def repeat(self, n: int) -> PrefixContext:
        """Each observation ``n`` times in a row."""
        return PrefixContext(
            tuple((k.repeat_interleave(n, 0), v.repeat_interleave(n, 0)) for k, v in self.keys_values),
            self.mask.repeat_interleave(n, 0),
            self.summary.repeat_interleave(n, 0),
            None if self.has_dim is None else self.has_dim.repeat_interleave(n, 0),
        )

    def rows(self, index: Tensor) -> PrefixContext:
        """Some of the observations."""
        return PrefixContext(
            tuple((k[index], v[index]) for k, v in self.keys_values),
            self.mask[index],
            self.summary[index],
            None if self.has_dim is None else self.has_dim[index],
        )

    @classmethod
    def joined(cls, parts: Sequence[PrefixContext]) -> PrefixContext:
        """The observations of several contexts of one policy, one after another; shorter ones are padded."""
        longest = max(p.mask.shape[1] for p in parts)

        def padded(p: PrefixContext, x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, longest - p.mask.shape[1]))

        layers = [
            tuple(torch.cat([padded(p, p.keys_values[i][j]) for p in parts]) for j in range(2))
            for i in range(len(parts[0].keys_values))
        ]
        lacking = [p.has_dim for p in parts if p.has_dim is not None]
        return cls(
            tuple((k, v) for k, v in layers),
            torch.cat([F.pad(p.mask, (0, longest - p.mask.shape[1])) for p in parts]),
            torch.cat([p.summary for p in parts]),
            torch.cat(lacking) if lacking else None,
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Shaped[Tensor, "b 1 n_or_1 m"]
) -> Float[Tensor, "b heads n head_dim"]:
    """Scaled dot-product attention; ``mask`` is true on the keys that may be read, or is added to the scores.

    ``k`` and ``v`` may have fewer heads than ``q``, each shared by a group of them (Ainslie et al. 2023).
    """
    if (group := q.shape[1] // k.shape[1]) > 1:
        # The queries of a group become rows of one head, so that the cached keys and values are never copied.
        n = q.shape[2]
        rows = q.unflatten(1, (-1, group)).flatten(2, 3)
        mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, group, 1)
        return attention(rows, k, v, mask).unflatten(2, (group, n)).flatten(1, 2)
    if torch.compiler.is_exporting() or (q.device.type == "cpu" and q.dtype == torch.bfloat16):
        # For a few dozen tokens the fused kernel's bfloat16 backward takes six times as long as plain products. ONNX
        # Runtime has no such kernel in a traced graph.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Rotary(nn.Module):
    """Rotary position embeddings (Su et al. 2021, RoFormer), halves paired as in the Llama and Gemma families.

    Args:
        frequencies: float [head_dim / 2], radians per position.
    """

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def forward(self, positions: Int[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position, each float32 [b, 1, n, head_dim]."""
        angle = positions[:, None, :, None].float() * self.frequencies.float()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Float[Tensor, "b heads n head_dim"], rotary: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` turned by the angles of :class:`Rotary`, in the type of ``x``."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention, split so that keys and values can come from elsewhere or be kept.

    Args:
        width: Width of a token.
        heads: Query heads.
        head_dim: Width of one head.
        kv_heads: Heads of keys and values, a divisor of ``heads``; None: as many.
    """

    def __init__(self, width: int, heads: int, head_dim: int, kv_heads: int | None = None) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        self.split = (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(width, sum(self.split) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def project(self, x: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, heads, n, head_dim], keys and values [b, kv_heads, n, head_dim] of ``x``."""
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, sum(self.split), -1).transpose(1, 2).split(self.split, dim=1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Shaped[Tensor, "b n_or_1 m"]) -> Float[Tensor, "b n d"]:
        """Every query reads the keys that ``mask`` allows it."""
        return self.out(attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2))


def mlp(width: int) -> nn.Sequential:
    """The feed-forward half of a block."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, head_dim)
        self.mlp = mlp(width)

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.forward_cached(x, mask)[0]

    def forward_cached(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> tuple[Tensor, KeyValue]:
        """The block's output, and the keys and values that it computed on the way."""
        q, k, v = self.attention.project(self.norm1(x))
        x = x + self.attention.attend(q, k, v, mask[:, None])
        return x + self.mlp(self.norm2(x)), (k, v)


class PrefixTransformer(nn.Module):
    """Full self-attention over prefix tokens; keeps each layer's keys and values.

    The prefix never reads action tokens, so it is computed once an observation, whatever the number of Euler steps.
    The last layer is keys and values alone: nothing reads what would follow.
    """

    def __init__(self, depth: int, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(depth - 1))
        self.last_norm = nn.RMSNorm(width)
        self.last_kv = nn.Linear(width, 2 * heads * head_dim, bias=False)
        self.heads = heads

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> PrefixContext:
        cache = []
        for block in self.blocks:
            x, kv = block.forward_cached(x, mask)
            cache.append(kv)
        x = self.last_norm(x)
        k, v = self.last_kv(x).view(*x.shape[:2], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        count = mask.sum(1, keepdim=True)
        summary = torch.where(mask[..., None], x, 0.0).sum(1) / count
        return PrefixContext((*cache, (k, v)), mask, summary)
