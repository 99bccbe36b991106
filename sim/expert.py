"""Scripted experts: bounded, smooth tool targets towards the goal that a task names for the current state."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from sim import arm
from sim.env import ArmEnv

# How far ahead of the measured tool a target may lie, per second of control step.
LEAD = 0.55  # m/s
YAW_LEAD = 2.0  # rad/s
# A target moves at most this fraction of the rate that the robot's description allows.
RATE_MARGIN = 1 / 1.3
NOISE_SHARE = 0.5  # share of steps that noise touches
# A stretch of errors: control steps, how far off it is (m, standard deviation), and with which probabilities the arm
# goes elsewhere altogether and the gripper does the opposite.
STRETCH, MISS, ASTRAY, FLIPPED = (3, 11), 0.02, 0.5, 0.3
# Where it then goes: x, y, z in metres.
LOW, HIGH = np.array([0.32, -0.22, 0.02]), np.array([0.60, 0.22, 0.28])


class Expert:
    """Acts for a task with full knowledge of the simulator.

    It keeps no memory: the goal is a function of the simulator's state, so it recovers from disturbances and
    can label any state a policy or a person brought the robot to.

    Args:
        env: A ``sim`` environment, in any control mode; wrappers are looked through.
        noise: Standard deviation of :meth:`perturb`, as a fraction of the largest move per control step.
        seed: Seed of noise and errors.
        errors: Share of stretches in which :meth:`perturb` errs.
    """

    def __init__(self, env: gym.Env, noise: float = 0.0, seed: int = 0, errors: float = 0.0) -> None:
        self._env: ArmEnv = env.unwrapped  # type: ignore[assignment]
        self._noise, self._errors = noise, errors
        self._rng = np.random.default_rng(seed)
        self._left = 0  # steps of the stretch
        self._arm = self._env.arm
        self._ik = arm.InverseKinematics.of(self._arm)
        self._rates = np.array([d.max_rate for d in self._arm.tool])

    def act(self) -> NDArray[np.float32]:
        """The expert's next action for the current state; never noisy, so it may serve as a label."""
        goal = self._env.expert_goal()
        return self.towards(goal.position, goal.yaw, goal.gripper)

    def towards(self, position: NDArray[np.float64], yaw: float, gripper: float) -> NDArray[np.float32]:
        """The next action towards a tool pose (m [3], rad, ratio), as bounded as the expert's own."""
        env = self._env
        tool, last, dt = env.tool, env.tool_command, env.spec_robot.dt
        move = position - tool[:3]
        distance = float(np.linalg.norm(move))
        move *= min(1.0, LEAD * dt / max(distance, 1e-9))
        turn = np.clip(arm.wrap_angle(yaw - tool[3]), -YAW_LEAD * dt, YAW_LEAD * dt)
        target = np.array([*(tool[:3] + move), tool[3] + turn, gripper])
        step = self._rates * dt * RATE_MARGIN
        target[:4] = np.clip(target[:4], last[:4] - step, last[:4] + step)
        return self._action(self._legal(target))

    def perturb(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """The action to execute instead of ``action``: half of the steps get noise, the gripper never does.

        Recording ``action`` as the label while executing the perturbed one teaches recovery (Laskey et al.,
        "DART: Noise Injection for Robust Imitation Learning", 2017). Noise of single steps averages out, so that the
        arm never misses, and a policy that misses goes on as if it had not. Errors last: for some steps the arm is off
        in one direction, or goes elsewhere, some of the time with the opposite gripper.
        """
        if self._errors:
            action = self._err(action)
        noise = self._rng.normal(0.0, 1.0, 4)
        if self._noise == 0.0 or self._rng.random() > NOISE_SHARE:
            return action
        tool = self._tool(action)
        return self._moved(tool[:4] + self._noise * self._rates * self._env.spec_robot.dt * noise, tool[4])

    def _err(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        """The action of the stretch's error, if it has one."""
        rng = self._rng
        if self._left == 0:
            self._left = int(rng.integers(*STRETCH))
            self._wrong, self._astray, self._flip = rng.random(3) < (self._errors, ASTRAY, FLIPPED)
            self._offset, self._place = rng.normal(0.0, MISS, 3), np.append(rng.uniform(LOW, HIGH), rng.uniform(-1, 1))
        self._left -= 1
        if not self._wrong:
            return action
        tool = self._tool(action)
        gripper = 1.0 - tool[4] if self._flip else tool[4]
        if self._astray:
            return self.towards(self._place[:3], self._place[3], gripper)
        return self._moved(tool[:4] + np.append(self._offset, 0.0), gripper)

    def _moved(self, pose: NDArray[np.float64], gripper: float) -> NDArray[np.float32]:
        """The action that commands a tool pose [4], as far as the robot moves in one step."""
        last, step = self._env.tool_command[:4], self._rates * self._env.spec_robot.dt
        return self._action(self._legal(np.append(np.clip(pose, last - step, last + step), gripper)))

    def _action(self, tool: NDArray[np.float32]) -> NDArray[np.float32]:
        """The action of the environment's control mode that commands a tool target [5] now."""
        env = self._env
        if env.control_mode == "joint_abs":
            last, step = env.joint_command, self._arm.max_joint_rate * env.spec_robot.dt * RATE_MARGIN
            joints = np.clip(self._ik.solve(tool, last), last - step, last + step)
            return np.append(joints, tool[4]).astype(np.float32)
        if env.control_mode == "ee_delta":
            reach = arm.DELTA_RATE * env.spec_robot.dt
            return np.clip((tool - env.tool_command) / reach, -1.0, 1.0).astype(np.float32)
        return tool

    def _tool(self, action: NDArray[np.float32]) -> NDArray[np.float64]:
        """Inverse of :meth:`_action`."""
        env = self._env
        if env.control_mode == "joint_abs":
            return np.append(self._ik.forward(action[:-1]), action[-1])
        if env.control_mode == "ee_delta":
            return env.tool_command + action * arm.DELTA_RATE * env.spec_robot.dt
        return action.astype(np.float64)

    def _legal(self, target: NDArray) -> NDArray[np.float32]:
        return np.clip(target, *self._arm.tool_range).astype(np.float32)


def make_expert(env: gym.Env, noise: float = 0.0, seed: int = 0, errors: float = 0.0) -> Expert:
    """The scripted expert of a ``sim`` environment, see :class:`Expert`."""
    return Expert(env, noise, seed, errors)
