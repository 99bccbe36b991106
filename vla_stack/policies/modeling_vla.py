"""The native VLA as a LeRobot policy: images, instruction and state to a prefix, the prefix to an action chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from lerobot.policies import PreTrainedPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

import vla_stack.policies.processor_vla  # noqa: F401  registers the steps that a saved policy's processors name
from vla_stack.errors import UserError
from vla_stack.policies import flow
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.contract import Time
from vla_stack.policies.dataset_facts import adopt_dataset
from vla_stack.policies.expert import ActionExpert
from vla_stack.policies.text import TextEncoder
from vla_stack.policies.transformer import PrefixContext, PrefixTransformer
from vla_stack.policies.vision import ImageEncoder, to_float
from vla_stack.schema import ACTION, OBS_IMAGES, OBS_STATE, SchemaError

ACTION_IS_PAD = "action_is_pad"


class VlaPolicy(PreTrainedPolicy):
    """Flow-matching VLA; implements :class:`~vla_stack.policies.contract.FlowPolicy`.

    Args:
        config: Configuration with features filled in.
        dataset_meta: LeRobot's metadata of the training data, passed by LeRobot's own tools. The statistics of its
            actions are replaced, in memory, by those of chunk-relative actions, which the processors then use.
    """

    config_class = VlaConfig
    name = "vla"

    def __init__(self, config: VlaConfig, dataset_meta: Any = None, **_: Any) -> None:
        super().__init__(config)
        config.validate_features()
        if dataset_meta is not None:
            adopt_dataset(config, dataset_meta)
        self.config = config
        self.horizon, self.action_dim = config.chunk_size, config.action_feature.shape[0]
        heads = (config.heads, config.head_dim)
        self.text = TextEncoder(config.vocabulary, config.max_words, config.width, *heads)
        self.vision = nn.ModuleDict(
            {
                module_name(key): ImageEncoder(
                    config.input_features[key].shape[-2:],
                    config.vision_channels,
                    config.vision_maps,
                    config.tokens_per_camera,
                    config.width,
                )
                for key in config.camera_keys
            }
        )
        self.state = nn.Linear(config.robot_state_feature.shape[0], config.width)
        self.prefix = PrefixTransformer(config.depth, config.width, *heads)
        self.expert = ActionExpert(self.horizon, self.action_dim, config.depth, config.expert_width, *heads)
        self._queue: deque[Tensor] = deque()
        self._origin = torch.empty(0)

    # --- FlowPolicy -----------------------------------------------------------------------------------------------

    def encode(self, batch: dict[str, Any]) -> PrefixContext:
        """Prefix of a preprocessed batch: tokens of each camera, of the instruction, of the state.

        Raises:
            SchemaError: A camera is missing or has another size than the policy was trained with.
        """
        words, word_mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        text, instruction = self.text(words, word_mask)
        images = [
            self.vision[module_name(key)](to_float(self._image(batch, key)), instruction)
            for key in self.config.camera_keys
        ]
        # A state far outside the training data says no more than "outside": the bound keeps one odd joint from
        # drowning the rest.
        state = self.state(batch[OBS_STATE].clamp(-5.0, 5.0))[:, None]
        tokens = torch.cat((*images, state, text), dim=1)
        seen = word_mask.new_ones(len(tokens), tokens.shape[1] - text.shape[1])
        return self.prefix(tokens, torch.cat((seen, word_mask), dim=1))

    def velocity(self, context: PrefixContext, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        """See :meth:`FlowPolicy.velocity`; a chunk shorter than the horizon is accepted."""
        return self.expert(context, x, t)

    def features(self, context: PrefixContext) -> Float[Tensor, "b d"]:
        return context.summary

    # --- LeRobot --------------------------------------------------------------------------------------------------

    def forward(
        self, batch: dict[str, Any], reduction: Literal["mean", "none"] = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """Flow-matching loss on torch's global generator, for LeRobot's training loop; ours is methods/imitation.py.

        Returns:
            The loss, a scalar or ``[b]``, and values to log.
        """
        actions, is_pad = batch[ACTION], batch[ACTION_IS_PAD]
        generator = torch.default_generator
        noise = flow.sample_noise(tuple(actions.shape), generator, actions.device)
        t = flow.sample_time(len(actions), generator, actions.device)
        loss = flow.masked_mean(flow.squared_error(self, self.encode(batch), actions, noise, t), is_pad)
        return (loss if reduction == "none" else loss.mean()), {"flow_loss": loss.mean().item()}

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, prefix: flow.ActionPrefix | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """Sample one normalised chunk an observation from ``noise`` [b, h, a], or noise of the configured scale."""
        self.eval()
        context = self.encode(batch)
        if noise is None:
            state = batch[OBS_STATE]
            noise = torch.randn(len(state), self.horizon, self.action_dim, dtype=state.dtype, device=state.device)
            noise *= self.config.noise_scale
        return flow.euler(lambda x, t: self.velocity(context, x, t), noise, self.config.num_inference_steps, prefix)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls.

        The post-processor adds the state of *this* call to an action that was predicted relative to the state of an
        earlier one. The preprocessor reports the command 0 in normalised coordinates (see ``ActionOriginStep``), so
        the difference of two such origins is exactly what has to be taken off again.
        """
        origin = batch[ACTION][:, 0]
        if not self._queue:
            self._origin = origin
            self._queue.extend(self.predict_action_chunk(batch, noise)[:, : self.config.n_action_steps].unbind(1))
        return self._queue.popleft() + (origin - self._origin)

    def reset(self) -> None:
        """Forget the queued actions."""
        self._queue.clear()

    def get_optim_params(self) -> list[dict[str, Any]]:
        """Parameter groups: weight decay on matrices alone."""
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path: str | Path, **kwargs: Any) -> VlaPolicy:
        """Load a policy directory; unlike LeRobot's default, every weight must be there.

        Raises:
            UserError: The directory holds no weights.
        """
        path = Path(pretrained_name_or_path)
        if path.is_dir() and not (path / "model.safetensors").is_file():
            raise UserError(f"{path} has no model.safetensors", "give the pretrained_model folder of a checkpoint")
        return super().from_pretrained(pretrained_name_or_path, **{**kwargs, "strict": True})

    def _image(self, batch: dict[str, Any], key: str) -> Tensor:
        image = batch.get(key)
        if image is None:
            have = sorted(camera_names(batch))
            raise SchemaError(f"camera '{key.removeprefix(OBS_IMAGES + '.')}' is missing; the batch has {have}")
        height, width = self.config.input_features[key].shape[-2:]
        size = tuple(image.shape[1:3] if image.dtype == torch.uint8 else image.shape[2:])
        if size != (height, width):
            raise SchemaError(
                f"camera '{key.removeprefix(OBS_IMAGES + '.')}' is {size[0]}x{size[1]}, "
                f"the policy was trained with {height}x{width}"
            )
        return image


def module_name(key: str) -> str:
    """Feature key of a camera as a module name, which may hold no dot."""
    return key.removeprefix(OBS_IMAGES + ".").replace(".", "_")


def camera_names(keys: Sequence[str] | dict[str, Any]) -> list[str]:
    """Names of the cameras among feature keys."""
    return [key.removeprefix(OBS_IMAGES + ".") for key in keys if key.startswith(OBS_IMAGES + ".")]
