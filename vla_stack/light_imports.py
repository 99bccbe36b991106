"""Import some modules of a large package without running its initialisers.

LeRobot's initialisers import every policy, torchvision, transformers and diffusers: twenty seconds of CPU and 400 MB
before the first word. In a :func:`light` block empty packages stand in their place, and a name of such a package is
taken from the one sub-module that defines it. After the block only the sub-modules that were imported are left:
whoever imports such a package then runs its initialiser as usual, and finds the same classes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def light(packages: Sequence[str], later: Sequence[str] = ()) -> Iterator[None]:
    """Import sub-modules without their packages' initialisers.

    Args:
        packages: Full names. One that is imported already stays as it is.
        later: Modules that are imported in the block for objects which no module needs while it is being imported;
            those become :class:`Later` objects.
    """
    wanted = [name for name in packages if name not in sys.modules]
    spared = {name: _COMPLETING.spared.get(name) or _light_package(name) for name in wanted}
    missing = [name for name in later if name not in sys.modules]
    absent = {name: _LaterModule(name) for name in missing if "." in name or PathFinder.find_spec(name)}
    sys.modules.update({**spared, **absent})
    try:
        yield
    finally:
        for name in (*spared, *absent):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if name in spared:  # for those who imported it in the block and read its names later
                setattr(sys.modules[parent], child, spared[name])
            elif parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)
        _COMPLETING.spared.update(spared)
        if _COMPLETING not in sys.meta_path:
            sys.meta_path.insert(0, _COMPLETING)


class Later:
    """An object of a module that is imported when the object is called, subscribed or asked for an attribute."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def real(self) -> Any:
        """The object itself."""
        return getattr(import_module(self.module), self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.real()[key]

    def __instancecheck__(self, instance: Any) -> bool:
        return self.module in sys.modules and isinstance(instance, self.real())

    def __or__(self, other: Any) -> Any:  # of an annotation
        return Any


class _LaterModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # who asks whether it is installed looks at this

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Later(self.__name__, name)


class _LightPackage(ModuleType):
    """A package whose initialiser has not run; ``_sources`` says which sub-module defines a name of it."""

    _sources: dict[str, tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is not self and not name.startswith("__"):  # after the block
            return getattr(import_module(self.__name__), name)
        if name not in self._sources:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}' (its initialiser has not run)")
        module, attribute = self._sources[name]
        return getattr(import_module(module), attribute)


class _Completing(MetaPathFinder, Loader):
    """Runs a spared initialiser when its package is imported, in the object that has the sub-modules already."""

    def __init__(self) -> None:
        self.spared: dict[str, _LightPackage] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self.spared else None
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.spared[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        package = self.spared.pop(module.__name__)
        package.__class__ = ModuleType  # type: ignore[assignment]
        spec = PathFinder.find_spec(package.__name__, _parent_path(package.__name__))
        assert spec is not None and spec.loader is not None
        package.__spec__, package.__loader__ = spec, spec.loader
        spec.loader.exec_module(package)


_COMPLETING = _Completing()


def _light_package(name: str) -> _LightPackage:
    spec = PathFinder.find_spec(name, _parent_path(name))
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)
    package = _LightPackage(name)
    package.__spec__, package.__file__, package.__package__ = spec, spec.origin, name
    package.__path__ = list(spec.submodule_search_locations or ())
    package._sources = {
        alias.asname or alias.name: (resolve_name("." * node.level + (node.module or ""), name), alias.name)
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return package


def _parent_path(name: str) -> list[str]:
    return list(import_module(name.rpartition(".")[0]).__path__)
