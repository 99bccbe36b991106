"""A simulated operator: watches a policy, takes over, recovers, corrects. Sends the same events as a person's page.

It decides from privileged state and acts through the model of a person (``human.py``). What it does is a function of
the scenes it is shown, its seed and the episode's number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.intervention import Phase
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.human import Human, HumanConfig
from vla_stack.methods.rac.scene import BRING, TAKE, Detector, Scene, Subtasks

OUT = 0.05  # m a tick, at most, that a jammed object is pulled up by
HOLD_S = 0.2  # s for which a person goes on when the task is done, so that letting go becomes a label


@dataclass(frozen=True)
class OperatorConfig:
    """How the operator works; the arms of the experiment differ in the first two alone.

    Attributes:
        recover: Rule 1: go back to familiar states before correcting; otherwise act from the failure state at once.
        end: Rule 2: the episode ends with the intervention; otherwise control goes back to the policy.
        rewind: Ask for an auto-rewind first; where it is refused, or has ended, the hand recovers.
        human: The person.
        settle_s: Seconds for which a state must be familiar, or a sub-task done, before it is called so.
        give_up_s: Seconds of one intervention after which the episode is discarded.
    """

    recover: bool = True
    end: bool = True
    rewind: bool = False
    human: HumanConfig = field(default_factory=HumanConfig)
    settle_s: float = 0.2
    give_up_s: float = 15.0


@dataclass(frozen=True)
class Decision:
    """What the operator does at one tick: events in order, and a tool target float [5] where it moves the robot."""

    events: tuple[str, ...] = ()
    command: NDArray[np.float64] | None = None


class SimulatedOperator:
    """One operator in one episode.

    Args:
        config: How it works.
        expert: ``sim.make_expert(env)``; acts for the state that the environment is in.
        familiar: States of the demonstrations; None for an operator that only demonstrates.
        dt: Control period, seconds.
        seed: Seed of the experiment.
        episode: Number of the episode.
    """

    CLEAR = 0.13  # m, height above the table at which the tool retreats
    NEAR = 0.03  # m from the start pose that a recovery aims for, within which it has arrived

    def __init__(
        self, config: OperatorConfig, expert: Any, familiar: FamiliarStates | None, dt: float, seed: int, episode: int
    ) -> None:
        self.config, self._expert, self._familiar, self._dt = config, expert, familiar, dt
        self.human = Human(config.human, dt, seed, episode)
        self._detector, self._subtasks = Detector(dt), Subtasks()
        self._settle, self._hold = max(1, round(config.settle_s / dt)), round(HOLD_S / dt)
        self._noticed: int | None = None  # tick at which a reaction is due
        self._blind_until = 0
        self._false = False
        self._reached = 0  # furthest sub-task of the policy: the one that an intervention brings to its end
        self._begin(0)

    def step(self, tick: int, phase: Phase, scene: Scene, last_command: NDArray[np.float64]) -> Decision:
        """Decide for a tick.

        Args:
            tick: Control tick; every tick of the episode in order.
            phase: Of the episode's machine at the start of the tick.
            scene: What is seen.
            last_command: The command that was sent last, float [5].
        """
        subtask = self._subtasks.update(scene)
        if phase is Phase.AUTO:
            return self._watch(tick, scene, subtask)
        if phase is Phase.HOLD:
            return self._take_hold(tick, scene, subtask, last_command)
        if phase is not Phase.TELEOP and (tick - self._since) * self._dt > self.config.give_up_s:
            return Decision(("discard",))
        if phase is Phase.RECOVERY:
            return self._recover(tick, scene, subtask)
        if phase in (Phase.CORRECTION, Phase.TELEOP):
            return self._correct(tick, scene, subtask, phase)
        return Decision()

    def _watch(self, tick: int, scene: Scene, subtask: int) -> Decision:
        if subtask == scene.over:
            return Decision()
        self._reached = max(self._reached, subtask)
        failing = self._detector.update(scene, subtask)
        if self._noticed is None and tick >= self._blind_until:
            if failing and self.human.misses():
                self._blind_until = tick + round(2.0 / self._dt)
            elif failing:
                self._noticed, self._false = tick + self.human.reaction_ticks(), False
            elif self.human.false_alarm():
                self._noticed, self._false = tick, True
        if self._noticed is None or tick < self._noticed:
            return Decision()
        self._noticed = tick + self.human.reaction_ticks()  # from the takeover to the first motion
        return Decision(("takeover",))

    def _take_hold(self, tick: int, scene: Scene, subtask: int, command: NDArray[np.float64]) -> Decision:
        if self._noticed is not None and tick < self._noticed:
            return Decision()
        self._noticed = None
        self._detector.reset()
        if self._false:
            return Decision(("cancel",))
        self._begin(tick)
        self._target = subtask
        self.human.engage(command)
        return Decision(("rewind" if self.config.rewind else "engage",), self._move(tick, scene, subtask))

    def _begin(self, tick: int) -> None:
        self._since, self._count, self._target = tick, 0, 0
        self._goal: NDArray[np.float64] | None = None

    def _recover(self, tick: int, scene: Scene, subtask: int) -> Decision:
        """Go back to the start region of the current sub-task, or, without rule 1, correct and mark what happens."""
        assert self._familiar is not None
        if subtask != self._target and self.config.recover:  # dropped it, or picked it up on the way
            self._target, self._goal, self._count = subtask, None, 0
        if self.config.recover:
            done = self._back(scene, subtask)
        else:  # what the expert does until the state is a demonstrated one again is called recovery
            known = subtask < scene.over and self._familiar.score(scene.features, subtask) <= 1.0
            done = known or subtask > self._target
        self._count = self._count + 1 if done else 0
        if self._count >= self._settle:
            self._count = 0
            return Decision(("recovered",), self.human.move(self._expert.act().astype(np.float64), tick))
        return Decision((), self._move(tick, scene, subtask))

    def _correct(self, tick: int, scene: Scene, subtask: int, phase: Phase) -> Decision:
        intention = self._expert.act().astype(np.float64)
        if phase is Phase.TELEOP:
            return Decision((), self.human.move(intention, tick))
        if (subtask < self._target or scene.stuck) and self.config.recover:  # it slipped, or jams again
            self._target, self._goal, self._count = subtask, None, 0
            return Decision(("slip",), self._move(tick, scene, subtask))
        self._target = min(self._target, subtask)
        self._count = self._count + 1 if subtask > self._target else 0
        if self._count < (self._hold if subtask == scene.over else self._settle):
            return Decision((), self.human.move(intention, tick))
        if subtask <= self._reached:  # it has again what the policy had dropped; what the policy failed at comes now
            self._target, self._count = subtask, 0
            return Decision((), self.human.move(intention, tick))
        return Decision(("subtask_done",) if self.config.end or subtask == scene.over else ("hand_back",))

    def _move(self, tick: int, scene: Scene, subtask: int) -> NDArray[np.float64]:
        if not self.config.recover or subtask == scene.over:
            return self.human.move(self._expert.act().astype(np.float64), tick)
        goal, yaw, gripper = self._way_back(scene, subtask)
        return self.human.move(self._expert.towards(goal, yaw, gripper).astype(np.float64), tick)

    def _way_back(self, scene: Scene, subtask: int) -> tuple[NDArray[np.float64], float, float]:
        """Where a recovery goes now: release what is supported, lift, retreat above the start region, descend."""
        assert self._familiar is not None
        tool, take = scene.tool, subtask % 2 == TAKE
        if scene.stuck:  # out, first of all, with the gripper closed or, where it has let go, by taking hold again
            return np.array([*tool[:2], tool[2] + OUT]), tool[3], 0.0
        if (back := self._goal) is None:
            start = self._familiar.sample_start(scene.features, subtask, self.human.choices)
            at = scene.object if take else scene.goal + start[3:6]
            self._goal = back = at - start[:3]
        if take and (scene.held or scene.wrong) and tool[2] > 0.035:
            return np.array([*tool[:2], tool[2] - 0.03]), tool[3], 0.0  # never let go in the air
        gripper = 1.0 if take else 0.0
        if take and tool[4] < 0.7 and scene.distance < 0.05:
            return tool[:3].copy(), tool[3], 1.0  # open before moving away
        aside = float(np.hypot(*(back - tool[:3])[:2]))
        if aside > 0.015 and tool[2] < min(self.CLEAR, back[2] + 0.03):
            return np.array([*tool[:2], self.CLEAR + 0.02]), tool[3], gripper
        return back, 0.0 if take else tool[3], gripper

    def _back(self, scene: Scene, subtask: int) -> bool:
        """Whether a recovery is where it wanted to go, with an open gripper where the next thing is a grasp."""
        assert self._familiar is not None
        if self._goal is None or subtask == scene.over or scene.stuck:
            return False
        far = float(np.linalg.norm(self._goal - scene.tool[:3]))
        familiar = self._familiar.start_score(scene.features, subtask) <= 1.0  # advises: a person who is there decides
        return (subtask % 2 == BRING or scene.tool[4] > 0.7) and far < (self.NEAR if familiar else self.NEAR / 2)
