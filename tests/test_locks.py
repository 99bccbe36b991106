"""One folder, one writer, and nothing is written through a link that leads out of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vla_stack.errors import UserError
from vla_stack.locks import LOCK, check_links, writing

RACER = """
import sys
from pathlib import Path
from vla_stack.errors import UserError
from vla_stack.locks import writing
sys.stdin.readline()
try:
    with writing(Path(sys.argv[1])):
        print("mine", flush=True)
        sys.stdin.readline()
except UserError as e:
    print(e, flush=True)
"""


def test_of_many_that_start_at_once_one_proceeds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path / "run")]
    racers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(10)]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.stdout.readline().strip() for racer in racers]
    assert said.count("mine") == 1
    winner = racers[said.index("mine")].pid
    others = [text for text in said if text != "mine"]
    assert all(f"is being written by process {winner} on {socket.gethostname()}" in text for text in others), others
    for racer in racers:
        racer.communicate("done\n")
    with writing(tmp_path / "run"):  # the kernel has let go of it
        assert str(os.getpid()) in (tmp_path / "run" / LOCK).read_text()
    assert not list((tmp_path / "run").glob("*"))  # nothing was written


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="is a link out of"), writing(tmp_path / "run"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("target", ["../outside", "/etc", "deep/../../outside"])
@pytest.mark.parametrize("name", ["checkpoints", "a/b/.tmp.json"])
def test_links_that_lead_out_are_named(tmp_path: Path, name: str, target: str) -> None:
    home = tmp_path / "home"
    link = home / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    inside = os.path.realpath(link).startswith(f"{home}/")
    if inside:
        check_links(home)
    else:
        with pytest.raises(UserError, match=f"{link} is a link out of {home}"):
            check_links(home)


def test_links_that_stay_inside_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "000010").mkdir()
    (tmp_path / "last").symlink_to("000010")
    check_links(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made: .*output_dir="), writing(tmp_path / "file" / "run"):
        pass


@pytest.mark.slow
def test_of_many_pairs_one_starts_one_resumes_and_nothing_is_lost(tmp_path: Path) -> None:
    script = Path(__file__).parent / "e2e/start_resume_pairs.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path), "25"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["started"] == seen["resumed"] == {"1": 25} and not seen["lost"], seen
    # Who is refused within the instant between the lock and the name that is written into it learns no name.
    assert sum(seen["refusals"].values()) == 50 and seen["refusals"]["writer named"] > 40, seen
    assert all(why == "writer named" or "is being written by another process" in why for why in seen["refusals"]), seen
