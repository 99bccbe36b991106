"""A policy without cameras, from demonstrations to rollouts, by the command line."""

import json

import pytest

from vla_stack.cli import main
from vla_stack.data.features import read_robot_spec
from vla_stack.policies.chunk_policy import load_policy

RECIPE = """
policy: {type: vla, options: {chunk_size: 8, n_action_steps: 4, num_inference_steps: 2, width: 16, expert_width: 16,
                              depth: 1, heads: 2, head_dim: 8}}
method: {steps: 2, batch_size: 4}
threads: 1
"""


@pytest.mark.slow
def test_collect_train_and_eval_without_cameras(tmp_path):
    data, run, recipe = tmp_path / "push", tmp_path / "run", tmp_path / "state.yaml"
    recipe.write_text(RECIPE)
    assert main(f"collect --task push --episodes 2 --privileged --workers 1 --root {data}".split()) == 0
    robot = read_robot_spec(data)
    assert robot.cameras == () and robot.state[-1].name == "goal_joint"

    assert main(["train", str(recipe), f"data.root={data}", f"output_dir={run}"]) == 0
    policy = run / "checkpoints/last/pretrained_model"
    assert load_policy(policy).spec.robot == robot
    flags = f"--policy {policy} --env sim/push-v0 --episodes 2 --workers 0 --videos 0 --out {tmp_path}/eval"
    assert main(["eval", *flags.split()]) == 0
    assert len(json.loads((tmp_path / "eval/report.json").read_text())["results"][0]["episodes"]) == 2
