"""LIBERO's suites (Liu et al. 2023, arXiv:2306.03310; package ``hf-libero``), through LeRobot's environment.

LIBERO asks questions on standard input when it is first imported, and downloads its meshes when they are first missing.
Neither is fit for a program that runs unattended: the answers are written beforehand, and without meshes it is said in
one line where they belong.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from sim.external.benchmark import BenchmarkEnv, ImageSize, cameras_of
from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec

NATIVE_HZ = 20
ASSETS = ("articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects", "scenes")
RAW_CAMERAS = {"image": "agentview_image", "image2": "robot0_eye_in_hand_image"}  # by the names in LeRobot's datasets


class LiberoEnv(BenchmarkEnv):
    """A task of a LIBERO suite, as LeRobot's datasets and policies have it; pictures are the official ones.

    State (8): tool position (m), orientation as a rotation vector (rad), both finger positions (m). Actions (7) in
    [-1, 1]: moves of the tool along and about each axis, and the gripper (-1 opens, 1 closes). The scene of seed s is
    the suite's initial state number s, modulo their count.

    Args:
        task: Suite and index, e.g. ``libero_spatial/3``.
        cameras: ``image`` (scene) and ``image2`` (wrist), or one of them.
        image_size: Height and width of the pictures, pixels, or one number for both.
        control_hz: The benchmark's 20.
        render_mode: See :class:`BenchmarkEnv`.

    Raises:
        UserError: There is no such suite, task or camera, or the meshes are missing.
    """

    def __init__(
        self,
        task: str,
        cameras: tuple[str, ...] = ("image", "image2"),
        image_size: ImageSize = 256,
        control_hz: float = NATIVE_HZ,
        render_mode: str | None = None,
    ) -> None:
        if control_hz != NATIVE_HZ:
            raise UserError(f"control_hz={control_hz:g}, but LIBERO's controller is tuned for 20", "use 20")
        if unknown := [c for c in cameras if c not in RAW_CAMERAS]:
            raise UserError(f"there is no camera '{unknown[0]}'", f"LIBERO has {', '.join(RAW_CAMERAS)}")
        prepare()
        suite, index = find_task(task)
        from lerobot.envs.libero import LiberoEnv as Native

        spec = robot_spec(tuple(cameras), image_size)
        # LeRobot's environment wants one at least, and films the first.
        shown = tuple(sorted(spec.cameras, key=lambda camera: camera.name)) or cameras_of(("image",), image_size)
        self._env: Any = Native(
            suite,
            index,
            task.partition("/")[0],
            camera_name=[RAW_CAMERAS[c.name] for c in shown],
            obs_type="pixels_agent_pos",
            observation_height=shown[0].height,
            observation_width=shown[0].width,
        )
        super().__init__(spec, self._env.task_description, self._env._max_episode_steps, render_mode)
        self._raw: dict[str, Any] = {}

    def begin(self, seed: int) -> None:
        self._env.init_state_id = seed  # taken modulo the number of states
        self._raw, _ = self._env.reset(seed=seed)

    def advance(self, action: NDArray[np.float64]) -> tuple[float, bool]:
        self._raw, reward, _, _, info = self._env.step(action.astype(np.float32))
        return reward, bool(info["is_success"])

    def measure(self) -> NDArray[np.float64]:
        robot = self._raw["robot_state"]
        return np.concatenate([robot["eef"]["pos"], rotation_vector(robot["eef"]["quat"]), robot["gripper"]["qpos"]])

    def look(self, camera: str) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self._raw["pixels"][camera][::-1, ::-1])  # rendered standing on its head

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        return None if self.render_mode is None else np.ascontiguousarray(self._env.render())

    def close(self) -> None:
        self._env.close()


def make(task: str, **options: Any) -> LiberoEnv:
    return LiberoEnv(task, **options)


def options_like(robot: RobotSpec | None) -> dict[str, Any]:
    """See :class:`sim.external.Benchmark`."""
    return {} if robot is None else {"control_hz": robot.rate_hz}  # its pictures are the official ones


def prepare() -> None:
    """Make LIBERO importable without questions, and see to it that its meshes are there.

    Raises:
        UserError: They are not; both places where LIBERO looks are named.
    """
    found = importlib.util.find_spec("libero")
    if found is None or not found.submodule_search_locations:
        raise UserError("LIBERO needs the package 'libero'", "docs/benchmarks.md has the lines that install it")
    package = Path(next(iter(found.submodule_search_locations))) / "libero"
    places = (package / "assets", Path.home() / ".cache" / "libero" / "assets")
    if not any(all((place / name).is_dir() for name in ASSETS) for place in places):
        raise UserError(
            f"LIBERO's meshes are neither in {places[0]} nor in {places[1]}",
            f"hf download lerobot/libero-assets --repo-type dataset --local-dir {places[1]}",
        )
    config = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"
    if not config.exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        folders = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
        folders["datasets"] = "../datasets"
        partial = config.with_suffix(f".tmp{os.getpid()}")  # another process may import it at once
        partial.write_text(yaml.safe_dump({key: str(package / folder) for key, folder in folders.items()}))
        partial.replace(config)


def find_task(task: str) -> tuple[Any, int]:
    """Suite and index of ``libero_spatial/3``.

    Raises:
        UserError: There is no such suite or task.
    """
    from libero.libero import benchmark

    name, _, index = task.partition("/")
    suites = benchmark.get_benchmark_dict()
    if name not in suites:
        raise UserError(f"LIBERO has no suite '{name}'", f"the suites are {', '.join(sorted(suites))}")
    suite = suites[name]()
    if not index.isdecimal() or int(index) >= suite.n_tasks:
        raise UserError(f"'libero/{task}' names no task", f"write libero/{name}/0 to libero/{name}/{suite.n_tasks - 1}")
    return suite, int(index)


def robot_spec(cameras: tuple[str, ...], image_size: ImageSize) -> RobotSpec:
    """What the Panda arm under LIBERO's controller measures and accepts."""
    pose = [f"tool_{axis}" for axis in ("x", "y", "z", "rx", "ry", "rz")]
    state = [Dim(f"{name}.pos", "m" if i < 3 else "rad") for i, name in enumerate(pose)]
    state += [Dim(f"finger_{i}.pos", "m") for i in (1, 2)]
    action = [Dim(f"{name}.pos", "1", -1.0, 1.0) for name in pose] + [
        Dim("gripper.pos", "1", -1.0, 1.0, kind="gripper")
    ]
    return RobotSpec("libero/panda", tuple(state), tuple(action), cameras_of(cameras, image_size), NATIVE_HZ, "delta")


def rotation_vector(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Axis times angle [3] in radians of a unit quaternion (x, y, z, w); angles up to 2 pi, as LeRobot's."""
    axis = np.asarray(quaternion[:3], np.float64)
    sine = np.linalg.norm(axis)
    return axis / sine * 2.0 * np.arctan2(sine, quaternion[3]) if sine > 1e-10 else np.zeros(3)
