"""``vla train`` on a recorded dataset, as it is typed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.configs import NormalizationMode
from safetensors.torch import load_file
from side_by_side_runs import with_torchrun
from training_fakes import ACTION, HORIZON, SIDE, STATE, record

from vla_stack.cli import main
from vla_stack.locks import LOCK, writing
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.schema import Observation
from vla_stack.training.build import make_config
from vla_stack.training.recipe import EvalRecipe, PolicyRecipe, Recipe, TaskRecipe, load
from vla_stack.training.train import evaluator

GATE = ("score", "spread")  # of a mixture of horizons


def served(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints/last/pretrained_model/model.safetensors").read_bytes()


def test_a_run_leaves_a_policy_that_loads_and_a_record_of_itself(recipe_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert main(["train", str(recipe_file), f"output_dir={run_dir}", "seed=3"]) == 0
    assert {p.name for p in run_dir.iterdir()} == {"recipe.yaml", "revision.txt", "metrics.jsonl", "tb", "checkpoints"}
    assert "seed: 3" in (run_dir / "recipe.yaml").read_text()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [2, 4, 6]
    assert all(r["samples_per_s"] > 0 and 0 <= r["data_share"] <= 1 for r in records)
    policy = load_policy(run_dir / "checkpoints/last/pretrained_model")
    assert policy.spec.robot.name == "test/arm"
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    chunk = policy.infer([Observation(np.zeros(STATE, np.float32), {"front": image}, "pick")], seeds=[0]).actions
    assert chunk.shape == (1, HORIZON, ACTION) and np.isfinite(chunk).all()


def test_resume_extends_a_run_and_equals_the_longer_one(recipe_file: Path, tmp_path: Path) -> None:
    flat = ["method.optimizer.final_lr_ratio=1.0"]  # so that the shorter run's schedule is the longer one's beginning
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'a'}", *flat, "method.steps=6"]) == 0
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'b'}", *flat, "method.steps=10"]) == 0
    assert served(tmp_path / "a") != served(tmp_path / "b")
    assert main(["train", "--resume", str(tmp_path / "a"), "method.steps=10"]) == 0
    assert served(tmp_path / "a") == served(tmp_path / "b")
    assert main(["train", "--resume", str(tmp_path / "a")]) == 0  # nothing is left to do
    assert served(tmp_path / "a") == served(tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.root=[{0}, {0}]", "'data' is of another kind than what the run was started with"),
        ("policy.type=act", "holds a policy of type 'vla' -- set policy.type=vla"),
    ],
)
def test_a_refused_resumption_leaves_the_run_its_recipe(
    recipe_file: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    run_dir = tmp_path / "a"
    assert main(["train", str(recipe_file), f"output_dir={run_dir}", "method.steps=1"]) == 0
    before = (run_dir / "recipe.yaml").read_bytes()
    assert main(["train", "--resume", str(run_dir), change.format(dataset), "method.steps=2"]) == 1
    assert says in capsys.readouterr().err
    assert (run_dir / "recipe.yaml").read_bytes() == before
    assert main(["train", "--resume", str(run_dir), "method.steps=2"]) == 0


@pytest.mark.parametrize(("where", "steps"), [("build.build", 1), ("loop.Trainer.update", 2)])
def test_a_resumption_that_breaks_leaves_the_recipe_by_which_anything_was_computed(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, steps: int
) -> None:
    run_dir = tmp_path / "a"
    assert main(["train", str(recipe_file), f"output_dir={run_dir}", "method.steps=1"]) == 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(f"vla_stack.training.{where}", lambda *_: 1 / 0)
        main(["train", "--resume", str(run_dir), "method.steps=2"])
    assert load(run_dir / "recipe.yaml").method.steps == steps


def test_a_run_killed_before_its_first_checkpoint_starts_over(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = recipe_file.read_text()
    (tmp_path / "a/recipe.yaml").write_text(text)
    assert main(["train", "--resume", str(tmp_path / "a")]) == 0
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'b'}"]) == 0
    assert served(tmp_path / "a") == served(tmp_path / "b")


def test_several_roots_and_a_pretrained_start(recipe_file: Path, dataset: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other", seed=1, task="push it")
    out = tmp_path / "a"
    assert (
        main(["train", str(recipe_file), f"output_dir={out}", f"data.root=[{dataset}, {other}]", "method.ema=0"]) == 0
    )
    start = out / "checkpoints/last/pretrained_model"
    tune = [
        f"policy.pretrained={out}",
        "method.optimizer.lr=1e-12",
        "method.optimizer.weight_decay=0",
        "policy.options={}",
    ]
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'b'}", "method.steps=2", *tune]) == 0
    before, after = (
        load_file(d / "model.safetensors") for d in (start, tmp_path / "b/checkpoints/last/pretrained_model")
    )
    assert all(np.allclose(before[k].float(), after[k].float(), atol=1e-6) for k in before)
    # The same robot keeps its normalisation, whatever part of its range the new demonstrations are of.
    image, state = np.full((SIDE, SIDE, 3), 90, np.uint8), np.full(STATE, 0.3, np.float32)
    actions = [
        load_policy(d / "checkpoints/last/pretrained_model").infer(
            [Observation(state, {"front": image}, "push it")], [5]
        )
        for d in (out, tmp_path / "b")
    ]
    assert np.allclose(actions[0].actions, actions[1].actions, atol=1e-4)
    shutil.rmtree(out)  # what a run started from is not needed to continue it
    assert main(["train", "--resume", str(tmp_path / "b"), "method.steps=3"]) == 0


def test_a_start_from_weights_of_another_rate_is_said(
    recipe_file: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = record(tmp_path / "fast", rate_hz=20)
    command = ["train", str(recipe_file), "method.steps=1"]
    assert main([*command, f"output_dir={tmp_path / 'a'}"]) == 0
    for root in (dataset, fast):
        start = [f"policy.pretrained={tmp_path / 'a'}", f"data.root={root}", f"output_dir={tmp_path / root.name}-b"]
        assert main([*command, *start]) == 0
        said = f"{fast} is at 20 Hz, the weights were trained at 10 Hz: a chunk of 4 actions now takes 0.2 s instead of"
        assert (said in capsys.readouterr().out) == (root == fast)
    assert load_policy(tmp_path / "fast-b/checkpoints/last/pretrained_model").spec.robot.rate_hz == 20


def test_the_shipped_policy_is_a_start_by_its_name() -> None:
    device = torch.device("cpu")
    config = make_config(PolicyRecipe(pretrained="shipped"), device)
    assert config.type == "vla" and config.pretrained_path == resolve_policy("shipped")
    nested = make_config(
        PolicyRecipe(type="moh", options={"horizons": [4, 12], "base": {"pretrained_path": "shipped"}}), device
    )
    assert nested.base.pretrained_path == resolve_policy("shipped")


def test_a_normalisation_is_named_by_its_word() -> None:
    options = {"normalization_mapping": {"STATE": "QUANTILES", "ACTION": "MEAN_STD", "VISUAL": "IDENTITY"}}
    config = make_config(PolicyRecipe(options=options), torch.device("cpu"))
    assert config.normalization_mapping["STATE"] is NormalizationMode.QUANTILES and config.action_limit == 4.0


@pytest.mark.parametrize("option", ["gripper=binary", "use_relative_actions=false", "relative_exclude_joints=[]"])
def test_options_that_processors_read_are_never_ignored(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Weights of the same robot keep their processors, unless the recipe asks for others; then it is said."""
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'a'}", "method.steps=1"]) == 0
    fresh = ["method.steps=1", f"policy.options.{option}"]
    for name, start in (("b", [f"policy.pretrained={tmp_path / 'a'}"]), ("c", [])):
        assert main(["train", str(recipe_file), f"output_dir={tmp_path / name}", *fresh, *start]) == 0
        said = f"policy.options.{option.split('=')[0]} is " in capsys.readouterr().out
        assert said == bool(start)
    processors = [
        {p.name: p.read_bytes() for p in (tmp_path / name / "checkpoints/last/pretrained_model").glob("policy_p*")}
        for name in ("b", "c")
    ]
    assert processors[0] == processors[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method=imitatoin",
            "there is no method 'imitatoin' -- did you mean 'imitation'? the methods are imitation, mixture_of_",
        ),
        ("method=ravl", "there is no method 'ravl' -- "),
        ("method=grape_likelihood", "there is no method 'grape_likelihood'"),
        ("method=imitation_heads", "there is no method 'imitation_heads'"),
        ("method=rac", "method 'rac' has no operator for the task '' -- the tasks are sim/"),
        ("method=grape", "'policy.pretrained' is missing -- name the policy to align, for example policy=shipped"),
        ("method=wsrl", "unknown key 'method.optimizer' -- the nearest valid key is 'method.operator'"),
        (
            "method=mixture_of_horizons",
            "trains policies of type 'moh', not 'vla' -- set policy.type=moh and policy.options.horizons",
        ),
        ("method.drwas=1", "unknown key 'method.drwas' -- the nearest valid key is 'method.draws'"),
        ("policy.type=vlaa", "there is no policy type 'vlaa'"),
        (
            "policy.options.chunk_sise=4",
            "policy 'vla' has no option 'chunk_sise' -- the nearest option is 'chunk_size'",
        ),
        (
            "policy={type: moh, options: {base: {chunk_sise: 4}}}",
            "policy 'vla' has no option 'chunk_sise' -- the nearest option is 'chunk_size'",
        ),
        ("policy={type: moh, options: {base: {type: pi}}}", "there is no policy type 'pi'"),
        ("policy={type: moh, options: {base: {pretrained_path: nowhere}}}", "'nowhere' is no directory here"),
        (
            "method=mixture_of_horizons; policy.pretrained=shipped",
            "set policy.type=moh, policy.options.base.pretrained_path=shipped and policy.options.horizons, as in",
        ),
        (
            "policy={type: moh, options: {base: {pretrained_path: no/such/policy}}}",
            "'no/such/policy' holds no policy (there is no such directory)",
        ),
        ("policy={type: moh, options: {horizons: [2, 6]}}", "the longest horizon is 6, the base 'vla' predicts 30"),
        ("policy.pretrained=shipped", "the policy in "),
        ("policy={type: pi05, pretrained: shipped}", "holds a policy of type 'vla' -- set policy.type=vla"),
        (
            "method=own_loss; policy={type: act, options: {chunk_size: 20}}",
            "policy 'act' refuses chunk_size=20: The chunk size is the upper bound",
        ),
        (
            "policy.options.normalization_mapping={STATE: MEAN}",
            "normalization_mapping: there is no MEAN -- there are ",
        ),
        ("policy.lora.rank=4", "'policy.lora' needs weights to adapt"),
        ("policy.pretrained=nowhere", "'nowhere' is no directory here, and config.json cannot be had"),
        ("policy.pretrained=no/such/policy", "'no/such/policy' holds no policy (there is no such directory)"),
        ("policy.pretrained=/nowhere", "'/nowhere' holds no policy (there is no such directory)"),
        ("policy.pretrained=tests", "'tests' holds no policy (no config.json)"),
        ("data.root=nowhere", "nowhere"),
        ("data.cameras=[side]", "has no camera 'side' -- it has front"),
        ("device=cuda:77", "device 'cuda:77' is not available"),
        ("device=gpu", "device 'gpu' is not available"),
        ("eval={every: 4, envs: [sim/pik-v0]}", "'eval.envs': there is no environment 'sim/pik-v0' -- "),
        ("eval={every: 4, envs: [sim/pick-v0, a@sim/plce-v0]}", "'eval.envs': there is no environment 'sim/plce-v0'"),
        ("eval.every=4; task=sim/pik-v0", "'task': there is no environment 'sim/pik-v0' -- "),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'a'}", *override.split("; ")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vla train: ") and message in error
    assert not (tmp_path / "a").exists()


def test_a_run_that_fails_at_once_can_be_started_again(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such layer")

    new, used = tmp_path / "new", tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("")
    for run_dir in (new, used):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="no such layer"):
            patch.setattr("vla_stack.training.loop.Trainer.update", broken)
            main(["train", str(recipe_file), f"output_dir={run_dir}", "method.steps=1"])
    assert not new.exists() and (used / "notes.txt").exists() and not (used / "recipe.yaml").exists()
    assert main(["train", str(recipe_file), f"output_dir={used}", "method.steps=1"]) == 0


def test_a_run_that_fails_later_keeps_what_it_has(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_stack.training.loop.Trainer.save", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(recipe_file), f"output_dir={tmp_path / 'a'}", "method.log_every=1"])
    assert {"recipe.yaml", "metrics.jsonl"} <= {p.name for p in (tmp_path / "a").iterdir()}


@pytest.mark.parametrize(("there", "says"), [(False, "is no directory"), (True, "holds no recipe.yaml")])
def test_what_is_no_run_cannot_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool, says: str
) -> None:
    run_dir = tmp_path / "run"
    if there:
        run_dir.mkdir()
    assert main(["train", "--resume", str(run_dir)]) == 1
    error = capsys.readouterr().err
    assert f"{run_dir} {says}" in error and "find your runs with: ls -dt outputs/train/*" in error


def test_evaluations_run_where_the_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[tuple] = []
    evaluated: list[dict] = []

    def evaluate(policy: object, env: str, episodes: int, seed: int, **how: object) -> SimpleNamespace:
        evaluated.append({"env": env, "episodes": episodes, "seed": seed, **how})
        return SimpleNamespace(outcomes=np.array([1.0, 0.0]))

    monkeypatch.setattr("vla_stack.policies.chunk_policy.load_policy", lambda *given: asked.append(given))
    monkeypatch.setattr("vla_stack.evaluation.evaluate.evaluate", evaluate)
    task = TaskRecipe("sim/pick-v0", {"randomisation": 1})
    how = EvalRecipe(every=1, episodes=5, seed=7, num_envs=3, workers=2, rollouts="ray")
    run = evaluator(Recipe(task=task, eval=how), "cuda:1")
    assert run(tmp_path, 1) == {"sim/pick-v0/success": 0.5}
    assert asked == [(tmp_path, "cuda:1", None)]
    where = {"num_envs": 3, "workers": 2, "rollouts": "ray", "env_options": {"randomisation": 1}}
    assert evaluated == [{"env": "sim/pick-v0", "episodes": 5, "seed": 7, **where}]


def test_a_mixture_of_horizons_starts_from_a_policy_and_resumes(recipe_file: Path, tmp_path: Path) -> None:
    plain, mixture = tmp_path / "plain", tmp_path / "mixture"
    assert main(["train", str(recipe_file), f"output_dir={plain}", "method.steps=2", "method.ema=0"]) == 0
    plain /= "checkpoints/last/pretrained_model"
    options = f"{{horizons: [2, 4], base: {{pretrained_path: {plain}, n_action_steps: 3}}}}"
    recipe = [
        "method=mixture_of_horizons",
        f"policy={{type: moh, options: {options}}}",
        "method.ema=0",
        "method.steps=1",
    ]
    frozen = ["method.optimizer.lr=1e-12", "method.optimizer.weight_decay=0"]
    other = f"data.root={record(tmp_path / 'other', seed=1, task='push it')}"
    assert main(["train", str(recipe_file), f"output_dir={mixture}", *recipe, *frozen, other]) == 0
    trained = mixture / "checkpoints/last/pretrained_model"
    before, after = (load_file(d / "model.safetensors") for d in (plain, trained))
    assert set(after) == {f"base.{k}" for k in before} | {f"gate.{a}.{b}" for a in GATE for b in ("weight", "bias")}
    assert all(np.allclose(before[k], after[f"base.{k}"], atol=1e-6) for k in before)
    states = [file.name for file in plain.glob("policy_p*.safetensors")]  # statistics and tokenizer are its base's
    assert any("normalizer" in name for name in states) and any("tokenizer" in name for name in states)
    assert all((trained / name).read_bytes() == (plain / name).read_bytes() for name in states)

    shutil.rmtree(plain)  # a checkpoint needs no other one
    assert main(["train", "--resume", str(mixture), "method.steps=2"]) == 0
    records = [json.loads(line) for line in (mixture / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 2 and records[-1]["loss_individual"] > 0
    policy = load_policy(mixture / "checkpoints/last/pretrained_model")
    assert policy.spec.extras["n_action_steps"] == 3 and policy.spec.robot.name == "test/arm"


def test_a_mixture_of_horizons_learns_by_adapters_over_a_policy_s_weights(recipe_file: Path, tmp_path: Path) -> None:
    """Its gate, which is new, in full; and a stop between changes nothing."""
    assert main(["train", str(recipe_file), f"output_dir={tmp_path / 'plain'}", "method.steps=1"]) == 0
    options = f"{{horizons: [2, 4], base: {{pretrained_path: {tmp_path / 'plain'}}}}}"
    lora = r"{rank: 2, targets: '.*mlp\.[02]'}"
    recipe = ["method=mixture_of_horizons", f"policy={{type: moh, options: {options}, lora: {lora}}}", "method.ema=0"]
    for name, steps in (("whole", "2"), ("halves", "1")):
        assert main(["train", str(recipe_file), f"output_dir={tmp_path / name}", *recipe, f"method.steps={steps}"]) == 0
    assert main(["train", "--resume", str(tmp_path / "halves"), "method.steps=2"]) == 0
    folders = [tmp_path / name / "checkpoints/last/pretrained_model" for name in ("whole", "halves")]
    trained = [load_file(folder / "lora.safetensors") for folder in folders]
    assert any(k.startswith("gate.") for k in trained[0])
    assert all(np.array_equal(trained[0][k], trained[1][k]) for k in trained[0])
    assert load_policy(folders[1]).spec.robot.name == "test/arm"


def test_a_run_is_not_overwritten(recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(recipe_file), f"output_dir={tmp_path / 'a'}", "method.steps=1"]
    assert main(command) == 0
    before = served(tmp_path / "a")
    assert main(command) == 1
    assert f"vla train --resume {tmp_path / 'a'}" in capsys.readouterr().err
    assert served(tmp_path / "a") == before


def test_graphs_are_not_written_into_a_run(recipe_file: Path, tmp_path: Path, capsys) -> None:
    run_dir = tmp_path / "a"
    assert main(["train", str(recipe_file), f"output_dir={run_dir}", "method.steps=1"]) == 0
    before = sorted(run_dir.rglob("*"))
    assert main(["export", "--policy", str(run_dir), "--out", str(run_dir)]) == 1
    assert f"--out: {run_dir} is a run -- give a directory of its own: --out {run_dir}_onnx" in capsys.readouterr().err
    assert sorted(run_dir.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_has_one_writer(recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    with writing(run_dir):
        assert main(["train", str(recipe_file), f"output_dir={run_dir}"]) == 1
    assert f"vla train: {run_dir} is being written by process {os.getpid()} on" in capsys.readouterr().err
    assert not run_dir.exists()
    assert main(["train", str(recipe_file), f"output_dir={run_dir}"]) == 0
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    with writing(run_dir):
        assert main(["train", "--resume", str(run_dir), "steps=8"]) == 1
        (run_dir / LOCK).unlink()
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_a_full_disk_ends_a_run_in_one_line(recipe_file: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the second checkpoint does not fit, nor does anything later."""
    run_dir = tmp_path / "run"
    assert main(["train", str(recipe_file), f"output_dir={run_dir}"]) == 0
    code = (
        "import resource, sys\nfrom vla_stack.cli import main\nimport vla_stack.training.build\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--resume", str(run_dir), "method.steps=12"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "File too large" in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("vla train: ")
    assert load(run_dir / "recipe.yaml").method.steps == 12  # what it was told to resume with goes on
    assert main(["train", "--resume", str(run_dir), "method.steps=8"]) == 0


def test_a_run_from_elsewhere_names_no_code(recipe_file: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("VLA_TRUST", "")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for line in (
        "method: evil.module:loss",
        "eval: {every: 1, envs: ['evil.module:Env-v0']}",
        "task: 'evil.module:Env-v0'",
    ):
        (run_dir / "recipe.yaml").write_text(f"{recipe_file.read_text()}{line}\n")
        assert main(["train", "--resume", str(run_dir)]) == 1
        assert "is of the module 'evil.module', which can run code" in capsys.readouterr().err


def test_processes_of_a_recipe_are_those_of_torchrun_and_resume(recipe_file: Path, tmp_path: Path, capsys) -> None:
    """Each has its part of the batch and its own order of the data; a run that is cut in the middle equals itself."""
    flat = [str(recipe_file), "method.optimizer.final_lr_ratio=1.0", "method.ema=0", "device=cpu"]
    with_torchrun(*flat, "method.steps=4", "method.batch_size=2", f"output_dir={tmp_path / 'a'}")
    assert main(["train", *flat, "method.steps=2", "processes=2", f"output_dir={tmp_path / 'b'}"]) == 0
    assert main(["train", "--resume", str(tmp_path / "b"), "method.steps=4"]) == 0
    a, b = (load_file(tmp_path / r / "checkpoints/last/pretrained_model/model.safetensors") for r in "ab")
    assert all((a[k] == b[k]).all() for k in a)
    state = json.loads((tmp_path / "b/checkpoints/last/training_state/state.json").read_text())
    assert len(state["loader"]) == 2 and state["loader"][0]["seed"] != state["loader"][1]["seed"]
    assert load(tmp_path / "b/recipe.yaml").method.batch_size == 4 and "WORLD_SIZE" not in os.environ
    assert main(["train", "--resume", str(tmp_path / "b"), "method.steps=5", "processes=1"]) == 1
    assert "is of a run in 2 processes, this is one in 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["imitation", "data.root=x", "processes=3", "device=cpu"], "method.batch_size=64 cannot be shared"),
        (["rl_wsrl", "processes=2"], "method 'wsrl' trains in one process"),
        (["grape_success", "processes=2"], "method 'grape' trains in one process"),
        (["grape_success", "sharded=true"], "method 'grape' trains in one process"),
    ],
)
def test_a_batch_that_is_not_shared_is_refused(given, words, tmp_path: Path, capsys) -> None:
    assert main(["train", *given, f"output_dir={tmp_path / 'run'}"]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_where_another_process_does_not_start_none_trains(
    recipe_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("vla_stack.training.side_by_side.OTHER", "vla_stack.training.nothing")
    run = [str(recipe_file), "device=cpu", "method.steps=2", "method.batch_size=4", "processes=2"]
    assert main(["train", *run, f"output_dir={tmp_path / 'run'}"]) == 1
    assert "another process of this training did not start" in capsys.readouterr().err


def test_automatic_precision_is_what_the_processor_computes_in(monkeypatch):
    from vla_stack.training.placement import native_precision

    for native, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert native_precision(torch.device("cpu")) == expected
