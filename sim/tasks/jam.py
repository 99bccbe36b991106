"""Seat four cubes in the sockets of their colours, with a grip that slips and sockets that jam.

Neither is anybody's fault. A grasp gives way in SLIPS of all cases when the cube is first lifted; a cube jams on its
way into the socket in JAMS. From a jam advancing fails, and makes it worse: the cube has to be backed out, the further
the longer it was pushed, and entered again; pushed for WEDGED seconds it is stuck for good. Both are decided by the
episode's seed and by how many grasps and entries there have been, so that a replay is exact.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal
from sim.tasks.insert import add_socket


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=360,
        rewards={  # of the first cube, the second and so on: both pads hold it; it is seated and the gripper has let go
            "grasped_1": 0.1, "seated_1": 0.15,
            "grasped_2": 0.1, "seated_2": 0.15,
            "grasped_3": 0.1, "seated_3": 0.15,
            "grasped_4": 0.1, "seated_4": 0.15,  # success
        },
        start=(0.42, 0.0, 0.18),
    )  # fmt: skip


SLIPS, JAMS = 0.25, 0.4  # shares of grasps and of entries
COLOURS = {**objects.COLOURS, "yellow": (0.93, 0.78, 0.16)}
HALF = 0.018  # m, half an edge of a cube
GRIP = 0.012  # m, above its centre, where it is held
SLID = 0.006  # m, that a cube may have slid up between the fingers, as one does that is pushed into a jam
HOLE = HALF + 0.003  # m, half the width of a socket
HEIGHT, CHAMFER = 0.007, 0.006  # m, of a socket's walls and of its lips
MOUTH = HEIGHT + CHAMFER
SPACING = 0.086  # m, between sockets
ABOVE = 0.025  # m, beside a socket: from there a cube is aligned and lowered
LOWER = 0.012  # m a control step
LIFTED = 0.03  # m, under a cube when a grasp is put to the test
SLIP_S, SLIP_FORCE = 0.2, 17.0  # s, for which the fingers are held open against their drive, and N on each
WEDGE = 0.003  # m, half the height of what a cube jams on
UNSEEN = 5  # geom group that no camera shows
STUCK = 0.008  # m, height of a jammed cube's foot
WEDGED = 3.0  # s
# A cube has entered when it is over the socket and lower than NEAR above its mouth: no command moves it past that in
# one control step. It has left when it is CLEAR above the mouth, and WORSE more for each second of pushing; metres.
NEAR, CLEAR, WORSE = 0.050, 0.055, 0.012
# Entries of the simulation's user data. Of the grasp: how many there were, whether this one was tested, until when it
# slips. Then of each cube: how often it entered, whether it is inside now, whether it jams, seconds it was pushed.
GRASPS, TESTED, SLIPPING, CUBES = 0, 1, 2, 3
ENTRIES, INSIDE, JAMMED, PUSHED = range(4)
FELT = 2  # of JAMMED: 1 as long as it is bound to jam and has not yet


class Jam(ArmEnv):
    """Args besides those of every task:

    slips: Share of grasps that give way.
    jams: Share of entries that jam.
    retreats: Whether the expert backs out of a jam; without, it is one that can only advance.
    """

    name = "jam"
    config = default_config()
    variants = ({"object": "cube"},)

    def __init__(self, *, slips: float = SLIPS, jams: float = JAMS, retreats: bool = True, **options: Any) -> None:
        self.slips, self.jams, self.retreats = slips, jams, retreats
        super().__init__(**options)

    @classmethod
    def instruct(cls, variant: dict[str, str]) -> str:
        return f"put every {variant['object']} into the socket of its colour"

    @property
    def target(self) -> str:
        """Colour of the cube that is next: the one that is held, or the first that is not seated."""
        left = [c for c in COLOURS if not self.seated(c)]
        held = [c for c in left if self.grasped(objects.cube_name(c))]
        return [*held, *left, next(iter(COLOURS))][0]

    @property
    def subjects(self) -> tuple[str, str]:
        """The cube that is next, and its socket."""
        return objects.cube_name(self.target), f"socket_{self.target}"

    def build(self, spec: mujoco.MjSpec) -> None:
        for colour, rgb in COLOURS.items():
            objects.add_cube(spec, objects.cube_name(colour), rgb, HALF)
            soft = tuple(0.45 + 0.55 * c for c in rgb)
            socket = spec.worldbody.add_body(name=f"socket_{colour}", mocap=True)
            add_socket(socket, (HOLE, HOLE), HEIGHT, CHAMFER, rgb, soft)  # type: ignore[arg-type]
            wedge = spec.worldbody.add_body(name=f"wedge_{colour}", mocap=True)
            objects.add_geom(wedge, f"wedge_{colour}", "box", [HALF, HALF, WEDGE], (0.3, 0.3, 0.3), group=UNSEEN)

    def place(self, rng: np.random.Generator) -> None:
        cubes = objects.scatter(rng, len(COLOURS), (0.34, 0.46), (-0.17, 0.17), 0.085)
        for colour, spot in zip(COLOURS, cubes, strict=True):
            objects.lay(self, objects.cube_name(colour), spot, HALF, rng.uniform(-0.5, 0.5))
        x, y = rng.uniform((0.55, -0.02), (0.58, 0.02))
        for i, colour in enumerate(rng.permutation(list(COLOURS))):
            spot = x, y + (i - 1.5) * SPACING
            objects.lay(self, f"socket_{colour}", spot)
            objects.lay(self, f"wedge_{colour}", spot, -0.1)

    def happen(self) -> None:
        self._grip()
        for i, colour in enumerate(COLOURS):
            self._enter(i, colour)

    def _grip(self) -> None:
        d, u = self.data, self.data.userdata
        held = [c for c in map(objects.cube_name, COLOURS) if self.grasped(c)]
        lifted = any(self.position(c)[2] - HALF > LIFTED for c in held)
        if lifted and not u[TESTED]:
            u[TESTED], u[GRASPS] = 1, u[GRASPS] + 1
            if self._draw(0, u[GRASPS]) < self.slips:
                u[SLIPPING] = d.time + SLIP_S
        elif not held:
            u[TESTED] = 0
        for finger in ("finger_left", "finger_right"):
            d.joint(finger).qfrc_applied[:] = SLIP_FORCE if d.time < u[SLIPPING] - 1e-6 else 0.0

    def _enter(self, i: int, colour: str) -> None:
        cube = self.data.userdata[CUBES + 4 * i : CUBES + 4 * (i + 1)]
        offset = self.position(objects.cube_name(colour)) - self.position(f"socket_{colour}")
        foot = offset[2] - HALF
        if np.hypot(*offset[:2]) < HOLE and STUCK < foot < MOUTH + NEAR and not cube[INSIDE]:
            cube[INSIDE], cube[ENTRIES] = 1, cube[ENTRIES] + 1
            cube[JAMMED] = self._draw(1 + i, cube[ENTRIES]) < self.jams
        if cube[JAMMED] and foot < STUCK + 0.002:
            cube[JAMMED] = FELT
            cube[PUSHED] += self.spec_robot.dt * self.grasped(objects.cube_name(colour))
        if foot > MOUTH + CLEAR + WORSE * cube[PUSHED]:
            cube[INSIDE] = cube[JAMMED] = cube[PUSHED] = 0
        height = STUCK - WEDGE if cube[JAMMED] else -0.1
        self.data.mocap_pos[self.model.body(f"wedge_{colour}").mocapid[0], 2] = height

    def _draw(self, what: int, count: float) -> float:
        return float(np.random.default_rng([self._world_seed, what, int(count)]).random())

    def jammed(self, colour: str) -> bool:
        """Whether a cube is stuck on its way into the socket, and not out of it yet."""
        return bool(self.data.userdata[CUBES + 4 * list(COLOURS).index(colour) + JAMMED] == FELT)

    def seated(self, colour: str) -> bool:
        """Whether a cube is in its socket and the gripper has let go."""
        cube = objects.cube_name(colour)
        offset = self.position(cube) - self.position(f"socket_{colour}")
        inside = np.abs(offset[:2]).max() < HOLE - HALF + 0.002 and offset[2] < HALF + 0.004
        return bool(inside) and not self.touched(cube)

    def progress(self) -> tuple[bool, ...]:
        seated = sum(map(self.seated, COLOURS))
        holding = any(self.grasped(objects.cube_name(c)) for c in COLOURS)
        return tuple(done for k in range(len(COLOURS)) for done in (seated + holding > k, seated > k))

    def failed(self) -> bool:
        return bool((self.data.userdata[CUBES : CUBES + 4 * len(COLOURS)].reshape(-1, 4)[:, PUSHED] > WEDGED).any())

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(objects.cube_name, COLOURS), *(f"socket_{c}" for c in COLOURS))

    def expert_goal(self) -> ToolGoal:
        colour = self.target
        cube, body = objects.cube_name(colour), self.position(objects.cube_name(colour))
        offset = self.position(f"socket_{colour}") + [0.0, 0.0, HALF] - body
        if not self.grasped(cube):
            inside = np.hypot(*offset[:2]) < HOLE and not self.jammed(colour) and offset[2] > -0.004
            if inside or self._near_seated():
                return skills.retreat(self)
            grip = body + [0.0, 0.0, GRIP]
            return skills.grasp(self, cube, grip, self.yaw(cube, objects.CUBE_SYMMETRY), clearance=0.07)
        if self.tool[2] < body[2] + GRIP - SLID and -offset[2] < MOUTH:  # the fingers would meet the lips first
            return ToolGoal(self.tool[:3], self.tool[3], 1.0)
        if self.jammed(colour) and self.retreats:
            return ToolGoal(self.tool[:3] + [0.0, 0.0, 0.05], self.tool[3], 0.0)
        if np.hypot(*offset[:2]) < HOLE - HALF + 0.001 and offset[2] > -0.004:
            return ToolGoal(self.tool[:3], self.tool[3], 1.0)
        yaw = self.tool[3] - self.yaw(cube, objects.CUBE_SYMMETRY)
        aside, foot = float(np.hypot(*offset[:2])), -offset[2]
        if aside > ABOVE:
            return skills.over(self, self.tool[:3] + offset, yaw, 0.0, clearance=0.06)
        # Above the mouth until it is over it: the cube must not sweep the lips.
        rise = -min(foot, LOWER) if aside < HOLE - HALF else MOUTH + 0.008 - foot
        sideways = offset[:2] if rise < 0.012 else np.zeros(2)
        return ToolGoal(self.tool[:3] + [*sideways, rise], yaw, 0.0)

    def _near_seated(self) -> bool:
        """Whether the tool is so low about a seated cube that it has to rise first."""
        seated = [self.position(objects.cube_name(c)) for c in COLOURS if self.seated(c)]
        return self.tool[2] < 0.07 and any(np.hypot(*(self.tool[:2] - p[:2])) < 0.05 for p in seated)
