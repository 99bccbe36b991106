"""The schema's nouns as wire messages and back, and what HELLO compares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import (
    ACTION,
    F4,
    OBS_STATE,
    ActionChunk,
    Continuation,
    Dim,
    Observation,
    PolicySpec,
    Reading,
    RobotSpec,
    SchemaError,
    finite,
    image_key,
    picture_shapes,
)
from vla_stack.serving import jpeg
from vla_stack.serving.pixels import PixelRing
from vla_stack.serving.wire import Code, Jpeg, Kind, Message, WireError

ROBOT = "robot"
POLICY = "policy"
PLAN = "plan"
MAX_JSON_BYTES = 256 << 10
OVERWRITTEN = "the pictures are no longer in shared memory"


def hello(robot: RobotSpec | None, epoch: int, previous_sid: str = "", ring: str | None = None) -> Message:
    """HELLO of a robot, or of nobody, who asks what is served.

    ``previous_sid`` frees the session that it replaces; ``ring`` names memory for pictures (``pixels.py``).
    """
    tensors = {ROBOT: _pack(robot.to_json())} if robot else {}
    return Message(Kind.HELLO, previous_sid, epoch, fields={"ring": ring} if ring else {}, tensors=tensors)


def read_hello(message: Message) -> RobotSpec | None:
    """Robot description of a HELLO, None where it only asks; WireError if it is malformed."""
    if not message.tensors:
        return None
    body = _unpack(message, ROBOT)
    try:
        robot = RobotSpec.from_json(body)
    except (SchemaError, AttributeError, ArithmeticError) as e:
        raise WireError(Code.BAD_SCHEMA, str(e)) from None
    _check_robot(robot)
    return robot


def welcome(policy: PolicySpec, sid: str, epoch: int, ring: str | None = None) -> Message:
    """WELCOME to a session; ``ring`` is the memory for pictures that the server has opened.

    What the policy reads of the cameras' pictures is in its description; here stands how they may be compressed.
    """
    fields = {"ring": ring} if ring else {}
    if jpeg.AVAILABLE:
        fields["codecs"] = jpeg.CODEC
    return Message(Kind.WELCOME, sid, epoch, fields=fields, tensors={POLICY: _pack(policy.to_json())})


def read_welcome(message: Message) -> PolicySpec:
    """Policy description of a WELCOME; WireError if there is none or it is malformed."""
    body = _unpack(message, POLICY)
    try:
        policy = PolicySpec.from_json(body)
    except (SchemaError, AttributeError, ArithmeticError) as e:
        raise WireError(Code.BAD_SCHEMA, str(e)) from None
    _check_robot(policy.robot)
    if not message.sid:
        raise WireError(Code.BAD_SCHEMA, "WELCOME without a session id")
    return policy


def infer(
    obs: Observation,
    sid: str,
    epoch: int,
    rid: int,
    origin: int,
    seed: int,
    continuation: Continuation | None = None,
    slack_ms: int | None = None,
    pixels: tuple[int, int] | None = None,
    pictures: Mapping[str, Jpeg] = {},
) -> Message:
    """INFER: a chunk is wanted that starts at tick ``origin``, computed from ``obs`` with noise seed ``seed``.

    ``pixels``: slot and sequence of the pictures, where they lie in shared memory. ``pictures``: those of cameras that
    were compressed, in place of the pixels.
    """
    tensors: dict[str, NDArray[Any]] = {OBS_STATE: obs.state}
    fields: dict[str, Any] = {
        "k_obs": obs.step,
        "t_obs": obs.t_capture_ns,
        "origin": origin,
        "seed": seed,
        "task": obs.task,
    }
    if pixels is not None:
        fields["slot"], fields["sequence"] = pixels
    else:
        for camera, image in obs.images.items():
            if camera not in pictures:
                tensors[image_key(camera)] = image
    if slack_ms is not None:
        fields["slack_ms"] = slack_ms
    if continuation is not None:
        tensors[PLAN] = continuation.actions
        fields |= {"continue": continuation.mode, "delay": continuation.delay, "execute": continuation.execute}
    compressed = {image_key(camera): picture for camera, picture in pictures.items()}
    return Message(Kind.INFER, sid, epoch, rid, fields, tensors, compressed)


def read_infer(
    message: Message, robot: RobotSpec, ring: PixelRing | None = None, reads: Mapping[str, Reading] = {}
) -> tuple[Observation, int, int]:
    """Observation, origin and seed of an INFER. Cameras that ``robot`` does not have are left out.

    ``ring`` is where its pictures lie if they were not sent; they may be the cameras' or what the policy ``reads`` of
    them. A compressed one is looked into only where its shape is one of these.

    Raises:
        WireError: A part is missing, or does not match ``robot``.
    """
    values = _require(message, "k_obs", "t_obs", "origin", "seed", "task")
    if values["seed"] < 0:
        raise WireError(Code.BAD_SCHEMA, "seed is negative")
    if OBS_STATE not in message.tensors:
        raise WireError(Code.BAD_SCHEMA, f"'{OBS_STATE}' is missing")
    images: dict[str, NDArray[np.uint8]] = {}
    if "slot" in values:
        found = ring.get(values["slot"], values.get("sequence", 0)) if ring is not None else None
        if found is None:
            raise WireError(Code.EXPIRED, OVERWRITTEN)
        images = found
    else:
        for camera in robot.cameras:
            image = message.tensors.get(image_key(camera.name))
            if image is not None:
                images[camera.name] = image
            elif picture := message.pictures.get(image_key(camera.name)):
                if picture.shape not in picture_shapes(camera, reads):
                    shape = list(picture.shape)
                    raise WireError(
                        Code.BAD_SCHEMA, f"camera '{camera.name}' is a JPEG of {shape}, of no size agreed on"
                    )
                images[camera.name] = jpeg.expand(picture)
    obs = Observation(message.tensors[OBS_STATE], images, values["task"], values["k_obs"], values["t_obs"])
    try:
        obs.check(robot, reads)
    except SchemaError as e:
        raise WireError(Code.BAD_SCHEMA, str(e)) from None
    return obs, values["origin"], values["seed"]


def read_continuation(message: Message, policy: PolicySpec) -> Continuation | None:
    """The plan that an INFER wants continued, None if it has none.

    Raises:
        WireError: It is malformed, or the policy cannot continue plans in this way.
    """
    if "continue" not in message.fields:
        return None
    values = _require(message, "continue", "delay", "execute")
    mode, plan = values["continue"], message.tensors.get(PLAN)
    if mode not in policy.extras.get("continues", ()):
        raise WireError(Code.BAD_SCHEMA, f"the policy cannot continue a plan by '{mode[:20]}'")
    steps, width = policy.horizon, len(policy.robot.action)
    if plan is None or plan.dtype != F4 or plan.ndim != 2 or plan.shape[1] != width or len(plan) > steps:
        raise WireError(Code.BAD_SCHEMA, f"'{PLAN}' is not float32 of at most [{steps}, {width}]")
    if not finite(plan):
        raise WireError(Code.BAD_SCHEMA, f"'{PLAN}' is not finite")
    delay, execute = values["delay"], values["execute"]
    limit = min(len(plan), policy.d_train_max) if mode == "prefix" else len(plan)
    if not (0 <= delay <= limit and delay <= execute <= steps):
        raise WireError(Code.BAD_SCHEMA, f"delay {delay} and execute {execute} do not fit a plan of {len(plan)} steps")
    return Continuation(mode, plan, delay, execute)


def chunk(c: ActionChunk, t_obs: int) -> Message:
    """CHUNK, the answer to an INFER; ``t_obs`` is the robot's own capture time, echoed."""
    fields = {
        "k_obs": c.k_obs,
        "t_obs": t_obs,
        "origin": c.origin,
        "d_cond": c.d_cond,
        "execute": c.execute,
        "model_version": c.model_version,
    }
    return Message(Kind.CHUNK, c.session, c.epoch, c.rid, fields, {ACTION: c.actions})


def read_chunk(message: Message, policy: PolicySpec) -> ActionChunk:
    """Chunk of a CHUNK; WireError if it is not float32 [H, A] as WELCOME promised, or wants more than H executed."""
    values = _require(message, "k_obs", "origin", "model_version")
    shape = (policy.horizon, len(policy.robot.action))
    actions = message.tensors.get(ACTION)
    if actions is None or actions.dtype != F4 or actions.shape != shape:
        raise WireError(Code.BAD_SCHEMA, f"CHUNK does not hold float32{list(shape)}")
    execute = message.fields.get("execute", 0)
    if not 0 <= execute <= policy.horizon:
        raise WireError(Code.BAD_SCHEMA, f"CHUNK wants {execute} of {policy.horizon} actions executed")
    return ActionChunk(
        actions=actions,
        origin=values["origin"],
        k_obs=values["k_obs"],
        rid=message.rid,
        epoch=message.epoch,
        session=message.sid,
        d_cond=message.fields.get("d_cond", 0),
        execute=execute,
        model_version=values["model_version"],
    )


def robot_difference(robot: RobotSpec, trained: RobotSpec) -> str | None:
    """First field in which ``robot`` differs from the embodiment a policy was ``trained`` for, or None.

    Compares what :meth:`RobotSpec.fingerprint` covers: names, units, order, cameras, rate; not limits.
    """
    for what, ours, theirs in (("state", robot.state, trained.state), ("action", robot.action, trained.action)):
        for i in range(max(len(ours), len(theirs))):
            a = _describe(ours[i], what) if i < len(ours) else "absent"
            b = _describe(theirs[i], what) if i < len(theirs) else "absent"
            if a != b:
                return f"{what}[{i}] is {a} on the robot, {b} in the policy"
    ours_names, theirs_names = [c.name for c in robot.cameras], [c.name for c in trained.cameras]
    if ours_names != theirs_names:
        return f"cameras are {', '.join(ours_names)} on the robot, {', '.join(theirs_names)} in the policy"
    for cam, want in zip(robot.cameras, trained.cameras, strict=True):
        if (cam.height, cam.width) != (want.height, want.width):
            return (
                f"camera '{cam.name}' is {cam.height}x{cam.width} on the robot, "
                f"{want.height}x{want.width} in the policy"
            )
    for key in ("rate_hz", "action_kind"):
        if getattr(robot, key) != getattr(trained, key):
            return f"{key} is {getattr(robot, key)} on the robot, {getattr(trained, key)} in the policy"
    return None


def policy_difference(new: PolicySpec, old: PolicySpec) -> str | None:
    """First field in which chunks of ``new`` may not continue those of ``old``, or None."""
    difference = plan_difference(new, old)
    if difference is None and new.model_version != old.model_version:
        return f"model_version was {old.model_version!r}, is {new.model_version!r}"
    return difference


def plan_difference(new: PolicySpec, old: PolicySpec) -> str | None:
    """First field in which a robot that runs on ``old`` could not run its next episode on ``new``, or None."""
    for key in ("normalisation", "horizon", "d_train_max"):
        if getattr(new, key) != getattr(old, key):
            return f"{key} was {getattr(old, key)!r}, is {getattr(new, key)!r}"
    was, now = (spec.extras.get("continues", []) for spec in (old, new))
    if list(was) != list(now):
        return f"it continued plans by {', '.join(was) or 'nothing'}, now by {', '.join(now) or 'nothing'}"
    return robot_difference(new.robot, old.robot)


def _check_robot(robot: RobotSpec) -> None:
    """Types that :meth:`RobotSpec.from_json` takes as they come."""
    for name in [part.name for part in (*robot.state, *robot.action)] + [camera.name for camera in robot.cameras]:
        if type(name) is not str:
            raise WireError(Code.BAD_SCHEMA, f"robot description: name {name!r} is not a string")
    for camera in robot.cameras:
        if type(camera.height) is not int or type(camera.width) is not int:
            raise WireError(Code.BAD_SCHEMA, f"robot description: size of camera '{camera.name}' is not a whole number")
    if not robot.rate_hz > 0:
        raise WireError(Code.BAD_SCHEMA, f"robot description: rate_hz {robot.rate_hz} is not positive")


def _describe(dim: Dim, what: str) -> str:
    return f"{dim.name} ({dim.unit}, {dim.kind})" if what == "action" else f"{dim.name} ({dim.unit})"


def _require(message: Message, *keys: str) -> Mapping[str, Any]:
    for key in keys:
        if key not in message.fields:
            raise WireError(Code.BAD_SCHEMA, f"{message.kind} without '{key}'")
    return message.fields


def _pack(body: dict[str, Any]) -> NDArray[np.uint8]:
    # A description is longer than a header may be, so it travels as a tensor of JSON text.
    return np.frombuffer(json.dumps(body, allow_nan=False).encode(), np.uint8)


def _unpack(message: Message, name: str) -> dict[str, Any]:
    tensor = message.tensors.get(name)
    if tensor is None or tensor.dtype != np.uint8 or tensor.nbytes > MAX_JSON_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"{message.kind} without '{name}', u8 JSON of at most {MAX_JSON_BYTES} bytes")
    try:
        body = json.loads(tensor.tobytes(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise WireError(Code.BAD_SCHEMA, f"'{name}' is not JSON") from None
    if not isinstance(body, dict):
        raise WireError(Code.BAD_SCHEMA, f"'{name}' is not a JSON object")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
