"""Text for a pretrained backbone, in its own tokens: prompts of the policy, and image-text pairs for co-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from jaxtyping import Float, Int
from lerobot.configs import FeatureType, PipelineFeatureType, PolicyFeature
from lerobot.lerobot_types import EnvTransition, TransitionKey
from lerobot.processor import ProcessorStep, ProcessorStepRegistry
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.policies.weights import first_line
from vla_stack.schema import OBS_STATE

STATE_BINS = 256
IGNORED = -100  # label of tokens without a loss, as in transformers
TOKENIZER = "tokenizer.json"
STEP = "backbone_tokenizer_processor"


def read_tokenizer(source: str, policy: Path | None = None) -> bytes:
    """Content of ``tokenizer.json`` of a backbone's directory or hub repository.

    Args:
        source: The backbone.
        policy: Directory of a policy to continue from; the tokenizer in its preprocessor comes first.

    Raises:
        UserError: It is not there, or the hub is out of reach.
    """
    for state in sorted(policy.glob(f"policy_pre*{STEP}.safetensors")) if policy else []:
        return load_file(state)["tokenizer"].numpy().tobytes()
    try:
        path = Path(source) / TOKENIZER if Path(source).is_dir() else Path(hf_hub_download(source, TOKENIZER))
        return path.read_bytes()
    except (OSError, ValueError) as e:
        what = f"cannot read {TOKENIZER} of the backbone '{source}': {first_line(e)}"
        raise UserError(what, "give a local directory of the backbone") from None


@ProcessorStepRegistry.register(STEP)
@dataclass
class BackboneTokenizerStep(ProcessorStep):
    """Adds ``observation.language.tokens`` int64 [b, n] and their mask, from the instruction ``task``.

    The tokenizer itself is the step's state, so a saved policy needs neither the backbone's directory nor the hub.

    Attributes:
        length: Tokens of the longest prompt.
        with_state: Write the state, normalised to [-1, 1], into the prompt (pi0.5, 2025).
        content: ``tokenizer.json``; empty where a saved state is about to bring it.
    """

    length: int = 48
    with_state: bool = False
    content: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.content:
            self._use(self.content)

    def _use(self, content: bytes) -> None:
        self.content, self.tokenizer = content, Tokenizer.from_str(content.decode())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        task = (transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}).get("task")
        if task is None:
            raise UserError("the batch has no 'task'", "give each observation its instruction")
        tasks = [task] if isinstance(task, str) else list(task)
        observation = dict(transition.get(TransitionKey.OBSERVATION) or {})
        state = observation[OBS_STATE]
        ids, mask = self.encode(prompts(tasks, state if self.with_state else None))
        observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK] = (
            x.to(state.device, non_blocking=True) for x in (ids, mask)
        )
        return {**transition, TransitionKey.OBSERVATION: observation}

    def encode(self, texts: list[str]) -> tuple[Int[Tensor, "b n"], Tensor]:
        """Token ids, right-padded to ``length``, and which of them are there.

        Raises:
            UserError: A text is longer.
        """
        rows = [row.ids for row in self.tokenizer.encode_batch(texts)]
        longest = max(range(len(rows)), key=lambda i: len(rows[i]))
        if len(rows[longest]) > self.length:
            raise UserError(
                f"prompt of {len(rows[longest])} tokens ('{texts[longest][:40]}...'), the policy reads {self.length}",
                "shorten the instruction, or train with a larger max_tokens",
            )
        return padded(rows, 0, self.length), padded([[1] * len(row) for row in rows], 0, self.length).bool()

    def get_config(self) -> dict[str, Any]:
        return {"length": self.length, "with_state": self.with_state}

    def state_dict(self) -> dict[str, Tensor]:
        return {"tokenizer": torch.from_numpy(np.frombuffer(self.content, np.uint8).copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._use(state["tokenizer"].cpu().numpy().tobytes())

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        language = PolicyFeature(type=FeatureType.LANGUAGE, shape=(self.length,))
        observation = features[PipelineFeatureType.OBSERVATION]
        observation[OBS_LANGUAGE_TOKENS] = observation[OBS_LANGUAGE_ATTENTION_MASK] = language
        return features


def prompts(tasks: Sequence[str], state: Float[Tensor, "b s"] | None) -> list[str]:
    """Prompt of each instruction; with ``state`` in [-1, 1], as 256 bins a dimension, in the words of pi0.5."""
    if state is None:
        return [f"{task.strip()}\n" for task in tasks]
    bins = ((state.cpu().float().clamp(-1.0, 1.0) + 1.0) * (STATE_BINS / 2)).long().clamp(max=STATE_BINS - 1)
    rows = (" ".join(map(str, row)) for row in bins.tolist())
    return [f"Task: {task.strip()}, State: {row};\nAction: " for task, row in zip(tasks, rows, strict=True)]


def padded(rows: list[list[int]], value: int, length: int) -> Int[Tensor, "b n"]:
    """Rows of unequal length as one tensor, filled up on the right."""
    return torch.tensor([row + [value] * (length - len(row)) for row in rows], dtype=torch.int64)


def image_text_pairs(
    content: bytes, backbone: dict[str, Any], questions: Sequence[str], answers: Sequence[str]
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Token ids and labels of one image, a question and its answer a row, for ``VlaPolicy.language_loss``.

    The layout is the backbone's own: SmolVLM's image between its marker tokens in a user's turn, PaliGemma's image,
    question and newline. The answer and the end token carry labels.

    Args:
        content: ``tokenizer.json``: ``BackboneTokenizerStep.content``, or :func:`read_tokenizer` of the backbone.
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
