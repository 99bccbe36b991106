"""Frames of the running episode, and the episodes that wait for a decision, on a thread of their own.

Whoever drives never waits for the disk: frames go through a queue. An episode that has ended is on the disk at once,
pending; it becomes part of the dataset when its undo window is over, so that taking it back never edits the dataset.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import open_dataset
from vla_stack.data.labels import CONTROL_SOURCE, EPISODE_UID, SEGMENT_TYPE, frame_labels, label_columns
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import EpisodeFacts, read_facts
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.runtime.frames import most_waiting
from vla_stack.schema import SUCCESS, Observation, RobotSpec, SchemaError

UNDO_S = 5.0
OUTCOMES = {
    "end_demo": "demonstration",
    "end_auto_success": "policy succeeded",
    "end_auto_fail": "policy failed",
    "end_intervened": "intervention",
    "end_discarded": "discarded",
}


@dataclass
class Pending:
    """An ended episode in its undo window, until ``due``, monotonic seconds; ``kept`` is the operator's wish."""

    uid: int
    number: int
    facts: EpisodeFacts
    success: bool
    counts: Counter[str]
    due: float
    kept: bool
    on_disk: bool | None = None  # as it lies there: None not yet, True kept, False discarded


class Recording:
    """Records what a robot node hands out.

    Every method but :meth:`close` returns at once and may be called from any thread.

    Args:
        root: Dataset folder; episodes that an earlier console left pending become part of it.
        robot: What is recorded.
        joints: Names of the joints of ``joint_command``, empty where frames have none.
        on_change: Called with :meth:`status` when that has changed, from any thread.
        undo_s: Length of the undo window, seconds.
        iteration: Of the loop; frames of its earlier sessions count with those of this one.

    Raises:
        UserError: The dataset cannot be opened, e.g. because it is another robot's.
    """

    def __init__(
        self,
        root: Path,
        robot: RobotSpec,
        joints: tuple[str, ...],
        on_change: Callable[[dict[str, Any]], None],
        undo_s: float = UNDO_S,
        iteration: int = 0,
    ) -> None:
        self._robot, self._on_change, self._undo_s = robot, on_change, undo_s
        self._recorder = EpisodeRecorder(root, robot, joints=joints, extra=label_columns(robot))
        for uid in self._recorder.pending:
            self._recorder.commit(uid)
        self._counts: Counter[str] = Counter(episodes=self._recorder.num_episodes)
        if self._recorder.num_episodes:
            self._counts += _recorded(root, iteration)
        self._running: Counter[str] = Counter()
        self._pending: list[Pending] = []
        self._ended = self._recorder.num_episodes
        self._error, self._lost = "", 0
        self._lock = threading.RLock()
        self._orders: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recording")
        self._thread.start()
        self._changed()

    def frame(
        self,
        obs: Observation,
        action: NDArray[np.float32],
        joint_command: NDArray[np.float32] | None,
        labels: dict[str, Any],
    ) -> None:
        """Record a control step of the running episode; ``labels`` has at least what ``Intervention.labels`` gives."""
        if self._orders.qsize() >= most_waiting(obs):
            self._lost += 1  # and shown
            self._changed()
            return
        self._orders.put((self._add, obs, action, joint_command, labels))
        self._running["frames"] += 1
        self._running["human_frames"] += labels["control_source"] == Control.HUMAN
        self._running["recovery_frames"] += labels["segment_type"] == Segment.RECOVERY
        self._running["correction_frames"] += labels["segment_type"] == Segment.CORRECTION

    def end(self, success: bool, kept: bool, facts: EpisodeFacts) -> None:
        """The running episode is over; it is ``kept``, or thrown away, unless the operator says otherwise in time."""
        counts, self._running = self._running, Counter()
        if not counts["frames"]:
            return
        with self._lock:
            self._ended += 1
            counts += Counter(episodes=1, successes=int(success))
            due = time.monotonic() + self._undo_s
            pending = Pending(secrets.randbits(62), self._ended, facts, success, counts, due, kept)
            self._pending.append(pending)
            self._orders.put((self._save, pending))
        self._changed()

    def decide(self, name: str) -> str | None:
        """What becomes of the episode that ended last.

        Args:
            name: ``keep`` makes it part of the dataset now, ``discard`` throws it away when the window is over (now,
                if it was to be already), ``undo`` takes that back.

        Returns:
            Why that is not possible, or None.
        """
        with self._lock:
            if not self._pending:
                return "no episode waits for a decision: its undo window is over"
            last = self._pending[-1]
            if name == "undo" and last.kept:
                return "there is nothing to undo: the episode is kept"
            now = name == "keep" or (name == "discard" and not last.kept)
            last.kept = name != "discard"
            last.due = time.monotonic() + (0.0 if now else self._undo_s)
        self._changed()
        return None

    def status(self) -> dict[str, Any]:
        """Counts, the last pending episode and the last error, as plain values."""
        with self._lock:
            counts = sum((p.counts for p in self._pending if p.kept), self._counts)
            last = self._pending[-1] if self._pending else None
            return {
                **{name: counts[name] for name in ("episodes", "successes", "human_frames", "recovery_frames")},
                "correction_frames": counts["correction_frames"],
                "lost_frames": self._lost,  # of this session, whatever became of their episodes
                "error": self._error,
                "pending": last
                and {
                    "episode": last.number,
                    "outcome": _outcome(last),
                    "frames": last.counts["frames"],
                    "kept": last.kept,
                    "due_ns": round(last.due * 1e9),
                    "window_s": self._undo_s,
                },
            }

    def close(self) -> None:
        """Act on what is pending, finish writing, release the dataset; an episode that still runs is forgotten."""
        self._orders.put(None)
        self._thread.join()
        self._recorder.close()

    # On the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=0.05)
            except queue.Empty:
                pass
            else:
                if order is None:
                    break
                self._guarded(*order)
            self._settle(time.monotonic())
        self._settle(float("inf"))

    def _guarded(self, act: Callable[..., object], *args: Any) -> bool:
        """Do it; whatever goes wrong is said to the operator, and ends neither the thread nor another episode."""
        try:
            act(*args)
        except Exception as e:
            text = str(e) if isinstance(e, UserError | SchemaError) else f"{type(e).__name__}: {e}"
            if text != self._error:  # a disk stays full for many frames
                self._error = text
                self._changed()
            return False
        return True

    def _add(
        self,
        obs: Observation,
        action: NDArray[np.float32],
        joint_command: NDArray[np.float32] | None,
        labels: dict[str, Any],
    ) -> None:
        self._recorder.add_frame(obs, action, joint_command, **frame_labels(self._robot, labels, obs.t_capture_ns))

    def _save(self, pending: Pending) -> None:
        try:
            self._recorder.save_episode(pending.success, pending=True, uid=pending.uid, facts=pending.facts)
        except Exception:
            with self._lock:
                self._pending.remove(pending)
            self._changed()
            raise
        pending.on_disk = True
        self._error = ""  # what was wrong is not any more

    def _settle(self, now: float) -> None:
        """Make the disk agree with the operator's wishes, and those whose window is over part of the dataset."""
        with self._lock:
            saved = [p for p in self._pending if p.on_disk is not None]
        for pending in saved:
            kept = pending.kept
            if kept and not pending.on_disk:
                done = self._guarded(self._recorder.undo, pending.uid)
            elif pending.on_disk and not kept:
                done = self._guarded(self._recorder.discard, pending.uid, "operator")
            else:
                done = True
            if not done:
                continue  # it is tried again, in a moment or at the end
            pending.on_disk = kept
            with self._lock:
                if pending.due > now or pending.kept != kept:
                    continue
                self._pending.remove(pending)  # from here on nothing can be taken back
                if kept:
                    self._counts += pending.counts
            if kept and not self._guarded(self._recorder.commit, pending.uid):
                self._counts -= pending.counts
            self._changed()

    def _changed(self) -> None:
        self._on_change(self.status())


def _recorded(root: Path, iteration: int) -> Counter[str]:
    """Successes of a dataset, and frames by who drove in its episodes of an iteration."""
    columns = open_dataset(root).columns
    uids = [uid for uid, row in read_facts(root).items() if row["iteration"] == iteration]
    here = np.isin(columns[EPISODE_UID], np.array(uids, np.int64))
    segments = columns[SEGMENT_TYPE][here]
    return Counter(
        successes=int(columns[SUCCESS].sum()),
        human_frames=int((columns[CONTROL_SOURCE][here] == Control.HUMAN).sum()),
        recovery_frames=int((segments == Segment.RECOVERY).sum()),
        correction_frames=int((segments == Segment.CORRECTION).sum()),
    )


def _outcome(pending: Pending) -> str:
    what = OUTCOMES.get(pending.facts.outcome, pending.facts.outcome)
    return what if pending.success or pending.facts.mode != "teleop" else f"{what}, failed"
