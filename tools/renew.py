"""Start a policy anew on other words and pictures: sub-words of other data, image encoders of another size.

    python tools/renew.py shipped outputs/start data/pick data/place
    python tools/renew.py shipped outputs/start data/pick data/place --image-size 128 --channels 24 48 64 64
    vla train multitask policy.pretrained=outputs/start data.root=[data/pick,data/place]
    python tools/renew.py outputs/bpe outputs/reads --text frozen --tasks pick_any shelf slot

What is new is untrained, so the policy is only good to train from. State, prefix and expert keep what they know, and so
does the normalisation; so do the image encoders, unless another size or other channels are asked for.

With ``--text frozen`` the new text encoder stands on a sentence encoder that knows most words. It is taught to give, of
every word of the sentences, what the old one gave: the policy is as good as it was, and understands words that none of
its demonstrations had where the sentence encoder finds them like known ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.processor import NormalizerProcessorStep
from torch import Tensor
from tqdm import trange

import sim  # noqa: F401  registers the tasks
from results import parser
from vla_stack.data.dataset import read_tasks
from vla_stack.errors import UserError
from vla_stack.policies.directory import resolve_policy, write_manifest
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_text import FrozenTextStep, HashTokenizerStep, TokenizerStep, frozen_step
from vla_stack.policies.reading import find_weights, read_config, read_processors
from vla_stack.policies.sentence_encoder import vectors
from vla_stack.policies.text import TextEncoder
from vla_stack.policies.weights import read_weights
from vla_stack.policies.words import learn_tokenizer, prompt, tokenizer

TEXT, VISION = "prefix.text.", "prefix.vision."
WORDS = HashTokenizerStep | TokenizerStep | FrozenTextStep
FAR = 0.35  # cosine to the nearest known word below which one means none of them: 17 of 20 English words
SCENES = 1500  # of a task, whose sentences are learnt from
STEPS, ROWS, LR = 6000, 96, 5e-3  # of teaching
MEAN = 20.0  # weight of the error of the mean vector, which tells the image encoders what to look for


def main(args: argparse.Namespace) -> int:
    path = resolve_policy(args.source)
    config = read_config(path, "cpu")
    pre, post = read_processors(path, config, "cpu")
    old_config = copy.deepcopy(config)
    config.text, config.vocabulary, config.max_tokens = args.text, args.vocabulary, args.max_tokens
    new: tuple[str, ...] = (TEXT,)
    if args.image_size or args.channels:
        new = (TEXT, VISION)
        config.vision_channels = tuple(args.channels or config.vision_channels)
        resize(config.input_features, args.image_size)
        for step in pre.steps:
            if isinstance(step, NormalizerProcessorStep):
                resize(step.features, args.image_size)
    instructions = sentences(args.data, args.tasks)
    torch.manual_seed(args.seed)
    if args.text == "frozen":
        config.text_encoder = args.encoder
        words: Any = frozen_step(config)
    else:
        words = TokenizerStep(
            args.max_tokens, False, config.bpe_dropout, learn_tokenizer(instructions, args.vocabulary)
        )
    policy, weights = VlaPolicy(config), read_weights(find_weights(path))
    kept = {name: w for name, w in weights.items() if not name.startswith(new)}
    policy.load_state_dict({**policy.state_dict(), **kept})
    found: dict[str, Any] = {}
    (spoken,) = (step for step in pre.steps if isinstance(step, WORDS))
    if args.text == "frozen" and isinstance(spoken, FrozenTextStep):  # what it has learnt would be lost
        raise UserError(f"{args.source} reads through a sentence encoder already", "train it as it is")
    if args.text == "frozen" and isinstance(spoken, TokenizerStep):
        old = VlaPolicy(old_config)
        old.load_state_dict(weights)
        found["error"] = teach(policy.prefix.text, words, old.prefix.text, spoken.content, instructions)
    pre.steps = [words if isinstance(s, WORDS) else s for s in pre.steps]
    for part in (policy, pre, post):
        part.save_pretrained(args.out)
    write_manifest(args.out)
    untrained = sum(p.numel() for name, p in policy.named_parameters() if name.startswith(new))
    found |= {"instructions": len(set(instructions)), "kept": len(kept), "new_parameters": untrained}
    print(json.dumps({"policy": str(args.out), **found}))
    return 0


def sentences(data: list[Path], tasks: list[str]) -> list[str]:
    """Instructions of datasets, and of scenes of the simulator's tasks."""
    found = {text for root in data for text in read_tasks(root)}
    for task in tasks:
        env = gym.make(f"sim/{task}-v0", cameras=(), disable_env_checker=True)
        found |= {env.reset(seed=seed)[1]["task"] for seed in range(SCENES)}
        env.close()
    if not found:
        raise UserError("there are no sentences to learn from", "name datasets, or tasks of the simulator with --tasks")
    return sorted(found)


def teach(new: TextEncoder, step: FrozenTextStep, old: TextEncoder, content: bytes, texts: list[str]) -> float:
    """Let a text encoder on vectors of a frozen one give what the old one gives, of each word and in the mean.

    Returns:
        Squared error of a tenth of the texts, which are not trained on, over the variance.
    """
    old = old.float().eval()
    texts = [*texts, *strange(texts, step)]
    samples = [lesson for text in texts if (lesson := _lesson(text, step, old, content)) is not None]
    longest = max(len(x) for x, _, _ in samples)
    x, y = (
        torch.stack([torch.nn.functional.pad(s[i], (0, 0, 0, longest - len(s[i]))) for s in samples]) for i in (0, 1)
    )
    mean = torch.stack([s[2] for s in samples])
    there = torch.arange(longest) < torch.tensor([len(s[0]) for s in samples])[:, None]
    order = torch.randperm(len(samples))
    held, learnt = order[: len(order) // 10], order[len(order) // 10 :]
    optimizer = torch.optim.AdamW(new.parameters(), LR, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS, pct_start=0.05)
    for _ in trange(STEPS, desc="teaching the text encoder"):
        rows = learnt[torch.randint(len(learnt), (ROWS,))]
        got, got_mean = new(x[rows], there[rows])
        loss = (got - y[rows]).square().mean(-1)[there[rows]].mean() + MEAN * (got_mean - mean[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(new.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        error = (new(x[held], there[held])[0] - y[held]).square()[there[held]].mean()
    return round(float(error / y[there].var(0).mean()), 4)


def strange(texts: list[str], step: FrozenTextStep) -> list[str]:
    """As many texts again in which one word is another, which is like none of theirs.

    The old encoder has an answer to those as well: that nothing was said. Without it, the new one finds in any word one
    that it knows.
    """
    said = [re.findall(r"\w+", text.lower()) for text in texts]
    known = sorted({word for words in said for word in words})

    def direction(word: str) -> np.ndarray:
        mean = vectors(step.graph, step.content, f"pick up the {word}")[3:].mean(0)
        return mean / np.linalg.norm(mean)

    near, rng = np.stack([direction(word) for word in known]), np.random.default_rng(0)
    words = sorted(w for w in tokenizer(step.content).get_vocab() if w.isascii() and w.isalpha() and len(w) > 3)
    drawn = rng.choice(words, min(len(words), 2 * len(texts)), replace=False)
    far = [str(word) for word in drawn if (near @ direction(str(word))).max() < FAR]
    found = []
    for text, word in zip(said, far, strict=False):
        text[int(rng.integers(len(text)))] = word
        found.append(" ".join(text))
    return found


def _lesson(text: str, step: FrozenTextStep, old: TextEncoder, content: bytes) -> tuple[Tensor, Tensor, Tensor] | None:
    """Vectors [n, e] of a text, what the old encoder makes of the word that each belongs to [n, d], and its mean [d];
    None where the two read other words."""
    text = " ".join(re.findall(r"\w+", text.lower()))
    known, told = tokenizer(content).encode(prompt(text)), tokenizer(step.content).encode(text)
    words = [w for w, special in zip(told.word_ids, told.special_tokens_mask, strict=True) if not special]
    if set(words) != set(known.word_ids):
        return None
    with torch.no_grad():
        ids = torch.tensor([known.ids])
        vector, mean = old(ids, torch.ones_like(ids, dtype=torch.bool))
    of = np.array(known.word_ids)
    wanted = torch.stack([vector[0, of == word].mean(0) for word in words])
    return torch.from_numpy(vectors(step.graph, step.content, text)), wanted, mean[0]


def resize(features: dict[str, PolicyFeature], size: int) -> None:
    """Give every picture among the features another height and width, where there is one."""
    for key, feature in features.items():
        if feature.type is FeatureType.VISUAL and size:
            features[key] = replace(feature, shape=(feature.shape[0], size, size))


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("source", help="native policy: a directory, or the name of a shipped one")
    p.add_argument("out", type=Path, help="new policy directory")
    p.add_argument("data", type=Path, nargs="*", help="datasets whose instructions are learnt from")
    p.add_argument("--tasks", nargs="+", default=[], help="tasks of the simulator, whose instructions are as well")
    p.add_argument("--text", choices=("bpe", "frozen"), default="bpe", help="how instructions are read (bpe)")
    p.add_argument("--encoder", default="minilm", help="of --text frozen: shipped, local directory or hub id (minilm)")
    p.add_argument("--vocabulary", type=int, default=512, help="most tokens (512)")
    p.add_argument("--image-size", type=int, default=0, help="of all cameras, pixels: new image encoders (as they are)")
    p.add_argument("--channels", type=int, nargs="+", help="of new image encoders (as they are)")
    p.add_argument("--max-tokens", type=int, default=32, help="of the longest instruction (32)")
    p.add_argument("--seed", type=int, default=0, help="of the new weights (0)")
    sys.exit(main(p.parse_args()))
