"""What a simulated operator sees of a simulated task: where things are, which sub-task is current, what has failed.

For tasks of ``sim`` that move one object to one goal, or several objects, one after another, each to its own. Sub-tasks
alternate: an even one takes an object up, the odd one after it brings that object to its goal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError

FEATURES = 7  # of Scene.features
OPENING_SCALE = 0.05  # m that a fully opened gripper counts
FIELD = np.array([[0.30, -0.27], [0.64, 0.27]])  # m, where an object can be reached
NEAR_GOAL = 0.045  # m, within which an object that was let go counts as brought to its goal
ENGAGED, LEFT = 0.045, 0.08  # m, distance at which an attempt opens and, with hysteresis, ends
TAKE, BRING = 0, 1  # kinds of sub-tasks: what is left of their number, divided by two


@dataclass(frozen=True)
class Scene:
    """One tick of a task.

    Attributes:
        tool: Measured tool [5]: m, m, m, rad, ratio.
        object: Position [3] of what is moved now, m.
        goal: Position [3] of where to, m.
        held: Both pads touch the object.
        wrong: Something else is held.
        upright: The object stands as it was laid down.
        stuck: The object is jammed on its way to the goal: advancing does not get it out.
        taken: An object is taken up: what an even sub-task wants.
        done: Objects that are where they are to go.
        objects: How many there are.
    """

    tool: NDArray[np.float64]
    object: NDArray[np.float64]
    goal: NDArray[np.float64]
    held: bool
    wrong: bool
    upright: bool
    stuck: bool
    taken: bool
    done: int
    objects: int

    @classmethod
    def of(cls, env: gym.Env) -> Scene:
        """Read a task's environment.

        Raises:
            UserError: The task has no such sub-tasks.
        """
        task: Any = env.unwrapped
        stages: tuple[str, ...] = getattr(task, "stages", ())
        progress = tuple(bool(p) for p in task.progress()) if hasattr(task, "subjects") else ()
        if progress and "lifted" in stages:
            taken, done, objects = progress[stages.index("lifted")], int(progress[-1]), 1
        elif progress and stages[0] == "grasped_1":  # and so on, each with the stage of its goal behind it
            done, objects = sum(progress[1::2]), len(stages) // 2
            taken = done < objects and progress[2 * done]
        else:
            name = getattr(task, "name", env)
            raise UserError(f"no simulated operator for '{name}'", "the tasks are place, stack, insert and jam")
        moved, goal = task.subjects
        others = [b for b in task.keypoints() if b not in (moved, "tcp") and b.startswith("cube_")]
        tilt = task.data.body(moved).xmat[8]
        return cls(
            tool=task.tool,
            object=task.position(moved),
            goal=task.position(goal),
            held=task.grasped(moved),
            wrong=any(task.grasped(o) for o in others),
            upright=bool(tilt > 0.9),
            stuck=hasattr(task, "jammed") and bool(task.jammed(task.target)),
            taken=taken,
            done=done,
            objects=objects,
        )

    @property
    def over(self) -> int:
        """Number of the sub-task after the last one: all is done."""
        return 2 * self.objects

    @property
    def features(self) -> NDArray[np.float32]:
        """What is compared with demonstrations, float32 [7], metres: object from tool, object from goal, opening."""
        opening = OPENING_SCALE * self.tool[4]
        return np.array([*(self.object - self.tool[:3]), *(self.object - self.goal), opening], np.float32)

    @property
    def brought(self) -> bool:
        """Whether the object is above its goal."""
        return bool(np.hypot(*(self.object - self.goal)[:2]) < NEAR_GOAL)

    @property
    def distance(self) -> float:
        """From the tool to the object, m."""
        return float(np.linalg.norm(self.object - self.tool[:3]))

    @property
    def hopeless(self) -> bool:
        """Whether the object is where nobody can take it up."""
        return bool((self.object[:2] < FIELD[0]).any() or (self.object[:2] > FIELD[1]).any() or not self.upright)


class Subtasks:
    """Which sub-task is current: 0 take up, 1 bring to the goal, 2 take up the next, and so on; ``Scene.over`` at the
    end. Feed it every tick's scene."""

    def __init__(self) -> None:
        self.current = self._done = 0

    def update(self, scene: Scene) -> int:
        if scene.taken or scene.done > self._done:  # what is merely touched while the tool retreats stays done
            self._done = scene.done
        if scene.taken and scene.done < scene.objects:
            self.current = 2 * self._done + BRING
        elif self.current < 2 * self._done:
            self.current = 2 * self._done
        elif self.current % 2 == BRING and not scene.held and not scene.brought:
            self.current -= 1
        return self.current


def potential(scene: Scene, subtask: int) -> float:
    """Progress within a sub-task, m; grows as it nears its end, and out of a jam as the object comes up."""
    if subtask % 2 == TAKE:
        return float(scene.object[2] - scene.distance)
    if scene.stuck:
        return float(scene.object[2])
    offset = scene.object - scene.goal
    return float(-np.hypot(*offset[:2]) - 0.5 * max(offset[2], 0.0))


class Detector:
    """Notices that a policy fails: stall, drop, empty or wrong grasp, object out of reach.

    Args:
        dt: Control period, seconds.
    """

    STALL, STEP = 2.0, 0.005  # s without an improvement of so many metres
    STUCK = 1.0  # the same of what is jammed, which pushing makes worse
    DEBOUNCE = 0.25  # s

    def __init__(self, dt: float) -> None:
        self._stall = round(self.STALL / dt), round(self.STUCK / dt)
        self._debounce = max(1, round(self.DEBOUNCE / dt))
        self.reset()

    def reset(self) -> None:
        """Forget; to be called when control changes hands."""
        self._subtask, self._stuck, self._best, self._since, self._bad = -1, False, -np.inf, 0, 0

    def update(self, scene: Scene, subtask: int) -> bool:
        """Whether the policy has failed, as seen at this tick."""
        dropped = self._subtask % 2 == BRING and subtask == self._subtask - 1
        if (subtask, scene.stuck) != (self._subtask, self._stuck):
            self._bad = self._debounce if dropped else 0 if subtask != self._subtask else self._bad
            self._subtask, self._stuck, self._best, self._since = subtask, scene.stuck, -np.inf, 0
        value = potential(scene, subtask)
        self._since += 1
        if value > self._best + self.STEP:
            self._best, self._since = value, 0
        empty = subtask % 2 == TAKE and scene.tool[4] < 0.3 and not scene.held
        bad = empty or scene.wrong or scene.hopeless
        self._bad = self._bad + 1 if bad else max(0, self._bad - 1) if not dropped else self._bad
        return self._bad >= self._debounce or self._since >= self._stall[scene.stuck]


class Attempts:
    """Counts attempts, and recoveries after failed ones.

    An attempt opens when tool and object are together (taking up: closer than ``ENGAGED``; bringing: object above its
    goal) and fails when they part with the sub-task undone. A recovery is a failed attempt after which the state is
    back in the start region of that or an earlier sub-task for 0.3 s.
    """

    SETTLE = 0.3  # s

    def __init__(self, dt: float) -> None:
        self._settle = max(1, round(self.SETTLE / dt))
        self._open: int | None = None
        self._failed: int | None = None
        self._back = 0
        self.attempts = [0, 0]
        self.recoveries = 0

    def update(self, scene: Scene, subtask: int, starting: bool) -> None:
        """Take a tick; ``starting`` is whether the state is in the start region of the current sub-task."""
        if subtask == scene.over:
            return
        if self._open is None and _engaged(scene, subtask, 1.0):
            self._open, self._failed = subtask, None
            self.attempts[subtask % 2] += 1
        elif self._open is not None and subtask > self._open:
            self._open = None
        elif self._open is not None and (subtask < self._open or not _engaged(scene, subtask, LEFT / ENGAGED)):
            self._failed, self._open, self._back = self._open, None, 0
        if self._failed is not None and subtask <= self._failed:
            self._back = self._back + 1 if starting else 0
            if self._back == self._settle:
                self.recoveries, self._failed = self.recoveries + 1, None


def _engaged(scene: Scene, subtask: int, slack: float) -> bool:
    if subtask % 2 == TAKE:
        return scene.distance < ENGAGED * slack
    return bool(np.hypot(*(scene.object - scene.goal)[:2]) < NEAR_GOAL * slack)
