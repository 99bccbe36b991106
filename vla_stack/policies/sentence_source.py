"""A sentence encoder of Hugging Face's hub as the graph that :mod:`~vla_stack.policies.sentence_encoder` runs."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_stack.errors import UserError, first_line
from vla_stack.policies.onnx_write import Graph, shrink, write
from vla_stack.policies.sentence_encoder import IDS, MOST, VECTORS, shipped_encoder, shipped_encoders
from vla_stack.policies.tokenizer_source import read_tokenizer


class Vectors(nn.Module):
    """Tokens of one text to the states behind the last layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> Tensor:
        (ids,) = given
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state


@lru_cache(maxsize=4)
def read_encoder(source: str) -> tuple[bytes, bytes]:
    """Graph and tokenizer of a sentence encoder.

    Args:
        source: Name of one that the package brings, or the local directory or hub repository of one of the kind of
            BERT, as those of sentence-transformers.

    Raises:
        UserError: There is none, or it is of another kind.
    """
    if source in shipped_encoders():
        return shipped_encoder(source)
    from transformers import AutoModel

    try:
        model = AutoModel.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False, attn_implementation="eager", dtype=torch.float32
        )
        ids = torch.arange(2, 9)[None] % model.config.vocab_size
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "encoder.onnx"
            write(Graph(Vectors(model.eval()), (ids,), (IDS,), (VECTORS,), axis=1, most=MOST), file)
            shrink(file)
            return file.read_bytes(), read_tokenizer(source)
    except (OSError, ValueError, AttributeError, UserError) as e:
        remedy = f"give a local directory of one like sentence-transformers', or {', '.join(shipped_encoders())}"
        raise UserError(f"no sentence encoder can be read from '{source}': {first_line(e)}", remedy) from None
