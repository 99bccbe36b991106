"""Put a trained policy into the package: half-precision weights and their graph beside its recipe, revision and
training log.

    python tools/ship_policy.py outputs/train/multitask native_multitask noise_scale=0.5

Weights are stored as float16 (half the download) and load as float32. Further ``key=value`` pairs change inference
settings of ``config.json``. ``--start DIR --share 0.6`` ships that share of the trained weights and the rest of those
that the training began with: what was fine-tuned keeps more of what it knew (Wortsman et al. 2022, arXiv:2109.01903).
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import torch
import yaml
from lerobot.configs import PreTrainedConfig
from safetensors.torch import load_file, save_file

import vla_stack.policies.configuration_vla  # noqa: F401  registers the type
from results import parser
from vla_stack.policies.directory import CONFIG, SHIPPED, SIGNATURE, write_manifest
from vla_stack.policies.onnx_export import export_beside

RECIPE, LOG = "recipe.yaml", "metrics.jsonl"


def main(run: str, name: str, *settings: str, start: Path | None = None, share: float = 1.0) -> int:
    source, target = Path(run), SHIPPED / name
    trained = not (source / CONFIG).exists()
    policy = source / "checkpoints" / "last" / "pretrained_model" if trained else source
    # The first is written by hand: what it says of the training has to follow.
    stay = ("README.md",) if trained else ("README.md", RECIPE, LOG)
    texts = {file: (target / file).read_text() for file in stay if (target / file).exists()}
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(policy, target)
    for file, text in texts.items():
        (target / file).write_text(text)
    weights = load_file(policy / "model.safetensors")
    if start is not None:
        before = load_file(start / "model.safetensors")
        weights = {k: before[k].float().lerp(v.float(), share) for k, v in weights.items()}
    halves = {k: v.half() if v.dtype == torch.float32 else v for k, v in weights.items()}
    save_file(halves, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    changes = dict(text.split("=", 1) for text in settings)
    if unknown := set(changes) - {f.name for f in fields(PreTrainedConfig.from_pretrained(policy))}:
        raise SystemExit(f"the policy has no setting {sorted(unknown)}")
    config |= {key: yaml.safe_load(value) for key, value in changes.items()} | {"pretrained_path": None}
    (target / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    if trained:
        recipe = yaml.safe_load((source / RECIPE).read_text())
        recipe["data"]["root"], recipe["output_dir"] = [Path(r).name for r in recipe["data"]["root"]], ""
        recipe["policy"]["pretrained"] = Path(recipe["policy"]["pretrained"] or "").name
        (target / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False))
        shutil.copy(source / LOG, target / LOG)
    (target / "train_config.json").unlink(missing_ok=True)
    (target / SIGNATURE).unlink(missing_ok=True)  # it is of the weights in full precision
    write_manifest(target)
    export_beside(target)
    size = sum(f.stat().st_size for f in target.iterdir()) / 1e6
    print(f"{target}: {size:.1f} MB")
    return 0 if size <= 20 else 1


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("run", help="output folder of the training, or a policy directory")
    p.add_argument("name", help="of the shipped policy")
    p.add_argument("settings", nargs="*", metavar="key=value", help="inference settings to change")
    p.add_argument("--start", type=Path, help="policy that the training began with")
    p.add_argument("--share", type=float, default=1.0, help="of the trained weights, the rest is of --start (1)")
    args = p.parse_args()
    sys.exit(main(args.run, args.name, *args.settings, start=args.start, share=args.share))
