"""Insert two pegs that lie flat: take each by its ears, let it swing upright, stand it up, regrasp it, insert it.

The ears turn between the pads, so a peg that is lifted by them hangs straight. Held so it cannot be turned or pushed; a
peg that stands is taken by its shaft. A long task of four stages for each of two pegs.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant
from sim.tasks.insert import CLEARANCE, DEPTH, SOCKET_HEIGHT, SYMMETRY, add_socket, lower_into


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=360,
        rewards={  # of the first peg and of the second
            "lifted_1": 0.1,  # it hangs by its ears, off the table
            "stood_1": 0.1,  # it stands or is held upright by its shaft
            "inserted_1": 0.3,  # it is DEPTH deep in the socket of its colour, let go
            "lifted_2": 0.1,
            "stood_2": 0.1,
            "inserted_2": 0.3,  # success
        },
        start=(0.42, 0.0, 0.20),
    )


PEGS: dict[str, objects.Colour] = {"orange": (0.93, 0.55, 0.16), "teal": (0.10, 0.55, 0.55)}
PEG = (0.012, 0.012, 0.055)  # m, half sizes
EAR, EAR_RADIUS = np.array([0.0, 0.014, 0.043]), 0.007  # m, in the peg's frame; there is another one at -y
GRIP = 0.012  # m, above its middle, where a standing peg is held
LIFT = EAR[2] + PEG[2] + 0.016  # m, of the tool, at which a peg swings clear of the table
CLEAR = 0.14  # m, of the tool above a peg in its socket
YAW = 1.5  # rad, as far as the tool turns
UPRIGHT = 0.97  # cosine of how far a peg leans that stands
HANGING = 0.9  # and of one that may be taken by its shaft
PLUMB = 0.995  # and of one that is let down to stand
DAMPING = 0.0012  # N m s/rad, of a swinging peg; more than its inertia over a time step would not be stable
Y = (0.10, -0.10)  # m, of the pegs at the start, and of the sockets


def peg_name(colour: str) -> str:
    return f"peg_{colour}"


class RegraspInsert(ArmEnv):
    name = "regrasp_insert"
    config = default_config()
    variants = ({"object": "pegs"},)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"stand the {variant['object']} up and insert each into the socket of its colour"

    @property
    def target(self) -> str:
        """Colour of the peg that is next: the one that is held, or the first that is not inserted."""
        left = [c for c in PEGS if not self.inserted(c)]
        held = [c for c in left if self.by_shaft(c) or self.by_ears(c)]
        return [*held, *left, next(iter(PEGS))][0]

    @property
    def subjects(self) -> tuple[str, str]:
        """The peg that is next, and its socket."""
        return peg_name(self.target), f"socket_{self.target}"

    def build(self, spec: mujoco.MjSpec) -> None:
        for colour, rgb in PEGS.items():
            peg = spec.worldbody.add_body(name=peg_name(colour))
            free = mujoco.mjtJoint.mjJNT_FREE
            peg.add_joint(name=peg_name(colour), type=free, damping=DAMPING)
            objects.add_geom(peg, f"shaft_{colour}", "box", list(PEG), rgb, mass=0.09)
            for i, side in enumerate((1.0, -1.0)):
                # They grip as pads do, and turn between them as if on an axle.
                axle: dict[str, Any] = {"priority": 1, "condim": 3, "friction": [1.6, 0.01, 0.0001], "mass": 0.004}
                ear = list(EAR * [1.0, side, 1.0])
                size = [EAR_RADIUS, 0, 0]
                objects.add_geom(peg, f"ear_{colour}_{i}", "sphere", size, (0.2, 0.2, 0.22), pos=ear, **axle)
            socket = spec.worldbody.add_body(name=f"socket_{colour}", mocap=True)
            lip = tuple(0.5 + 0.5 * c for c in rgb)
            add_socket(socket, (PEG[0] + CLEARANCE, PEG[1] + CLEARANCE), wall_rgb=rgb, lip_rgb=lip)  # type: ignore[arg-type]

    def place(self, rng: np.random.Generator) -> None:
        for colour, y in zip(rng.permutation(list(PEGS)), Y, strict=True):
            spot = np.array([0.40, y]) + rng.uniform(-0.015, 0.015, 2)
            yaw = rng.uniform(-0.4, 0.4) + np.pi * rng.integers(2)
            turned, flat = np.zeros(4), np.array([np.cos(np.pi / 4), 0.0, np.sin(np.pi / 4), 0.0])
            mujoco.mju_mulQuat(turned, np.array([np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]), flat)
            self.data.joint(peg_name(str(colour))).qpos[:] = [*spot, PEG[0], *turned]
        for colour, y in zip(rng.permutation(list(PEGS)), Y, strict=True):
            spot = np.array([0.56, y]) + rng.uniform(-0.015, 0.015, 2)
            objects.lay(self, f"socket_{colour}", spot, yaw=rng.uniform(-0.3, 0.3))

    def by_shaft(self, colour: str) -> bool:
        return self.grasped(f"shaft_{colour}")

    def by_ears(self, colour: str) -> bool:
        return self.touched(f"ear_{colour}_0") and self.touched(f"ear_{colour}_1")

    def lean(self, colour: str) -> float:
        """Cosine of how far a peg leans; 1 for one that stands."""
        return skills.tilted(self, peg_name(colour))

    def bottom(self, colour: str) -> float:
        """Height of the lower end of an upright peg, metres."""
        return float(self.position(peg_name(colour))[2] - PEG[2])

    def inside(self, colour: str) -> bool:
        """Whether a peg is DEPTH deep in its socket, held or not."""
        offset = self.position(peg_name(colour)) - self.position(f"socket_{colour}")
        near = np.hypot(*offset[:2]) < 2 * CLEARANCE
        return bool(near and self.lean(colour) > UPRIGHT and self.bottom(colour) < SOCKET_HEIGHT - DEPTH)

    def inserted(self, colour: str) -> bool:
        """Whether a peg is in its socket and the gripper has let go."""
        return self.inside(colour) and not self.touched(peg_name(colour))

    def progress(self) -> tuple[bool, ...]:
        inserted = sum(map(self.inserted, PEGS))
        left = [c for c in PEGS if not self.inserted(c)]
        lifted = inserted + any(self.by_ears(c) and self.position(peg_name(c))[2] > 0.05 for c in left)
        stood = inserted + any(self.lean(c) > UPRIGHT and not self.by_ears(c) for c in left)
        return tuple(count > k for k in range(len(PEGS)) for count in (lifted, stood, inserted))

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(peg_name, PEGS), *(f"socket_{c}" for c in PEGS))

    def expert_goal(self) -> ToolGoal:
        colour, tool = self.target, self.tool
        peg, bottom = peg_name(colour), self.bottom(colour)
        body, turn = self.position(peg), self.data.body(peg).xmat.reshape(3, 3)
        along = float(np.arctan2(turn[1, 1], turn[0, 1])) - np.pi / 2  # fingers along the axis of the ears
        yaw = along - np.pi * np.round(along / np.pi)
        done = [self.position(peg_name(c))[:2] for c in PEGS if self.inserted(c)]
        if tool[2] < CLEAR and any(np.hypot(*(spot - tool[:2])) < 0.06 for spot in done):
            return skills.retreat(self, CLEAR + 0.03)
        if self.inside(colour):
            return ToolGoal(tool[:3], tool[3], 1.0)
        if self.by_ears(colour):
            if self.lean(colour) < PLUMB:
                return ToolGoal(np.array([*tool[:2], LIFT]), tool[3], 0.0)
            return ToolGoal(tool[:3] - [0.0, 0.0, min(bottom, 0.02)], tool[3], float(bottom < 0.003))
        if self.by_shaft(colour) and self.lean(colour) > HANGING:
            return lower_into(self, peg, f"socket_{colour}", bottom, SYMMETRY)
        if self.lean(colour) > HANGING:
            across = float(
                np.clip(yaw - np.copysign(np.pi / 2, yaw), -YAW, YAW)
            )  # the ears are in the way of the fingers
            return skills.grasp(self, f"shaft_{colour}", body + [0.0, 0.0, GRIP], across, clearance=0.11)
        ears = body + turn[:, 2] * EAR[2]
        return skills.grasp(self, f"ear_{colour}_0", ears, yaw, clearance=0.06)
