"""Image-text pairs on disk: a folder of pictures and a ``metadata.jsonl`` with one line for each pair.

    {"file_name": "images/0001.jpg", "prompt": "What is on the table?", "answer": "A red cube."}

That is the layout of Hugging Face's ``imagefolder``, so ``datasets.load_dataset("imagefolder", data_dir=...)`` opens
it too; a picture may appear in several lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.images import fit_image

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class TextPair:
    """One line of ``metadata.jsonl``."""

    image: Path
    prompt: str
    answer: str


def read_pairs(root: str | Path) -> list[TextPair]:
    """The pairs of a folder.

    Raises:
        UserError: There is no ``metadata.jsonl``, or one of its lines is not a pair; names the line.
    """
    path = Path(root) / METADATA
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror})", "give a folder of image-text pairs") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            pair = TextPair(Path(root) / row["file_name"], row["prompt"], row["answer"])
            if not isinstance(pair.prompt, str) or not isinstance(pair.answer, str):
                raise TypeError("prompt and answer are texts")
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(
                f"{path}, line {number} is no image-text pair ({e!r})", "it needs file_name, prompt and answer"
            ) from None
        if not pair.image.is_file():
            raise UserError(f"{path}, line {number}: {pair.image} is missing", "copy it again, or remove the line")
        pairs.append(pair)
    if not pairs:
        raise UserError(f"{path} holds no pair", "write one line for each")
    return pairs


class TextPairLoader:
    """Endless shuffled batches of image-text pairs; an iterator.

    A batch holds ``images`` uint8 [b, size, size, 3], brought to that size by :func:`vla_stack.images.fit_image`, and
    the lists ``prompts`` and ``answers``. Everything random is a function of (seed, epoch), as in
    :class:`~vla_stack.data.ChunkLoader`.

    Args:
        root: Folder of pairs.
        batch_size: Pairs in a batch.
        size: Height and width of the pictures, pixels.
        seed: Determines the order.

    Raises:
        UserError: The folder cannot be read.
    """

    def __init__(self, root: str | Path, batch_size: int, size: int, seed: int = 0) -> None:
        self.pairs = read_pairs(root)
        self.batch_size, self.size, self.seed = batch_size, size, seed
        self._position = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        drawn = [self.pairs[self._draw(self._position + i)] for i in range(self.batch_size)]
        self._position += self.batch_size
        return {
            "images": np.stack([self._picture(pair.image) for pair in drawn]),
            "prompts": [pair.prompt for pair in drawn],
            "answers": [pair.answer for pair in drawn],
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON state from which :meth:`load_state_dict` continues with the same batches."""
        return {"seed": self.seed, "position": self._position, "pairs": len(self.pairs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a loader with this state stood.

        Raises:
            UserError: The state is of another seed or another number of pairs.
        """
        if (state["seed"], state["pairs"]) != (self.seed, len(self.pairs)):
            raise UserError(
                f"the run was started with {state['pairs']} image-text pairs and seed {state['seed']}, now there are "
                f"{len(self.pairs)} and {self.seed}",
                "resume with the pairs and the seed that the run was started with",
            )
        self._position = int(state["position"])

    def _draw(self, position: int) -> int:
        """Index of the pair at a place in the endless stream of epochs."""
        epoch, place = divmod(position, len(self.pairs))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.pairs)))
        return int(self._order[1][place])

    def _picture(self, path: Path) -> NDArray[np.uint8]:
        image = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if image is None:
            raise UserError(f"{path} is not a readable picture", "copy it again")
        return fit_image(cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False), self.size, self.size)
