"""Whatever call of a commit fails or is interrupted, earlier episodes stay, and the next one can be recorded."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from labelled_toy import SPEC, add_episode

from vla_stack.data.dataset import open_dataset
from vla_stack.data.integrity import check
from vla_stack.data.labels import label_columns
from vla_stack.data.layout import STATS, read_json
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError

CALLS = ((os, "replace"), (os, "fsync"), (os, "link"), (os, "unlink"), (os, "mkdir"), (pq, "write_table"))


class Fault:
    """Lets the n-th call that changes the disk fail, before or after it has done its work."""

    def __init__(self, n: int, error: type[BaseException], after: bool) -> None:
        self.left, self.error, self.after, self.fired = n, error, after, False

    def __enter__(self) -> Fault:
        self._patches = ExitStack()
        for module, name in CALLS:
            self._patches.enter_context(patch.object(module, name, self._faulty(getattr(module, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _faulty(self, call):
        def wrapped(*args, **kwargs):
            self.left -= 1
            if self.left:
                return call(*args, **kwargs)
            self.fired = True
            if self.after:
                call(*args, **kwargs)
            raise self.error("the disk is full")

        return wrapped


def problems(root: Path) -> list[str]:
    return [p for p in check(root) if p != "a recording is running or died here"]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_fault_at_every_call_of_a_commit_costs_at_most_its_episode(
    tmp_path: Path, error: type[BaseException], after: bool
) -> None:
    root, lost = tmp_path / "d", 0
    with EpisodeRecorder(root, SPEC, "image", extra=label_columns(SPEC)) as recorder:
        add_episode(recorder, "00")
        recorder.save_episode(True)
        for n in range(1, 200):
            before = recorder.num_episodes
            fault = save(recorder, n, error, after)
            lost += recorder.num_episodes == before
            dataset = open_dataset(root)
            assert dataset.num_episodes == recorder.num_episodes and problems(root) == []
            assert read_json(root / STATS)["index"]["count"] == [dataset.num_frames]
            if not fault.fired:
                break
        assert lost > 15  # every write, flush and rename had its turn
    assert check(root) == []
    assert open_dataset(root).episode_to.tolist() == [2 + 3 * i for i in range(recorder.num_episodes)]


def save(recorder: EpisodeRecorder, n: int, error: type[BaseException], after: bool) -> Fault:
    """Record an episode of three frames whose commit meets a fault at its n-th call."""
    add_episode(recorder, "123", 1)  # an instruction that the dataset does not have yet
    before = recorder.num_episodes
    with Fault(n, error, after) as fault:
        try:
            assert recorder.save_episode(True, uid=1000 + n) == before
        except UserError as e:
            assert f"{before} episodes are safe" in str(e) and recorder.num_episodes == before
        except KeyboardInterrupt:
            pass
    return fault
