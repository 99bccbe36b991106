"""gym-aloha's bimanual tasks (Zhao et al. 2023, arXiv:2304.13705; package ``gym-aloha``).

The package renders three pictures of 640x480 at every step whether they are wanted or not; here the same physics, scene
and reward give the pictures that are asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_control import mujoco as dm_mujoco
from dm_control.rl import control
from gym_aloha.constants import ASSETS_DIR, DT
from gym_aloha.tasks import sim as tasks
from gym_aloha.utils import sample_box_pose, sample_insertion_pose
from numpy.typing import NDArray

from sim.external.benchmark import BenchmarkEnv, BenchmarkExpert, ImageSize, Pictures, Visuals, cameras_of, repeats
from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec

NATIVE_HZ = round(1 / DT)  # 50
STEPS = 400  # native steps, as in LeRobot's configuration; gym-aloha registers 300
STAGES = {  # what the package's rewards 1 to 4 stand for
    "transfer_cube": ("touched", "lifted", "offered", "transferred"),
    "insertion": ("touched", "lifted", "met", "inserted"),
}
INSTRUCTIONS = {
    "transfer_cube": "Pick up the cube with the right arm and transfer it to the left arm.",
    "insertion": "Insert the peg into the socket.",
}
JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")


class _Blind:
    """A task of the package without its pictures."""

    def get_observation(self, physics: Any) -> dict[str, NDArray]:
        return {"qpos": self.get_qpos(physics)}  # type: ignore[attr-defined]


class _Transfer(_Blind, tasks.TransferCubeTask): ...


class _Insertion(_Blind, tasks.InsertionTask): ...


class AlohaEnv(BenchmarkEnv):
    """A gym-aloha task.

    State and action (14): six joint angles (rad) and the gripper's opening (ratio) of the left arm, then of the right;
    actions are targets. Below 50 Hz the targets move in a straight line over the native steps of a control step.

    Args:
        task: ``transfer_cube`` or ``insertion``.
        cameras: Any of the scene's; ``top`` is the package's; there are also ``angle``, ``front_close``,
            ``left_pillar``, ``right_pillar``, ``left_wrist`` and ``right_wrist``.
        image_size: Height and width of the pictures, pixels, or one number for both.
        control_hz: Control steps a second; must divide 50.
        visuals: ``fast`` or ``official``.
        render_mode: See :class:`BenchmarkEnv`.
        render_size: Height and width of what :meth:`render` returns.

    Raises:
        UserError: There is no such task or camera, or an argument is not one of the above.
    """

    def __init__(
        self,
        task: str,
        cameras: tuple[str, ...] = ("top",),
        image_size: ImageSize = 64,
        control_hz: float = NATIVE_HZ,
        visuals: Visuals = "fast",
        render_mode: str | None = None,
        render_size: tuple[int, int] = (480, 640),
    ) -> None:
        if task not in INSTRUCTIONS:
            raise UserError(f"gym-aloha has no task '{task}'", f"use {' or '.join(INSTRUCTIONS)}")
        self.name, self.stages = task, STAGES[task]
        self._repeat = repeats(NATIVE_HZ, control_hz, "gym-aloha")
        physics = dm_mujoco.Physics.from_xml_path(str(ASSETS_DIR / f"bimanual_viperx_{task}.xml"))
        self._env = control.Environment(
            physics, _Transfer() if task == "transfer_cube" else _Insertion(), control_timestep=DT
        )
        self.model, self.data = physics.model.ptr, physics.data.ptr
        spec = robot_spec(self.model, tuple(cameras), image_size, control_hz)
        super().__init__(spec, INSTRUCTIONS[task], STEPS // self._repeat, render_mode)
        self._pictures = Pictures(self.model, spec.cameras, visuals, "top", render_size)
        self._target: NDArray[np.float64] = np.zeros(14)

    def begin(self, seed: int) -> None:
        if seed >= 2**32:  # which the package does not take
            seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        pose = sample_box_pose(seed) if self.name == "transfer_cube" else np.concatenate(sample_insertion_pose(seed))
        tasks.BOX_POSE[0] = pose  # the package hands the scene over in a global, read by the reset that follows
        self._env.reset()
        self._target = self.measure()

    def advance(self, action: NDArray[np.float64]) -> tuple[float, bool]:
        start, reward = self._target, 0.0
        for i in range(1, self._repeat + 1):
            self._target = start + (action - start) * i / self._repeat
            reward = float(self._env.step(self._target).reward)
            self.stage = max(self.stage, int(reward))
            if self.stage == len(self.stages):
                break
        return reward, self.stage == len(self.stages)

    def measure(self) -> NDArray[np.float64]:
        return tasks.BimanualViperXTask.get_qpos(self._env.physics)

    def look(self, camera: str) -> NDArray[np.uint8]:
        return self._pictures.of(self.data, camera)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        return None if self.render_mode is None else self._pictures.film(self.data)

    def close(self) -> None:
        self._pictures.close()

    def make_expert(self, noise: float, seed: int) -> BenchmarkExpert:
        if self.name != "transfer_cube":
            return super().make_expert(noise, seed)
        from sim.external.aloha_expert import TransferExpert

        return TransferExpert(self, noise, seed)


def make(task: str, **options: Any) -> AlohaEnv:
    return AlohaEnv(task, **options)


def options_like(robot: RobotSpec | None) -> dict[str, Any]:
    """See :class:`sim.external.Benchmark`."""
    return {"visuals": "fast"} | ({} if robot is None else {"control_hz": robot.rate_hz})


def robot_spec(model: Any, cameras: tuple[str, ...], image_size: ImageSize, rate_hz: float) -> RobotSpec:
    """What the two ViperX arms measure and accept."""
    dims: list[Dim] = []
    for side in ("left", "right"):
        for joint in JOINTS:
            low, high = model.joint(f"vx300s_{side}/{joint}").range
            dims.append(Dim(f"{side}_{joint}.pos", "rad", float(low), float(high)))
        dims.append(Dim(f"{side}_gripper.pos", "ratio", 0.0, 1.0, kind="gripper"))
    return RobotSpec("aloha/viperx", tuple(dims), tuple(dims), cameras_of(cameras, image_size), rate_hz)
