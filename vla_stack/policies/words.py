"""Instructions to tokens, without torch.

Words are split into sub-words by a byte-level BPE (Sennrich et al. 2016) that is learnt from the instructions of the
training data: a frequent word is one token, a word that was never seen is made of known pieces, and no text is out of
vocabulary, for the pieces begin at single bytes. Case and punctuation are dropped. The tokenizer is the content of a
``tokenizer.json`` of Hugging Face's ``tokenizers``, kept as a tensor in the state of the policy's preprocessor.

The earlier way, ``text=hash``, takes a word's CRC-32 modulo the number of buckets.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vla_stack.errors import UserError

PAD = 0


def prompt(instruction: str) -> str:
    """What of an instruction is split into sub-words."""
    return f"{instruction.strip()}\n"


def learn_tokenizer(instructions: Iterable[str], vocabulary: int) -> bytes:
    """Content of a ``tokenizer.json`` whose pieces are those of some instructions; the same whatever their order.

    Args:
        instructions: Texts of the training data; without any, each byte is a token.
        vocabulary: Most tokens that it may know, padding and the 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    words = normalizers.Replace(Regex(r"\W+"), " ")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), words, normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sorted(set(instructions)), trainer)
    return tokenizer.to_str().encode()


@lru_cache(maxsize=256)
def tokenizer(content: bytes, share: float = 1.0) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, with the first ``share`` of its merges alone."""
    if share < 1.0:
        tree = json.loads(content)
        merges = tree["model"]["merges"]
        tree["model"]["merges"] = merges[: int(share * len(merges))]
        content = json.dumps(tree).encode()
    made = Tokenizer.from_str(content.decode())
    made.no_padding()
    made.no_truncation()
    return made


@lru_cache(maxsize=1 << 16)
def token_ids(content: bytes, text: str, share: float = 1.0) -> tuple[int, ...]:
    """Tokens of a text by :func:`tokenizer`."""
    return tuple(tokenizer(content, share).encode(text).ids)


def sub_words(content: bytes, texts: Sequence[str], length: int, share: float = 1.0) -> list[tuple[int, ...]]:
    """Tokens of texts by :func:`tokenizer`; of one that is too long by that share of the merges, by all of them.

    Raises:
        UserError: A text has more than ``length`` tokens.
    """
    rows = [token_ids(content, text, share) for text in texts]
    rows = [row if len(row) <= length else token_ids(content, text) for row, text in zip(rows, texts, strict=True)]
    longest = max(range(len(rows)), key=lambda i: len(rows[i]))
    if len(rows[longest]) > length:
        raise UserError(
            f"instruction of {len(rows[longest])} tokens ('{texts[longest].strip()[:40]}...'), "
            f"the policy reads {length}",
            "shorten it, or train with a larger max_tokens",
        )
    return rows


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
