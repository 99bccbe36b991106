"""A package of somebody else's: a task, a robot, a policy type, an environment and a method in one small module."""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.optim.optimizers import AdamConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.policies.act.processor_act import make_act_pre_post_processors as make_constant_pre_post_processors  # noqa: F401

from sim import objects
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal
from vla_stack.envs import EnvStep
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.runtime.driver import Capabilities, Guard
from vla_stack.schema import Dim, Observation, RobotSpec

SPEED = Dim("x.vel", "m/s", -1.0, 1.0)


class Touch(ArmEnv):
    name, subjects = "touch", ("cube_red", "cube_red")
    config, variants = TaskConfig(max_episode_steps=30, rewards={"near": 1.0}), ({},)

    @classmethod
    def instruct(cls, variant):
        return "touch the red cube"

    def build(self, spec):
        objects.add_cubes(spec)

    def place(self, rng):
        objects.scatter_cubes(self, rng, (0.40, 0.50), (-0.10, 0.10))

    def progress(self):
        return (bool(np.linalg.norm(self.tool[:3] - self.position("cube_red")) < 0.05),)

    def keypoints(self):
        return objects.points(self, "cube_red")

    def expert_goal(self):
        return ToolGoal(self.position("cube_red") + [0.0, 0.0, 0.03], self.tool[3], 1.0)


class Slider:
    capabilities = Capabilities(guard=Guard.UNMOVED, simulated=True)
    spec = RobotSpec("outside/slider", (Dim("x.pos", "m", 0.0, 1.0),), (Dim("x.pos", "m", 0.0, 1.0),), (), 20.0)

    def connect(self):
        self.at, self.start_ns = np.zeros(1, np.float32), time.monotonic_ns()

    def read(self):
        now = time.monotonic_ns()
        return Observation(self.at, {}, "", int((now - self.start_ns) * self.spec.rate_hz / 1e9), now)

    def write(self, action):
        self.at = np.clip(action, 0.0, 1.0).astype(np.float32)
        return self.at

    hold = stop = disconnect = lambda self: None


@PreTrainedConfig.register_subclass("constant")
@dataclass
class ConstantConfig(PreTrainedConfig):
    n_action_steps: int = 2
    normalization_mapping = {kind.name: NormalizationMode.MEAN_STD for kind in FeatureType}
    observation_delta_indices = reward_delta_indices = None
    action_delta_indices = property(lambda self: list(range(self.n_action_steps)))
    get_optimizer_preset = AdamConfig
    get_scheduler_preset = validate_features = lambda self: None


class ConstantPolicy(PreTrainedPolicy):
    config_class, name = ConstantConfig, "constant"

    def __init__(self, config, **_):
        super().__init__(config)
        self.chunk = torch.nn.Parameter(torch.zeros(config.n_action_steps, config.action_feature.shape[0]))

    def predict_action_chunk(self, batch, **_):
        return self.chunk.expand(len(batch["observation.state"]), -1, -1)

    def select_action(self, batch, **_):
        return self.predict_action_chunk(batch)[:, 0]

    def forward(self, batch):
        return (self.chunk - batch["action"]).square().mean(), {}

    get_optim_params = PreTrainedPolicy.parameters
    reset = lambda self: None  # noqa: E731


class Rail:  # a cart that is to be pushed to the origin; ids are `rail:<length>`
    robot, stages = RobotSpec("outside/cart", (SPEED, Dim("x.pos", "m")), (SPEED,), (), 10.0), ()

    def __init__(self, rest, num_envs):
        self.length, self.num_envs, self.at = float(rest), num_envs, np.zeros((num_envs, 2), np.float32)

    def reset(self, rows, seeds):
        self.at[rows] = [(0.0, np.random.default_rng(seed).uniform(0.2, self.length)) for seed in seeds]
        return [self.seen(row) for row in rows]

    def step(self, rows, actions, ahead=()):
        self.at[rows] = np.column_stack([actions, self.at[rows, 1:] + actions / self.robot.rate_hz])
        return [self.seen(row) for row in rows]

    def seen(self, row):
        done = abs(float(self.at[row, 1])) < 0.05
        return EnvStep({"agent_pos": self.at[row].copy()}, float(done), done, False, {"is_success": done, "task": ""})

    row = render = lambda self, row: None
    close = lambda self: None  # noqa: E731


@dataclass(frozen=True)
class Search:
    """Of a constant policy and one that is further on, the one of the larger return is kept."""

    name: Literal["search"] = "search"

    check_recipe = lambda self, recipe: None  # noqa: E731

    def run(self, recipe, run_dir):
        copies = [load_policy(recipe.policy.pretrained) for _ in range(2)]
        for i, copy in enumerate(copies):
            copy.policy.chunk.data += 0.1 * i
        results = [evaluate(c, recipe.task.id, 1, recipe.seed, env_options=recipe.task.options) for c in copies]
        best = copies[int(np.argmax([r.episodes[0].rewards.sum() for r in results]))]
        for part in (best.policy, best.preprocessor, best.postprocessor):
            part.save_pretrained(run_dir / "pretrained_model")
