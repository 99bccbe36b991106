"""An episode with a flaw that was put in is the worst in that, and the selection is without it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from vla_stack.cli import main
from vla_stack.data.chunks import chunk_columns
from vla_stack.data.dataset import CHUNK, CHUNK_STEPS, Dataset, open_dataset
from vla_stack.data.edit import select
from vla_stack.data.frame_cache import open_frames
from vla_stack.data.integrity import check
from vla_stack.data.quality import quality
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

DIMS = (Dim("x.pos", "m"), Dim("y.pos", "m"), Dim("gripper.pos", "ratio", kind="gripper"))
ROBOT = RobotSpec("test/arm", DIMS, DIMS, (Camera("front", 8, 8),), rate_hz=10.0)
EPISODES, FRAMES = 15, 30
STALL, FREEZE, SPIKE, COPY, ORIGINAL, IDLE, ROUGH = 3, 5, 7, 9, 2, 11, 13
FLAWED = {"stall": STALL, "freeze": FREEZE, "spike": SPIKE, "duplicate": COPY, "idle": IDLE, "jerk": ROUGH}


def motion(e: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """State [T, 3], action [T, 3] and brightness [T] of an episode; what is odd about some is put in here."""
    rng = np.random.default_rng(ORIGINAL if e == COPY else e)
    k = np.arange(FRAMES)
    if e == STALL:
        k = np.where(k < 10, k, np.maximum(10, k - 15))  # stands still in frames 11 to 25
    if e == IDLE:
        k = np.maximum(0, k - 15)
    t = (1 - np.cos(np.pi * k / FRAMES)) / 2  # from rest to rest
    where, phase = rng.normal(size=2), rng.uniform(0, 1, 2)
    state = np.stack([where[i] + np.sin(2 * t + phase[i]) for i in range(2)] + [(t > 0.5).astype(float)], 1)
    light = np.arange(FRAMES) * 5
    if e == COPY:
        state[:, :2] += np.random.default_rng(99).normal(0, 1e-3, (FRAMES, 2))
    if e == FREEZE:
        light[12:19] = light[12]
    action = np.concatenate([state[1:], state[-1:]])
    if e == SPIKE:
        state[20, 0] += 1.0
    if e == ROUGH:
        action[:, :2] += rng.normal(0, 0.05, (FRAMES, 2))
    return state.astype(np.float32), action.astype(np.float32), light


def record(root: Path) -> Dataset:
    with EpisodeRecorder(root, ROBOT, image_mode="image") as recorder:
        for e in range(EPISODES):
            for k, (state, action, light) in enumerate(zip(*motion(e), strict=True)):
                picture = np.full((8, 8, 3), light, np.uint8)
                recorder.add_frame(Observation(state, {"front": picture}, "reach", k, k * 10**8), action)
            recorder.save_episode(success=True)
    return open_dataset(root)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record(tmp_path_factory.mktemp("data") / "flawed")


@pytest.mark.parametrize(("flaw", "episode"), FLAWED.items())
def test_what_was_put_in_is_the_worst_of_its_kind_and_the_reason(dataset: Dataset, flaw: str, episode: int) -> None:
    found = quality(dataset, progress=False)
    assert int(found.scores[flaw].argmax()) == episode and found.why[episode] == flaw
    others = np.delete(found.scores[flaw], episode)
    assert found.scores[flaw][episode] > others.max()


def test_times_are_exact_and_a_copy_names_its_original(dataset: Dataset) -> None:
    found = quality(dataset, progress=False)
    assert found.scores["stall"][STALL] == pytest.approx(1.5) and np.delete(found.scores["stall"], STALL).max() < 0.2
    assert found.scores["freeze"][FREEZE] == pytest.approx(0.6) and np.delete(found.scores["freeze"], FREEZE).max() == 0
    assert 1.5 <= found.scores["idle"][IDLE] <= 1.8 and np.delete(found.scores["idle"], IDLE).max() <= 0.3
    assert found.copy_of[COPY] == ORIGINAL and (np.delete(found.copy_of, COPY) == -1).all()


def test_a_gripper_that_switches_is_no_spike(dataset: Dataset) -> None:
    found = quality(dataset, progress=False)
    assert np.delete(found.scores["spike"], SPIKE).max() < 0.2 * found.scores["spike"][SPIKE]


def test_the_flawed_go_first_and_the_kept_are_as_they_were(dataset: Dataset, tmp_path: Path) -> None:
    kept = quality(dataset, progress=False).best(EPISODES - len(FLAWED))
    assert set(kept) == set(range(EPISODES)) - set(FLAWED.values())
    assert select(dataset.root, kept, tmp_path / "clean") == len(kept)
    clean = open_dataset(tmp_path / "clean")
    assert check(clean.root, deep=True) == []
    rows = np.concatenate([np.arange(dataset.episode_from[e], dataset.episode_to[e]) for e in kept])
    for name in ("observation.state", "action", "frame_index", "capture_time"):
        assert np.array_equal(clean.columns[name], dataset.columns[name][rows]), name
    pictures = [open_frames(d, ["front"], progress=False)["front"] for d in (clean, dataset)]
    assert np.array_equal(pictures[0], pictures[1][rows])


def test_selections_that_cannot_be_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no episode 15"):
        select(dataset.root, [15], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="exists"):
        select(dataset.root, [0], dataset.root)


def test_labels_that_contradict_their_neighbours_and_the_recording_are_found(tmp_path: Path) -> None:
    """All go the same way from the same states; one episode's labels say the opposite."""
    odd, steps = 4, 4
    with EpisodeRecorder(tmp_path / "data", ROBOT, image_mode="image", extra=chunk_columns(steps, 3)) as recorder:
        for e in range(10):
            for k in range(12):
                state = np.array([k / 10, e / 1000, 0], np.float32)
                action = state + np.array([0.1, 0, 0], np.float32)
                ahead = np.arange(1, steps + 1)[:, None] * np.array([0.1, 0, 0])
                chunk = (state - ahead if e == odd else state + ahead).astype(np.float32)
                picture = {"front": np.full((8, 8, 3), 9 * k, np.uint8)}
                label = {CHUNK: chunk.ravel(), CHUNK_STEPS: steps}
                recorder.add_frame(Observation(state, picture, "reach", k, k * 10**8), action, **label)
            recorder.save_episode(success=True)
    found = quality(open_dataset(tmp_path / "data"), progress=False)
    assert int(found.scores["branch_gap"].argmax()) == odd and int(found.scores["label_spread"].argmax()) == odd
    assert np.delete(found.scores["branch_gap"], odd).max() < 1e-6
    # Labels of step h are 0.2 h off in x, one of two dimensions that vary: y does so between episodes.
    x = np.concatenate([np.arange(12) / 10 + 0.1] * 10)
    ends = [(h, 12 - h + 1) for h in range(1, steps + 1)]  # step h of a label is compared where the episode goes on
    square = sum(n * (0.2 * h) ** 2 for h, n in ends) / sum(n for _, n in ends) / x.std() ** 2 / 2
    assert found.scores["branch_gap"][odd] == pytest.approx(np.sqrt(square), rel=1e-4)


def test_a_policy_s_error_is_a_score(dataset: Dataset) -> None:
    error = np.full(EPISODES, 0.2)
    error[12] = 3.0
    found = quality(dataset, progress=False, policy_error=error)
    assert found.why[12] == "policy_error" and found.score[12] > 3


def test_the_verb_leaves_a_table_figures_a_picture_and_the_selection(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, new = tmp_path / "out", tmp_path / "clean"
    command = ["data", "quality", str(dataset.root), "--save", str(out)]
    assert main([*command, "--keep", "0.6", "--into", str(new)]) == 0
    shown = capsys.readouterr().out
    assert f"repeats episode {ORIGINAL}" in shown and f"{new}: 9 episodes" in shown
    written = json.loads((out / "quality.json").read_text())
    assert written["why"][STALL] == "stall" and len(written["scores"]["jerk"]) == EPISODES
    assert ET.fromstring((out / "quality.svg").read_text()).tag.endswith("svg")
    assert open_dataset(new).num_episodes == 9
    monkeypatch.chdir(tmp_path)
    assert main(["data", "quality", str(dataset.root)]) == 0  # by default each dataset has a folder of its own
    assert (tmp_path / "outputs/quality" / dataset.root.name / "quality.json").is_file()
    capsys.readouterr()
    for keep, says in ((["--keep", "3"], "need each other"), (["--keep", "21", "--into", "x"], "--keep 21 of 15")):
        assert main([*command, *keep]) == 1
        assert says in capsys.readouterr().err


def test_one_short_episode_is_scored_too(tmp_path: Path) -> None:
    with EpisodeRecorder(tmp_path / "data", ROBOT, image_mode="image") as recorder:
        picture = {"front": np.zeros((8, 8, 3), np.uint8)}
        recorder.add_frame(Observation(np.zeros(3, np.float32), picture, "reach"), np.zeros(3, np.float32))
        recorder.save_episode(success=True)
    found = quality(open_dataset(tmp_path / "data"), progress=False)
    assert (
        found.score.tolist() == [0.0] and found.why == [""] and all(np.isfinite(v).all() for v in found.scores.values())
    )
