"""Who acts in an episode, and what its frames are labelled: the state machine of human interventions.

RaC ("Recovery and Correction", arXiv 2509.07953) has two rules. Rule 1: a takeover is a recovery to familiar states,
then a correction until the current sub-task is done. Rule 2: the episode ends where the intervention ends. HG-DAgger
(mode ``hg_dagger``) adds one edge to the same machine, by which control goes back to the policy.

    RESET  start -> AUTO (in mode teleop: HOLD, then TELEOP)       any phase  discard -> END_DISCARDED
    AUTO   takeover -> HOLD;  success | fail -> END_AUTO_*         moving     lost -> HOLD, estop -> ESTOP
    HOLD   engage | rewind -> what was held, after a takeover RECOVERY; cancel, before any motion -> AUTO
    RECOVERY    recovered -> CORRECTION                            ESTOP      rearm -> HOLD
    CORRECTION  slip -> RECOVERY;  subtask_done | success -> END_INTERVENED   TELEOP  success | fail -> END_DEMO
    hg_dagger only: RECOVERY | CORRECTION  hand_back -> AUTO; RECOVERY  success -> END_INTERVENED

``subtask_done`` says nothing of the task: unless the robot knows better it has not succeeded. ``success`` says it has.

The operator's page, the control loop, the recorder and the simulated operator all run this machine, so it imports
nothing but the standard library and has no clock of its own.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, Literal

Mode = Literal["teleop", "rac", "hg_dagger"]
MODES: tuple[Mode, ...] = ("teleop", "rac", "hg_dagger")
EVENTS = (
    *("start", "takeover", "engage", "rewind", "recovered", "slip", "subtask_done", "hand_back", "cancel"),
    *("success", "fail", "discard", "lost", "estop", "rearm"),
)


class Phase(StrEnum):
    """Where an episode is."""

    RESET = "reset"
    AUTO = "auto"
    HOLD = "hold"
    RECOVERY = "recovery"
    CORRECTION = "correction"
    TELEOP = "teleop"
    END_AUTO_SUCCESS = "end_auto_success"
    END_AUTO_FAIL = "end_auto_fail"
    END_INTERVENED = "end_intervened"
    END_DEMO = "end_demo"
    END_DISCARDED = "end_discarded"
    ESTOP = "estop"

    @property
    def ended(self) -> bool:
        return self.value.startswith("end_")

    @property
    def moving(self) -> bool:
        """Whether somebody acts; these are the phases whose frames are recorded."""
        return self in _SEGMENT_OF


class Segment(IntEnum):
    """Column ``segment_type``."""

    DEMO = 0
    AUTONOMOUS = 1
    RECOVERY = 2
    CORRECTION = 3


class Control(IntEnum):
    """Column ``control_source``."""

    POLICY = 0
    HUMAN = 1
    AUTO_REWIND = 2
    SCRIPTED = 3


_SEGMENT_OF = {
    Phase.AUTO: Segment.AUTONOMOUS,
    Phase.RECOVERY: Segment.RECOVERY,
    Phase.CORRECTION: Segment.CORRECTION,
    Phase.TELEOP: Segment.DEMO,
}


class Refused(Exception):
    """An event that the present phase has no edge for; nothing has changed. The text is for the operator."""


class Intervention:
    """The state machine of one episode. Deterministic: the same events at the same ticks give the same labels.

    An event of tick k is applied before tick k's action is dispatched, so it counts for the frame of tick k.

    Args:
        mode: ``teleop`` records demonstrations and has no policy; ``rac`` and ``hg_dagger`` as above.
    """

    def __init__(self, mode: Mode) -> None:
        if mode not in MODES:
            raise ValueError(f"mode '{mode}' is none of {', '.join(MODES)}")
        self.mode = mode
        self.segment_index = 0
        self.takeovers = 0  # that led to human or rewind motion
        self.recoveries = 0  # segments with at least one frame, as are
        self.corrections = 0
        self._active = Phase.RESET  # what runs, or would but for a hold or the e-stop
        self._holding = self._stopped = False
        self._source = Control.POLICY
        self._moved = False  # since the last takeover
        self._frames = 0  # of the present segment

    @property
    def phase(self) -> Phase:
        if self._stopped:
            return Phase.ESTOP
        return Phase.HOLD if self._holding else self._active

    @property
    def resumes(self) -> Phase:
        """The phase that ``engage`` leads to from HOLD; otherwise the phase itself, also below an e-stop."""
        return self._active

    @property
    def segment_type(self) -> Segment:
        """Of a frame recorded now; DEMO or AUTONOMOUS before the start."""
        return _SEGMENT_OF.get(self._active, Segment.DEMO if self.mode == "teleop" else Segment.AUTONOMOUS)

    @property
    def control_source(self) -> Control:
        return self._source

    @property
    def intervened(self) -> bool:
        """Whether anybody but the policy has moved the robot in this episode."""
        return self.takeovers > 0

    @property
    def policy_may_act(self) -> bool:
        return self.phase is Phase.AUTO

    @property
    def human_may_act(self) -> bool:
        return self.recording and self._active is not Phase.AUTO

    @property
    def recording(self) -> bool:
        return self.phase.moving

    def labels(self, tick: int) -> dict[str, Any]:
        """The columns that follow from the phase, for the frame recorded at ``tick``; call it for recorded frames only.

        Returns:
            ``intervention`` bool, ``segment_type``, ``segment_index`` and ``control_source`` int.
        """
        if not self.recording:
            raise ValueError(f"tick {tick}: frames are not recorded in phase {self.phase}")
        if self._frames == 0:
            self.recoveries += self._active is Phase.RECOVERY
            self.corrections += self._active is Phase.CORRECTION
        self._frames += 1
        return {
            "intervention": self._active in (Phase.RECOVERY, Phase.CORRECTION),
            "segment_type": int(self.segment_type),
            "segment_index": self.segment_index,
            "control_source": int(self._source),
        }

    def apply(self, event: str, tick: int) -> Phase:
        """Take an event.

        Args:
            event: One of ``EVENTS``.
            tick: When; for the text of a refusal alone.

        Returns:
            The phase after it.

        Raises:
            Refused: There is no such event here.
        """
        if event not in EVENTS:
            raise Refused(f"'{event}' is no event; there are {', '.join(EVENTS)}")
        if self._stopped and event not in ("rearm", "discard"):
            raise Refused(f"tick {tick}: '{event}' while stopped; rearm first")
        refusal = getattr(self, f"_{event}")()
        if refusal:
            raise Refused(f"tick {tick}: '{event}' in phase {self.phase}: {refusal}")
        return self.phase

    # One method an event: changes the state and returns None, or changes nothing and says why not. -----------------

    def _start(self) -> str | None:
        if self._active is not Phase.RESET:
            return "the episode has started; reset for a new one"
        self._active = Phase.TELEOP if self.mode == "teleop" else Phase.AUTO
        self._holding = self.mode == "teleop"
        self._source = Control.HUMAN if self.mode == "teleop" else Control.POLICY
        return None

    def _takeover(self) -> str | None:
        if self._active is not Phase.AUTO:
            return "the policy is not in control"
        self._enter(Phase.RECOVERY, Control.HUMAN, hold=True)
        self._moved = False
        return None

    def _engage(self) -> str | None:
        if not self._active.moving or (self._active is Phase.AUTO and not self._holding):
            return "there is nothing to engage; take over first"
        self._holding = False
        if self._active is not Phase.AUTO:
            self._source = Control.HUMAN
            self._motion()
        return None

    def _rewind(self) -> str | None:
        if self._active is not Phase.RECOVERY:
            return "only a recovery rewinds"
        self._holding, self._source = False, Control.AUTO_REWIND
        self._motion()
        return None

    def _recovered(self) -> str | None:
        if self._active is not Phase.RECOVERY:
            return "there is no recovery"
        if self._frames == 0:
            return "nothing of the recovery is recorded yet"
        self._enter(Phase.CORRECTION, Control.HUMAN, hold=self._holding)
        return None

    def _slip(self) -> str | None:
        if self._active is not Phase.CORRECTION:
            return "there is no correction"
        if self._frames == 0:
            return "nothing of the correction is recorded yet"
        self._enter(Phase.RECOVERY, Control.HUMAN, hold=self._holding)
        return None

    def _subtask_done(self) -> str | None:
        if self._active is not Phase.CORRECTION:
            return "a sub-task is done by a correction; mark the recovery first"
        if self._frames == 0:
            return "nothing of the correction is recorded yet"
        self._end(Phase.END_INTERVENED)
        return None

    def _hand_back(self) -> str | None:
        if self.mode != "hg_dagger":
            return "in mode rac the episode ends with the intervention (rule 2)"
        if self._active not in (Phase.RECOVERY, Phase.CORRECTION) or not self._moved:
            return "there is no intervention"
        self._enter(Phase.AUTO, Control.POLICY, hold=False)
        return None

    def _cancel(self) -> str | None:
        if not (self._holding and self._active is Phase.RECOVERY and not self._moved):
            return "only a takeover before any motion can be cancelled"
        self._enter(Phase.AUTO, Control.POLICY, hold=False)
        return None

    def _success(self) -> str | None:
        if self._active is Phase.CORRECTION or (self._active is Phase.RECOVERY and self.mode == "hg_dagger"):
            if self._frames == 0:
                return "nothing of the intervention is recorded yet"
            self._end(Phase.END_INTERVENED)
            return None
        return self._outcome(Phase.END_AUTO_SUCCESS)

    def _fail(self) -> str | None:
        return self._outcome(Phase.END_AUTO_FAIL)

    def _outcome(self, end: Phase) -> str | None:
        if self._active not in (Phase.AUTO, Phase.TELEOP):
            by_hand = self._active.moving
            return "an intervention ends by subtask_done, success or discard" if by_hand else "nothing is running"
        self._end(Phase.END_DEMO if self._active is Phase.TELEOP else end)
        return None

    def _discard(self) -> str | None:
        if self._active in (Phase.RESET, Phase.END_DISCARDED):
            return "there is nothing to discard"
        self._end(Phase.END_DISCARDED)
        return None

    def _lost(self) -> str | None:
        if not self._active.moving:
            return "nothing is moving"
        self._holding = True
        return None

    def _estop(self) -> str | None:
        self._stopped = True
        self._holding = self._active.moving
        return None

    def _rearm(self) -> str | None:
        if not self._stopped:
            return "the robot is not stopped"
        self._stopped = False
        return None

    def _enter(self, phase: Phase, source: Control, hold: bool) -> None:
        self.segment_index += self._frames > 0
        self._frames = 0
        self._active, self._source, self._holding = phase, source, hold

    def _end(self, phase: Phase) -> None:
        self._active, self._holding = phase, False

    def _motion(self) -> None:
        if not self._moved and self._active is not Phase.TELEOP:
            self.takeovers += 1
        self._moved = True
