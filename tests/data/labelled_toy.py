"""Recordings of the toy robot with intervention labels: an episode is a string of segment types, e.g. ``11123``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import toy_robot
from toy_robot import frames

from vla_stack.data.labels import frame_labels, label_columns
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import EpisodeFacts
from vla_stack.intervention import Control, Segment

SPEC = replace(toy_robot.SPEC, cameras=toy_robot.SPEC.cameras[:1])
SOURCE = {
    Segment.DEMO: Control.HUMAN,
    Segment.AUTONOMOUS: Control.POLICY,
    Segment.RECOVERY: Control.HUMAN,
    Segment.CORRECTION: Control.HUMAN,
}


def open_labelled(root: Path) -> EpisodeRecorder:
    return EpisodeRecorder(root, SPEC, extra=label_columns(SPEC))


def add_episode(recorder: EpisodeRecorder, segments: str, seed: int = 0, hold_before: int = -1) -> None:
    """Record frames without ending the episode; before frame ``hold_before`` the robot was held for a second."""
    index = 0
    for k, (obs, action, _) in enumerate(frames(seed, len(segments))):
        index += k > 0 and segments[k] != segments[k - 1]
        kind = Segment(int(segments[k]))
        labels = {
            "intervention": kind in (Segment.RECOVERY, Segment.CORRECTION),
            "segment_type": int(kind),
            "segment_index": index,
            "control_source": int(SOURCE[kind]),
        }
        late = obs.t_capture_ns + 1_000_000_000 * (0 <= hold_before <= k)
        held = type(obs)(obs.state, obs.images, obs.task, obs.step, late)
        recorder.add_frame(held, action, **frame_labels(SPEC, labels, late))


def make_labelled(root: Path, episodes: tuple[tuple[str, bool], ...], hold_before: int = -1) -> Path:
    """A dataset of episodes (segments, success), with uids 1, 2, …"""
    with open_labelled(root) as recorder:
        for i, (segments, success) in enumerate(episodes):
            add_episode(recorder, segments, i, hold_before)
            recorder.save_episode(success, uid=i + 1, facts=EpisodeFacts(mode="rac", iteration=i, seed=i))
    return root
