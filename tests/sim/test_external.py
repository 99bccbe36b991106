"""Environments of other projects: the observation form, what it must not show, experts, and errors in one line."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium.utils.env_checker import check_env

from sim import external
from vla_stack.errors import UserError

SMALL = {"image_size": (16, 24)}


def task(env: gym.Env):
    return env.unwrapped


def run_expert(env: gym.Env, seed: int, noise: float = 0.0) -> tuple[bool, int]:
    env.reset(seed=seed)
    expert = external.make_expert(env, noise, seed)
    for k in range(1, 1000):
        _, _, terminated, truncated, info = env.step(expert.perturb(expert.act()))
        if terminated or truncated:
            return info["is_success"], k
    raise AssertionError("no time limit")


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("metaworld/push-v3", {"cameras": ("corner2", "gripperPOV")}),
        ("metaworld/drawer-open-v3", {"control_mode": "ee_abs", "control_hz": 20, "cameras": ()}),
        ("aloha/transfer_cube", {}),
        ("aloha/insertion", {"control_hz": 10, "cameras": ("top", "angle")}),
    ],
)
def test_gymnasium_accepts_it_and_observations_fit_their_description(env_id, options):
    env = external.make(env_id, **SMALL, **options)
    check_env(task(env), skip_render_check=True)
    spec = task(env).spec_robot
    obs, info = env.reset(seed=1)
    assert obs["agent_pos"].shape == (len(spec.state),) and info["task"] == task(env).task and not info["is_success"]
    assert info.get("stage", -1) == (0 if task(env).stages else -1)
    assert [c.name for c in spec.cameras] == list(obs.get("pixels", {}))
    assert all(picture.shape == (16, 24, 3) for picture in obs.get("pixels", {}).values())
    assert task(env).task_description
    assert [a.name for a in spec.action] == [s.name for s in spec.state[: len(spec.action)]]
    with pytest.raises(ValueError, match="finite"):
        env.step(np.full(len(spec.action), np.nan))
    env.close()


def test_the_state_holds_no_object_and_the_pictures_do():
    env = external.make("metaworld/push-v3", **SMALL)
    starts = []
    for seed in (1, 2):
        obs, _ = env.reset(seed=seed)
        starts.append((obs["agent_pos"], task(env).privileged[4:7].copy(), obs["pixels"]["corner2"]))
    (hand, puck, picture), (hand_2, puck_2, picture_2) = starts
    assert np.abs(hand - hand_2).max() < 1e-6 and np.abs(puck - puck_2).max() > 0.01
    assert (picture != picture_2).any()
    # Until the first step the package leaves the goal's marker where the last episode had it.
    native = task(env)._env
    np.testing.assert_array_equal(native.data.site("goal").xpos, native._target_pos)
    env.close()


@pytest.mark.parametrize("env_id", ["metaworld/push-v3", "aloha/transfer_cube"])
def test_a_seed_is_an_episode_whatever_was_before(env_id):
    used, fresh = (external.make(env_id, **SMALL) for _ in range(2))
    used.reset(seed=7)
    rng = np.random.default_rng(0)
    actions = [task(used).action_space.low + rng.random(used.action_space.shape[0]) for _ in range(5)]
    for action in actions:
        used.step(action)
    one, two = used.reset(seed=3)[0], fresh.reset(seed=3)[0]
    for action in actions:
        np.testing.assert_array_equal(one["agent_pos"], two["agent_pos"])
        np.testing.assert_array_equal(*(next(iter(o["pixels"].values())) for o in (one, two)))
        (one, *_), (two, *_) = used.step(action), fresh.step(action)
    assert (used.reset()[0]["agent_pos"] >= -10).all()  # without a seed: another scene of the same stream
    used.close()
    fresh.close()


def test_targets_and_moves_of_metaworld_are_the_same_control():
    """The expert's actions in either mode become the same native actions, so both see the same episode."""
    paths = []
    for mode in ("ee_delta", "ee_abs"):
        env = external.make("metaworld/reach-v3", control_mode=mode, control_hz=20, cameras=())
        env.reset(seed=4)
        expert, path = external.make_expert(env), []
        for _ in range(6):
            path.append(env.step(expert.act())[0]["agent_pos"])
        paths.append(path)
        assert task(env).spec_robot.action_kind == ("delta" if mode == "ee_delta" else "absolute")
    np.testing.assert_allclose(*paths, atol=1e-5)


def test_an_episode_is_truncated_after_the_benchmarks_own_number_of_steps():
    assert external.make("metaworld/reach-v3", control_hz=20, cameras=())._max_episode_steps == 125
    assert external.make("aloha/insertion", cameras=())._max_episode_steps == 400
    env = external.make("metaworld/reach-v3", control_hz=20, cameras=(), max_episode_steps=2)
    env.reset(seed=0)
    assert [env.step(np.zeros(4))[3] for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "name", ["button-press-topdown-v3", "drawer-open-v3", "push-v3", "pick-place-v3", "window-open-v3"]
)
def test_metaworlds_experts_succeed_at_a_quarter_of_its_rate(name):
    env = external.make(f"metaworld/{name}", control_mode="ee_abs", control_hz=20, cameras=())
    outcomes = [run_expert(env, seed) for seed in range(4)]
    assert all(success for success, _ in outcomes) and max(steps for _, steps in outcomes) < 80


def test_a_touch_is_what_the_package_calls_a_touch():
    env = external.make("metaworld/pick-place-v3", control_mode="ee_abs", control_hz=20, cameras=())
    env.reset(seed=0)
    native, expert, found = task(env)._env, external.make_expert(env), []
    for _ in range(30):
        env.step(expert.act())
        geoms = range(native.model.ngeom)
        found.append([bool(native.touching_object(g)) for g in geoms])
        assert found[-1] == [bool(super(type(native), native).touching_object(g)) for g in geoms]
    assert np.sum(found) > 3


def test_every_metaworld_task_has_words_and_an_expert():
    from metaworld.env_dict import ENV_CLS_MAP
    from metaworld.policies import ENV_POLICY_MAP

    from sim.external.metaworld import instructions

    assert set(instructions()) == set(ENV_CLS_MAP) == set(ENV_POLICY_MAP) and len(ENV_CLS_MAP) == 50


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_transfer_expert_hands_the_cube_over(noise):
    env = external.make("aloha/transfer_cube", control_hz=10, cameras=())
    for seed in range(5):
        assert run_expert(env, seed, noise)[0] and task(env).stage == len(task(env).stages) == 4


def test_noise_leaves_the_label_alone_and_spares_the_gripper():
    env = external.make("metaworld/push-v3", cameras=())
    env.reset(seed=0)
    expert = external.make_expert(env, noise=0.5, seed=1)
    label = expert.act()
    sent = np.stack([expert.perturb(label) for _ in range(20)])
    assert (label == expert.act()).all() and (sent[:, 3] == label[3]).all()
    assert 0 < (sent[:, 0] != label[0]).sum() < 20


def test_pictures_are_official_on_request():
    shown = {}
    for visuals in ("fast", "official"):
        env = external.make(
            "aloha/transfer_cube", visuals=visuals, render_mode="rgb_array", render_size=(30, 40), **SMALL
        )
        shown[visuals] = env.reset(seed=0)[0]["pixels"]["top"]
        assert env.render().shape == (30, 40, 3)
        env.close()
    assert (shown["fast"] != shown["official"]).any()


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("metaworld/pusch-v3", {}, "no task 'pusch-v3' -- did you mean push-v3"),
        ("metaworld/push-v3", {"cameras": ("front",)}, "no camera 'front' -- the scene has topview, corner"),
        ("metaworld/push-v3", {"control_hz": 30}, "does not divide MetaWorld's 80 Hz -- use 80, 40, 20"),
        (
            "metaworld/push-v3",
            {"control_mode": "joint"},
            "control_mode='joint' does not exist -- use ee_delta or ee_abs",
        ),
        ("metaworld/push-v3", {"visuals": "pretty"}, "visuals='pretty' does not exist -- use fast or official"),
        ("aloha/insertion", {"control_mode": "ee_abs"}, "aloha/insertion does not take these options: .*control_mode"),
        ("metaworld/push-v3", {"max_episode_steps": 0}, "max_episode_steps=0 is not positive"),
        ("metaworld/push-v3", {"control_hz": 0}, "control_hz=0 is not positive"),
        ("aloha/insertion", {"image_size": (96, 0)}, "image_size=0 is not positive"),
        ("aloha/stack", {}, "gym-aloha has no task 'stack' -- use transfer_cube or insertion"),
    ],
)
def test_errors_name_the_value_and_the_remedy(env_id, options, message):
    with pytest.raises(UserError, match="^" + ".*" + message):
        external.make(env_id, **options)


def test_a_task_without_expert_says_so():
    env = external.make("aloha/insertion", cameras=())
    env.reset(seed=0)
    with pytest.raises(UserError, match="no scripted expert for 'Insert the peg"):
        external.make_expert(env)


@pytest.mark.parametrize(("env_id", "package"), [("metaworld/push-v3", "metaworld"), ("aloha/insertion", "gym_aloha")])
def test_a_missing_package_is_one_line_with_the_line_that_installs_it(env_id, package, monkeypatch):
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"sim.external.{env_id.partition('/')[0]}", raising=False)  # of a test before
    with pytest.raises(
        UserError, match=rf"{env_id} needs the package '{package}' -- pip install .vla-stack\[sim-extra\]"
    ):
        external.make(env_id)


# LIBERO's package is not part of the test environment (its meshes are in none): a stand-in of the same layout.


class FakeLiberoEnv:
    """What LeRobot's environment offers: pictures on their heads, a robot state, numbered initial states."""

    task_description, _max_episode_steps = "pick up the bowl", 280

    def __init__(self, suite, index, name, camera_name, obs_type, observation_height, observation_width):
        names = {"agentview_image": "image", "robot0_eye_in_hand_image": "image2"}
        self.cameras, self.shape = [names[c] for c in camera_name], (observation_height, observation_width, 3)
        self.made, self.init_state_id = (name, index, obs_type), 0

    def reset(self, seed):
        return self._observe(), {}

    def step(self, action):
        assert action.shape == (7,) and action.dtype == np.float32
        return self._observe(), 0.0, False, False, {"is_success": action[6] > 0.5}

    def _observe(self):
        picture = np.zeros(self.shape, np.uint8)
        picture[0, 0, 0] = 200
        eef = {"pos": np.full(3, self.init_state_id), "quat": np.array([0.0, 0.0, 1.0, 0.0])}
        robot = {"eef": eef, "gripper": {"qpos": np.array([0.04, -0.04])}}
        return {"pixels": dict.fromkeys(self.cameras, picture), "robot_state": robot}

    def close(self): ...


@pytest.fixture
def libero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``libero`` without meshes; returns its inner folder."""
    inner = tmp_path / "site" / "libero" / "libero"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "config"))
    suite = types.SimpleNamespace(n_tasks=10)
    benchmark = types.SimpleNamespace(get_benchmark_dict=lambda: {"libero_spatial": lambda: suite})
    modules = {"libero": None, "libero.libero": types.SimpleNamespace(benchmark=benchmark)}
    modules["lerobot.envs.libero"] = types.SimpleNamespace(LiberoEnv=FakeLiberoEnv)
    for name, module in modules.items():
        if module is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, module)
    return inner


def test_libero_without_its_package_or_its_meshes_is_one_line(libero: Path, monkeypatch):
    with pytest.raises(
        UserError, match="LIBERO's meshes are neither in .* nor in .*cache/libero/assets -- hf download"
    ) as e:
        external.make("libero/libero_spatial/3")
    assert str(libero / "assets") in str(e.value) and "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(UserError, match="needs the package 'libero' -- docs/benchmarks.md"):
        external.make("libero/libero_spatial/3")


def test_libero_is_made_through_lerobots_environment(libero: Path, tmp_path: Path):
    for name in (
        "articulated_objects",
        "stable_scanned_objects",
        "turbosquid_objects",
        "stable_hope_objects",
        "scenes",
    ):
        (libero / "assets" / name).mkdir(parents=True)
    for wrong in ("libero_spatial/10", "libero_spatial", "libero_spatial/x"):
        with pytest.raises(
            UserError, match="names no task -- write libero/libero_spatial/0 to libero/libero_spatial/9"
        ):
            external.make(f"libero/{wrong}")
    with pytest.raises(UserError, match="no suite 'kitchen' -- the suites are libero_spatial"):
        external.make("libero/kitchen/0")

    env = external.make("libero/libero_spatial/3", image_size=8)
    config = yaml.safe_load((tmp_path / "config" / "config.yaml").read_text())  # so that LIBERO asks nothing
    assert config["init_states"] == str(libero / "init_files")
    assert task(env)._env.made == ("libero_spatial", 3, "pixels_agent_pos") and env._max_episode_steps == 280
    obs, info = env.reset(seed=5)
    np.testing.assert_allclose(obs["agent_pos"], [5, 5, 5, 0, 0, np.pi, 0.04, -0.04], rtol=1e-6)
    assert obs["pixels"]["image2"][7, 7, 0] == 200 and info["task"] == "pick up the bowl"
    assert env.step(np.array([9.0] * 7))[2]  # clipped to 1, the gripper closes, success ends the episode
    env.close()
