"""Training the preset `base`: a recipe from dataset to a directory that stands alone, parameter groups, memory."""

import json
import shutil
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.policies import PreTrainedPolicy
from safetensors.torch import load_file
from small_backbone import MAKERS, make_base, make_smolvlm, make_tokenizer
from small_vla import ROBOT, make_batch, make_observations, make_policy, make_stats
from transformers import LlamaConfig, SmolVLMConfig, SmolVLMForConditionalGeneration

from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.methods.imitation import loss as imitation
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import IMAGE_TOKENS
from vla_stack.training import recipe as recipes
from vla_stack.training.build import build, preprocessed, to_device
from vla_stack.training.memory import Memory, activations, estimate
from vla_stack.training.optimizer import backbone_scale, make_optimizer
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.train import train

CONFIGS = Path(__file__).resolve().parents[2] / "vla_stack" / "configs"


def record(root):
    with EpisodeRecorder(root, ROBOT, image_mode="image") as recorder:
        for seed in range(2):
            for step, observation in enumerate(make_observations(10, seed)):
                recorder.add_frame(replace(observation, step=step, t_capture_ns=step * 10**8), observation.state[:5])
            recorder.save_episode(success=True)
    return root


def load_base(data, *overrides):
    """`vla_stack/configs/base.yaml` shrunk to a test."""
    small = {"chunk_size": 4, "n_action_steps": 2, "expert_width": 32, "lora_rank": 4, "backbone_layers": 2}
    options = [f"policy.options.{k}={v}" for k, v in small.items()]
    run = [
        "device=cpu",
        "threads=1",
        "method.batch_size=4",
        "method.optimizer.warmup_steps=1",
        "method.optimizer.backbone_from_step=1",
    ]
    return recipes.load(CONFIGS / "base.yaml", [f"data.root={data}", *options, *run, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MAKERS))
def test_recipe_trains_resumes_and_stands_alone(kind, tmp_path, capsys):
    """A run resumed from the middle, with the backbone's directory gone, ends in the same bits."""
    source, data, whole = MAKERS[kind](tmp_path / "backbone"), record(tmp_path / "data"), tmp_path / "whole"
    recipe = load_base(
        data, f"policy.options.backbone={source}", "method.steps=4", "method.save_every=2", "method.log_every=1"
    )
    final = train(recipe, recipe.method.loss(), whole)
    assert "memory: about" in capsys.readouterr().out
    shutil.rmtree(source)
    shutil.copytree(whole, tmp_path / "cut", symlinks=True, ignore=shutil.ignore_patterns("000004", "last"))
    resumed = train(recipe, recipe.method.loss(), tmp_path / "cut")
    weights = [load_file(c / "pretrained_model" / "model.safetensors") for c in (final, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # The next stage trains the whole backbone, from the adapters' directory alone.
    again = [
        f"policy.pretrained={resumed / 'pretrained_model'}",
        "policy.options.train_backbone=full",
        "method.steps=1",
    ]
    full = load_base(data, f"policy.options.backbone={source}", *again)
    wider = train(full, full.method.loss(), tmp_path / "full")
    assert not any("lora" in name for name in load_file(wider / "pretrained_model" / "model.safetensors"))
    chunk = load_policy(resumed / "pretrained_model").infer(make_observations(2), [0, 1]).actions
    assert chunk.shape == (2, 4, 5) and np.isfinite(chunk).all()


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_frozen_vision_tower_is_run_once_for_each_view(kind, tmp_path):
    source, data = MAKERS[kind](tmp_path / "backbone"), record(tmp_path / "data")
    recipe = load_base(data, f"policy.options.backbone={source}", "data.cached_views=1", "data.augmentation.strength=0")
    cached, plain = (
        build(replace(recipe, data=replace(recipe.data, cached_views=n)), recipe.method.loss(), torch.device("cpu"))
        for n in (1, 0)
    )
    plain.policy.load_state_dict(cached.policy.state_dict())
    one, two = (
        preprocessed(to_device(next(iter(p.loader)), torch.device("cpu")), p.preprocess) for p in (cached, plain)
    )
    assert IMAGE_TOKENS in one and not any(key.startswith("observation.images.") for key in one)
    assert any(key.startswith("observation.images.") for key in two)
    with torch.no_grad():
        summaries = [p.policy.eval().encode(batch).summary for p, batch in ((cached, one), (plain, two))]
    torch.testing.assert_close(*summaries, rtol=0.05, atol=0.05)


def test_backbone_has_its_own_learning_rate(tmp_path):
    policy: PreTrainedPolicy = make_base(make_smolvlm(tmp_path), train_backbone="lora")
    optimizer = make_optimizer(policy, OptimizerRecipe())
    names = {id(p): name for name, p in policy.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert group["backbone"] == (".backbone." in names[id(p)])
            assert (group["weight_decay"] > 0) == (p.ndim >= 2)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == sum(p.requires_grad for p in policy.parameters())
    native = make_policy()
    slow = {id(p) for g in make_optimizer(native, OptimizerRecipe()).param_groups if g["backbone"] for p in g["params"]}
    eyes_and_words = [p for part in (native.prefix.vision, native.prefix.text) for p in part.parameters()]
    assert slow == {id(p) for p in eyes_and_words}
    settings = OptimizerRecipe(backbone_lr_scale=0.1, backbone_from_step=3)
    assert [backbone_scale(step, settings) for step in (0, 2, 3, 9)] == [0.0, 0.0, 0.1, 0.1]


# --- Memory -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def middle(tmp_path_factory):
    """A backbone large enough that its activations outweigh what a formula leaves out."""
    path = tmp_path_factory.mktemp("middle")
    vision = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    text = LlamaConfig(
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        head_dim=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=make_tokenizer(path, bos=False),
        pad_token_id=0,
    )
    config = SmolVLMConfig(
        vision_config={**vision, "image_size": 64, "patch_size": 8},
        text_config=text.to_dict(),
        image_token_id=3,
        pad_token_id=0,
    )
    SmolVLMForConditionalGeneration(config).save_pretrained(path)
    return path


def saved_bytes(policy, batch, draws):
    """Bytes that autograd keeps for the backward pass of one batch, weights apart."""
    weights, kept = {p.data_ptr() for p in policy.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        imitation.loss(policy, batch, torch.Generator().manual_seed(0), draws=draws)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"train_backbone": "lora"},
        {"train_backbone": "full", "freeze_vision": False},
        {"train_backbone": "expert_only"},
        {"train_backbone": "expert_only", "state_input": "prompt", "max_tokens": 80},
    ],
)
def test_activations_are_what_autograd_keeps(middle, options, draws):
    policy = make_base(middle, backbone_dtype="bfloat16", expert_width=128, **options).train()
    stats = make_stats()
    for s in stats.values():
        s |= {"q01": s["mean"] - s["std"], "q99": s["mean"] + s["std"]}
    batch = make_vla_pre_post_processors(policy.config, stats)[0](make_batch(4))
    recipe = recipes.Recipe(method=Imitation(batch_size=4, draws=draws))
    assert 0.75 < estimate(policy, recipe).activations / saved_bytes(policy, batch, draws) < 1.35


def test_checkpointing_keeps_less(middle):
    sizes = [activations(make_base(middle, gradient_checkpointing=c), draws=1) for c in (False, True)]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize("mode", ["expert_only", "lora", "full"])
def test_weights_and_optimizer_are_counted(middle, mode):
    policy = make_base(middle, train_backbone=mode, backbone_dtype="bfloat16")
    memory = estimate(policy, recipes.Recipe(method=Imitation(batch_size=4, ema=0.99)))
    optimizer = make_optimizer(policy, OptimizerRecipe())
    for p in policy.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    state = [v for slots in optimizer.state.values() for v in slots.values()]
    assert memory.optimizer == sum(v.numel() * v.element_size() for v in state)
    gradients = [p.grad for p in policy.parameters() if p.requires_grad]
    assert memory.gradients == sum(g.numel() * g.element_size() for g in gradients)
    assert memory.average == memory.gradients
    held = [*policy.parameters(), *policy.buffers()]
    assert memory.parameters == sum(t.numel() * t.element_size() for t in held)
    assert memory.total == sum(astuple(memory))


def test_memory_without_a_formula_says_so():
    memory = estimate(make_policy(), recipes.Recipe())
    assert memory.activations == 0
    assert memory.report().endswith("and activations")


def test_too_little_memory_names_a_remedy():
    kept = {"gradients": 500_000_000, "optimizer": 0, "average": 0, "activations": 10**9}
    memory = Memory(parameters=2_000_000_000, evaluation=0, **kept)
    line = "memory: about 3.50 GB (weights 2.00 GB, gradients 0.50 GB, activations 1.00 GB)"
    assert memory.report() == memory.report(capacity=4 * 10**9) == line
    assert memory.report(capacity=3 * 10**9).startswith(f"{line}, the device has 3.00 GB: lower method.batch_size")
    evaluating = Memory(parameters=2_000_000_000, evaluation=2_000_000_000, **kept)
    assert "set eval.every=0" in evaluating.report(capacity=4 * 10**9)


def test_a_run_that_evaluates_holds_the_weights_twice():
    policy = make_policy()
    memory = estimate(policy, recipes.Recipe(eval=recipes.EvalRecipe(every=10, envs=("sim/pick-v0",))))
    assert memory.evaluation == memory.parameters
    assert estimate(policy, recipes.Recipe()).evaluation == 0


# --- The bench of a GPU machine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(load_tool):
    return load_tool("bench/base_gpu.py")


@pytest.mark.slow
def test_gpu_bench_runs_small_on_a_cpu(bench, capsys):
    assert bench.main(["--smoke", "--only", "training", "base", "pi05"]) == 0  # export has tests of its own
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = {(section, name): row for of in rows for section, named in of.items() for name, row in named.items()}
    assert [found["training", f"batch {n}"]["batch_size"] for n in (2, 4)] == [2, 4]
    for section in ("base", "pi05"):
        for n in (1, 8):
            assert found[section, f"eager, batch {n}"]["ms"] > 0
            compiled = found[section, f"compiled, batch {n}"]
            assert compiled["graphs"] == 2 and compiled["breaks"] == 0 and compiled["cosine_with_eager"] > 0.999


def test_gpu_bench_says_that_it_needs_a_gpu(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a CUDA device.*--smoke"):
        bench.main([])
