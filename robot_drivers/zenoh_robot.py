"""A ROS 2 robot over Zenoh: topics by name, as ``rmw_zenoh`` has them, without a ROS installation.

    vla run --robot ros2 --robot-arg map=arm.yaml --robot-arg command=/arm_controller/joint_trajectory

``arm.yaml`` is the file with which `vla data import` makes datasets of this robot's bags, so a policy that was trained
on them finds the same names and units here. Measured is what arrives on the topic ``state``; commands go to whoever
subscribes to ``command``: a trajectory of one point, or plain numbers, as its type says. Needs a router
(``ros2 run rmw_zenoh_cpp rmw_zenohd``), through which the robot's nodes are found.

A network of ROS has no keys of its own: whoever reaches it can drive the robot. So an endpoint on another computer is
``tls/...`` with a Zenoh configuration, or said to be a network that is nobody else's (``trusted_network=true``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import cv2
import numpy as np
from numpy.typing import NDArray

from robot_drivers.zenoh_names import (
    Attachments,
    Topic,
    any_type,
    node_token,
    publisher_token,
    subscribers,
    topic_of_key,
    topic_of_token,
)
from vla_stack import ros_messages as ros
from vla_stack.data.bags.mapping import BagMap, read_map
from vla_stack.data.bags.pictures import decode_compressed, decode_image
from vla_stack.errors import UserError
from vla_stack.images import fit_image
from vla_stack.runtime.driver import Capabilities, Fault, Guard
from vla_stack.schema import Camera, Dim, Observation, RobotSpec
from vla_stack.serving.endpoint import is_local

CONNECT_S = 5.0
LOST_STEPS, LOST_S, STOP_S = 3, 0.3, 1.0  # without a reading or a picture: it holds, then stops
MAX_PICTURE_BYTES, MAX_STATE_BYTES = 32 << 20, 1 << 16
COMMANDS = (ros.TRAJECTORY, ros.FLOATS)
SAFE = ("tls/", "quic/")


def _like(robot: RobotSpec) -> dict[str, Any]:
    """Pictures and rate of a policy's robot."""
    sizes = {(c.height, c.width) for c in robot.cameras}
    square = len(sizes) == 1 and len(set(next(iter(sizes)))) == 1
    return {"rate_hz": robot.rate_hz, **({"image_size": next(iter(sizes))[0]} if square else {})}


class ZenohRobot:
    """A :class:`~vla_stack.runtime.driver.Driver` for a robot whose nodes speak ROS 2 over Zenoh.

    Args:
        map: YAML file: ``state`` (topic), ``rate_hz``, ``joints``, and where needed ``cameras``, ``units``,
            ``grippers``, ``robot``, ``task``; see `vla data import`.
        command: Topic of trajectory_msgs/JointTrajectory or std_msgs/Float64MultiArray, the joints in their order.
        endpoint: Of the router.
        limits: Joint -> least and largest position, in its unit.
        domain: ``ROS_DOMAIN_ID``.
        task: Instruction in place of the map's.
        image_size: Height and width of pictures, pixels; those of the cameras where not given.
        config: Zenoh configuration (JSON5), e.g. with certificates.
        trusted_network: The endpoint is on another computer, without encryption, and that is meant.

    Raises:
        UserError: The map lacks something, or the endpoint is on another computer and not encrypted.
    """

    capabilities = Capabilities(guard=Guard.NONE, like=_like)

    def __init__(
        self,
        map: str,
        command: str,
        endpoint: str = "tcp/127.0.0.1:7447",
        limits: dict[str, tuple[float, float]] | None = None,
        domain: int = 0,
        task: str | None = None,
        image_size: int | None = None,
        rate_hz: float | None = None,
        config: str | None = None,
        trusted_network: bool = False,
    ) -> None:
        given = read_map(Path(map))
        given.setdefault("action", given.get("state", ""))  # of recordings; here it is not read
        if not given.get("task"):
            given = {k: v for k, v in given.items() if k != "task_topic"} | {"task": task or "-"}
        self._map = BagMap.of(given, map)
        if not self._map.joints:
            raise UserError(f"{map} does not say 'joints'", "list the joints that are driven, in the policy's order")
        transport, _, address = endpoint.partition("/")
        if not endpoint.startswith(SAFE) and not trusted_network and not is_local(f"tcp://{address}"):
            raise UserError(
                f"{endpoint} is another computer, and {transport} is not encrypted: whoever reaches that network can "
                "drive the robot",
                "use tls/HOST:PORT with config=FILE, or say trusted_network=true where nobody else is on it",
            )
        self._command, self._domain, self._endpoint = command.strip("/"), domain, endpoint
        self._config, self._limits, self._size = config, dict(limits or {}), image_size
        self._rate_hz = rate_hz or self._map.rate_hz
        self._task = task or (self._map.task if self._map.task != "-" else "")
        if odd := sorted(set(self._limits) - set(self._map.joints)):
            raise UserError(f"limits: there is no joint '{odd[0]}'", f"the map has {', '.join(self._map.joints)}")
        if held := sorted(j for j in self._limits if self._map.dim(j).kind == "gripper"):
            what = f"limits: '{held[0]}' is a gripper, whose range is that of `grippers`"
            raise UserError(what, "give how far it may close and open there")
        self._decode = {kind: ros.decoder(kind) for kind in (ros.JOINT_STATE, ros.IMAGE, ros.COMPRESSED_IMAGE)}
        self._news = threading.Condition()
        self._measured: dict[str, tuple[float, int]] = {}  # joint -> position as it was said, when it came (ns)
        self._pictures: dict[str, tuple[Topic, bytes, int]] = {}  # camera -> newest picture, when it came (ns)
        self._images: dict[str, tuple[int, NDArray[np.uint8]]] = {}  # camera -> when it came, decoded
        self._odd: dict[str, str] = {}  # topic -> what was wrong with its last message
        self._fresh, self._step = False, -1
        self._sent: Topic | None = None
        self._last: NDArray[np.float32] | None = None  # the command in force
        self._attachments = Attachments()
        self._session: Any = None
        self._spec: RobotSpec | None = None

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("the robot has no description before connect()")
        return self._spec

    @property
    def fault(self) -> Fault | None:
        """Joints or cameras that are silent."""
        came = {self._map.state: self._oldest()}
        came |= {self._map.cameras[camera]: t for camera, (t, _) in self._images.items()}
        topic = min(came, key=lambda name: came[name])
        age_s = (time.monotonic_ns() - came[topic]) * 1e-9
        if age_s <= max(LOST_S, LOST_STEPS * self.spec.dt):
            return None
        odd = self._odd.get(topic.strip("/"), "")
        why = f"nothing of use on {topic} for {age_s:.1f} s" + f": {odd}" * bool(odd)
        return Fault("link" if topic == self._map.state else "camera", why, age_s > STOP_S)

    def connect(self) -> None:
        """Find the joints, the cameras and whoever takes commands.

        Raises:
            UserError: One of them is not there; says which, and what is.
        """
        import zenoh

        self._session = self._opened(zenoh)
        try:
            self._spec = self._described()
        except BaseException:  # a session that is left open keeps its process from ending
            self.disconnect()
            raise

    def _described(self) -> RobotSpec:
        for topic in (self._map.state.strip("/"), *(t.strip("/") for t in self._map.cameras.values())):
            self._session.declare_subscriber(any_type(self._domain, topic), self._take)
        self._sent = self._listener()
        session = str(self._session.zid())
        self._tokens = [
            self._session.liveliness().declare_token(token)
            for token in (node_token(self._domain, session), publisher_token(self._domain, session, self._sent))
        ]
        joints, cameras = self._map.joints, self._map.cameras
        self._wait(
            lambda: all(j in self._measured for j in joints) and all(c in self._pictures for c in cameras), CONNECT_S
        )
        if missing := [j for j in joints if j not in self._measured]:
            seen = ", ".join(sorted(self._measured)) or "none"
            self._fail(f"no joint '{missing[0]}' on {self._map.state}; heard of: {seen}")
        if missing := [c for c in cameras if c not in self._pictures]:
            self._fail(f"no picture on {cameras[missing[0]]}", "is the camera's node running?")
        shapes = {name: self._image(name).shape for name in cameras}
        dims = tuple(self._dim(joint) for joint in joints)
        seen_by = tuple(Camera(name, h, w) for name, (h, w, _) in shapes.items())
        return RobotSpec(f"ros2/{self._map.robot}", dims, dims, seen_by, self._rate_hz)

    def read(self) -> Observation:
        """The newest joints and pictures; waits up to half a step for joints that were not read yet."""
        self._wait(lambda: self._fresh, 0.5 * self.spec.dt)
        with self._news:
            self._fresh = False
        self._step += 1
        images = {camera.name: self._image(camera.name) for camera in self.spec.cameras}
        return Observation(self._state(), images, self._task, self._step, self._oldest())

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        sent = np.clip(np.asarray(action, np.float32), self.spec.action_low, self.spec.action_high)
        positions = [self._as_said(j, float(x)) for j, x in zip(self._map.joints, sent, strict=True)]
        assert self._sent is not None
        if self._sent.kind == ros.TRAJECTORY:
            payload = ros.trajectory(0, self._map.joints, positions, round(1e9 * self.spec.dt))
        else:
            payload = ros.floats(positions)
        self._session.put(self._sent.key(self._domain), payload, attachment=self._attachments.next(time.time_ns()))
        self._last = sent
        return sent

    def hold(self) -> None:
        """Command where it is; where that is not known, the last command again, and nothing where there was none.

        A reading that is old says where the robot was: to command that would be a jump back.
        """
        if time.monotonic_ns() - self._oldest() <= LOST_STEPS * self.spec.dt * 1e9:
            self.write(self._state())
        elif self._last is not None:
            self.write(self._last)

    def stop(self) -> None:
        self.hold()

    def disconnect(self) -> None:
        if self._session is None:
            return
        if self._last is not None:  # who never commanded it leaves it to whoever does
            self.hold()
        session, self._session = self._session, None
        session.close()

    # -- on connect --------------------------------------------------------------------------------------------------

    def _opened(self, zenoh: Any) -> Any:
        zenoh.init_log_from_env_or("error")
        try:
            config = zenoh.Config.from_file(self._config) if self._config else zenoh.Config()
            config.insert_json5("mode", json.dumps("client"))
            config.insert_json5("connect/endpoints", json.dumps([self._endpoint]))
            config.insert_json5("connect/timeout_ms", str(round(1e3 * CONNECT_S)))
            return zenoh.open(config)
        except zenoh.ZError as e:
            why = str(e).splitlines()[0][:200]
            raise UserError(
                f"no Zenoh router answers at {self._endpoint} ({why})", "start one: ros2 run rmw_zenoh_cpp rmw_zenohd"
            ) from None

    def _listener(self) -> Topic:
        """Who takes commands."""
        found: set[Topic] = set()
        deadline = time.monotonic() + CONNECT_S
        while not found and time.monotonic() < deadline:
            for reply in self._session.liveliness().get(subscribers(self._domain, self._command), timeout=1.0):
                if reply.ok is not None and (topic := topic_of_token(str(reply.ok.key_expr))) is not None:
                    found.add(topic)
        taken = sorted(t for t in found if t.kind in COMMANDS)
        if not taken:
            kinds = f", but of {', '.join(sorted(t.kind for t in found))}" if found else ""
            self._fail(
                f"nobody subscribes to /{self._command} in domain {self._domain}{kinds}",
                f"start the controller, of {' or '.join(COMMANDS)}; `ros2 topic info /{self._command}`",
            )
        if len(several := sorted({topic.kind for topic in taken})) > 1:
            what = f"/{self._command} in domain {self._domain} is subscribed to as {' and as '.join(several)}"
            self._fail(what, "one of them would hear nothing: stop it, or give the topic of the other")
        return taken[0]

    def _fail(self, what: str, remedy: str = "") -> NoReturn:
        raise UserError(f"{self._endpoint}: {what}", remedy or f"`ros2 topic echo {self._map.state}`")

    def _dim(self, joint: str) -> Dim:
        dim = self._map.dim(joint)
        if joint not in self._limits:
            return dim
        low, high = map(float, self._limits[joint])
        return Dim(dim.name, dim.unit, low, high)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _take(self, sample: Any) -> None:
        """On Zenoh's thread."""
        topic, now = topic_of_key(str(sample.key_expr)), time.monotonic_ns()
        if topic is None:
            return
        try:
            if topic.kind == ros.JOINT_STATE:
                self._take_joints(sample, now)
            elif topic.kind in (ros.IMAGE, ros.COMPRESSED_IMAGE):
                if len(sample.payload) > MAX_PICTURE_BYTES:
                    raise ValueError(f"a picture of {len(sample.payload)} bytes")
                payload = sample.payload.to_bytes()
                with self._news:
                    for camera, name in self._map.cameras.items():
                        if name.strip("/") == topic.name:
                            self._pictures[camera] = (topic, payload, now)
                    self._news.notify_all()
            self._odd.pop(topic.name, None)
        except Exception as e:  # whatever a foreign message makes a decoder raise
            self._odd[topic.name] = str(e)[:200]

    def _take_joints(self, sample: Any, now: int) -> None:
        if len(sample.payload) > MAX_STATE_BYTES:
            raise ValueError(f"a JointState of {len(sample.payload)} bytes")
        message = self._decode[ros.JOINT_STATE](sample.payload.to_bytes())
        positions = np.asarray(message.position, np.float64)
        if len(positions) != len(message.name):
            raise ValueError(f"{len(message.name)} joints with {len(positions)} positions")
        if not np.isfinite(positions).all():
            raise ValueError("a position that is not finite")
        if sample.attachment is not None:
            self._attachments.like(sample.attachment.to_bytes())
        with self._news:
            self._measured |= {name: (float(x), now) for name, x in zip(message.name, positions, strict=True)}
            self._fresh = True
            self._news.notify_all()

    def _wait(self, there: Callable[[], bool], timeout_s: float) -> None:
        with self._news:
            self._news.wait_for(there, timeout_s)

    def _oldest(self) -> int:
        """When the joint that has been silent for longest was heard of, ns."""
        return min(self._measured[joint][1] for joint in self._map.joints)

    def _state(self) -> NDArray[np.float32]:
        return np.array([self._as_ours(j, self._measured[j][0]) for j in self._map.joints], np.float32)

    def _as_ours(self, joint: str, x: float) -> float:
        if joint not in self._map.grippers:
            return x
        closed, opened = self._map.grippers[joint]
        return float(np.clip((x - closed) / (opened - closed), 0.0, 1.0))

    def _as_said(self, joint: str, x: float) -> float:
        if joint not in self._map.grippers:
            return x
        closed, opened = self._map.grippers[joint]
        return closed + x * (opened - closed)

    def _image(self, camera: str) -> NDArray[np.uint8]:
        """The newest picture that could be decoded; a damaged one leaves the one before, which gets old."""
        topic, payload, came = self._pictures[camera]
        before = self._images.get(camera)
        if before is not None and before[0] == came:
            return before[1]
        try:
            message = self._decode[topic.kind](payload)
            image = decode_image(message) if topic.kind == ros.IMAGE else decode_compressed(message)
        except (ValueError, cv2.error) as e:
            if before is None:
                raise UserError(f"{self._map.cameras[camera]}: {e}") from None
            self._odd[topic.name] = str(e)[:200]
            return before[1]
        if self._size is not None:
            image = fit_image(image, self._size, self._size)
        self._images[camera] = (came, image)
        return image
