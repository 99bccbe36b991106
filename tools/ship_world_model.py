"""Put a trained world model into the package: half-precision weights beside its recipe, revision and training logs.

python tools/ship_world_model.py outputs/train/world_model_tiny pick
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from vla_stack.world_model.model import resolve

SHIPPED = Path(__file__).resolve().parent.parent / "vla_stack" / "assets" / "world_models"
LIMIT_MB = 25


def main(run: str, name: str) -> int:
    source, target = Path(run), SHIPPED / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(resolve(run), target)
    for path in target.glob("*.safetensors"):
        weights = load_file(path)
        save_file({k: v.half() if v.dtype == torch.float32 else v for k, v in weights.items()}, path, {"format": "pt"})
    recipe = yaml.safe_load((source / "recipe.yaml").read_text())
    recipe["data"]["root"], recipe["output_dir"] = Path(recipe["data"]["root"]).name, ""
    (target / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    shutil.copy(source / "revision.txt", target / "revision.txt")
    for log in source.glob("*/metrics.jsonl"):
        shutil.copy(log, target / f"{log.parent.name}.jsonl")
    size = sum(f.stat().st_size for f in target.iterdir()) / 1e6
    print(f"{target}: {size:.1f} MB")
    return 0 if size <= LIMIT_MB else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
