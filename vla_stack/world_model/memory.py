"""Which frames a model remembers: the first one, and the last ones at the distance of a chunk.

Training clips and rollouts take their history by the same function, so that what is rolled out is what was trained.
"""

from __future__ import annotations

from collections.abc import Sequence


def history_chunks(n: int, history: int) -> list[int]:
    """Chunk ends that are remembered when chunk ``n`` is imagined, oldest first; 0 is the first frame.

    The current frame is the end of chunk n - 1, i.e. index n. Before there are as many, the first frame stands in.

    Args:
        n: Chunks imagined so far.
        history: Frames that are remembered, K.
    """
    recent = [max(0, n - m) for m in range(history - 1, 0, -1)]
    return [0, *recent][:history]


class Memory[T]:
    """Ends of the chunks of one rollout: latents and poses, whatever ``T`` is. Nothing is ever re-encoded.

    Args:
        first: Of the first frame.
        history: Frames that are remembered, K.
    """

    def __init__(self, first: T, history: int) -> None:
        self._ends: list[T] = [first]
        self._history = history

    def push(self, end: T) -> None:
        """A chunk is over; ``end`` is its last frame."""
        self._ends.append(end)

    def copy(self) -> Memory[T]:
        """A memory of the same, that goes its own way from here."""
        other = Memory(self._ends[0], self._history)
        other._ends = list(self._ends)
        return other

    @property
    def chunks(self) -> int:
        """Chunks so far."""
        return len(self._ends) - 1

    @property
    def current(self) -> T:
        """The newest frame: frame 0 of the next chunk."""
        return self._ends[-1]

    def history(self) -> Sequence[T]:
        """The K remembered frames, oldest first."""
        return [self._ends[i] for i in history_chunks(self.chunks, self._history)]
