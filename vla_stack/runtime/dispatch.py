"""What an executor says at each control step: a request to the policy, and what to send to the robot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Continuation

NO_ACTION = "no action is due"  # why a robot holds, or after a while stops, where its policy does not keep up


class State(Enum):
    """RUN: the plan is followed. HOLD: nothing to follow, stand still. STOP: safe stop until somebody re-arms."""

    RUN = "run"
    HOLD = "hold"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Help:
    """A person is to look before the policy goes on, e.g. because a failure monitor calls; ``why`` says so."""

    why: str


@dataclass(frozen=True, slots=True)
class Request:
    """Ask the policy, with the observation of control step ``k_obs``; answer with a chunk of the same rid and epoch.

    Attributes:
        rid: Counts the requests of an executor.
        epoch: The executor's.
        origin: Control step of the first action that is wanted.
        k_obs: Control step of the observation.
        seed: Of the policy's noise.
        deadline: Control step at which the executor gives up on this request.
        continuation: The plan to continue, where the mode has one.
        state: float32 [A], where the plan will have led to at ``origin``: what the policy is to be shown instead of the
            measured ``state[:A]``. None: what is measured.
    """

    rid: int
    epoch: int
    origin: int
    k_obs: int
    seed: int
    deadline: int
    continuation: Continuation | None = None
    state: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What to send at one control step.

    Attributes:
        action: float32 [A] command; in HOLD the last command, zero for velocities and forces (zeros, gripper kept,
            where actions are deltas), or None before the first; None in STOP.
        state: RUN, HOLD or STOP.
        chunk_rid: Request id of the chunk behind the action, -1 if none.
        index: Position of the action in that chunk, -1 if none.
        k_obs: Control step of the observation behind the action, -1 if none.
        following: float32 [A], the plan's action of the next control step; None where there is none.
    """

    action: NDArray[np.float32] | None
    state: State
    chunk_rid: int = -1
    index: int = -1
    k_obs: int = -1
    following: NDArray[np.float32] | None = None
