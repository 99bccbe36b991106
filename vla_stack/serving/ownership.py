"""Which of two threads has the network: the one that computes while it is idle, the other while it computes."""

from __future__ import annotations

import threading
import time

SHORT_NS = 2_000_000  # waking another thread is not worth it for less
PATIENCE_S = 0.02  # how late a computation that is longer than usual is noticed


class SocketOwnership:
    """The right to use the server's sockets, which passes between the inference thread and a standby thread.

    An idle inference thread holds it: it receives a request, computes and replies by itself, and no thread has to be
    woken in between, which costs more than all the rest of a round trip. While it computes, the standby thread takes
    over: at once where computing usually takes longer than ``SHORT_NS``, otherwise when it has taken ``PATIENCE_S``.

    The inference thread begins without it, computing (it loads the policy).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._wanted.set()
        self._begun_ns = time.monotonic_ns()
        self._usual_ns = 0.0
        self.computing = True

    # -- inference thread ----------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Let go of the network and start computing."""
        self._begun_ns, self.computing = time.monotonic_ns(), True
        self._lock.release()
        if self._usual_ns > SHORT_NS:
            self._wanted.set()

    def computed(self) -> bool:
        """Computing has ended; whether the network is this thread's again, which it is unless the standby has it."""
        self._usual_ns += 0.2 * (time.monotonic_ns() - self._begun_ns - self._usual_ns)
        if self._wanted.is_set():
            self._wanted.clear()
        self.computing = False
        return self._lock.acquire(blocking=False)

    # -- standby thread ------------------------------------------------------------------------------------------

    def stand_by(self) -> bool:
        """Wait a little; whether the network fell to this thread, which then attends to it while :attr:`computing`."""
        if not self._wanted.wait(PATIENCE_S):
            overdue = time.monotonic_ns() - self._begun_ns > SHORT_NS
            if not (self.computing and overdue):
                return False
        return self._lock.acquire(blocking=False)

    # -- either thread -------------------------------------------------------------------------------------------

    def take(self, timeout: float = -1) -> bool:
        """Wait for the network, at most ``timeout`` seconds; whether it is this thread's now."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Let go of the network."""
        self._lock.release()
