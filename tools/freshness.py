"""Which result files are of the code and the inputs that are there now.

    python tools/freshness.py               # those that are not, and what changed: `make stale`
    python tools/freshness.py --run NAME    # measure one again, by the command that it names: `make reproduce NAME=...`

A result file records the digest (git's, of the blob) of every module that its script could import and of every input,
read off the sources without running them; of older files, which do not, they are those of the revision that is named.
What is loaded by name counts where the name stands in the script, in its helpers under ``tools/`` or in an input:
tasks, policy types and methods through the registry's table, recipes, shipped policies; package data by file name.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REGISTRY = "vla_stack/registry.py"
ASSETS = "vla_stack/assets/"
RECIPES = "vla_stack/configs/"
DIGITS = 12
WRITERS = ("tools/results.py", "tools/freshness.py")  # write down what others have measured
REPORTING = ("--report", "--report-only")  # flags of scripts that write what was measured before
ANEW = "REPRODUCE_ANEW"  # set in the environment where nothing that was published is to be taken over
TEXT = (".json", ".yaml", ".md")  # inputs in which names are looked for
Digests = dict[str, str]  # path from the root of the tree -> digest


def git(*arguments: str, root: Path, text: bytes | None = None) -> bytes:
    """Output of a git command; raises CalledProcessError."""
    return subprocess.run(["git", *arguments], cwd=root, input=text, capture_output=True, check=True).stdout


class Tree:
    """The files of a revision, or those that lie there now.

    Args:
        root: Of the repository.
        revision: None for the working tree.

    Raises:
        subprocess.CalledProcessError: Git does not know the revision.
    """

    def __init__(self, root: Path = ROOT, revision: str | None = None) -> None:
        self.root, self.revision = root, revision

    @cached_property
    def blobs(self) -> Digests:
        """Every file; the digest is empty where it has not been looked at yet."""
        if self.revision is None:
            listed = git("ls-files", "-z", "-co", "--exclude-standard", root=self.root).decode().split("\0")
            return {path: "" for path in listed if path and (self.root / path).is_file()}
        lines = git("ls-tree", "-r", "-z", self.revision, root=self.root).decode().split("\0")
        return {line.split("\t")[1]: line.split()[2] for line in lines if line}

    def digest(self, path: str) -> str | None:
        """Of a file; None where there is none."""
        if path not in self.blobs:
            return None
        if not self.blobs[path]:
            self.blobs[path] = blob_digest((self.root / path).read_bytes())
        return self.blobs[path][:DIGITS]

    def text(self, path: str) -> str:
        """Of a file, as far as it is text."""
        if self.revision is None:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        return git("cat-file", "blob", self.blobs[path], root=self.root).decode(errors="replace")

    def facts(self, path: str) -> Facts:
        """What a Python file imports and names; parsed once a content."""
        self.digest(path)
        return _facts(self, path, self.blobs[path])

    def __hash__(self) -> int:
        return hash(self.root)

    def __eq__(self, other: object) -> bool:  # one cache of facts for all revisions: the blob says which content
        return isinstance(other, Tree) and other.root == self.root


def blob_digest(content: bytes) -> str:
    """Git's name of a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Facts:
    """What can be read off a Python file.

    Attributes:
        imports: (level, module, name) of each import, name empty for whole modules; not those for annotations alone.
        on_request: Imports of a module's ``__getattr__``, which happen where a name of :attr:`offered` is asked for.
        offered: Its ``__all__``.
        strings: Its string constants.
        kinds: Kinds of the registry that it looks names up in.
    """

    def __init__(self, source: str) -> None:
        self.imports: set[tuple[int, str, str]] = set()
        self.on_request: set[tuple[int, str, str]] = set()
        self.offered: set[str] = set()
        self.strings: set[str] = set()
        self.kinds: set[str] = set()
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
        typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        left_out = {id(node) for block in typing for node in ast.walk(block)}
        asked = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"]
        later = {id(node) for block in asked for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) in left_out:
                continue
            imports = self.on_request if id(node) in later else self.imports
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.offered |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
            if isinstance(node, ast.Import):
                imports |= {(0, alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imports |= {(node.level, node.module or "", alias.name) for alias in node.names}
                if (node.module or "").split(".")[-1] == "registry":
                    self.kinds |= {alias.name.lower() for alias in node.names if alias.name.isupper()}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "registry":
                self.kinds |= {node.attr.lower()} if node.attr.isupper() else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.strings.add(node.value)


@cache
def _facts(tree: Tree, path: str, blob: str) -> Facts:
    return Facts(tree.text(path))


def closure(tree: Tree, script: str, inputs: Iterable[str] = ()) -> Digests:
    """Digests of a script, of all of ours that it may import, and of the inputs that these name.

    Args:
        tree: Where to look.
        script: Path from the root.
        inputs: Further files and folders, from the root.
    """
    given = {path for path in tree.blobs for one in inputs if path == one or path.startswith(f"{one}/")}
    sources = _imported(tree, {script}, script)
    while True:
        found = given | _data(tree, sources)
        loaded = _imported(tree, sources | _registered(tree, sources, found), script)
        if loaded == sources and found == given:
            return {path: tree.digest(path) or "" for path in sorted(sources | found)}
        sources, given = loaded, found


def _imported(tree: Tree, begin: set[str], script: str) -> set[str]:
    """Those files and all that they import, in turn."""
    seen: set[str] = set()
    waiting = list(begin)
    while waiting:
        path = waiting.pop()
        if path not in seen and path in tree.blobs and path not in WRITERS:
            seen.add(path)
            waiting += _files(tree, path, script)
    return seen


def _files(tree: Tree, path: str, script: str) -> Iterator[str]:
    """Files of ours that a file imports; a package's ``__init__`` is imported with its modules."""
    yield from _found(tree, path, script, tree.facts(path).imports)


def _found(tree: Tree, path: str, script: str, imports: Iterable[tuple[int, str, str]]) -> Iterator[str]:
    folders = ["", "tools", str(PurePosixPath(script).parent)]
    for level, module, name in imports:
        if level:
            above = PurePosixPath(path).parts[:-level]
            names, searched = [*above, *filter(None, module.split("."))], [""]
        else:
            names, searched = module.split("."), folders
        for folder in searched:
            for end in range(1, len(names) + 1):
                stem = "/".join([*filter(None, [folder]), *names[:end]])
                yield from (f"{stem}.py", f"{stem}/__init__.py")
            if name:
                yield from (f"{stem}/{name}.py", f"{stem}/{name}/__init__.py")
            package = f"{stem}/__init__.py"
            if package in tree.blobs:
                facts = tree.facts(package)
                if name in facts.offered or not name:
                    yield from _found(tree, package, script, facts.on_request)


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text)}


def _registered(tree: Tree, sources: set[str], inputs: set[str]) -> set[str]:
    """Modules that are loaded by a name: of each kind that is looked up, those whose names stand in the script, its
    helpers and the inputs; all of the kind where none does. A package's ``__init__`` looks nothing up for those who
    import only its modules."""
    if REGISTRY not in sources:
        return set()
    of_tools = {path for path in sources if path.startswith("tools/")}
    texts = [s for path in of_tools for s in tree.facts(path).strings]
    words = _words([*texts, *(tree.text(path) for path in inputs if path.endswith(TEXT))])
    idle = {path for path in sources if path.endswith("/__init__.py") and not _asked(tree, sources, path)}
    kinds = set().union(*(tree.facts(path).kinds for path in sources - idle - {REGISTRY}))
    found: set[str] = set()
    for kind, modules in _table(tree).items():
        if kind in kinds and kind != "verbs":
            named = {module for name, module in modules.items() if name in words} or set(modules.values())
            found |= {f"{m.replace('.', '/')}{end}" for m in named for end in (".py", "/__init__.py")}
    return found & tree.blobs.keys()


def _asked(tree: Tree, sources: set[str], package: str) -> bool:
    """Whether anything of a package itself is imported, and not only modules that lie in it."""
    folder = PurePosixPath(package).parent
    for path in sources:
        for level, module, name in tree.facts(path).imports:
            above = PurePosixPath(path).parents[level - 1] if level else PurePosixPath()
            if above / module.replace(".", "/") == folder:
                if not {f"{folder}/{name}.py", f"{folder}/{name}/__init__.py"} & tree.blobs.keys():
                    return True
    return False


def _table(tree: Tree) -> dict[str, dict[str, str]]:
    """The registry's built-in table, kind -> name -> module; what is computed there is taken as named always."""
    for node in ast.walk(ast.parse(tree.text(REGISTRY))):
        if not (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "BUILT_IN"):
            continue
        if isinstance(node.value, ast.Dict):
            table = {}
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(value, ast.Dict):
                    pairs = zip(value.keys, value.values, strict=True)
                    modules = {ast.literal_eval(k): ast.literal_eval(v).split(":")[0] for k, v in pairs if k}
                else:
                    modules = {m: m for m in re.findall(r"\b(?:vla_stack|sim|robot_drivers)[\w.]+", ast.unparse(value))}
                table[str(ast.literal_eval(key))] = modules  # type: ignore[arg-type]
            return table
    return {}


def _data(tree: Tree, sources: set[str]) -> set[str]:
    """Files beside the code that it names: recipes by their stem, from ``tools/``; shipped weights by their folder;
    other files of our packages by their own name."""
    by_tools = _words(s for path in sources if path.startswith("tools/") for s in tree.facts(path).strings)
    strings = set().union(*(tree.facts(path).strings for path in sources))
    found = set()
    for path in tree.blobs:
        p = PurePosixPath(path)
        if path.endswith(".py") or p.suffix == ".md":
            continue
        if path.startswith(RECIPES):
            named = p.stem in by_tools and "vla_stack/training/recipe.py" in sources
        elif path.startswith(ASSETS):
            named = p.parent.name in strings
        else:
            named = path.startswith(("vla_stack/", "sim/", "robot_drivers/")) and p.name in strings
        if named:
            found.add(path)
    return found


# --- Result files -----------------------------------------------------------------------------------------------------


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
    return [path for path, digest in of.items() if path != REGISTRY and now.digest(path) != digest]


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


def rerun(path: Path, root: Path = ROOT) -> int:
    """Run the command of a result file again, measuring all of it; returns its exit code."""
    words = [w for w in shlex.split(json.loads(path.read_text())["command"])[1:] if w not in REPORTING]
    print("python", shlex.join(words), flush=True)
    return subprocess.run([sys.executable, *words], cwd=root, env={**os.environ, ANEW: "1"}).returncode


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
