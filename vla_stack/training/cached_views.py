"""What frozen encoders make of pictures, computed once for a few augmented views of every frame.

Where an encoder is not trained, it says the same of the same picture at every step, and takes a good part of each. So
before the first step each frame passes it a few times, each time augmented otherwise, and a step draws one of these
views. They lie beside the dataset in ``<root>.frames/``, as the bits of bfloat16, under the digest of the weights, of
the pictures and of how they were changed: a run that is resumed, or begun again from the same policy, finds them. They
can be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from vla_stack.data.frame_cache import CameraFrames, cache_folder, open_frames
from vla_stack.data.layout import read_json, write_json
from vla_stack.errors import UserError
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.schema import OBS_STATE, TASK, camera_name, image_key
from vla_stack.training.augmentation import augmented
from vla_stack.training.optimizer import freeze_backbone
from vla_stack.training.recipe import Recipe
from vla_stack.training.sources import Source

BLOCK = 128  # frames that are encoded at once
SAVE = 16  # blocks after which it is noted how far it is

Encode = Callable[[NDArray[np.int64], int], Tensor]  # (rows of a dataset, number of the view) -> [b, n, d]


def cached_views(
    recipe: Recipe, sources: Sequence[Source], policy: Any, preprocess: Any, device: torch.device
) -> list[NDArray[np.int16]]:
    """Image tokens of all views of each source's frames, int16 [V, N, n, d], memory-mapped; missing ones are made.

    Args:
        recipe: The run.
        sources: Its datasets.
        policy: As training begins; what the recipe does not train of it is frozen here.
        preprocess: Its preprocessor.
        device: Where it encodes.

    Raises:
        UserError: What reads pictures is trained, the policy reads no image tokens, or the disk is full.
    """
    config = base_config(policy.config)
    if not isinstance(config, VlaConfig) or config.embodiments or config.history:
        message = "data.cached_views is for the native VLA of one robot, without a history"
        raise UserError(message, "set data.cached_views=0")
    freeze_backbone(policy.to(device), recipe.method.optimizer)
    policy.eval()
    weights = hashlib.sha256(repr((recipe.data.augmentation, recipe.precision, config.camera_keys)).encode())
    for name, p in policy.named_parameters():
        if not p.requires_grad:
            weights.update(name.encode() + p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return [_views(source, recipe, policy, preprocess, device, weights.copy()) for source in sources]


def _views(
    source: Source, recipe: Recipe, policy: Any, preprocess: Any, device: torch.device, digest: Any
) -> NDArray[np.int16]:
    """The views of one dataset."""
    dataset, keys = source.dataset, base_config(policy.config).camera_keys
    cameras = [camera_name(key) for key in keys]
    pictures = open_frames(dataset, cameras)
    generator = torch.Generator(device)

    def encode(rows: NDArray[np.int64], view: int) -> Tensor:
        raw: dict[str, Any] = {image_key(c): torch.from_numpy(p[rows]).to(device) for c, p in pictures.items()}
        if OBS_STATE in dataset.columns:
            raw[OBS_STATE] = torch.from_numpy(dataset.columns[OBS_STATE][rows]).to(device)
        raw[TASK] = [dataset.tasks[i] for i in dataset.columns["task_index"][rows]]
        generator.manual_seed(int(np.random.SeedSequence((view, int(rows[0]))).generate_state(1)[0]))
        batch = preprocess(augmented(raw, recipe.data.augmentation, generator))
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            return policy.image_tokens(batch)  # type: ignore[no-any-return]

    first = encode(np.zeros(1, np.int64), 0)
    if first.requires_grad:
        message = "data.cached_views is set, and what reads pictures is trained"
        remedy = "set method.optimizer.backbone_lr_scale=0, or policy.options.freeze_vision=true of a backbone"
        raise UserError(message, remedy)
    rows = np.arange(dataset.num_frames) if source.counted is None else np.flatnonzero(source.counted)
    views = recipe.data.cached_views
    digest.update(repr((views, rows.tobytes(), [CameraFrames(dataset, c).fingerprints() for c in cameras])).encode())
    file = cache_folder(dataset.root) / f"views-{digest.hexdigest()[:16]}.i16"
    return _filled(file, (views, dataset.num_frames, *first.shape[1:]), rows, encode)


def _filled(file: Path, shape: tuple[int, ...], rows: NDArray[np.int64], encode: Encode) -> NDArray[np.int16]:
    """A file of views, after what is missing of it has been encoded; another process that wants it waits."""
    index, views = file.with_suffix(".json"), shape[0]
    blocks = [(view, rows[i : i + BLOCK]) for view in range(views) for i in range(0, len(rows), BLOCK)]
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        need = 2 * int(np.prod(shape))
        begun = index.exists() and file.exists() and file.stat().st_size == need
        done = int(read_json(index)["blocks"]) if begun else 0
        if done < len(blocks):
            free, need = shutil.disk_usage(file.parent).free, need * (len(blocks) - done) // len(blocks)
            if need > free:
                message = f"{views} views need {need / 1e9:.1f} GB more in {file.parent}, {free / 1e9:.1f} are free"
                raise UserError(message, "free disk space, or set fewer data.cached_views")
            if not done:  # of a file that was deleted it says what is no longer there
                index.unlink(missing_ok=True)
            store = np.memmap(file, np.int16, "r+" if done else "w+", shape=shape)
            bar = tqdm(total=len(blocks), initial=done, unit_scale=BLOCK, unit=" frames", desc="encoding views")
            with bar, torch.no_grad():
                for number in range(done, len(blocks)):
                    view, some = blocks[number]
                    tokens = encode(some, view).to(torch.bfloat16).cpu().contiguous()
                    store[view, some] = tokens.view(torch.int16).numpy()
                    bar.update()
                    if number % SAVE == SAVE - 1 or number == len(blocks) - 1:
                        store.flush()
                        write_json(index, {"blocks": number + 1})
    return np.memmap(file, np.int16, "r", shape=shape)
