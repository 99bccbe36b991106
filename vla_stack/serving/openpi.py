"""openpi's websocket protocol: what its messages look like, and which of their keys mean what to a robot.

One msgpack map a binary message, numpy arrays within it as maps of ``__ndarray__``, ``data``, ``dtype`` and ``shape``
(https://github.com/Physical-Intelligence/openpi, ``packages/openpi-client``). A server greets with a map of metadata;
then each map of an observation is answered by one with ``actions`` [H, A], or by a text that says what is wrong. There
are no sessions, no plans to continue and no clocks: what needs them is in our own protocol (``messages.py``).

Names of keys differ from robot to robot. Slashes, dots and nesting are one: ``observation/images/front``,
``observation.images.front`` and ``{"images": {"front": ...}}`` below ``observation`` name the same thing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.images import fit_image
from vla_stack.schema import F4, U1, ActionChunk, Observation, PolicySpec, RobotSpec, SchemaError
from vla_stack.serving.trees import MAX_TEXT, TYPES, read_array, unpack_tree
from vla_stack.serving.wire import Code, WireError

if TYPE_CHECKING:  # of the server's side, which a robot does without
    from vla_stack.serving.websocket_server import Session
    from vla_stack.serving.worker import Frames, Job

SPEC_KEY = "vla_stack"  # metadata: the policy's description, for robots of this project

type Flat = dict[str, Any]  # 'observation/images/front' -> array, text or number


def pack(tree: Mapping[str, Any]) -> bytes:
    """A message; arrays may lie anywhere in it.

    Raises:
        TypeError: Something in it is no plain value and no array of numbers.
    """
    return msgpack.packb(tree, default=_pack_array)  # type: ignore[no-any-return]


def unpack(message: bytes) -> dict[str, Any]:
    """A message that came from outside; arrays are read-only views of it.

    Raises:
        WireError: It is malformed or too large.
    """
    return unpack_tree(message, _unpack_array, "openpi")


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} does not travel")
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in TYPES:
        raise TypeError(f"an array of {value.dtype} does not travel")
    return {
        b"__ndarray__": True,
        b"data": np.ascontiguousarray(little).data.cast("B"),
        b"dtype": little.dtype.str,
        b"shape": list(little.shape),
    }


def _unpack_array(found: dict[Any, Any]) -> Any:
    """An array for the map that describes one, a number for that of a numpy scalar; any other map as it is."""
    if b"__npgeneric__" in found:
        value = found.get(b"data")
        if not isinstance(value, int | float):
            raise WireError(Code.BAD_SCHEMA, "a numpy scalar that is no number")
        return value
    if b"__ndarray__" not in found:
        return found
    return read_array(found.get(b"data"), found.get(b"dtype"), found.get(b"shape"))


# -- keys --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """Which keys of a message are a robot's cameras, state and instruction.

    Attributes:
        cameras: Camera -> key.
        state: Keys whose arrays, one after the other, are the state.
        task: Key of the instruction.
    """

    cameras: Mapping[str, str]
    state: tuple[str, ...]
    task: str

    @classmethod
    def of(
        cls,
        robot: RobotSpec,
        named: Mapping[str, str],
        usual: tuple[str, str, str] = ("observation/images", "observation/state", "prompt"),
    ) -> Keys:
        """The protocol's usual names where nothing else is named; openpi has none, so ours: LeRobot's with slashes.

        Args:
            robot: What is driven.
            named: ``state``, ``task`` or a camera -> key; of ``state`` several, with ``+`` between them.
            usual: Where cameras are, state and instruction.

        Raises:
            UserError: A name is none of these.
        """
        cameras = {c.name: f"{usual[0]}/{c.name}" for c in robot.cameras}
        known = {**cameras, "state": usual[1], "task": usual[2]}
        for name in named:
            if name not in known:
                raise UserError(f"--keys: the robot has no '{name}'", f"it has {', '.join(known)}")
        names = {name: "/".join(_parts(named.get(name, key))) for name, key in known.items()}
        state = tuple("/".join(_parts(key)) for key in named.get("state", known["state"]).split("+"))
        return cls({name: names[name] for name in cameras}, state, names["task"])

    def observation(self, message: Mapping[str, Any], robot: RobotSpec, step: int, now_ns: int) -> Observation:
        """What a robot said.

        A picture may come with channels first or last, as bytes or as floats in [0, 1], in any size: it is fitted into
        the one that the policy reads.

        Raises:
            WireError: Something is missing or has the wrong type or shape (the text names the key).
        """
        flat = flatten(message)
        images = {c.name: _picture(flat, self.cameras[c.name], c.height, c.width) for c in robot.cameras}
        state = np.concatenate([_numbers(flat, key) for key in self.state])
        task = _require(flat, self.task)
        if not isinstance(task, str):
            raise WireError(Code.BAD_SCHEMA, f"'{self.task}' is {type(task).__name__}, expected a text")
        found = Observation(state, images, task, step, now_ns)
        try:
            found.check(robot)
        except SchemaError as e:
            raise WireError(Code.BAD_SCHEMA, str(e)) from None
        return found

    def message(self, observation: Observation) -> dict[str, Any]:
        """An observation for a server of another project, in its keys; the inverse of :meth:`observation` where the
        state has one key.

        Raises:
            UserError: The state has several keys, and where it is cut nobody knows.
        """
        if len(self.state) != 1:
            raise UserError(f"--keys: one key for the state to send, not {len(self.state)}")
        message: dict[str, Any] = {key: observation.images[name] for name, key in self.cameras.items()}
        return message | {self.state[0]: observation.state, self.task: observation.task}


def flatten(message: Mapping[Any, Any]) -> Flat:
    """Nested keys as one, with slashes; WireError where they are too long."""
    out: Flat = {}
    todo: list[tuple[str, Any]] = [("", message)]
    while todo:
        above, value = todo.pop()
        if isinstance(value, Mapping):
            for key, inner in value.items():
                name = key.decode("latin1") if isinstance(key, bytes) else key
                todo.append(("/".join((*([above] if above else []), *_parts(name))), inner))
                if len(todo[-1][0]) > MAX_TEXT:
                    raise WireError(Code.BAD_SCHEMA, f"keys nested to more than {MAX_TEXT} letters")
        else:
            out[above] = value
    return out


def _parts(key: str) -> list[str]:
    return [part for part in key.replace(".", "/").split("/") if part]


def _require(flat: Flat, key: str) -> Any:
    if key not in flat:
        raise WireError(
            Code.BAD_SCHEMA, f"'{key}' is missing; the message has {', '.join(sorted(flat)) or 'nothing'}"[:300]
        )
    return flat[key]


def _array(flat: Flat, key: str) -> NDArray[Any]:
    value = _require(flat, key)
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise WireError(Code.BAD_SCHEMA, f"'{key}' is {type(value).__name__}, expected an array of numbers")
    return array


def _numbers(flat: Flat, key: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is too large for float32 is refused as not finite
        return np.atleast_1d(_array(flat, key)).astype(F4).ravel()


def _picture(flat: Flat, key: str, height: int, width: int) -> NDArray[np.uint8]:
    image = _array(flat, key)
    if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] != 3:
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise WireError(Code.BAD_SCHEMA, f"'{key}' has shape {list(image.shape)}, expected [height, width, 3]")
    if image.dtype.kind == "f":
        if not (np.isfinite(image).all() and image.min() >= 0.0 and image.max() <= 1.0):
            raise WireError(Code.BAD_SCHEMA, f"'{key}' is a picture in floats that are not all in [0, 1]")
        image = np.rint(image * 255).astype(np.uint8)
    if image.dtype != U1:
        raise WireError(Code.BAD_SCHEMA, f"'{key}' is {image.dtype}, expected uint8, or floats in [0, 1]")
    return fit_image(np.ascontiguousarray(image), height, width)


# -- a server's side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Openpi:
    """The dialect of a :class:`~vla_stack.serving.websocket_server.WebsocketServer`.

    Attributes:
        named: Names of keys that differ from ours, see :meth:`Keys.of`.
    """

    named: Mapping[str, str]

    def conversation(self, policy: PolicySpec) -> _Talk:
        if policy.history:
            raise UserError(
                "this policy reads earlier observations, and openpi's messages tell neither steps nor episodes",
                "serve it with --protocol vla or vla-eval",
            )
        return _Talk(policy, Keys.of(policy.robot, self.named))

    def encode(self, chunk: ActionChunk, job: Job) -> Frames:
        """The reply to a request; ``infer_ms`` is what openpi's own server says beside the actions."""
        timing = {"infer_ms": (time.monotonic_ns() - job.queued_ns) * 1e-6}
        return [pack({"actions": chunk.actions, "execute": chunk.execute, "server_timing": timing})]


@dataclass
class _Talk:
    policy: PolicySpec
    keys: Keys
    step: int = 0  # requests that were answered

    def greeting(self) -> bytes:
        """``keys`` for people, the rest for a robot of this project."""
        expected = {"cameras": dict(self.keys.cameras), "state": list(self.keys.state), "task": self.keys.task}
        return pack({SPEC_KEY: self.policy.to_json(), "keys": expected, "action_horizon": self.policy.horizon})

    async def answer(self, message: bytes, session: Session) -> bytes:
        seen = self.keys.observation(unpack(message), self.policy.robot, self.step, session.now_ns)
        reply = await session.infer(seen)
        self.step += 1
        return reply

    def refusal(self, error: WireError) -> str:
        return f"{error.text} [{error.code}]"
