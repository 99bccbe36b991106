"""The tokenizer that a pretrained model brings."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download

from vla_stack.errors import UserError, first_line
from vla_stack.policies.sentence_encoder import TOKENIZER


def read_tokenizer(source: str) -> bytes:
    """Content of ``tokenizer.json`` of a pretrained model's directory or hub repository.

    Raises:
        UserError: It is not there, or the hub is out of reach.
    """
    try:
        path = Path(source) / TOKENIZER if Path(source).is_dir() else Path(hf_hub_download(source, TOKENIZER))
        return path.read_bytes()
    except (OSError, ValueError) as e:
        what = f"cannot read {TOKENIZER} of the pretrained model '{source}': {first_line(e)}"
        raise UserError(what, "give a local directory of the model") from None
