"""Image-text pairs: what a batch holds, its order, and mistakes that name their line."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest

from vla_stack.data.text_pairs import METADATA, TextPairLoader, read_pairs
from vla_stack.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five pairs of pictures of one colour each, the first one wider than high."""
    lines = []
    for i in range(5):
        picture = np.full((16, 32 if i == 0 else 16, 3), (0, 0, 40 * i + 40), np.uint8)  # blue, green, red
        assert cv2.imwrite(str(tmp_path / f"{i}.png"), picture)
        lines.append(json.dumps({"file_name": f"{i}.png", "prompt": f"What is {i}?", "answer": f"Red {i}."}))
    (tmp_path / METADATA).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_batch_is_pictures_with_their_texts(root: Path) -> None:
    batch = next(TextPairLoader(root, 5, size=8))
    assert batch["images"].shape == (5, 8, 8, 3) and batch["images"].dtype == np.uint8
    for image, prompt, answer in zip(batch["images"], batch["prompts"], batch["answers"], strict=True):
        i = int(answer[4])
        assert prompt == f"What is {i}?" and tuple(image[4, 4]) == (40 * i + 40, 0, 0)
        assert (image[0] == 0).all() == (i == 0)  # the wide one has a black border


def test_every_pair_once_an_epoch_and_exact_resume(root: Path) -> None:
    whole = TextPairLoader(root, 2, size=8, seed=3)
    answers = [a for batch in islice(whole, 5) for a in batch["answers"]]
    assert len(set(answers[:5])) == len(set(answers[5:])) == 5 and answers[:5] != answers[5:]
    resumed = TextPairLoader(root, 2, size=8, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [next(whole)["answers"] for _ in range(4)] == [next(resumed)["answers"] for _ in range(4)]
    with pytest.raises(UserError, match="5 image-text pairs and seed 3, now there are 5 and 4"):
        TextPairLoader(root, 2, size=8, seed=4).load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 6 is no image-text pair"),
        ('{"file_name": "0.png", "prompt": "What?"}', "line 6 .*'answer'.* it needs file_name, prompt and answer"),
        ('{"file_name": "9.png", "prompt": "What?", "answer": "It"}', "line 6: .*9.png is missing"),
        ('{"file_name": "0.png", "prompt": 3, "answer": "It"}', "line 6 .*prompt and answer are texts"),
    ],
)
def test_mistakes_name_their_line(root: Path, line: str, message: str) -> None:
    with (root / METADATA).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=message):
        read_pairs(root)


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="metadata.jsonl cannot be read"):
        read_pairs(tmp_path)
    (tmp_path / METADATA).write_text("")
    with pytest.raises(UserError, match="holds no pair"):
        read_pairs(tmp_path)
