"""The native policy and those of others from scratch, at equal CPU time, on pictures: ACT, Diffusion Policy, SmolVLA.

    python tools/reproduce/peers.py --out outputs/peers
    python tools/reproduce/peers.py --out outputs/peers --tasks push --seeds 0    # the most informative cells alone

All train with `vla train`, on the same demonstrations with the same chunk labels, until they have used their CPU time,
at a constant learning rate with averaged weights; of three rates for each policy the one that is best over the seeds
counts, for ours as well. Sizes are those at which a policy takes steps at all in that time: resnet18 and 256 wide for
ACT, a U-Net of up to 256 channels for Diffusion Policy, a SmolVLM of four layers with random weights for SmolVLA, whose
published ones no CPU trains. ACT and Diffusion Policy read no sentences, so the tasks have one goal each. Same starts
for all; intervals are over seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from claims import Cell, adopt, claimed, published, run_cells, same_settings
from cpu_hours import trained, vla

from results import ROOT, Check, parser, write
from vla_stack.statistics import seeds_interval

TASKS = {  # what `vla collect` is asked for, and what an evaluation is of
    "push": (("--task", "push"), "sim/push-v0"),
    "drawer": (("--task", "drawer"), "sim/drawer-v0"),
    "drawer-open": (("--env", "metaworld/drawer-open-v3", "--control-hz", "20"), "metaworld/drawer-open-v3"),
}
CHUNK, EXECUTE = 12, 4
SIZES = f"chunk_size: {CHUNK}, n_action_steps: {EXECUTE}"
RESNET = "vision_backbone: resnet18, pretrained_backbone_weights: null"
POLICIES = {  # type and options; method
    "native": (f"{{type: vla, options: {{{SIZES}, noise_scale: 0.4, bpe_dropout: 0.0}}}}", "imitation"),
    "act": (f"{{type: act, options: {{{SIZES}, {RESNET}, dim_model: 256, dim_feedforward: 1024}}}}", "own_loss"),
    "diffusion": (
        f"{{type: diffusion, options: {{n_obs_steps: 1, horizon: 16, n_action_steps: {EXECUTE}, {RESNET}, "
        "use_group_norm: true, down_dims: [64, 128, 256], num_inference_steps: 10, noise_scheduler_type: DDIM}}",
        "own_loss",
    ),
    "smolvla": (
        f"{{type: smolvla, options: {{{SIZES}, vlm_model_name: %s, num_vlm_layers: 4, freeze_vision_encoder: false, "
        "train_expert_only: false}}",
        "imitation",
    ),
}
RATES = {
    "native": (5e-4, 1e-3, 2e-3),
    "act": (3e-5, 1e-4, 3e-4),
    "diffusion": (1e-4, 3e-4, 1e-3),
    "smolvla": (1e-4, 3e-4, 1e-3),
}
SLOWER = "not told apart, or the other learns this task faster"
START = 40_000  # seed of the first of the starts


@dataclass(frozen=True)
class Settings:
    """Size of the experiment."""

    demos: int = 400
    noise: float = 0.3
    hours: float = 0.25
    batch: int = 32
    episodes: int = 100


SMOKE = Settings(demos=3, hours=0.01, batch=4, episodes=2)


def cells(tasks: list[str], seeds: list[int]) -> list[Cell]:
    """The most informative first: every policy at its middle rate, on every task."""
    return [
        Cell(task, f"{policy}-{RATES[policy][rate]:g}", seed)
        for seed in seeds
        for rate in (1, 0, 2)
        for task in tasks
        for policy in POLICIES
    ]


def run(cell: Cell, settings: Settings, out: Path) -> dict[str, Any]:
    """Train a cell and roll it out: its outcomes."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.runtime.executor import ExecutorConfig

    asked, env_id = TASKS[cell.task]
    name, _, rate = cell.arm.partition("-")
    root, run_dir = out / "demos" / cell.task, out / "runs" / cell.name
    with claimed(out / "demos" / f"{cell.task}.lock", wait=True):
        size = ("--episodes", str(settings.demos), "--noise", str(settings.noise), "--workers", "1")
        subprocess.run(vla("collect", *asked, *size, "--root", str(root)), check=True)
    policy, method = POLICIES[name]
    if "%s" in policy:
        with claimed(out / "smolvlm.lock", wait=True):
            policy %= small_smolvlm(out / "smolvlm")
    recipe = (
        *("pick", f"policy={policy}", f"data.root={root}", "data.opening_weight=1.0", "processes=1", "threads=1"),
        *(f"method.name={method}", f"method.batch_size={settings.batch}", f"method.optimizer.lr={rate}"),
        *("method.optimizer.final_lr_ratio=1.0", "method.ema=0.995", "method.steps=1000000", "method.save_every=500"),
        *("eval.every=0", "device=cpu", f"seed={cell.seed}"),
    )
    hours = trained(run_dir, recipe, settings.hours)
    checkpoint = run_dir / "checkpoints" / "last"
    result = evaluate(
        load_policy(checkpoint / "pretrained_model"),
        env_id,
        settings.episodes,
        START,
        ExecutorConfig(mode="sync", execute=EXECUTE),
    )
    steps = int(checkpoint.resolve().name)
    return {**asdict(cell), "cpu_hours": hours, "steps": steps, "outcomes": [int(o) for o in result.outcomes]}


def small_smolvlm(folder: Path) -> Path:
    """Configuration and processor of a SmolVLM with four layers and a tokenizer of bytes, as SmolVLA reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMConfig,
        SmolVLMImageProcessorPil,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    if (folder / "config.json").exists():
        return folder
    named = {"image_token": "<image>", "fake_image_token": "<fake>", "global_image_token": "<global-img>"}
    special = ("<pad>", "<bos>", "<eos>", "<unk>", *named.values(), "<end_of_utterance>")
    words = (*special, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={**named, "end_of_utterance_token": "<end_of_utterance>"},
    )
    eyes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    SmolVLMConfig(
        vision_config={**eyes, "image_size": 64, "patch_size": 8},
        text_config={
            **text,
            "vocab_size": len(words),
            "model_type": "llama",
            "num_key_value_heads": 2,
            "head_dim": 64,
            "pad_token_id": 0,
        },
        scale_factor=2,
        image_token_id=words.index("<image>"),
        pad_token_id=0,
    ).save_pretrained(folder)
    edge = {"longest_edge": 64}
    parts = (SmolVLMImageProcessorPil(size=edge, max_image_size=edge), fast, SmolVLMVideoProcessor(size=edge))
    SmolVLMProcessor(*parts, chat_template="{{ messages }}").save_pretrained(folder)
    return folder


def report(records: list[dict[str, Any]]) -> list[Check]:
    """By task, every policy at its best rate, and ours minus the best of the others, over the seeds that both have."""
    found: dict[str, dict[str, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        found[record["task"]][record["arm"]][record["seed"]] = record["outcomes"]
    checks = []
    for task, arms in found.items():
        best: dict[str, tuple[float, str]] = {}
        for arm, by_seed in arms.items():
            mean, policy = float(np.mean([*by_seed.values()])), arm.partition("-")[0]
            best[policy] = max(best.get(policy, (-1.0, "")), (mean, arm))
        for policy, (mean, arm) in best.items():
            rate = arm.partition("-")[2]
            interval = seeds_interval([*arms[arm].values()])
            checks.append(Check(f"{task}: {policy}, learning rate {rate}", mean, interval=interval))
        others = [rest for policy, rest in best.items() if policy != "native"]
        if "native" not in best or not others:
            continue
        ours, theirs = arms[best["native"][1]], arms[max(others)[1]]
        both = sorted(ours.keys() & theirs.keys())
        gain = seeds_interval([ours[s] for s in both], [theirs[s] for s in both])
        least = Check(f"{task}: native minus the best other, lower end", gain.low, 0.0, ">", why=SLOWER)
        checks += [Check(f"{task}: native minus the best other", gain.value, interval=gain), least]
    return checks


def main(out: Path, tasks: list[str], seeds: list[int], settings: Settings) -> int:
    os.chdir(ROOT)
    same_settings(out, asdict(settings))
    if settings != SMOKE:
        adopt("peers", out, asdict(settings))
    done = run_cells(cells(tasks, seeds), lambda cell: run(cell, settings, out), out)
    if settings == SMOKE:
        print(json.dumps([{k: r[k] for k in ("task", "arm", "steps", "cpu_hours")} for r in done]))
    else:
        write("peers", report(done), published(asdict(settings), done), seeds=seeds)
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "reproduce" / "peers", help="folder, also of several")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="all")
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of training (0 1 2)")
    p.add_argument("--smoke", action="store_true", help="every kind of cell for some seconds; nothing is written")
    args = p.parse_args()
    sys.exit(main(args.out, args.tasks, args.seeds, SMOKE if args.smoke else Settings()))
