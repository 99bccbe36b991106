"""``vla report``: what it finds, what it compares, and that its page is whole."""

import argparse
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_report import Page, result
from test_run_recording import SPEC, drive

from vla_stack.console.run_recording import RunRecording
from vla_stack.errors import UserError
from vla_stack.evaluation.compare import Comparison
from vla_stack.evaluation.project import Evaluation, changes, differing, find
from vla_stack.evaluation.provenance import provenance
from vla_stack.rollout.records import save_records
from vla_stack.verbs import report


def outcomes(rng, rate, n=60):
    return tuple(bool(x) for x in rng.random(n) < rate)


@pytest.fixture
def project(tmp_path):
    rng = np.random.default_rng(0)
    for day, (rate, policy) in enumerate(((0.2, "runs/a"), (0.9, "runs/b <new>"))):
        about = {"date": f"2026-03-0{day + 1} 10:00 UTC", "policy": policy}
        save_records([result(wins=outcomes(rng, rate))], tmp_path / f"eval-{day}" / "report.json", **about)
    other = [result(name="test/Other-v0", wins=outcomes(rng, 0.5))]
    save_records(other, tmp_path / "eval-2" / "report.json", date="2026-03-03 10:00 UTC", policy="runs/b")
    comparison = Comparison(("runs/a", "runs/b"))
    for start in range(40):
        comparison.note("runs/a", start, start % 4 == 0)
        comparison.note("runs/b", start, start % 8 != 1)
    comparison.save(tmp_path / "compare" / "comparison.json")
    for name, rate in (("a", 0.1), ("b", 0.3)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(f"name: {name}\noutput_dir: runs/{name}\nmethod: {{lr: {rate}, steps: 9}}\n")
        (run / "revision.txt").write_text(f"2026-03-01T0{name == 'b':d}:00:00+00:00 1.0 vla train pick\n")
        lines = [{"step": s, "loss": 1.0 / s, "eval/sim/pick-v0/success": rate} for s in (1, 2)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    with RunRecording(tmp_path / "data" / "odd", SPEC, (), "sentry", 0.3) as recording:
        drive(recording, 9, [(4, lambda: recording.event("stop: camera"))])
        recording.end(False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{}")
    return tmp_path


def test_everything_is_found_in_the_order_of_its_dates_and_what_is_broken_is_named(project):
    found = find([project])
    assert [e.policy for e in found.evaluations] == ["runs/a", "runs/b <new>", "runs/b"]
    assert [t.path.name for t in found.trainings] == ["a", "b"]
    assert found.trainings[1].metrics == {"step": 2, "loss": 0.5, "eval/sim/pick-v0/success": 0.3}
    (recording,) = found.recordings
    assert (recording.episodes, recording.outcomes) == (1, {"stop: camera": 1})
    assert len(found.comparisons) == 1 and len(found.odd) == 1 and "broken" in found.odd[0]


def test_evaluations_of_one_setting_are_compared_in_pairs_and_recipes_by_their_keys(project):
    found = find([project])
    (change,) = changes(found.evaluations)  # the other environment has none before it
    a, b = (e.result.outcomes.astype(int) for e in found.evaluations[:2])
    assert change.difference.value == pytest.approx((b - a).mean()) and change.difference.is_clear and change.p < 1e-4
    assert differing(found.trainings) == {"method.lr": [0.1, 0.3]}  # names and folders say nothing


def test_evaluations_of_one_date_come_in_the_order_of_their_writing_and_no_file_counts_twice(tmp_path):
    for t, (folder, rate) in enumerate((("z-first", 0.2), ("a-second", 0.9))):
        path = tmp_path / folder / "report.json"
        wins = outcomes(np.random.default_rng(0), rate)
        save_records([result(wins=wins)], path, date="2026-03-01 10:00 UTC", policy=folder)
        os.utime(path, (1e9 + t, 1e9 + t))
    (tmp_path / "link").symlink_to(tmp_path / "z-first")
    found = find([tmp_path, tmp_path / "a-second", tmp_path / "link"])
    (change,) = changes(found.evaluations)
    assert (change.before.policy, change.after.policy) == ("z-first", "a-second") and change.difference.value > 0


def test_a_date_has_seconds_and_sorts_after_its_minute():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", provenance()["date"])
    assert "2026-03-01 10:00 UTC" < "2026-03-01 10:00:07 UTC" < "2026-03-01 10:01 UTC"  # as older files have it


def test_another_setting_and_a_real_robot_are_no_change_of_the_policy():
    wins = outcomes(np.random.default_rng(0), 0.5)

    def evaluations(*settings):
        results = [result(wins=wins) for _ in settings]
        found = [replace(r, settings={**r.settings, **s}) for r, s in zip(results, settings, strict=True)]
        return [Evaluation(Path("report.json"), str(day), "a", r) for day, r in enumerate(found)]

    assert len(changes(evaluations({}, {"env_options": {"image_size": 64}}, {"robot": "sim"}))) == 2
    assert not changes(evaluations({}, {"env_options": {"randomisation": 3}}))
    assert not changes(evaluations({"robot": "so101_follower"}, {"robot": "so101_follower"}))


def test_the_page_is_whole_and_says_what_was_found(project, capsys):
    out = project / "page.html"
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.main(parser.parse_args([str(project), "--out", str(out), "--title", "Arms & <legs>"])) == 0
    page = Page(out.read_text())
    for text in (
        "Arms & <legs>",
        "What changed in success",
        "method.lr",
        "runs/b better",
        "stop: camera",
        "runs/b <new>",
    ):
        assert text in page.text
    assert not [value for name, value in page.attributes if name in ("src", "href") and not value.startswith("data:")]
    said = capsys.readouterr().out
    assert "over 60 common starts" in said and "not read" in said and str(out) in said


def test_folders_with_nothing_are_refused(tmp_path):
    with pytest.raises(UserError, match="nothing of `vla eval`"):
        find([tmp_path])
    with pytest.raises(UserError, match="is no folder"):
        find([tmp_path / "none"])
