"""vla-eval's websocket protocol: what its messages look like (https://github.com/allenai/vla-evaluation-harness, 0.8).

A message is a msgpack map of ``type``, ``payload``, ``seq`` and ``timestamp``. A client greets (``hello``), begins an
episode, and gets one command for each observation; commands of a chunk are handed out one by one before the policy is
asked again, as in our ``sync`` execution. Pictures come as PNG unless the client is told otherwise.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import F4, ActionChunk, Dim, PolicySpec, RobotSpec
from vla_stack.serving.jpeg import expand
from vla_stack.serving.openpi import Keys
from vla_stack.serving.trees import MAX_BYTES, read_array, unpack_tree
from vla_stack.serving.wire import Code, Jpeg, WireError
from vla_stack.version import __version__

if TYPE_CHECKING:
    from vla_stack.serving.websocket_server import Session
    from vla_stack.serving.worker import Frames, Job

PROTOCOL_VERSION = 1
USUAL_KEYS = ("images", "state", "task_description")  # as the harness recommends
OURS = "vla_stack."  # benchmarks that are made for a policy
PNG = b"\x89PNG\r\n\x1a\n"
MAX_SEQ = 1 << 53


@dataclass(frozen=True)
class VlaEval:
    """The dialect of a :class:`~vla_stack.serving.websocket_server.WebsocketServer`.

    Attributes:
        named: Names of keys that differ from the harness's recommendation, see :meth:`~.openpi.Keys.of`.
        execute: How many commands of a chunk a policy wants carried out, where the chunk does not say.
    """

    named: Mapping[str, str]
    execute: Callable[[PolicySpec], int]

    def conversation(self, policy: PolicySpec) -> _Talk:
        return _Talk(policy, Keys.of(policy.robot, self.named, USUAL_KEYS))

    def encode(self, chunk: ActionChunk, job: Job) -> Frames:
        """The commands that are to be carried out before the policy is asked again, float32 [n, A] as bytes."""
        return [np.ascontiguousarray(chunk.actions[: chunk.execute or self.execute(job.policy.spec)], F4).tobytes()]


@dataclass
class _Talk:
    policy: PolicySpec
    keys: Keys
    ahead: deque[NDArray[np.float32]] = field(default_factory=deque)  # commands that were computed and not asked for
    step: int = 0  # observations of the running episode
    seq: int = 0  # of the message at hand

    def greeting(self) -> None:
        return None

    async def answer(self, message: bytes, session: Session) -> bytes | None:
        kind, payload, self.seq = _read(message)
        if kind == "hello":
            return self._say("hello", self._about(str(payload.get("benchmark", ""))))
        if kind == "episode_start":
            self.step = 0
            self.ahead.clear()
            session.restart()
        elif kind == "observation":
            if not self.ahead:
                seen = self.keys.observation(payload, self.policy.robot, self.step, session.now_ns)
                commands = np.frombuffer(await session.infer(seen), F4)
                self.ahead.extend(commands.reshape(-1, len(self.policy.robot.action)))
            self.step += 1
            return self._say("action", {"actions": _array(self.ahead.popleft())})
        return None  # the end of an episode, or an error of the other end

    def refusal(self, error: WireError) -> bytes:
        return self._say("error", {"error": f"{error.text} [{error.code}]"})

    def _about(self, benchmark: str) -> dict[str, Any]:
        """What the harness compares with a benchmark; a benchmark of ours is made as the policy needs it."""
        robot = self.policy.robot
        about: dict[str, Any] = {
            **{"harness_version": f"vla-stack {__version__}", "protocol_version": PROTOCOL_VERSION},
            **{"model_server": f"vla-stack {self.policy.model_version}", "capabilities": {}},
            **{"action_spec": action_spec(robot), "observation_spec": observation_spec(robot)},
        }
        if benchmark.startswith(OURS):
            about["observation_params"] = {"policy": self.policy.to_json()}
        return about

    def _say(self, kind: str, payload: dict[str, Any]) -> bytes:
        said = {"type": kind, "payload": payload, "seq": self.seq, "timestamp": time.time()}
        return msgpack.packb(said)  # type: ignore[no-any-return]


# -- conventions -------------------------------------------------------------------------------------------------------


def action_spec(robot: RobotSpec) -> dict[str, dict[str, Any]]:
    """What the harness compares: names and units of every dimension, in their order."""
    return {"action": _spec("action", robot.action, f"{robot.action_kind} ")}


def observation_spec(robot: RobotSpec) -> dict[str, dict[str, Any]]:
    """Pictures in RGB, the instruction, and names and units of the state."""
    return {
        "image": {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"},
        "language": {"name": "language", "dims": 0, "format": "language"},
        "state": _spec("state", robot.state, ""),
    }


def _spec(name: str, dims: tuple[Dim, ...], how: str) -> dict[str, Any]:
    return {"name": name, "dims": len(dims), "format": how + ", ".join(f"{d.name} [{d.unit}]" for d in dims)}


# -- messages ----------------------------------------------------------------------------------------------------------


def _read(message: bytes) -> tuple[str, dict[str, Any], int]:
    """Type, payload and number of a message; WireError where it is none."""
    tree = unpack_tree(message, _unpack_array, "vla-eval")
    kind, payload, seq = (tree.get(key) for key in ("type", "payload", "seq"))
    if not isinstance(kind, str) or not isinstance(payload, dict) or type(seq) is not int or abs(seq) > MAX_SEQ:
        raise WireError(Code.BAD_SCHEMA, "a message is a map of type, payload and seq")
    return kind, payload, seq


def _array(values: NDArray[np.float32]) -> dict[str, Any]:
    return {"__ndarray__": True, "data": values.tobytes(), "dtype": values.dtype.str, "shape": list(values.shape)}


def _unpack_array(found: dict[Any, Any]) -> Any:
    """An array or a picture for the map that describes one; any other map as it is."""
    if "__image__" in found:
        return _picture(found.get("format"), found.get("data"), found.get("dtype", "|u1"), found.get("shape"))
    if "__ndarray__" in found:
        return read_array(found.get("data"), found.get("dtype"), found.get("shape"))
    return found


def _picture(how: Any, data: Any, dtype: Any, shape: Any) -> NDArray[Any]:
    """Pixels of a picture; compressed ones are RGB, of the size that is declared and that the limit allows."""
    if how == "raw":
        return read_array(data, dtype, shape)
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) != 3 or shape[2] != 3:
        raise WireError(Code.BAD_SCHEMA, "a compressed picture needs bytes and a shape [height, width, 3]")
    if any(type(n) is not int or not 0 < n < 1 << 14 for n in shape) or shape[0] * shape[1] * 3 > MAX_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"a picture of shape {shape}"[:200])
    if how == "jpeg":
        return expand(Jpeg(tuple(shape), data))
    if how != "png":
        raise WireError(Code.BAD_SCHEMA, f"a picture as {str(how)[:20]!r}, expected png, jpeg or raw")
    return _png(data, shape[0], shape[1])


def _png(data: bytes, height: int, width: int) -> NDArray[np.uint8]:
    """A PNG of three colours of 8 bits, not interlaced, whose size is what was declared.

    What comes in is hostile, so all of it is checked before a decoder sees it.
    """
    import cv2

    if reason := _objection(data, height, width):
        raise WireError(Code.BAD_SCHEMA, f"a PNG {reason}")
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert image is not None  # every part of it has been looked at
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)  # type: ignore[return-value]


def _objection(data: bytes, height: int, width: int) -> str:
    """Why a file is not let through to the decoder; empty where it is: a header, pixels and an end, all undamaged."""
    if data[:8] != PNG:
        return "does not begin as one"
    at, pixels, row = 8, [], 1 + 3 * width
    while at + 12 <= len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body, end = data[at + 8 : at + 8 + size], at + 12 + size
        if end > len(data) or zlib.crc32(kind + body) != int.from_bytes(data[end - 4 : end], "big"):
            return "is damaged"
        if kind != (b"IHDR" if at == 8 else b"IEND" if end == len(data) else b"IDAT"):
            return "has another part than its header, its pixels and its end"
        if at == 8 and body != struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0):
            return f"is not {height}x{width} in 8 bits RGB, as it was declared"
        pixels += [body] if kind == b"IDAT" else []
        at = end
    unpacking = zlib.decompressobj()
    try:
        rows = unpacking.decompress(b"".join(pixels), row * height + 1)
    except zlib.error:
        return "is damaged"
    if at != len(data) or len(rows) != row * height or not unpacking.eof or any(f > 4 for f in rows[::row]):
        return "has not the pixels that it says"
    return ""
