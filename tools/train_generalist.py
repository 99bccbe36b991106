"""Train the generalist: one policy, from pictures and sentences, on every task of the suite, as long as there is time.

    python tools/train_generalist.py                  # rounds without end: stop it and go on as you like
    python tools/train_generalist.py --rounds 20 --start generalist     # from the one that ships
    python tools/train_generalist.py --ground 90      # longer with moments of many scenes, before the first round
    python tools/train_generalist.py --final          # a last round; its learning rate falls to nothing

What such a policy lacks is scenes: those of a few hundred demonstrations it remembers. So each round has new ones, a
few moments of each (`vla collect --moments`), which one process records while another trains on the rounds before, each
frame a few dozen times, and on moments of many scenes (``tools/co_train.py``). A round begins with the averaged
weights of the one before. ``progress.jsonl`` says after every few rounds how the policy does in scenes that no round
has.

From the third round on, every other one is of scenes in which the policy acted itself, for what the expert's mistakes
do not teach is how to get out of one's own. Its chunks come late there: what it has to continue is its own as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import ROOT, parser
from tasks import TASKS

VLA = [sys.executable, "-m", "vla_stack.cli"]
MOMENTS, RANDOMISED = 6, 3  # frames of a scene; every third round looks otherwise
OWN = 0.4  # of a round's scenes, where the policy acts: they are driven with pictures, and give more frames each
NOISE, ERRORS = 0.3, 0.35  # of the commands; in every other round
SEED = 1000  # of the first round; the next one has the next
EVAL_SEED = 60_000
POINTERS = 2  # a camera's, for what is moved and where to
# Of 64 pixels a lemon covers five: after as many steps of grounding its kind is told less often than from 128.
IMAGE_SIZE, CHANNELS = 128, (24, 48, 64, 64)
# Learning rate of the encoders of pictures and words, of the rest's. At the full rate 9,500 steps of imitation alone
# lost what grounding had taught: with 64 pixels, pointers at the thing that pick_any names fell from 66 to 20 of 100
# scenes. At three tenths they fell from 81 to 75 in 7,000 steps (128 pixels). With grounding beside it they rise.
ENCODERS_LR = 0.3
MAX_DELAY, LATE = 6, 5  # control steps: of what is executed meanwhile that is given, and in rounds of its own
# Of an instruction's words, made up or with one that is made up before them. Each such sentence is new to the sentence
# encoder, which takes 20 ms for it.
WORDS = 0.03
MAX_TOKENS = 48  # of an instruction: twice the longest of these, so that rarer words, which are spelt, have room
DONE = "done"  # in the folder of a round that ended
KEEP = 2  # rounds behind the window whose runs stay


def roots(out: Path, number: int, tasks: list[str]) -> list[Path]:
    return [out / "data" / f"{number:03d}" / task for task in tasks]


def collecting(args: argparse.Namespace, number: int) -> subprocess.Popen[bytes]:
    """A process that records a round; what is there already is not recorded again."""
    commands = []
    for task, root in zip(args.tasks, roots(args.out, number, args.tasks), strict=True):
        how = ["--randomisation", "3"] if number % RANDOMISED == RANDOMISED - 1 else []
        scenes = args.scenes
        if number > 1 and number % 2 == 0:  # with the policy that is there when this begins
            scenes = max(1, round(scenes * OWN))
            how += ["--policy", str(left(args.out / "runs" / f"{number - 2:03d}")), "--delay", str(LATE)]
        else:
            how += ["--errors", str(ERRORS)] if number % 2 else []
            how += ["--noise", str(NOISE), "--moments", str(MOMENTS), "--image-size", str(IMAGE_SIZE)]
        commands.append(
            [*VLA, "collect", "--task", task, "--root", str(root), "--episodes", str(scenes), "--workers", "1"]
            + ["--image-mode", "image", "--seed", str(SEED + number), *how]
        )
    program = f"import subprocess, sys\nfor c in {commands!r}:\n    subprocess.run(c, check=True)"
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "collect.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", program], stdout=log, stderr=log, start_new_session=True)


def first_policy(args: argparse.Namespace) -> Path:
    """Where the first round begins: the shipped expert, words of these tasks, grounded encoders."""
    start = args.out / "start"
    if not start.exists():
        words = [str(root) for root in roots(args.out, 0, args.tasks)]
        pictures = ("--image-size", str(IMAGE_SIZE), "--channels", *map(str, CHANNELS), "--max-tokens", str(MAX_TOKENS))
        new = [sys.executable, str(ROOT / "tools" / "renew.py"), "shipped", str(start), *words]
        run([*new, "--text", "frozen", *pictures])
    grounded = args.out / "grounded"
    if args.ground and not grounded.exists():
        partial = args.out / "grounding"
        time_and_shape = ("--minutes", str(args.ground), "--pointers", str(POINTERS), "--tasks", *args.tasks)
        run([sys.executable, str(ROOT / "tools" / "ground.py"), str(start), str(partial), *time_and_shape])
        partial.rename(grounded)
    return grounded if args.ground else start


def train(args: argparse.Namespace, number: int, policy: Path) -> Path:
    """A round: the newest scenes and those of the window before them."""
    out = args.out / "runs" / f"{number:03d}"
    newest = range(max(0, number + 1 - args.window), number + 1)
    data = [str(root) for n in newest for root in roots(args.out, n, args.tasks)]
    last = 0.01 if args.final else 1.0
    run(
        [sys.executable, str(ROOT / "tools" / "co_train.py"), "multitask", f"policy.pretrained={policy}"]
        + [f"policy.options.max_delay={MAX_DELAY}", f"data.root=[{','.join(data)}]", f"output_dir={out}"]
        + [
            f"method.steps={args.steps}",
            f"method.optimizer.lr={args.lr}",
            f"method.optimizer.final_lr_ratio={last}",
            f"method.optimizer.backbone_lr_scale={ENCODERS_LR}",
            f"data.augmentation.words={WORDS}",
        ]
        + [f"method.save_every={max(1, args.steps // 4)}", "method.ema=0.99", "data.opening_weight=1.0"]
        + ["method.keep=1", f"seed={number}", "eval.every=0", "threads=1", "processes=1", "--tasks", *args.tasks]
    )
    (out / DONE).touch()
    return left(out)


def left(run: Path) -> Path:
    return run / "checkpoints" / "last" / "pretrained_model"


def successes(args: argparse.Namespace, policy: Path) -> dict[str, float]:
    """By task, in scenes that no round has."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy

    loaded = load_policy(policy, frozen=True)
    return {
        task: evaluate(loaded, f"sim/{task}-v0", args.episodes, EVAL_SEED, num_envs=args.episodes).success_rate
        for task in args.tasks
    }


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def report(args: argparse.Namespace, line: dict[str, Any]) -> None:
    with (args.out / "progress.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def main(args: argparse.Namespace) -> int:
    done = sorted((args.out / "runs").glob(f"*/{DONE}"))
    number = len(done)
    policy = left(done[-1].parent) if done else None
    recorder, begun = collecting(args, number), time.monotonic()
    try:
        while number < args.rounds:
            if recorder.wait():
                raise SystemExit(f"recording failed, see {args.out / 'collect.log'}")
            if not args.final:
                recorder = collecting(args, number + 1)
            policy = train(args, number, policy or (Path(args.start) if args.start else first_policy(args)))
            if (number + 1) % args.eval_every == 0 or args.final or number + 1 == args.rounds:
                found = successes(args, policy)
                mean = sum(found.values()) / len(found)
                minutes = (time.monotonic() - begun) / 60
                report(args, {"round": number, "mean": round(mean, 3), "minutes": round(minutes, 1), **found})
            if args.final:
                break
            number += 1
            for old in range(max(0, number + 1 - args.window - KEEP)):
                shutil.rmtree(args.out / "data" / f"{old:03d}", ignore_errors=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # and the command that it runs
            os.killpg(recorder.pid, signal.SIGTERM)
        recorder.wait()
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "generalist", help="folder (outputs/generalist)")
    p.add_argument("--start", default="", help="policy to begin with (the shipped one with new words)")
    p.add_argument("--ground", type=float, default=40.0, help="minutes of grounding before the first (%(default)g)")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="all of them")
    p.add_argument("--rounds", type=int, default=10**6, help="rounds in all (without end)")
    p.add_argument("--scenes", type=int, default=250, help="new ones of each task a round (%(default)s)")
    p.add_argument("--steps", type=int, default=7500, help="of 64 samples a round (%(default)s)")
    p.add_argument("--window", type=int, default=6, help="rounds that are trained on (%(default)s)")
    p.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    p.add_argument("--eval-every", type=int, default=4, help="rounds between evaluations (%(default)s)")
    p.add_argument("--episodes", type=int, default=10, help="of each task in an evaluation (%(default)s)")
    p.add_argument("--final", action="store_true", help="one more round, whose learning rate falls to nothing")
    sys.exit(main(p.parse_args()))
