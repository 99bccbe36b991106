"""Weights of a policy that was trained in one way, for one that is to be trained in another.

So stages can follow each other: the expert on a frozen backbone, then adapters, then all of it; each stage starts from
the directory of the one before (``policy.pretrained=DIR policy.options.train_backbone=lora``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

BASE, DOWN, UP = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def fit_weights(backbone: nn.Module, weights: dict[str, Tensor], prefix: str, alpha: int, trained_alpha: int) -> None:
    """Rename and merge weights of adapters in place, so that they load into a backbone with or without adapters.

    A layer that gains an adapter starts from its weights and an adapter of no effect; one that loses its adapter
    absorbs it, W + alpha / r * B A (Hu et al. 2021); one whose adapter gets another rank absorbs the old one and starts
    from a new one of no effect; one that keeps it under another alpha has B scaled, so that it adds what it added.
    Weights of the language head, where it was dropped, go.

    Args:
        backbone: The model that the weights are for.
        weights: State of a policy.
        prefix: What names of the backbone's weights begin with.
        alpha: ``lora_alpha`` of the policy.
        trained_alpha: That of the policy whose weights they are.
    """
    own = {prefix + name: value for name, value in backbone.state_dict().items()}

    def absorbed(stem: str) -> Tensor:
        base, down, up = (weights.pop(stem + part) for part in (BASE, DOWN, UP))
        merged = base.double() + trained_alpha / len(down) * (up.double() @ down.double())
        return merged.to(base.dtype)

    for name in [n for n in weights if n.startswith(prefix) and n.endswith(DOWN) and n in own]:
        if len(weights[name]) != len(own[name]):  # the rank
            stem = name.removesuffix(DOWN)
            weights |= {stem + BASE: absorbed(stem), stem + DOWN: own[stem + DOWN], stem + UP: own[stem + UP]}
    if trained_alpha != alpha:
        for name in [n for n in weights if n.startswith(prefix) and n.endswith(UP) and n in own]:
            weights[name] = weights[name] * (trained_alpha / alpha)
    for name in [n for n in own if n.endswith(BASE) and n not in weights]:
        stem = name.removesuffix(BASE)
        if (plain := f"{stem}.weight") in weights:
            weights[name] = weights.pop(plain)
            weights |= {stem + part: own[stem + part] for part in (DOWN, UP)}
    for name in [n for n in weights if n.startswith(prefix) and n.endswith(BASE) and n not in own]:
        stem = name.removesuffix(BASE)
        weights[f"{stem}.weight"] = absorbed(stem)
    embedding = next(name for name in own if name.endswith("embed_tokens.weight"))
    head = f"{prefix}lm_head.weight"
    if head not in own and embedding not in weights and head in weights:  # tied, so saved under one of the names
        weights[embedding] = weights[head]
    for name in [n for n in weights if n.startswith(prefix) and n not in own]:
        if any(part in name.removeprefix(prefix) for part in dropped(backbone)):
            del weights[name]


def dropped(backbone: Any) -> list[str]:
    """Parts of names of the language head's weights, if this backbone has none; see ``drop_language_head``."""
    if hasattr(backbone, "lm_head"):
        return []
    text = "language_model" if hasattr(backbone.model, "language_model") else "text_model"
    last = f"model.{text}.layers.{backbone.config.text_config.num_hidden_layers - 1}"
    parts = ("mlp", "post_attention_layernorm", "self_attn.q_proj", "self_attn.o_proj")
    return ["lm_head.", f"model.{text}.norm.", *(f"{last}.{part}." for part in parts)]
