"""Start a policy anew on other words: all its weights but those of the text encoder, and sub-words of other data.

    python tools/renew_text.py shipped outputs/start data/pick data/place
    vla train multitask policy.pretrained=outputs/start data.root=[data/pick,data/place]

The new text encoder is untrained, so the policy is only good to train from. Images, state, prefix and expert keep what
they know, and so does the normalisation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from results import parser
from vla_stack.data.dataset import read_tasks
from vla_stack.policies.directory import resolve_policy, write_manifest
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_text import HashTokenizerStep, TokenizerStep
from vla_stack.policies.reading import find_weights, read_config, read_processors
from vla_stack.policies.weights import read_weights
from vla_stack.policies.words import learn_tokenizer

TEXT = "prefix.text."


def main(source: str, out: Path, data: Sequence[Path], vocabulary: int, max_tokens: int, seed: int) -> int:
    path = resolve_policy(source)
    config = read_config(path, "cpu")
    pre, post = read_processors(path, config, "cpu")
    config.text, config.vocabulary, config.max_tokens = "bpe", vocabulary, max_tokens
    torch.manual_seed(seed)
    policy = VlaPolicy(config)
    kept = {name: w for name, w in read_weights(find_weights(path)).items() if not name.startswith(TEXT)}
    policy.load_state_dict({**policy.state_dict(), **kept})
    instructions = [text for root in data for text in read_tasks(root)]
    step = TokenizerStep(max_tokens, False, True, learn_tokenizer(instructions, vocabulary))
    pre.steps = [step if isinstance(s, HashTokenizerStep | TokenizerStep) else s for s in pre.steps]
    for part in (policy, pre, post):
        part.save_pretrained(out)
    write_manifest(out)
    new = sum(p.numel() for name, p in policy.named_parameters() if name.startswith(TEXT))
    found = {"policy": str(out), "instructions": len(set(instructions)), "kept": len(kept), "new_parameters": new}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("source", help="native policy: a directory, or the name of a shipped one")
    p.add_argument("out", type=Path, help="new policy directory")
    p.add_argument("data", type=Path, nargs="+", help="datasets whose instructions the sub-words are learnt from")
    p.add_argument("--vocabulary", type=int, default=512, help="most tokens (512)")
    p.add_argument("--max-tokens", type=int, default=32, help="of the longest instruction (32)")
    p.add_argument("--seed", type=int, default=0, help="of the new weights (0)")
    args = p.parse_args()
    sys.exit(main(args.source, args.out, args.data, args.vocabulary, args.max_tokens, args.seed))
