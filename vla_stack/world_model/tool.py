"""Where a robot's numbers say its tool is, and the other way round: a world model is told poses, whatever the robot.

Robots are commanded in one of three ways: the tool's pose, how the tool is to move, or joints. For joints somebody has
to say how the arm is built: it is one of the arms that are known here, or a MuJoCo model or URDF lies beside the
dataset's description of the robot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim.arm import ARM7, DELTA_RATE, InverseKinematics
from sim.so101 import SO101
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec
from vla_stack.world_model.poses import POSE

ARMS = {"native/arm7": ARM7, "native/so101": SO101, "lerobot/so101_follower": SO101}  # by a robot's name
FILES = ("kinematics.xml", "kinematics.urdf")  # beside a dataset's meta/robot.json
POINT = "tcp"  # the site, or body, that is the tool
TOOL = ("tcp_x.pos", "tcp_y.pos", "tcp_z.pos", "tcp_yaw.pos")
POINTS = (("hand_x.pos", "hand_y.pos", "hand_z.pos", "gripper.pos"),)  # tools that do not turn, as MetaWorld's


class Tool(Protocol):
    """Of one robot. Poses are x, y, z in metres and yaw in radians in the base's frame, and the opening ratio."""

    def measured(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Poses [N, 5] of measured states [N, S]."""

    def commanded(self, action: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        """The pose [5] that an action [A] commands, after the command ``before`` [5]."""

    def state(self, pose: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        """The state [S] that would be measured in a pose [5], after the state ``before`` [S]."""


def tool_of(robot: RobotSpec, kinematics: str = "") -> Tool:
    """How to read a robot.

    Args:
        robot: Its state and action.
        kinematics: MJCF of the arm, see :func:`kinematics_beside`; empty for one of :data:`ARMS`.

    Raises:
        UserError: It is none whose tool could be found.
    """
    if tuple(d.name for d in robot.action) in POINTS and robot.action_kind == "absolute":
        return _PointTargets()
    arm, known = _arm(robot, kinematics), robot.name in ARMS
    targets = tuple(d.name for d in robot.state[: len(TOOL)]) == TOOL and len(robot.action) == POSE
    if targets and (known or robot.action_kind == "absolute") and (arm or len(robot.state) == POSE):
        return _ToolTargets(robot, arm)
    if robot.action_kind == "absolute" and arm and not targets:
        return _JointTargets(robot, *arm)
    raise UserError(
        f"the world model is told tool poses, {robot.name} measures {', '.join(d.name for d in robot.state)} and takes "
        f"{robot.action_kind} actions",
        f"put a MuJoCo model or URDF of the arm beside meta/robot.json, as {' or '.join(FILES)}; its joints named "
        f"as the robot's ('elbow' of 'elbow.pos'), a site or link '{POINT}' where the tool is",
    )


def _arm(robot: RobotSpec, kinematics: str) -> tuple[InverseKinematics, tuple[str, ...]] | None:
    """Kinematics of a robot's arm and the names of its joints; None where nobody knows how it is built."""
    if (arm := ARMS.get(robot.name)) is not None:
        return InverseKinematics.of(arm), arm.joints
    if not kinematics:
        return None
    model = mujoco.MjModel.from_xml_string(kinematics)
    joints = tuple(model.joint(j).name for j in range(model.njnt))
    measured = {d.name.removesuffix(".pos") for d in robot.state if d.unit == "rad"}
    first = next((n for n, name in enumerate(joints) if name not in measured), len(joints))
    if not first:
        raise UserError(
            f"the first joint of the kinematic model is {joints[0]!r}, {robot.name} has {', '.join(sorted(measured))}",
            "name the model's joints as the robot's, in radians, the arm's before those of the gripper",
        )
    return InverseKinematics(model, model.jnt_range[:first].mean(1)), joints[:first]


def check_commands_poses(robot: RobotSpec, what: str) -> None:
    """Raise a :class:`UserError` where ``what`` would give poses to a robot that takes something else."""
    if tuple(d.name for d in robot.action[: len(TOOL)]) != TOOL or robot.action_kind != "absolute":
        raise UserError(
            f"{what} commands poses of the tool, {robot.name} is commanded in {robot.action[0].name} and the like",
            "use a world model of a robot in control mode ee_abs",
        )


def kinematics_beside(root: Path) -> str:
    """MJCF of the bare arm whose model lies beside a dataset's description of its robot; empty where none does.

    Shapes are left out: where the joints are is all that is needed, and files of meshes stay where they are.

    Raises:
        UserError: MuJoCo cannot read it, or it does not say where the tool is.
    """
    path = next((p for name in FILES if (p := root / "meta" / name).is_file()), None)
    if path is None:
        return ""
    try:
        spec = mujoco.MjSpec.from_file(str(path))
        spec.compiler.fusestatic = False
        spec.compiler.boundmass = spec.compiler.boundinertia = 1e-6  # bodies without shapes weigh nothing
        for kind in (spec.actuators, spec.sensors, spec.equalities, spec.keys, spec.pairs, spec.excludes, spec.tendons):
            for thing in list(kind):
                spec.delete(thing)
        for kind in (spec.geoms, spec.cameras, spec.lights, spec.meshes, spec.materials, spec.textures, spec.hfields):
            for thing in list(kind):
                spec.delete(thing)
        if spec.site(POINT) is None:
            if spec.body(POINT) is None:
                raise UserError(f"{path} has no site and no link '{POINT}'", "put one where the tool is")
            spec.body(POINT).add_site(name=POINT)
        spec.compile()
        return str(spec.to_xml())
    except (ValueError, RuntimeError) as e:
        raise UserError(f"{path}: {' '.join(str(e).split())[:200]}", "give a model that MuJoCo loads") from None


class _ToolTargets:
    """The action commands the tool, absolutely or as moves; joints are measured behind the tool's pose, if at all."""

    def __init__(self, robot: RobotSpec, arm: tuple[InverseKinematics, tuple[str, ...]] | None) -> None:
        places = [d.name.removesuffix(".pos") for d in robot.state]
        self._ik, self._joints = None, [places.index(n) for n in (arm[1] if arm else ()) if n in places]
        if arm and len(self._joints) == len(arm[1]):
            self._ik = arm[0]
        self._step = DELTA_RATE / robot.rate_hz if robot.action_kind == "delta" else None
        low, high = zip(*((d.low, d.high) for d in robot.state[:POSE]), strict=True)
        self._range = np.array(low, np.float32), np.array(high, np.float32)

    def measured(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.array(states[:, :POSE], np.float32)

    def commanded(self, action: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._step is None:
            return np.array(action[:POSE], np.float32)
        return np.clip(before + action * self._step, *self._range).astype(np.float32)

    def state(self, pose: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        state = np.array(before, np.float32)
        state[:POSE] = pose
        if self._ik is not None:
            state[self._joints] = self._ik.solve(pose[:4].astype(np.float64), before[self._joints].astype(np.float64))
        return state


class _PointTargets:
    """State and action begin with the tool's position and end with its opening; it does not turn."""

    def measured(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.insert(states[:, : POSE - 1], 3, 0.0, axis=1).astype(np.float32)

    def commanded(self, action: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.insert(action, 3, 0.0).astype(np.float32)

    def state(self, pose: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        state = np.array(before, np.float32)
        state[: POSE - 1] = np.delete(pose, 3)
        return state


class _JointTargets:
    """The action commands joints and a gripper; what it commands is measured first, the tool's pose perhaps later."""

    def __init__(self, robot: RobotSpec, ik: InverseKinematics, joints: tuple[str, ...]) -> None:
        names = [d.name.removesuffix(".pos") for d in robot.action]
        grippers = [i for i, d in enumerate(robot.action) if d.kind == "gripper"]
        wrong = [n for n in joints if n not in names or robot.action[names.index(n)].unit != "rad"]
        if wrong or len(grippers) != 1:
            raise UserError(
                f"{robot.name} commands {', '.join(names)}, a world model needs one gripper and, in radians, "
                f"{', '.join(joints)}",
                "train it on one arm whose joints are named so",
            )
        self._ik, self._joints, self._gripper = ik, [names.index(n) for n in joints], grippers[0]
        d = robot.action[self._gripper]
        low, high = (d.low, d.high) if np.isfinite([d.low, d.high]).all() else (0.0, 1.0)
        self._closed, self._span = low, high - low
        places = [d.name for d in robot.state]
        self._tool = [places.index(n) for n in TOOL] if set(TOOL) <= set(places) else None

    def _pose(self, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of what is commanded, or measured of it, [A]."""
        opening = (numbers[self._gripper] - self._closed) / self._span
        return np.append(self._ik.forward(numbers[self._joints]), opening).astype(np.float32)

    def measured(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.stack([self._pose(s) for s in states])

    def commanded(self, action: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._pose(action)

    def state(self, pose: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
        state = np.array(before, np.float32)
        state[self._joints] = self._ik.solve(pose[:4].astype(np.float64), before[self._joints].astype(np.float64))
        state[self._gripper] = self._closed + pose[4] * self._span
        if self._tool is not None:
            state[self._tool] = pose[:4]
        return state
