"""A person who intervenes in reinforcement learning, by the channels that drive a robot (runtime/operator_port.py).

As in HIL-SERL (Luo et al., arXiv:2410.21845): what the person does is executed in place of the policy's action, is
marked as a person's, and goes to the demonstrations as well. The events are those of the robot
(``vla_stack.intervention``, mode hg_dagger): ``takeover``, the dead-man, ``hand_back``; ``cancel`` before any motion.
While a takeover is held the simulation waits, so that no idle frames are learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from multiprocessing import Pipe
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.making import is_task
from vla_stack.envs.vector import EnvStep
from vla_stack.errors import UserError
from vla_stack.intervention import Intervention, Phase, Refused
from vla_stack.methods.replay_buffer import Source
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Decision, Episode, Query, Reply
from vla_stack.rollout.records import IDLE
from vla_stack.runtime.clock import Clock, RealClock
from vla_stack.runtime.link import Link, Message
from vla_stack.runtime.operator_lane import Console
from vla_stack.runtime.operator_port import OperatorPort
from vla_stack.schema import Observation, RobotSpec

WAIT_S = 0.02  # between looks at the console while the simulation waits


class HumanIntervention:
    """A person beside the policy in the first environment; what a plan makes its agents of.

    Args:
        console: The operator's messages.
        rates: SI units a second that an action of 1 stands for, [a].
        dt: Control period, seconds; steps are paced by it, as a person cannot act faster.
        clock: Time.
        stopped: Whether the run is asked to stop, which ends the waiting.
    """

    def __init__(
        self, console: Console, rates: NDArray, dt: float, clock: Clock, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._console, self._rates, self._dt, self._clock, self._stopped = console, rates, dt, clock, stopped
        self.machine = Intervention("hg_dagger")
        self.machine.apply("start", 0)
        self._teleop: Message = {"engaged": False, "velocity": None}
        self._tick, self._due = 0, clock.now_ns()

    def __call__(self, episode: Episode) -> PolicyAgent | PolicyOrPerson:
        """Who acts in an episode; by its row, as environments are made anew after each evaluation."""
        return PolicyAgent(episode) if episode.row else PolicyOrPerson(episode, self)

    def action(self) -> NDArray[np.float32] | None:
        """The person's action [a] in [-1, 1] of the next control step; None where the policy acts."""
        self._tick += 1
        self._due = max(self._due + round(self._dt * 1e9), self._clock.now_ns())
        self._clock.sleep_until_ns(self._due)
        self._poll()
        while self.machine.phase is Phase.HOLD and not self._stopped():
            self._clock.sleep_until_ns(self._clock.now_ns() + round(WAIT_S * 1e9))
            self._poll()
        phase = self.machine.phase
        self._console.post("state", phase=str(phase), tick=self._tick, run="run", why="")
        if not self.machine.human_may_act:
            return None
        self.machine.labels(self._tick)
        velocity = self._teleop["velocity"]
        wanted = np.zeros(len(self._rates)) if velocity is None else np.asarray(velocity) / self._rates
        return np.clip(wanted, -1.0, 1.0).astype(np.float32)

    def _poll(self) -> None:
        for message in self._console.receive():
            if message["kind"] == "teleop":
                self._teleop = message
            elif message["kind"] == "lost" or (message["kind"] == "event" and message["name"] == "lost"):
                self._release()
            elif message["kind"] == "event":
                self._event(message)
        machine = self.machine
        if machine.phase is Phase.HOLD and self._teleop["engaged"]:
            machine.apply("engage", self._tick)
        elif machine.human_may_act and not self._teleop["engaged"]:
            machine.apply("lost", self._tick)

    def _event(self, message: dict[str, Any]) -> None:
        error = ""
        try:
            self.machine.apply(message["name"], self._tick)
        except Refused as e:
            error = str(e)
        if (
            self.machine.phase.ended or self.machine.phase is Phase.ESTOP
        ):  # an episode's end is the environment's to say
            self._begin()
        phase = str(self.machine.phase)
        self._console.post("reply", id=message["id"], ok=not error, error=error[:200], phase=phase, tick=self._tick)

    def _release(self) -> None:
        """The person has left: the policy goes on."""
        self._teleop = {"engaged": False, "velocity": None}
        self._begin()

    def _begin(self) -> None:
        self.machine = Intervention("hg_dagger")
        self.machine.apply("start", self._tick)


class PolicyOrPerson:
    """The policy's plan, until a person acts; after that what was planned is void, and the policy is asked anew."""

    def __init__(self, episode: Episode, human: HumanIntervention) -> None:
        self._episode, self._human = episode, human
        self._policy: PolicyAgent | None = PolicyAgent(episode)

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        if (action := self._human.action()) is not None:
            self._policy = None
            return Decision(action, IDLE, label=Source.HUMAN)
        if self._policy is None:
            self._policy = PolicyAgent(self._episode)
        return (yield from self._policy.act(k, observation, now))

    def result(self) -> None:
        """Nothing: whose step it was is told with each of them."""


def at_endpoint(
    env_id: str, robot: RobotSpec, endpoint: str, stopped: Callable[[], bool]
) -> tuple[HumanIntervention, OperatorPort]:
    """A person who connects to ``endpoint`` with a :class:`vla_stack.runtime.operator_client.OperatorClient`.

    Raises:
        UserError: The environment is none of ours in moves of the tool, whose units are known; or the endpoint is in
            use.
    """
    if not is_task(env_id) or robot.action_kind != "delta":
        raise UserError(f"nobody can intervene in {env_id}", "use a task of sim, or leave 'method.operator' empty")
    from sim.arm import DELTA_RATE

    (ours, theirs), (_, stops) = Pipe(), Pipe()
    port = OperatorPort(theirs, stops, robot, endpoint)
    return HumanIntervention(Link(ours), DELTA_RATE, robot.dt, RealClock(), stopped), port
