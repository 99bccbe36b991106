"""Records what a policy does on a robot: whole episodes, or the seconds around what is worth keeping.

Frames come on the node's own thread through its bounded queue, so a slow disk loses frames, which are counted, and
never holds up the robot. What has been saved survives kill -9; a process that dies loses its running episode alone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vla_stack.data.labels import frame_labels, label_columns
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.data.sidecar import EpisodeFacts
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.runtime.frames import Frame
from vla_stack.schema import RobotSpec

Keeping = Literal["episodic", "sentry", "highlight"]
MAX_BYTES = 1 << 30  # of pictures that wait for an event
HARD_LIMITS = ("position", "tool")  # of the safety envelope; those of speed are met in the normal course of things
AUTONOMOUS = {
    "intervention": False,
    "segment_type": int(Segment.AUTONOMOUS),
    "segment_index": 0,
    "control_source": int(Control.POLICY),
}


class RunRecording:
    """Writes episodes, or clips of them, into a LeRobotDataset with the columns of interventions.

    A clip begins ``seconds`` before its event and ends as long after it, or after the last event within it, or with the
    episode. A label of success is the episode's, and only of a clip that lasts to its end.

    Args:
        root: Dataset folder; created, or appended to.
        robot: What is recorded.
        joints: Names of the joints of ``joint_command``, empty where frames have none.
        keeping: ``episodic`` keeps every episode; ``sentry`` a clip at each event; ``highlight`` one at each
            :meth:`keep`.
        seconds: Of a clip, before and after its event.

    Attributes:
        counts: ``episodes`` saved, ``frames`` of these, and ``lost_frames``, for which there was no room in the queue.

    Raises:
        UserError: The dataset cannot be opened, or so many seconds of pictures do not fit into memory.
    """

    def __init__(
        self, root: Path, robot: RobotSpec, joints: Sequence[str], keeping: Keeping = "episodic", seconds: float = 10.0
    ) -> None:
        self.root, self.keeping, self.counts = root, keeping, Counter[str]()
        self._robot = robot
        self._span = max(1, round(seconds * robot.rate_hz))  # frames
        size = self._span * sum(3 * c.height * c.width for c in robot.cameras)
        if keeping != "episodic" and size > MAX_BYTES:
            raise UserError(
                f"{seconds:g} s of these pictures are {size / 2**30:.1f} GiB, of which 1 may wait in memory",
                f"give --last {max(1, int(seconds * MAX_BYTES / size))}, or smaller pictures",
            )
        self._recorder = EpisodeRecorder(root, robot, joints=tuple(joints), extra=label_columns(robot))
        for uid in self._recorder.pending:  # of a console that died
            self._recorder.commit(uid)
        self._waiting: deque[Frame] = deque(maxlen=self._span)
        self._events: deque[str] = deque()
        self._lock = (
            threading.Lock()
        )  # the recorder is used on the frames' thread, and between episodes on the caller's
        self.begin(0)

    def begin(self, seed: int) -> None:
        """A new episode."""
        self._seed = seed
        self._recorder.discard_episode()  # of one that ended in an error
        self._waiting.clear()
        self._events.clear()
        self._why, self._left, self._written = "", 0, 0

    def frame(self, frame: Frame) -> None:
        """Take a control step; on the frames' thread.

        Raises:
            UserError: It cannot be written; the running episode is lost then.
        """
        with self._lock:
            self.counts["lost_frames"] += frame.labels["gap"]
            if self.keeping == "sentry":
                hard = [name for name in frame.labels.get("limits", ()) if name in HARD_LIMITS]
                self._events.extend(f"limit of {name}" for name in hard)
                if frame.labels.get("intervention"):
                    self._events.append("takeover")
            if self.keeping == "episodic":
                self._write(frame)
                return
            self._waiting.append(frame)
            self._take_events()
            if self._left:
                self._flush()
                self._left -= 1
                if not self._left:
                    self._save(success=False)

    def event(self, why: str) -> None:
        """Something happened that ``sentry`` keeps; any thread."""
        if self.keeping == "sentry":
            self._events.append(why)

    def keep(self) -> None:
        """A person wants these seconds, whatever the mode keeps otherwise; any thread."""
        if self.keeping != "episodic":
            self._events.append("kept by hand")

    def end(self, success: bool) -> int:
        """The episode is over, and so are its frames; saves what there is to save, returns how many episodes.

        Raises:
            UserError: It cannot be written.
        """
        with self._lock:
            before = self.counts["episodes"]
            self._take_events()
            if self._left:
                self._flush()
            if self._written:
                self._save(success)
            return self.counts["episodes"] - before

    def close(self) -> None:
        """Save a clip that has begun, forget an episode that has not ended, release the dataset."""
        with self._lock:
            try:
                if self._written and self.keeping != "episodic":
                    self._save(success=False)
            finally:
                self._recorder.close()

    def __enter__(self) -> RunRecording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_events(self) -> None:
        while self._events:
            why = self._events.popleft()
            self._why = self._why or why
            self._left = self._span + 1  # this frame, and the seconds after it

    def _flush(self) -> None:
        while self._waiting:
            self._write(self._waiting.popleft())

    def _write(self, frame: Frame) -> None:
        labels = {**AUTONOMOUS, **frame.labels}
        values = frame_labels(self._robot, labels, frame.obs.t_capture_ns)
        try:
            self._recorder.add_frame(frame.obs, frame.action, frame.joint_command, **values)
        except Exception:
            self._left = self._written = 0  # there is nothing to save any more
            raise
        self._written += 1

    def _save(self, success: bool) -> None:
        facts = EpisodeFacts(self._why or "end_auto_" + ("success" if success else "fail"), "run", seed=self._seed)
        try:
            self._recorder.save_episode(success, facts=facts)
            self.counts += Counter(episodes=1, frames=self._written)
        finally:
            self._why, self._left, self._written = "", 0, 0
