"""A package from outside, of at most 150 lines, brings a task, a robot, a policy type, an environment and a method."""

import json
from pathlib import Path

import numpy as np
import pytest
from as_installed import lay_out, vla

from vla_stack.evaluation.evaluate import evaluate
from vla_stack.schema import Chunks, PolicySpec

PACKAGE = Path(__file__).parent / "outside"


class Pushes:
    """Drives the cart to the origin, from what it sees alone."""

    def __init__(self, robot):
        self.spec = PolicySpec(robot, horizon=1)

    def infer(self, observations, seeds, continuations=()):
        return Chunks(np.stack([np.full((1, 1), -5.0 * o.state[1], np.float32) for o in observations]))


def test_it_is_small():
    assert sum(len(file.read_text().splitlines()) for file in PACKAGE.iterdir() if file.is_file()) <= 150


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the package is installed."""
    site = tmp_path_factory.mktemp("site")
    lay_out(PACKAGE, site)
    return site


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_task_robot_policy_type_and_method_are_used_by_the_commands(site, tmp_path):
    data = tmp_path / "data"
    printed = vla(
        site,
        "--list tasks robots policies environments methods",
        "robot check --robot slider --seconds 0.3",
        f"collect --task lerobot_policy_outside:Touch --episodes 1 --workers 1 --image-size 32 --image-mode image "
        f"--root {data}",
        f"train own_loss policy.type=constant data.root={data} method.steps=2 method.batch_size=4 device=cpu threads=1 "
        f"output_dir={tmp_path}/imitated",
        f"train search policy={tmp_path}/imitated task=sim/touch-v0 task.options.max_episode_steps=3 "
        f"output_dir={tmp_path}/searched",
        f"eval --policy {tmp_path}/searched --env sim/touch-v0 lerobot_policy_outside:Touch --episodes 1 --max-steps 3 "
        f"--workers 0 --videos 0 --out {tmp_path}",
    )
    assert printed.count("lerobot_policy_outside\n") == 5 and "outside/slider: 1 commands" in printed
    by_name, by_class = json.loads((tmp_path / "report.json").read_text())["results"]
    assert (by_name["name"], by_class["name"]) == ("sim/touch-v0", "lerobot_policy_outside:Touch")
    assert by_name["episodes"] == by_class["episodes"] and by_name["episodes"][0]["steps"] == 3


@pytest.mark.slow
def test_the_environment_is_the_engines(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    from lerobot_policy_outside import Rail

    one, three = (evaluate(Pushes(Rail.robot), "rail:0.5", episodes=3, num_envs=n) for n in (1, 3))
    assert one.episodes == three.episodes and one.success_rate == 1.0
