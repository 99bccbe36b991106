"""``vla eval`` from the command line to the files it leaves."""

import argparse
import errno
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import eval_fakes
import numpy as np
import pytest

from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.evaluation.monitoring import Watched, fit
from vla_stack.rollout.latency import Latency, parse_latencies
from vla_stack.rollout.records import EpisodeRecord, EvalResult, load_records
from vla_stack.runtime.monitor import Decided
from vla_stack.verbs import eval as verb
from vla_stack.verbs.out_folder import policy_name

LINE = "eval_fakes:Line-v0"


@pytest.fixture
def fake_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(verb, "_load", lambda name, *_: (tmp_path / name, eval_fakes.Obedient()))


def test_every_setting_is_reported(fake_policy, tmp_path, capsys):
    arguments = ["--env", LINE, "--episodes", "6", "--latency", "0,100ms", "--swap-instruction", "--workers", "0"]
    assert main(["eval", *arguments, "--videos", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count(LINE) == 4 and "wrong instruction" in out and "100%" in out and "54% – 100%" in out
    assert "of what was instructed" in out and "mean" in out
    d = json.loads((tmp_path / "report.json").read_text())
    assert [r["label"] for r in d["results"]] == [
        "naive, 0 ms",
        "naive, 0 ms, wrong instruction",
        "naive, 100 ms",
        "naive, 100 ms, wrong instruction",
    ]
    assert [r["summary"]["successes"] for r in d["results"]] == [6, 0, 6, 0]
    assert (tmp_path / d["results"][0]["episodes"][0]["video"]).is_file()
    assert "data:video/mp4" in (tmp_path / "report.html").read_text()


def test_several_decision_frequencies_have_one_score(fake_policy, tmp_path, capsys):
    arguments = ["--env", LINE, "--episodes", "4", "--latency", "0,100ms", "--execute", "1", "2", "--workers", "0"]
    assert main(["eval", *arguments, "--videos", "1", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " steps " in line or line.endswith("FAS")]
    assert len(lines) == 5 and lines[0].endswith("seams   FAS")
    assert [line.split()[-1] for line in lines[1:]] == ["1.00"] * 4


def test_what_is_measured_is_on_disk_before_anything_else_can_fail(fake_policy, tmp_path):
    arguments = ["--episodes", "3", "--workers", "0", "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match="gearbox"):
        main(["eval", *arguments, "--env", LINE, "eval_fakes:Crash-v0"])
    (result,) = load_records(tmp_path / "report.json")
    assert (result.name, result.successes, len(result.episodes)) == (LINE, 3, 3)


def test_evaluations_stand_beside_each_other(fake_policy, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--env", LINE, "--episodes", "2", "--workers", "0", "--videos", "0"]
    for policy in ("shipped", "native_multitask", "shipped"):  # within one second or not
        assert main(["eval", "--policy", policy, *arguments]) == 0
    names = sorted(path.parent.name.partition("-")[0] for path in Path("outputs/eval").glob("*/report.json"))
    assert names == ["native_multitask", "shipped", "shipped"]
    capsys.readouterr()
    assert main(["report", "outputs"]) == 0
    assert "3 evaluated settings" in capsys.readouterr().out


@pytest.mark.parametrize(("policy", "dims", "message"), [("other", 2, "policy other"), ("scripted", 3, "a robot with")])
def test_a_monitor_of_another_policy_or_robot_is_refused_first(
    fake_policy, tmp_path, monkeypatch, capsys, policy, dims, message
):
    rng = np.random.default_rng(0)
    decided = [
        Decided(k, *(rng.normal(size=s).astype(np.float32) for s in (dims, (8, 2))), k, None) for k in range(0, 40, 4)
    ]
    fit([Watched(decided, 40, True)] * 25, 0.1, 0.1, policy).save(tmp_path / "monitor.json")
    monkeypatch.setattr(verb, "evaluate", lambda *_, **__: pytest.fail("an episode was run"))
    monitor = ["--monitor", str(tmp_path / "monitor.json")]
    assert main(["eval", "--env", LINE, "--workers", "0", *monitor, "--out", str(tmp_path / "out")]) == 1
    assert f"the monitor was fitted to {message}" in capsys.readouterr().err


def test_a_place_that_takes_no_report_is_refused_first(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verb, "_load", lambda *_: pytest.fail("it was loaded"))
    (file := tmp_path / "taken").touch()
    assert main(["eval", "--out", str(file)]) == 1
    assert f"--out: nothing can be written to {file} (it is a file) -- give another --out" in capsys.readouterr().err

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main(["eval", "--out", str(tmp_path)]) == 1
    assert f"--out: nothing can be written to {tmp_path} (Permission denied)" in capsys.readouterr().err


def test_a_folder_that_nothing_was_written_to_does_not_stay(tmp_path):
    made = "from vla_stack.verbs.out_folder import out_folder; from pathlib import Path; "
    made += "a, b = (out_folder(None, 'out', name) for name in 'ab'); c = out_folder(Path('mine'), '', ''); "
    made += "(b / 'report.json').touch(); print(a.is_dir(), c.is_dir())"
    (tmp_path / "mine").mkdir()
    done = subprocess.run([sys.executable, "-c", made], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"] and (tmp_path / "mine").is_dir()  # it was there before
    assert [path.name[0] for path in (tmp_path / "out").iterdir()] == ["b"]


def test_how_a_plan_is_continued_is_part_of_a_settings_name(monkeypatch, tmp_path):
    policy = eval_fakes.Obedient()
    policy.spec = replace(policy.spec, extras={"continues": ["rtc"]})
    monkeypatch.setattr(verb, "_load", lambda name, *_: (tmp_path / name, policy))
    ran = EvalResult(LINE, "rtc, 0 ms", 10.0, (EpisodeRecord(1, "go", "go", True, 3),))
    monkeypatch.setattr(verb, "evaluate", lambda *_, **__: ran)
    for given in ([], ["--beta", "5"], ["--schedule", "linear", "--beta", "5"]):
        out = ["--mode", "rtc", "--videos", "0", "--out", str(tmp_path / f"{len(given)}")]
        assert main(["eval", "--env", LINE, *out, *given]) == 0
    assert main(["eval", "--env", LINE, "--mode", "naive", *out[2:4], "--beta", "5", "--out", str(tmp_path / "n")]) == 0
    labels = [load_records(tmp_path / name / "report.json")[0].label for name in ("0", "2", "4", "n")]
    assert labels == ["rtc, 0 ms", "rtc, 0 ms, beta 5", "rtc, 0 ms, linear, beta 5", "rtc, 0 ms"]


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("shipped", "shipped"),
        ("runs/pick/", "pick"),
        ("owner/some policy", "some_policy"),
        ("runs/pick/checkpoints/000500/pretrained_model", "pick-000500"),
        ("/", "policy"),
    ],
)
def test_a_policy_gives_its_evaluations_a_name(policy, name):
    assert policy_name(policy) == name


def test_errors_are_one_line(fake_policy, tmp_path, capsys):
    assert main(["eval", "--env", "sim/pikc-v0", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vla eval: there is no environment 'sim/pikc-v0'") and "did you mean sim/pick-v0?" in error
    assert main(["eval", "--starts", "data/mine", "--env", LINE, "--out", str(tmp_path)]) == 1
    assert "--starts is of imagined episodes -- give --env imagined:RUN" in capsys.readouterr().err
    assert main(["eval", "--device", "cuda:77", "--out", str(tmp_path)]) == 1
    assert "vla eval: device 'cuda:77' is not available" in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "vla eval --latency 0,100ms,300ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "rate_hz", "ticks"),
    [
        ("0", 10, [0]),
        ("0ms,100ms", 10, [0, 1]),
        ("101ms", 10, [2]),
        ("100ms", 30, [3]),
        ("0.3s, 2ticks", 10, [3, 2]),
        ("2ticks", 30, [2]),
    ],
)
def test_a_started_tick_counts_whole(text, rate_hz, ticks):
    assert [x.ticks(rate_hz) for x in parse_latencies(text, rate_hz)] == ticks


def test_equal_delays_are_taken_once():
    assert parse_latencies("1tick,100,0.1s", 10) == [Latency(0.1)]


def test_jitter_keeps_the_mean_and_follows_its_seed():
    gamma, spikes = Latency(0.2, "gamma"), Latency(0.2, "spikes")
    ticks = np.array([gamma.ticks(1000.0, (3, i)) for i in range(4000)])
    assert abs(ticks.mean() - 200) < 5 and abs(ticks.std() - 100) < 5
    assert [gamma.ticks(10.0, (3, i)) for i in range(20)] == [gamma.ticks(10.0, (3, i)) for i in range(20)]
    late = np.array([spikes.ticks(10.0, (0, i)) for i in range(4000)])
    assert set(late) == {2, 12} and 0.005 < (late == 12).mean() < 0.015
    assert Latency(0.0, "gamma").ticks(10.0) == 0


def test_all_means_the_modes_that_the_policy_has(fake_policy, tmp_path, capsys):
    out = ["--out", str(tmp_path), "--episodes", "2", "--workers", "0", "--videos", "0", "--env", LINE]
    assert main(["eval", *out, "--mode", "all", "--latency", "0,200ms", "--jitter", "gamma"]) == 0
    table = capsys.readouterr().out
    for mode in ("sync", "naive", "ensemble", "future_state"):
        assert f"{mode}, 0 ms gamma" in table and f"{mode}, 200 ms gamma" in table
    assert "rtc" not in table


@pytest.mark.parametrize("text", ["", "fast", "-1ms", "1h"])
def test_a_delay_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="is no delay"):
        parse_latencies(text, 10)


def test_a_process_beside_this_one_is_for_several_episodes(monkeypatch):
    monkeypatch.setattr(verb.os, "sched_getaffinity", lambda _: range(4), raising=False)
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    for given, workers in ((["--episodes", "1"], 0), (["--episodes", "3"], 3), ([], 4), (["--num-envs", "1"], 0)):
        assert verb._workers(parser.parse_args(given)) == workers
    assert verb._workers(parser.parse_args(["--episodes", "1", "--rollouts", "ray"])) == 1
    assert verb._workers(parser.parse_args(["--episodes", "1", "--workers", "2"])) == 2
