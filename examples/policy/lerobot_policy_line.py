"""A policy type: every action of the chunk is a linear function of the state. LeRobot's tools know it as well."""

from dataclasses import dataclass

import torch
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.optim.optimizers import AdamConfig
from lerobot.policies import PreTrainedPolicy
from lerobot.policies.act.processor_act import make_act_pre_post_processors as make_line_pre_post_processors  # noqa: F401


@PreTrainedConfig.register_subclass("line")
@dataclass
class LineConfig(PreTrainedConfig):
    chunk_size: int = 8
    n_action_steps: int = 8
    normalization_mapping = {kind.name: NormalizationMode.MEAN_STD for kind in FeatureType}

    observation_delta_indices = reward_delta_indices = None
    action_delta_indices = property(lambda self: list(range(self.chunk_size)))

    def get_optimizer_preset(self):
        return AdamConfig(lr=1e-3)

    def get_scheduler_preset(self):
        return None

    def validate_features(self):
        pass


class LinePolicy(PreTrainedPolicy):
    config_class, name = LineConfig, "line"

    def __init__(self, config, **_):
        super().__init__(config)
        self.shape = (config.chunk_size, config.action_feature.shape[0])
        self.map = torch.nn.Linear(config.robot_state_feature.shape[0], self.shape[0] * self.shape[1])

    def predict_action_chunk(self, batch, **_):
        return self.map(batch["observation.state"]).unflatten(-1, self.shape)

    def forward(self, batch):
        error = (self.predict_action_chunk(batch) - batch["action"]).square().mean(-1)
        return error[~batch["action_is_pad"]].mean(), {}

    def select_action(self, batch, **_):
        return self.predict_action_chunk(batch)[:, 0]

    def get_optim_params(self):
        return self.parameters()

    def reset(self):
        pass
