"""Processors of a steered policy: those of its base."""

from __future__ import annotations

from typing import Any

from vla_stack.lerobot_core import PolicyAction, PolicyProcessorPipeline, make_pre_post_processors
from vla_stack.policies.configuration_steered import SteeredConfig


def make_steered_pre_post_processors(
    config: SteeredConfig, dataset_stats: dict[str, dict[str, Any]] | None = None, dataset_meta: Any = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """Pre- and post-processor of the base, for the statistics of a dataset."""
    return make_pre_post_processors(config.base, dataset_stats=dataset_stats, dataset_meta=dataset_meta)
