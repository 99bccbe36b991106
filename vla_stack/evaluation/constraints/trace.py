"""One episode as constraints see it: arrays over its ticks, whatever they were measured by."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.rollout.plan import Episode, StepEvent

Floats = NDArray[np.float64]
Named = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Trace:
    """Row t is the state after action t.

    Attributes:
        time: Seconds since the start [T].
        points: Name -> position [T, 3], metres, world frame: ``ee``, ``obj.*``, ``goal.*``, ``obstacle.*``.
        held: Name -> whether the gripper holds it, bool [T].
        contact: Whether something forbidden is touched, bool [T].
        ee: Pose of the tool [T, 7]: m, then quaternion w, x, y, z.
        q: Joint angles [T, J], radians.
        joint_range: Their limits [J, 2].
        wrench: Force (N) and torque (N m) on the gripper [T, 6].
        action: Commands [T, A].
    """

    time: Floats
    points: Named
    held: Named
    contact: NDArray[np.bool_]
    ee: Floats
    q: Floats
    joint_range: Floats
    wrench: Floats
    action: Floats

    def __len__(self) -> int:
        return len(self.time)

    @property
    def dt(self) -> float:
        """Control period, seconds."""
        return float(self.time[1] - self.time[0]) if len(self) > 1 else 0.1

    @property
    def collided(self) -> bool:
        """Whether anything forbidden was touched."""
        return bool(self.contact.any())

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Flat, for safetensors: ``points/ee`` and so on."""
        out: dict[str, NDArray[Any]] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            named = value.items() if isinstance(value, dict) else [("", value)]
            out |= {f"{field.name}/{name}".rstrip("/"): np.ascontiguousarray(x) for name, x in named}
        return out

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Trace:
        """Inverse of :meth:`to_arrays`; raises KeyError where an array is missing."""
        named: dict[str, Named] = {"points": {}, "held": {}}
        for key, value in arrays.items():
            kind, slash, name = key.partition("/")
            if slash and kind in named:
                named[kind][name] = value
        rest = [f.name for f in fields(cls) if f.name not in named]
        return cls(**named, **{name: arrays[name] for name in rest})  # type: ignore[arg-type]


class TraceRecorder:
    """Writes down what constraints need of an episode of a task of ``sim``."""

    def __init__(self, episode: Episode) -> None:
        from sim.measurement import Measurement  # on demand: it loads the simulator

        self._task = episode.env.unwrapped
        self._measure = Measurement(self._task)
        self._rows: list[dict[str, Any]] = []

    def step(self, event: StepEvent) -> None:
        m, touched = self._measure, bool(event.after.info.get("cost", 0.0))
        row = {"points": m.points(), "held": m.held(), "contact": touched, "ee": m.pose()}
        action = np.asarray(event.decision.command, np.float64)
        self._rows.append(row | {"q": m.joints(), "wrench": m.wrench(), "action": action})

    def result(self) -> Trace:
        """What happened; there has been a step."""
        rows, task = self._rows, self._task

        def named(key: str) -> Named:
            return {name: np.stack([r[key][name] for r in rows]) for name in rows[0][key]}

        return Trace(
            time=(np.arange(len(rows)) + 1) * task.spec_robot.dt,
            points=named("points"),
            held=named("held"),
            joint_range=self._measure.joint_range(),
            **{key: np.stack([r[key] for r in rows]) for key in ("contact", "ee", "q", "wrench", "action")},
        )
