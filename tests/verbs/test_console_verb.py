"""What ``vla console`` begins with."""

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_console import ROBOT as TOY

from vla_stack.data.labels import frame_labels, label_columns
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import EpisodeFacts
from vla_stack.errors import UserError
from vla_stack.schema import Camera, Observation
from vla_stack.verbs import console as verb

ROBOT = replace(TOY, cameras=(Camera("front", 16, 16),))  # the simulation renders squares
LABELS = {"intervention": False, "segment_type": 0, "segment_index": 0, "control_source": 1}


def record(root: Path, seeds: list[int], discarded: int = 0) -> Path:
    """Episodes of one frame, of which the last ones are discarded."""
    with EpisodeRecorder(root, ROBOT, extra=label_columns(ROBOT)) as recorder:
        for uid, seed in enumerate(seeds):
            obs = Observation(np.zeros(3, np.float32), {"front": np.zeros((16, 16, 3), np.uint8)}, "tidy up", 0, 0)
            recorder.add_frame(obs, np.zeros(3, np.float32), **frame_labels(ROBOT, LABELS, 0))
            recorder.save_episode(True, pending=True, uid=uid, facts=EpisodeFacts(seed=seed))
            recorder.commit(uid) if uid < len(seeds) - discarded else recorder.discard(uid)
    return root


def begun_with(root: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The seed of a session's first episode."""
    seeds = []

    @contextlib.contextmanager
    def running(config):
        seeds.append(config.seed)
        raise UserError("enough")
        yield

    monkeypatch.setattr(verb, "running", running)
    monkeypatch.setattr(verb.signal, "signal", lambda *_: None)
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    with pytest.raises(UserError, match="enough"):
        verb.main(parser.parse_args(["--robot", "sim", "--task", "pick", "--root", str(root), *arguments]))
    return seeds[0]


@pytest.mark.parametrize(
    ("seeds", "discarded", "first"),
    [
        ([], 0, 0),
        ([0, 1, 2], 0, 3),
        ([0, 1, 2], 2, 3),  # what was thrown away has been seen all the same
        ([-1, -1], 0, 2),  # demonstrations without a seed
        ([7], 0, 8),
    ],
)
def test_a_further_session_does_not_repeat_the_starts_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: list[int], discarded: int, first: int
) -> None:
    root = tmp_path / "d"
    if seeds:
        record(root, seeds, discarded)
    assert begun_with(root, monkeypatch) == first
    assert begun_with(root, monkeypatch, "--seed", "1") == 1
