"""Instructions to tokens, without vocabulary files.

A word is its CRC-32 modulo the number of buckets: the same on every machine, nothing to download, and any language that
separates words by anything that is not a letter or digit works. Word order reaches the network by position embeddings.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.policies.transformer import Block

PAD = 0


@lru_cache(maxsize=4096)
def hash_words(instruction: str, buckets: int, length: int) -> tuple[int, ...]:
    """Token ids of an instruction, right-padded with 0 to ``length``.

    Raises:
        UserError: The instruction has more than ``length`` words.
    """
    words = re.findall(r"\w+", instruction.lower())
    if len(words) > length:
        raise UserError(
            f"instruction of {len(words)} words ('{instruction[:40]}...'), the policy reads {length}",
            "shorten it, or train with a larger max_words",
        )
    ids = [1 + zlib.crc32(word.encode()) % (buckets - 1) for word in words]
    return tuple(ids + [PAD] * (length - len(ids)))


class TextEncoder(nn.Module):
    """Word embeddings and positions through one transformer block.

    Args:
        buckets: Rows of the embedding table.
        length: Words of the longest instruction.
        width: Width of a token.
        heads: Attention heads.
        head_dim: Width of one head.
    """

    def __init__(self, buckets: int, length: int, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(buckets, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.block = Block(width, heads, head_dim)

    def forward(
        self, tokens: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]:
        """Tokens of the words, and their mean as the vector that conditions the image encoders."""
        x = self.block(self.words(tokens) + self.positions[: tokens.shape[1]], mask)
        count = mask.sum(1, keepdim=True).clamp(min=1)
        return x, torch.where(mask[..., None], x, 0.0).sum(1) / count
