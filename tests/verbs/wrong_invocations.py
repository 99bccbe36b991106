"""Mistakes that people type, each with a word that its message has to hold; ``python wrong_invocations.py`` makes them.

Prints one JSON list: for each invocation its exit code, what it said, and what it had imported that is heavy.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

from vla_stack.policies.directory import resolve_policy

HEAVY = ("torch", "lerobot", "transformers")
VERBS = ("collect", "data", "train", "policy", "eval", "constraints", "imagine", "export", "serve", "keys", "run")
VERBS += ("robot", "teleop", "emulate", "console", "demo", "doctor", "compare", "monitor", "report")
REQUIRED = {"collect": ["--task", "pick", "--root", "x"], "data": ["info", "x"], "policy": ["info", "shipped"]}
REQUIRED |= {"constraints": ["check", "x.yaml"], "export": ["--out", "x"], "robot": ["check"], "emulate": ["so101"]}
REQUIRED |= {"compare": ["shipped", "native_multitask"], "monitor": ["fit"], "report": ["x"]}
COUNTS = (("collect", "episodes"), ("collect", "image-size"), ("constraints", "episodes"), ("demo", "demonstrations"))
COUNTS += (("demo", "steps"), ("demo", "episodes"), ("run", "episodes"), ("run", "execute"), ("run", "interpolate"))
COUNTS += (
    ("compare", "budget"),
    ("compare", "num-envs"),
    ("monitor", "episodes"),
    ("teleop", "episodes"),
    ("serve", "threads"),
    ("collect", "branch"),
)
WHOLE = (("collect", "seed"), ("collect", "workers"), ("demo", "seed"), ("run", "seed"), ("teleop", "seed"))
WHOLE += (("eval", "seed"), ("eval", "workers"), ("eval", "videos"), ("imagine", "seed"), ("policy", "repeats"))
WHOLE += (("console", "iteration"), ("console", "quota"), ("data", "episode"), ("run", "record-video"))
WHOLE += (("emulate", "seed"),)
NUMBERS = (("collect", "control-hz"), ("constraints", "timeout"), ("run", "seconds"), ("run", "hold-s"))
NUMBERS += (
    ("compare", "margin"),
    ("compare", "alpha"),
    ("monitor", "alpha"),
    ("run", "last"),
    ("teleop", "seconds"),
    ("console", "seconds"),
    ("emulate", "fps"),
    ("robot", "seconds"),
)
PORTS = (("serve", "metrics-port"), ("imagine", "port"), ("console", "port"))


def invocations(folder: Path) -> list[tuple[list[str], str]]:
    """Command lines, and what the message has to name."""
    (folder / "file").write_text("{")
    (folder / "empty").mkdir()
    (folder / "bad.yaml").write_text("steps: [")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "typo.yaml").write_text("stepz: 3\n")
    out: list[tuple[list[str], str]] = [(["trian"], "trian"), (["--lsit"], "--lsit"), (["policies"], "policies")]
    for verb in VERBS:
        own = REQUIRED.get(verb, [])
        if verb not in ("keys",):
            out.append(([verb, *own, "--no-such-option"], "no-such-option"))
    for verb, name in COUNTS:
        out += [([verb, *REQUIRED.get(verb, []), f"--{name}", v], f"--{name}") for v in ("0", "-3", "many", "1.5")]
    for verb, name in WHOLE:
        out += [([verb, *REQUIRED.get(verb, []), f"--{name}={v}"], f"--{name}") for v in ("-1", "x", "1e3")]
    for verb, name in NUMBERS:
        out += [
            ([verb, *REQUIRED.get(verb, []), f"--{name}={v}"], f"--{name}") for v in ("nan", "-1", "inf", "fast", "0")
        ]
    for verb, name in PORTS:
        out += [([verb, f"--{name}={v}"], f"--{name}") for v in ("-1", "65536", "http")]
    for verb in ("policy", "eval", "serve"):
        out += [([verb, *REQUIRED.get(verb, []), f"--device={v}"], "--device") for v in ("gpu", "cuda:x", "tpu:0")]
    bare = str(folder / "bare")  # weights alone
    shutil.copytree(resolve_policy("shipped"), bare, ignore=shutil.ignore_patterns("chunk.onnx", "onnx.json"))
    nothing, file, empty = str(folder / "nothing"), str(folder / "file"), str(folder / "empty")
    for what in ("info", "check", "repair", "seal", "backfill"):
        out += [(["data", what, path], path) for path in (nothing, file, empty)]
    out += [
        (["data"], "what"),
        (["data", "inspect", empty], "inspect"),
        (["data", "info", empty, nothing], "takes one dataset"),
        (["data", "relabel", empty], "--frames"),
        (["data", "relabel", empty, "--frames", "5-9", "--segment", "recovery"], "--frames"),
        (["data", "relabel", empty, "--frames", "5:9", "--segment", "fall"], "fall"),
        (["data", "merge", empty], "--into"),
        (["data", "merge", nothing, empty, "--into", str(folder / "all")], nothing),
        (["data", "view", nothing], nothing),
        (["train"], "no recipe given"),
        (["train", nothing], nothing),
        (["train", empty], empty),
        (["train", str(folder / "bad.yaml")], "bad.yaml"),
        (["train", str(folder / "list.yaml")], "list.yaml"),
        (["train", str(folder / "typo.yaml")], "stepz"),
        (["train", "--resume", nothing], nothing),
        (["train", "--resume", empty], empty),
        (["train", "--resume", file], file),
        *((["train", "vla_stack/configs/pick.yaml", override], override.split("=")[0]) for override in OVERRIDES),
        (["policy"], "what"),
        (["policy", "inspect", "shipped"], "inspect"),
        *((["policy", what, path], path) for what in ("info", "sign", "verify") for path in (nothing, file, empty)),
        (["policy", "key", file], file),
        (["policy", "key", f"{nothing}/key.pem"], f"{nothing}/key.pem"),
        (["policy", "info", "native_multitaks"], "native_multitaks"),
        *((["export", "--policy", path, "--out", f"{folder}/out"], path) for path in (nothing, file, empty)),
        *((["serve", "--policy", path], path) for path in (nothing, file, empty)),
        (["serve", "--policy", "shiped"], "shiped"),
        (["serve", "--backend", "jax"], "jax"),
        (["serve", "--policy", bare, "--backend", "onnx"], "no exported graphs"),
        *(([verb, "--embodiment", "nobody"], "nobody") for verb in ("serve", "eval")),
        *((["eval", "--policy", path], path) for path in (nothing, file, empty)),
        (["eval", "--mode", "fast"], "fast"),
        (["compare", "shipped"], "shipped"),
        (["compare", "shipped", "shipped"], "shipped"),
        *((["compare", "shipped", path], path) for path in (nothing, file, empty)),
        (["compare", "shipped", "runs/a", "--robot", "sim"], "shipped"),
        *((["eval", "--env", "sim/pick-v0", name], name) for name in ("sim/pikc-v0", "pick", "CartPole-v9")),
        (["constraints", "check"], "needs a file"),
        *((["constraints", what, nothing], nothing) for what in ("check", "explain")),
        (["constraints", "check", str(folder / "bad.yaml")], "bad.yaml"),
        (["constraints", "check", str(folder / "list.yaml")], "list.yaml"),
        (["constraints", "check", str(folder / "typo.yaml")], "stepz"),
        (["constraints", "check", empty], empty),
        (["constraints", "check", "vla_stack/configs/constraints/obstacle.yaml", "--task", "juggle"], "juggle"),
        (["constraints", "check", "vla_stack/configs/constraints/obstacle.yaml", "--costs", nothing], nothing),
        (["constraints", "check", "vla_stack/configs/constraints/obstacle.yaml", "--objective", "beauty"], "beauty"),
        (["collect", "--root", f"{folder}/new"], "--task"),
        (["collect", "--task", "juggle", "--root", f"{folder}/new"], "juggle"),
        (["collect", "--task", "pick"], "--root"),
        (["collect", "--task", "pick", "--root", file], file),
        (["collect", "--task", "pick", "--root", f"{folder}/new", "--noise", "-1"], "--noise"),
        (["collect", "--task", "pick", "--root", f"{folder}/new", "--image-mode", "gif"], "gif"),
        (["keys"], "ACTION"),
        (["keys", "forge"], "forge"),
        (["keys", "--keys", empty, "show"], empty),
        (["keys", "--keys", empty, "revoke", "arm"], "arm"),
        (["keys", "--keys", empty, "trust", "nowhere", "key"], "nowhere"),
        (["run", "--robot", "hexapod"], "hexapod"),
        (["run", "--robot-arg", "port"], "port"),
        (["run", "--limits", nothing], nothing),
        (["run", "--mode", "fast"], "fast"),
        (["teleop", "--robot", "hexapod"], "hexapod"),
        (["emulate", "so999"], "so999"),
        (["robot", "dance"], "dance"),
        (["demo", "--task", "juggle"], "juggle"),
        (["demo", "--mode", "fast"], "fast"),
        (["demo", "--recipe", nothing], nothing),
    ]
    return out


OVERRIDES = (
    "steps=0",
    "steps=many",
    "stepz=3",
    "method.optimizer.lr=nan",
    "method.optimizer.lr=-1",
    "batch_size=0",
    "ema=1",
    "policy=3",
)
OVERRIDES += (
    "precision=fp8",
    "processes=0",
    "data.weights=lucky",
    "method.steps=0",
    "method.stepz=3",
    "policy.lora={rank: 4}",
)


class Blocked:
    """Says what was asked for, and that it is not there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in HEAVY:
            self.asked.append(name)
            raise ModuleNotFoundError(f"{name} is heavy", name=name)


def main(folder: Path) -> None:
    from vla_stack import cli

    blocked, said = Blocked(), []
    sys.meta_path.insert(0, blocked)
    for argv, word in invocations(folder):
        out, blocked.asked = io.StringIO(), []
        code: object
        with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
            try:
                code = cli.main(argv)
            except SystemExit as e:  # argparse's
                code = e.code
            except BaseException as e:
                code = f"{type(e).__name__}: {e}"
        said.append({"argv": argv, "word": word, "code": code, "text": out.getvalue(), "heavy": blocked.asked})
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
