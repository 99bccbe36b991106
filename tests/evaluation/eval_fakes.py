"""A one-dimensional environment with the project's API, and scripted policies for it. Imported by worker processes."""

import gymnasium as gym
import numpy as np

from vla_stack.schema import Camera, Chunks, Dim, PolicySpec, RobotSpec

ROBOT = RobotSpec(
    name="test/line",
    state=(Dim("x.pos", "m"), Dim("gripper.pos", "ratio", kind="gripper")),
    action=(Dim("x.pos", "m"), Dim("gripper.pos", "ratio", kind="gripper")),
    cameras=(Camera("front", 16, 16),),
    rate_hz=10.0,
)
LIMIT = 40


class Line(gym.Env):
    """Go to the instructed end of a line; the reachable speed is 0.25 m a step. The picture shows where one is."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    task_variants = ("go left", "go right")
    stages = ("started", "half way", "there")
    spec_robot = ROBOT

    def __init__(self, image_size=16, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Dict(
            {
                "pixels": gym.spaces.Dict({"front": gym.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)}),
                "agent_pos": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            }
        )
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._size = image_size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._k = self.np_random.uniform(-0.2, 0.2), 0
        self.task = self.task_variants[self.np_random.integers(2)]
        self._goal = -1.0 if self.task == "go left" else 1.0
        return self._observe(), self._info()

    def step(self, action):
        self.received = float(action[0])
        self._x += np.clip(action[0] - self._x, -0.25, 0.25)
        self._k += 1
        info = self._info()
        return self._observe(), float(info["is_success"]), info["is_success"], self._k >= LIMIT, info

    def render(self):
        return self._observe()["pixels"]["front"].repeat(4, axis=0).repeat(4, axis=1)

    def _observe(self):
        image = np.full((self._size, self._size, 3), 40, np.uint8)
        image[:, int(np.clip((self._x + 1) / 2, 0, 0.99) * self._size)] = 255
        return {"pixels": {"front": image}, "agent_pos": np.array([self._x, 1.0], np.float32)}

    def _info(self):
        to_go = abs(self._goal - self._x)
        return {
            "is_success": to_go < 0.05,
            "stage": 3 if to_go < 0.05 else 1 + int(to_go < 0.5),
        }

    def achieved(self, instruction):
        return abs(self._x - (-1.0 if instruction == "go left" else 1.0)) < 0.05


class Counter(Line):
    """Records nothing but insists that each command equals the tick it is sent at."""

    def _info(self):
        return super()._info() | {"is_success": False}


class Dark(Line):
    """Cannot be filmed."""

    metadata = {"render_modes": []}

    def __init__(self):
        super().__init__()


class Silent(Line):
    """Does not say when its task is done."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {}


class Crash(Line):
    def step(self, action):
        raise RuntimeError("the gearbox fell off")


gym.register("Line-v0", entry_point="eval_fakes:Line")
gym.register("Counter-v0", entry_point="eval_fakes:Counter")
gym.register("Dark-v0", entry_point="eval_fakes:Dark")
gym.register("Silent-v0", entry_point="eval_fakes:Silent")
gym.register("Crash-v0", entry_point="eval_fakes:Crash")


class Policy:
    """Common to all: a horizon of 8, and a log of the batches asked for."""

    spec = PolicySpec(robot=ROBOT, horizon=8, model_version="scripted")

    def __init__(self):
        self.batches = []

    def infer(self, observations, seeds):
        self.batches.append(len(observations))
        chunks = [self.chunk(o, s) for o, s in zip(observations, seeds, strict=True)]
        return Chunks(np.stack(chunks).astype(np.float32))


class Obedient(Policy):
    """Goes where it is told, with noise from its seed."""

    def chunk(self, observation, seed):
        goal = -1.0 if observation.task == "go left" else 1.0
        chunk = np.ones((8, 2))
        chunk[:, 0] = np.linspace(observation.state[0], goal, 9)[1:]
        return chunk + np.random.default_rng(seed).normal(0, 0.01, (8, 1)) * [1, 0]


class Undecided(Obedient):
    """Wants one action of a chunk executed on the way left, three on the way right."""

    def infer(self, observations, seeds):
        execute = tuple(1 if o.task == "go left" else 3 for o in observations)
        return Chunks(super().infer(observations, seeds).actions, execute)


class TickLabel(Policy):
    """Actions that say at which tick they are due."""

    def chunk(self, observation, seed):
        return np.stack([observation.step + np.arange(8), np.ones(8)], axis=1)
