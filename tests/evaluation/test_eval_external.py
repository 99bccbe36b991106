"""Benchmarks in the evaluation: made as the policy knows them, rolled out, filmed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sim import external
from vla_stack.cli import main
from vla_stack.envs import make
from vla_stack.errors import UserError
from vla_stack.schema import Camera, Chunks, Dim, PolicySpec, RobotSpec
from vla_stack.verbs import eval as verb


def spec_of(env_id: str, **options) -> RobotSpec:
    env = external.make(env_id, **options)
    env.close()
    return env.unwrapped.spec_robot


class Rehearsed:
    """Knows the expert's actions for the scene of one seed."""

    def __init__(self, env_id: str, seed: int, **options) -> None:
        env = external.make(env_id, **options)
        env.reset(seed=seed)
        expert, actions, over = external.make_expert(env), [], False
        while not over:
            actions.append(expert.act())
            _, _, terminated, truncated, info = env.step(actions[-1])
            over = terminated or truncated
        assert info["is_success"]
        self.spec = PolicySpec(robot=env.unwrapped.spec_robot, horizon=8)
        self.plan = np.stack(actions + [actions[-1]] * 8)
        env.close()

    def infer(self, observations, seeds, *_):
        for o in observations:
            o.check(self.spec.robot)
        return Chunks(np.stack([self.plan[o.step : o.step + 8] for o in observations]))


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("metaworld/push-v3", {"control_mode": "ee_abs", "control_hz": 20, "cameras": ("topview", "gripperPOV")}),
        ("metaworld/push-v3", {"control_mode": "ee_delta", "cameras": ("corner2",)}),
        ("aloha/transfer_cube", {"control_hz": 10, "cameras": ("angle",)}),
    ],
)
def test_the_environment_is_made_as_the_policy_knows_it(env_id, options):
    robot = spec_of(env_id, image_size=(12, 16), **options)
    env = make(env_id, 1, PolicySpec(robot=robot, horizon=8)).row(0)
    assert env.unwrapped.spec_robot == robot
    env.close()


def test_a_policy_of_another_arm_is_refused_in_one_line():
    robot = spec_of("aloha/transfer_cube", control_hz=10)
    with pytest.raises(UserError, match="metaworld/reach-v3: there is no camera 'top'|there is no camera 'top'"):
        make("metaworld/reach-v3", 1, PolicySpec(robot=robot, horizon=8))
    blind = RobotSpec(robot.name, robot.state, robot.action, (), 20.0)
    with pytest.raises(UserError, match=r"metaworld/reach-v3 has action \[hand_x.pos"):
        make("metaworld/reach-v3", 1, PolicySpec(robot=blind, horizon=8))


def test_a_policy_without_a_description_gets_the_benchmarks_own_rate_and_actions():
    dims = tuple(Dim(f"x_{i}", "1") for i in range(4))
    robot = RobotSpec("lerobot/act", dims, dims, (Camera("corner2", 12, 16),), 10.0)
    env = make("metaworld/reach-v3", 1, PolicySpec(robot=robot, horizon=8), {"control_mode": "ee_abs"}).row(0)
    assert env.unwrapped.spec_robot.rate_hz == 80.0
    env.close()


def test_standing_still_neither_moves_the_hand_nor_shuts_the_gripper():
    delta = spec_of("metaworld/reach-v3", control_mode="ee_delta", cameras=())
    measured = np.array([0.0, 0.6, 0.2, 1.0], np.float32)
    np.testing.assert_array_equal(delta.standstill(measured), np.zeros(4))  # 1 would close what is measured to be open
    absolute = spec_of("metaworld/reach-v3", control_mode="ee_abs", cameras=())
    np.testing.assert_array_equal(absolute.standstill(measured), measured)


@pytest.mark.slow
def test_vla_eval_rolls_out_and_films(tmp_path, monkeypatch, capsys):
    policy = Rehearsed("metaworld/reach-v3", 1000, control_mode="ee_abs", control_hz=20, image_size=16)
    monkeypatch.setattr(verb, "_load", lambda *_: (tmp_path / "policy", policy))
    arguments = ["--env", "metaworld/reach-v3", "--episodes", "1", "--workers", "0", "--visuals", "official"]
    assert main(["eval", *arguments, "--videos", "1", "--out", str(tmp_path)]) == 0
    assert "1/1" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert result["settings"]["env_options"]["visuals"] == "official" and result["stages"] == []
    (episode,) = result["episodes"]
    assert episode["success"] and episode["instruction"] == "Reach a goal position"
    assert (tmp_path / episode["video"]).is_file()
