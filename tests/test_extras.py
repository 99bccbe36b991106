"""What an extra of pyproject.toml installs is enough for the verbs that people are told to install it for."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra):
    """Requirements of the project with an extra; extras of its own are followed."""
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if normal(requirement.name) == PROJECT["name"]:
            yield from (r for name in requirement.extras for r in declared(name))
        else:
            yield requirement


def installed_with(*extras):
    """Distributions that come with the extras, and theirs."""
    todo = [Requirement(text) for text in PROJECT["dependencies"]] + [r for e in extras for r in declared(e)]
    seen = set()
    while todo:
        requirement = todo.pop()
        for extra in {"", *requirement.extras} - {e for name, e in seen if name == normal(requirement.name)}:
            seen.add((normal(requirement.name), extra))
            try:
                texts = importlib.metadata.requires(requirement.name) or []
            except importlib.metadata.PackageNotFoundError:  # for another platform
                continue
            more = [Requirement(text) for text in texts]
            todo += [r for r in more if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen} | {PROJECT["name"]}


@pytest.mark.parametrize(
    ("verb", "extras"),
    [("run", ["robot"]), ("teleop", ["robot", "hardware"]), ("data", ["robot", "hardware"]), ("console", ["console"])],
)
def test_a_verb_starts_with_what_its_extra_installs(verb, extras):
    code = f"import sys\ntry:\n from vla_stack.cli import main; main(['{verb}', '--help'])\n"
    code += "finally:\n print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.startswith(f"usage: vla {verb}")
    there, owners = installed_with(*extras), importlib.metadata.packages_distributions()
    packages = [p for p in ran.stderr.split() if p in owners and p != "_distutils_hack"]  # that comes with every venv
    missing = [p for p in packages if not there & {normal(owner) for owner in owners[p]}]
    assert not missing
