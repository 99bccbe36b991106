"""What a robot is to everything above it: a description, readings, commands, two ways to stand still.

SI units on this side of the door, whatever the hardware speaks (degrees, percent, ticks). No driver imports torch or
lerobot before it is asked for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Observation, RobotSpec


class Status(TypedDict, total=False):
    """How an episode stands.

    ``stage`` counts the task's stages reached so far; ``real_time_factor`` is simulated over real time since the
    episode's start, 1 where the simulation keeps up. The rest decides whether the robot may go back the way it came
    (``vla_stack/runtime/rewind.py``); it is absent where nobody knows: ``objects`` by name, [x y z qw qx qy qz] in m;
    ``hazards``, names of ``rewind.HAZARDS`` that apply now; ``force`` at the tool, N.
    """

    is_success: bool
    done: bool
    stage: int
    real_time_factor: float
    objects: dict[str, list[float]]
    hazards: list[str]
    force: float


class Fault(NamedTuple):
    """What is wrong with a robot now.

    Attributes:
        kind: A word to count it by: ``bus``, ``camera``, ``load``.
        why: One line for the operator, with the device's name.
        stop: Whether the robot must stop until somebody re-arms it; otherwise it holds until the fault is over.
    """

    kind: str
    why: str
    stop: bool


class Guard(Enum):
    """Who brings a robot to rest when the process that drives it dies, hangs or is stopped; the value is for people."""

    GUARDIAN = "guarded by a process of its own on the bus: zero velocity, held positions, torque on"
    DEVICE = "guarded by the robot's own watchdog"
    UNMOVED = "nothing moves"
    NONE = "NOT GUARDED: if the process that drives it dies or hangs, it goes on as it was last told"


@dataclass(frozen=True)
class Capabilities:
    """What a kind of robot can do, known from its class alone; ``guard`` may be another once it is connected.

    Attributes:
        guard: How it is guarded.
        loads: It reports loads, so its limits may bound them (``max_load``).
        interpolates: It takes several commands a control step.
        releases: It has torque that can be let go, see :class:`Releasing`.
        simulated: Nobody can be hurt: it starts at once, not softly, goes on by itself after a STOP, and its scene
            needs no hand.
        task: Name of the task that it has where none is given; empty where a task is an instruction and no more.
        like: Arguments with which its pictures, its rate and, in a simulation, its commands and measurements are those
            of another robot, which a policy or a dataset describes.
        unlimited: Arguments with which its episodes have no end of their own; a person's waiting counts too.
        by_hand: Arguments for pictures and rate where a person drives it from a page and nothing else says.
    """

    guard: Guard = Guard.NONE
    loads: bool = False
    interpolates: bool = False
    releases: bool = False
    simulated: bool = False
    task: str = ""
    like: Callable[[RobotSpec], dict[str, Any]] = lambda robot: {}
    unlimited: Mapping[str, Any] = field(default_factory=dict)
    by_hand: Mapping[str, Any] = field(default_factory=dict)


class Driver(Protocol):
    """One robot. Called from one thread.

    Attributes:
        capabilities: Of its class; once connected with what the device has shown.
    """

    capabilities: Capabilities

    @property
    def spec(self) -> RobotSpec:
        """What the robot measures and accepts; known once connected."""
        ...

    def connect(self) -> None:
        """Open the hardware; raises ``UserError`` with the remedy where it cannot."""
        ...

    def read(self) -> Observation:
        """The newest reading, with the monotonic time of its capture; may wait for the next, at most half a step."""
        ...

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """Send a command [A]; returns what was sent after the driver's own limits. Does not wait."""
        ...

    def hold(self) -> None:
        """Stand still where the robot is, ready for the next command."""
        ...

    def stop(self) -> None:
        """Safe stop: stand still, in the way that the hardware is safest."""
        ...

    def disconnect(self) -> None:
        """Hold, then leave the hardware alone: motors keep their torque. May be called twice."""
        ...


@runtime_checkable
class Guarded(Driver, Protocol):
    """A robot whose guard listens for whoever drives it."""

    def beat(self) -> None:
        """The loop that drives is alive; called every few milliseconds, also while it waits for its next step."""
        ...


@runtime_checkable
class Releasing(Driver, Protocol):
    """A robot that is held by torque, which only a person's wish switches off."""

    def release(self) -> None:
        """Switch the torque off; connected or not. The robot may fall. Raises ``UserError`` where it cannot."""
        ...


@runtime_checkable
class SelfChecking(Driver, Protocol):
    """A robot that can say what is wrong with it. Its calls never raise because of the hardware once connected."""

    @property
    def fault(self) -> Fault | None:
        """As of the last :meth:`read` or :meth:`write`; None where all is well."""
        ...


@runtime_checkable
class JointDriver(Driver, Protocol):
    """A robot that is commanded at the tool and realises commands in joints."""

    @property
    def joints(self) -> tuple[str, ...]:
        """Names of the joints; known once connected."""
        ...

    @property
    def joint_command(self) -> NDArray[np.float32] | None:
        """Joint targets [J] that realised the command in force up to the last :meth:`read`, radians; None before."""
        ...


@runtime_checkable
class EpisodicDriver(Driver, Protocol):
    """A robot that can be put back to a start and knows whether it succeeded, as simulators do."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the task's stages, in order; known once connected."""
        ...

    def reset(self, seed: int) -> str:
        """Begin an episode; the same seed is the same start. Returns the instruction."""
        ...

    def status(self) -> Status:
        """As of the last :meth:`read`."""
        ...
