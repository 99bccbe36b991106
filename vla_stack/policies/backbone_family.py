"""Pretrained vision-language models through transformers: where the parts are, loading, and what of them is trained.

Two families are known: SmolVLM (SigLIP, pixel shuffle, Llama text; Marafioti et al. 2025) and PaliGemma (SigLIP, Gemma
text; Beyer et al. 2024). Both use rotary positions, so an expert can attend to their keys at positions that follow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from vla_stack.errors import UserError, first_line
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.expert import Geometry

OFFLINE = "give a local directory that holds config.json, tokenizer.json and *.safetensors, or run once with a network"


@dataclass(frozen=True)
class SmolVlm:
    """Parts of a ``SmolVLMForConditionalGeneration``."""

    model: Any
    text_path, vision_path = "model.text_model", "model.vision_model"

    @property
    def tokens_per_image(self) -> int:
        return self.model.model.image_seq_len

    @property
    def vision(self) -> Any:
        """What holds the image encoder's layers as ``encoder``."""
        return self.model.model.vision_model

    def patch_positions(self) -> Tensor:
        """Position index of every patch of a full image, int64 [patches]: what transformers computes each time with
        operations that stall a GPU, asked for once."""
        vision, seen = self.model.model.vision_model, []
        hook = vision.embeddings.position_embedding.register_forward_pre_hook(lambda _, ids: seen.append(ids[0]))
        side, size = vision.config.image_size, vision.embeddings.patch_size
        with torch.no_grad():
            pixels = torch.zeros(1, 3, side, side, dtype=vision.embeddings.patch_embedding.weight.dtype)
            vision.embeddings(pixels, torch.ones(1, side // size, side // size, dtype=torch.bool))
        hook.remove()
        return seen[0][0]

    def image_tokens(self, pixels: Float[Tensor, "b 3 s s"], positions: Tensor) -> Float[Tensor, "b n d"]:
        parts = self.model.model
        vision = parts.vision_model
        patches = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        patches = patches + vision.embeddings.position_embedding(positions)
        states = vision.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state
        return parts.connector(vision.post_layernorm(states))

    def language_inputs(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Arguments of the model's own forward pass for images and next-token labels: attention is causal."""
        return {"pixel_values": pixels[:, None]}


@dataclass(frozen=True)
class PaliGemma:
    """Parts of a ``PaliGemmaForConditionalGeneration``."""

    model: Any
    text_path, vision_path = "model.language_model", "model.vision_tower"

    @property
    def tokens_per_image(self) -> int:
        return self.model.config.text_config.num_image_tokens

    @property
    def vision(self) -> Any:
        """As above."""
        return self.model.model.vision_tower.vision_model

    def patch_positions(self) -> Tensor:
        return torch.empty(0)  # images have one size, its encoder needs no positions from outside

    def image_tokens(self, pixels: Float[Tensor, "b 3 s s"], positions: Tensor) -> Float[Tensor, "b n d"]:
        parts = self.model.model
        return parts.multi_modal_projector(parts.vision_tower(pixels).last_hidden_state)

    def language_inputs(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """As above; image and prompt, which have no label, read each other in full, the answer is causal."""
        return {"pixel_values": pixels, "token_type_ids": (labels != -100).long()}


Family = SmolVlm | PaliGemma
FAMILIES: dict[str, type[SmolVlm] | type[PaliGemma]] = {"smolvlm": SmolVlm, "paligemma": PaliGemma}
STATIC_ROPE = ("default", "linear", "llama3")  # frequencies that do not depend on the input, and no scale
TEXT_MODELS = ("llama", "gemma")  # later ones add norms, soft caps or local attention, which the layer loop lacks


def load_backbone(config: VlaConfig) -> PreTrainedModel:
    """The backbone of a policy: pretrained from ``config.backbone``, or, where ``config.backbone_config`` came with a
    saved policy, that architecture with weights yet to be loaded. Fills ``backbone_config`` in.

    Raises:
        UserError: Unknown family, or files that are missing, incomplete or out of reach.
    """
    dtype = torch.float32 if config.train_backbone == "full" else getattr(torch, config.backbone_dtype)
    # A configuration that was filled in by this process, not read from a saved policy, still means the source.
    if config.backbone_config is not None and "_from_source" not in vars(config):
        architecture = AutoConfig.for_model(**config.backbone_config)
        check_architecture(architecture, config.backbone)
        with no_init_weights():
            model = AutoModelForImageTextToText.from_config(architecture, dtype=dtype, attn_implementation="sdpa")
        model.tie_weights()  # which is otherwise a part of the initialisation
        return model
    try:
        architecture = AutoConfig.from_pretrained(config.backbone)
        check_architecture(architecture, config.backbone)
        text = architecture.text_config
        if not 0 <= config.backbone_layers <= text.num_hidden_layers:
            raise UserError(
                f"backbone_layers is {config.backbone_layers}, '{config.backbone}' has {text.num_hidden_layers}"
            )
        text.num_hidden_layers = config.backbone_layers or text.num_hidden_layers
        model, report = AutoModelForImageTextToText.from_pretrained(
            config.backbone,
            config=architecture,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as e:
        raise UserError(f"cannot load the backbone '{config.backbone}': {first_line(e)}", OFFLINE) from None
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"the backbone '{config.backbone}' lacks the weights '{missing[0]}'", "copy it again")
    config.backbone_config = json.loads(model.config.to_json_string(use_diff=False))
    config.backbone_config.pop("_name_or_path", None)  # where it lay is in `backbone`
    config.__dict__["_from_source"] = True
    return model


def check_architecture(architecture: PreTrainedConfig, source: str) -> None:
    """Raise a :class:`UserError` for models whose layers this module cannot run one by one."""
    if architecture.model_type not in FAMILIES:
        known = " and ".join(FAMILIES)
        raise UserError(f"backbone '{source}' is a '{architecture.model_type}'", f"the families known are {known}")
    if (text := architecture.text_config.model_type) not in TEXT_MODELS:
        raise UserError(f"text model '{text}' of backbone '{source}' is not known", f"{' and '.join(TEXT_MODELS)} are")
    if (rope := architecture.text_config.rope_parameters["rope_type"]) not in STATIC_ROPE:
        raise UserError(
            f"rotary positions '{rope}' of backbone '{source}' are not known", f"{', '.join(STATIC_ROPE)} are"
        )


def geometry(model: PreTrainedModel, text: nn.Module) -> Geometry:
    """What an expert has to share with a backbone's text model."""
    config = model.config.text_config
    return Geometry(
        layers=len(text.layers),
        heads=config.num_attention_heads,
        head_dim=text.layers[0].self_attn.head_dim,
        kv_heads=config.num_key_value_heads,
        frequencies=text.rotary_emb.inv_freq.clone(),
    )


def drop_language_head(model: PreTrainedModel, text: nn.Module) -> None:
    """Remove what nothing reads where only keys and values are wanted: 47 M of 508 M parameters of SmolVLM2-500M."""
    last = text.layers[-1]
    del model.lm_head, text.norm, last.mlp, last.post_attention_layernorm, last.self_attn.q_proj, last.self_attn.o_proj


def set_trainable(model: PreTrainedModel, family: Family, config: VlaConfig) -> None:
    """Freeze and add adapters as ``config`` says; frozen weights get ``backbone_dtype``, trained ones are float32."""
    model.requires_grad_(config.train_backbone == "full")
    if config.train_backbone == "lora":
        add_lora(model, family, config)
    elif config.freeze_vision:
        model.get_submodule(family.vision_path).requires_grad_(False)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():  # not `model.to`: rotary frequencies have to stay float32
        dtype = torch.float32 if parameter.requires_grad else getattr(torch, config.backbone_dtype)
        parameter.data = parameter.data.to(dtype)


def add_lora(model: PreTrainedModel, family: Family, config: VlaConfig) -> None:
    """Low-rank adapters in place, in the text model and, unless it is frozen, in the vision encoder.

    Raises:
        UserError: No layer has any of the names in ``config.lora_targets``.
    """
    from peft import LoraConfig, inject_adapter_in_model  # half a second, and only here

    parts = [family.text_path] + ([] if config.freeze_vision else [family.vision_path])
    names = "|".join(config.lora_targets)
    pattern = rf"({'|'.join(parts)})\..*\.({names})".replace("model.", r"model\.")
    try:
        lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=pattern)
        inject_adapter_in_model(lora, model)
    except ValueError as e:
        names = ", ".join(config.lora_targets)
        raise UserError(f"lora_targets ({names}) fit no layer of the backbone: {first_line(e)}") from None
