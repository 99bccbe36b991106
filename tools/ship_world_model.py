"""Put a trained world model into the package: half-precision weights beside its recipe and training logs.

    python tools/ship_world_model.py outputs/train/world pick

Weights are stored as float16 and load as float32; `vla eval --env imagined:shipped` then finds it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from results import parser
from vla_stack.world_model.config import PARTS
from vla_stack.world_model.model import SHIPPED, resolve

LARGEST = 25.0  # MB


def main(run: str, name: str) -> int:
    source, target = resolve(run).parent, SHIPPED / name
    made = target.with_name(f".{name}")  # beside what ships, until all of it is there
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(resolve(run), made)
    for path in made.glob("*.safetensors"):
        weights = load_file(path)
        save_file({k: v.half() if v.dtype == torch.float32 else v for k, v in weights.items()}, path)
    recipe = yaml.safe_load((source / "recipe.yaml").read_text())
    recipe["data"]["root"], recipe["output_dir"] = [Path(root).name for root in recipe["data"]["root"]], ""
    (made / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    for stage in PARTS:
        if (log := source / stage / "metrics.jsonl").exists():
            shutil.copy(log, made / f"{stage}.jsonl")
    if (about := target / "README.md").exists():  # what is said of it stays
        shutil.copy(about, made)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    size = sum(f.stat().st_size for f in target.iterdir()) / 1e6
    print(f"{target}: {size:.1f} MB; try: vla eval --env imagined:{name}")
    return 0 if size <= LARGEST else 1


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("run", help="output folder of the training")
    p.add_argument("name", help="of the shipped world model")
    args = p.parse_args()
    sys.exit(main(args.run, args.name))
