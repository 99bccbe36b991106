"""Image-text pairs for the co-training of a pretrained backbone, in its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from tokenizers import Tokenizer
from torch import Tensor

from vla_stack.policies.processor_text import padded

IGNORED = -100  # label of tokens without a loss, as in transformers


def image_text_pairs(
    content: bytes, backbone: dict[str, Any], questions: Sequence[str], answers: Sequence[str]
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Token ids and labels of one image, a question and its answer a row, for ``VlaPolicy.language_loss``.

    The layout is the backbone's own: SmolVLM's image between its marker tokens in a user's turn, PaliGemma's image,
    question and newline. The answer and the end token carry labels.

    Args:
        content: ``tokenizer.json``: ``TokenizerStep.content``, or ``tokenizer_source.read_tokenizer`` of the backbone.
        backbone: The policy's ``config.backbone_config``.
        questions: One text a row.
        answers: What to answer.
    """
    tokenizer, vision = Tokenizer.from_str(content.decode()), backbone["vision_config"]
    tokenizer.no_padding()
    tokenizer.no_truncation()
    patches = (vision["image_size"] // vision["patch_size"]) ** 2

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    if backbone["model_type"] == "smolvlm":
        image = [backbone["image_token_id"]] * (patches // backbone["scale_factor"] ** 2)
        before, after = ids(["<|im_start|>User:<fake_token_around_image><global-img>", "<fake_token_around_image>"])
        turn, end = "<end_of_utterance>\nAssistant:", " {}<end_of_utterance>"
        head = before + image + after
    else:
        start = [backbone["text_config"]["bos_token_id"]]
        head, turn, end = [backbone["image_token_index"]] * patches + start, "\n", "{}<eos>"
    asked = [head + row for row in ids([q + turn for q in questions])]
    answered = ids([end.format(a) for a in answers])
    length = max(len(q) + len(a) for q, a in zip(asked, answered, strict=True))
    rows = [q + a for q, a in zip(asked, answered, strict=True)]
    labels = [[IGNORED] * len(q) + a for q, a in zip(asked, answered, strict=True)]
    return padded(rows, 0, length), padded(labels, IGNORED, length)
