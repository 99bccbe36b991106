"""MetaWorld's 50 tasks (Yu et al. 2019, arXiv:1910.10897; package ``metaworld`` 3) with its scripted policies.

Goals and objects are drawn anew from the task's own space at every reset, by the reset's seed. The package's state
vector holds the poses of all objects and of the goal: it is for the expert. The observation shows the hand alone,
unless ``privileged`` appends where object and goal are, for experiments on algorithms (as ``sim.privileged`` does), or
``full_state`` shows the package's vector itself.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np
from metaworld.env_dict import ENV_CLS_MAP
from metaworld.policies import ENV_POLICY_MAP
from numpy.typing import NDArray

from sim.external.benchmark import (
    BenchmarkEnv,
    BenchmarkExpert,
    ImageSize,
    Pictures,
    Visuals,
    cameras_of,
    repeats,
)
from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
NATIVE_HZ = 80  # 5 physics steps of 2.5 ms
STEPS = 500  # the benchmark's limit, native steps
DELTA = 0.01  # m, how far one native step moves the hand's target at most, along each axis
ROLLED = ("corner", "corner2", "corner3")  # cameras that stand on their heads
REACH = ((-0.525, 0.525), (0.348, 1.025), (-0.0525, 0.7))  # m, x, y, z; the package's space of hand positions
CORNER2 = (0.75, 0.075, 0.7)  # m; LeRobot moves this camera closer before it records

TOLD = (  # what `privileged` appends: position relative to the hand of the first object, its orientation; of the goal
    *(Dim(f"object_{entry}", "m") for entry in ("dx", "dy", "dz")),
    *(Dim(f"object_q{axis}", "1") for axis in "xyzw"),
    *(Dim(f"goal_{entry}", "m") for entry in ("dx", "dy", "dz")),
)


def _frame(when: str) -> tuple[Dim, ...]:
    """Two objects of the package's state vector, 0 where there is one; ``when`` tells now from the step before."""
    things = [f"{when}{thing}" for thing in ("object", "second")]
    return tuple(
        dim
        for thing in things
        for dim in (*(Dim(f"{thing}_{a}", "m") for a in "xyz"), *(Dim(f"{thing}_q{a}", "1") for a in "xyzw"))
    )


FULL = (  # what `full_state` shows after the hand
    *_frame(""),
    *(Dim(f"previous_hand_{axis}", "m") for axis in "xyz"),
    Dim("previous_gripper", "ratio"),
    *_frame("previous_"),
    *(Dim(f"goal_{axis}", "m") for axis in "xyz"),
)

ControlMode = Literal["ee_delta", "ee_abs"]


class MetaworldEnv(BenchmarkEnv):
    """A MetaWorld task.

    State (4): position of the hand (m) and opening of the gripper (ratio). Actions (4): with ``ee_delta`` the
    package's own, in [-1, 1]: a move of the hand's target, at most :data:`DELTA` along each axis a native step, and
    the gripper (-1 opens, 1 closes); with ``ee_abs`` the hand's target (m) and the gripper's opening (ratio), which
    are turned into the package's actions. Below 80 Hz an action lasts for several native steps.

    Args:
        task: For example ``push-v3``.
        control_mode: See above.
        cameras: Any of the scene's; ``corner2`` is LeRobot's view, ``gripperPOV`` looks out of the hand.
        image_size: Height and width of the pictures, pixels, or one number for both.
        control_hz: Control steps a second; must divide 80.
        visuals: ``fast`` or ``official``.
        render_mode: See :class:`BenchmarkEnv`.
        render_size: Height and width of what :meth:`render` returns.
        privileged: Append :data:`TOLD` to the state.
        full_state: Show all 39 entries of the package's state vector: the hand, then :data:`FULL`.

    Raises:
        UserError: There is no such task or camera, or an argument is not one of the above.
    """

    def __init__(
        self,
        task: str,
        control_mode: ControlMode = "ee_delta",
        cameras: tuple[str, ...] = ("corner2",),
        image_size: ImageSize = 64,
        control_hz: float = NATIVE_HZ,
        visuals: Visuals = "fast",
        render_mode: str | None = None,
        render_size: tuple[int, int] = (480, 480),
        privileged: bool = False,
        full_state: bool = False,
    ) -> None:
        if privileged and full_state:
            raise UserError("privileged=True and full_state=True exclude each other", "give one of them")
        if control_mode not in ("ee_delta", "ee_abs"):
            raise UserError(f"control_mode='{control_mode}' does not exist", "use ee_delta or ee_abs")
        self.name, self.control_mode = task, control_mode
        self._repeat = repeats(NATIVE_HZ, control_hz, "MetaWorld")
        self._env = _native(task)
        self._told, self._full = privileged, full_state
        self._seed = -1  # of the episode
        more = FULL if full_state else TOLD if privileged else ()
        spec = robot_spec(control_mode, tuple(cameras), image_size, control_hz, more)
        super().__init__(spec, instructions()[task], STEPS // self._repeat, render_mode)
        model = self._env.model
        model.cam_pos[model.camera("corner2").id] = CORNER2
        self._pictures = Pictures(model, spec.cameras, visuals, "corner2", render_size)
        self.privileged: NDArray[np.float64] = np.zeros(39)  # the package's state vector, objects and goal included

    def begin(self, seed: int) -> None:
        self._seed = seed
        self._env.seed(seed)
        self.privileged, _ = self._env.reset()
        for site in self._env._target_site_config:  # the package shows the goal's marker in its place after a step only
            self._env._set_pos_site(*site)

    def advance(self, action: NDArray[np.float64]) -> tuple[float, bool]:
        reward = 0.0
        self._env.curr_path_length = 0  # our time limit counts, the package's own would be an error
        for left in range(self._repeat, 0, -1):
            self.privileged, reward, _, _, info = self._env.step(self._native_action(action, left))
            if success := bool(info["success"]):
                break
        return reward, success

    def measure(self) -> NDArray[np.float64]:
        s = self.privileged
        if self._full:
            return s
        return np.concatenate((s[:4], s[4:7] - s[:3], s[7:11], s[36:39] - s[:3])) if self._told else s[:4]

    def look(self, camera: str) -> NDArray[np.uint8]:
        return _upright(self._pictures.of(self._env.data, camera), camera)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        return None if self.render_mode is None else _upright(self._pictures.film(self._env.data), "corner2")

    def close(self) -> None:
        self._pictures.close()

    def get_state(self) -> NDArray[np.float64]:
        """Everything that this episode's future depends on, time limits excepted."""
        env = self._env
        physics = np.empty(mujoco.mj_stateSize(env.model, _STATE))
        mujoco.mj_getState(env.model, env.data, physics, _STATE)
        return np.concatenate([[self._seed], self.privileged, env._prev_obs, physics])

    def set_state(self, state: NDArray[np.float64]) -> None:
        """Return to a state of :meth:`get_state` of the same task; the same actions give the same future."""
        env = self._env
        if int(state[0]) != self._seed:  # a reset also moves what is fixed in the scene
            self.begin(int(state[0]))
        _, self.privileged, env._prev_obs, physics = np.split(np.array(state), [1, 40, 58])
        env.curr_path_length = 0
        mujoco.mj_setState(env.model, env.data, physics, _STATE)
        mujoco.mj_forward(env.model, env.data)
        # The forward pass filled in positions and contacts, but also renewed the solver's warm start: restore it.
        mujoco.mj_setState(env.model, env.data, physics, _STATE)
        for site in env._target_site_config:
            env._set_pos_site(*site)

    def make_expert(self, noise: float, seed: int) -> MetaworldExpert:
        return MetaworldExpert(self, noise, seed)

    def command_of(self, native: NDArray[np.float64]) -> NDArray[np.float32]:
        """The action that repeats a native one over the control step."""
        if self.control_mode == "ee_delta":
            return native.astype(np.float32)
        target = self._env.data.mocap_pos[0] + self._repeat * DELTA * native[:3]
        return np.append(target, (1.0 - native[3]) / 2.0).astype(np.float32)

    def _native_action(self, action: NDArray[np.float64], left: int) -> NDArray[np.float32]:
        """The package's action for a native step, of which ``left`` remain in this control step."""
        if self.control_mode == "ee_delta":
            return action.astype(np.float32)
        delta = (action[:3] - self._env.data.mocap_pos[0]) / (left * DELTA)
        return np.append(np.clip(delta, -1.0, 1.0), 1.0 - 2.0 * action[3]).astype(np.float32)


class MetaworldExpert(BenchmarkExpert):
    """The package's scripted policy of the task. It has no memory, so it labels any state."""

    def __init__(self, env: MetaworldEnv, noise: float, seed: int) -> None:
        delta = 1.0 if env.control_mode == "ee_delta" else DELTA * NATIVE_HZ * env.spec_robot.dt
        super().__init__(np.array([delta, delta, delta, 0.0]), noise, seed)
        self._env = env
        self._policy: Any = ENV_POLICY_MAP[env.name]()  # type: ignore[abstract]

    def act(self) -> NDArray[np.float32]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package warns of every action that it is about to clip
            native = self._policy.get_action(self._env.privileged)
        return self._env.command_of(np.clip(native, -1.0, 1.0))


def make(task: str, **options: Any) -> MetaworldEnv:
    return MetaworldEnv(task, **options)


def options_like(robot: RobotSpec | None) -> dict[str, Any]:
    """See :class:`sim.external.Benchmark`."""
    options: dict[str, Any] = {"visuals": "fast"}
    if robot is not None:
        options["control_hz"] = robot.rate_hz
        options["control_mode"] = "ee_delta" if robot.action_kind == "delta" else "ee_abs"
        measured = {d.name for d in robot.state}
        options["privileged"], options["full_state"] = "object_dx" in measured, "goal_x" in measured
    return options


def robot_spec(
    mode: ControlMode, cameras: tuple[str, ...], image_size: ImageSize, rate_hz: float, more: tuple[Dim, ...] = ()
) -> RobotSpec:
    """What the Sawyer arm measures and accepts in a control mode; ``more`` is what else its state tells."""
    hand = tuple(Dim(f"hand_{axis}.pos", "m", *REACH[i]) for i, axis in enumerate("xyz"))
    state = (*hand, Dim("gripper.pos", "ratio", 0.0, 1.0, kind="gripper"))
    action = state
    if mode == "ee_delta":
        action = tuple(Dim(d.name, "1", -1.0, 1.0, kind=d.kind) for d in state)
    kind: Literal["delta", "absolute"] = "delta" if mode == "ee_delta" else "absolute"
    return RobotSpec("metaworld/sawyer", (*state, *more), action, cameras_of(cameras, image_size), rate_hz, kind)


@cache
def instructions() -> dict[str, str]:
    """Instruction of each task, in the words with which LeRobot's datasets of MetaWorld are labelled.

    Raises:
        UserError: LeRobot is not installed.
    """
    found = importlib.util.find_spec("lerobot")  # found, not imported: that would take seconds
    if found is None or found.origin is None:
        raise UserError("the words of MetaWorld's instructions come from LeRobot", 'pip install "vla-stack[train]"')
    path = Path(found.origin).parent / "envs" / "metaworld_config.json"
    return json.loads(path.read_text())["TASK_DESCRIPTIONS"]


def _native(task: str) -> Any:
    """The package's environment, with the goal shown to the expert and drawn by the seed at each reset."""
    if task not in ENV_CLS_MAP:
        close = difflib.get_close_matches(task, ENV_CLS_MAP, n=1, cutoff=0.0)[0]
        raise UserError(
            f"MetaWorld has no task '{task}'", f"did you mean {close}? known: {', '.join(sorted(ENV_CLS_MAP))}"
        )
    env = _quick(ENV_CLS_MAP[task])()
    env._set_task_called, env._freeze_rand_vec, env.seeded_rand_vec = True, False, True
    env._partially_observable = False
    del env.sawyer_observation_space  # cached; made again with the goal
    return env


@cache
def _quick(task: Any) -> Any:
    """The package's class of a task, with contacts sought in arrays: its loop over them was a quarter of a step."""

    class Quick(task):
        def touching_object(self, object_geom_id: int) -> bool:
            contact, force = self.data.contact, self.data.efc_force
            of_object = (contact.geom == object_geom_id).any(1)
            for pad in ("leftpad_geom", "rightpad_geom"):
                touching = of_object & (contact.geom == self.data.geom(pad).id).any(1)
                if sum(force[contact.efc_address[touching]]) <= 0.0:
                    return False
            return True

    return Quick


def _upright(picture: NDArray[np.uint8], camera: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(picture[::-1, ::-1]) if camera in ROLLED else picture
