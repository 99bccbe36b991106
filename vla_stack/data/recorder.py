"""Records episodes into a LeRobotDataset v3 that survives a crash at any moment.

Frames are encoded as they come; nothing of the running episode touches the dataset until :meth:`save_episode`, and
nothing of a saved one can be lost afterwards (see ``store.py``). LeRobot's and our own loader open the result.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
from av.error import FFmpegError
from numpy.typing import ArrayLike, NDArray

from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import Column, ImageMode, arrow_column, arrow_type, robot_features
from vla_stack.data.integrity import repair_locked
from vla_stack.data.labels import CONTROL_SOURCE, EPISODE_UID, SEGMENT_INDEX, SEGMENT_TYPE
from vla_stack.data.layout import STAGING
from vla_stack.data.pending import PendingEpisodes
from vla_stack.data.sidecar import EpisodeFacts, facts_row
from vla_stack.data.stats import ImageHistogram, column_stats
from vla_stack.data.store import Episode, EpisodeStore, clear_staging, locked
from vla_stack.data.video import VideoWriter, video_info
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.schema import (
    ACTION,
    CAPTURE_TIME,
    DONE,
    JOINT_COMMAND,
    OBS_STATE,
    REWARD,
    SUCCESS,
    Observation,
    RobotSpec,
    SchemaError,
    image_key,
)

REMEDY = "free disk space and record on"
_PNG = [cv2.IMWRITE_PNG_COMPRESSION, 3]


class EpisodeRecorder:
    """Creates a dataset, or appends to one of the same robot and columns.

    Args:
        root: Dataset folder; leftovers of a recording that died there are cleared first.
        spec: The robot; written to ``meta/robot.json``.
        image_mode: ``video`` (H.264, 4:4:4) or ``image`` (PNG, lossless).
        joints: Joint names, if frames carry a ``joint_command`` (column ``command.joints``).
        extra: Further columns: name -> type; every frame must then give each of them, except for ``episode_uid`` of
            ``labels.label_columns``, which is the recorder's.

    Raises:
        UserError: The folder belongs to another robot, other columns or another process, is not a dataset, or has lost
            files of its episodes.
    """

    def __init__(
        self,
        root: str | Path,
        spec: RobotSpec,
        image_mode: ImageMode = "video",
        joints: tuple[str, ...] = (),
        extra: Mapping[str, Column] | None = None,
    ) -> None:
        self.spec = spec
        self._extra = dict(extra or {})
        self._joints = len(joints)
        self._features = robot_features(spec, image_mode, joints, self._extra)
        self._cameras = {c.name: image_key(c.name) for c in spec.cameras}
        if image_mode == "video":
            for c in spec.cameras:
                self._features[image_key(c.name)]["info"] = video_info(c.height, c.width, spec.rate_hz)
        self._exit = contextlib.ExitStack()
        root = Path(root)
        died = (root / STAGING).exists()
        self._staging = self._exit.enter_context(locked(root))
        try:
            if died:
                for action in repair_locked(root, drop=False).actions:
                    print(f"{root}: {action}")
            self._store = EpisodeStore(root, spec, self._features)
            self._pending = PendingEpisodes(root, self._staging, self._last_uid())
        except BaseException:
            if not died:
                clear_staging(root)
            self._exit.close()
            raise
        self._lost = ""  # why nothing more of the running episode is recorded
        self._clear()
        pa.array([0])  # at its first conversion pyarrow imports pandas: a second that no episode should lose

    @property
    def num_episodes(self) -> int:
        """Episodes in the dataset."""
        return self._store.num_episodes

    @property
    def num_frames(self) -> int:
        """Frames in the dataset; those of the running episode not counted."""
        return self._store.num_frames

    def add_frame(
        self,
        obs: Observation,
        action: NDArray[np.float32],
        joint_command: NDArray[np.float32] | None = None,
        reward: float = 0.0,
        **extra: ArrayLike,
    ) -> None:
        """Record one control step. Arrays are copied.

        Args:
            obs: What the robot knew at the start of the step.
            action: float32 [A], the command that was sent, in the units of ``spec.action``.
            joint_command: float32 [J], joint targets that realised it, radians.
            reward: Reward of the step.
            **extra: Values of the declared extra columns.

        Raises:
            SchemaError: The frame does not fit the robot or the declared columns; it was not recorded.
            UserError: Encoding failed, for example on a full disk. The episode is lost then, and so is what comes of it
                afterwards: frames are refused until it is ended by :meth:`save_episode` or :meth:`discard_episode`.
        """
        if self._lost:
            raise UserError(self._lost, REMEDY)
        obs.check(self.spec)
        row = {
            OBS_STATE: np.array(obs.state),
            ACTION: _vector("action", action, len(self.spec.action)),
            REWARD: _value(REWARD, reward, Column("float32")),
            CAPTURE_TIME: self._capture_time(obs),
        }
        if joint_command is not None or self._joints:
            row[JOINT_COMMAND] = _vector("joint_command", joint_command, self._joints)
        if extra.keys() != self._extra.keys() - {EPISODE_UID}:
            odd = sorted(extra.keys() ^ (self._extra.keys() - {EPISODE_UID}))[0]
            raise SchemaError(f"column '{odd}' is {'not declared' if odd in extra else 'missing from the frame'}")
        row |= {name: _value(name, value, self._extra[name]) for name, value in extra.items()}
        try:
            self._add_images(obs)
        except (OSError, FFmpegError) as e:
            failure = self._failed(e)
            self._lost = failure.message
            raise failure from e
        self._rows.append(row)
        self._tasks.append(obs.task)

    def save_episode(
        self, success: bool, pending: bool = False, uid: int | None = None, facts: EpisodeFacts = EpisodeFacts()
    ) -> int:
        """End the running episode; when this returns it survives kill -9 and a power cut.

        Args:
            success: Outcome; ``next.success`` of the last frame.
            pending: Keep it beside the dataset until :meth:`commit` or :meth:`discard`.
            uid: ``episode_uid``, 0 to 2^62; drawn at random where it is not given.
            facts: For the sidecar of datasets with label columns.

        Returns:
            Index of the episode; of a pending one, its uid.

        Raises:
            UserError: There is no frame, the disk is full, or was so while the episode ran; the dataset is as it was
                before.
        """
        if self._lost:
            lost = UserError(self._lost, REMEDY)
            self._clear()
            raise lost
        if not self._rows:
            raise UserError("the episode has no frame", "call add_frame before save_episode")
        if pending and EPISODE_UID not in self._extra:
            raise UserError(f"{self._store.root} has no column '{EPISODE_UID}'", "open it with labels.label_columns()")
        uid = secrets.randbits(62) if uid is None else uid
        try:
            for writer in self._writers.values():
                writer.close()
            episode = self._finish(success, uid, facts)
            index = uid
            if pending:
                self._pending.add(episode)
            else:
                index = self._store.commit(episode)
        except (OSError, FFmpegError) as e:
            raise self._failed(e) from e
        finally:
            self._clear()
        return index

    @property
    def pending(self) -> list[int]:
        """Uids of ended episodes that are neither committed nor discarded, oldest first; also of earlier recorders."""
        return self._pending.uids()

    def commit(self, uid: int) -> int:
        """Make a pending episode part of the dataset; returns its index.

        Raises:
            UserError: It is not pending, or the disk is full; then it is pending still.
        """
        try:
            index = self._store.commit(self._pending.read(uid))
        except OSError as e:
            raise UserError(f"{self._store.root}: episode {uid} is still pending ({e})", "free disk space") from e
        self._pending.remove(uid)
        return index

    def discard(self, uid: int, reason: str = "") -> None:
        """Take a pending episode out; it is deleted when the recorder closes, and :meth:`undo` brings it back.

        Raises:
            UserError: It is not pending.
        """
        self._pending.discard(uid, reason)

    def undo(self, uid: int) -> None:
        """Make a discarded episode pending again.

        Raises:
            UserError: It is not discarded.
        """
        self._pending.restore(uid)

    def discard_episode(self) -> None:
        """Forget the running episode."""
        for writer in self._writers.values():
            writer.abort()
        self._clear()

    def close(self) -> None:
        """Forget the running episode, delete discarded ones, and release the dataset; pending ones stay."""
        try:
            self.discard_episode()
            self._pending.purge()
        finally:
            clear_staging(self._store.root)
            self._exit.close()

    def __enter__(self) -> EpisodeRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _clear(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._tasks: list[str] = []
        self._png: dict[str, list[bytes]] = {key: [] for key in self._cameras.values()}
        self._histograms = {key: ImageHistogram() for key in self._cameras.values()}
        self._writers: dict[str, VideoWriter] = {}
        self._start_ns = 0
        self._lost = ""

    def _last_uid(self) -> int | None:
        """Uid of the dataset's last episode."""
        if EPISODE_UID not in self._extra or not self.num_episodes:
            return None
        dataset = open_dataset(self._store.root)
        return int(dataset.columns[EPISODE_UID][-1])

    def _failed(self, error: OSError | FFmpegError) -> UserError:
        self.discard_episode()
        return UserError(
            f"{self._store.root}: writing failed ({error}); the running episode is lost, "
            f"{self.num_episodes} episodes are safe",
            REMEDY,
        )

    def _capture_time(self, obs: Observation) -> np.float64:
        if not self._rows:
            self._start_ns = obs.t_capture_ns
        t = np.float64((obs.t_capture_ns - self._start_ns) * 1e-9)
        if self._rows and t < self._rows[-1][CAPTURE_TIME]:
            raise SchemaError(f"observation of step {obs.step} was captured before the one recorded last")
        return t

    def _add_images(self, obs: Observation) -> None:
        for camera, key in self._cameras.items():
            image = obs.images[camera]
            if self._features[key]["dtype"] == "image":
                ok, data = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), _PNG)
                assert ok
                self._png[key].append(data.tobytes())
            else:
                if key not in self._writers:
                    path = self._staging / f"{key}.mp4"
                    self._writers[key] = VideoWriter(path, image.shape[0], image.shape[1], self.spec.rate_hz)
                self._writers[key].put(image)
            self._histograms[key].add(image)

    def _finish(self, success: bool, uid: int, facts: EpisodeFacts) -> Episode:
        """Columns, statistics and files of the running episode."""
        length = len(self._rows)
        columns = {key: np.stack([row[key] for row in self._rows]) for key in self._rows[0]}
        last, tasks = np.arange(length) == length - 1, tuple(dict.fromkeys(self._tasks))
        columns |= {
            DONE: last,
            SUCCESS: last & success,
            "timestamp": (np.arange(length) / self.spec.rate_hz).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.zeros(length, np.int64),
            "index": np.arange(length),
            "task_index": np.array([tasks.index(task) for task in self._tasks]),
        }
        row = None
        if EPISODE_UID in self._extra:
            columns[EPISODE_UID] = np.full(length, uid)
            kinds, index = columns[SEGMENT_TYPE], columns[SEGMENT_INDEX]
            recoveries = len(np.unique(index[kinds == Segment.RECOVERY]))
            human = int((columns[CONTROL_SOURCE] == Control.HUMAN).sum())
            row = facts_row(facts, uid, recoveries, human)
        arrays: dict[str, pa.Array] = {}
        stats = {key: h.stats() for key, h in self._histograms.items()}
        for key, feature in self._features.items():
            if feature["dtype"] == "image":
                images = [{"bytes": png, "path": f"frame-{i:06d}.png"} for i, png in enumerate(self._png[key])]
                arrays[key] = pa.array(images, arrow_type(feature))
            elif feature["dtype"] != "video":
                arrays[key] = arrow_column(columns[key], feature)
                stats[key] = column_stats(columns[key])
        videos = {key: writer.path for key, writer in self._writers.items()}
        return Episode(pa.table(arrays), videos, stats, tasks, row)


def _vector(name: str, value: NDArray[np.float32] | None, size: int) -> NDArray[np.float32]:
    """A copy of a finite float32 [size] vector."""
    if value is None or size == 0:
        declared = f"the recorder expects {size} joints" if size else "the recorder was opened without joints=..."
        raise SchemaError(f"{name} is {'missing' if value is None else 'not declared'}: {declared}")
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape != (size,):
        what = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise SchemaError(f"{name} is {what}, expected float32[{size}]")
    if not np.isfinite(value).all():
        raise SchemaError(f"{name} is not finite at index {int(np.flatnonzero(~np.isfinite(value))[0])}")
    return value.copy()


def _value(name: str, value: ArrayLike, column: Column) -> NDArray[Any]:
    """A declared column's value as an array of its type; [] for scalars."""
    array = np.asarray(value)
    shape = () if column.shape == (1,) and array.shape in ((), (1,)) else column.shape
    python_number = isinstance(value, (bool, int, float))
    castable = python_number or np.can_cast(array.dtype, column.dtype, "same_kind")
    if array.size != int(np.prod(column.shape)) or (shape and array.shape != shape) or not castable:
        raise SchemaError(f"{name} is {array.dtype}{list(array.shape)}, expected {column.dtype}{list(column.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise SchemaError(f"{name} is not finite")
    return array.astype(column.dtype).reshape(shape)
