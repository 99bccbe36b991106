"""Label columns, what chunks may cross, and edits of whole datasets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_robot
from labelled_toy import SPEC, make_labelled
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from vla_stack import cli
from vla_stack.data import trainable as rac
from vla_stack.data.dataset import open_dataset
from vla_stack.data.digests import write_json
from vla_stack.data.edit import backfill, merge, relabel
from vla_stack.data.integrity import check
from vla_stack.data.labels import SEGMENT_TYPE, label_columns, reach
from vla_stack.data.layout import INFO, read_info
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import read_facts
from vla_stack.data.stats import load_stats
from vla_stack.errors import UserError
from vla_stack.intervention import Segment
from vla_stack.schema import SUCCESS
from vla_stack.training.loaders import frame_weights
from vla_stack.training.recipe import DataRecipe, SourceRecipe
from vla_stack.training.sources import Source

EPISODES = (("0000", True), ("111233", False), ("1111", True), ("1111", False), ("1223323", True))


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return make_labelled(tmp_path / "d", EPISODES)


def allowed(dataset, mask, t: int, k: int) -> bool:
    """The chunk rule, word for word: t … t+k all trainable, of one episode, without a gap."""
    if t + k >= dataset.frame_end[t] or not mask[t : t + k + 1].all():
        return False
    return bool((np.diff(dataset.columns["capture_time"][t : t + k + 1]) <= 1.5 / dataset.fps).all())


def test_labels_of_an_intervened_episode_and_what_is_trained_on(labelled: Path) -> None:
    dataset = open_dataset(labelled)
    kinds = dataset.columns[SEGMENT_TYPE]
    by_episode = ["".join(map(str, kinds[a:b])) for a, b in zip(dataset.episode_from, dataset.episode_to, strict=True)]
    assert by_episode == [segments for segments, _ in EPISODES]
    assert all(re.fullmatch("1*(2+3+)+", by_episode[e]) for e in (1, 4))
    assert (dataset.columns["intervention"] == np.isin(kinds, (2, 3))).all()
    mask = rac.trainable(dataset, "rac")
    autonomous = (kinds == 1) & mask
    assert set(dataset.columns["episode_index"][autonomous]) == {2}  # the only one that the policy did alone
    assert (mask[kinds != 1]).all()
    assert (rac.trainable(dataset, "hg_dagger") == (kinds != 1)).all()
    assert (rac.trainable(dataset, "no_recovery") == (mask & (kinds != 2))).all()
    succeeded = rac.trainable(dataset, "succeeded")
    assert set(dataset.columns["episode_index"][succeeded]) == {0, 2, 4}
    assert succeeded.sum() == sum(len(segments) for segments, success in EPISODES if success)
    del dataset.columns[SUCCESS]
    with pytest.raises(UserError, match="no column 'next.success'"):
        rac.trainable(dataset, "succeeded")


@pytest.mark.parametrize("hold_before", [-1, 4])
def test_no_chunk_starts_or_goes_on_where_training_may_not(tmp_path: Path, hold_before: int) -> None:
    dataset = open_dataset(make_labelled(tmp_path / "h", EPISODES, hold_before))
    mask, horizon = rac.trainable(dataset, "rac"), 4
    loader = ChunkLoader(dataset, horizon, 5, cameras=[], trainable=mask)
    steps, seen = reach(dataset, mask), set()
    for _ in range(2 * len(loader)):
        batch = next(loader)
        for i, t in enumerate(batch["index"]):
            seen.add(int(t))
            for k in range(horizon):
                valid = allowed(dataset, mask, int(t), k)
                assert batch["action_is_pad"][i, k] == (not valid) and (k < steps[t]) == valid
                if valid:
                    np.testing.assert_array_equal(batch["action"][i, k], dataset.columns["action"][t + k])
    assert seen == set(np.flatnonzero(mask))


def test_normalisation_counts_trainable_frames_alone(labelled: Path) -> None:
    dataset = open_dataset(labelled)
    mask = rac.trainable(dataset, "rac")
    stats = load_stats(dataset, 1, trainable=mask)
    for key in ("observation.state", "action"):
        np.testing.assert_allclose(stats[key]["mean"], dataset.columns[key][mask].mean(0), rtol=1e-5)


def test_weights_have_their_masses_and_empty_classes_raise(labelled: Path, tmp_path: Path) -> None:
    dataset = open_dataset(labelled)
    for preset in ("iwr", "balanced", "sirius"):
        mask = rac.trainable(dataset, "all" if preset == "sirius" else "rac")
        n, weights = int(mask.sum()), rac.weights(dataset, mask, preset)
        masses = rac.classes(dataset, mask, preset, n)
        assert weights[~mask].sum() == 0 and abs(weights.sum() - n) < 1e-9
        for mass, frames in masses.values():
            assert frames.any() and abs(weights[frames].sum() - mass * n) < 1e-9
            assert len(set(weights[frames])) == 1
    assert (rac.weights(dataset, mask, "uniform") == mask).all()
    demos = open_dataset(make_labelled(tmp_path / "demos", (("000", True),)))
    for preset in ("iwr", "balanced", "sirius"):
        with pytest.raises(UserError, match="frames"):
            rac.weights(demos, np.ones(3, bool), preset)


def drawn(dataset, recipe: DataRecipe) -> dict[Segment, float]:
    """Share of each class in what a loader draws, which has the chosen episodes alone."""
    source = Source("", "d", SourceRecipe("", episodes=recipe.episodes), dataset, None, rac.trainable(dataset, "rac"))
    loader = ChunkLoader(
        dataset,
        1,
        1,
        episodes=recipe.episodes,
        cameras=[],
        weights=frame_weights(source, recipe),
        trainable=source.trainable,
    )
    weight, kinds = loader._weights, dataset.columns[SEGMENT_TYPE]
    return {s: float(weight[kinds == s].sum() / weight.sum()) for s in Segment}


def test_classes_have_their_masses_among_the_chosen_episodes(labelled: Path) -> None:
    """Whichever episodes are chosen, and however much more often their first frames are drawn."""
    dataset, masses = open_dataset(labelled), {Segment.RECOVERY: 0.25, Segment.CORRECTION: 0.25}
    for episodes in (None, (0, 1), (0, 4)):
        for opening in (1.0, 5.0):
            share = drawn(
                dataset, DataRecipe(episodes=episodes, weights="balanced", opening_frames=2, opening_weight=opening)
            )
            assert {s: share[s] for s in masses} == pytest.approx(masses)
    with pytest.raises(UserError, match="need recovery frames"):
        drawn(dataset, DataRecipe(episodes=(0, 2), weights="balanced"))


def test_old_datasets_get_label_columns_and_recording_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "old"
    with EpisodeRecorder(root, SPEC) as recorder:
        for e in range(2):
            for obs, action, _ in toy_robot.frames(e, 3 + e):
                recorder.add_frame(obs, action)
            recorder.save_episode(True)
    before = open_dataset(root)
    assert set(backfill(root)) == set(label_columns(SPEC))
    assert backfill(root) == [] and check(root) == []
    after = open_dataset(root)
    for name, column in before.columns.items():
        np.testing.assert_array_equal(column, after.columns[name])
    assert (after.columns[SEGMENT_TYPE] == 0).all() and len(set(after.columns["episode_uid"])) == 2
    make_labelled(root, (("123", False),))
    assert open_dataset(root).num_episodes == 3 and check(root) == []
    assert LeRobotDataset("local/toy", root=root, video_backend="pyav")[0]["segment_type"] == 0


def test_relabelling_keeps_labels_consistent(labelled: Path) -> None:
    assert relabel(labelled, 1, range(2, 4), Segment.CORRECTION) == 2
    dataset = open_dataset(labelled)
    a = dataset.episode_from[1]
    rows = slice(a, dataset.episode_to[1])
    assert dataset.columns[SEGMENT_TYPE][rows].tolist() == [1, 1, 3, 3, 3, 3]
    assert dataset.columns["segment_index"][rows].tolist() == [0, 0, 1, 1, 1, 1]
    assert dataset.columns["intervention"][rows].tolist() == [False] * 2 + [True] * 4
    assert dataset.columns["control_source"][rows].tolist() == [0, 0, 1, 1, 1, 1]
    assert read_facts(labelled)[2]["n_recoveries"] == 0 and read_facts(labelled)[2]["human_frames"] == 4
    assert check(labelled) == []
    with pytest.raises(UserError, match="frames 0:6"):
        relabel(labelled, 1, range(2, 9), Segment.DEMO)


def test_merging_labelled_and_old_datasets(tmp_path: Path, labelled: Path) -> None:
    old = tmp_path / "old"
    with EpisodeRecorder(old, SPEC) as recorder:
        for obs, action, _ in toy_robot.frames(9, 4):
            recorder.add_frame(obs, action)
        recorder.save_episode(True)
    assert merge([old, labelled], tmp_path / "all") == 1 + len(EPISODES)
    both, first, second = (open_dataset(p) for p in (tmp_path / "all", old, labelled))
    assert check(both.root) == []
    for name in ("observation.state", "action", "timestamp"):
        np.testing.assert_array_equal(both.columns[name], np.concatenate([first.columns[name], second.columns[name]]))
    assert (both.columns[SEGMENT_TYPE][4:] == second.columns[SEGMENT_TYPE]).all()
    told = [both.tasks[i] for i in both.columns["task_index"]]
    assert told == [d.tasks[i] for d in (first, second) for i in d.columns["task_index"]]
    assert set(read_facts(second.root)) < set(read_facts(both.root))
    a, b = (ChunkLoader(d, 1, 1).gather(np.array([i])) for d, i in ((both, 6), (second, 2)))
    np.testing.assert_array_equal(a["observation.images.front"], b["observation.images.front"])


def record(root: Path, spec=SPEC, mode="video") -> Path:
    """An unlabelled dataset of one episode of four frames."""
    with EpisodeRecorder(root, spec, mode) as recorder:
        for obs, action, _ in toy_robot.frames(3, 4):
            state = np.resize(obs.state, len(spec.state))
            recorder.add_frame(replace(obs, state=state), action)
        recorder.save_episode(True)
    return root


@pytest.mark.parametrize(
    ("change", "mode", "message"),
    [
        ({"rate_hz": 20.0}, "video", "first was recorded on a robot whose rate_hz differ from those of .*second"),
        ({"action_kind": "delta"}, "video", "action_kind differ"),
        ({"state": SPEC.state[:2]}, "video", "state differ"),
        ({}, "image", r"'observation.images.front' is video\[16, 24, 3\] in the dataset and image"),
    ],
)
def test_datasets_of_different_robots_or_columns_are_not_merged(
    tmp_path: Path, change: dict, mode: str, message: str
) -> None:
    first, second = record(tmp_path / "first"), record(tmp_path / "second", replace(SPEC, **change), mode)
    with pytest.raises(UserError, match=message):
        merge([first, second], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_dataset_whose_rate_is_not_its_robots_is_not_merged(tmp_path: Path) -> None:
    first, second = record(tmp_path / "first"), record(tmp_path / "second")
    write_json(second, INFO, read_info(second) | {"fps": 10.5})
    with pytest.raises(UserError, match="second has 10.5 fps, .*first 10"):
        merge([first, second], tmp_path / "all")


def test_the_verb(labelled: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["data", "info", str(labelled)]) == 0
    assert "demo 4, autonomous 12, recovery 4, correction 5 frames; 13 by a person" in capsys.readouterr().out
    relabelled = ["--episode", "0", "--frames", "1:3", "--segment", "recovery"]
    assert cli.main(["data", "relabel", str(labelled), *relabelled]) == 0
    assert cli.main(["data", "relabel", str(labelled), "--frames", "x"]) == 1
    assert cli.main(["data", "merge", str(labelled), str(labelled), "--into", str(tmp_path / "m")]) == 1
    assert "in more than one of the datasets" in capsys.readouterr().err
    assert cli.main(["data", "view", str(labelled), "--episode", "1", "--save", str(tmp_path / "e.rrd")]) == 0
    assert (tmp_path / "e.rrd").stat().st_size > 1000
