"""``vla compare`` from the command line to its file, simulated and blind on a robot."""

import argparse
import json

import eval_fakes
import pytest
from serving_fakes import TickPolicy

from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.policies import chunk_policy, directory
from vla_stack.runtime import node
from vla_stack.verbs import compare as verb
from vla_stack.verbs import run

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
    assert "not enough to tell good from idle: over 4 common starts in eval_fakes:Line-v0, good alone won" in out
    assert "--budget 8 goes on" in out
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


@pytest.mark.parametrize(
    "given, message",
    [
        (["--task", "place"], "--task does nothing beside --env -- the simulated task is --env sim/place-v0"),
        (["--hold-s", "3"], "--hold-s does nothing beside --env -- add --robot"),
        (["--robot", "sim", "--num-envs", "2"], "--num-envs does nothing beside --robot"),
    ],
)
def test_options_of_another_place_are_refused(capsys, given, message):
    assert main(["compare", "shipped", "native_multitask", *given]) == 1
    assert message in capsys.readouterr().err


def test_on_a_robot_the_policy_is_hidden_and_a_person_scores(monkeypatch, tmp_path, capsys):
    drove: list[str] = []
    asked: list[str] = []

    def answer(question):
        asked.append(question)
        return "" if "Enter" in question else "y" if "5555" in drove[-1] else "n"

    monkeypatch.setattr(verb.secrets, "randbits", lambda bits: 1)
    monkeypatch.setattr(run, "served", lambda server: TickPolicy().spec)
    monkeypatch.setattr(verb, "drive", lambda args, server, version, seed: drove.append(server))
    monkeypatch.setattr("builtins.input", answer)
    servers = ["tcp://host:5555", "tcp://host:5556"]
    assert main(["compare", *servers, "--robot", "sim", "--budget", "50", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "tcp://host:5555 better" in out and "common starts on sim, tcp://host:5555 alone won" in out
    assert not any("tcp" in question for question in asked) and "tcp" not in out[: out.index("better") - 20]
    pairs = list(zip(drove[::2], drove[1::2], strict=True))
    assert all(set(pair) == set(servers) for pair in pairs) and len(set(pairs)) == 2  # either order occurs


def test_another_policy_behind_the_same_port_begins_a_comparison_of_its_own(monkeypatch, tmp_path, capsys):
    a, b = "tcp://host:5555", "tcp://host:5556"
    versions = {a: "a1", b: "b1"}
    monkeypatch.setattr("builtins.input", lambda question: "" if "Enter" in question else "y")
    monkeypatch.setattr(run, "served", lambda server: TickPolicy(versions[server]).spec)
    monkeypatch.setattr(verb, "drive", lambda *_: None)
    command = ["compare", a, b, "--robot", "sim", "--budget", "1", "--out", str(tmp_path)]
    assert main(command) == 0 and main(command) == 0  # of the same policies it is continued
    for more, differs in (
        (["--robot-arg", "image_size=96"], "robot arguments"),
        (["--seconds", "3"], "seconds"),
        (["--limits", str(limits(tmp_path))], "limits"),
    ):
        assert main([*command, *more]) == 1
        assert f"with another {differs}, which is not continued" in capsys.readouterr().err
    versions[b] = "b2"
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"of other policies (then {a} a1, {b} b1; now {a} a1, {b} b2)" in error and "give another --out" in error


def limits(folder):
    file = folder / "limits.yaml"
    file.write_text("robot: sim/arm\n")
    return file


def test_a_policy_that_changes_meanwhile_ends_the_comparison(monkeypatch):
    class Node:
        model_version = "b2"

        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(node, "RobotNode", Node)
    monkeypatch.setattr(run, "served", lambda server: None)
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    args = parser.parse_args(["tcp://a:1", "tcp://b:1", "--robot", "sim"])
    with pytest.raises(UserError, match="tcp://b:1 serves another policy than when this began"):
        verb.drive(args, "tcp://b:1", "b1", 0)


def test_an_episode_that_went_wrong_is_repeated(monkeypatch):
    answers = iter(["", "r", "", "what", "y"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    played = []
    assert verb.scored(lambda: played.append(1), "start 1") and len(played) == 2
