"""The base class of all tasks: one arm on a table, driven by targets at a fixed control rate, seen by cameras."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from sim import contacts, privileged
from sim.arm import ARM7, CAMERAS, DELTA_RATE, Arm, ControlMode, InverseKinematics, tool_yaw
from sim.drives import Drives
from sim.randomisation import Randomiser, add_parts, level_of
from sim.rendering import Renderer, Visuals, cheapen
from sim.task import TaskConfig, ToolGoal, Variant
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_TIMESTEP = 0.004  # s, what the model is tuned for


class ArmEnv(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """A task for an arm. Subclasses say which, what lies on the table, what is asked for and when it is done.

    Observation: ``{"pixels": {camera: uint8 [S, S, 3]}, "agent_pos": float32 [S]}``, the latter as named by
    ``spec_robot.state``. Action: as named by ``spec_robot.action``, clipped to its range; joint targets move at most
    at the arm's ``max_joint_rate``, so a wild command is slow and never explosive.

    Args:
        control_mode: ``ee_abs`` tool target [5]; ``joint_abs`` joint targets and gripper [J+1]; ``ee_delta`` [5] in
            [-1, 1], moves the tool target by :data:`sim.arm.DELTA_RATE` per second. By default the arm's own.
        image_size: Height and width of the observation's pictures, pixels.
        cameras: Any of ``front`` and ``wrist``; without any, observations have no ``pixels`` and steps are fast.
        visuals: ``fast`` for training; ``pretty`` (shadows, antialiasing) for videos.
        randomisation: Level 0 to 3 of :data:`sim.randomisation.LEVELS`; or some of a level's widths by their names,
            e.g. ``{"camera_shift": 0.02}``, the others being those of level 0.
        reward: ``sparse`` is 1 at success; ``staged`` pays each stage of the task when it is first reached.
        control_hz: Control steps per second, 5 to 20.
        render_mode: ``rgb_array`` makes :meth:`render` return a picture of the front camera.
        render_size: Height and width of that picture.
        privileged: Append :data:`sim.privileged.DIMS`, the poses of what the instruction is about, to ``agent_pos``.
            For experiments on algorithms that do without cameras; no robot measures them.
        tool_target: Append :data:`sim.privileged.TARGET_DIMS`, how far the commanded tool target is ahead of the tool:
            what a policy of ``ee_delta`` moves.

    Raises:
        UserError: An argument is not one of the above.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    name: ClassVar[str]
    arm: ClassVar[Arm] = ARM7
    config: ClassVar[TaskConfig]
    variants: ClassVar[tuple[Variant, ...]]
    splits: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # what a suite evaluates it on besides: name -> options

    def __init__(
        self,
        control_mode: ControlMode | None = None,
        image_size: int = 64,
        cameras: tuple[str, ...] = CAMERAS,
        visuals: Visuals = "fast",
        randomisation: int | Mapping[str, Any] = 0,
        reward: Literal["sparse", "staged"] = "sparse",
        control_hz: float = 10.0,
        render_mode: str | None = None,
        render_size: tuple[int, int] = (480, 640),
        privileged: bool = False,
        tool_target: bool = False,
    ) -> None:
        control_mode = control_mode or self.arm.control_mode
        _check("control_mode", control_mode, ("ee_abs", "joint_abs", "ee_delta"))
        _check("visuals", visuals, ("fast", "pretty"))
        _check("reward", reward, ("sparse", "staged"))
        _check("render_mode", render_mode, (None, "rgb_array"))
        for camera in cameras:
            _check("cameras", camera, CAMERAS)
        if not 5.0 <= control_hz <= 20.0:
            raise UserError(f"control_hz={control_hz} is outside 5 to 20", "the task dynamics are tuned for that range")
        self.control_mode, self.render_mode = control_mode, render_mode
        self._staged = reward == "staged"
        self._level = level_of(randomisation)
        self._spec_robot = self.arm.spec(control_mode, tuple(cameras), image_size, control_hz, privileged, tool_target)
        self._privileged, self._tool_target = privileged, tool_target
        self.metadata = {**self.metadata, "render_fps": round(control_hz)}

        self.model = self._compile(control_hz)
        if visuals == "fast":
            cheapen(self.model)
        self.data = mujoco.MjData(self.model)
        self._randomiser = Randomiser(self.model, self._level)
        self._ik = InverseKinematics.of(self.arm)
        self._joints = len(self.arm.joints)
        self._tcp_id = self.model.site("tcp").id
        self._pads = [self.model.geom(n).id for n in ("pad_left", "pad_right")]
        self._eyes = Renderer(self.model, image_size, image_size)
        self._film = Renderer(self.model, *render_size)

        self._variant = self._stage = self._world_seed = 0
        self._instruction, self._given, self._delay = "", "", 0.0  # given: in place of the task's own
        latest = self._level.delay * control_hz
        self._drives = Drives(self._joints + 1, self.arm.interpolates, latest)  # of the first actuators
        self._tool_command: NDArray[np.float64] = np.zeros(5)

        low, high = self._spec_robot.action_low, self._spec_robot.action_high
        self.action_space = spaces.Box(low, high, dtype=np.float32)
        picture = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        observation: dict[str, spaces.Space] = {
            "agent_pos": spaces.Box(-10.0, 10.0, (len(self._spec_robot.state),), np.float32)
        }
        if cameras:
            observation["pixels"] = spaces.Dict({c: picture for c in cameras})
        self.observation_space = spaces.Dict(observation)

    # What a task defines --------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def instruct(cls, variant: Variant) -> str:
        """The instruction that asks for ``variant``."""

    @abstractmethod
    def build(self, spec: mujoco.MjSpec) -> None:
        """Add the task's objects to the scene."""

    @abstractmethod
    def place(self, rng: np.random.Generator) -> None:
        """Write the objects' start poses into ``self.data``."""

    @abstractmethod
    def progress(self) -> tuple[bool, ...]:
        """Whether each stage's condition holds now; the last one is success."""

    @abstractmethod
    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        """Named points [3] in metres, world frame, for constraint costs between stages."""

    @property
    @abstractmethod
    def subjects(self) -> tuple[str, str]:
        """Bodies that the instruction is about: what is moved, and where to (itself where nothing else is named)."""

    @abstractmethod
    def expert_goal(self) -> ToolGoal:
        """Where an expert would go now. A function of the current state alone, so it labels any state."""

    def draw_variant(self, rng: np.random.Generator) -> int:
        """Index of the variant that an episode asks for."""
        return int(rng.integers(len(self.variants)))

    def furnish(self, rng: np.random.Generator) -> None:
        """Write into the model what is there in this episode alone. A function of ``rng`` and the variant."""

    def sentence(self) -> str:
        """The instruction of this episode."""
        return self.instruct(self.variant)

    def happen(self) -> None:
        """What happens by itself as a control step begins; it works on ``self.data`` alone, so that replay is exact."""

    def failed(self) -> bool:
        """Whether the task can no longer succeed."""
        return False

    def cost(self) -> float:
        """Safety cost of the current step; 0 where the task has no hazard."""
        return 0.0

    # gymnasium ------------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: The same seed gives the same episode, pixels included.
            options: ``variant`` fixes what is asked for (one of ``variants``); ``instruction`` replaces the text
                that is shown while the success condition stays.
        """
        super().reset(seed=seed)
        options = options or {}
        rng = self.np_random
        # All draws happen whatever the options and the level are, so that these change nothing else.
        self._variant = self.draw_variant(rng)
        self._world_seed = int(rng.integers(2**31))
        jitter = rng.uniform(-1.0, 1.0, 3)
        if "variant" in options:
            self._variant = self._find_variant(options["variant"])
        self._delay = self._randomiser.apply(self._world_seed, self.furnish)
        self._given = str(options.get("instruction", ""))
        self._instruction = self._given or self.sentence()
        mujoco.mj_resetData(self.model, self.data)
        tool = np.append(np.array(self.config.start) + self._level.start * jitter, 0.0)
        self._put_arm(self._ik.solve(tool, np.array(self.arm.posture)))
        self.place(rng)
        mujoco.mj_forward(self.model, self.data)
        self._tool_command = np.array([*tool, 1.0])
        self._stage = 0
        return self._observe(), self._info(False)

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Advance one control step; a non-finite action raises ``ValueError``."""
        reward, ended, info = self.act(action)
        return self._observe(), reward, ended, False, info

    def act(self, action: NDArray[np.float32]) -> tuple[float, bool, dict[str, Any]]:
        """:meth:`step` without a look at what has come of it: reward, whether the episode has ended, and info."""
        self._advance(self._targets(action))
        passed = self.progress()
        success, before = passed[-1], self._stage
        while self._stage < len(passed) and (success or passed[self._stage]):
            self._stage += 1
        staged = float(sum(self.config.rewards[s] for s in self.stages[before : self._stage]))
        reward = staged if self._staged else float(success)
        return reward, bool(success or self.failed()), self._info(success)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        return None if self.render_mode is None else self._film.render(self.data, "front")

    def close(self) -> None:
        self._eyes.close()
        self._film.close()

    # What others may read -------------------------------------------------------------------------------------------

    @property
    def spec_robot(self) -> RobotSpec:
        """Meaning, unit, range and rate of every state and action dimension in this control mode."""
        return self._spec_robot

    @property
    def variant(self) -> Variant:
        """What this episode asks for, e.g. ``{"colour": "red"}``."""
        return self.variants[self._variant]

    @property
    def task(self) -> str:
        """The instruction of this episode."""
        return self._instruction

    task_description = task  # the name that LeRobot looks for

    @property
    def task_variants(self) -> tuple[str, ...]:
        """All instructions of this task."""
        return tuple(self.instruct(v) for v in self.variants)

    def achieved(self, instruction: str) -> bool:
        """Whether what ``instruction`` (one of ``task_variants``) asks for holds now."""
        own, self._variant = self._variant, self.task_variants.index(instruction)
        try:
            return bool(self.progress()[-1])
        finally:
            self._variant = own

    @property
    def stages(self) -> tuple[str, ...]:
        """Stage names in order; ``info["stage"]`` counts those reached so far."""
        return tuple(self.config.rewards)

    @property
    def joint_command(self) -> NDArray[np.float32]:
        """Joint targets [J] in radians that realised the last action."""
        return self._drives.joints.astype(np.float32)

    def set_command(self, action: NDArray) -> None:
        """Take joint targets and opening ratio [J+1] as the last command, where not :meth:`step` drives the model."""
        self._drives.rest_at(np.append(action[:-1], self.arm.finger(action[-1])))
        self._tool_command = np.append(self._ik.forward(action[:-1]), action[-1])

    @property
    def tool_command(self) -> NDArray[np.float64]:
        """Tool target [5] of the last action, as in ``ee_abs``."""
        return self._tool_command.copy()

    @property
    def tool(self) -> NDArray[np.float64]:
        """Measured x, y, z (m), yaw (rad) and opening ratio [5]."""
        d = self.data
        opening = self.arm.opening(d.qpos[self._joints : self._joints + self.arm.fingers])
        return np.array([*d.site_xpos[self._tcp_id], tool_yaw(d.site_xmat[self._tcp_id]), opening])

    def position(self, body: str) -> NDArray[np.float64]:
        """Position [3] of a body in the world frame, metres."""
        return self.data.body(body).xpos.copy()

    def yaw(self, body: str, symmetry: float = 2 * np.pi) -> float:
        """Yaw of a body in radians; the equal one nearest zero where turning by ``symmetry`` changes nothing."""
        angle = tool_yaw(self.data.body(body).xmat)
        return float(angle - symmetry * np.round(angle / symmetry))

    def touching(self, name: str, others: list[int]) -> set[int]:
        """Which of the geoms ``others`` touch a body now, or a geom that is named unlike any body."""
        return contacts.touching(self.model, self.data, name, others)

    def grasped(self, name: str) -> bool:
        """Whether both pads touch a body or geom, see :meth:`touching`."""
        return len(self.touching(name, self._pads)) == 2

    def touched(self, name: str) -> bool:
        """Whether a pad touches a body or geom, see :meth:`touching`."""
        return bool(self.touching(name, self._pads))

    def get_state(self) -> NDArray[np.float64]:
        """Everything that this episode's future depends on, wrappers (time limits) excepted."""
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, self.data, state, _STATE)
        counters = [self._variant, self._world_seed, self._stage]
        return np.concatenate([state, counters, self._tool_command, self._drives.targets.ravel()])

    def set_state(self, state: NDArray[np.float64]) -> None:
        """Return to a state of :meth:`get_state` of the same task and level; the same actions give the same future."""
        size = mujoco.mj_stateSize(self.model, _STATE)
        expected = size + 3 + 5 + self._drives.targets.size
        if np.shape(state) != (expected,):
            raise ValueError(f"state has shape {np.shape(state)}, {self.name} has ({expected},)")
        parts = np.split(np.array(state, np.float64), [size, size + 3, size + 8])
        physics, counters, self._tool_command, drives = parts
        self._variant, self._world_seed, self._stage = (int(c) for c in counters)
        self._drives.targets = drives.reshape(self._drives.targets.shape)
        self._delay = self._randomiser.apply(self._world_seed, self.furnish)
        self._instruction = self._given or self.sentence()
        mujoco.mj_setState(self.model, self.data, physics, _STATE)
        mujoco.mj_forward(self.model, self.data)
        # The forward pass filled in positions and contacts, but also renewed the solver's warm start: restore it.
        mujoco.mj_setState(self.model, self.data, physics, _STATE)

    # Internals ------------------------------------------------------------------------------------------------------

    def _compile(self, control_hz: float) -> mujoco.MjModel:
        spec = mujoco.MjSpec.from_file(self.arm.xml)
        self.build(spec)
        add_parts(spec, self._level)
        model = spec.compile()
        self._substeps = round(1.0 / (control_hz * _TIMESTEP))
        model.opt.timestep = 1.0 / (control_hz * self._substeps)
        return model

    def _find_variant(self, wanted: Variant) -> int:
        try:
            return self.variants.index(dict(wanted))
        except ValueError:
            raise UserError(f"{self.name} has no variant {wanted}", f"choose one of {list(self.variants)}") from None

    def _put_arm(self, q: NDArray) -> None:
        drive = np.append(q, self.arm.opened)
        self.data.qpos[: self._joints] = q
        self.data.qpos[self._joints : self._joints + self.arm.fingers] = self.arm.opened
        self.data.ctrl[: self._joints + 1] = drive
        self._drives.rest_at(drive)

    def _targets(self, action: NDArray) -> NDArray[np.float64]:
        """Joint and gripper targets [J+1] for an action, and the tool target as a side effect."""
        a = np.asarray(action, np.float64)
        if a.shape != self.action_space.shape or not np.isfinite(a).all():
            raise ValueError(f"action must be {self.action_space.shape} finite numbers, got {action}")
        a = np.clip(a, self._spec_robot.action_low, self._spec_robot.action_high)
        last = self._drives.joints
        if self.control_mode == "joint_abs":
            joints, gripper = a[: self._joints], a[-1]
        else:
            tool = a
            if self.control_mode == "ee_delta":
                tool = np.clip(self._tool_command + a * DELTA_RATE * self._spec_robot.dt, *self.arm.tool_range)
            joints, gripper = self._ik.solve(tool, last), tool[-1]
        reach = self.arm.max_joint_rate * self._spec_robot.dt
        joints = np.clip(joints, last - reach, last + reach)
        self._tool_command = np.append(self._ik.forward(joints), gripper) if self.control_mode == "joint_abs" else tool
        return np.append(joints, self.arm.finger(gripper))

    def _advance(self, drive: NDArray[np.float64]) -> None:
        """Run the physics of one control step; targets move in a line, or at once, late by the delay."""
        self.happen()
        late = self._delay * self._spec_robot.rate_hz  # in control steps
        ctrl = self.data.ctrl[: self._joints + 1]
        for targets in self._drives.path(drive, self._substeps, late):
            ctrl[:] = targets
            mujoco.mj_step(self.model, self.data)
        mujoco.mj_forward(self.model, self.data)

    def _observe(self) -> dict[str, Any]:
        tool, joints = self.tool, self.data.qpos[: self._joints]
        order = [tool, joints]
        if self.control_mode == "joint_abs":
            order = [joints, tool[4:], tool[:4]] if self.arm.measures_tool else [joints, tool[4:]]
        if self._privileged:
            order.append(privileged.measure(self))
        if self._tool_target:
            order.append(self._tool_command - tool)
        observation: dict[str, Any] = {"agent_pos": np.concatenate(order).astype(np.float32)}
        if self._spec_robot.cameras:
            observation["pixels"] = {c.name: self._eyes.render(self.data, c.name) for c in self._spec_robot.cameras}
        return observation

    def _info(self, success: bool) -> dict[str, Any]:
        cost = float(self.cost())
        return {"is_success": bool(success), "stage": self._stage, "task": self._instruction, "cost": cost}


def _check(name: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise UserError(f"{name}={value!r} is unknown", f"choose one of {', '.join(map(repr, allowed))}")
