"""A simulated operator of the emulated arm: looks on, takes over where the policy takes too long, and does the task."""

from __future__ import annotations

import threading
import time
from typing import Any

from robot_drivers.so101_emulator import Emulator
from vla_stack.runtime.operator_client import OperatorClient

ASK_S, LOOK_MS = 0.5, 10  # between two times that the same is asked for; of a wait for news


class Helper(threading.Thread):
    """Holds the dead-man and says where the arm is to go, on a thread of its own; a context manager.

    Args:
        endpoint: The node's.
        arm: Whose expert is asked for each command; on the caller's thread.
        patience: Control steps of an episode after which it takes over.
    """

    def __init__(self, endpoint: str, arm: Emulator, patience: int) -> None:
        super().__init__(name="operator")
        self._client = OperatorClient(endpoint, pictures=False)
        self._arm, self._patience = arm, patience
        self._target: list[float] | None = None
        self.since: int | None = None  # step at which the policy began
        self._begun_ns = 0
        self._asked: dict[str, float] = {}
        self._over = threading.Event()

    def __enter__(self) -> Helper:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self._client.close()

    def begin(self) -> None:
        """A new episode, which the policy may try first."""
        self.since = self._target = None
        self._begun_ns = time.monotonic_ns()

    def see(self, step: int) -> None:
        """A control step has passed."""
        if self.since is not None and step - self.since >= self._patience:
            self._target = self._arm.advice()

    def run(self) -> None:
        c = self._client
        while not self._over.is_set():
            state: dict[str, Any] = c.state if c.state.get("t_ns", 0) > self._begun_ns else {}  # of this episode
            target, phase = self._target, state.get("phase")
            if phase == "auto" and self.since is None:
                self.since = state["tick"]
            # To take the arm, the hand has to be seen open first, and again where it came too late.
            opens = phase == "auto" or (phase == "hold" and state["tick"] // 3 % 2 == 0)
            c.teleop(target=target, engaged=target is not None and not opens)
            c.poll(LOOK_MS)
            if not c.holds_lease:
                self._ask("acquire")
            elif phase == "reset":
                self._ask("start")
            elif phase == "auto" and target is not None:
                self._ask("takeover")
            c.replies.clear()

    def _ask(self, name: str) -> None:
        if time.monotonic() > self._asked.get(name, 0.0) + ASK_S:
            self._client.event(name)
            self._asked[name] = time.monotonic()
