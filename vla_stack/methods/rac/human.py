"""What a person adds to an intention: reaction time, misses, false alarms, a trembling hand, a slow link.

Every draw comes from a generator of (seed, episode, channel), so one channel's luck never shifts another's, and the
same seed gives byte-identical logs.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class HumanConfig:
    """The human model; times in seconds.

    Attributes:
        reaction: Median of the log-normal reaction time,
        reaction_spread: its sigma,
        reaction_range: and its bounds.
        miss: Probability that a failure goes unnoticed.
        false_alarms: Takeovers a minute without a reason.
        hand: Standard deviation of the hand, m, m, m, rad (an Ornstein-Uhlenbeck process).
        hand_time: Its correlation time.
        lag: Time constant with which the hand follows the intention.
        link: Least and largest delay of a command.
        link_jitter: Mean of the delay's exponential part.
        loss: Share of commands that never arrive.
    """

    reaction: float = 0.5
    reaction_spread: float = 0.35
    reaction_range: tuple[float, float] = (0.2, 2.0)
    miss: float = 0.05
    false_alarms: float = 0.5
    hand: tuple[float, float, float, float] = (0.003, 0.003, 0.003, np.radians(2.0))
    hand_time: float = 0.5
    lag: float = 0.15
    link: tuple[float, float] = (0.02, 0.2)
    link_jitter: float = 0.04
    loss: float = 0.01


class Human:
    """One person in one episode.

    Args:
        config: The model.
        dt: Control period, seconds.
        seed: Seed of the experiment.
        episode: Number of the episode.
    """

    def __init__(self, config: HumanConfig, dt: float, seed: int, episode: int) -> None:
        def stream(channel: str) -> np.random.Generator:
            return np.random.default_rng((seed, episode, zlib.crc32(channel.encode())))

        self._config, self._dt = config, dt
        self._reaction, self._miss, self._alarm = stream("reaction"), stream("miss"), stream("alarm")
        self._hand, self._link, self.choices = stream("hand"), stream("link"), stream("choices")
        self._offset = np.zeros(4)
        self._held: NDArray[np.float64] | None = None
        self._sent: deque[tuple[float, NDArray[np.float64]]] = deque()
        self._arrived: NDArray[np.float64] | None = None

    def reaction_ticks(self) -> int:
        """Ticks from seeing to acting, at least 1."""
        c = self._config
        seconds = np.clip(c.reaction * np.exp(c.reaction_spread * self._reaction.normal()), *c.reaction_range)
        return max(1, round(float(seconds) / self._dt))

    def misses(self) -> bool:
        """Whether a failure that has just begun goes unnoticed."""
        return bool(self._miss.random() < self._config.miss)

    def false_alarm(self) -> bool:
        """Whether the person takes over at this tick without a reason."""
        return bool(self._alarm.random() < self._config.false_alarms / 60 * self._dt)

    def engage(self, command: NDArray[np.float64]) -> None:
        """Take hold: the hand starts where the robot is commanded to be, float [5]."""
        self._held = self._arrived = np.array(command, np.float64)
        self._sent.clear()
        self._offset = np.zeros(4)

    def move(self, intention: NDArray[np.float64], tick: int) -> NDArray[np.float64]:
        """The command that reaches the robot at this tick for what the person wants now.

        Args:
            intention: Tool target float [5]: m, m, m, rad, opening ratio.
            tick: Control tick; call once for each.
        """
        c, dt = self._config, self._dt
        assert self._held is not None and self._arrived is not None
        decay = np.exp(-dt / c.hand_time)
        self._offset = decay * self._offset + np.sqrt(1 - decay**2) * np.array(c.hand) * self._hand.normal(size=4)
        follow = 1 - np.exp(-dt / c.lag)
        self._held = self._held + np.append(np.full(4, follow), 1.0) * (intention - self._held)
        command = self._held + np.append(self._offset, 0.0)
        delay = min(c.link[0] + self._link.exponential(c.link_jitter), c.link[1])
        if self._link.random() >= c.loss:
            self._sent.append((tick * dt + delay, command))
        while self._sent and self._sent[0][0] <= (tick + 1) * dt:
            self._arrived = self._sent.popleft()[1]
        return self._arrived
