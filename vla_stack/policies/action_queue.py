"""Actions of one chunk, handed out one a call, as LeRobot's ``select_action`` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


class ActionQueue:
    """A queue of normalised actions that stay the same commands while the state they are relative to changes.

    The post-processor adds the state of *this* call to an action that was predicted relative to the state of an
    earlier one. The preprocessor reports the command 0 in normalised coordinates (see ``ActionOriginStep``), so the
    difference of two such origins is exactly what has to be taken off again.
    """

    def __init__(self) -> None:
        self._actions: deque[Tensor] = deque()
        self._origin = torch.empty(0)

    def next(
        self, origin: Float[Tensor, "b a"] | Float[Tensor, ""], refill: Callable[[], Float[Tensor, "b h a"]]
    ) -> Float[Tensor, "b a"]:
        """The next action.

        Args:
            origin: The command 0 in the coordinates of this call; any constant where these never change.
            refill: Called when the queue is empty: the actions to execute before it is called again.
        """
        if not self._actions:
            self._origin = origin
            self._actions.extend(refill().unbind(1))
        return self._actions.popleft() + (origin - self._origin)

    def clear(self) -> None:
        """Forget the queued actions."""
        self._actions.clear()
