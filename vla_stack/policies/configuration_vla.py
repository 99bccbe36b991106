"""Configuration of the native VLA, LeRobot policy type ``vla``.

The defaults are the preset ``tiny``, trained from scratch. With ``backbone`` it is the preset ``base``, whose prefix is
a pretrained vision-language model (recipe ``base``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla_stack.errors import UserError
from vla_stack.history import history_ages
from vla_stack.lerobot_core import (
    AdamWConfig,
    CosineDecayWithWarmupSchedulerConfig,
    FeatureType,
    NormalizationMode,
    PreTrainedConfig,
)
from vla_stack.policies.heads import HEADS
from vla_stack.policies.text import SMALLEST_VOCABULARY

MOST_HISTORY = 12
CHOICES = {
    "backbone_dtype": ("float32", "bfloat16"),
    "train_backbone": ("expert_only", "lora", "full"),
    "state_input": ("token", "prompt"),
    "head": ("flow", *HEADS),
    "gripper": ("continuous", "binary"),
    "text": ("bpe", "frozen", "hash"),
    "prefix_attention": ("full", "lambda"),
    "vision_stem": ("overlapping", "patches"),
}


@PreTrainedConfig.register_subclass("vla")
@dataclass
class VlaConfig(PreTrainedConfig):
    """A vision-language-action policy with an action expert of its own.

    Attributes:
        chunk_size: Actions per chunk, H.
        n_action_steps: Actions of a chunk that ``select_action`` executes before it asks for the next chunk.
        num_inference_steps: Euler steps of one chunk.
        max_delay: Largest delay, in control steps, that training conditions on: up to so many steps at a chunk's start
            are given as clean actions, and asynchronous execution can hand over the actions that the robot executes
            meanwhile (execution mode ``prefix``). 0 trains without.
        prefix_attention: ``full``: action tokens read each other, as in training-time real-time chunking
            (arXiv:2512.05964). ``lambda``: each reads a sink and the ``prefix_window`` tokens before it, with shifted
            positions (Xiaomi-Robotics-0, see ``action_attention.py``, which says what of it is not verified); its
            authors train with ``max_delay=6`` and the method's ``reweight``.
        prefix_window: Action tokens before its own that a token reads with ``prefix_attention=lambda``, w.
        noise_scale: Standard deviation of the noise that sampling starts from; training always uses 1. Below 1 chunks
            keep to the likely ones, and consecutive chunks agree with each other: a policy that is drawn anew every few
            steps otherwise hesitates wherever the demonstrations leave the moment of a grasp open. 0 is deterministic.
        width: Width of prefix tokens; also of the pooled features.
        expert_width: Width of action tokens.
        depth: Layers of prefix transformer and expert; layer l of the expert reads keys and values of prefix layer l.
        heads: Attention heads, of ``head_dim`` each, the same in prefix and expert.
        head_dim: Width of one head.
        vision_stem: How an image encoder begins: ``patches`` of 4x4 pixels, or ``overlapping`` convolutions, of which
            all but the last halve the resolution and which take a fifth more time of a training.
        vision_channels: Output channels of an image encoder's convolutions.
        vision_maps: Maps that an image encoder's features are squeezed to.
        vision_pointers: Things of the instruction that each camera's picture is looked through for (``vision.py``), a
            prefix token each; 0 leaves that to the convolutions.
        tokens_per_camera: Other prefix tokens a camera.
        history: Earlier observations of the episode that are read beside the present one: the first, and those that are
            1, 2, 4 ... times ``n_action_steps`` old (``vla_stack/history.py``). 0: the present alone.
        text: How an instruction becomes tokens: ``bpe``, sub-words learnt from the training data's instructions;
            ``frozen``, vectors of a sentence encoder that knows most words; or ``hash``, a bucket for each word.
        text_encoder: That sentence encoder: one that the package brings, or a local directory or hub id.
        text_width: Entries of its vectors. Filled in when it is first read; where it is set, as in a saved policy, the
            encoder is that of the policy's preprocessor and ``text_encoder`` is not looked up.
        vocabulary: Tokens: at most so many sub-words (257 or more), or so many buckets.
        bpe_dropout: Share of training batches whose words are split finer than need be.
        max_words: Longest instruction of ``text=hash``, in words.
        backbone: Local directory or hub id of a vision-language model (SmolVLM2 or PaliGemma class) whose layers are
            the prefix; the sizes of prefix layers and encoders above are then not read. Empty: ``tiny``.
        backbone_config: The backbone's architecture. Filled in when its weights are first loaded; where it is set, as
            in a saved policy, the weights are those of the policy directory and ``backbone`` is not looked up.
        backbone_layers: Text layers to use, from the first on; 0 uses all.
        backbone_dtype: Type of frozen weights, and with ``bfloat16`` also of the arithmetic in prefix and expert.
        train_backbone: ``expert_only`` freezes the backbone, ``lora`` trains low-rank adapters in it, ``full`` all of
            it.
        freeze_vision: Keep the vision encoder as it is, whatever ``train_backbone`` says.
        keep_language_head: Keep what only ``language_loss`` needs: the last layer's output and the vocabulary head.
        lora_rank: Rank r of the adapters (Hu et al. 2021).
        lora_alpha: Scale of the adapters is this, divided by r.
        lora_targets: Names of the linear layers that get an adapter.
        gradient_checkpointing: Recompute the backbone's activations in the backward pass instead of keeping them.
        state_input: ``token`` projects the state to one prefix token; ``prompt`` writes it into the instruction as one
            of 256 bins a dimension (pi0.5), which bounds it to the range of its 1 % and 99 % quantiles.
        max_tokens: Longest instruction in sub-words, or longest prompt in tokens of the backbone.
        head: ``flow`` denoises a chunk; the others predict it in one step from learnt queries: ``regression`` (L1),
            ``gaussian`` (independent normal per entry) or ``bins`` (a distribution over 256 bins per entry).
        gripper: ``binary`` sends and learns the gripper's extremes alone, ``continuous`` what lies between as well.
        use_relative_actions: Learn actions relative to the state at the chunk's start.
        relative_exclude_joints: Action dimensions that stay absolute (LeRobot matches substrings of names).
        action_feature_names: Names of the action dimensions; filled in from the dataset.
        robot: ``RobotSpec.to_json()`` of the embodiment; filled in from the dataset.
        embodiments: ``Embodiment.to_json()`` of each robot of a policy that drives several; filled in from the recipe's
            sources. The features are then camera slots and the padded sizes of state and action; ``robot`` is unset.
        max_state_dim: Least padded size of the state of such a policy, room for robots that it is to learn later.
        max_action_dim: Likewise of the action.
    """

    chunk_size: int = 16
    n_action_steps: int = 8
    num_inference_steps: int = 10
    max_delay: int = 0
    prefix_attention: str = "full"
    prefix_window: int = 3
    noise_scale: float = 1.0

    width: int = 128
    expert_width: int = 128
    depth: int = 3
    heads: int = 4
    head_dim: int = 32
    vision_stem: str = "patches"
    vision_channels: tuple[int, ...] = (64, 64)
    vision_maps: int = 8
    vision_pointers: int = 0
    tokens_per_camera: int = 2
    history: int = 0
    text: str = "bpe"
    text_encoder: str = "minilm"
    text_width: int = 0
    vocabulary: int = 512
    bpe_dropout: float = 0.1
    max_words: int = 16

    backbone: str = ""
    backbone_config: dict[str, Any] | None = None
    backbone_layers: int = 0
    backbone_dtype: str = "bfloat16"
    train_backbone: str = "lora"
    freeze_vision: bool = True
    keep_language_head: bool = False
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    gradient_checkpointing: bool = False
    state_input: str = "token"
    max_tokens: int = 32

    head: str = "flow"
    gripper: str = "continuous"

    use_relative_actions: bool = True
    relative_exclude_joints: list[str] = field(default_factory=lambda: ["gripper"])
    action_feature_names: list[str] | None = None
    robot: dict[str, Any] | None = None
    embodiments: list[dict[str, Any]] = field(default_factory=list)
    max_state_dim: int = 0
    max_action_dim: int = 0

    optimizer_lr: float = 1e-3
    optimizer_weight_decay: float = 1e-4
    optimizer_grad_clip_norm: float = 1.0
    scheduler_warmup_steps: int = 50
    scheduler_decay_steps: int = 2000
    scheduler_decay_lr: float = 1e-5

    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise UserError(
                f"n_action_steps is {self.n_action_steps}, it must lie in 1 ... chunk_size={self.chunk_size}"
            )
        if not 0 <= self.max_delay < self.chunk_size or (self.max_delay and self.head != "flow"):
            raise UserError(
                f"max_delay is {self.max_delay}",
                f"it must lie in 0 ... {self.chunk_size - 1}, and needs the flow head where it is not 0",
            )
        if self.prefix_attention == "lambda" and (not self.max_delay or self.prefix_window < 1):
            raise UserError(
                f"prefix_attention is 'lambda' with max_delay={self.max_delay} and prefix_window={self.prefix_window}",
                "set both to 1 or more (its authors: max_delay=6)",
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"{name} is '{getattr(self, name)}'", f"choose one of {', '.join(choices)}")
        if not 0 <= self.history <= MOST_HISTORY or (self.history and self.backbone):
            remedy = f"it lies in 0 ... {MOST_HISTORY}, and is for a policy without a backbone"
            raise UserError(f"history is {self.history}", remedy)
        if not 0.0 <= self.bpe_dropout <= 1.0:
            raise UserError(f"bpe_dropout is {self.bpe_dropout}", "it is a share, 0 to 1")
        if self.text == "bpe" and self.vocabulary < SMALLEST_VOCABULARY:
            raise UserError(
                f"vocabulary is {self.vocabulary}", f"sub-words need {SMALLEST_VOCABULARY} or more: every byte is one"
            )
        if self.keep_language_head and self.backbone_layers:
            raise UserError("keep_language_head needs every layer of the backbone", "set backbone_layers=0")
        if self.state_input == "prompt":
            if not self.backbone:
                raise UserError("state_input=prompt needs a backbone", "set backbone, or state_input=token")
            # Bins cover [-1, 1]; in the policy's own copy, a mapping may be shared between configurations.
            self.normalization_mapping = {**self.normalization_mapping, "STATE": NormalizationMode.QUANTILES}

    def validate_features(self) -> None:
        """Check that the features describe a robot that this policy can drive.

        Raises:
            UserError: There is no state or action, or the state is too short to anchor relative actions.
        """
        if self.robot_state_feature is None or self.action_feature is None:
            raise UserError("the policy 'vla' needs the features observation.state and action")
        states, actions = self.robot_state_feature.shape[0], self.action_feature.shape[0]
        if self.use_relative_actions and states < actions and not self.embodiments:
            raise UserError(
                f"observation.state has {states} entries, action {actions}: relative actions need each one measured",
                "set use_relative_actions=false",
            )
        if self.history and (self.embodiments or not self.camera_keys):
            why = "several robots" if self.embodiments else "no camera"
            raise UserError(f"history is {self.history}, and the policy has {why}", "set history=0")

    @property
    def history_ages(self) -> tuple[int, ...]:
        """Least ages, control steps, of the earlier observations that are read; see ``vla_stack/history.py``."""
        return history_ages(self.history, self.n_action_steps)

    @property
    def camera_keys(self) -> list[str]:
        """Feature keys of the cameras, in the order in which the policy consumes them."""
        return [key for key, ft in (self.input_features or {}).items() if ft.type is FeatureType.VISUAL]

    @property
    def action_limit(self) -> float:
        """Bound of a normalised action's usual range, which the head ``bins`` divides."""
        return 4.0 if self.normalization_mapping["ACTION"] is NormalizationMode.MEAN_STD else 1.0

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(
            lr=self.optimizer_lr,
            betas=(0.9, 0.99),
            weight_decay=self.optimizer_weight_decay,
            grad_clip_norm=self.optimizer_grad_clip_norm,
        )

    def get_scheduler_preset(self) -> CosineDecayWithWarmupSchedulerConfig:
        return CosineDecayWithWarmupSchedulerConfig(
            peak_lr=self.optimizer_lr,
            decay_lr=self.scheduler_decay_lr,
            num_warmup_steps=self.scheduler_warmup_steps,
            num_decay_steps=self.scheduler_decay_steps,
        )
