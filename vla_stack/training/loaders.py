"""Batches of a recipe's datasets, mixed where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.labels import SEGMENT_TYPE
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.trainable import weights
from vla_stack.data.valued import by_worth
from vla_stack.errors import UserError
from vla_stack.lerobot_core import FeatureType, PreTrainedConfig
from vla_stack.policies.configuration_moh import base_config
from vla_stack.schema import ACTION, OBS_STATE, camera_name
from vla_stack.training.mixture import Layout, Mixture, Part, common_columns
from vla_stack.training.recipe import DataRecipe, Recipe
from vla_stack.training.sources import Source


def make_loader(
    recipe: Recipe,
    sources: Sequence[Source],
    config: PreTrainedConfig,
    rank: int,
    tokens: Sequence[NDArray[np.int16]] = (),
) -> ChunkLoader | Mixture:
    """Batches of the cameras that the policy sees.

    Args:
        recipe: The run.
        sources: Its datasets.
        config: The policy's configuration, with features and embodiments filled in.
        rank: Process index; each rank reads its own order of the data.
        tokens: Of each source, what batches hold in place of pictures (:mod:`vla_stack.training.cached_views`).
    """
    inputs, outputs = config.input_features or {}, config.output_features or {}
    slots = {camera_name(k): ft.shape[-2:] for k, ft in inputs.items() if ft.type is FeatureType.VISUAL}
    if tokens:
        slots = {}
    names = [e["name"] for e in getattr(config, "embodiments", ())]
    *seeds, mixing = map(int, np.random.SeedSequence([recipe.seed, rank]).generate_state(len(sources) + 1))
    loaders, cameras = [], []
    for number, (source, seed) in enumerate(zip(sources, seeds, strict=True)):
        dataset, mapping = source.dataset, source.embodiment.cameras if names else {slot: slot for slot in slots}
        cameras.append({slot: dataset.cameras[camera] for slot, camera in mapping.items() if camera in dataset.cameras})
        loaders.append(
            ChunkLoader(
                dataset,
                horizon=len(config.action_delta_indices or [0]),
                batch_size=recipe.method.batch_size,
                seed=seed,
                episodes=source.recipe.episodes,
                cameras=list(mapping.values()),
                image_sizes={camera: slots[slot] for slot, camera in mapping.items()} if names else None,
                weights=frame_weights(source, recipe.data),
                trainable=source.trainable,
                history=getattr(base_config(config), "history_ages", ()),
                cache_gb=recipe.data.cache_gb,
                tokens=tokens[number] if tokens else None,
            )
        )
    if len(loaders) == 1 and not names:
        return loaders[0]
    parts = [
        Part(
            source.name,
            loader,
            source.recipe.weight or loader.epoch_size,
            columns,
            names.index(source.embodiment.name) if names else None,
        )
        for source, loader, columns in zip(sources, loaders, cameras, strict=True)
    ]
    sizes = (inputs[OBS_STATE].shape[0] if OBS_STATE in inputs else 0, outputs[ACTION].shape[0])
    layout = Layout(slots, *sizes, common_columns([source.dataset for source in sources]))
    return Mixture(parts, layout, recipe.method.batch_size, mixing)


def frame_weights(source: Source, data: DataRecipe) -> NDArray[np.float64] | None:
    """Sampling weight of each frame, float [N]; None where all are equal.

    A class of ``data.weights`` has its mass among the chosen episodes, however many of its frames open an episode.

    Raises:
        UserError: ``data.weights`` speaks of labels or classes that the chosen episodes do not have.
    """
    dataset, opening = source.dataset, None
    if data.opening_weight != 1.0 and data.opening_frames > 0:
        opening = np.where(dataset.columns["frame_index"] < data.opening_frames, data.opening_weight, 1.0)
    if data.progress:
        opening = by_worth(dataset, Path(data.progress)) * (1.0 if opening is None else opening)
    if data.weights == "uniform":
        return opening
    if SEGMENT_TYPE not in dataset.columns or source.counted is None:
        raise UserError(f"{dataset.root} has no labels for data.weights={data.weights}", "run `vla data backfill`")
    return weights(dataset, source.counted, data.weights, opening)
