"""A person's mistake ends in one line that names it: no traceback, and nothing heavy is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_wrong_invocations_name_their_cause(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "wrong_invocations.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) >= 200
    for one in said:
        assert one["code"] in (1, 2) and "Traceback" not in one["text"], one
        assert one["word"] in one["text"].strip().splitlines()[-1], one
        assert one["heavy"] == [], one
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty", "bare", "bad.yaml", "list.yaml", "typo.yaml"}
    assert list((tmp_path / "empty").iterdir()) == []  # and nothing was left behind
