"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) in a pretrained policy, whatever its class.

What a run saves is a plain policy directory with the adapters multiplied into the weights: every loader reads it, and
no server pays for them. The adapters themselves lie beside it; a run is resumed from them and the weights that it began
with.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.training.checkpoint import trainable
from vla_stack.training.recipe import LoraRecipe

ADAPTERS_FILE = "lora.safetensors"


def add_lora(policy: PreTrainedPolicy, recipe: LoraRecipe) -> None:
    """Freeze a policy, put adapters that change nothing yet into its layers, and thaw what the recipe trains in full.

    Raises:
        UserError: ``targets`` fits no layer.
    """
    from peft import LoraConfig, inject_adapter_in_model  # half a second, and only here

    policy.requires_grad_(False)
    lora = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=recipe.targets)
    try:
        inject_adapter_in_model(lora, policy)
    except ValueError as e:
        raise UserError(f"policy.lora.targets fits no layer of '{policy.name}': {str(e).splitlines()[0]}") from None
    for name, parameter in policy.named_parameters():
        if re.fullmatch(recipe.train, name):
            parameter.requires_grad_(True)


def save_merged(policy: PreTrainedPolicy, directory: Path) -> None:
    """Write the policy with its adapters multiplied in, and what was trained as it is."""
    policy.save_pretrained(directory, state_dict=merged(policy))
    trained = {name: p.detach().cpu().contiguous() for name, p in trainable(policy).items()}
    save_file(trained, directory / ADAPTERS_FILE)


def load_adapters(policy: PreTrainedPolicy, directory: Path) -> None:
    """Inverse of :func:`save_merged`, on a policy of the same weights and recipe.

    Raises:
        UserError: Other parameters were trained than this recipe trains.
    """
    parameters, saved = trainable(policy), load_file(directory / ADAPTERS_FILE)
    if differing := sorted(parameters.keys() ^ saved.keys()):
        message = f"{directory / ADAPTERS_FILE} and the recipe's 'policy.lora' differ in {differing[0]}"
        raise UserError(message, "resume with the run's own recipe")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def merged(policy: PreTrainedPolicy) -> dict[str, Tensor]:
    """The weights of the policy as it was before :func:`add_lora`, plus what its adapters add; on the CPU."""
    layers = {name: module for name, module in policy.named_modules() if hasattr(module, "get_delta_weight")}
    out = {}
    for name, value in policy.state_dict().items():
        owner, plain, leaf = name.partition(".base_layer")
        if ".lora_" in name:
            continue
        if plain and leaf == ".weight":
            value = (value.float() + layers[owner].get_delta_weight("default").float()).to(value.dtype)
        out[owner + leaf] = value.detach().cpu()
    return out
