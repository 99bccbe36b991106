"""The container's recipe, read: what it copies is there, and it runs the command as a user who is not root."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
CONTEXT = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def told(keyword):
    return [rest for word, rest in STEPS if word == keyword]


def test_it_is_made_of_what_the_tree_has_and_the_context_lets_in():
    copied = [source for rest in told("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert sorted(copied) == sorted(CONTEXT)
    assert all((ROOT / source).exists() for source in copied)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"]} <= set(copied)


def test_python_and_extras_are_the_projects():
    images = {rest.split()[0] for rest in told("FROM")}
    (version,) = {re.fullmatch(r"python:([\d.]+)-slim-\w+", image)[1] for image in images}
    assert Version(version) in SpecifierSet(PROJECT["project"]["requires-python"])
    (extras,) = re.findall(r"\.whl\)\[([\w,-]+)\]", " ".join(told("RUN")))
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("library", ["libegl1", "libgl1", "libgl1-mesa-dri", "ffmpeg"])
def test_it_installs_what_bootstrap_does(library):
    assert f"missing+=({library})" in (ROOT / "tools/bootstrap").read_text()
    assert library in next(rest for rest in told("RUN") if "apt-get" in rest).split()


def test_versions_are_those_of_the_lock_file():
    (script,) = re.findall(r"sed -E '([^']+)'", " ".join(told("RUN")))
    done = subprocess.run(["sed", "-E", script, ROOT / "requirements.lock"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) > 100
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+( *;.*)?", line) for line in lines)


def test_the_command_is_run_by_a_user_who_is_not_root():
    words = [word for word, _ in STEPS]
    assert told("USER") == ["vla"] and words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")
    assert [json.loads(rest) for rest in told("ENTRYPOINT")] == [["vla"]]
    assert "VLA_KEYS=/data/keys" in told("ENV")[0] and told("VOLUME") == ["/data"]
