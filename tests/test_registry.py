"""The registry: every entry resolves, other packages add theirs, and nothing else imports our modules by string."""

import ast
import re
import sys
from pathlib import Path

import pytest

from vla_stack import registry
from vla_stack.cli import VERBS, main
from vla_stack.errors import UserError
from vla_stack.registry import BUILT_IN, COSTS, METHODS, POLICIES, ROBOTS
from vla_stack.trust import check_recipe

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("vla_stack", "sim", "robot_drivers")
OF_OTHERS = {  # bitsandbytes, LeRobot's devices, LeRobot's modules
    "vla_stack/training/optimizer.py",
    "robot_drivers/lerobot_build.py",
    "vla_stack/light_imports.py",
    "vla_stack/lerobot_core.py",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of one module, with entry points, as far as Python can tell."""

    def make(name: str, source: str, entry_points: str) -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return make


def listed(node: ast.AST) -> set[object]:
    """The literals of a tuple, list or set, or of the keys of a mapping."""
    items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
    return {item.value for item in items if isinstance(item, ast.Constant)}


def test_no_module_keeps_a_second_list_of_names():
    """So whoever adds one adds a line to the table, beside its own files."""
    kinds = ("methods", "policies", "environments", "benchmarks", "tasks", "robots", "teleoperators")
    found = []
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            if where in ("vla_stack/registry.py", "vla_stack/training/recipe_tree.py"):  # the table; old keys
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found += [f"{where}:{node.lineno} {k}" for k in kinds if len(listed(node) & BUILT_IN[k].keys()) > 1]
    assert not found, found


@pytest.mark.parametrize("kind", registry.ALL, ids=lambda kind: kind.kind)
def test_every_built_in_entry_resolves(kind):
    for name in kind.built_in():
        assert kind.get(name) is not None, name
    assert tuple(kind.built_in()) == kind.names()[: len(kind.built_in())]


def test_every_kind_of_the_table_has_a_registry_and_every_verb_a_line():
    assert BUILT_IN.keys() <= {kind.kind for kind in registry.ALL}
    assert list(VERBS) == list(BUILT_IN["verbs"])


def test_a_package_registers_by_its_entry_point(install):
    install("spring-robot", "class Spring: ...", "[vla_stack.robots]\nspring = spring_robot:Spring\n")
    assert ROBOTS.names()[-1] == "spring" and ROBOTS.entry("spring").package == "spring-robot"
    assert "spring_robot" not in sys.modules  # known without being imported
    assert ROBOTS.get("spring").__name__ == "Spring"
    assert ROBOTS.get("spring_robot:Spring") is ROBOTS.get("spring")  # also by where it is


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "imitatoin",
            "there is no method 'imitatoin' -- did you mean 'imitation'[?] the methods are imitation, ",
        ),
        ("zzz", "there is no method 'zzz' -- the methods are .*; one of your own is module:attribute"),
        ("no_such_module:loss", "'no_such_module:loss' cannot be loaded: No module named 'no_such_module'"),
        ("json:nothing", "method 'json:nothing' cannot be loaded: .*no attribute 'nothing'"),
        (":", "method ':' cannot be loaded"),
    ],
)
def test_a_name_that_is_not_there_is_said_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as e:
        METHODS.get(name)
    assert "\n" not in str(e.value)


def test_a_package_that_cannot_be_imported_is_named(install):
    install("half-done", "import package_that_is_not_there", "[vla_stack.methods]\nhalf = half_done\n")
    with pytest.raises(UserError, match="method 'half' of the package half-done cannot be loaded: No module named"):
        METHODS.get("half")


def test_two_packages_of_one_name_are_both_named(install):
    install("second-robot", "", "[vla_stack.robots]\nsim = second_robot:Robot\n")
    with pytest.raises(UserError, match="robot 'sim' is registered by vla-stack and by second-robot"):
        ROBOTS.names()
    assert ROBOTS.get("sim").__module__ == "robot_drivers.simulated"  # ours stays what it is


def modules() -> list[Path]:
    return [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]


def test_only_the_registry_imports_by_string():
    found = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
            if {"import_module", "__import__"} & set(names):
                found.add(str(path.relative_to(ROOT)))
    assert found == OF_OTHERS | {"vla_stack/registry.py"}


def test_no_other_file_names_a_module_of_ours_in_a_string():
    ours = re.compile(rf"({'|'.join(ROOMS)})(\.\w+)+(:\w+)?")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in modules()
        if path.name != "registry.py" or path.parent.name != "vla_stack"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and ours.fullmatch(node.value)
        and node.value != "vla_stack.cli"  # `python -m` of ourselves
    ]
    assert not found, "\n".join(found)


def test_the_list_names_every_entry_and_its_package(install, capsys):
    install("spring-robot", "class Spring: ...", "[vla_stack.robots]\nspring = spring_robot:Spring\n")
    assert main(["--list", "robots", "tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "robots" and [line.split() for line in lines if "spring" in line] == [
        ["spring", "spring_robot:Spring", "spring-robot"]
    ]
    assert main(["--list", "robot"]) == 2 and "there is no kind 'robot'" in capsys.readouterr().err


def test_names_in_files_of_others_are_no_code():
    for kind in (COSTS, POLICIES):
        with pytest.raises(UserError, match="there is no"):
            kind.get("os:getcwd")
    with pytest.raises(UserError, match="run/recipe.yaml: 'os:getcwd' is of the module 'os', which can run code"):
        check_recipe({"task": {"id": "os:getcwd"}}, "run/recipe.yaml")
