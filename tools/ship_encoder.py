"""Put a sentence encoder into the package, where ``policy.options.text_encoder`` finds it by its name.

    python tools/ship_encoder.py sentence-transformers/all-MiniLM-L6-v2 minilm
    python tools/ship_encoder.py ~/models/paraphrase-multilingual-MiniLM-L12-v2 multilingual

Its README with source and licence is written by hand. An encoder that policies were trained on is never replaced.
"""

from __future__ import annotations

import sys

from results import parser
from vla_stack.policies.sentence_encoder import GRAPH, SHIPPED, TOKENIZER
from vla_stack.policies.sentence_source import read_encoder


def main(source: str, name: str) -> int:
    folder = SHIPPED / name
    if (folder / GRAPH).exists():
        raise SystemExit(f"{folder} holds an encoder, which policies may stand on: choose another name")
    graph, content = read_encoder(source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / GRAPH).write_bytes(graph)
    (folder / TOKENIZER).write_bytes(content)
    print(f"{folder}: {(len(graph) + len(content)) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("source", help="local directory or hub id of an encoder of the kind of BERT")
    p.add_argument("name", help="of the shipped encoder")
    args = p.parse_args()
    sys.exit(main(args.source, args.name))
