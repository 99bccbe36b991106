"""The processor step that turns instructions into tokens, whose state is the tokenizer itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors.torch import load_file
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    EnvTransition,
    FeatureType,
    PipelineFeatureType,
    PolicyFeature,
    ProcessorStep,
    ProcessorStepRegistry,
    TransitionKey,
)
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.directory import not_on_hub
from vla_stack.policies.sentence_encoder import embed, shipped_encoder, shipped_encoders, width
from vla_stack.policies.tokenizer_source import read_tokenizer
from vla_stack.policies.words import PAD, hash_words, learn_tokenizer, prompt, sub_words
from vla_stack.schema import OBS_STATE

Features = dict[PipelineFeatureType, dict[str, PolicyFeature]]

STATE_BINS = 256
STEP, FROZEN = "text_tokenizer_processor", "frozen_text_processor"
LEVELS = 64  # of how fine words are split in training
SCRAMBLE = 2654435761  # Knuth's multiplier: neighbouring frames fall on unlike levels


@ProcessorStepRegistry.register(STEP)
@dataclass
class TokenizerStep(ProcessorStep):
    """Adds ``observation.language.tokens`` int64 [b, n] and their mask, from the instruction ``task``.

    The tokenizer itself is the step's state, so a saved policy needs neither its training data nor a backbone's
    directory nor the hub.

    Attributes:
        length: Tokens of the longest instruction.
        with_state: Write the state, normalised to [-1, 1], into the instruction (pi0.5, 2025).
        dropout: Split the words of this share of a dataset's batches (which have ``index``) finer than need be, so that
            the small pieces are learnt of which unseen words are made, as by BPE-dropout (Provilkov et al. 2020). A
            batch is split in one way, so that its sentences stay alike and short, and that follows from its first
            frame: it is the same after a resume.
        content: ``tokenizer.json``; empty where a saved state is about to bring it.
    """

    length: int = 32
    with_state: bool = False
    dropout: float = 0.0
    content: bytes = field(default=b"", repr=False)

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        beside = transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}
        tasks = _tasks(beside)
        observation = dict(transition.get(TransitionKey.OBSERVATION) or {})
        state, frames = observation[OBS_STATE], beside.get("index")
        share = share_of(int(frames.reshape(-1)[0]), self.dropout) if frames is not None else 1.0
        ids, mask = self.encode(prompts(tasks, state if self.with_state else None), share)
        observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK] = (
            x.to(state.device, non_blocking=True) for x in (ids, mask)
        )
        return {**transition, TransitionKey.OBSERVATION: observation}

    def encode(self, texts: Sequence[str], share: float = 1.0) -> tuple[Int[Tensor, "b n"], Tensor]:
        """Token ids, right-padded to ``length``, and which of them are there.

        A text that is too long by that share of the merges is split by all of them.

        Raises:
            UserError: A text is longer.
        """
        rows = sub_words(self.content, texts, self.length, share)
        return padded(rows, PAD, self.length), padded([[1] * len(row) for row in rows], 0, self.length).bool()

    def get_config(self) -> dict[str, Any]:
        return {"length": self.length, "with_state": self.with_state, "dropout": self.dropout}

    def state_dict(self) -> dict[str, Tensor]:
        return {"tokenizer": torch.from_numpy(np.frombuffer(self.content, np.uint8).copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.content = state["tokenizer"].cpu().numpy().tobytes()

    def transform_features(self, features: Features) -> Features:
        return _with_language(features, self.length)


@ProcessorStepRegistry.register("hash_tokenizer_processor")
@dataclass
class HashTokenizerStep(ProcessorStep):
    """Adds ``observation.language.tokens`` int64 [b, n] and their mask, from the instruction ``task``.

    Attributes:
        buckets: Size of the hash's range.
        length: Words of the longest instruction.
    """

    buckets: int = 2048
    length: int = 16

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        tasks = _tasks(transition.get(TransitionKey.COMPLEMENTARY_DATA) or {})
        rows = torch.tensor([hash_words(t, self.buckets, self.length) for t in tasks], dtype=torch.int64)
        observation = dict(transition.get(TransitionKey.OBSERVATION) or {})
        tokens = rows.to(observation[OBS_STATE].device, non_blocking=True)
        observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK] = tokens, tokens != PAD
        return {**transition, TransitionKey.OBSERVATION: observation}

    def get_config(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "length": self.length}

    def transform_features(self, features: Features) -> Features:
        return _with_language(features, self.length)


@ProcessorStepRegistry.register(FROZEN)
@dataclass
class FrozenTextStep(ProcessorStep):
    """Adds ``observation.language.tokens`` float32 [b, n, d] and their mask, vectors of the instruction ``task``.

    What is encoded is remembered, so that a sentence costs a policy nothing from the second time on. The encoder is the
    step's state, unless it is one that the package brings.

    Attributes:
        length: Vectors of the longest instruction.
        shipped: Name of the encoder that the package brings; empty of another one.
        graph: The encoder.
        content: Its ``tokenizer.json``; these two are empty where a saved state is about to bring them.
    """

    length: int = 32
    shipped: str = ""
    graph: bytes = field(default=b"", repr=False)
    content: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.shipped:
            self.graph, self.content = shipped_encoder(self.shipped)

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        tasks = _tasks(transition.get(TransitionKey.COMPLEMENTARY_DATA) or {})
        observation = dict(transition.get(TransitionKey.OBSERVATION) or {})
        device = observation[OBS_STATE].device
        observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK] = (
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in embed(self.graph, self.content, tasks, self.length)
        )
        return {**transition, TransitionKey.OBSERVATION: observation}

    def get_config(self) -> dict[str, Any]:
        return {"length": self.length, "shipped": self.shipped}

    def state_dict(self) -> dict[str, Tensor]:
        parts = {} if self.shipped else {"graph": self.graph, "tokenizer": self.content}
        return {name: torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.graph, self.content = (state[name].cpu().numpy().tobytes() for name in ("graph", "tokenizer"))

    def transform_features(self, features: Features) -> Features:
        return _with_language(features, self.length, width(self.graph))


def share_of(frame: int, dropout: float) -> float:
    """Share of the merges by which the instructions of a batch are split in training that begins with ``frame``: of
    :data:`LEVELS` lesser shares each for as many of ``dropout`` of the frames, all for the others."""
    at = frame * SCRAMBLE % 2**32 / 2**32  # in [0, 1)
    return int(at / dropout * LEVELS) / LEVELS if at < dropout else 1.0


def text_step(config: VlaConfig, instructions: Iterable[str]) -> ProcessorStep:
    """The step of a new policy.

    Its tokenizer is that of the weights that ``config.pretrained_path`` names, for their embeddings mean its tokens;
    else the backbone's, or one that is learnt here.

    Args:
        config: The policy's configuration.
        instructions: Texts of the training data.

    Raises:
        UserError: A backbone's tokenizer cannot be had, or the weights' is missing.
    """
    if config.text == "hash" and not config.backbone:
        return HashTokenizerStep(config.vocabulary, config.max_words)
    if config.text == "frozen" and not config.backbone:
        return frozen_step(config)
    content = saved_tokenizer(config.pretrained_path)
    if not content and config.backbone:
        content = read_tokenizer(config.backbone)
    elif not content and config.pretrained_path:
        raise UserError(
            f"{config.pretrained_path} holds no tokenizer, and its weights mean the tokens of one alone",
            "copy the whole pretrained_model folder, or set policy.options.text as it was trained",
        )
    elif not content:
        content = learn_tokenizer(instructions, config.vocabulary)
    return TokenizerStep(
        config.max_tokens, config.state_input == "prompt", 0.0 if config.backbone else config.bpe_dropout, content
    )


def frozen_step(config: VlaConfig) -> FrozenTextStep:
    """The step of a policy on a frozen sentence encoder: the saved one of the weights that it begins with."""
    if config.text_encoder in shipped_encoders():
        return FrozenTextStep(config.max_tokens, config.text_encoder)
    for state in saved_states(config.pretrained_path, FROZEN):
        step = FrozenTextStep(config.max_tokens)
        step.load_state_dict(load_file(state))
        return step
    from vla_stack.policies.sentence_source import read_encoder

    return FrozenTextStep(config.max_tokens, "", *read_encoder(config.text_encoder))


def saved_tokenizer(policy: Path | None) -> bytes:
    """Content of the tokenizer in a policy's preprocessor; empty where there is none."""
    for state in saved_states(policy, STEP):
        return load_file(state)["tokenizer"].numpy().tobytes()
    return b""


def saved_states(policy: Path | None, step: str) -> list[Path]:
    """Files of a step's state in the preprocessor of a policy directory, or of a repository of the hub: such a one's
    preprocessor is downloaded once.

    Raises:
        UserError: It is neither.
    """
    if policy is None:
        return []
    if not policy.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            policy = Path(snapshot_download(policy.as_posix(), allow_patterns=[f"policy_pre*{step}.safetensors"]))
        except (OSError, HfHubHTTPError, HFValidationError) as e:
            raise UserError(*not_on_hub(policy, "its tokenizer", e)) from None
    return sorted(policy.glob(f"policy_pre*{step}.safetensors"))


def prompts(tasks: Sequence[str], state: Float[Tensor, "b s"] | None) -> list[str]:
    """Prompt of each instruction; with ``state`` in [-1, 1], as 256 bins a dimension, in the words of pi0.5."""
    if state is None:
        return [prompt(task) for task in tasks]
    bins = ((state.cpu().float().clamp(-1.0, 1.0) + 1.0) * (STATE_BINS / 2)).long().clamp(max=STATE_BINS - 1)
    rows = (" ".join(map(str, row)) for row in bins.tolist())
    return [f"Task: {task.strip()}, State: {row};\nAction: " for task, row in zip(tasks, rows, strict=True)]


def padded(rows: Sequence[Sequence[int]], value: int, length: int) -> Int[Tensor, "b n"]:
    """Rows of unequal length as one tensor, filled up on the right."""
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)


def _tasks(beside: dict[str, Any]) -> list[str]:
    """The instruction of each row of a batch."""
    task = beside.get("task")
    if task is None:
        raise UserError("the batch has no 'task'", "give each observation its instruction")
    return [task] if isinstance(task, str) else list(task)


def _with_language(features: Features, length: int, *width: int) -> Features:
    observation = features[PipelineFeatureType.OBSERVATION]
    observation[OBS_LANGUAGE_TOKENS] = PolicyFeature(type=FeatureType.LANGUAGE, shape=(length, *width))
    observation[OBS_LANGUAGE_ATTENTION_MASK] = PolicyFeature(type=FeatureType.LANGUAGE, shape=(length,))
    return features
