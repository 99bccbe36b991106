"""Processors of a mixture of horizons: those of its base."""

from __future__ import annotations

from copy import copy
from typing import Any

from vla_stack.lerobot_core import PolicyAction, PolicyProcessorPipeline, make_pre_post_processors
from vla_stack.policies.configuration_moh import MohConfig


def make_moh_pre_post_processors(
    config: MohConfig, dataset_stats: dict[str, dict[str, Any]] | None = None, dataset_meta: Any = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """Pre- and post-processor of the base; the weights that it starts from know words by their own tokens.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics by feature.
        dataset_meta: LeRobot's metadata of the dataset, for bases that ask for it.
    """
    config.share()
    base = copy(config.base)
    base.pretrained_path = base.pretrained_path or config.started_from
    return make_pre_post_processors(base, dataset_stats=dataset_stats, dataset_meta=dataset_meta)
