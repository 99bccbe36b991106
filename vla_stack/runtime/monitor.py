"""Will this episode fail? Scores of a policy's own decisions against those of its successes; numpy alone.

Five scores, each larger where things go wrong:

    disagreement  How far a new chunk lies from the previous one where both plan the same control steps, in units of a
                  usual step of the command (in the manner of Agia et al. 2024, arXiv:2410.04640, with one sample).
    strange       Distance of state and planned command from those of successful episodes, mean of nearest neighbours.
    stall         Seconds since progress. Progress is a lower estimate of the time that is left: of the nearest
                  decisions of successful episodes, how long these still took.
    late          Seconds since the policy began: a clock.
    features      Distance of the policy's features from those of successful episodes. Known where the policy runs
                  (``vla eval``); on the robot the others are used, with a threshold of their own.

Thresholds follow FAIL-Detect (Xu et al. 2025, arXiv:2503.08558): a band over time (of times: one limit), and how
far a success leaves it, by cross-conformal prediction (Vovk 2015, Ann. Math. Artif. Intell. 74:9): each success is
judged by what the others make, so that a further one of the same kind raises an alarm with a probability of about
``alpha``. Each score has a limit of its own, all at one rank among the successes. Nothing is learnt from failures.
``evaluation/monitoring.py`` fits one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_stack.errors import UserError
from vla_stack.schema import ActionChunk, Observation, RobotSpec

FORMAT = "vla-monitor-2"
SCORES = ("disagreement", "strange", "stall", "late", "features")
STALL, LATE = SCORES.index("stall"), SCORES.index("late")
ON_ROBOT = 4  # of the scores, the first ones: they need neither the policy nor its features
NEIGHBOURS = 5
KEPT = 256  # observations that may be answered by a chunk
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Decided:
    """One decision of a policy.

    Attributes:
        step: Control step of the observation, from the episode's start.
        state: float [S] as observed.
        actions: float [H, A], the chunk; ``actions[i]`` is due at ``origin + i``.
        origin: Control step of ``actions[0]``.
        features: float [d] of the policy; None where they are not known.
        used: First control step that executed an action of it; ``step`` where nobody says.
    """

    step: int
    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    origin: int
    features: NDArray[np.float32] | None = None
    used: int = -1

    @property
    def point(self) -> Numbers:
        """State and last planned command [S + A]."""
        return np.concatenate([self.state, self.actions[-1]]).astype(np.float64)


@dataclass(frozen=True)
class Bank:
    """Points of successful episodes, in units of ``scale``.

    Attributes:
        points: [n, D].
        mean, axes: [F] and [F, D]: a raw vector x is the point ``(x - mean) @ axes``.
    """

    points: Numbers
    mean: Numbers
    axes: Numbers

    def near(self, x: ArrayLike, without: NDArray[np.bool_] | None = None) -> tuple[float, NDArray[np.intp]]:
        """Mean distance to the nearest points, and which they are; points in ``without`` do not count."""
        square = ((self.points - (np.asarray(x, np.float64) - self.mean) @ self.axes) ** 2).sum(1)
        if without is not None:
            square = np.where(without, np.inf, square)
        nearest = np.argpartition(square, NEIGHBOURS)[:NEIGHBOURS]
        return float(np.sqrt(square[nearest]).mean()), nearest


@dataclass(frozen=True)
class Monitor:
    """What is needed to watch a policy, as it stands in a file.

    Attributes:
        policy: Hash of the weights that it was fitted to.
        dt: Seconds a control step.
        step: [A] usual change of a command from one control step to the next, per dimension.
        familiar: Decisions of successful episodes.
        left_s: [n] how long each of these episodes still took, seconds.
        features: The same decisions' features; None where the policy has none.
        bin_s: Width of the band's bins, seconds.
        centre, width: [J, B] of each score over time; the last bin goes on for ever.
        thresholds: Largest excess ``(score - centre) / width`` of each score that is no alarm: [4] where those that are
            known on the robot are used, and [J] where all are.
        alpha: Nominal rate of false alarms.
        about: Where it comes from; plain values.
    """

    policy: str
    dt: float
    step: Numbers
    familiar: Bank
    left_s: Numbers
    features: Bank | None
    bin_s: float
    centre: Numbers
    width: Numbers
    thresholds: tuple[Numbers, Numbers]
    alpha: float
    about: dict[str, Any] = field(default_factory=dict)

    def excess(self, scores: Numbers, step: int) -> Numbers:
        """Of scores [j] at a control step, how far above the band's centre, in its widths [j]."""
        b = min(int(step * self.dt / self.bin_s), self.centre.shape[1] - 1)
        j = len(scores)
        return (scores - self.centre[:j, b]) / self.width[:j, b]

    def check(self, model_version: str, robot: RobotSpec) -> None:
        """Raise :class:`UserError` where it was fitted to another policy, robot or rate."""
        if self.policy != model_version:
            what = f"policy {self.policy[:12]}, not to {model_version[:12] or 'one without a version'}"
        elif len(self.familiar.mean) != len(robot.state) + len(robot.action) or not np.isclose(self.dt, robot.dt):
            what = f"a robot with other dimensions or another rate than {robot.name}"
        else:
            return
        raise UserError(f"the monitor was fitted to {what}", "fit it anew with `vla monitor fit`")

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        plain = {"format": FORMAT, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(path.suffix + ".tmp")
        partial.write_text(json.dumps(plain, default=_rounded) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Monitor:
        """Read a file that :meth:`save` wrote.

        Raises:
            UserError: It is missing, or none.
        """
        try:
            d = json.loads(path.read_text())
            if d.pop("format") != FORMAT:
                raise ValueError("another format")
            for name in ("step", "left_s", "centre", "width"):
                d[name] = np.array(d[name], np.float64)
            for name in ("familiar", "features"):
                d[name] = d[name] and Bank(**{k: np.array(v, np.float64) for k, v in d[name].items()})
            on_robot, of_all = (np.array(limits, np.float64) for limits in d["thresholds"])
            d["thresholds"] = on_robot, of_all
            found = cls(**d)
            found._check()
            return found
        except OSError as e:
            raise UserError(f"{path}: cannot be read ({e.strerror})", "make one with `vla monitor fit`") from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path}: not a monitor ({e})", "make one with `vla monitor fit`") from e

    def _check(self) -> None:
        """Raises ValueError where arrays do not fit each other or are not finite."""
        j, b = self.centre.shape
        n, _ = self.familiar.points.shape
        banks = [self.familiar] + ([self.features] if self.features else [])
        if self.width.shape != (j, b) or self.left_s.shape != (n,) or j != ON_ROBOT + (self.features is not None):
            raise ValueError("its arrays do not fit each other")
        if [len(limits) for limits in self.thresholds] != [ON_ROBOT, j]:
            raise ValueError("its limits do not fit its scores")
        if min(self.dt, self.bin_s, self.width.min(), self.step.min()) <= 0:
            raise ValueError("a time or a width is not above 0")
        numbers = np.array([self.dt, self.bin_s, *np.concatenate(self.thresholds)])
        for array in (numbers, self.step, self.centre, self.width, self.left_s, *(bank.points for bank in banks)):
            if not np.isfinite(array).all():
                raise ValueError("a number is not finite")
        for bank in banks:
            if bank.axes.shape != (len(bank.mean), bank.points.shape[1]) or len(bank.points) <= NEIGHBOURS:
                raise ValueError("its points do not fit their axes, or are too few")


class Scorer:
    """Scores of one episode's decisions, one after the other.

    Args:
        dt: Seconds a control step.
        step: [A], see :class:`Monitor`.
        familiar, left_s, features: See there.
    """

    def __init__(self, dt: float, step: Numbers, familiar: Bank, left_s: Numbers, features: Bank | None) -> None:
        self._dt, self._step, self._familiar, self._left_s, self._features = dt, step, familiar, left_s, features
        self.begin()

    def begin(self, without: NDArray[np.bool_] | None = None, step: int = 0) -> None:
        """An episode that the policy begins at a step; points ``without`` are its own, where the banks have it."""
        self._without, self._begun = without, step
        self._before: Decided | None = None
        self._least, self._since = np.inf, step  # time left, and the step at which it last became less

    def scores(self, now: Decided) -> Numbers:
        """Of the next decision: [4], or [5] where its features are known; see :data:`SCORES`."""
        strange, nearest = self._familiar.near(now.point, self._without)
        left = float(self._left_s[nearest].mean())
        if left < self._least - self._dt:
            self._least, self._since = left, now.step
        stall, late = (now.step - self._since) * self._dt, (now.step - self._begun) * self._dt
        found = [self._disagreement(now), strange, stall, late]
        if self._features is not None and now.features is not None:
            found.append(self._features.near(now.features, self._without)[0])
        self._before = now
        return np.array(found)

    def _disagreement(self, now: Decided) -> float:
        if self._before is None:
            return 0.0
        late = now.origin - self._before.origin
        old, new = self._before.actions[late:] if late >= 0 else now.actions[:0], now.actions
        n = min(len(old), len(new))
        return float(np.sqrt((((new[:n] - old[:n]) / self._step) ** 2).mean())) if n else 0.0


class Watch:
    """A monitor at work on one policy's episodes, as they happen.

    An alarm is given once when a score leaves its band, and again only after all have been inside. Where the policy
    goes on after somebody else has acted, time begins anew.

    Args:
        monitor: See there.

    Attributes:
        excess: The largest excess of the last decision over its threshold's share: above 1 is outside.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = m = monitor
        self._scorer = Scorer(m.dt, m.step, m.familiar, m.left_s, m.features)
        self.begin()

    def begin(self) -> None:
        """A new episode."""
        self._seen: dict[int, Observation] = {}
        self._epoch: int | None = None
        self.resume(0)

    def resume(self, step: int) -> None:
        """The policy begins, or goes on, at a control step."""
        self._scorer.begin(step=step)
        self._begun, self._outside, self.excess = step, False, 0.0

    def decided(self, now: Decided) -> str:
        """Take a decision; why help is needed, empty where it is not."""
        m = self._monitor
        excess = m.excess(self._scorer.scores(now), now.step - self._begun) / m.thresholds[now.features is not None]
        self.excess, worst = float(excess.max()), int(excess.argmax())
        before, self._outside = self._outside, self.excess > 1.0
        if before or not self._outside:
            return ""
        return f"the monitor asks for help: {SCORES[worst]} {self.excess:.1f} times its limit"

    def observation(self, obs: Observation) -> None:
        """Keep what a chunk may answer."""
        if len(self._seen) >= KEPT:
            self._seen.pop(next(iter(self._seen)))
        self._seen[obs.step] = obs

    def chunk(self, chunk: ActionChunk) -> str:
        """As :meth:`decided`, of a chunk that answers an observation; nothing where that is not known any more.

        A chunk of another epoch than those before is the first one after somebody else has acted.
        """
        if (obs := self._seen.pop(chunk.k_obs, None)) is None:
            return ""
        if chunk.epoch != self._epoch:
            if self._epoch is not None:
                self.resume(obs.step)
            self._epoch = chunk.epoch
        return self.decided(Decided(obs.step, obs.state, chunk.actions, chunk.origin))


def _rounded(array: Any) -> list[Any]:
    """An array as JSON; six digits are more than any score needs."""
    return [_rounded(row) for row in array] if array.ndim > 1 else [float(f"{x:.6g}") for x in array]
