"""Start a policy anew on other words and pictures: sub-words of other data, image encoders of another size.

    python tools/renew.py shipped outputs/start data/pick data/place
    python tools/renew.py shipped outputs/start data/pick data/place --image-size 128 --channels 24 48 64 64
    vla train multitask policy.pretrained=outputs/start data.root=[data/pick,data/place]

What is new is untrained, so the policy is only good to train from. State, prefix and expert keep what they know, and so
does the normalisation; so do the image encoders, unless another size or other channels are asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.processor import NormalizerProcessorStep

from results import parser
from vla_stack.data.dataset import read_tasks
from vla_stack.policies.directory import resolve_policy, write_manifest
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_text import HashTokenizerStep, TokenizerStep
from vla_stack.policies.reading import find_weights, read_config, read_processors
from vla_stack.policies.weights import read_weights
from vla_stack.policies.words import learn_tokenizer

TEXT, VISION = "prefix.text.", "prefix.vision."


def main(args: argparse.Namespace) -> int:
    path = resolve_policy(args.source)
    config = read_config(path, "cpu")
    pre, post = read_processors(path, config, "cpu")
    config.text, config.vocabulary, config.max_tokens = "bpe", args.vocabulary, args.max_tokens
    new: tuple[str, ...] = (TEXT,)
    if args.image_size or args.channels:
        new = (TEXT, VISION)
        config.vision_channels = tuple(args.channels or config.vision_channels)
        resize(config.input_features, args.image_size)
        for step in pre.steps:
            if isinstance(step, NormalizerProcessorStep):
                resize(step.features, args.image_size)
    torch.manual_seed(args.seed)
    policy = VlaPolicy(config)
    kept = {name: w for name, w in read_weights(find_weights(path)).items() if not name.startswith(new)}
    policy.load_state_dict({**policy.state_dict(), **kept})
    instructions = [text for root in args.data for text in read_tasks(root)]
    step = TokenizerStep(args.max_tokens, False, config.bpe_dropout, learn_tokenizer(instructions, args.vocabulary))
    pre.steps = [step if isinstance(s, HashTokenizerStep | TokenizerStep) else s for s in pre.steps]
    for part in (policy, pre, post):
        part.save_pretrained(args.out)
    write_manifest(args.out)
    untrained = sum(p.numel() for name, p in policy.named_parameters() if name.startswith(new))
    found = {"instructions": len(set(instructions)), "kept": len(kept), "new_parameters": untrained}
    print(json.dumps({"policy": str(args.out), **found}))
    return 0


def resize(features: dict[str, PolicyFeature], size: int) -> None:
    """Give every picture among the features another height and width, where there is one."""
    for key, feature in features.items():
        if feature.type is FeatureType.VISUAL and size:
            features[key] = replace(feature, shape=(feature.shape[0], size, size))


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("source", help="native policy: a directory, or the name of a shipped one")
    p.add_argument("out", type=Path, help="new policy directory")
    p.add_argument("data", type=Path, nargs="+", help="datasets whose instructions the sub-words are learnt from")
    p.add_argument("--vocabulary", type=int, default=512, help="most tokens (512)")
    p.add_argument("--image-size", type=int, default=0, help="of all cameras, pixels: new image encoders (as they are)")
    p.add_argument("--channels", type=int, nargs="+", help="of new image encoders (as they are)")
    p.add_argument("--max-tokens", type=int, default=32, help="of the longest instruction (32)")
    p.add_argument("--seed", type=int, default=0, help="of the new weights (0)")
    sys.exit(main(p.parse_args()))
