"""The loop of preferences at toy size: what it writes, that it goes on where it stopped, and its arms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature

import sim  # noqa: F401  registers its tasks
from vla_stack import cli, envs
from vla_stack.data.layout import read_json
from vla_stack.data.preferences import read_pairs, read_rollout, read_scores, rollout_files
from vla_stack.errors import UserError
from vla_stack.evaluation import video
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.report import note_lines
from vla_stack.methods.grape import loop as grape
from vla_stack.methods.grape.report import _filmed
from vla_stack.methods.grape.rollouts import Sampler
from vla_stack.policies.chain import sample_chain
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION, OBS_IMAGES, OBS_STATE, Observation
from vla_stack.training.recipe import load

CONFIG = Path(__file__).parents[2] / "vla_stack" / "configs" / "grape_safety.yaml"
TOY = [
    f"method.{key}" for key in ("starts=2", "rollouts_per_start=3", "num_envs=3", "calibration=2", "films=1", "steps=2")
]
TOY += [f"method.{key}" for key in ("batch_size=2", "save_every=1", "execute=4", "pairs.winner_succeeds=false")]
TOY += ["eval.episodes=2", "eval.num_envs=3", "threads=1"]
# Plain step-wise preferences, without what the recipe adds to them.
STEP_WISE = [f"method.{key}" for key in ("aggregate=window", "window=1", "proximal=0", "sft=0")]


def save_policy(path: Path, head: str = "flow", **options: Any) -> Path:
    """A tiny policy for the task with a wall, which knows nothing of it."""

    env = gym.make("sim/obstacle-v0", cameras=(), privileged=True, disable_env_checker=True, **options)
    robot = env.unwrapped.spec_robot
    states, actions = len(robot.state), len(robot.action)
    torch.manual_seed(0)
    config = VlaConfig(
        device="cpu", push_to_hub=False, chunk_size=6, n_action_steps=4, num_inference_steps=2, depth=1, width=16,
        expert_width=16, heads=2, head_dim=8, max_tokens=48, vocabulary=257, head=head, robot=robot.to_json(),
        action_feature_names=[d.name for d in robot.action],
        input_features={OBS_STATE: PolicyFeature(FeatureType.STATE, (states,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (actions,))},
    )  # fmt: skip
    stats = {k: {"mean": np.zeros(n, np.float32), "std": np.ones(n, np.float32)} for k, n in
             ((OBS_STATE, states), (ACTION, actions))}  # fmt: skip
    stats[ACTION]["std"] *= 0.05
    for part in (VlaPolicy(config), *make_vla_pre_post_processors(config, stats)):
        part.save_pretrained(path)
    env.close()
    return path


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def train(policy: Path, out: Path, *options: str) -> None:
    assert cli.main(["train", str(CONFIG), *TOY, f"policy={policy}", f"output_dir={out}", *options]) == 0


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("iterations") / "run"
    train(policy, out)
    return out


def test_a_round_leaves_rollouts_pairs_a_policy_and_a_report(run, policy):
    records = [read_json(p) for p in sorted(run.glob("iteration-*/record.json"))]
    assert [r["iteration"] for r in records] == [0, 1] and records[1]["rollouts"] == 6 and records[1]["beta"] > 0
    root = run / "iteration-001"
    scores, pairs = read_scores(root), read_pairs(root)
    assert len(scores) == 6 and 1 <= len(pairs) <= 2 and all(p.winner[:10] == p.loser[:10] for p in pairs)
    assert {s["name"] for s in scores[0].stages} == {"cross", "grasp", "lift"}
    rollout = read_rollout(rollout_files(root)[0])
    assert rollout.decisions["executed"].sum() == rollout.facts.steps == len(rollout.trace["time"])
    sent = np.concatenate(
        [a[:n] for a, n in zip(rollout.decisions["action"], rollout.decisions["executed"], strict=True)]
    )
    np.testing.assert_allclose(sent, rollout.trace["action"], atol=1e-6)  # what is trained on is what was done
    others = read_rollout(rollout_files(root)[1])
    assert not np.array_equal(others.decisions["action"][0], rollout.decisions["action"][0])
    np.testing.assert_array_equal(others.decisions[OBS_STATE][0], rollout.decisions[OBS_STATE][0])  # the same start
    page = (run / "report.html").read_text()
    assert "Before and after" in page and "cost of winners" in page and "data:video/mp4" in page


def test_a_stopped_run_goes_on_with_the_same_rollouts(run):
    root = run / "iteration-001"
    before = {p.name: p.read_bytes() for p in rollout_files(root)}
    record = read_json(root / "record.json")
    for name in ("record.json", "pairs.parquet", f"rollouts/{rollout_files(root)[2].name}"):
        (root / name).unlink()
    assert cli.main(["train", "--resume", str(run), "method.films=0"]) == 0
    again = read_rollout(rollout_files(root)[2])
    assert {p.name for p in rollout_files(root)} == before.keys()
    assert read_json(root / "record.json")["success"] == record["success"]
    assert again.facts.steps == len(again.trace["time"])


def test_a_run_goes_on_as_it_was_begun(run, capsys):
    assert cli.main(["train", "--resume", str(run), "method.pairs.m=2"]) == 1
    assert "method.pairs=" in capsys.readouterr().err
    assert cli.main(["train", "--resume", str(run), "method.films=0"]) == 0


def test_the_policy_rolls_out_where_it_is_trained(policy, tmp_path, monkeypatch):
    asked = []

    def no_policy(path, device):
        asked.append(device)
        raise StopIteration

    monkeypatch.setattr(grape, "find_device", lambda name: torch.device(name))
    monkeypatch.setattr(grape, "load_policy", no_policy)
    overrides = [*TOY, f"policy={policy}", "device=cuda:1"]
    loop = grape.GrapeLoop(load(CONFIG, overrides), tmp_path)
    for step in (lambda: loop.roll_out(1), lambda: loop.evaluate(policy)):
        with pytest.raises(StopIteration):
            step()
    assert asked == ["cuda:1", "cuda:1"]


def test_films_show_the_environment_that_was_evaluated(tmp_path, monkeypatch):
    made = []
    make = envs.make
    monkeypatch.setattr(video.envs, "make", lambda name, n, policy, how: made.append(how) or make(name, n, policy, how))
    policy = save_policy(tmp_path / "policy", control_mode="ee_delta", control_hz=20)
    recipe = load(CONFIG, [*TOY, f"policy={policy}"])
    loop = grape.GrapeLoop(recipe, tmp_path / "run")
    loaded = loop.load(policy)
    ((_, whole),) = loop.episodes(loaded, [7])
    episode = replace(whole, actions=whole.actions[:3])  # films take long
    result = _filmed(loop, loaded.spec, [episode], "before")
    assert made[-1]["control_mode"] == "ee_delta" and made[-1]["control_hz"] == result.rate_hz == 20
    assert Path(result.episodes[0].video).is_file()
    broken = replace(episode, success=not episode.success)
    result = _filmed(loop, loaded.spec, [broken], "after")
    assert not result.episodes[0].video and "seed 7 ended differently" in note_lines(result)


def test_its_evaluation_is_that_of_vla_eval(policy, tmp_path):
    loop = grape.GrapeLoop(load(CONFIG, [*TOY, f"policy={policy}"]), tmp_path)
    loaded, e = loop.load(policy), loop.recipe.eval
    found = [record for _, record in loop.episodes(loaded)]
    result = evaluate(loaded, loop.recipe.task.id, e.episodes, e.seed, loop.executor, num_envs=e.num_envs)
    assert len(found) == len(result.episodes) == 2
    for a, b in zip(found, result.episodes, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        assert (a.seed, a.success, a.steps) == (b.seed, b.success, b.steps)


def test_the_noise_of_a_rollout_is_its_own_whoever_shares_its_batch(policy):
    sampler = Sampler(load_policy(policy), sigma=0.5)
    size = len(sampler.policy.spec.robot.state)
    observations = [Observation(np.full(size, x, np.float32), {}, "pick", 0, 0) for x in (0.1, 0.3)]
    (both, _), ((alone,), _) = sampler._sample(observations, [1, 2]), sampler._sample(observations[1:], [2])
    np.testing.assert_allclose(both[1]["chain"], alone["chain"], atol=1e-4)
    network = sampler.policy.policy
    with torch.inference_mode():
        context = network.encode(sampler.policy.preprocess(observations[1:]))
        generator = torch.Generator().manual_seed(2)
        noise = torch.randn(1, network.horizon, network.noise_dim, generator=generator)
        chain = sample_chain(network, context, noise, torch.full((1, 2, 1, 1), 0.5), generator)
    np.testing.assert_array_equal(alone["chain"], chain[0].numpy())


def test_rollouts_begin_with_the_noise_that_the_policy_is_deployed_with(policy):
    chunks = load_policy(policy)
    chunks.policy.noise_scale = 0.2
    observation = Observation(np.zeros(len(chunks.spec.robot.state), np.float32), {}, "pick", 0, 0)
    ((reply,), _) = Sampler(chunks, sigma=0.5)._sample([observation], [2])
    np.testing.assert_array_equal(reply["chain"][0], chunks.noise([2])[0].numpy())


def test_how_much_a_policy_wants_executed_is_what_a_rollout_executes(policy, monkeypatch):
    chunks = load_policy(policy)
    observation = Observation(np.zeros(len(chunks.spec.robot.state), np.float32), {}, "pick", 0, 0)
    infer = chunks.infer
    monkeypatch.setattr(chunks, "infer", lambda *given: replace(infer(*given), execute=(3,)))
    assert Sampler(chunks).infer([observation], [2]).row(0)[1] == 3


def test_a_policy_that_is_not_there_leaves_no_run(tmp_path, capsys):
    assert cli.main(["train", str(CONFIG), "policy=no/such/policy", f"output_dir={tmp_path / 'x'}"]) == 1
    assert "'no/such/policy' holds no policy (there is no such directory)" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_policy_with_a_history_is_refused_before_anything_is_rolled_out(tmp_path):
    features = {OBS_STATE: PolicyFeature(FeatureType.STATE, (5,)),
                f"{OBS_IMAGES}.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}  # fmt: skip
    VlaConfig(device="cpu", push_to_hub=False, history=2, input_features=features).save_pretrained(tmp_path / "policy")
    with pytest.raises(UserError, match="reads earlier observations") as raised:
        grape.GrapeLoop(load(CONFIG, [*TOY, f"policy={tmp_path / 'policy'}"]), tmp_path / "run")
    assert raised.value.remedy == "train it with history=0"


@pytest.mark.parametrize(
    "options",
    [
        ["method.sigma=0.1", "method.beta=0.1"],
        ["method.pairs.how=shuffled", "method.beta=10", *STEP_WISE, "method.weights.self=0"],
    ],
    ids=["chain", "step-wise"],
)
def test_other_arms_run(policy, tmp_path, options):
    train(policy, tmp_path / "run", "method.films=0", *options)
    lines = (tmp_path / "run" / "iteration-001" / "train" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert logged[0]["tpo"] == pytest.approx(np.log(2), rel=1e-3)
    if options[0].startswith("method.sigma"):
        rollout = read_rollout(rollout_files(tmp_path / "run" / "iteration-001")[0])
        assert rollout.decisions["chain"].shape[1:] == (3, 6, 5)


def test_errors_name_the_key(tmp_path, capsys):
    assert cli.main(["train", str(CONFIG), "method.objective=speed", f"output_dir={tmp_path / 'a'}"]) == 1
    assert "'method.objective'" in capsys.readouterr().err
    assert cli.main(["train", str(CONFIG), "method.constraints=none.yaml", f"output_dir={tmp_path / 'b'}"]) == 1
    assert "none.yaml" in capsys.readouterr().err
    for seed, shared in ((100_000, "100000 to"), (99_950, "50 of the starts, 100000 to 100049")):
        overrides = [f"eval.seed={seed}", "eval.episodes=100", "method.starts=64", f"output_dir={tmp_path / 'c'}"]
        assert cli.main(["train", str(CONFIG), *overrides]) == 1
        error = capsys.readouterr().err
        assert "eval.seed" in error and shared in error
