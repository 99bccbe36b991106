"""Any robot that LeRobot knows, built in or from a plug-in, as a :class:`~vla_stack.runtime.driver.Driver`.

LeRobot robots speak degrees and percent; this side speaks radians and ratios (``lerobot_units``). Their cameras are
read in threads of their own (``cameras``), so that a slow or lost one costs the control loop nothing. Once connected,
no call raises because of the hardware: a reading that fails is the last one, whose age tells; what is wrong is in
``fault``; a bus that is lost is opened again in the background, its motors holding all the while (``lerobot_reopen``),
and then the robot waits to be armed, as it may have moved.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_drivers.cameras import SOURCES, CameraStream, open_cameras
from robot_drivers.guarding import Guarding
from robot_drivers.lerobot_build import make_lerobot, take_cameras
from robot_drivers.lerobot_guard import guarded_buses, release
from robot_drivers.lerobot_health import JUMP_S, Health, impossible
from robot_drivers.lerobot_port import QUIET_S, arms, buses, hasten, insist, one_line, silence
from robot_drivers.lerobot_reopen import join, let_go, reopen
from robot_drivers.lerobot_units import calibrated_range, check_units, describe
from vla_stack.errors import UserError
from vla_stack.images import fit_image
from vla_stack.lerobot_units import factors
from vla_stack.runtime.driver import Capabilities, Fault, Guard
from vla_stack.schema import Camera, Observation, RobotSpec

CONNECT_ATTEMPTS, DRAIN_S = 5, 0.2  # before another one what is still on its way arrives; longer each time
MISSES, LOST_S = 3, 0.3  # exchanges in a row that fail, and control steps so long, before the bus counts as lost
RECONNECT_S = 0.5  # between attempts
CAMERAS_LIKE = '--robot.cameras="{front: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}}"'
BLIND_S = 1.0  # a camera that is away for longer stops the robot: the scene may have changed


def _like(robot: RobotSpec) -> dict[str, Any]:
    sizes = {(c.height, c.width) for c in robot.cameras}
    return {"rate_hz": robot.rate_hz} | ({"image_size": sizes.pop()} if len(sizes) == 1 else {})


class LeRobotRobot:
    """A LeRobot robot.

    Args:
        robot_type: Name under which its config is registered, e.g. ``so101_follower``.
        task: The instruction for the policy.
        rate_hz: Control rate.
        module: Module to import first, which registers the robot's config; for plug-ins that are not installed as such.
        units: Feature -> unit in ``vla_stack.lerobot_units.UNITS``, where its name does not say.
        limits: Feature -> (low, high) in SI; by default the calibrated range or half a turn either way, and FASTEST.
        max_rate: Largest joint speed, rad/s.
        max_load: Feature -> share of the motor's rated torque beyond which the robot stops.
        image_size: Pixels (a side, or height and width) to which pictures are brought; None keeps the cameras'.
        cameras: Camera -> options: LeRobot's (``{type: opencv, index_or_path: 0, ...}``), or ours, see
            ``robot_drivers.cameras``: ``{type: v4l2, device: /dev/video0}``, ``{type: video, path: film.mp4}``.
        **config: Fields of the robot's config, as on LeRobot's command line: ``port``, ``id``, ...
    """

    capabilities = Capabilities(loads=True, interpolates=True, releases=True, like=_like)

    def __init__(
        self,
        robot_type: str,
        task: str = "",
        rate_hz: float = 30.0,
        module: str | None = None,
        units: Mapping[str, str] | None = None,
        limits: Mapping[str, tuple[float, float]] | None = None,
        max_rate: float = 2.0,
        max_load: Mapping[str, float] | None = None,
        image_size: int | tuple[int, int] | None = None,
        cameras: Mapping[str, Mapping[str, Any]] | None = None,
        **config: Any,
    ) -> None:
        self._type, self._task, self._rate_hz, self._max_rate = robot_type, task, rate_hz, max_rate
        self._units, self._limits, self._max_load = dict(units or {}), dict(limits or {}), dict(max_load or {})
        if not isinstance(cameras or {}, Mapping) or not all(isinstance(c, Mapping) for c in (cameras or {}).values()):
            raise UserError(f"{robot_type}: cameras={cameras!r} does not describe cameras", f"write {CAMERAS_LIKE}")
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self._size = None if size is None else (int(size[0]), int(size[1]))
        self._our_cameras = {k: v for k, v in (cameras or {}).items() if v.get("type") in SOURCES}
        theirs = {k: v for k, v in (cameras or {}).items() if k not in self._our_cameras}
        self._robot = make_lerobot(
            "robot", robot_type, {**config, **({"cameras": theirs} if theirs or cameras == {} else {})}, module
        )
        check_units(self._robot, robot_type, self._units)
        self._streams: dict[str, CameraStream] = {}
        self._lock = threading.RLock()
        self._guarding: Guarding | None = None
        self._health: Health | None = None
        self._spec: RobotSpec | None = None
        self._newest: Observation | None = None
        self._sent: NDArray[np.float32] | None = None  # the command in force
        self._misses = self._write_misses = 0  # in a row
        self._miss = ""
        self._limit = max(MISSES, math.ceil(LOST_S * rate_hz))
        # What a reading may take, half a step, less the silence after it where it fails.
        self._budget_s = 0.5 / rate_hz - QUIET_S
        self._lost = False
        self._rest_due = False  # it was to stand still, and has not been told to where it is
        self._blind_since = 0.0
        self._ended = threading.Event()
        self.read_errors = self.reconnects = 0

    @property
    def spec(self) -> RobotSpec:
        if self._spec is None:
            raise RuntimeError("a LeRobot robot has no description before connect(): its limits are in its calibration")
        return self._spec

    @property
    def fault(self) -> Fault | None:
        name = self._robot.name
        if self._guarding is not None and (why := self._guarding.trouble):
            return Fault("guardian", f"{name}: {why}", stop=True)
        if self._lost:
            return Fault("bus", f"{name} is lost, trying to reconnect: {self._miss}", stop=True)
        if self._misses > 1:  # after one the last reading is a step old
            return Fault("bus", f"{name} does not answer: {self._miss}", stop=False)
        if self._write_misses > 1:
            return Fault("bus", f"{name} takes no commands: {self._miss}", stop=False)
        if self._health is not None and self._health.fault is not None:
            return self._health.fault
        for stream in self._streams.values():
            if why := stream.trouble():
                self._blind_since = self._blind_since or time.monotonic()
                return Fault("camera", why, stop=time.monotonic() - self._blind_since > BLIND_S)
        self._blind_since = 0.0
        return None

    def connect(self) -> None:
        """Connect and check the calibration.

        Raises:
            UserError: The robot or a camera does not answer, or it is not calibrated.
        """
        robot = self._robot
        lerobot_cameras = take_cameras(robot)
        for attempt in range(CONNECT_ATTEMPTS):  # LeRobot repeats no packet here, and one in ten may be lost
            try:
                join(robot)
                calibrated = robot.is_calibrated  # asks the motors
                break
            except UserError:  # another program drives it
                let_go(robot)
                raise
            except Exception as e:
                let_go(robot)
                if len(buses(robot)) < len(arms(robot)):  # it has not moved yet: its own way is as good
                    with contextlib.suppress(Exception):
                        robot.disconnect()
                if attempt == CONNECT_ATTEMPTS - 1:
                    text = f"{robot.name} cannot be connected: {one_line(e)}"
                    raise UserError(text, "check port, power and cables") from e
                time.sleep(DRAIN_S * (attempt + 1))
        if not calibrated:
            let_go(robot)
            raise UserError(
                f"{robot.name} is not calibrated", f"run: vla robot calibrate --robot.type={self._type} ..."
            )
        try:
            self._streams = open_cameras(self._our_cameras, lerobot_cameras, self._size)
            self._spec = self._describe()
            hasten(robot, robot.get_observation)
            guarded = guarded_buses(robot)
            if guarded:
                self._guarding = Guarding(robot.name, guarded, 3 * self._spec.dt)
                self.capabilities = replace(self.capabilities, guard=Guard.GUARDIAN)
        except UserError:
            self.disconnect()
            raise
        except Exception as e:
            self.disconnect()
            raise self._unread(e) from e
        self._names = [d.name for d in self._spec.state]
        self._factors = factors(self._names, self._units)
        self._health = Health(robot, self._spec, self._max_load)

    def read(self) -> Observation:
        """Joints and newest pictures. A failed reading returns the last one; the first one must succeed."""
        if self._lost or not self._lock.acquire(blocking=False):  # it is being opened again, or held
            assert self._newest is not None
            return self._newest
        try:
            before = time.monotonic_ns()
            raw, state = self._measure(self._budget_s)
            after = time.monotonic_ns()
            t_ns = (before + after) // 2
            if self._health is not None:
                self._health.check(state, (after - before) * 1e-9)
            if self._rest_due or self._write_misses > 1:  # nobody may write while that is a fault: is it over?
                self._settle(raw)
        except Exception as e:  # serial, CAN and SDK errors have no common class
            if self._newest is None:
                raise self._unread(e) from e
            self._missed(e)
            return self._newest
        finally:
            self._lock.release()
        self._misses = 0
        images, taken = self._images(raw)
        self._newest = Observation(state, images, self._task, 0, t_ns, taken)
        return self._newest

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """Send a command [A]; returns the one in force, which is the last one that was sent where this one was not."""
        dims = len(self.spec.action)
        values = np.asarray(action, np.float64) / self._factors[:dims]
        goal = {name: float(v) for name, v in zip(self._names[:dims], values, strict=True)}
        if self._guarding is not None:
            if self._guarding.trouble:
                return self._in_force(action)
            self._guarding.moving()
        if self._lost or not self._lock.acquire(blocking=False):
            return self._in_force(action)
        try:
            sent = self._robot.send_action(goal)
        except Exception as e:
            self._missed(e, writing=True)
            return self._in_force(action)
        finally:
            self._lock.release()
        self._write_misses, self._rest_due = 0, False
        out = (np.array([sent.get(k, v) for k, v in goal.items()]) * self._factors[:dims]).astype(np.float32)
        self._sent = out
        if self._health is not None:
            self._health.commanded(out)
        return out

    def beat(self) -> None:
        if self._guarding is not None:
            self._guarding.beat()

    def hold(self) -> None:
        """Stand still; where that cannot be said now, the next readings or whoever opens the bus again say it."""
        self._rest_due = True
        if not self._lost:  # whoever opens the bus again has the lock, for up to seconds, and brings it to rest then
            with self._lock:
                self._stand_still()

    def stop(self) -> None:
        """Stand still with the motors on: an arm without brakes falls when they are off."""
        self.hold()

    def disconnect(self) -> None:
        self._ended.set()
        with self._lock:
            if self._robot.is_connected and self._stand_still() and self._guarding is not None:
                self._guarding.end()  # else it goes on trying, until this process has ended and after
            self._guarding = None
            if self._robot.is_connected:
                with contextlib.suppress(Exception):
                    self._robot.disconnect()
            let_go(self._robot)
        for stream in self._streams.values():
            stream.close()
        self._streams = {}

    def release(self) -> None:
        """Switch all motors off, connected or not: an arm without brakes falls.

        Raises:
            UserError: A motor does not answer.
        """
        try:
            with self._lock:
                release(self._robot)
        except Exception as e:
            raise UserError(
                f"{self._robot.name} cannot be released: {one_line(e)}", "use its power switch, a hand under it"
            ) from e

    def _stand_still(self) -> bool:
        """Command the measured position; zero where a velocity is commanded. Whether it was sent."""
        if self._lost:
            return False
        # Zero needs no answer, so it comes first, unless the guardian has seen to it and holds newer positions.
        if self._sent is not None and self.spec.rate_mask.any() and not (self._guarding and self._guarding.tripped):
            self._rest(dict(zip(self._names, (self._sent / self._factors[: len(self._sent)]).tolist(), strict=False)))
        try:
            raw, _ = self._measure()
        except Exception as e:
            self._missed(e)
            return False
        return self._settle(raw)

    def _settle(self, raw: Mapping[str, Any]) -> bool:
        """Command the measured position ``raw``; a rest that was due is over then. Whether it was sent."""
        if not self._rest(raw):
            return False
        if self._rest_due:
            self._rest_due = False
            if self._guarding is not None:  # not before: until then it counts as moving
                self._guarding.rest()
        return True

    def _rest(self, raw: Mapping[str, Any]) -> bool:
        """Command the position ``raw``, as LeRobot gave it; whether it was sent."""
        still = {d.name: 0.0 if d.unit.endswith("/s") else raw[d.name] for d in self.spec.action}
        try:
            self._robot.send_action(still)
        except Exception as e:
            self._missed(e, writing=True)
            return False
        self._write_misses = 0
        self._sent = np.array([still[d.name] for d in self.spec.action] * self._factors[: len(still)], np.float32)
        if self._health is not None:
            self._health.rest()
        return True

    def _in_force(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """The command [A] sent last; before the first one, where the robot was, and failing that ``action``."""
        if self._sent is not None:
            return self._sent.copy()
        return action if self._newest is None else self._newest.state[: len(action)].copy()

    def _measure(self, budget_s: float = math.inf) -> tuple[Mapping[str, Any], NDArray[np.float32]]:
        """A reading as LeRobot gives it, and its state [S]; raises ``ConnectionError`` where it cannot be one."""
        raw: Mapping[str, Any] = insist(self._robot, self._robot.get_observation, budget_s)
        state = (np.array([raw[name] for name in self._names], np.float64) * self._factors).astype(np.float32)
        last = self._newest
        recent = last is not None and time.monotonic_ns() - last.t_capture_ns < JUMP_S * 1e9
        if why := impossible(self.spec, state, last.state if last is not None and recent else None):
            raise ConnectionError(why)
        return raw, state

    def _unread(self, error: Exception) -> UserError:
        return UserError(f"{self._robot.name} cannot be read: {one_line(error)}", "check power and cables")

    def _missed(self, error: Exception, writing: bool = False) -> None:
        """Note a failed exchange; after some in a row, or when the port itself is gone, reconnect."""
        self.read_errors += not writing
        self._misses += not writing
        self._write_misses += writing
        self._miss = one_line(error)
        silence(self._robot)
        # A camera's picture that is late is a TimeoutError, and no reason to touch the port.
        gone = not isinstance(error, (ConnectionError, RuntimeError, TimeoutError))
        often = max(self._misses, self._write_misses) >= self._limit
        if (gone or often) and not self._lost and not self._ended.is_set():
            self._lost = True
            threading.Thread(target=self._reconnect, daemon=True, name="reconnect").start()

    def _reconnect(self) -> None:
        """Open the robot again until it works; then it is well, and the envelope waits to be armed."""
        while not self._ended.is_set():
            with self._lock:
                if self._ended.is_set():
                    return
                try:
                    reopen(self._robot, self._guarding.brake if self._guarding is not None else None)
                    if not self._settle(self._measure()[0]):
                        raise ConnectionError(self._miss)
                    self._misses, self._lost = 0, False
                    self.reconnects += 1
                    return
                except Exception as e:
                    self._miss = one_line(e)
            self._ended.wait(RECONNECT_S)

    def _images(self, raw: Mapping[str, Any]) -> tuple[dict[str, NDArray[np.uint8]], dict[str, int]]:
        """Newest pictures, and for those that are stamped the monotonic time of their capture, ns."""
        images, taken = {}, {}
        for camera in self.spec.cameras:
            if (stream := self._streams.get(camera.name)) is not None:
                frame = stream.newest()
                images[camera.name], taken[camera.name] = frame.image, frame.t_ns
            else:
                image = fit_image(raw[camera.name], camera.height, camera.width)
                images[camera.name] = np.ascontiguousarray(image)
        return images, taken

    def _describe(self) -> RobotSpec:
        robot = self._robot
        action = list(robot.action_features)
        measured = [name for name, kind in robot.observation_features.items() if kind is float]
        for name in action:
            if name not in measured:
                raise UserError(f"{robot.name} commands '{name}' but does not measure it")
        shapes = {n: s for n, s in robot.observation_features.items() if isinstance(s, tuple) and s[-1] == 3}
        sizes = {name: self._size or (height, width) for name, (height, width, _) in shapes.items()}
        sizes |= {name: (s.newest().image.shape[0], s.newest().image.shape[1]) for name, s in self._streams.items()}
        dims = {
            name: describe(name, self._units, self._limits, self._max_rate, calibrated_range(robot, name))
            for name in (*action, *measured)
        }
        return RobotSpec(
            name=f"lerobot/{robot.name}",
            state=tuple(dims.values()),
            action=tuple(dims[name] for name in action),
            cameras=tuple(Camera(name, int(height), int(width)) for name, (height, width) in sizes.items()),
            rate_hz=self._rate_hz,
        )
