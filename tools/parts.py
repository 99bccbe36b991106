"""Which definitions of Python files a script may come to, by the names that are written down.

A file's *parts* are its functions, its classes (whole: other libraries call methods too), each name that is assigned
or imported, and the rest of its statements. A part is reached if something reached writes its name: as a name, an
attribute, or a word of a string, since what is looked up by name is written there. A name is the same name everywhere,
so more is called reached than is. Comments, docstrings and annotations of functions compute nothing and do not count.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

REST = ""  # name of the part that runs whenever the file is imported
# Decorators that hand a definition on to nobody; any other may enter it in a table, so what it decorates is reached.
PRIVATE = {"dataclass", "contextmanager", "asynccontextmanager", "cache", "lru_cache", "no_grad", "runtime_checkable"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


@dataclass
class Part:
    """One definition: digest of its code, and the words that it writes."""

    code: list[str] = field(default_factory=list)
    words: set[str] = field(default_factory=set)

    def add(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.code.append(hashlib.sha1(ast.dump(node).encode()).hexdigest())
            self.words |= set(_words(node))


class Parts(dict[str, Part]):
    """Parts of a file by name.

    Args:
        source: Text of a Python file.

    Raises:
        SyntaxError: It is none.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self._made: defaultdict[str, Part] = defaultdict(Part)
        for node in _silent(ast.parse(source)).body:
            self._put(node)
        self.update(self._made)

    def _put(self, node: ast.stmt) -> None:
        if isinstance(node, DEFINITIONS) and not _handed_on(node):
            self._made[node.name].add(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                part = self._made[alias.asname or alias.name.split(".")[0]]
                part.add(alias)
                part.code.append(f"{getattr(node, 'level', 0)} {getattr(node, 'module', '')}")
                part.words |= set(alias.name.split("."))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (names := _bound(node)):
            for name in names:
                if name != "__all__":  # offers names, uses none
                    self._made[name].add(node)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            self._made[REST].add(node)

    def others(self, then: Parts) -> set[str]:
        """Names of the parts that differ from those of another content, or are in one of the two alone."""
        return {n for n in self.keys() | then.keys() if n not in self or n not in then or self[n].code != then[n].code}


def reached(parts: Iterable[Parts], words: set[str]) -> set[str]:
    """Words that what is reached writes, which are the names of what is reached.

    Args:
        parts: Of all files that may be imported.
        words: Written where all begins.
    """
    seen, waiting = {REST, *words}, [item for file in parts for item in file.items()]
    while found := [part for name, part in waiting if name in seen]:
        waiting = [(name, part) for name, part in waiting if name not in seen]
        seen.update(*(part.words for part in found))
    return seen


def _words(node: ast.AST) -> Iterator[str]:
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            yield n.id
        elif isinstance(n, ast.Attribute):
            yield n.attr
        elif isinstance(n, ast.alias):
            yield from n.name.split(".")
        elif isinstance(n, ast.Constant) and isinstance(n.value, str):
            yield from re.findall(r"\w+", n.value)


def _silent(tree: ast.Module) -> ast.Module:
    """Without docstrings and without the annotations of functions and of their variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            body = [n for n in node.body if not _text(n)]
            node.body = body or [ast.Pass()]  # type: ignore[assignment]
        if isinstance(node, FUNCTIONS):
            node.returns = None
            for n in ast.walk(node):
                if isinstance(n, ast.arg):
                    n.annotation = None
                elif isinstance(n, ast.AnnAssign) and not isinstance(n.target, ast.Attribute):
                    n.annotation = ast.Constant(None)
    return tree


def _text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _handed_on(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether others may have it without its name: a decorator's table, or Python itself."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    named = [ast.unparse(call).split(".")[-1] for call in calls]
    return node.name.startswith("__") or not set(named) <= PRIVATE


def _bound(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Names that an assignment binds; none where it also changes something else."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [t.id for t in flat if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in flat) else []
