"""A vision-language model as judge: what it is shown, and what it may answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.propose import Endpoint
from vla_stack.world_model import vlm_judge

FILM = np.random.default_rng(0).integers(0, 255, (9, 4, 8, 3), dtype=np.uint8)


def test_votes_are_counted_and_each_sees_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(['{"success": true}', '```json\n{"success": true}\n```', '{"success": false}'])
    asked: list[Any] = []

    def ask(endpoint: Endpoint, messages: list[dict[str, Any]], shape: Any, name: str) -> str:
        asked.append(messages)
        return next(replies)

    monkeypatch.setattr(vlm_judge, "ask", ask)
    assert vlm_judge.judge(Endpoint("http://x/v1", "m"), FILM, "pick up the red cube") == 2
    pictures = [m[1]["content"][1]["image_url"]["url"] for m in asked]
    assert len(set(pictures)) == 3 and all(p.startswith("data:image/png;base64,") for p in pictures)
    assert "red cube" in asked[0][1]["content"][0]["text"]


@pytest.mark.parametrize("reply", ["yes", "[]", '{"done": true}', "{" * 100])
def test_another_answer_is_refused(monkeypatch: pytest.MonkeyPatch, reply: str) -> None:
    monkeypatch.setattr(vlm_judge, "ask", lambda *args: reply)
    with pytest.raises(UserError, match="does not answer with a verdict"):
        vlm_judge.judge(Endpoint("http://x/v1", "m"), FILM, "pick")
