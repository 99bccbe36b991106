"""The native VLA as a LeRobot policy: images, instruction and state to a prefix, the prefix to an action chunk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

import vla_stack.policies.processor_vla  # noqa: F401  registers the steps that a saved policy's processors name
from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies import flow
from vla_stack.policies.action_queue import ActionQueue
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.contract import FlowPolicy, Time
from vla_stack.policies.dataset_facts import adopt_dataset
from vla_stack.policies.expert import ActionExpert, Query
from vla_stack.policies.heads import HEADS, BinsHead, GaussianHead, OneStepHead
from vla_stack.policies.past import Recollection
from vla_stack.policies.prefix import ScratchPrefix
from vla_stack.policies.reading import read_config
from vla_stack.policies.transformer import PrefixContext
from vla_stack.policies.unrolled import UnrolledExpert, schedule
from vla_stack.policies.weights import parameter_groups
from vla_stack.schema import ACTION, ACTION_DIM_IS_PAD, OBS_STATE


class VlaPolicy(PreTrainedPolicy, FlowPolicy[PrefixContext]):
    """The native VLA.

    Args:
        config: Configuration with features filled in.
        dataset_meta: LeRobot's metadata of the training data, passed by LeRobot's own tools. The statistics of its
            actions are replaced, in memory, by those of chunk-relative actions, which the processors then use.
        trained_alpha: ``lora_alpha`` of the weights that are about to be loaded, where it may be another one.
    """

    config_class = VlaConfig
    name = "vla"

    def __init__(self, config: VlaConfig, dataset_meta: Any = None, trained_alpha: int | None = None, **_: Any) -> None:
        super().__init__(config)
        config.validate_features()
        if dataset_meta is not None:
            adopt_dataset(config, dataset_meta)
        self.config = config
        self.max_delay, self.noise_scale = config.max_delay, config.noise_scale
        self.horizon, self.action_dim = config.chunk_size, config.action_feature.shape[0]
        self.noise_dim, self.state_width = self.action_dim, config.expert_width
        self.prefix = make_prefix(config)
        if trained_alpha is not None:
            self.prefix.trained_alpha = trained_alpha
        window = config.prefix_window if config.prefix_attention == "lambda" else None
        self.expert = ActionExpert(self.horizon, self.action_dim, config.expert_width, self.prefix.geometry, window)
        if config.head != "flow":
            self.expert.embed = Query(config.expert_width)
            self.expert.head = HEADS[config.head](config.expert_width, self.action_dim, config.action_limit)
        self.unrolled: UnrolledExpert | None = None
        self._queue, self._past = ActionQueue(), Recollection(config.history_ages)

    # --- FlowPolicy -----------------------------------------------------------------------------------------------

    def encode(self, batch: dict[str, Any]) -> PrefixContext:
        """Prefix of a preprocessed batch.

        Raises:
            SchemaError: A camera is missing or has another size than the policy was trained with.
        """
        with self._arithmetic(batch[OBS_STATE].device):
            context = self.prefix(batch)
        lacking = batch.get(ACTION_DIM_IS_PAD)
        return context if lacking is None else replace(context, has_dim=~lacking)

    def velocity(self, context: PrefixContext, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        """See :meth:`FlowPolicy.velocity`; a chunk shorter than the horizon is accepted.

        Raises:
            UserError: The policy's head predicts actions in one step.
        """
        if self.head is not None:
            raise UserError(f"a policy with the head '{self.config.head}' has no velocity", "train one with head=flow")
        return self.action_head(self.action_states(context, x, t))

    def action_states(
        self,
        context: PrefixContext,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """See :meth:`FlowPolicy.action_states`; with a one-step head no more of ``x`` is read than its shape."""
        if context.has_dim is not None:
            # No loss holds the velocity of padding to anything, so what a sampler makes of it must not be read.
            x = torch.where(context.has_dim[:, None], x, 0.0)
        with self._arithmetic(x.device):
            return self.expert(context, x, t, blocks, valid)

    def action_head(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n a"]:
        """Velocities, or the most likely actions where the head predicts them in one step."""
        return self.expert.head(states) if self.head is None else self.head.point(states)

    def features(self, context: PrefixContext) -> Float[Tensor, "b d"]:
        return context.summary

    @torch.no_grad()
    def observed(self, context: PrefixContext, batch: dict[str, Any]) -> Float[Tensor, "b f"]:
        """See :meth:`FlowPolicy.observed`; before it what each token of the pictures tells the expert: a mean over all
        tokens hardly says where a thing is. A backbone has hundreds of them, which are left out."""
        seen = super().observed(context, batch)
        if self.config.backbone:
            return seen
        cameras, each = self.config.camera_keys, self.config.tokens_per_camera + self.config.vision_pointers
        several = bool(self.config.embodiments)  # then a camera that no robot of the batch has gives no tokens
        there = [not several or key in batch or f"{key}_is_pad" not in batch for key in cameras]
        count = sum(there) * each
        tokens = context.keys_values[-1][1].transpose(1, 2)[:, :count].flatten(2).float()
        if several:  # each camera in its place, and zeros where a robot has none
            parts = iter(torch.where(context.mask[:, :count, None], tokens, 0.0).split(each, 1))
            absent = tokens.new_zeros(len(tokens), each, tokens.shape[-1])
            tokens = torch.cat([next(parts) if is_there else absent for is_there in there], 1)
        return torch.cat((F.layer_norm(tokens, tokens.shape[-1:]).flatten(1).half().float(), seen), -1)

    def image_tokens(self, batch: dict[str, Any]) -> Float[Tensor, "b n d"]:
        return self.prefix.image_tokens(batch)

    @property
    def inference_steps(self) -> int:
        return self.config.num_inference_steps

    # --- One-step heads and the backbone's language -----------------------------------------------------------------

    @property
    def head(self) -> OneStepHead | None:  # type: ignore[override]
        """See :class:`FlowPolicy`."""
        return None if self.config.head == "flow" else self.expert.head

    @property
    def one_step(self) -> bool:  # type: ignore[override]
        """See :class:`FlowPolicy`."""
        return self.head is not None

    def query_states(self, context: PrefixContext) -> Float[Tensor, "b h d"]:
        """Final states of the queries that a one-step head reads."""
        queries = context.summary.new_zeros(len(context.mask), self.horizon, self.action_dim)
        return self.action_states(context, queries, queries[:, 0, 0])

    def log_prob(self, batch: dict[str, Any], actions: Float[Tensor, "b h a"]) -> Float[Tensor, "b h"]:
        """Log-probability of every step's normalised action; their sum is that of the chunk.

        Raises:
            UserError: The head is no distribution.
        """
        if not isinstance(self.head, GaussianHead | BinsHead):
            raise UserError(f"the head '{self.config.head}' has no log-probability", "train with head=gaussian or bins")
        entries = self.head.log_prob(self.query_states(self.encode(batch)), actions)
        lacking = batch.get(ACTION_DIM_IS_PAD)
        return (entries if lacking is None else torch.where(lacking[:, None], 0.0, entries)).sum(-1)

    def language_loss(
        self, images: Shaped[Tensor, "b _ _ _"], input_ids: Int[Tensor, "b n"], labels: Int[Tensor, "b n"]
    ) -> Tensor:
        """Next-token cross entropy of the backbone on image-text pairs, in its own prompt and attention.

        For co-training that keeps what it knows (pi0.5).

        Args:
            images: One a row, uint8 [b, h, w, 3] or float [b, 3, h, w] in [0, 1].
            input_ids: Tokens with the image's placeholders, padded on the right; ``backbone_text.image_text_pairs``.
            labels: The same tokens where they are to be predicted, -100 elsewhere.

        Raises:
            UserError: The policy has no backbone, or was built without ``keep_language_head``.
        """
        if not self.config.backbone:
            raise UserError("a policy without a backbone has no language loss", "set policy.options.backbone")
        with self._arithmetic(images.device):
            return self.prefix.language_loss(images, input_ids, labels)

    def _arithmetic(self, device: torch.device) -> AbstractContextManager[Any]:
        """bfloat16 where the backbone's frozen weights are; otherwise what the caller has set stays."""
        return torch.autocast(device.type, torch.bfloat16) if self._in_bfloat16 else nullcontext()

    @property
    def _in_bfloat16(self) -> bool:
        return bool(self.config.backbone) and self.config.backbone_dtype == "bfloat16"

    @property
    def unrolls(self) -> bool:
        """Whether :class:`UnrolledExpert` can sample for it."""
        return self.head is None and self.expert.sink is None

    def for_inference(self) -> None:
        """Give matrices that autocast rounds at every call its type for good, and compute once what a sampler needs of
        the schedule alone; the policy cannot be trained any more."""
        kind = torch.bfloat16 if self._in_bfloat16 else self.expert.norm.modulation.weight.dtype
        rows = None
        with torch.no_grad():
            if self.unrolls:  # before its matrices are rounded
                rows = schedule(self.expert, self.config.num_inference_steps, kind)
            if self._in_bfloat16:
                # The head runs in float32; no action reads the language head, whose matrix may be the embedding's.
                outside = {*self.expert.head.modules(), getattr(self.prefix.backbone, "lm_head", None)}
                for module in {*self.prefix.modules(), *self.expert.modules()} - outside:
                    if isinstance(module, nn.Linear):
                        for name, values in module.named_parameters(recurse=False):
                            setattr(module, name, nn.Parameter(values.to(kind), requires_grad=False))
            if rows is not None:
                self.unrolled = UnrolledExpert(self.expert, rows)
            if self.config.backbone:
                self.prefix.for_inference()

    # --- LeRobot --------------------------------------------------------------------------------------------------

    def forward(
        self, batch: dict[str, Any], reduction: Literal["mean", "none"] = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """The head's loss on torch's global generator, for LeRobot's training loop; ours is methods/imitation.

        Returns:
            The loss, a scalar or ``[b]``, and values to log.
        """
        actions, generator, context = batch[ACTION], torch.default_generator, self.encode(batch)
        valid = flow.valid_entries(batch)
        if self.head is not None:
            error = self.head.error(self.query_states(context), actions)
        else:
            noise = flow.sample_noise(tuple(actions.shape), generator, actions.device)
            t = flow.sample_time(len(actions), generator, actions.device)
            if self.config.max_delay:
                delays = (len(actions), self.horizon, self.max_delay)
                prefix = flow.sample_prefix(*delays, generator, actions.device)
                t, valid = torch.where(prefix, 0.0, t[:, None]), valid & ~prefix[..., None]
            error = flow.squared_error(self, context, actions, noise, t)
        loss = flow.masked_mean(error, valid)
        return (loss if reduction == "none" else loss.mean()), {f"{self.config.head}_loss": loss.mean().item()}

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, prefix: flow.ActionPrefix | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """Sample one normalised chunk an observation from ``noise`` [b, h, a], or noise of the configured scale.

        Raises:
            UserError: There is an action prefix, and the head cannot condition on it.
        """
        if self.training:
            self.eval()
        context = self.encode(batch)
        if noise is None:
            state = batch[OBS_STATE]
            noise = torch.randn(len(state), self.horizon, self.action_dim, dtype=state.dtype, device=state.device)
            noise *= self.noise_scale
        if self.head is not None:
            if prefix is not None:
                raise UserError(f"the head '{self.config.head}' cannot continue given actions", "use head=flow")
            return self.head.sample(self.query_states(context), noise).to(noise.dtype)
        if self.unrolled is not None and context.has_dim is None:
            return self.unrolled.sample(context, noise, prefix)
        return flow.euler(lambda x, t: self.velocity(context, x, t), noise, self.config.num_inference_steps, prefix)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls, each of which is remembered."""

        def refill() -> Tensor:
            past = self._past.beside(self.image_tokens(batch)) if self.config.history else {}
            return self.predict_action_chunk({**batch, **past}, noise)[:, : self.config.n_action_steps]

        action = self._queue.next(batch[ACTION][:, 0], refill)
        self._past.step += 1
        return action

    def reset(self) -> None:
        """Forget the queued actions and the episode."""
        self._queue.clear()
        self._past.clear()

    def get_optim_params(self) -> list[dict[str, Any]]:
        """Parameter groups for LeRobot's training loop."""
        return parameter_groups(self)

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path: str | Path, **kwargs: Any) -> VlaPolicy:
        """Load a policy directory; unlike LeRobot's default, every weight must be there.

        Raises:
            UserError: The directory holds no weights.
        """
        path = Path(pretrained_name_or_path)
        if path.is_dir() and not (path / "model.safetensors").is_file():
            raise UserError(f"{path} has no model.safetensors", "give the pretrained_model folder of a checkpoint")
        if (config := kwargs.get("config")) is not None and config.backbone:
            kwargs["trained_alpha"] = read_config(pretrained_name_or_path, "cpu").lora_alpha
        return super().from_pretrained(pretrained_name_or_path, **{**kwargs, "strict": True})


def make_prefix(config: VlaConfig) -> Any:
    """The prefix of a configuration: pretrained where it names a backbone, else trained from scratch."""
    if not config.backbone:
        return ScratchPrefix(config)
    from vla_stack.policies.backbone import PretrainedPrefix  # transformers is imported only where it is used

    return PretrainedPrefix(config)
