"""The control process: connects the driver and runs the control loop, in a process that nothing else can hold up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vla_stack.errors import UserError
from vla_stack.runtime.clock import RealClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.driver import Driver, EpisodicDriver, JointDriver
from vla_stack.runtime.executor import Executor, ExecutorConfig
from vla_stack.runtime.familiar import Familiar
from vla_stack.runtime.limits import Limits, check_limits, make_envelope, predict_touching
from vla_stack.runtime.link import Link, Message, ObservationSlots
from vla_stack.runtime.link_port import LinkPort
from vla_stack.runtime.operator_lane import OperatorLane
from vla_stack.runtime.rewind import Rewinder
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import PolicySpec

IDLE_S = 0.05  # between two looks at the operator's pipes while no episode runs


class OperatorPipes:
    """A :class:`~vla_stack.runtime.operator_lane.Console` over the pipes to the operator's two threads.

    Args:
        link: Teleop and events; answers and states go back.
        estop: The e-stop alone.
    """

    def __init__(self, link: Link, estop: Link) -> None:
        self._link, self._estop = link, estop

    def receive(self) -> list[Message]:
        """The e-stop first, whatever else there is."""
        return self._estop.receive() + self._link.receive()

    def post(self, kind: str, **fields: Any) -> bool:
        return self._link.post(kind, **fields)


def control_process(
    connection: Connection, make: Callable[[], Driver], operator: tuple[Connection, Connection] | None = None
) -> None:
    """Main function of the control process: connect the driver, run the episodes that the node asks for.

    Ends, after holding the robot, when the node closes its end of the pipe or dies.

    Args:
        connection: To the node.
        make: Builds the driver.
        operator: To the operator's sockets: teleop and events, and the e-stop.
    """
    link = Link(connection)
    console = OperatorPipes(*(Link(c) for c in operator)) if operator else None
    driver: Driver | None = None
    try:
        driver = make()
        driver.connect()
        stages = driver.stages if isinstance(driver, EpisodicDriver) else ()
        joints = driver.joints if isinstance(driver, JointDriver) else ()
        link.send(
            "ready",
            spec=driver.spec.to_json(),
            stages=list(stages),
            joints=list(joints),
            guard=driver.capabilities.guard.name,
        )
        _serve(link, driver, console)
    except EOFError:
        pass
    except UserError as e:
        _report(link, str(e))
    except Exception as e:
        _report(link, f"{type(e).__name__}: {e}")
        raise
    finally:
        if driver is not None:
            driver.disconnect()


def _serve(link: Link, driver: Driver, console: OperatorPipes | None) -> None:
    setup = _next(link, "setup")
    executor: Executor | None = None
    if setup["policy"] is not None:
        executor = Executor(driver.spec, PolicySpec.from_json(setup["policy"]), ExecutorConfig(**setup["executor"]))
    safety = SafetyConfig(**setup["safety"])
    if safety.robot:
        check_limits(Limits(safety.robot, safety), driver.spec)
    commands = executor.config.interpolate if executor else 1
    envelope = make_envelope(driver.spec, safety, commands)
    horizon = executor.policy.horizon if executor else 0
    slots = ObservationSlots(driver.spec, setup["slots"], horizon, setup["slot_count"])
    port = LinkPort(link, slots)
    lane: OperatorLane | None = None
    if console is not None:
        familiar = Familiar.from_message(setup["familiar"]) if setup["familiar"] else None
        rewinder = Rewinder(driver.spec, familiar=familiar, touching=predict_touching(driver.spec, safety))
        lane = OperatorLane(driver.spec, console, rewinder)
    loop = ControlLoop(driver, executor, envelope, RealClock(), port, lane)
    gc.freeze()  # what start-up left behind need not be walked at every collection
    try:
        link.send("armed")
        while True:
            order = _next(link, "episode", slots, lane, driver)
            port.film, port.recording = order["film"], order["record"]
            if lane is not None:
                lane.begin(order["mode"], order["max_ticks"])
            log = loop.run(order["seed"], order["max_ticks"])
            link.send("finished", **log.to_message())
    finally:
        slots.close()


def _next(
    link: Link,
    kind: str,
    slots: ObservationSlots | None = None,
    lane: OperatorLane | None = None,
    driver: Driver | None = None,
) -> Message:
    """Wait for a message of one kind; others are of an episode that is over. An operator is answered meanwhile."""
    while True:
        found: Message | None = None
        for message in link.receive(timeout_s=3600.0 if lane is None else IDLE_S):
            if message["kind"] == "free" and slots is not None:
                slots.free(message["slot"])
            elif message["kind"] == kind:
                found = message
        if found is not None:
            return found
        if lane is not None and driver is not None and lane.idle():
            driver.stop()


def _report(link: Link, text: str) -> None:
    try:
        link.send("failed", error=text)
    except EOFError:
        pass
