"""The clutch between a teleoperator and a robot: what the hand says to the node's operator lane, look by look.

The lane has the dead-man, the limits and the STOP; here is what a hand must do before it says that the dead-man is
held, and what of it means "go on". A hand that says where to be (a leader arm) is followed once it has been near the
robot, and after a STOP once Enter has been pressed too: such a hand is always somewhere, whether anybody means it or
not. Where the robot has let go of it for another reason it must come near again. One that says how fast to move re-arms
a stopped robot by letting go, unless it was that hand's own STOP: that takes Enter. A recorded episode is followed from
wherever the robot stands, and not beyond a STOP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from robot_drivers.teleop import Intent, Teleop
from vla_stack.intervention import Phase
from vla_stack.schema import RobotSpec

REARM_S = 1.0  # between a STOP and the Enter that re-arms: one that was on its way meant something else
NEAR = {"rad": 0.2, "m": 0.1}  # by unit: so near the robot a leader must come before the robot follows it
RETRY_S = 0.5  # between two requests to be re-armed, and before a grip that the robot does not answer counts as lost
RELEASED_STEPS, RELEASED_S = 2.5, 0.05  # for so long a released hand is shown: only the newest message arrives
EVENTS = {name: (name,) for name in ("success", "discard", "estop")} | {"end": ("fail",)}  # Intent's -> the lane's


class TeleopOutput(NamedTuple):
    """What goes to the lane: the fields of a teleop message, and events in order."""

    engaged: bool
    velocity: NDArray[np.float64] | None
    target: NDArray[np.float64] | None
    events: tuple[str, ...]


class Clutch:
    """Decides when one robot follows one teleoperator.

    Args:
        teleop: Connected.
        robot: What it drives.
        say: For the person at the terminal, a line each.
    """

    def __init__(self, teleop: Teleop, robot: RobotSpec, say: Callable[[str], None]) -> None:
        self._teleop, self._robot, self._say = teleop, robot, say
        self._dims = len(robot.action)
        self.begin()

    def begin(self) -> None:
        """A new episode."""
        self._stopped = self._met = False  # met: the leader has been near the robot since it was last let go
        self._said_stop = False  # the hand itself stopped the robot: letting go does not re-arm that
        self._stopped_s = self._asked_s = self._since_s = self._told_s = -np.inf
        self._released_until_s, self._tick = np.inf, -1

    def step(self, state: dict[str, Any], now_s: float) -> TeleopOutput:
        """What to say, given the newest state that the node published in this episode; ``now_s`` is monotonic."""
        at = np.array(state["state"][: self._dims])
        last = at if state["action"] is None else np.array(state["action"])
        phase, ticks = state["phase"], max(0, state["tick"] - self._tick)
        if self._released_until_s == np.inf:
            self._let_go(now_s)
        recorded = self._teleop.RECORDED
        intent = Intent(True, target=at) if recorded else self._teleop.read(last)
        self._said_stop = intent.event == "estop" or (self._said_stop and (phase == Phase.ESTOP or not self._stopped))
        if phase == Phase.ESTOP and not self._stopped:
            self._stopped_s = now_s
            by_itself = intent.target is None and not self._said_stop
            how = "" if recorded else "; let go to go on" if by_itself else "; Enter goes on"
            self._say(f"STOP at step {state['tick']}: {state['why']}{how}")
        self._stopped = phase == Phase.ESTOP
        engaged = intent.engaged and not self._stopped
        if intent.target is not None:
            engaged = self._follows(intent, at, phase, now_s)
            if recorded and engaged:
                for _ in range(ticks):  # one command a control step, whoever was late
                    self._row = self._teleop.read(last)
                intent = self._row
        self._tick = state["tick"] if engaged or not recorded else state["tick"] - 1
        return TeleopOutput(engaged, intent.velocity, intent.target, self._events(intent, now_s))

    def _events(self, intent: Intent, now_s: float) -> tuple[str, ...]:
        leads = intent.target is not None
        if not self._stopped:
            return EVENTS.get(intent.event, ())
        if intent.event in ("discard", "end"):  # an episode ends once its STOP has, and nobody is held to move then
            return ("rearm", *EVENTS[intent.event])
        pressed = intent.event in ("rearm", "success") and now_s - self._stopped_s > REARM_S
        let_go = not (leads or self._said_stop or intent.engaged) and now_s - self._asked_s > RETRY_S
        if not (pressed or let_go):
            return ()
        self._asked_s = now_s
        return ("rearm",)

    def _follows(self, intent: Intent, at: NDArray[np.float64], phase: str, now_s: float) -> bool:
        """Whether an engaged leader is followed; once a second the operator is told why it is not."""
        assert intent.target is not None
        if not intent.engaged or self._stopped:
            self._let_go(now_s)
        elif now_s >= self._released_until_s and not self._met:
            why = "" if self._teleop.RECORDED else _apart(intent.target, at, self._robot)
            self._met, self._since_s = not why, now_s
            if why and now_s - self._told_s >= 1.0:
                self._told_s = now_s
                self._say(f"waiting for the leader: {why}")
        elif self._met and phase != Phase.HOLD:
            self._since_s = now_s
        elif self._met and now_s - self._since_s > RETRY_S:  # the robot holds: it has let go of this hand
            self._let_go(now_s)
        return self._met

    def _let_go(self, now_s: float) -> None:
        self._met = False
        self._released_until_s = now_s + RELEASED_STEPS * self._robot.dt + RELEASED_S


def _apart(target: NDArray[np.float64], at: NDArray[np.float64], robot: RobotSpec) -> str:
    """In which dimension a target [A] is too far from the robot to be followed; '' where it is near.

    Grippers and dimensions in other units than those of :data:`NEAR` do not count, nor do relative commands.
    """
    if robot.action_kind != "absolute":
        return ""
    endless = [d.kind == "angle" and d.low == -np.inf and d.high == np.inf for d in robot.action]
    away = np.abs(target - at)
    away = np.where(endless, np.abs((away + np.pi) % (2 * np.pi) - np.pi), away)
    near = np.array([np.inf if d.kind == "gripper" else NEAR.get(d.unit, np.inf) for d in robot.action])
    i = int(np.argmax(away / near))
    dim = robot.action[i]
    return "" if away[i] <= near[i] else f"{dim.name} is {away[i]:.2f} {dim.unit} from the robot's, {near[i]:g} at most"
