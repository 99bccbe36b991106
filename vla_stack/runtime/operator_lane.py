"""The operator's lane of the control loop: at each tick, whose command is due, from events, hand and state machine.

Runs in the control process and knows no sockets, threads or clocks: the same messages at the same ticks give the same
orders. An event is applied before its tick's command is chosen, so a takeover is in force in the tick that reads it,
and no action that the policy has queued is dispatched then or later.

The dead-man: a human moves the robot while a teleop message no older than 0.2 s says that it is held, and while no
camera's newest frame is older than 0.3 s. Where either fails the robot holds in that tick, and stays there until the
dead-man has been seen released and is held again.

A re-arm says how many stops its sender knows of, and is refused where there has been another: one that was on its way
when somebody pressed the e-stop does not undo that stop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.intervention import Control, Intervention, Mode, Phase, Refused
from vla_stack.runtime.driver import Status
from vla_stack.runtime.link import Message
from vla_stack.runtime.operator_messages import MAX_FRAME_AGE_S, STALE_S
from vla_stack.runtime.rewind import Rewinder
from vla_stack.schema import Observation, RobotSpec


class Console(Protocol):
    """The lane's way to the operator's sockets, which are another process's. No method waits."""

    def receive(self) -> list[Message]:
        """``teleop``, ``event``, ``estop``, and ``lost`` where the lease has ended."""
        ...

    def post(self, kind: str, **fields: Any) -> bool:
        """Answer an event (``reply``) or publish a ``state``."""
        ...


class Act(Enum):
    """What a tick is for."""

    POLICY = "policy"
    COMMAND = "command"
    HOLD = "hold"
    STOP = "stop"
    END = "end"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done in a tick.

    Attributes:
        act: Whose command is due.
        action: float32 [A] where ``act`` is COMMAND; it has not passed the safety envelope.
        why: For the operator.
        flush: Whether all that the policy has planned or been asked for is void.
        rearm: Whether a stopped robot may go on, from where it is.
    """

    act: Act
    action: NDArray[np.float32] | None = None
    why: str = ""
    flush: bool = False
    rearm: bool = False


class OperatorLane:
    """One robot's operator, over all its episodes.

    Args:
        robot: What is driven.
        console: Where messages come from.
        rewinder: Plans and checks auto-rewind.
    """

    def __init__(self, robot: RobotSpec, console: Console, rewinder: Rewinder) -> None:
        self._robot, self._console, self._rewinder = robot, console, rewinder
        self._grippers, self._rates = robot.gripper_mask, robot.rate_mask
        self._latched = ""  # why the robot was stopped between two episodes
        self._stops = 0  # by anybody, in all episodes
        self.begin("teleop")

    def begin(self, mode: Mode, max_ticks: int | None = None) -> None:
        """A new episode, which waits for ``start``; ``max_ticks`` count from there."""
        self.machine = Intervention(mode)
        self.counters: Counter[str] = Counter()
        self._max_ticks, self._started_at = max_ticks, -1
        self._hand: Message | None = None
        self._armed = False  # the dead-man was seen released since the last hold that it did not cause
        self._why = self._called = ""
        self._flush = self._rearm = False
        self._rewinder.reset()
        if self._latched:
            self.machine.apply("estop", 0)
            self._why = self._latched

    def step(self, k: int, now_ns: int, obs: Observation, status: Status, last: NDArray[np.float32]) -> Order:
        """Take what has come and say what tick ``k`` is for.

        Args:
            k: Control step.
            now_ns: Monotonic time.
            obs: Of this tick.
            status: The driver's.
            last: float32 [A], the command sent last, or where the robot was at the start.
        """
        self._flush = self._rearm = False
        self._rewinder.observe(now_ns, obs, status)
        for message in self._console.receive():
            self._take(message, k, now_ns, obs, status)
        if self._called and self.machine.policy_may_act:
            self._lose(k, self._called)
        self._called = ""
        self._finish(k, status)
        frame_age_s = (now_ns - min([obs.t_capture_ns, *obs.image_t_ns.values()])) * 1e-9
        stale = f"a camera's newest frame is {frame_age_s:.1f} s old" if frame_age_s > MAX_FRAME_AGE_S else ""
        self._dead_man(k, now_ns, obs, stale)
        act, action = self._choose(k, obs, status, last, stale)
        return Order(act, action, stale if act is Act.HOLD and stale else self._why, self._flush, self._rearm)

    def trip(self, k: int, why: str) -> None:
        """The safety envelope has stopped the robot: only the operator lets it go on."""
        self._stop(k, f"safety: {why}")

    def call(self, why: str) -> None:
        """Where the policy acts at the next step, hold, and let the operator say what comes: ``engage`` lets it go on.

        One who has taken over already needs no call.
        """
        self._called = why

    def idle(self) -> str:
        """Answer messages while no episode runs; why the robot must be stopped, empty where it need not.

        A re-arm need not know of all stops: nothing moves before a ``start``.
        """
        stop = ""
        for message in self._console.receive():
            name = message.get("name", message["kind"])
            if name == "estop":
                stop = self._latched = "emergency stop"
                self._stops += 1
            if message["kind"] == "event":
                rearm = name == "rearm" and bool(self._latched)
                self._latched = "" if rearm else self._latched
                error = "" if rearm or stop else "no episode is running"
                self._console.post("reply", id=message["id"], ok=not error, error=error, phase="", tick=-1)
        return stop

    def labels(self, k: int) -> dict[str, Any]:
        """Columns of the frame recorded at tick ``k``; once for each frame that is recorded."""
        self.counters[f"{self.machine.control_source.name.lower()} frames"] += 1
        return self.machine.labels(k)

    def measured(self, now_ns: int, obs: Observation) -> dict[str, Any]:
        """Columns of a frame that are measured: age of the hand behind it, likeness to demonstrations."""
        human = self.machine.control_source is Control.HUMAN
        return {
            "cmd_age_ms": (self._age_ms(now_ns) or 0.0) if human else 0.0,
            "in_dist_score": self._rewinder.unfamiliarity(obs) or 0.0,
        }

    def publish(self, k: int, now_ns: int, obs: Observation, **facts: Any) -> None:
        """Let whoever watches know how things are."""
        m = self.machine
        self._console.post(
            "state",
            tick=k,
            t_ns=now_ns,
            phase=str(m.phase),
            resumes=str(m.resumes),
            mode=m.mode,
            state=[float(x) for x in obs.state],
            stops=self._stops,
            segment_type=int(m.segment_type),
            segment_index=m.segment_index,
            control_source=int(m.control_source),
            cmd_age_ms=self._age_ms(now_ns),
            in_dist_score=self._rewinder.unfamiliarity(obs),
            **facts,
        )

    def _age_ms(self, now_ns: int) -> float | None:
        return None if self._hand is None else (now_ns - int(self._hand["t_ns"])) * 1e-6

    def summary(self) -> dict[str, Any]:
        """How the episode went, plain values."""
        m = self.machine
        return {
            "mode": m.mode,
            "phase": str(m.phase),
            "takeovers": m.takeovers,
            "recoveries": m.recoveries,
            "corrections": m.corrections,
            "why": self._why,
            **self.counters,
        }

    # -- messages -------------------------------------------------------------------------------------------------

    def _take(self, message: Message, k: int, now_ns: int, obs: Observation, status: Status) -> None:
        kind = message["kind"]
        if kind == "teleop":
            self._hand = message
            self._armed = self._armed or not (message["engaged"] or message["rewind"])
        elif kind == "lost":
            self._hand, self._armed = None, False
            if self.machine.recording:
                self._lose(k, "the operator has left")
        elif kind == "estop":
            self._stop(k, "emergency stop")
        elif kind == "event":
            error = ""
            try:
                if message["name"] == "rearm" and message.get("stops") != self._stops:
                    raise Refused("the robot has been stopped again: look, then re-arm")
                self._event(message["name"], k, now_ns, obs, status)
            except Refused as e:
                error = str(e)
            phase = str(self.machine.phase)
            self._console.post("reply", id=message["id"], ok=not error, error=error[:200], phase=phase, tick=k)

    def _event(self, name: str, k: int, now_ns: int, obs: Observation, status: Status) -> None:
        if name == "estop":
            self._stop(k, "emergency stop")
        elif name == "lost":
            raise Refused("'lost' is what the node says, not the operator")
        elif name in ("engage", "rewind"):  # the hand does these; the event only says that it means it
            if name == "rewind" and (why := self._rewinder.plan(now_ns, obs)):
                raise Refused(f"no auto-rewind: {why}")
            if not (self.machine.phase is Phase.HOLD or self.machine.human_may_act):
                raise Refused(f"'{name}' in phase {self.machine.phase}: take over first")
            self._armed = True
        else:
            self._apply(name, k)
            if name == "start":
                self._started_at = k
            elif name == "rearm":
                self._rearm, self._latched = True, ""
            elif name == "takeover":
                self._armed = False
            self._why = name.replace("_", " ")

    def _apply(self, event: str, k: int) -> None:
        before = self.machine.policy_may_act
        after = self.machine.apply(event, k) is Phase.AUTO
        self._flush |= before != after

    def _stop(self, k: int, why: str) -> None:
        self._latched = self._why = why
        self._stops += 1
        self._armed = False
        if self.machine.phase is not Phase.ESTOP:
            self._apply("estop", k)

    def _lose(self, k: int, why: str) -> None:
        self._why = why
        self.counters["holds"] += 1
        self._apply("lost", k)

    # -- the tick -------------------------------------------------------------------------------------------------

    def _finish(self, k: int, status: Status) -> None:
        """End the episode where the robot, or the time, says so."""
        m = self.machine
        done, active = status.get("done", False), m.resumes
        over = self._max_ticks is not None and self._started_at >= 0 and k - self._started_at >= self._max_ticks
        if m.phase in (Phase.ESTOP, Phase.RESET) or m.phase.ended:  # what the operator said in this tick stands
            return
        if not (done or (over and active in (Phase.AUTO, Phase.TELEOP))):
            return
        success = status.get("is_success", False)
        for event in ("success" if success else "fail", "subtask_done" if success else "discard", "discard"):
            try:
                self._apply(event, k)
            except Refused:
                continue
            self._why = "the task is done" if success else "the task cannot be done any more" if done else "time is up"
            return

    def _dead_man(self, k: int, now_ns: int, obs: Observation, stale: str) -> None:
        m, hand = self.machine, self._hand
        age_s = np.inf if hand is None else (now_ns - hand["t_ns"]) * 1e-9
        wanted = ""
        if hand is not None and age_s <= STALE_S and not stale:
            wanted = "rewind" if hand["rewind"] else "engage" if hand["engaged"] else ""
        if m.human_may_act:
            doing = "rewind" if m.control_source is Control.AUTO_REWIND else "engage"
            if not wanted:
                released = hand is not None and age_s <= STALE_S and not stale
                self._armed = self._armed and released
                self._lose(k, stale or ("dead-man released" if released else f"the hand is {age_s:.1f} s old"))
            elif wanted != doing:
                self._engage(wanted, k, now_ns, obs)
        elif m.phase is Phase.HOLD and wanted and self._armed:
            self._engage(wanted, k, now_ns, obs)

    def _engage(self, wanted: str, k: int, now_ns: int, obs: Observation) -> None:
        why = self._rewinder.plan(now_ns, obs) if wanted == "rewind" else ""
        try:
            if why:
                raise Refused(f"no auto-rewind: {why}")
            self._apply(wanted, k)
            self._why = ""
        except Refused as e:
            self._armed = False  # asked once, not at every tick for as long as the key is held
            if self.machine.human_may_act:
                self._lose(k, str(e))
            self._why = str(e)

    def _choose(
        self, k: int, obs: Observation, status: Status, last: NDArray[np.float32], stale: str
    ) -> tuple[Act, NDArray[np.float32] | None]:
        m = self.machine
        if m.phase is Phase.ESTOP:
            return Act.STOP, None
        if m.phase.ended:
            return Act.END, None
        if m.policy_may_act:
            return (Act.HOLD if stale else Act.POLICY), None
        if not m.human_may_act:
            return Act.HOLD, None
        if m.control_source is not Control.AUTO_REWIND:
            return Act.COMMAND, self._human(last)
        waypoint, why = self._rewinder.next(obs, status, last)
        if waypoint is None:
            self._armed = False
            self._lose(k, why)
            return Act.HOLD, None
        return Act.COMMAND, waypoint

    def _human(self, last: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the hand commands, float32 [A]; its velocity is integrated but where velocities are commanded."""
        assert self._hand is not None
        target, velocity = self._hand["target"], self._hand["velocity"]
        if target is not None:
            return np.array(target, np.float32)
        wanted = np.zeros(len(last)) if velocity is None else np.array(velocity)
        if self._robot.action_kind == "delta":
            base = np.where(self._grippers, last, 0.0)
        else:
            base = last.astype(np.float64)
        command = np.where(self._rates, wanted, base + wanted * self._robot.dt)
        return np.clip(command, self._robot.action_low, self._robot.action_high).astype(np.float32)
