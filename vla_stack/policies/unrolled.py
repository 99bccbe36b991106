"""Sampling by the native expert at a fixed schedule, for inference: the same function in a fraction of the operations.

For a few dozen tokens an operation costs more to call than to compute. (A traced graph is for ONNX Runtime, which has
others: ``unrolled_onnx.py``.) What depends on time and weights alone is computed once a policy: scales and gates of
every norm, and the shifts as what the next matrix makes of them, a bias. What depends on the observation alone (mask,
rotary angles, the prefix's keys and values) is computed once a chunk, and the action tokens' keys and values are
written behind the prefix's. Where positions are rotary, a second copy of the rows of queries and keys gives them turned
by a quarter, so that a rotation is a sum of two products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vla_stack.policies import unrolled_onnx
from vla_stack.policies.expert import ActionExpert, AdaptiveNorm, ExpertBlock
from vla_stack.policies.flow import ActionPrefix
from vla_stack.policies.transformer import PrefixContext, attention

ALIGNED = 16  # entries: a row of a mask that begins at a multiple of it is read by fused kernels as it is


class Layer(NamedTuple):
    """Matrices of an :class:`~vla_stack.policies.expert.ExpertBlock`, [in, out]; of ``qkv`` see :func:`with_turned`."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    down_bias: Tensor


class Cache(NamedTuple):
    """Keys and values of a layer, each [b, kv_heads, m + n, head_dim], and where both of the action tokens go,
    [b, n, 2 kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor
    own: Tensor


class Angles(NamedTuple):
    """Cosine and sine for queries, keys and values of every token, float32 [b, n, heads + 2 kv_heads, head_dim], and
    room for turned queries [b, n, heads, head_dim]. Values are not turned: their angle is 0."""

    cos: Tensor
    sin: Tensor
    queries: Tensor


class Schedule(NamedTuple):
    """What the norms of an expert make of time, a row [1, e] a step, and one for given, clean actions.

    A row holds for every norm its scale, the bias of the matrix behind it, and its gate; the last norm has none, and
    what follows it, in float32, has a row of its own.
    """

    noisy: list[tuple[Tensor, Tensor]]
    clean: tuple[Tensor, Tensor]


class UnrolledExpert:
    """An expert and the schedule of its Euler steps; its weights must not change any more.

    Args:
        expert: With the flow's head, and attention among all action tokens.
        schedule: From :func:`schedule`.
    """

    def __init__(self, expert: ActionExpert, schedule: Schedule) -> None:
        assert expert.sink is None
        first = expert.blocks[0].attention
        self.split, self.rotary = first.split, expert.rotary
        self.head_dim = len(first.qkv.weight) // sum(self.split)
        self.layers = [
            Layer(
                projection(block, expert).T,
                block.attention.out.weight.T,
                block.mlp[0].weight.T,
                block.mlp[2].weight.T,
                block.mlp[2].bias,
            )
            for block in expert.blocks
        ]
        kind = self.layers[0].out.dtype
        *self.noisy, self.clean = [(row.to(kind), last) for row, last in (*schedule.noisy, schedule.clean)]
        self.sizes = []
        for layer in self.layers:
            width, hidden = layer.up.shape
            self.sizes += [width, layer.qkv.shape[1], width, width, hidden, width]
        self.embed, self.head, self.width = expert.embed.weight.T, expert.head.weight.T, expert.norm.width
        positions = expert.embed.bias
        self.positions = positions if expert.positions is None else expert.positions + positions

    @torch.no_grad()
    def sample(
        self, context: PrefixContext, noise: Float[Tensor, "b h a"], prefix: ActionPrefix | None = None
    ) -> Float[Tensor, "b h a"]:
        """What :func:`vla_stack.policies.flow.euler` makes of the expert's velocity."""
        if torch.compiler.is_exporting():
            return unrolled_onnx.sample(self, context, noise, prefix)
        b, n, _ = noise.shape
        mask = additive_padded(F.pad(context.mask, (0, n), value=True), self.embed.dtype)
        caches = [self._cache(k, v, n) for k, v in context.keys_values]
        angles = self._angles(context.mask, n)
        positions = self.positions if self.positions.ndim == 1 else self.positions[:n].repeat(b, 1)
        x = noise.reshape(b * n, -1)
        if prefix is not None:
            given, actions = prefix.mask.reshape(-1, 1), prefix.actions.reshape(b * n, -1)
            x = torch.where(given, actions, x)
        for rows in self.noisy:
            if prefix is not None:
                rows = tuple(torch.where(given, c, r) for c, r in zip(self.clean, rows, strict=True))
            x = torch.sub(x, self.velocity(x, rows, positions, mask, caches, angles), alpha=1.0 / len(self.noisy))
            if prefix is not None:
                x = torch.where(given, actions, x)
        return x.view(noise.shape)

    def velocity(
        self,
        x: Float[Tensor, "m a"],
        rows: tuple[Tensor, Tensor],
        positions: Tensor,
        mask: Tensor,
        caches: list[Cache],
        angles: Angles | None,
    ) -> Float[Tensor, "m a"]:
        """One evaluation for all action tokens of a batch; writes their keys and values into ``caches``."""
        b, tokens = mask.shape[0], x.shape[0]
        heads, kv_heads, _ = self.split
        n = tokens // b
        parts = iter(rows[0].split(self.sizes, dim=1))
        kind = self.embed.dtype
        y = torch.addmm(positions, x if x.dtype == kind else x.to(kind), self.embed)
        for layer, (keys, values, own) in zip(self.layers, caches, strict=True):
            scale, bias, gate = next(parts), next(parts), next(parts)
            qkv = torch.addmm(bias, normed(y, scale), layer.qkv).view(b, n, -1, self.head_dim)
            if angles is None:
                own.copy_(qkv[:, :, heads:])
                queries = by_group(qkv[:, :, :heads], kv_heads)
            else:
                queries = by_group(turned(qkv, heads, angles, own), kv_heads)
            read = attention(queries, keys, values, mask)
            y = torch.addcmul(y, gate, torch.mm(by_token(read, n), layer.out))
            scale, bias, gate = next(parts), next(parts), next(parts)
            hidden = F.gelu(torch.addmm(bias, normed(y, scale), layer.up), approximate="tanh")
            y = torch.addcmul(y, gate, torch.addmm(layer.down_bias, hidden, layer.down))
        scale, bias = rows[1].split((self.width, self.head.shape[1]), dim=1)
        return torch.addmm(bias, normed(y if y.dtype == scale.dtype else y.to(scale.dtype), scale), self.head)

    def _cache(self, k: Tensor, v: Tensor, n: int) -> Cache:
        b, kv_heads, m, head_dim = k.shape
        both = k.new_empty(b, 2 * kv_heads, m + n, head_dim)
        torch.cat((k, v), dim=1, out=both[:, :, :m])
        return Cache(both[:, :kv_heads], both[:, kv_heads:], both[:, :, m:].transpose(1, 2))

    def _angles(self, mask: Bool[Tensor, "b m"], n: int) -> Angles | None:
        if self.rotary is None:
            return None
        heads, kv_heads, _ = self.split
        steps = mask.sum(1, keepdim=True) + torch.arange(n, device=mask.device)
        cos, sin = (angle.transpose(1, 2) for angle in self.rotary(steps))  # [b, n, 1, head_dim]
        return angles_of(cos, sin, heads, kv_heads, self.embed.dtype)


def schedule(expert: ActionExpert, steps: int, kind: torch.dtype) -> Schedule:
    """Of ``steps`` Euler steps from noise, for layers that will compute in ``kind``; itself as exact as the weights."""
    times = torch.tensor([1.0 - i / steps for i in range(steps)] + [0.0]).to(expert.head.weight)
    condition, parts = expert.time(times[:, None])[:, 0], []

    def read(norm: AdaptiveNorm, matrix: Tensor, bias: Tensor | None, kind: torch.dtype = kind) -> list[Tensor]:
        scale, shift, gate = norm.modulation(condition).chunk(3, dim=-1)
        root = 1.0 if is_fused(times.device, kind) else norm.width**0.5
        return [(1.0 + scale) * root, F.linear(shift, matrix, bias), gate]

    for block in expert.blocks:
        parts += read(block.norm1, projection(block, expert), None)
        parts += read(block.norm2, block.mlp[0].weight, block.mlp[0].bias)
    last = read(expert.norm, expert.head.weight, expert.head.bias, times.dtype)[:2]
    *noisy, clean = zip(torch.cat(parts, dim=1).split(1), torch.cat(last, dim=1).split(1), strict=True)
    return Schedule(noisy, clean)


def is_fused(device: torch.device, kind: torch.dtype) -> bool:
    """Whether a norm is one operation. In float32 on a CPU three small ones take half as long."""
    return device.type == "cuda" or kind == torch.bfloat16


def normed(x: Float[Tensor, "m d"], scale: Float[Tensor, "m_or_1 d"]) -> Float[Tensor, "m d"]:
    """An RMS norm times ``scale``, which includes the root of the width where the norm is not fused; the epsilon, for
    tokens that are all zero, is then left out."""
    if not is_fused(x.device, x.dtype):
        return x / torch.linalg.vector_norm(x, dim=1, keepdim=True) * scale
    return F.rms_norm(x, (x.shape[1],), scale[0]) if scale.shape[0] == 1 else F.rms_norm(x, (x.shape[1],)) * scale


def projection(block: ExpertBlock, expert: ActionExpert) -> Float[Tensor, "r d"]:
    """The matrix of a layer's queries, keys and values."""
    qkv, split = block.attention.qkv.weight, block.attention.split
    return qkv if expert.rotary is None else with_turned(qkv, split, len(qkv) // sum(split))


def with_turned(qkv: Float[Tensor, "r d"], split: tuple[int, int, int], head_dim: int) -> Float[Tensor, "2r d"]:
    """A matrix of queries, keys and values with the same rows again, those of queries and keys as a quarter turn of
    rotary positions has them: halves exchanged, the first one negative."""
    turning = qkv.unflatten(0, (-1, head_dim))[: split[0] + split[1]]
    first, second = turning.chunk(2, dim=1)
    return torch.cat((qkv, torch.cat((-second, first), dim=1).flatten(0, 1), qkv[-split[2] * head_dim :]))


def angles_of(cos: Tensor, sin: Tensor, heads: int, kv_heads: int, kind: torch.dtype) -> Angles:
    """:class:`Angles` of cosine and sine [b, n, 1, head_dim]; ``kind`` is that of the queries."""
    b, n, _, head_dim = cos.shape
    straight, turning = (b, n, kv_heads, head_dim), (-1, -1, heads + kv_heads, -1)
    cos = torch.cat((cos.expand(turning), cos.new_ones(straight)), dim=2)
    sin = torch.cat((sin.expand(turning), sin.new_zeros(straight)), dim=2)
    return Angles(cos, sin, cos.new_empty(b, n, heads, head_dim, dtype=kind))


def turned(qkv: Float[Tensor, "b n e d"], heads: int, angles: Angles, own: Tensor) -> Float[Tensor, "b n heads d"]:
    """Queries of what :func:`with_turned` gives, at their positions; keys and values go to ``own``."""
    cos, sin, queries = angles
    last = cos.shape[2]
    turn = qkv[:, :, last:] * sin
    if torch.compiler.is_compiling():  # a compiler joins operations by itself, and refuses to write into a view
        both = torch.addcmul(turn, qkv[:, :, :last], cos).to(queries.dtype)
        own.copy_(both[:, :, heads:])
        return both[:, :, :heads]
    torch.addcmul(turn[:, :, heads:], qkv[:, :, heads:last], cos[:, :, heads:], out=own)
    return torch.addcmul(turn[:, :, :heads], qkv[:, :, :heads], cos[:, :, :heads], out=queries)


def by_group(queries: Float[Tensor, "b n heads d"], kv_heads: int) -> Tensor:
    """Queries as rows [b, kv_heads, n * group, d] of the head whose keys they read."""
    if queries.shape[2] == kv_heads:
        return queries.transpose(1, 2)
    return queries.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)


def by_token(read: Float[Tensor, "b kv_heads r d"], n: int) -> Float[Tensor, "m e"]:
    """Inverse of :func:`by_group`, all heads of a token in one row."""
    if read.shape[2] == n:
        return read.transpose(1, 2).reshape(read.shape[0] * n, -1)
    return read.unflatten(2, (n, -1)).transpose(1, 2).reshape(read.shape[0] * n, -1)


def additive_padded(mask: Bool[Tensor, "b m"], dtype: torch.dtype) -> Float[Tensor, "b 1 1 m"]:
    """What is added to the scores of every query, in rows of :data:`ALIGNED` entries."""
    m = mask.shape[1]
    rows = torch.zeros(mask.shape[0], 1, 1, -(-m // ALIGNED) * ALIGNED, dtype=dtype, device=mask.device)
    return rows[..., :m].masked_fill_(~mask[:, None, None], torch.finfo(dtype).min)
