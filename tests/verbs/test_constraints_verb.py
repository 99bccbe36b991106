"""``vla constraints``: what a person sees and what is written."""

from __future__ import annotations

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from test_constraint_proposer import Model

from vla_stack import cli

PICK = Path(__file__).parents[2] / "vla_stack" / "configs" / "constraints" / "pick.yaml"


def test_check_and_explain(tmp_path, capsys):
    assert cli.main(["constraints", "check", str(PICK), "--episodes", "2"]) == 0
    assert "dry run on 2 episodes, 1 successful: no problems" in capsys.readouterr().out
    out = tmp_path / "costs.svg"
    assert cli.main(["constraints", "explain", str(PICK), "--objective", "efficiency", "--out", str(out)]) == 0
    assert "duration() sum, path" in capsys.readouterr().out and out.read_text().count('<g id="axes_') == 5


def test_check_names_the_place_of_a_mistake(tmp_path, capsys):
    bad = tmp_path / "pick.yaml"
    bad.write_text(PICK.read_text().replace("type: duration", "type: haste", 1))
    assert cli.main(["constraints", "check", str(bad)]) == 1
    assert 'stages[0].costs[2].type: is "haste"' in capsys.readouterr().err
    bad.write_text(PICK.read_text().replace("higher: [obj.target, 0.1]", "higher: [obj.target, 0.9]"))
    assert cli.main(["constraints", "explain", str(bad), "--task", "juggle"]) == 1
    assert "no task 'juggle'" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_proposal_is_shown_and_written_only_when_agreed(tmp_path, capsys, monkeypatch, answer):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.asked, server.replies, server.closing = [], [json.dumps(yaml.safe_load(PICK.read_text()))], threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr("builtins.input", lambda _: answer)
    out, url = tmp_path / "mine.yaml", f"http://127.0.0.1:{server.server_port}/v1"
    picture = tmp_path / "scene.png"
    picture.write_bytes(b"\x89PNG")
    flags = ["--base-url", url, "--out", str(out), "--image", str(picture), "--cache", str(tmp_path), "--episodes", "2"]
    code = cli.main(["constraints", "propose", "--task", "pick", *flags])
    server.shutdown()
    server.server_close()
    assert "name: grasp" in capsys.readouterr().out
    assert (code, out.is_file()) == ((0, True) if answer == "y" else (1, False))
