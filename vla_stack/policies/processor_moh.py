"""Processors of a mixture of horizons: those of its base."""

from __future__ import annotations

from typing import Any

from vla_stack.lerobot_core import PolicyAction, PolicyProcessorPipeline, make_pre_post_processors
from vla_stack.policies.configuration_moh import MohConfig


def make_moh_pre_post_processors(
    config: MohConfig, dataset_stats: dict[str, dict[str, Any]] | None = None, dataset_meta: Any = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """Pre- and post-processor of the base.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics by feature.
        dataset_meta: LeRobot's metadata of the dataset, for bases that ask for it.
    """
    config.share()
    return make_pre_post_processors(config.base, dataset_stats=dataset_stats, dataset_meta=dataset_meta)
