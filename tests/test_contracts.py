"""Lint, types and the import rules of docs/architecture.md, as tests."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", [("ruff", "check", "."), ("ruff", "format", "--check", ".")])
def test_ruff(command):
    done = run(str(BIN / command[0]), *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_types():
    done = run(str(BIN / "mypy"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_import_contracts():
    done = run(str(BIN / "lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


ROBOT_SIDE = [
    "vla_stack.cli",
    "vla_stack.schema",
    "vla_stack.serving.client",
    "vla_stack.verbs.run",
    "robot_drivers",
    "sim",
]


@pytest.mark.parametrize("module", ROBOT_SIDE)
def test_robot_side_starts_without_torch(module):
    code = (
        f"import sys, json, {module}; "
        "print(json.dumps([m for m in ('torch', 'lerobot', 'transformers', 'pandas') if m in sys.modules]))"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_policies_are_stepped_in_two_places():
    """The engine, by a virtual clock, and a robot's control process, with one executor; a server answers robots."""
    asks, executes = set(), set()
    for path in (*ROOT.glob("vla_stack/**/*.py"), *ROOT.glob("robot_drivers/**/*.py"), *ROOT.glob("sim/**/*.py")):
        where, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if not where.startswith("vla_stack/policies/"):
            asks |= {where} if re.search(r"policy\.infer\(", text) else set()
        executes |= {where} if re.search(r"(?<!class )\bExecutor\(", text) else set()
    # Policies around a policy, which the engine asks: two remember, the other sees its pictures changed.
    wraps = {f"vla_stack/{x}.py" for x in ("methods/grape/rollouts", "evaluation/pictures", "evaluation/monitoring")}
    recorded = {"vla_stack/evaluation/open_loop.py"}  # about frames of a dataset; what it answers moves nothing
    assert asks == {"vla_stack/rollout/engine.py", "vla_stack/serving/worker.py"} | wraps | recorded
    agents = {"vla_stack/rollout/agents.py", "vla_stack/methods/rac/episode.py"}  # of the engine
    jog = {"robot_drivers/jog.py"}  # the control loop, with two chunks that no policy computed
    assert executes == agents | jog | {"vla_stack/runtime/control_process.py"}


def imports(path: Path, known: Collection[str]) -> set[str]:
    """The known modules that a file imports, anywhere in it, but for those that annotations alone need."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    left_out = {id(node) for block in typing for node in ast.walk(block)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {module if module in known else str(node.module) for module in modules}
    return found & set(known)


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions count."""
    files = [path for room in ("vla_stack", "sim", "robot_drivers") for path in (ROOT / room).rglob("*.py")]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}
    graph = TopologicalSorter({name: imports(path, names) - {name} for name, path in names.items()})
    try:
        graph.prepare()
    except CycleError as e:
        pytest.fail("each imports the one before it: " + ", ".join(e.args[1]))


FORBIDDEN = (
    *("pickle.load", "torch.load(", "trust_remote_code=True"),
    *("yaml.load(", "allow_pickle=True", "eval(", "exec("),
)


def test_no_unsafe_loading():
    """No way from outside bytes to running code: safetensors, msgpack, JSON and safe YAML only."""
    found = []
    for room in ("vla_stack", "sim", "robot_drivers"):
        for path in (ROOT / room).rglob("*.py"):
            for n, line in enumerate(path.read_text().splitlines(), 1):
                code = line.split("#", 1)[0]
                for word in FORBIDDEN:
                    at = code.find(word)
                    if at >= 0 and not (at and (code[at - 1].isalnum() or code[at - 1] in "_.")):
                        found.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()}")
    assert not found, "\n".join(found)


def test_what_a_policy_can_do_is_said_by_its_contract():
    """``FlowPolicy`` and ``NoisePolicy`` have it as fields; nobody but LeRobot's adapters asks for names."""
    asked = re.compile(r"(has|get)attr\((\w+\.)*policy\b(?!\.config)")
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for path in (ROOT / "vla_stack").rglob("*.py")
        if path.parent.name != "adapters"
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if asked.search(line)
    ]
    assert not found, "\n".join(found)
