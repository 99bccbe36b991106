"""Instructions to vectors by a frozen sentence encoder, without torch.

A policy's demonstrations hold a few dozen words. What a sentence encoder has read (its maker's, for all-MiniLM-L6-v2 a
billion pairs of sentences) holds most of a language: there a word that no demonstration had lies near those that mean
the same, in its context. So it is kept as it is, and the policy learns what its vectors mean on the robot.

The encoder is two byte strings, its graph for ONNX Runtime and its ``tokenizer.json``: those that the package brings,
or those in the state of a policy's preprocessor. A sentence is encoded once a process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError, first_line
from vla_stack.policies.words import tokenizer

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "sentence_encoders"
GRAPH, TOKENIZER = "encoder.onnx", "tokenizer.json"
WORD = re.compile(r"\w+(?:'\w+)*")
MOST = 128  # vectors of a text
IDS, VECTORS = "ids", "vectors"  # what goes in and comes out: int64 [1, n], float32 [1, n, d]


def shipped_encoders() -> list[str]:
    """Names of the encoders that the package brings."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{GRAPH}"))


@lru_cache(maxsize=4)
def shipped_encoder(name: str) -> tuple[bytes, bytes]:
    """Graph and tokenizer of an encoder that the package brings.

    Raises:
        UserError: It brings none of that name.
    """
    if name not in shipped_encoders():
        raise UserError(f"there is no sentence encoder '{name}'", f"the package brings {', '.join(shipped_encoders())}")
    return (SHIPPED / name / GRAPH).read_bytes(), (SHIPPED / name / TOKENIZER).read_bytes()


@lru_cache(maxsize=4)
def session(graph: bytes) -> Any:
    """An encoder's graph, on one thread of the CPU.

    Raises:
        UserError: It is no such graph.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    # Nothing is computed in advance, so a sentence takes twice as long, once, and weights stay 8 bits: 60 MB, not 125.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        made = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as e:  # the runtime's exceptions have no public common class
        raise UserError(f"the sentence encoder cannot be run: {first_line(e)}", "copy the policy again") from None
    if [x.name for x in made.get_inputs()] != [IDS] or [y.name for y in made.get_outputs()] != [VECTORS]:
        raise UserError("the sentence encoder is another graph than one of ids to vectors", "copy the policy again")
    return made


def width(graph: bytes) -> int:
    """Entries of a vector, d."""
    return int(session(graph).get_outputs()[0].shape[-1])


@lru_cache(maxsize=4096)
def vectors(graph: bytes, content: bytes, text: str, length: int = MOST) -> NDArray[np.float32]:
    """Vectors [n, d] of a text's sub-words in their context; of an empty text one, that of its end.

    Case and punctuation do not count, as with sub-words of our own.

    Raises:
        UserError: There are more than ``length``, or the encoder cannot be run.
    """
    encoded = tokenizer(content).encode(" ".join(WORD.findall(text)).lower())
    own = ~np.array(encoded.special_tokens_mask, bool)  # without what the encoder puts around a sentence
    if own.sum() > length:
        raise UserError(
            f"instruction of {own.sum()} tokens ('{text.strip()[:40]}...'), the policy reads {length}",
            "shorten it, or train with a larger max_tokens",
        )
    found = session(graph).run([VECTORS], {IDS: np.array([encoded.ids], np.int64)})[0][0]
    return found[own] if own.any() else found[-1:]


def embed(
    graph: bytes, content: bytes, texts: Sequence[str], length: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Vectors [b, length, d] of texts, 0 behind their ends, and which are there [b, length].

    Args:
        graph: The encoder.
        content: Its ``tokenizer.json``.
        texts: What is encoded.
        length: Vectors of the longest one.

    Raises:
        UserError: As :func:`vectors`.
    """
    rows = [vectors(graph, content, text, length) for text in texts]
    out, there = np.zeros((len(rows), length, rows[0].shape[1]), np.float32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        out[i, : len(row)], there[i, : len(row)] = row, True
    return out, there
