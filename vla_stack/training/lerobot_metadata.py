"""LeRobot's metadata of a dataset, without what else its package imports: transformers, torchvision, other policies."""

from __future__ import annotations

from vla_stack.lerobot_core import lightly

with lightly("torchvision"):
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
    from lerobot.utils.feature_utils import dataset_to_policy_features

__all__ = ["LeRobotDatasetMetadata", "dataset_to_policy_features"]
