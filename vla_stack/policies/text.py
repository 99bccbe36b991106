"""Tokens of an instruction to vectors that say in which order they stood; ``words.py`` makes the tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vla_stack.policies.transformer import Block

SMALLEST_VOCABULARY = 257  # padding and every byte
DEPTH = {"hash": 1, "bpe": 2, "frozen": 2}  # blocks: pieces have to become words before words can become a sentence


class TextEncoder(nn.Module):
    """Embeddings of tokens and of their positions through transformer blocks.

    Args:
        rows: Rows of the embedding table; 0 where tokens are vectors of a frozen encoder already.
        given: Entries of these.
        length: Tokens of the longest instruction.
        width: Width of a token.
        heads: Attention heads.
        head_dim: Width of one head.
        depth: Transformer blocks.
    """

    def __init__(self, rows: int, given: int, length: int, width: int, heads: int, head_dim: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width) if rows else nn.Sequential(nn.LayerNorm(given), nn.Linear(given, width))
        # Half the scale of the words: at 0.02 the first hundred steps of training do not tell left from right.
        self.positions = nn.Parameter(torch.randn(length, width) * 0.5)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(depth))

    def forward(
        self, tokens: Int[Tensor, "b n"] | Float[Tensor, "b n e"], mask: Bool[Tensor, "b n"]
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]:
        """The encoded tokens, and their mean as the vector that conditions the image encoders."""
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        count = mask.sum(1, keepdim=True).clamp(min=1)
        return x, torch.where(mask[..., None], x, 0.0).sum(1) / count
