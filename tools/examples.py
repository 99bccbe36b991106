"""Run the examples of the verbs' help as a reader would: each a process of its own, in an order that works.

    python tools/examples.py          # `make examples`; writes into a temporary folder alone
    python tools/examples.py data     # the README's first rows, and the examples with this word

An example is made short as a row of the README is. What cannot run on this machine is named, with the reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import readme
from readme import ADDRESS, EPISODE, FIT, Step
from vla_stack import registry
from vla_stack.cli import VERBS

ARM, NETWORK, OTHER_FILES = "an arm on a serial port", "a server elsewhere", "files of somebody else"
GPU, GAMEPAD = "a GPU", "a gamepad"
FIRST = (
    "vla collect --task pick --episodes 200 --root data/pick",
    "vla train pick data.root=data/pick output_dir=runs/pick",
)

STEPS = (
    Step("vla train --resume runs/pick", "method.steps=3"),  # before its data grows
    Step(
        "vla collect --task pick place --episodes 100 --root data/two --noise 0.5 --workers 4",
        "--episodes 2 --workers 1",
    ),
    Step("vla collect --task pick --mixed --episodes 200 --root data/world", "--episodes 10 --workers 1"),
    Step(
        "vla collect --task pick --episodes 2000 --root data/pick --rollouts ray --workers 32",
        "--episodes 11 --workers 1",
    ),
    Step(
        "vla collect --task pick_any shelf --noise 0.3 --errors 0.3 --moments 4 --episodes 9000 --root data/scenes",
        "--episodes 2 --workers 1",
    ),
    Step("vla collect --task pick --policy runs/pick --episodes 100 --root data/corrected", "--episodes 2 --workers 1"),
    Step(
        "vla collect --env metaworld/push-v3 metaworld/drawer-open-v3 --control-hz 20 --cameras topview gripperPOV "
        "--episodes 100 --root data/metaworld",
        "--episodes 1 --workers 1",
    ),
    Step(
        "vla collect --env aloha/transfer_cube --control-hz 10 --episodes 100 --root data/aloha",
        "--episodes 1 --workers 1",
    ),
    Step("vla doctor --json > doctor.json"),
    Step("vla recipes pick"),
    Step("vla recipes pick > mine.yaml"),
    Step("vla data info data/pick"),
    Step("vla data check data/pick"),
    Step("vla data seal data/pick"),
    Step("vla data repair data/pick"),
    Step("vla data quality data/pick"),
    Step("vla data quality data/pick --policy runs/pick --keep 0.9 --into data/clean"),
    Step("cp -r data/two data/rac", row=False),
    Step("vla data backfill data/rac", row=False),
    Step("vla data relabel data/rac --episode 3 --frames 10:25 --segment recovery", "--frames 2:6"),
    Step("vla data view data/rac --episode 3", "--save episode.rrd"),
    Step("vla data backfill data/pick"),
    Step("vla data merge data/pick data/rac --into data/all"),
    Step("vla data compact data/all"),
    Step("vla keys create gpu"),
    Step("vla constraints check obstacle", "--episodes 1"),
    Step("vla constraints explain obstacle --out costs.svg"),
    Step("vla train pick data.root=data/pick", FIT),
    Step("vla train pick data.root=data/pick method.steps=500 method.optimizer.lr=3e-4", FIT),
    Step("vla train pick data.root=data/pick policy.options.chunk_size=32 eval.every=500", FIT),
    Step(
        "vla train grape_success policy=runs/pick output_dir=runs/grape",
        "policy=shipped method.steps=2 method.calibration=2 method.starts=1 method.rollouts_per_start=2 "
        "method.num_envs=2 method.films=0 method.pairs.winner_succeeds=false method.iterations=1 eval.episodes=1",
    ),
    Step("vla data view runs/grape/iteration-001 --episode 3", "--episode 0 --save pair.rrd"),
    Step(
        "vla train world_model_tiny data.root=data/world",
        "method.train_vae.steps=1 method.train_dynamics.steps=1 method.train_heads.steps=1 method.generated=2 "
        "eval.every=0 method.vae.widths=[8,8] method.dynamics.width=16 method.dynamics.blocks=1",
    ),
    Step("vla train --list"),
    Step("vla train grape --explain"),
    Step(
        "torchrun --nproc_per_node 4 -m vla_stack.cli train pick data.root=data/pick precision=bf16",
        f"{FIT} method.batch_size=4 processes=1",
    ),
    Step("vla policy info shipped", "--repeats 1"),
    Step("vla policy info runs/pick --json > policy.json"),
    Step("vla policy key release.pem"),
    Step("vla policy sign runs/pick --key release.pem"),
    Step(
        "vla monitor fit --policy runs/pick --env sim/pick-v0 --episodes 200 --out runs/pick/monitor.json",
        "--policy shipped --episodes 12 --alpha 0.5",
    ),
    Step(
        "vla eval --policy runs/pick --env sim/pick-v0 --monitor runs/pick/monitor.json",
        f"{EPISODE} --videos 0 --policy shipped",
    ),
    Step("vla eval", f"{EPISODE} --videos 0"),
    Step("vla eval --policy runs/pick --env sim/pick-v0 sim/place-v0 --episodes 200", f"{EPISODE} --videos 0"),
    Step("vla eval --latency 0,100ms,300ms --mode sync naive rtc", f"{EPISODE} --videos 0"),
    Step("vla eval --latency 200ms --jitter gamma --mode all", f"{EPISODE} --videos 0"),
    Step("vla eval --mode all --execute 2 4 8", f"{EPISODE} --videos 0"),
    Step("vla eval --env imagined:shipped --episodes 20", "--episodes 1 --num-envs 1 --workers 0 --videos 0"),
    Step("vla eval --rollouts ray --workers 16", f"{EPISODE} --videos 0 --workers 1"),
    Step("vla eval --swap-instruction", f"{EPISODE} --videos 0"),
    Step("vla eval --suite shifts --env sim/pick-v0 sim/place-v0", f"{EPISODE} --splits camera"),
    Step("vla eval --suite shifts --splits camera distractors", EPISODE),
    Step("cp -r data/two data/held_out", row=False),
    Step("vla eval --open-loop --data data/held_out --policy runs/pick"),
    Step("vla compare shipped runs/pick --env sim/pick-v0 --budget 200", "--budget 1 --num-envs 1"),
    Step("ln -s pick runs/a && ln -s pick runs/b && ln -s pick runs/c", row=False),
    Step("vla compare runs/a runs/b runs/c --env sim/place-v0", "--budget 1 --num-envs 1"),
    Step("vla compare runs/a runs/b --margin 0.05 --budget 1000", "--budget 1 --num-envs 1"),
    Step("vla imagine --compare film.mp4 --seed 7"),
    Step("vla export --policy runs/pick --int8"),
    Step("vla export --policy runs/pick --out runs/pick_onnx"),
    Step("vla serve --policy runs/pick_onnx", f"--endpoint {ADDRESS}", "READY"),
    Step("vla run --robot sim --task pick --episodes 50 --mode naive", f"--server {ADDRESS} --episodes 1 --seconds 1"),
    Step("vla serve --policy runs/pick", f"--endpoint {ADDRESS}", "READY"),
    Step(
        "vla run --robot sim --task pick --mode sync --record-video 4",
        f"--server {ADDRESS} --episodes 1 --seconds 1 --record-video 1",
    ),
    Step("mkdir -p outputs/train && cp -r runs/pick outputs/train/rl_robot", row=False),
    Step("vla serve --policy outputs/train/rl_robot --follow", f"--endpoint {ADDRESS}", "READY"),
    Step(
        "vla run --robot sim --task pick --episodes 20 --record episodic --root data/runs",
        f"--server {ADDRESS} --episodes 1 --seconds 1",
    ),
    Step("vla serve --policy runs/pick --log serve.jsonl", f"--endpoint {ADDRESS}", "READY"),
    Step(
        "vla run --robot sim --task pick --record sentry --root data/odd --last 5",
        f"--server {ADDRESS} --episodes 1 --seconds 1",
    ),
    Step(
        "vla serve --policy shipped --endpoint ipc:///tmp/vla.sock --metrics-port 9100 --threads 4",
        f"--endpoint {ADDRESS} --metrics-port 0 --threads 1",
        "READY",
    ),
    Step("vla run --robot sim --task pick --log run.mcap", f"--server {ADDRESS} --episodes 1 --seconds 1"),
    Step("vla export --policy runs/pick && vla serve --policy runs/pick", f"--endpoint {ADDRESS}", "READY"),
    Step(
        "vla console --robot sim --task stack --mode rac --server tcp://127.0.0.1:5555 --root data/stack-rac",
        f"--task pick --server {ADDRESS} --port 18775",
        "open once",
    ),
    Step(
        "vla serve --policy runs/pick --protocol vla-eval",
        "--endpoint ws://127.0.0.1:18769",
        ready="READY",
    ),
    Step(
        "vla serve --policy runs/pick --protocol openpi --keys front=observation/image",
        "--endpoint ws://127.0.0.1:18777",
        "READY",
    ),
    Step(
        "vla run --robot sim --server ws://gpu:8000 --keys front=observation/image --mode naive",
        "--server ws://127.0.0.1:18777 --episodes 1 --seconds 1",
    ),
    Step("vla report outputs"),
    Step("vla robot check --robot sim --task pick", "--seconds 0.5"),
    Step("vla robot jog --robot sim --joint tcp_z.pos --by 0.03"),
    Step("vla robot serve --robot sim --endpoint tcp://127.0.0.1:5570", "--endpoint tcp://127.0.0.1:15570", "Ctrl-C"),
    Step(
        "vla teleop --robot sim --task pick --teleop keyboard --root data/mine --episodes 10",
        "--episodes 1 --seconds 1",
    ),
    Step("vla console --robot sim --task pick", "--port 18779", "open once"),
    Step(
        "vla console --robot sim --task pick --host 192.168.1.20",
        "--host 127.0.0.1 --port 18781 --root data/phone",
        "open once",
    ),
    Step("vla emulate so101 --leader --task so101_pick", ready="quit"),
    Step("vla emulate so101 --uncalibrated", ready="quit"),
    Step('echo "loss 0.1" | vla emulate so101', ready="done"),
    Step("vla demo", "--demonstrations 2 --steps 2 --episodes 1"),
    Step("vla demo --policy shipped --episodes 20", "--episodes 1"),
)
NOT_HERE = {  # part of an example -> what it needs that this machine may not have
    "port=/dev/": ARM,
    "robot_type=so101_follower": ARM,
    "tcp://gpu:": NETWORK,
    "arm.lab": NETWORK,
    "--base-url": NETWORK,
    "--vlm": NETWORK,
    "0.0.0.0": "an open port, and certificates",
    "gpu.lab": NETWORK,
    "PUBLIC": "a key that another command prints",
    "--device cuda": GPU,
    "--teleop gamepad": GAMEPAD,
    "run1/": OTHER_FILES,
    "night.mcap": OTHER_FILES,
    "data/lerobot": OTHER_FILES,
    "outputs/eval-a": "the evaluations and corrections of a project",
    "--monitor monitor.json --rearm ask": "a person who answers",
    "--root data/alarms": "a policy that fails while it runs",
    "model.safetensors": OTHER_FILES,
    "rollouts/X": "the name of a rollout",
    "runs/metaworld": "a policy for it",
    "runs/wsrl": "a policy for it: the README's row of WSRL trains one",
    "demo --task place": "the minutes of `vla demo` again",
}


def command(line: str) -> str:
    """An example without its comment, on one line."""
    return " ".join(line.replace("\\\n", " ").partition("#")[0].split())


def examples() -> list[str]:
    """The commands of all examples."""
    return [c for verb in VERBS for line in registry.VERBS.get(verb).EXAMPLES if (c := command(line))]


def left_out() -> dict[str, str]:
    """The examples that are not run, and why."""
    return {c: why for c in examples() for part, why in NOT_HERE.items() if part in c}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="run only the examples that contain it")
    word = parser.parse_args().word
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [step for step in readme.STEPS if step.command in FIRST]
    with tempfile.TemporaryDirectory(prefix="vla-examples-", ignore_cleanup_errors=True) as folder:
        failed = readme.run([*before, *(s for s in STEPS if word in s.command or not s.row)], Path(folder))
    for line, why in left_out().items():
        print(f"not here: needs {why}: {line}")
    print(f"\n{len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
