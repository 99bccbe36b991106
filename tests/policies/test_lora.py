"""What low-rank adapters leave trained in full: on tiny SmolVLA, pi0 and pi0.5, alone and as a mixture's base."""

import re
from pathlib import Path

import pytest
import torch
from small_vla import make_batch
from tiny_vlas import CHUNK, KINDS, make_processors, make_vla, tiny_config, tiny_pi

from vla_stack.methods.imitation import loss as imitation
from vla_stack.methods.mixture_of_horizons import loss as mixture_of_horizons
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.training import recipe as recipes
from vla_stack.training.lora import add_lora

CONFIGS = Path(__file__).resolve().parents[2] / "vla_stack" / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    with tiny_pi(path):
        yield path


def trained(policy):
    """Names of trained parameters: those of the adapters, and the others."""
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    adapters = {name for name in names if ".lora_" in name}
    return adapters, names - adapters


def batch_for(policy):
    raw = make_batch(2, CHUNK)
    return make_processors(policy)[0](raw) | {"action_is_pad": raw["action_is_pad"]}


def test_smolvlas_recipe_adds_adapters_and_takes_nothing_away(folder, tmp_path):
    """As the comment in vla_stack/configs/smolvla.yaml has them."""
    text = (CONFIGS / "smolvla.yaml").read_text()
    text, lines = re.subn(r"(?m)^  # (lora:|  (?:rank|alpha|targets|train): )", r"  \1", text)
    assert lines == 5
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = recipes.load(tmp_path / "recipe.yaml").policy
    frozen = {k: recipe.options[k] for k in ("train_expert_only", "freeze_vision_encoder")}
    policy = make_vla("smolvla", folder, **frozen).train()
    _, before = trained(policy)
    add_lora(policy, recipe.lora)
    adapters, full = trained(policy)
    assert full == before and sum(".lm_expert." in name for name in full) > 20
    assert adapters and all(".vlm.model.text_model.layers." in name for name in adapters)
    imitation.loss(policy, batch_for(policy), torch.Generator().manual_seed(0))[0].backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert full <= gradients.keys() and any(name in adapters for name in gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_adapters_a_mixture_trains_its_gate_and_its_base_s_projections(folder, kind):
    base = tiny_config(kind, folder)
    config = MohConfig(base=base, horizons=(2, 4, CHUNK), bidirectional=True, device="cpu", push_to_hub=False)
    policy = MohPolicy(config)
    policy.base.load_state_dict(make_vla(kind, folder).state_dict())
    expected = {n for n, _ in policy.named_parameters() if n.startswith(("base.model.action_", "base.model.time_"))}
    expected |= {n for n, _ in policy.named_parameters() if n.startswith(("base.model.state_", "gate."))}
    add_lora(policy, recipes.LoraRecipe(rank=2, train=r"(base\.)?model\.(action|state|time)_.*|gate\..*"))
    adapters, full = trained(policy)
    assert full == expected and {"gate.score.weight", "base.model.action_out_proj.weight"} <= full
    assert adapters and all(name.startswith("base.") for name in adapters)
    batch = batch_for(policy.base)
    mixture_of_horizons.loss(policy.train(), batch, torch.Generator().manual_seed(0))[0].backward()
    idle = {name for name in full if not policy.get_parameter(name).grad.any()}
    assert idle <= {"gate.score.bias"}
