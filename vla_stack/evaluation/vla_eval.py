"""Our tasks, and the benchmarks behind our one door, as a benchmark of the vla-eval harness.

    # tasks.yaml, for `vla-eval run --no-docker -c tasks.yaml` beside `vla serve --protocol vla-eval`
    server: {url: "ws://127.0.0.1:8000"}
    benchmarks:
      - benchmark: "vla_stack.evaluation.vla_eval:Tasks"
        episodes_per_task: 50
        params: {tasks: [sim/pick-v0, sim/place-v0], seed: 1000}

(https://github.com/allenai/vla-evaluation-harness, 0.8; ``pip install vla-eval``.) A server of ours says which cameras,
picture size, rate and control mode its policy needs, and the environments are made so; for others an environment is
what its ``options`` make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult, repeat_last_hold
from vla_eval.specs import DimSpec

from vla_stack.envs.making import make, observe
from vla_stack.envs.vector import EnvStep, VectorEnv
from vla_stack.errors import UserError
from vla_stack.rollout.episode import instruction_of
from vla_stack.schema import Observation, PolicySpec, RobotSpec
from vla_stack.serving.vla_eval import action_spec, observation_spec

MAX_STEPS = 1000  # of an episode whose environment sets no limit


class Tasks(StepBenchmark):
    """Environments of :func:`vla_stack.envs.making.make`, one task each.

    Args:
        tasks: Their ids, such as ``sim/pick-v0`` or ``metaworld/push-v3``.
        seed: Of the first episode of each; episode i has ``seed + i``.
        policy: Description of the policy, as the server of ours gives it.
        options: Keyword arguments of every environment.

    Raises:
        UserError: There is no such environment, it does not fit the policy, or the tasks are of several robots.
    """

    render_backends = frozenset({"gpu", "cpu"})

    def __init__(
        self,
        tasks: Sequence[str] = ("sim/pick-v0",),
        seed: int = 1000,
        policy: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._ids, self._seed, self._options = tuple(tasks), seed, options
        self._policy = PolicySpec.from_json(policy) if policy is not None else None
        self._env: VectorEnv | None = None
        self._made = ""
        self._k = 0
        self._success = False
        self._open(self._ids[0])  # says at once what does not fit

    @classmethod
    def configure_render(cls, mode: str) -> dict[str, str]:
        """Which of MuJoCo's backends; see the harness."""
        from vla_eval.render import configure_mujoco_render

        return dict(configure_mujoco_render(mode))

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": env_id, "suite": env_id.partition("/")[0]} for env_id in self._ids]

    def reset(self, task: dict[str, Any]) -> EnvStep:
        self._open(task["name"])
        self._k, self._success = 0, False
        return self._rows.reset([0], [self._seed + int(task.get("episode_idx", 0))])[0]

    def step(self, action: dict[str, Any]) -> StepResult:
        command = np.asarray(action["actions"], np.float32).reshape(1, -1)
        if command.shape[1] != len(self._robot.action):
            names = " ".join(d.name for d in self._robot.action)
            raise UserError(f"a command of {command.shape[1]} numbers, {self._made} takes [{names}]")
        now = self._rows.step([0], command)[0]
        self._k += 1
        self._success |= bool(now.info["is_success"])
        done = now.terminated or now.truncated or self._success
        return StepResult(now, now.reward, done, {"success": self._success})

    def make_obs(self, raw_obs: EnvStep, task: dict[str, Any]) -> dict[str, Any]:
        env = self._rows.row(0)
        seen: Observation = observe(
            raw_obs.observation, self._robot, instruction_of(getattr(env, "unwrapped", env)), self._k
        )
        return {"images": seen.images, "state": seen.state, "task_description": seen.task}

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": self._success}

    def get_action_spec(self) -> dict[str, DimSpec]:
        return {name: DimSpec.from_dict(spec) for name, spec in action_spec(self._robot).items()}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {name: DimSpec.from_dict(spec) for name, spec in observation_spec(self._robot).items()}

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": MAX_STEPS}

    def get_hold_action(self, last_action: dict[str, Any] | None) -> dict[str, Any]:
        """What holds the robot: the last target, or no motion where commands are motions."""
        dims = len(self._robot.action)
        if self._robot.action_kind != "absolute":
            return {"actions": np.zeros(dims, np.float32)}
        if last_action is None and self._last_result.obs is not None:  # where it is: zero may be far away
            names = (d.name for d in self._robot.state)
            measured = dict(zip(names, self._last_result.obs.observation["agent_pos"], strict=True))
            if all(d.name in measured for d in self._robot.action):
                return {"actions": np.array([measured[d.name] for d in self._robot.action], np.float32)}
        return dict(repeat_last_hold(last_action, dims))

    def cleanup(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    @property
    def _rows(self) -> VectorEnv:
        assert self._env is not None
        return self._env

    @property
    def _robot(self) -> RobotSpec:
        """The policy's robot where it is known: its cameras are those that are sent."""
        robot = self._policy.robot if self._policy is not None else self._rows.robot
        if robot is None:
            raise UserError(f"{self._made} does not describe its robot", "serve the policy by `vla serve`")
        return robot

    def _open(self, env_id: str) -> None:
        if self._made == env_id and self._env is not None:
            return
        self.cleanup()
        self._env, self._made = make(env_id, 1, self._policy, self._options), env_id
