"""Insert a square peg into a square socket."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import arm, objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=100,
        rewards={
            "reached": 0.1,  # the tool is at the peg's grip
            "grasped": 0.2,  # both pads hold the peg
            "lifted": 0.1,  # it is off the table, held
            "aligned": 0.2,  # it is above the socket to within the chamfer
            "inserted": 0.4,  # it is DEPTH deep in the socket: success
        },
    )


PEG = (0.012, 0.012, 0.045)  # m, half sizes
GRIP = 0.022  # m, where the peg is held, above its centre
CLEARANCE = 0.003  # m, each side
SOCKET_HEIGHT = 0.030  # m, of the walls; the lips stand on them
DEPTH = 0.020  # m
SYMMETRY = np.pi / 2
WALL = 0.008  # m, half the thickness of the socket's walls
CHAMFER = 0.010  # m, width and height of the slope that leads the peg in
BOARD = 0.0015  # m, half the thickness of that slope
LOWER = 0.02  # m, how far ahead the peg is lowered: gently, so that it slides off the slopes
MOUTH = SOCKET_HEIGHT + CHAMFER
# What is carried low catches on the slopes' outer edges and turns in the hand.
ALIGNED = 0.006  # m, what the slopes put right
HOVER = 0.03  # m, above the mouth, where it is aligned
OVER = 0.01  # m, above the mouth: lower than this it moves up alone


def add_socket(
    body: mujoco.MjsBody,
    hole: tuple[float, float],
    height: float = SOCKET_HEIGHT,
    chamfer: float = CHAMFER,
    wall_rgb: objects.Colour = (0.25, 0.36, 0.50),
    lip_rgb: objects.Colour = (0.55, 0.66, 0.78),
) -> None:
    """Four walls round a hole of half sizes ``hole`` [2] metres, with slopes on them that lead what is held in."""
    # Slippery whatever the peg is made of: a jammed peg is a contact artefact more often than physics.
    slick: dict[str, Any] = {"priority": 1, "friction": [0.1, 0.005, 0.0001]}
    for i in range(4):
        angle = i * np.pi / 2
        quat = [np.cos(angle / 2), 0.0, 0.0, np.sin(angle / 2)]
        out = np.array([np.cos(angle), np.sin(angle), 0.0])
        across, along = hole[i % 2], hole[1 - i % 2]
        # Pinwheel: each wall covers one corner.
        side = np.array([-out[1], out[0], 0.0]) * WALL
        wall = (across + WALL) * out + side + [0.0, 0.0, height / 2]
        size = [WALL, along + WALL, height / 2]
        objects.add_geom(body, f"{body.name}_wall_{i}", "box", size, wall_rgb, pos=list(wall), quat=quat, **slick)
        # A thin board on top, its upper face rising outwards from the wall's inner edge at 45 degrees.
        turned = np.zeros(4)
        mujoco.mju_mulQuat(turned, np.array(quat), np.array([np.cos(np.pi / 8), 0.0, -np.sin(np.pi / 8), 0.0]))
        run, sink = chamfer / 2, BOARD / np.sqrt(2)
        lip = (across + run + sink) * out + [0.0, 0.0, height + run - sink]
        board = [chamfer / np.sqrt(2), along + chamfer, BOARD]
        objects.add_geom(body, f"{body.name}_lip_{i}", "box", board, lip_rgb, pos=list(lip), quat=list(turned), **slick)


def lower_into(env: ArmEnv, body: str, socket: str, bottom: float, symmetry: float) -> ToolGoal:
    """Bring what is held over a socket and down into it.

    Args:
        env: The environment.
        body: What is held.
        socket: A body with :func:`add_socket`.
        bottom: Height of the lower end of what is held, metres.
        symmetry: Turning by this, radians, changes nothing.
    """
    tool, goal = env.tool, env.position(socket)
    turn = env.yaw(socket, symmetry) - env.yaw(body, symmetry)
    turn -= symmetry * np.round(turn / symmetry)
    low, high = env.arm.tool_range[:, 3]
    if not low < tool[3] + turn < high:  # the equal turn that the tool can make
        turn -= float(np.copysign(symmetry, turn))
    offset = goal[:2] - env.position(body)[:2]
    aligned = np.hypot(*offset) < ALIGNED and abs(turn) < 0.1
    if aligned or (bottom < MOUTH and np.hypot(*offset) < CHAMFER):
        rise = max(SOCKET_HEIGHT - DEPTH - 0.006 - bottom, -LOWER)
    else:
        rise = MOUTH + HOVER - bottom
    # Rise first, then move: what is held must not sweep the socket's lips.
    aside = offset if rise < HOVER - OVER else np.zeros(2)
    return ToolGoal(tool[:3] + [*aside, rise], arm.wrap_angle(tool[3] + turn), 0.0)


class Insert(ArmEnv):
    name = "insert"
    config = default_config()
    variants = ({"object": "peg"},)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"insert the {variant['object']} into the socket"

    @property
    def subjects(self) -> tuple[str, str]:
        return "peg", "socket"

    def build(self, spec: mujoco.MjSpec) -> None:
        peg = spec.worldbody.add_body(name="peg")
        peg.add_freejoint(name="peg")
        objects.add_geom(peg, "peg", "box", list(PEG), (0.93, 0.55, 0.16), mass=0.08)
        socket = spec.worldbody.add_body(name="socket", mocap=True)
        add_socket(socket, (PEG[0] + CLEARANCE, PEG[1] + CLEARANCE))

    def place(self, rng: np.random.Generator) -> None:
        peg, socket = objects.scatter(rng, 2, (0.38, 0.54), (-0.16, 0.16), 0.13)
        objects.lay(self, "peg", peg, PEG[2], rng.uniform(-0.5, 0.5))
        objects.lay(self, "socket", socket, yaw=rng.uniform(-0.4, 0.4))

    def progress(self) -> tuple[bool, ...]:
        peg, held = self.position("peg"), self.grasped("peg")
        reached = bool(np.linalg.norm(peg + [0, 0, GRIP] - self.tool[:3]) < 0.02)
        offset = float(np.hypot(*(peg - self.position("socket"))[:2]))
        upright = skills.tilted(self, "peg") > 0.97
        bottom = peg[2] - PEG[2]
        inserted = offset < 2 * CLEARANCE and upright and bottom < SOCKET_HEIGHT - DEPTH
        return reached, held, held and bottom > 0.02, held and offset < CHAMFER, bool(inserted)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        tip = self.position("peg") - PEG[2] * self.data.body("peg").xmat[[2, 5, 8]]
        mouth = self.position("socket") + [0.0, 0.0, MOUTH]
        named = {"peg_tip": tip.astype(np.float32), "socket_mouth": mouth.astype(np.float32)}
        return objects.points(self, "peg", "socket") | named

    def expert_goal(self) -> ToolGoal:
        peg = self.position("peg")
        if not self.grasped("peg"):
            grip = peg + [0.0, 0.0, GRIP]
            return skills.grasp(self, "peg", grip, self.yaw("peg", SYMMETRY), clearance=0.06)
        return lower_into(self, "peg", "socket", peg[2] - PEG[2], SYMMETRY)
