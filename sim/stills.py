"""Scenes right after a reset, the arm anywhere above the table, or some moments into an episode; and where in their
pictures things are.

A reset takes milliseconds, a demonstration a good part of a second: what encoders of pictures and words have to learn
(what is where, and what a sentence means) can be learnt from many more scenes than there are demonstrations. A scene
whose thing is held is not like one that nothing has moved in: the thing hides a part of the wrist's picture, and the
gripper a part of the thing. Encoders that only know the one were seen to lose the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim.env import ArmEnv
from sim.expert import Expert
from sim.library import KINDS, PALETTE
from sim.tabletop import Tabletop

NAMES = (*KINDS, "button", "switch")  # what can be named; an index into it is a `kind`
COLOURS = tuple(PALETTE)
MOST = 4  # named things of a scene that are told, at most
REACH = ((0.34, 0.62), (-0.22, 0.22), (0.06, 0.28), (-0.8, 0.8))  # x, y, z in m and yaw in rad of where the arm may be
NEAREST = 0.02  # m, in front of a camera
LATER, NOISE, ERRORS = 40, 0.3, 0.15  # control steps into an episode, at most, and how its expert is perturbed


@dataclass(frozen=True)
class Still:
    """A moment of a scene.

    Attributes:
        observation: As the environment gives it.
        sentence: The instruction.
        places: x and y [3, 2] in metres, world frame: where an expert goes now, what is moved, where it is moved to.
        pose: The rest of where an expert goes: z in metres, sine and cosine of the tool's yaw.
        aims: Where what is moved and where it is moved to are in each camera's picture [cameras, 2, 2], as ``pixels``.
        pixels: Where named things stand in each camera's picture [cameras, MOST, 2], right and down in [0, 1]; NaN
            outside it, and where there are fewer things.
        kinds: Indices into :data:`NAMES` [MOST], -1 for none.
        colours: Indices into :data:`COLOURS` [MOST], -1 for none.
    """

    observation: dict[str, Any]
    sentence: str
    places: NDArray[np.float32]
    pose: NDArray[np.float32]
    aims: NDArray[np.float32]
    pixels: NDArray[np.float32]
    kinds: NDArray[np.int64]
    colours: NDArray[np.int64]


def still(env: ArmEnv, seed: int, rng: np.random.Generator, anywhere: float = 0.7, later: float = 0.0) -> Still:
    """Reset ``env`` with ``seed``; in a share ``later`` of scenes a perturbed expert acts for some steps, which nobody
    looks at; in a share ``anywhere`` of the others the arm is put somewhere else than it starts.

    The arm may be put into a thing: this is a picture of a moment, not the begin of an episode.
    """
    observation, _ = env.reset(seed=seed)
    if rng.random() < later:
        expert = Expert(env, NOISE, int(rng.integers(2**31)), ERRORS)
        for _ in range(int(rng.integers(1, LATER))):
            _, ended, _ = env.act(expert.perturb(expert.act()))
            if ended:
                break
        observation = env._observe()
    elif rng.random() < anywhere:
        tool = np.array([rng.uniform(*span) for span in REACH])
        env._put_arm(env._ik.solve(tool, np.array(env.arm.posture)))
        mujoco.mj_forward(env.model, env.data)
        env._tool_command = np.array([*tool, 1.0])
        observation = env._observe()
    goal = env.expert_goal()
    places = np.array([goal.position[:2], *(env.position(body)[:2] for body in env.subjects)], np.float32)
    pose = np.array([goal.position[2], np.sin(goal.yaw), np.cos(goal.yaw)], np.float32)
    named = list(env.named.items())[:MOST] if isinstance(env, Tabletop) else []
    cameras = [c.name for c in env.spec_robot.cameras]
    subjects = np.array([env.position(body) for body in env.subjects])
    aims = np.array([in_picture(env, camera, subjects) for camera in cameras], np.float32)
    pixels = np.full((len(cameras), MOST, 2), np.nan, np.float32)
    kinds, colours = np.full(MOST, -1), np.full(MOST, -1)
    if named:
        where = np.array([env.position(body) for body, _ in named])
        pixels[:, : len(named)] = [in_picture(env, camera, where) for camera in cameras]
        kinds[: len(named)] = [NAMES.index(kind) for _, (kind, _) in named]
        colours[: len(named)] = [COLOURS.index(colour) for _, (_, colour) in named]
    return Still(observation, env.task, places, pose, aims, pixels, kinds, colours)


def in_picture(env: ArmEnv, camera: str, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where points of the world [n, 3], metres, are in a camera's square picture [n, 2]: right and down, in [0, 1]; NaN
    for those outside it."""
    i = env.model.camera(camera).id
    x, y, z = ((points - env.data.cam_xpos[i]) @ env.data.cam_xmat[i].reshape(3, 3)).T  # it looks along -z, y is up
    depth = np.maximum(-z, NEAREST)
    focal = 0.5 / np.tan(np.deg2rad(env.model.cam_fovy[i]) / 2)
    seen = np.column_stack([0.5 + focal * x / depth, 0.5 - focal * y / depth])
    outside = (-z < NEAREST) | ((seen < 0.0) | (seen >= 1.0)).any(1)
    return np.where(outside[:, None], np.nan, seen)
