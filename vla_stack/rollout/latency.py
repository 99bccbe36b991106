"""How long a policy takes, as an input of an experiment: a delay, constant or random, counted in control steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_stack.errors import UserError

Jitter = Literal["none", "gamma", "spikes"]
JITTERS = ("none", "gamma", "spikes")
GAMMA_SHAPE = 4.0  # standard deviation of half the mean
SPIKE_S, SPIKE_RATE = 1.0, 0.01


@dataclass(frozen=True)
class Latency:
    """A policy's response time, from request to arrival.

    Attributes:
        mean_s: Mean in seconds, jitter ``spikes`` not counted.
        jitter: ``none``: always the mean. ``gamma``: gamma distributed with a standard deviation of half the mean.
            ``spikes``: the mean, and in 1 of 100 requests a second more.
    """

    mean_s: float = 0.0
    jitter: Jitter = "none"

    def ticks(self, rate_hz: float, seed: Sequence[int] = (0,)) -> int:
        """Control steps that pass before a reply can be used; a started step counts whole.

        Args:
            rate_hz: Control rate.
            seed: Of this one request.
        """
        seconds = self.mean_s
        if self.jitter != "none" and self.mean_s > 0:
            rng = np.random.default_rng(list(seed))
            if self.jitter == "gamma":
                seconds = rng.gamma(GAMMA_SHAPE, self.mean_s / GAMMA_SHAPE)
            elif rng.random() < SPIKE_RATE:
                seconds += SPIKE_S
        return math.ceil(seconds * rate_hz - 1e-9)

    def usual_ticks(self, rate_hz: float) -> int:
        """Control steps of the mean."""
        return math.ceil(self.mean_s * rate_hz - 1e-9)

    def __str__(self) -> str:
        return f"{round(self.mean_s * 1000)} ms" + ("" if self.jitter == "none" else f" {self.jitter}")


def parse_latencies(text: str, rate_hz: float, jitter: Jitter = "none") -> list[Latency]:
    """Latencies of a comma-separated list.

    Args:
        text: For example ``0,100ms,0.3s,2ticks``; a bare number is milliseconds.
        rate_hz: Control rate.
        jitter: Of all of them.

    Raises:
        UserError: An entry is none of these.
    """
    latencies = []
    for entry in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|ticks?|)\s*", entry)
        if found is None:
            raise UserError(f"--latency: '{entry}' is no delay", "write for example 0,100ms,0.3s or 2ticks")
        value, unit = float(found.group(1)), found.group(2)
        seconds = {"ms": 1e-3, "": 1e-3, "s": 1.0}.get(unit, 1.0 / rate_hz)
        latencies.append(Latency(value * seconds, jitter))
    return list(dict.fromkeys(latencies))
