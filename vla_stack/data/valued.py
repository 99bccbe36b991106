"""What ``vla train progress`` says of the frames of datasets, and how often they are drawn by it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from vla_stack.data.dataset import Dataset
from vla_stack.data.labels import content_uids
from vla_stack.errors import UserError
from vla_stack.schema import SUCCESS

FRAMES, FACTS = "frames.safetensors", "progress.json"
LOST = 0.1  # of the time that most successes need: a frame that loses so much is drawn e times less often


def by_worth(dataset: Dataset, run: Path) -> NDArray[np.float64]:
    """How often each frame is drawn, float [N]: p(success | o) exp(min(A, 0) / LOST).

    Weights by exp(A) alone, as in advantage-weighted regression (Peng et al. 2019, arXiv:1910.00177), draw what has
    gone wrong for good as often as what goes well, for there no action loses anything, and luck most often of all. So
    a frame counts by how likely its episode succeeds from there, and an action can only lose by its advantage.

    Raises:
        UserError: The run is of other episodes.
    """
    found = frames_of(run, dataset)
    return found["success"] * np.exp(np.minimum(found["advantage"].astype(np.float64), 0.0) / LOST)


def frames_of(run_dir: Path, dataset: Dataset) -> dict[str, NDArray[np.float32]]:
    """What a run says of the frames of a dataset: name -> [N].

    Raises:
        UserError: There is no such run, or it is of other episodes.
    """
    if not (run_dir / FACTS).is_file():
        raise UserError(
            f"{run_dir} holds no values of frames ({FACTS})", "make them: vla train progress policy=DIR ..."
        )
    mine = fingerprint(dataset) + "."
    found = {k.removeprefix(mine): x for k, x in load_file(run_dir / FRAMES).items() if k.startswith(mine)}
    if not found:
        raise UserError(f"{run_dir} values other episodes than {dataset.root} holds", "fit it anew: vla train progress")
    return found


def fingerprint(dataset: Dataset) -> str:
    """Of states, actions and successes of all episodes."""
    digest = hashlib.blake2b(content_uids(dataset).tobytes(), digest_size=12)
    digest.update(np.ascontiguousarray(dataset.columns[SUCCESS]).tobytes())
    return digest.hexdigest()
