"""The report: complete, self-contained, true to the records."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import av
import eval_fakes
import gymnasium as gym
import numpy as np
import pytest

from vla_stack.envs.vector import LocalEnvs
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.report import write_report, write_run_report
from vla_stack.evaluation.video import film, replay, write_mp4
from vla_stack.rollout.records import EpisodeRecord, EvalResult, load_records


def result(name="test/Env-v0", label="naive, 0 ms", wins=(True, True, False), task="pick <up>", **extra):
    episodes = tuple(EpisodeRecord(100 + i, task, task, w, 10 + i, stage=1 + w) for i, w in enumerate(wins))
    return EvalResult(name, label, 10.0, episodes, ("reached", "done"), {"mode": "naive"}, **extra)


class Page(HTMLParser):
    """Collects tags and text, and fails on tags that do not close."""

    VOID = {"meta", "link", "br", "img", "path", "use", "rect"}

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._open, self.attributes = [], "", [], []
        self.feed(html)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path):
    return Page(path.read_text())


def test_the_page_shows_rates_intervals_and_seeds(tmp_path):
    page = read(write_report([result()], tmp_path / "r.html", title="Pick & place", about={"policy": "native"}))
    for text in ("Pick & place", "67 %", "2 / 3", "21 % – 94 %", "pick <up>", "seeds 100 to 102", "native", "reached"):
        assert text in page.text, text
    assert page.tags.count("svg") == 3 and "script" not in page.tags


def test_the_page_loads_nothing(tmp_path):
    film_path = tmp_path / "a.mp4"
    write_mp4([np.zeros((16, 16, 3), np.uint8)] * 3, film_path, 10.0)
    r = result()
    r = replace(r, episodes=(replace(r.episodes[0], video=str(film_path)), *r.episodes[1:]))
    page = read(write_report([r], tmp_path / "r.html"))
    links = [v for k, v in page.attributes if k in ("src", "href", "xlink:href") and not v.startswith(("#", "data:"))]
    assert links == []
    (source,) = [v for k, v in page.attributes if k == "src"]
    assert base64.b64decode(source.split(",", 1)[1]) == film_path.read_bytes()
    assert not re.search(r"url\((?!#)|@import", (tmp_path / "r.html").read_text())


def test_the_json_beside_it_reads_back(tmp_path):
    write_report([result(), result(label="sync, 0 ms")], tmp_path / "r.html", about={"policy": "native"})
    d = json.loads((tmp_path / "r.json").read_text())
    assert d["policy"] == "native" and d["hardware"]["cores"] >= 1 and "command" in d and "revision" in d
    assert d["results"][0]["summary"]["successes"] == 2
    assert load_records(tmp_path / "r.json")[1].episodes == result().episodes


def test_settings_of_one_environment_are_compared_over_shared_seeds(tmp_path):
    a, b = result(wins=[True] * 30), result(label="naive, 300 ms", wins=[False] * 30)
    page = read(write_report([a, b], tmp_path / "r.html"))
    assert "−100 points" in page.text and "Differences" in page.text
    assert "Differences" not in read(write_report([a, result(name="other")], tmp_path / "r.html")).text


def test_a_run_is_reported_from_its_directory(tmp_path):
    run = {"name": "native/arm7", "label": "naive", "rate_hz": 10.0, "episodes": [{"seed": 1, "success": True}]}
    run["episodes"][0] |= {"steps": 12, "instruction": "pick up the red cube", "video": "000.mp4"}
    write_mp4([np.zeros((16, 16, 3), np.uint8)] * 3, tmp_path / "000.mp4", 10.0)
    (tmp_path / "records.json").write_text(json.dumps(run))
    (tmp_path / "summary.json").write_text(json.dumps({"overruns": 3, "delay_ticks_mean": 1.25}))
    page = read(write_run_report(tmp_path, tmp_path / "out" / "report.html"))
    assert "ticks missed3" in page.text and "1.25" in page.text
    assert "native/arm7" in page.text and page.tags.count("video") == 1
    assert (
        json.loads((tmp_path / "out" / "report.json").read_text())["results"][0]["episodes"][0]["video"] == "../000.mp4"
    )
    with pytest.raises(UserError, match=r"records.json: cannot be read"):
        write_run_report(tmp_path / "out", tmp_path / "report.html")


def test_a_run_that_nobody_judged_has_no_report(tmp_path):
    run = {"name": "so101", "label": "naive", "rate_hz": 10.0, "episodes": [{"seed": 1, "success": None}]}
    run["episodes"][0] |= {"steps": 12, "instruction": "pick up the red cube"}
    (tmp_path / "records.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match="none of its episodes was judged"):
        write_run_report(tmp_path, tmp_path / "report.html")


def test_an_empty_report_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(ValueError, match="at least one"):
        write_report([result(wins=())], tmp_path / "r.html")


def test_films_are_replays_of_the_first_of_each_outcome(tmp_path):
    name = "eval_fakes:Line-v0"
    right = evaluate(eval_fakes.Obedient(), name, episodes=4)
    filmed = film(right, tmp_path, per_outcome=2)
    assert [bool(e.video) for e in filmed.episodes] == [True, True, False, False]
    with av.open(filmed.episodes[0].video) as f:
        frames = [x.to_ndarray(format="rgb24") for x in f.decode(video=0)]
        assert f.streams.video[0].average_rate == 10
    assert len(frames) == right.episodes[0].steps + 1
    wrong = film(evaluate(eval_fakes.Obedient(), name, episodes=2, instruct="swap"), tmp_path, per_outcome=1)
    assert [bool(e.video) for e in wrong.episodes] == [True, False]
    assert len({p.name for p in Path(tmp_path).glob("*.mp4")}) == 3


def test_a_replay_that_ends_differently_is_an_error():
    episode = evaluate(eval_fakes.Obedient(), "eval_fakes:Line-v0", episodes=1).episodes[0]
    env = LocalEnvs([gym.make("eval_fakes:Line-v0", render_mode="rgb_array")])
    with pytest.raises(RuntimeError, match="ended differently"):
        replay(env, replace(episode, actions=episode.actions[:3]))
    env.close()


def test_a_film_that_cannot_be_made_is_left_out_with_a_note(tmp_path):
    right = evaluate(eval_fakes.Obedient(), "eval_fakes:Line-v0", episodes=3)
    first, *others = right.episodes
    filmed = film(
        replace(right, episodes=(replace(first, actions=first.actions[:1]), *others)), tmp_path, per_outcome=2
    )
    assert [bool(e.video) for e in filmed.episodes] == [False, True, False]
    (note,) = filmed.notes
    assert f"seed {first.seed} ended differently" in note
    page = write_report([filmed], tmp_path / "r.html")
    assert note in read(page).text and read(page).tags.count("video") == 1
    (again,) = load_records(page.with_suffix(".json"))
    assert again.notes == filmed.notes


def test_an_environment_without_pictures_has_no_films(tmp_path):
    dark = evaluate(eval_fakes.Obedient(), "eval_fakes:Dark-v0", episodes=1)
    assert film(dark, tmp_path, 1) == dark


def test_odd_sizes_are_cropped_to_what_h264_takes(tmp_path):
    write_mp4([np.full((15, 17, 3), 200, np.uint8)] * 2, tmp_path / "odd.mp4", 7.5)
    with av.open(str(tmp_path / "odd.mp4")) as f:
        (first, _) = f.decode(video=0)
        assert (first.height, first.width) == (14, 16)
    assert [p.name for p in tmp_path.iterdir()] == ["odd.mp4"]
