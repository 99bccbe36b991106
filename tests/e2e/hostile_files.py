"""Hostile datasets, runs and constraints, opened by the verbs that take them, under an audit hook.

``python hostile_files.py FOLDER DATASET`` prints one JSON object: what was opened, which programs were started,
what was written outside each one's own folder, and what ended in anything but one line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
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
        inside |= path == tempfile.tempdir
        if not inside and "__pycache__" not in path and not path.startswith(("/dev", "/proc")):
            self.writes.append(f"{event} {os.fsdecode(name)}")


def main(folder: Path, dataset: Path) -> None:
    from vla_stack import cli

    victim, tempfile.tempdir = folder / "victim", str(folder / "tmp")  # LeRobot writes what it parses to a passing file
    for made in (victim, folder / "tmp"):
        made.mkdir(parents=True)
    (victim / "film.mp4").write_bytes(b"precious")
    watch, count, odd = Watch(), 0, []
    makers = (datasets(dataset, folder / "d"), runs(folder / "r"), constraints(folder / "c"))
    for group in ("d", "r", "c"):
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
                        code = cli.main(argv)
                except BaseException as e:
                    code = f"{type(e).__name__}: {e}"[:200]
                watch.home = None
                if code not in (0, 1):
                    odd.append([argv, code])
            shutil.rmtree(home, ignore_errors=True)
    kept = [p.name for p in victim.iterdir()] == ["film.mp4"] and (victim / "film.mp4").read_bytes() == b"precious"
    print(json.dumps({"count": count, "programs": watch.programs, "writes": watch.writes, "odd": odd, "kept": kept}))


if __name__ == "__main__":
    main(*(Path(name).resolve() for name in sys.argv[1:3]))
