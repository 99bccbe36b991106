"""The ReinFlow loop at toy size: its files, that a stopped run gives the same curve, and what is deployed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from safetensors.torch import load_file

import sim
from vla_stack import cli
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.episodes_loop import start_of
from vla_stack.methods.reinflow.loop import ReinFlowLoop
from vla_stack.methods.reinflow.recipe import ReinFlow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import ACTION, OBS_STATE
from vla_stack.training import checkpoint as ckpt
from vla_stack.training.recipe import EvalRecipe, PolicyRecipe, Recipe, TaskRecipe, load
from vla_stack.world_model import success

CONFIG = Path(__file__).parents[2] / "vla_stack" / "configs" / "rl_reinflow.yaml"
SMALL = {"chunk_size": 3, "n_action_steps": 3, "depth": 2, "width": 8, "expert_width": 8, "heads": 2, "head_dim": 4}
LIMIT = "task.options={max_episode_steps: 5}"
TOY = ["method.iterations=2", "method.episodes=3", "method.num_envs=2", "method.save_every=1", LIMIT]
TOY += [
    "eval.every=1",
    "eval.episodes=3",
    "method.epochs=1",
    "method.minibatch=4",
    "method.critic_warmup=1",
    "method.denoising_steps=2",
]


def make_start(path: Path, horizons: tuple[int, ...] = ()) -> Path:
    """An untrained policy on the states of `place`; with horizons, a mixture of them."""
    env = sim.TASKS["place"].arm
    robot = env.spec("ee_abs", (), 64, 10.0, True)
    names = [d.name for d in robot.action]
    config = VlaConfig(
        device="cpu",
        push_to_hub=False,
        input_features={OBS_STATE: PolicyFeature(FeatureType.STATE, (len(robot.state),))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (len(names),))},
        action_feature_names=names,
        robot=robot.to_json(),
        **SMALL,
    )
    torch.manual_seed(0)
    stats = {
        key: {"mean": torch.zeros(n).numpy(), "std": torch.full((n,), s).numpy()}
        for key, n, s in ((OBS_STATE, len(robot.state), 1.0), (ACTION, len(names), 0.05))
    }
    if horizons:
        mixture = MohConfig(base=config, horizons=horizons, device="cpu", push_to_hub=False)
        parts = (MohPolicy(mixture), *make_moh_pre_post_processors(mixture, stats))
    else:
        parts = (VlaPolicy(config), *make_vla_pre_post_processors(config, stats))
    for part in parts:
        part.save_pretrained(path)
    return path


def make_recipe(start: Path, method: ReinFlow, how: EvalRecipe = EvalRecipe(episodes=1), **options: int) -> Recipe:
    task, policy = TaskRecipe("sim/place-v0", options), PolicyRecipe(pretrained=str(start))
    return Recipe(task=task, policy=policy, method=method, eval=how, device="cpu", threads=1)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return make_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def run(start, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rounds") / "run"
    assert cli.main(["train", str(CONFIG), *TOY, f"policy={start}", f"output_dir={out}"]) == 0
    return out


def records(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def test_a_run_leaves_curve_checkpoint_and_records(run: Path, start: Path) -> None:
    rows = records(run)
    assert [r["step"] for r in rows] == [0, 1, 2] and rows[0]["env_steps"] == 0 < rows[1]["env_steps"]
    assert all(len(r["eval_success"]) == 3 for r in rows) and "kl" not in rows[1] and "kl" in rows[2]
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"
    before, after = (load_file(d / "model.safetensors") for d in (start, run / "checkpoints/last/pretrained_model"))
    moved = {k.split(".")[0] for k in before if not torch.equal(before[k], after[k])}
    assert moved == {"expert"} and not any("noise" in k or "value" in k for k in after)


@pytest.mark.parametrize("left", [0, 1])
def test_a_stopped_run_gives_the_same_curve(run: Path, start: Path, tmp_path: Path, capsys, left: int) -> None:
    other = tmp_path / "run"
    assert cli.main(["train", str(CONFIG), *TOY, "method.keep=3", f"policy={start}", f"output_dir={other}"]) == 0
    for later in range(left + 1, 3):  # as if it had died before they were written
        shutil.rmtree(other / "checkpoints" / f"{later:06d}")
    assert cli.main(["train", "--resume", str(other)]) == 0
    assert records(other) == records(run)
    a, b = (load_file(d / "checkpoints/last/pretrained_model/model.safetensors") for d in (run, other))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert "vla eval --policy" in capsys.readouterr().out


def test_the_checkpoint_is_served_with_as_many_steps_as_it_was_trained_with(run: Path) -> None:
    policy = load_policy(run / "checkpoints/last/pretrained_model")
    assert policy.policy.inference_steps == 2
    result = evaluate(
        policy, "sim/place-v0", 2, executor=ExecutorConfig(mode="sync"), env_options={"max_episode_steps": 5}
    )
    assert len(result.episodes) == 2


@pytest.mark.parametrize("num_envs", [1, 3])
def test_success_in_training_is_what_an_evaluation_of_the_checkpoint_says(run: Path, num_envs: int) -> None:
    recipe = load(run / "recipe.yaml")
    result = evaluate(
        load_policy(run / "checkpoints/last/pretrained_model"),
        recipe.task.id,
        recipe.eval.episodes,
        recipe.eval.seed,
        ExecutorConfig(mode="sync"),
        num_envs=num_envs,
        env_options=recipe.task.options,
    )
    assert [int(e.success) for e in result.episodes] == records(run)[-1]["eval_success"]


def test_a_mixture_of_horizons_too_is_served_with_the_steps_of_its_training(tmp_path: Path) -> None:
    start = make_start(tmp_path / "start", horizons=(1, 3))
    assert load_policy(start).policy.inference_steps not in (1, 2)
    out = tmp_path / "run"
    assert cli.main(["train", str(CONFIG), *TOY, f"policy={start}", f"output_dir={out}"]) == 0
    before, after = load_policy(start), load_policy(out / "checkpoints/last/pretrained_model")
    assert after.policy.name == "moh" and after.policy.inference_steps == 2
    pairs = zip(before.policy.named_parameters(), after.policy.parameters(), strict=True)
    assert any("base.expert" in k and not torch.equal(a, b) for (k, a), b in pairs)


BAD = [
    *[(f"method.{key}", value) for key in ("episodes", "num_envs", "save_every", "keep") for value in (0, -1)],
    *[("eval.episodes", 0), ("eval.every", -1), ("eval.seed", -1), ("threads", -1), ("seed", -1)],
    *[("method.iterations", -1), ("method.denoising_steps", 0), ("method.epochs", 0), ("method.minibatch", 1)],
    *[("method.critic_warmup", -1), ("method.entropy", -0.1), ("method.bc", -1.0)],
    *[("method.sigma_low", 0.0), ("method.sigma_low", -0.1), ("method.sigma_high", 0.05), ("method.limit", 0.0)],
    *[("method.gamma", 0.0), ("method.gamma", 1.01), ("method.gamma", ".nan"), ("method.gae_lambda", 1.5)],
    *[("method.clip", 0.0), ("method.actor_lr", -1e-4), ("method.critic_lr", 0.0), ("method.clip_norm", 0.0)],
    *[("method.target_kl", 0.0)],
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_value_out_of_range_is_refused(key: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"'{key}' is {str(value).removeprefix('.')}, expected "):
        load(CONFIG, [f"{key}={value}"])


def test_a_refused_value_leaves_no_run(start: Path, tmp_path: Path, capsys) -> None:
    args = [str(CONFIG), *TOY, "method.sigma_low=0.5", f"policy={start}", f"output_dir={tmp_path}/x"]
    assert cli.main(["train", *args]) == 1
    assert "'method.sigma_high' is 0.4, expected at least method.sigma_low, 0.5" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("what", ["loss", "weight"])
def test_what_is_not_finite_is_not_saved_and_the_run_can_be_resumed(start: Path, tmp_path: Path, what: str) -> None:
    class Broken(ReinFlowLoop):
        def update(self, data, generator):
            metrics = super().update(data, generator)
            if self.iteration == 1 and what == "weight":
                with torch.no_grad():
                    next(p for p in self.learner.actor).view(-1)[0] = math.nan
            return metrics | ({"loss": math.nan} if self.iteration == 1 and what == "loss" else {})

    size = {"iterations": 2, "episodes": 2, "num_envs": 2, "save_every": 1}
    method = ReinFlow(epochs=1, minibatch=4, critic_warmup=0, denoising_steps=1, **size)
    recipe = make_recipe(start, method, EvalRecipe(every=1, episodes=1), max_episode_steps=4)
    with pytest.raises(UserError, match=f"{what}.* is not finite after 1 good iterations, nothing of it was saved"):
        Broken(recipe, tmp_path).run()
    assert ckpt.latest(tmp_path / "checkpoints").name == "000001"
    weights = load_file(tmp_path / "checkpoints/last/pretrained_model/model.safetensors")
    assert all(w.isfinite().all() for w in weights.values())
    assert [r["step"] for r in records(tmp_path)] == [0, 1]
    assert ReinFlowLoop(recipe, tmp_path).run().name == "000002"
    assert [r["step"] for r in records(tmp_path)] == [0, 1, 2]


def test_an_iteration_of_one_decision_keeps_the_policy_finite(start: Path, tmp_path: Path) -> None:
    method = ReinFlow(epochs=2, critic_warmup=0, denoising_steps=1, iterations=1, episodes=1, num_envs=1)
    loop = ReinFlowLoop(make_recipe(start, method, max_episode_steps=2), tmp_path)
    loop.run()
    assert records(tmp_path)[-1]["decisions"] == 1
    assert all(p.isfinite().all() for p in loop.learner.parameters())


def test_without_a_policy_it_says_what_to_give(tmp_path: Path, capsys) -> None:
    assert cli.main(["train", str(CONFIG), "policy=", f"output_dir={tmp_path}/x"]) == 1
    assert "'policy.pretrained' is missing" in capsys.readouterr().err


def test_without_its_start_it_says_what_to_run_first_and_leaves_no_run(tmp_path: Path, capsys) -> None:
    assert cli.main(["train", str(CONFIG), "policy=outputs/no/such/run", f"output_dir={tmp_path}/x"]) == 1
    error = capsys.readouterr().err
    assert "'outputs/no/such/run' holds no policy (there is no such directory)" in error
    assert "train one first: vla train rl_start" in error
    assert not (tmp_path / "x").exists()


def test_a_run_directory_is_a_start(run: Path, tmp_path: Path) -> None:
    recipe = make_recipe(run, ReinFlow(num_envs=1), max_episode_steps=2)
    loop = ReinFlowLoop(replace(recipe, device="auto"), tmp_path)
    before = load_policy(run / "checkpoints/last/pretrained_model")
    assert loop.policy.spec.model_version == before.spec.model_version
    assert start_of("shipped").name == "native_multitask"


def test_judges_pay_in_training_and_are_not_asked_in_evaluations(start: Path, tmp_path: Path, monkeypatch) -> None:
    class Lenient(gym.Wrapper):
        def __init__(self, env, name):
            super().__init__(env)
            assert name == "judges"

        def step(self, action):
            raw, reward, _, truncated, info = self.env.step(action)
            return raw, reward, True, truncated, info | {"is_success": True}

    monkeypatch.setattr(success, "Judged", Lenient)
    monkeypatch.setattr(success, "showing", lambda name, options: options | {"cameras": ("wrist",), "image_size": 16})
    method = ReinFlow(num_envs=2, judge="judges")
    loop = ReinFlowLoop(make_recipe(start, method, EvalRecipe(episodes=2), max_episode_steps=2), tmp_path)
    seen = loop.practise([0, 1])
    assert seen.success.all() and seen.reward.tolist() == [1.0, 1.0]
    assert loop.evaluate()["eval_success"] == [0, 0]
    with pytest.raises(UserError, match="reward=task pays none"):
        load(CONFIG, ["method.judge=judges", "method.reward=task"])
