"""Diffusion Policy (Chi et al. 2023, arXiv:2303.04137) on the present observation alone, as a plain chunk policy.

LeRobot's reads a history from a queue that it fills call by call, which fits neither batches of several robots nor a
server that drops requests. Here ``n_obs_steps`` is 1 and the whole horizon is the chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.schema import ACTION, OBS_IMAGES, OBS_STATE


class Diffusion(DiffusionPolicy):
    """LeRobot's Diffusion Policy without history.

    Raises:
        UserError: ``n_obs_steps`` is not 1.
    """

    config_class = DiffusionConfig
    name = "diffusion"

    def __init__(self, config: DiffusionConfig, **kwargs: Any) -> None:
        if config.n_obs_steps != 1:
            raise UserError(f"n_obs_steps is {config.n_obs_steps}, only 1 is supported", "set n_obs_steps to 1")
        super().__init__(config, **kwargs)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, None]:
        """LeRobot's loss of a batch whose observations have no time axis."""
        return super().forward({**batch, OBS_STATE: batch[OBS_STATE][:, None]})

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **_: Any) -> Float[Tensor, "b h a"]:
        """A chunk of ``horizon`` actions from the present step on, from torch's global generator.

        It takes no noise: DDPM draws more of it at every step.
        """
        self.eval()
        batch = {**batch, OBS_STATE: batch[OBS_STATE][:, None]}
        if self.config.image_features:
            batch[OBS_IMAGES] = torch.stack([batch[key] for key in self.config.image_features], dim=1)[:, None]
        condition = self.diffusion._prepare_global_conditioning(batch)
        return self.diffusion.conditional_sample(len(condition), global_cond=condition)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], **_: Any) -> Float[Tensor, "b a"]:
        """The next of a chunk's first ``n_action_steps`` actions.

        LeRobot's puts the whole chunk into a queue of that length, which here would keep its end.
        """
        actions = self._queues[ACTION]
        if not actions:
            actions.extend(self.predict_action_chunk(batch)[:, : self.config.n_action_steps].unbind(1))
        return actions.popleft()
