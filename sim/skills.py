"""Reactive pieces that tasks compose their experts from; each maps the current state to a tool goal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim import arm
from sim.env import ArmEnv
from sim.task import ToolGoal

AT = 0.006  # m, horizontal error at which the tool counts as above its goal
SERVO_LAG = 0.04  # s, how far the joints trail a moving target
NEAR = 0.05  # m, further out than this the tool keeps its full clearance
UPRIGHT = 0.96  # cosine of the tilt in the hand from which something is stood on the table again
STANDS = 0.8  # cosine of the tilt from which it rights itself when it is let go
ON, PRESSED = 0.004, 0.004  # m, above the table: what touches it; below: what is pressed on it
ROLLED = 0.03  # m, how far ahead the tool moves then


def over(
    env: ArmEnv, position: NDArray, yaw: float, gripper: float, clearance: float = 0.08, ahead: NDArray | float = 0.0
) -> ToolGoal:
    """Go to ``position`` from above: down a funnel, ``clearance`` metres higher while more than NEAR away.

    ``ahead`` [3] is how far a moving position will have moved by the time the tool follows, metres.
    """
    tool = env.tool
    distance = float(np.hypot(*(position[:2] - tool[:2])))
    turn = abs(arm.wrap_angle(yaw - tool[3]))
    rise = clearance * np.clip(max((distance - AT) / NEAR, (turn - 0.1) / 0.5), 0.0, 1.0)
    height = position[2] + rise
    # Below the funnel: rise before moving sideways.
    aside = position[:2] if tool[2] > height - 0.5 * clearance else tool[:2]
    return ToolGoal(np.array([*aside, height]) + ahead, yaw, gripper)


def grasp(
    env: ArmEnv,
    geom: str,
    position: NDArray,
    yaw: float,
    clearance: float = 0.08,
    opening: float = 1.0,
    velocity: NDArray | None = None,
) -> ToolGoal:
    """Take the geom at ``position``; once it is held the goal is to stay there.

    Args:
        env: The environment.
        geom: What the pads shall touch.
        position: Where, [3] metres.
        yaw: Tool yaw, radians.
        clearance: Height of the approach, metres.
        opening: Opening ratio of the approach.
        velocity: Velocity [3] of the object, m/s; the tool aims where it will be.
    """
    tool = env.tool
    # While the fingers close, the object centres itself and may leave the tight tolerance that started them.
    slack = 1.0 if tool[4] > 0.9 * opening else 2.5
    there = np.hypot(*(position[:2] - tool[:2])) < slack * AT and abs(position[2] - tool[2]) < slack * 0.008
    turned = abs(arm.wrap_angle(yaw - tool[3])) < slack * 0.12
    ahead = 0.0 if velocity is None else velocity * (env.spec_robot.dt + SERVO_LAG)
    if env.grasped(geom) or (there and turned):
        return ToolGoal(position + ahead, yaw, 0.0)
    return over(env, position, yaw, opening, clearance, ahead)


def put(env: ArmEnv, body: str, position: NDArray, yaw: float, clearance: float = 0.08) -> ToolGoal:
    """Carry the held body to ``position`` (of its centre) and open the gripper there."""
    offset = position - env.position(body)
    if np.hypot(*offset[:2]) < AT and abs(offset[2]) < 0.006:
        return ToolGoal(env.tool[:3], env.tool[3], 1.0)
    return over(env, env.tool[:3] + offset, yaw, 0.0, clearance)


def lowest(env: ArmEnv, body: str) -> float:
    """Height of the lowest point of the boxes around what a body touches with, metres."""
    own = (env.model.body(body).id == env.model.geom_bodyid) & (env.model.geom_contype > 0)
    down = env.data.geom_xmat[own, 6:]  # [n, 3], of each geom's axes
    middle, half = env.model.geom_aabb[own, :3], env.model.geom_aabb[own, 3:]
    return float((env.data.geom_xpos[own, 2] + (down * middle).sum(1) - (np.abs(down) * half).sum(1)).min())


def tilted(env: ArmEnv, body: str) -> float:
    """Cosine of the angle between a body's axis and the vertical: 1 where it stands, 0 where it lies."""
    return float(env.data.body(body).xmat[8])


def stand_up(env: ArmEnv, body: str, spots: NDArray[np.float64], clearance: float = 0.08) -> ToolGoal:
    """Stand what is held on the table, at the nearest of ``spots`` [n, 2], metres: there it is rolled over an edge."""
    tool, low = env.tool, lowest(env, body)
    spot = spots[np.argmin(np.linalg.norm(spots - tool[:2], axis=1))]
    if low > ON:
        return over(env, np.array([*spot, tool[2] - low - PRESSED]), tool[3], 0.0, clearance)
    if tilted(env, body) > STANDS:
        return ToolGoal(tool[:3], tool[3], 1.0)
    leans = env.data.body(body).xmat[[2, 5]]  # where its upper end is
    back = ROLLED * leans / max(float(np.linalg.norm(leans)), 1e-6)
    return ToolGoal(tool[:3] - [*back, low + PRESSED], tool[3], 0.0)


def retreat(env: ArmEnv, height: float = 0.20) -> ToolGoal:
    """Straight up with an open gripper."""
    return ToolGoal(np.array([*env.tool[:2], height]), env.tool[3], 1.0)
