"""``vla compare`` from the command line to its file, simulated and blind on a robot."""

import json

import eval_fakes
import pytest

from vla_stack.cli import main
from vla_stack.policies import chunk_policy, directory
from vla_stack.verbs import compare as verb

LINE = "eval_fakes:Line-v0"


@pytest.fixture
def policies(monkeypatch, tmp_path):
    kinds = {"good": eval_fakes.Obedient, "idle": eval_fakes.TickLabel}
    monkeypatch.setattr(directory, "resolve_policy", lambda name: tmp_path / name)
    monkeypatch.setattr(chunk_policy, "load_policy", lambda path, *_, **__: kinds[path.name]())
    return tmp_path


def test_the_better_policy_is_found_and_the_file_continued(policies, capsys):
    arguments = ["compare", "good", "idle", "--env", LINE, "--mode", "naive", "--out", str(policies)]
    assert main([*arguments, "--budget", "4"]) == 0
    out = capsys.readouterr().out
    assert "not enough to tell good from idle" in out and "--budget 8 goes on" in out
    assert main(arguments) == 0
    assert "good better, p" in capsys.readouterr().out
    found = json.loads((policies / "comparison.json").read_text())
    assert found["policies"]["good"]["episodes"] < 50
    assert main([*arguments, "--seed", "7"]) == 1
    assert "another seed" in capsys.readouterr().err


def test_comparisons_of_others_have_files_of_their_own(policies, monkeypatch):
    monkeypatch.chdir(policies)
    for names in (("runs/good", "idle"), ("idle", "runs/good/")):
        assert main(["compare", *names, "--env", LINE, "--mode", "naive", "--budget", "1"]) == 0
    made = [path.parent.name for path in (policies / "outputs" / "compare").glob("*/comparison.json")]
    assert sorted(made) == ["eval_fakes_Line-v0-good-idle", "eval_fakes_Line-v0-idle-good"]


def test_on_a_robot_the_policy_is_hidden_and_a_person_scores(monkeypatch, tmp_path, capsys):
    drove: list[str] = []
    asked: list[str] = []

    def answer(question):
        asked.append(question)
        return "" if "Enter" in question else "y" if "5555" in drove[-1] else "n"

    monkeypatch.setattr(verb.secrets, "randbits", lambda bits: 1)
    monkeypatch.setattr(verb, "drive", lambda args, server, seed: drove.append(server))
    monkeypatch.setattr("builtins.input", answer)
    servers = ["tcp://host:5555", "tcp://host:5556"]
    assert main(["compare", *servers, "--robot", "sim", "--budget", "50", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "tcp://host:5555 better" in out
    assert not any("tcp" in question for question in asked) and "tcp" not in out[: out.index("better") - 20]
    pairs = list(zip(drove[::2], drove[1::2], strict=True))
    assert all(set(pair) == set(servers) for pair in pairs) and len(set(pairs)) == 2  # either order occurs


def test_an_episode_that_went_wrong_is_repeated(monkeypatch):
    answers = iter(["", "r", "", "what", "y"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    played = []
    assert verb.scored(lambda: played.append(1), "start 1") and len(played) == 2
