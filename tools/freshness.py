"""Which result files are of the code and the inputs that are there now.

    python tools/freshness.py               # those that are not, and what changed: `make stale`
    python tools/freshness.py --run NAME    # measure one again, by the command that it names: `make reproduce NAME=...`

A result file records the digest of all that its script may import and of its inputs (:mod:`closure`); of older files,
which do not, they are those of the revision that is named. A module that has changed counts where the script may come
to what has (:mod:`parts`): not a definition that nothing of it names, nor comments and docstrings.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from closure import REGISTRY, ROOT, Digests, Tree, closure, git, names_in, registered
from parts import Parts, reached

REPORTING = ("--report", "--report-only")  # flags of scripts that write what was measured before
ANEW = "REPRODUCE_ANEW"  # set in the environment where nothing that was published is to be taken over


def script_of(record: dict[str, Any]) -> str:
    """The script that wrote a result file."""
    return shlex.split(record["command"])[1]


def recorded(record: dict[str, Any], root: Path = ROOT) -> Digests | None:
    """Digests of what a result file was made of; None where its revision is not known here."""
    if "sources" in record:
        return dict(record["sources"])
    try:
        tree = Tree(root, record["revision"].rstrip("+"))
        return closure(tree, script_of(record)) if script_of(record) in tree.blobs else None
    except subprocess.CalledProcessError:
        return None


def changed(record: dict[str, Any], now: Tree) -> list[str]:
    """Why a result file is stale: files that are others now, or what cannot be known; empty where it is fresh."""
    if (at := measured(record)).endswith("+") and ("measured" in record or "sources" not in record):
        return [f"measured on an uncommitted state of {at.rstrip('+')}"]
    of = recorded(record, now.root)
    if of is None:
        return [f"of revision {record['revision']}, which this repository does not hold"]
    # The registry's table may have new names: what it stands for where it was looked into is counted itself.
    others = {path: digest for path, digest in of.items() if path != REGISTRY and now.digest(path) != digest}
    if not others:
        return []
    words = _reached(now, set(of))
    return [path for path, digest in others.items() if _matters(now, path, digest, words)]


def _reached(tree: Tree, of: set[str]) -> set[str]:
    """Names of what may be come to from a script with such a closure (see :func:`parts.reached`)."""
    of &= tree.blobs.keys()
    files = {path: _parts(tree.text(path)) for path in of if path.endswith(".py")}
    begin = names_in(tree, of)
    by_name = set().union(*(modules.values() for modules in registered(tree).values())) if REGISTRY in files else set()
    for path, parts in files.items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if path.startswith("tools/") or module in by_name:  # what is loaded by its name has no other that is written
            begin |= set(parts).union(*(part.words for part in parts.values()))
    return reached((parts for path, parts in files.items() if path != REGISTRY), begin)


def _matters(tree: Tree, path: str, then: str, words: set[str]) -> bool:
    """Whether what is other in a file, since its content had a digest, is reached."""
    if path not in tree.blobs or not path.endswith(".py") or path.startswith("tools/"):
        return True
    try:
        before = git("cat-file", "blob", then, root=tree.root).decode()
        return bool(_parts(tree.text(path)).others(_parts(before)) & words)
    except (SyntaxError, subprocess.CalledProcessError):  # no Python, or the content is in no revision
        return True


@cache
def _parts(source: str) -> Parts:
    return Parts(source)


def still_true(path: Path, root: Path = ROOT) -> dict[str, Any]:
    """What a result file holds as ``data``, if all that it was made of is what is there now, and what it has of a long
    measurement need not be measured again; empty otherwise."""
    if os.environ.get(ANEW) or not path.exists():
        return {}
    record = json.loads(path.read_text())
    return {} if changed(record, Tree(root)) else dict(record["data"])


def sources(script: str, previous: Path, reporting: bool, inputs: Iterable[str] = (), root: Path = ROOT) -> Digests:
    """What a result file that is written now is made of.

    Args:
        script: Which writes it.
        previous: The file as it is, if it is there.
        reporting: Only what was measured before is reported: code outside ``tools/`` counts as it was then.
        inputs: Files and folders beside those that the code names.
        root: Of the repository.
    """
    now = closure(Tree(root), script, inputs)
    if not (reporting and previous.exists()):
        return now
    then = recorded(json.loads(previous.read_text()), root) or {}
    kept = {path: digest for path, digest in then.items() if not path.startswith("tools/")}
    return kept | {path: digest for path, digest in now.items() if path.startswith("tools/")} if kept else now


def revision(of: Digests, root: Path = ROOT) -> str:
    """HEAD, with ``+`` where a source differs from it; other files, such as results written before, do not count."""
    try:
        head = git("rev-parse", "--short=12", "HEAD", root=root).decode().strip()
        tree, now = Tree(root, "HEAD"), Tree(root)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if any(tree.digest(path) != now.digest(path) for path in of) else "")


def stale(results: Path, root: Path = ROOT) -> dict[str, list[str]]:
    """Result files that are not of what is there now, by name, and why."""
    now = Tree(root)
    found = {}
    for path in sorted(results.glob("*.json")):
        if why := changed(json.loads(path.read_text()), now):
            found[path.stem] = why
    return found


def measured(record: dict[str, Any]) -> str:
    """Revision of what was measured; the file itself may be a later report of that."""
    return str(record.get("measured", record["revision"]))


def dirty(results: Path) -> set[str]:
    """Result files that were measured, or written, on a state that is in no revision."""
    records = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    return {name for name, r in records.items() if "+" in measured(r) + r["revision"]}


def digest(tree: Tree, script: str) -> str:
    """Of all that a script may run."""
    return hashlib.sha256(json.dumps(sorted(closure(tree, script).items())).encode()).hexdigest()[:10]


def rerun(path: Path, root: Path = ROOT) -> int:
    """Run the command of a result file again, measuring all of it; returns its exit code."""
    words = [w for w in shlex.split(json.loads(path.read_text())["command"])[1:] if w not in REPORTING]
    if lost := [w for w in words if w.startswith("…/")]:
        print(f"{path.stem} was measured with {' '.join(lost)} of another machine: give its script one of this machine")
        return 1
    env = {**os.environ, ANEW: "1"}
    helped = subprocess.run([sys.executable, words[0], "--help"], cwd=root, env=env, capture_output=True, text=True)
    if "--out" in helped.stdout:  # what lies in the usual folder may be of other code
        words += ["--out", f"outputs/reproduce/{path.stem}-{digest(Tree(root), words[0])}"]
    print("python", shlex.join(words), flush=True)
    return subprocess.run([sys.executable, *words], cwd=root, env=env).returncode


def main() -> int:
    from results import RESULTS, parser

    p = parser(__doc__)
    p.add_argument("--run", metavar="NAME", help="measure this one again")
    args = p.parse_args()
    if args.run:
        path = RESULTS / f"{args.run}.json"
        if not path.exists():
            print(f"there is no {path.name}; there are {', '.join(sorted(q.stem for q in RESULTS.glob('*.json')))}")
            return 1
        return rerun(path)
    found = stale(RESULTS)
    for name, why in found.items():
        more = f" and {len(why) - 3} more" if len(why) > 3 else ""
        print(f"{name:<28}{', '.join(why[:3])}{more}")
    print(f"{len(found)} of {len(list(RESULTS.glob('*.json')))} result files are stale")
    return 0


if __name__ == "__main__":
    sys.exit(main())
