"""What a script is made of: every module that it could import and every input, read off the sources without running.

What is loaded by name counts where the name stands in the script, in its helpers under ``tools/`` or in an input:
tasks, policy types and methods through the registry's table, recipes, shipped policies; package data by file name;
verbs of the command line where it is run.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
REGISTRY = "vla_stack/registry.py"
ASSETS = "vla_stack/assets/"
RECIPES = "vla_stack/configs/"
DIGITS = 12
WRITERS = ("tools/results.py", "tools/freshness.py", "tools/closure.py", "tools/parts.py")  # compute no figures
CLI = "vla_stack.cli"
TEXT = (".json", ".yaml", ".md")  # inputs in which names are looked for
VOCABULARY = "/tokenizer.json"  # of a language: it names everything, and means nothing by it
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
                self.offered |= {str(n.value) for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
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


def names_in(tree: Tree, paths: Iterable[str]) -> set[str]:
    """Words of those files that are text and no vocabulary."""
    return words_in(tree.text(path) for path in paths if path.endswith(TEXT) and not path.endswith(VOCABULARY))


def words_in(texts: Iterable[str]) -> set[str]:
    """Words and names that texts hold."""
    return {word for text in texts for word in re.findall(r"\w+", text)}


def _registered(tree: Tree, sources: set[str], inputs: set[str]) -> set[str]:
    """Modules that are loaded by a name: of each kind that is looked up, those whose names stand in the script, its
    helpers and the inputs; all of the kind where none does. A package's ``__init__`` looks nothing up for those who
    import only its modules."""
    if REGISTRY not in sources:
        return set()
    of_tools = {path for path in sources if path.startswith("tools/")}
    texts = [s for path in of_tools for s in tree.facts(path).strings]
    words = words_in(texts) | names_in(tree, inputs)
    idle = {path for path in sources if path.endswith("/__init__.py") and not _asked(tree, sources, path)}
    kinds = set().union(*(tree.facts(path).kinds for path in sources - idle - {REGISTRY}))
    runs = CLI in texts or any(CLI == module for path in of_tools for _, module, _ in tree.facts(path).imports)
    found: set[str] = set()
    for kind, modules in registered(tree).items():
        if runs if kind == "verbs" else kind in kinds:
            named = {module for name, module in modules.items() if name in words}
            named = named or (set() if kind == "verbs" else set(modules.values()))
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


def registered(tree: Tree) -> dict[str, dict[str, str]]:
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
    by_tools = words_in(s for path in sources if path.startswith("tools/") for s in tree.facts(path).strings)
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
