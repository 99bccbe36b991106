"""What an extra of pyproject.toml installs is enough for the verbs that people are told to install it for."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vla_stack.cli import VERBS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_EXTRAS = (
    "vla doctor --json",
    "vla recipes",
    "vla recipes pick",
    "vla keys --keys keys create me",
    "vla --list",
)
WITH_EXTRAS = (
    "vla collect --task pick --episodes 1 --root data",
    "vla data check data",
    "vla train pick data.root=data",
    "vla policy info shipped",
    "vla eval",
    "vla monitor fit --policy shipped --env sim/pick-v0 --out monitor.json",
    "vla report .",
    "vla compare shipped native_multitask",
    "vla constraints check obstacle",
    "vla imagine",
    "vla export --out out",
    "vla serve",
    "vla serve --protocol openpi",
    "vla run --robot.type=so101_follower --robot.port=none",
    "vla run --server ws://127.0.0.1:8000",
    "vla robot check",
    "vla teleop --robot sim --task pick",
    "vla emulate so101",
    "vla console --robot sim --task pick",
    "vla demo",
)


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
    optional = ("_distutils_hack", "backports")  # every venv has the one; aiohttp unpacks zstd where the other is
    packages = [p for p in ran.stderr.split() if p in owners and p not in optional]
    missing = [p for p in packages if not there & {normal(owner) for owner in owners[p]}]
    assert not missing


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Runs a command where what `pip install vla-stack` brings is installed, and nothing else."""
    folder = tmp_path_factory.mktemp("base")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("vla_stack", "sim", "robot_drivers"):
        (site / name).symlink_to(ROOT / name)
    for name in installed_with():
        there = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in there.files} - {"..", "__pycache__"}
        for top in tops:
            if not top.endswith(".pth") and not (site / top).exists():
                (site / top).symlink_to(there.locate_file(top))

    def run(line):
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [folder / "bin" / "python", "-m", "vla_stack.cli", *shlex.split(line)[1:]]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    return run


@pytest.mark.parametrize("line", WITHOUT_EXTRAS)
def test_the_base_install_is_enough(base, line):
    ran = base(line)
    assert ran.returncode == 0 and ran.stdout, ran.stderr


@pytest.mark.parametrize("line", WITH_EXTRAS)
def test_a_verb_names_the_extra_that_it_needs_in_one_line(base, line):
    ran = base(line)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1, ran.stderr[-3000:]
    extra = re.search(r"-- pip install \"vla-stack\[([\w-]+)\]\"$", ran.stderr.strip())
    assert extra and extra[1] in PROJECT["optional-dependencies"]
    if line in ("vla eval", "vla demo", "vla serve"):
        assert extra[1] == "train"  # not one after another


def test_every_verb_is_tried_on_the_base_install():
    tried = {line.split()[1] for line in WITHOUT_EXTRAS + WITH_EXTRAS}
    assert tried == {*VERBS, "--list"}


@pytest.mark.parametrize(
    ("declared", "newest"),
    [("numpy>=2.0,<2.3", "numpy>=2.0"), ("lerobot[dataset]==0.6.1", "lerobot[dataset]>=0.6.1"), ("ruff", "ruff")],
)
def test_the_newest_releases_have_no_upper_bound(load_tool, declared, newest):
    tool = load_tool("newest.py")
    assert tool.without_upper_bound(declared) == newest
    assert len(tool.requirements()) >= 30 and not re.search("<|==", " ".join(tool.requirements()))
