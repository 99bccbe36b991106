"""The nouns that every room shares: feature keys, units, observations, action chunks, robot descriptions.

This module imports numpy alone, so that a robot computer, a simulator process and a policy server agree on
what travels between them without agreeing on what they have installed. Units are SI (metres, radians, seconds,
newtons); a gripper is an opening ratio in [0, 1], 0 closed, 1 open. Images are uint8, height x width x RGB.
Feature names follow LeRobot, so a dataset written here opens there and the other way round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

OBS_STATE = "observation.state"
OBS_IMAGES = "observation.images"
IMAGE_TOKENS = "observation.image_tokens"  # float [b, n, d], what encoders make of a sample's pictures, in their place
PAST_AGE = "observation.past_age"  # float32 [b, p], control steps since each recalled observation; 0: none
ACTION = "action"
ACTION_IS_PAD = "action_is_pad"  # bool [b, h]: steps past the episode's end
ACTION_DIM_IS_PAD = "action_dim_is_pad"  # bool [b, a]: dimensions that a sample's embodiment does not have
TASK = "task"
REWARD = "next.reward"
DONE = "next.done"
SUCCESS = "next.success"
# Per-frame columns that LeRobot's own loaders carry through untouched. They are recorded beside the action because
# an asynchronous chunk is re-anchored from absolute commands, and because a policy in joint space needs its labels.
CAPTURE_TIME = "capture_time"  # float64 [1], seconds on the robot's monotonic clock, relative to the episode's start
JOINT_COMMAND = "command.joints"  # float32 [J], joint targets that realised the action, radians

Unit = Literal["m", "rad", "ratio", "m/s", "rad/s", "N", "Nm", "1"]


class SchemaError(ValueError):
    """Data that does not have the shape, type, unit or range that its description promises."""


U1, F4 = np.dtype(np.uint8), np.dtype(np.float32)  # comparing with a class costs several times as much


def finite(array: NDArray[Any]) -> bool:
    """Whether an array has neither NaN nor infinity; for small arrays twice as fast as ``np.isfinite(a).all()``."""
    return 0 not in np.isfinite(array).tobytes()


def image_key(camera: str) -> str:
    """Dataset feature key of a camera, e.g. ``observation.images.front``.

    A camera whose key is another one, as LeRobot's ``observation.image``, goes by that key.
    """
    return camera if camera.startswith("observation.") else f"{OBS_IMAGES}.{camera}"


def camera_name(key: str) -> str:
    """Inverse of :func:`image_key`."""
    return key.removeprefix(f"{OBS_IMAGES}.")


def past_key(image: str) -> str:
    """Key of a camera's earlier pictures [b, p, ...] in a training batch, from that of the present one."""
    return f"observation.past.{camera_name(image)}"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a state or action vector.

    Attributes:
        name: LeRobot feature name, e.g. ``tcp_x.pos``.
        unit: SI unit of the value.
        low: Smallest legal value, in ``unit``.
        high: Largest legal value, in ``unit``.
        max_rate: Largest legal change per second, in ``unit``/s; infinity where the hardware sets no bound.
        kind: How values are merged: ``position`` blends linearly, ``angle`` along the shorter arc, ``gripper`` never.
    """

    name: str
    unit: Unit
    low: float = -np.inf
    high: float = np.inf
    max_rate: float = np.inf
    kind: Literal["position", "angle", "gripper"] = "position"


# JSON has no infinity: a bound that is absent or null is the default, no bound at all.
VELOCITIES, FORCES = ("m/s", "rad/s"), ("N", "Nm")  # units
_BOUNDS = {"low": -np.inf, "high": np.inf, "max_rate": np.inf}


def _dim(d: dict[str, Any]) -> Dim:
    bounds = {k: default if d.get(k) is None else float(d[k]) for k, default in _BOUNDS.items()}
    if set(d) - {"name", "unit", "kind", *_BOUNDS}:
        raise ValueError(f"unknown keys {sorted(set(d) - {'name', 'unit', 'kind', *_BOUNDS})}")
    name, unit, kind = d["name"], d["unit"], d.get("kind", "position")
    if not isinstance(name, str) or unit not in get_args(Unit) or kind not in ("position", "angle", "gripper"):
        raise ValueError(f"dimension {name!r}, unit {unit!r}, kind {kind!r}")
    return Dim(name, unit, **bounds, kind=kind)


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera as a policy sees it. ``height`` and ``width`` in pixels."""

    name: str
    height: int
    width: int


FILTERS = ("linear", "area")


@dataclass(frozen=True, slots=True)
class Reading:
    """The picture that a policy reads of a camera, where it is not the camera's: ``vla_stack.images.as_read`` makes it.

    ``height`` and ``width`` in pixels; ``filter`` is ``linear`` (bilinear) or ``area`` (averages, black bars).
    """

    height: int
    width: int
    filter: str


@dataclass(frozen=True)
class RobotSpec:
    """What a robot (real, simulated or imagined) measures and accepts.

    The first ``len(action)`` entries of ``state`` measure what ``action`` commands, in the same order and unit, so
    that ``action - state`` is a meaningful relative action.

    Attributes:
        name: Embodiment, e.g. ``native/arm7``.
        state: Meaning of each entry of ``observation.state``.
        action: Meaning of each entry of ``action``.
        cameras: Cameras, in the order in which policies consume them.
        rate_hz: Control rate: one action per control step.
        action_kind: ``absolute`` targets hold when repeated; ``delta`` actions hold at zero.
    """

    name: str
    state: tuple[Dim, ...]
    action: tuple[Dim, ...]
    cameras: tuple[Camera, ...]
    rate_hz: float
    action_kind: Literal["absolute", "delta"] = "absolute"

    @property
    def dt(self) -> float:
        """Control period in seconds."""
        return 1.0 / self.rate_hz

    @property
    def action_low(self) -> NDArray[np.float32]:
        return np.array([d.low for d in self.action], np.float32)

    @property
    def action_high(self) -> NDArray[np.float32]:
        return np.array([d.high for d in self.action], np.float32)

    @property
    def gripper_mask(self) -> NDArray[np.bool_]:
        """Bool [A]: dimensions that are switched, never blended."""
        return np.array([d.kind == "gripper" for d in self.action], bool)

    @property
    def rate_mask(self) -> NDArray[np.bool_]:
        """Bool [A]: commands that are no places and stand still at zero, while the last one would move the robot for
        ever: every velocity, and every force but that of a gripper, which grips."""
        return np.array([d.unit in VELOCITIES or (d.unit in FORCES and d.kind != "gripper") for d in self.action], bool)

    def standstill(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """The command [A] that keeps the robot where ``state`` [S] measures it.

        The gripper of a delta robot holds what is measured where it is commanded in that unit, else mid-range.
        """
        held = np.array(state[: len(self.action)], np.float32)
        if self.action_kind == "delta":
            same = np.array([a.unit == s.unit for a, s in zip(self.action, self.state, strict=False)])
            held[~(self.gripper_mask & same)] = 0.0
        held[self.rate_mask] = 0.0
        return np.clip(held, self.action_low, self.action_high)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, as it stands in a dataset, a checkpoint and a HELLO message; no bound is ``null``."""
        d = json.loads(json.dumps(asdict(self)))
        for dim in (*d["state"], *d["action"]):
            for bound in _BOUNDS:
                if not np.isfinite(dim[bound]):
                    dim[bound] = None
        return d

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> RobotSpec:
        """Inverse of :meth:`to_json`.

        Raises:
            SchemaError: A key is missing or has the wrong type.
        """
        try:
            spec = cls(
                name=str(d["name"]),
                state=tuple(_dim(x) for x in d["state"]),
                action=tuple(_dim(x) for x in d["action"]),
                cameras=tuple(Camera(str(x["name"]), int(x["height"]), int(x["width"])) for x in d["cameras"]),
                rate_hz=float(d["rate_hz"]),
                action_kind=d.get("action_kind", "absolute"),
            )
            if not 0.0 < spec.rate_hz < 1e5 or spec.action_kind not in ("absolute", "delta"):
                raise ValueError(f"rate_hz={spec.rate_hz}, action_kind={spec.action_kind!r}")
            return spec
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise SchemaError(f"robot description is malformed: {e!r}") from e

    def fingerprint(self) -> str:
        """Short hash of everything that must match between a policy and a robot: names, units, order, rate."""
        key = {
            "state": [(d.name, d.unit) for d in self.state],
            "action": [(d.name, d.unit, d.kind) for d in self.action],
            "cameras": [(c.name, c.height, c.width) for c in self.cameras],
            "rate_hz": float(self.rate_hz),  # 20 and 20.0 are one rate
            "action_kind": self.action_kind,
        }
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a robot knew at the start of one control step.

    Attributes:
        state: float32 [S], SI units, in the order of ``RobotSpec.state``.
        images: camera name -> uint8 [H, W, 3] RGB.
        task: Language instruction.
        step: Control step (tick) at whose start this was captured.
        t_capture_ns: ``time.monotonic_ns()`` of the robot at capture (virtual time in simulation).
        image_t_ns: camera name -> the same of its picture; a camera that is absent has ``t_capture_ns``.
        past: Earlier observations of the episode, the first one first, for a policy with a history. They stay with
            whoever asks the policy and never travel with a request (:mod:`vla_stack.history`).
    """

    state: NDArray[np.float32]
    images: dict[str, NDArray[np.uint8]]
    task: str
    step: int = 0
    t_capture_ns: int = 0
    image_t_ns: dict[str, int] = field(default_factory=dict)
    past: tuple[Observation, ...] = ()

    def expecting(self, state: NDArray[np.float32] | None) -> Observation:
        """The same with other first entries of the state, float32 [A]; itself where there are none."""
        return self if state is None else replace(self, state=np.concatenate([state, self.state[len(state) :]]))

    def check(self, spec: RobotSpec, reads: Mapping[str, Reading] = {}) -> None:
        """Raise :class:`SchemaError` naming the first field that does not match ``spec``; pictures may also have been
        made what a policy ``reads`` of them.
        """
        if self.state.dtype != F4 or self.state.shape != (len(spec.state),):
            raise SchemaError(
                f"state is {self.state.dtype}{list(self.state.shape)}, {spec.name} measures float32[{len(spec.state)}]"
            )
        if not finite(self.state):
            bad = [spec.state[i].name for i in np.flatnonzero(~np.isfinite(self.state))]
            raise SchemaError(f"state is not finite in {', '.join(bad)}")
        for cam in spec.cameras:
            image = self.images.get(cam.name)
            if image is None:
                raise SchemaError(f"camera '{cam.name}' is missing; the observation has {sorted(self.images)}")
            if image.dtype != U1 or image.shape not in picture_shapes(cam, reads):
                raise SchemaError(
                    f"camera '{cam.name}' is {image.dtype}{list(image.shape)}, "
                    f"expected uint8[{cam.height}, {cam.width}, 3]"
                )


def picture_shapes(camera: Camera, reads: Mapping[str, Reading]) -> list[tuple[int, int, int]]:
    """Shapes that a camera's picture may have: the camera's own, and that of what a policy reads of it."""
    made = [(r.height, r.width, 3)] if (r := reads.get(camera.name)) else []
    return [(camera.height, camera.width, 3), *made]


CONTINUE = ("rtc", "rtc_identity", "bid", "prefix")


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a robot is doing while it asks: the plan that a new chunk should continue.

    Attributes:
        mode: How: ``rtc``, ``rtc_identity``, ``bid`` or ``prefix``, see ``vla_stack.policies.continuation``.
        actions: float32 [L, A], 1 <= L <= H; commands as planned so far, ``actions[i]`` due at the new chunk's step i.
        delay: How many of them will probably be over before the new chunk takes over, 0 to L.
        execute: Control steps from one chunk's origin to the next one's.
    """

    mode: str
    actions: NDArray[np.float32]
    delay: int
    execute: int


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """Consecutive actions with the control step at which each one is due.

    ``actions[i]`` belongs to control step ``origin + i``. Actions are commands (unnormalised, SI units, absolute where
    the robot's ``action_kind`` is absolute), so a chunk means the same to every consumer.

    Attributes:
        actions: float32 [H, A].
        origin: Control step of ``actions[0]``.
        k_obs: Control step of the observation that the chunk was computed from (equals ``origin`` except in
            future-state execution).
        rid: Request id; a reply is accepted once.
        epoch: Counts resets (episodes); a chunk of an older epoch is never executed.
        session: Session id of the client the chunk is for.
        d_cond: Delay in ticks that the policy was conditioned on, 0 if none.
        model_version: Hash of the weights that produced the chunk.
        execute: Actions that the policy wants executed before it is asked again, 1 to H; 0 where it has no opinion.
    """

    actions: NDArray[np.float32]
    origin: int
    k_obs: int
    rid: int = 0
    epoch: int = 0
    session: str = ""
    d_cond: int = 0
    model_version: str = ""
    execute: int = 0

    @property
    def horizon(self) -> int:
        return int(self.actions.shape[0])

    @property
    def end(self) -> int:
        """First control step that the chunk no longer covers."""
        return self.origin + self.horizon


@dataclass(frozen=True, slots=True)
class Chunks:
    """A policy's answer to a batch of observations.

    Attributes:
        actions: float32 [B, H, A], commands.
        execute: For each chunk, actions to execute before the policy is asked again, 1 to H; None: as configured.
    """

    actions: NDArray[np.float32]
    execute: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.actions)

    def row(self, i: int) -> tuple[NDArray[np.float32], int]:
        """Chunk ``i`` and its ``execute``, 0 where there is none, as :class:`ActionChunk` has them."""
        return self.actions[i], self.execute[i] if self.execute else 0

    def first(self, n: int) -> Chunks:
        """The first ``n`` chunks."""
        return Chunks(self.actions[:n], self.execute[:n] if self.execute else None)

    @classmethod
    def gathered(cls, parts: Sequence[Chunks], rows: Sequence[Sequence[int]]) -> Chunks:
        """One answer from several, whose chunks are the given rows of it."""
        order = np.argsort([i for part in rows for i in part])
        execute = [part.row(i)[1] for part in parts for i in range(len(part))]
        actions = np.concatenate([part.actions for part in parts])[order]
        return cls(actions, tuple(execute[i] for i in order) if any(execute) else None)


@dataclass(frozen=True)
class PolicySpec:
    """What a policy consumes and produces; the server's half of the HELLO negotiation.

    Attributes:
        robot: The embodiment that the policy was trained for.
        horizon: Actions per chunk, H.
        normalisation: Hash of the normalisation statistics; chunks of different hashes are never mixed.
        model_version: Hash of the weights.
        d_train_max: Largest delay (ticks) that training conditioned on; 0 if the policy takes no action prefix.
        history: Least ages (ticks) of the earlier observations that the policy is shown, 0 for the episode's first
            (:mod:`vla_stack.history`); empty: the present is all that it sees.
        reads: Camera name -> what the policy reads of its pictures, where that is not the camera's picture. Whoever
            has the camera may make it so before a picture travels.
    """

    robot: RobotSpec
    horizon: int
    normalisation: str = ""
    model_version: str = ""
    d_train_max: int = 0
    history: tuple[int, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)
    reads: Mapping[str, Reading] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "robot": self.robot.to_json(),
            "horizon": self.horizon,
            "normalisation": self.normalisation,
            "model_version": self.model_version,
            "d_train_max": self.d_train_max,
            "history": list(self.history),
            "extras": self.extras,
            "reads": {name: [r.height, r.width, r.filter] for name, r in self.reads.items()},
        }

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> PolicySpec:
        """Inverse of :meth:`to_json`; raises :class:`SchemaError` on missing keys."""
        try:
            return cls(
                robot=RobotSpec.from_json(d["robot"]),
                horizon=int(d["horizon"]),
                normalisation=str(d["normalisation"]),
                model_version=str(d["model_version"]),
                d_train_max=int(d.get("d_train_max", 0)),
                history=tuple(int(age) for age in d.get("history", ())),
                extras=dict(d.get("extras", {})),
                reads=_readings(d.get("reads", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise SchemaError(f"policy description is malformed: {e!r}") from e


def _readings(d: dict[str, Any]) -> dict[str, Reading]:
    """What is known how to make; a later version's filters are left out, and cameras' own pictures are sent."""
    found = {str(name): Reading(int(h), int(w), str(how)) for name, (h, w, how) in d.items()}
    if any(not (0 < r.height < 1 << 14 and 0 < r.width < 1 << 14) for r in found.values()):
        raise ValueError("size of a picture")
    return {name: r for name, r in found.items() if r.filter in FILTERS}
