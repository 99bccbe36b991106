"""Label columns of interventions, and what they mean for chunks: where a frame's trainable future ends.

Names and meaning follow ``vla_stack.intervention``; ``intervention`` is LeRobot's column of that name. Label columns
lie outside ``observation.*`` and ``action*``, so no loader takes them for a policy's input or output.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset
from vla_stack.data.features import Column
from vla_stack.intervention import Control, Segment
from vla_stack.schema import ACTION, CAPTURE_TIME, OBS_STATE, RobotSpec

INTERVENTION = "intervention"
SEGMENT_TYPE = "segment_type"
SEGMENT_INDEX = "segment_index"
CONTROL_SOURCE = "control_source"
EPISODE_UID = "episode_uid"  # written by the recorder; survives that episodes are renumbered
MAX_GAP = 1.5  # control periods between two captures, beyond which a chunk does not go on

_SCALARS = {
    INTERVENTION: "bool",  # whether a person corrects the policy: segment_type is recovery or correction
    SEGMENT_TYPE: "int64",  # intervention.Segment
    SEGMENT_INDEX: "int64",  # never decreases in an episode
    CONTROL_SOURCE: "int64",  # intervention.Control
    "subtask_index": "int64",  # stages reached so far
    "operator_id": "int64",  # a pseudonym
    "policy_version": "int64",  # first 60 bits of the hash of the weights that acted; 0 where none did
    EPISODE_UID: "int64",
    "t_capture_ns": "int64",  # the robot's monotonic clock
    "cmd_age_ms": "float32",  # of the operator's command when it was used
    "in_dist_score": "float32",  # distance to the demonstrations over its threshold; 0 where nobody computed it
}


def label_columns(spec: RobotSpec) -> dict[str, Column]:
    """The label columns of a robot, for ``EpisodeRecorder(extra=...)``; all but ``episode_uid`` are given by frame."""
    columns = {name: Column(dtype) for name, dtype in _SCALARS.items()}
    columns["intervention_mask"] = Column("bool", (arms(spec),))  # which arms a person moves
    if spec.cameras:
        columns["cam_age_ms"] = Column("float32", (len(spec.cameras),))
    return columns


def arms(spec: RobotSpec) -> int:
    """How many arms a robot has: as many as grippers, and at least one."""
    return max(1, int(spec.gripper_mask.sum()))


def frame_labels(spec: RobotSpec, labels: dict[str, Any], t_capture_ns: int, **measured: Any) -> dict[str, Any]:
    """Values of all label columns for one frame.

    Args:
        spec: The robot.
        labels: What follows from the phase, ``Intervention.labels``.
        t_capture_ns: Capture time of the observation.
        **measured: Any other label column; what is not given is 0.
    """
    given = {"t_capture_ns": t_capture_ns, **labels, **measured}
    given.setdefault("intervention_mask", np.full(arms(spec), bool(given[INTERVENTION])))
    return {name: given.get(name, _zero(c)) for name, c in label_columns(spec).items() if name != EPISODE_UID}


def demo_labels(spec: RobotSpec, t_capture_ns: int, scripted: bool, **measured: Any) -> dict[str, Any]:
    """Label columns of a demonstration's frame."""
    source = Control.SCRIPTED if scripted else Control.HUMAN
    labels = {INTERVENTION: False, SEGMENT_TYPE: int(Segment.DEMO), SEGMENT_INDEX: 0, CONTROL_SOURCE: int(source)}
    return frame_labels(spec, labels, t_capture_ns, **measured)


def content_uid(states: NDArray[np.float32], actions: NDArray[np.float32]) -> int:
    """A uid for an episode that was recorded without one: a hash of its numbers, below 2^62."""
    digest = hashlib.blake2b(np.ascontiguousarray(states).tobytes(), digest_size=8)
    digest.update(np.ascontiguousarray(actions).tobytes())
    return int.from_bytes(digest.digest(), "big") >> 2


def content_uids(dataset: Dataset) -> NDArray[np.int64]:
    """:func:`content_uid` of every episode, int64 [E]."""
    states, actions = dataset.columns[OBS_STATE], dataset.columns[ACTION]
    spans = zip(dataset.episode_from, dataset.episode_to, strict=True)
    return np.array([content_uid(states[a:b], actions[a:b]) for a, b in spans], np.int64)


def reach(dataset: Dataset, trainable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many steps from each frame on may be trained on as one chunk, int64 [N]; 0 where none.

    Step k of a chunk that starts at frame t counts only where frames t … t+k are all trainable, of one episode, and
    captured without a gap of more than ``MAX_GAP`` periods: frames of a hold are not recorded, and an action that was
    sent seconds later does not belong to this observation. From recovery to correction a chunk goes on.

    Args:
        dataset: An open dataset of N frames.
        trainable: bool [N].
    """
    n = dataset.num_frames
    follows = np.zeros(n, bool)  # frame t + 1 continues frame t
    follows[:-1] = (dataset.frame_end[:-1] > np.arange(1, n)) & trainable[:-1] & trainable[1:]
    if CAPTURE_TIME in dataset.columns:
        follows[:-1] &= np.diff(dataset.columns[CAPTURE_TIME]) <= MAX_GAP / dataset.fps
    ends = np.flatnonzero(~follows)
    return np.where(trainable, ends[np.searchsorted(ends, np.arange(n))] - np.arange(n) + 1, 0)


def _zero(column: Column) -> NDArray[Any]:
    return np.zeros(() if column.shape == (1,) else column.shape, column.dtype)
