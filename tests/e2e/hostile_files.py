"""Hostile datasets, runs, constraints and policies, opened by the verbs that take them, under an audit hook.

``python hostile_files.py FOLDER DATASET POLICY [N]`` takes every Nth of the policies, and prints one JSON object: what
was opened, which programs were started, what was written outside each one's own folder, and what ended in anything but
one line.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CLASSES = ("subprocess.Popen", "os.system", "builtins.exec", "pty.spawn", "shutil.rmtree", "webbrowser.open")
CLASSES += ("lerobot.processor.IdentityProcessorStep", "evil.Step", "pathlib.Path.write_text", "runpy.run_path")
PLACES = ("../victim", "../../victim", "/etc/passwd", "/tmp/victim", "a/../../victim", "..\\victim", "victim\0")
TEMPLATES = ("../victim/{file_index}", "/tmp/{file_index}", "data/../../{file_index}", "{chunk_index.__class__}")
TEMPLATES += ("{file_index:999999999d}", "data/{file_index}/../../../x", "{video_key}/../../x", "{0}", "{evil}")
MODULES = ("evil:loss", "os:system", "antigravity:x", "subprocess:Popen", "this:d")


OURS = (("git", "rev-parse"), ("git", "status"), ("uname", "-p"))  # what a report says of code and machine


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def datasets(source: Path, base: Path) -> Iterator[tuple[Path, list[list[str]]]]:
    """Datasets whose keys, templates and links lead out of them."""

    def case(name: str) -> Path:
        shutil.copytree(source, path := base / name / "data")
        (path / "meta/digests.jsonl").unlink(missing_ok=True)
        return path

    def asking(path: Path) -> tuple[Path, list[list[str]]]:
        verbs: list[list[str]] = [["data", what, str(path)] for what in ("check", "repair", "backfill", "seal", "info")]
        return path, verbs

    for i, place in enumerate(PLACES):
        path = case(f"key-{i}")
        video = {"dtype": "video", "shape": [4, 4, 3], "names": None}
        edited(path / "meta/info.json", lambda t, p=place, v=video: t | {"features": t["features"] | {p: v}})
        yield asking(path)
        path = case(f"empty-{i}")
        change = {"features": {place: video}, "total_episodes": 0, "total_frames": 0}
        edited(path / "meta/info.json", lambda t, c=change: t | c)
        yield asking(path)
    for key in ("data_path", "video_path"):
        for i, template in enumerate(TEMPLATES):
            path = case(f"{key}-{i}")
            edited(path / "meta/info.json", lambda t, k=key, v=template: t | {k: v})
            yield asking(path)
    for i, name in enumerate(("data", "videos", "meta/episodes", ".recording", ".damaged", ".pending")):
        path = case(f"link-{i}")
        shutil.rmtree(path / name, ignore_errors=True)
        (path / name).symlink_to(base / "victim")
        yield asking(path)
    for i, name in enumerate(("meta/.info.json.tmp", "meta/.tasks.parquet.tmp", "meta/.digests.jsonl.tmp")):
        path = case(f"tmp-{i}")
        (path / name).symlink_to(base / "victim" / "film.mp4")
        yield asking(path)
    for i, text in enumerate(("[" * 200_000, "[]", '{"codebase_version": 3}', "null", '"x"')):
        path = case(f"info-{i}")
        (path / "meta/info.json").write_text(text)
        yield asking(path)


def runs(base: Path) -> Iterator[tuple[Path, list[list[str]]]]:
    """Run directories whose recipe names code, or whose folders are links."""
    for i, module in enumerate(MODULES):
        lines = (f"method: {{name: '{module}'}}", f"eval: {{every: 1, envs: ['{module}']}}", f"env: '{module}'")
        for j, line in enumerate((*lines, f"policy: {{type: '{module}'}}", f"loop: '{module}'")):
            path = base / f"run-{i}-{j}"
            path.mkdir(parents=True)
            (path / "recipe.yaml").write_text(f"{line}\n")
            yield path, [["train", "--resume", str(path)]]
    for i, text in enumerate(
        ("!!python/object/apply:os.system ['touch victim']", "a: !!python/name:os.system", "- 1", "[")
    ):
        path = base / f"yaml-{i}"
        path.mkdir(parents=True)
        (path / "recipe.yaml").write_text(text)
        yield path, [["train", "--resume", str(path)]]


def constraints(base: Path) -> Iterator[tuple[Path, list[list[str]]]]:
    """Constraint files that name code, or more than a reader should read."""
    stage = "version: 1\nstages:\n- name: a\n  done: {DONE}\n  costs: [{type: COST}]\n"
    texts = [stage.replace("COST", f"'{name}'").replace("DONE", "near: [a, b, 1]") for name in (*CLASSES, *MODULES)]
    texts += [stage.replace("COST", "distance").replace("DONE", f"'{name}': [a]") for name in (*CLASSES, *MODULES)]
    texts += ["!!python/object/apply:os.system ['touch victim']", "a: &a [*a]", "[" * 5000, "x" * 100_000]
    for i, text in enumerate(texts):
        path = base / f"constraints-{i}"
        path.mkdir(parents=True)
        (path / "x.yaml").write_text(text)
        yield path, [["constraints", "check", str(path / "x.yaml"), "--task", "pick"]]


class Bomb:
    """Starts a program where a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch victim",)


WEIGHTS = tuple(  # of a safetensors file: the length of its header, and the header
    (length or len(text), text)
    for length, text in (
        (2**63, b"{}"),
        (2**40, b"{}"),
        (1 << 24, b"{}"),
        (0, b"["),
        (0, b"[" * 100_000),
        (0, b"null"),
        (0, b'{"a": 3}'),
        (0, b'{"a": {"dtype": "F32", "shape": [1000000000, 1000000000], "data_offsets": [0, 4]}}'),
        (0, b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
        (0, b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [9, 4]}}'),
        (0, b'{"a": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}}'),
    )
)


def policies(source: Path, base: Path) -> Iterator[tuple[Path, list[list[str]]]]:
    """Policy directories that name code, lead out of themselves, or hold what no policy holds."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.processor import ProcessorStepRegistry

    from vla_stack.policies.registry import LEROBOTS, STEPS, known_types
    from vla_stack.registry import POLICIES

    known_types()  # which registers all of LeRobot's with LeRobot
    number = itertools.count()
    halves = ("policy_preprocessor.json", "policy_postprocessor.json")

    def case(name: str) -> Path:
        shutil.copytree(source, path := base / name / "policy")
        (path / "manifest.json").unlink(missing_ok=True)
        return path

    def asking(path: Path) -> tuple[Path, list[list[str]]]:
        once = "--env sim/pick-v0 --episodes 1 --max-steps 1 --workers 0 --mode sync --videos 0".split()
        verbs = [["policy", "verify", str(path)], ["serve", str(path)]]
        if next(number) % 16 == 0:  # they load as `serve` does
            verbs.append(["policy", "info", str(path)])
            verbs.append(["eval", "--policy", str(path), *once, "--out", str(path / "out")])
            verbs.append(["export", "--policy", str(path), "--out", str(path / "onnx")])
        return path, verbs

    def stepping(name: str, step: Any, half: str = halves[0]) -> tuple[Path, list[list[str]]]:
        path = case(name)
        edited(path / half, lambda t: t | {"steps": [step, *t["steps"]]})
        return asking(path)

    def configured(name: str, change: dict[str, Any]) -> tuple[Path, list[list[str]]]:
        path = case(name)
        edited(path / "config.json", lambda t: t | change)
        return asking(path)

    def holding(name: str, file: str, content: bytes) -> tuple[Path, list[list[str]]]:
        path = case(name)
        (path / file).write_bytes(content)
        return asking(path)

    for half in halves:
        for i, name in enumerate(CLASSES):
            yield stepping(f"class-{half}-{i}", {"class": name, "config": {"args": ["touch", "victim"]}}, half)
        for i, place in enumerate(PLACES):
            step = {"registry_name": "normalizer_processor", "config": {}, "state_file": place}
            yield stepping(f"state-{half}-{i}", step, half)
    for name in sorted(set(ProcessorStepRegistry.list()) - set(STEPS)):
        yield stepping(f"step-{name}", {"registry_name": name, "config": {}})
    for i, place in enumerate(PLACES):
        yield stepping(f"tokenizer-{i}", {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": place}})
    for name in sorted(set(PreTrainedConfig.get_known_choices()) - {*LEROBOTS, *POLICIES.built_in()}):
        yield configured(f"type-{name}", {"type": name})
        yield configured(f"base-{name}", {"type": "moh", "base": {"type": name, "pretrained_path": "../victim"}})
    for i, name in enumerate((*CLASSES, *MODULES, *PLACES)):
        yield configured(f"named-{i}", {"type": name})
        yield configured(f"key-{i}", {name: "touch victim", "device": name})
        yield configured(f"start-{i}", {"pretrained_path": name, "backbone": {"weights": name, "tokenizer": name}})
    for i, (length, text) in enumerate(WEIGHTS):
        for file in ("model.safetensors", *(p.name for p in source.glob("policy_*.safetensors"))):
            yield holding(f"weights-{i}-{file}", file, struct.pack("<Q", length) + text + bytes(8))
    bomb = pickle.dumps(Bomb())
    for i, file in enumerate(("model.safetensors", "config.json", halves[0], "manifest.json", "signature.json")):
        yield holding(f"pickle-{i}", file, bomb)
        path = case(f"link-{i}")
        (path / file).unlink(missing_ok=True)
        (path / file).symlink_to(base / "victim" / "film.mp4")
        yield asking(path)
    for i, file in enumerate(
        ("pytorch_model.bin", "training_state.pt", "model.onnx", "adapter.bin", "tokenizer.model")
    ):
        yield holding(f"beside-{i}", file, bomb)
    for i, text in enumerate(("[" * 100_000, "null", "[]", '{"format": 1, "files": 3}', '{"format": 1}', "x" * 2**21)):
        yield holding(f"manifest-{i}", "manifest.json", text.encode())
    for i, place in enumerate(PLACES):
        listed = {"format": 1, "files": {place: "0" * 64}}
        yield holding(f"listed-{i}", "manifest.json", json.dumps(listed).encode())
        path = case(f"onnx-{i}")
        graphs = {"inputs": [place], "layers": 1, "horizon": 8, "noise_dim": 5, "action_dim": 5}
        (path / "onnx.json").write_text(json.dumps(graphs | {"inference_steps": 3, "max_delay": 0}))
        for graph in ("prefix.onnx", "step.onnx"):
            (path / graph).write_bytes((bomb, place.encode(), b"", bytes(9))[i % 4])
        yield asking(path)
    for i, place in enumerate(PLACES[:3]):
        path = case(f"adapter-{i}")
        (path / "model.safetensors").unlink()
        (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": place}))
        yield asking(path)
    code = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    path = case("auto-map")
    (path / "evil.py").write_text("import os; os.system('touch victim')")
    (path / "tokenizer_config.json").write_text(json.dumps(code))
    step = {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": str(path)}}
    edited(path / halves[0], lambda t: t | {"steps": [step, *t["steps"]]})
    yield asking(path)


def ask(argv: list[str]) -> object:
    """A verb's exit status; ``serve`` only loads, as it would otherwise wait for robots."""
    from vla_stack import cli
    from vla_stack.errors import UserError
    from vla_stack.verbs.serve import load_directory

    if argv[0] != "serve":
        return cli.main(argv)
    try:
        load_directory(Path(argv[1]), "cpu", 1)
    except UserError as e:
        print(e)
        return 1
    return 0


class Watch:
    """What a process does to the world while it is on."""

    def __init__(self) -> None:
        self.home: Path | None = None
        self.programs: list[str] = []
        self.writes: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.home is None:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn"):
            if not (event == "subprocess.Popen" and tuple(args[1][:2]) in OURS):
                self.programs.append(f"{event} {args}"[:200])
        elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int):
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                self.outside(event, args[0])
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate"):
            for name in args[: 2 if event in ("os.rename", "os.link") else 1]:
                if isinstance(name, str | bytes):
                    self.outside(event, name)

    def outside(self, event: str, name: str | bytes) -> None:
        assert self.home is not None
        path = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(name))))
        inside = path == str(self.home.parent) or path.startswith(f"{self.home.parent}/")
        inside |= tempfile.tempdir in (path, os.fsdecode(name))
        if not inside and "__pycache__" not in path and not path.startswith(("/dev", "/proc")):
            self.writes.append(f"{event} {os.fsdecode(name)}")


def main(folder: Path, dataset: Path, policy: Path, every: int) -> None:
    victim, tempfile.tempdir = folder / "victim", str(folder / "tmp")  # LeRobot writes what it parses to a passing file
    for made in (victim, folder / "tmp"):
        made.mkdir(parents=True)
    (victim / "film.mp4").write_bytes(b"precious")
    watch, count, odd = Watch(), 0, []
    makers = (datasets(dataset, folder / "d"), runs(folder / "r"), constraints(folder / "c"))
    makers += (itertools.islice(policies(policy, folder / "p"), 0, None, every),)
    for group in ("d", "r", "c", "p"):
        (folder / group).mkdir()
        (folder / group / "victim").symlink_to(victim)
    for maker in makers:
        for home, commands in maker:
            count += 1
            for argv in commands:
                out = io.StringIO()
                code: object
                watch.home = home.resolve()
                try:
                    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
                        code = ask(argv)
                except BaseException as e:
                    code = f"{type(e).__name__}: {e}"[:200]
                watch.home = None
                if code not in (0, 1):
                    odd.append([argv, code])
            shutil.rmtree(home, ignore_errors=True)
    kept = [p.name for p in victim.iterdir()] == ["film.mp4"] and (victim / "film.mp4").read_bytes() == b"precious"
    print(json.dumps({"count": count, "programs": watch.programs, "writes": watch.writes, "odd": odd, "kept": kept}))


if __name__ == "__main__":
    main(*(Path(name).resolve() for name in sys.argv[1:4]), int(sys.argv[4]) if sys.argv[4:] else 1)
