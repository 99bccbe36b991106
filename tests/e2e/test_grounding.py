"""Encoders are taught from moments of many scenes, before imitation and beside it; so is a policy widened."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vla_stack.policies.directory import WEIGHTS, resolve_policy
from vla_stack.policies.reading import read_config
from vla_stack.rollout.collect import CollectConfig, collect

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def ground():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import ground

        patch.setattr(ground, "FIRST", 8)
        patch.setattr(ground, "BATCH", 4)
        patch.setattr(ground, "HELD", 2)
        yield ground


def difference(one: Path, other: Path) -> set[str]:
    """Weights that differ, or that one of the two lacks."""
    a, b = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return {name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])}


@pytest.mark.slow
def test_what_is_grounded_goes_on_being_so_beside_imitation(ground, tmp_path, capfd):
    import co_train

    out, shipped = tmp_path / "grounded", resolve_policy("shipped")
    ground.main(
        Namespace(start="shipped", out=out, tasks=["pick"], pointers=2, later=0.5, minutes=0.02, workers=1, seed=0)
    )
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0]["steps"] == 1 and lines[-1]["steps"] > 1 and 0.0 <= lines[-1]["aimed"] <= 1.0
    changed = difference(shipped, out)
    assert any(".pointers." in name for name in changed) and all(name.startswith("prefix.") for name in changed)

    collect(CollectConfig("pick", noise=0.3), tmp_path / "data", 2, workers=0)
    data = [f"data.root={tmp_path / 'data'}", f"output_dir={tmp_path / 'run'}", "method.steps=2", "method.log_every=1"]
    co_train.main(["multitask", f"policy.pretrained={out}", *data, "method.ema=0", "threads=1"], ["pick"])
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "grounding" in line]
    assert [line["step"] for line in steps] == [1, 2] and all(line["grounding"] > 0 for line in steps)
    assert all(line["loss"] > line["flow_loss"] for line in steps)
    trained = difference(out, tmp_path / "run" / "checkpoints" / "last" / "pretrained_model")
    assert any(name.startswith("expert.") for name in trained) and any(".pointers." in name for name in trained)


def test_a_policy_that_is_widened_says_what_it_said(ground):
    path = resolve_policy("shipped")
    one = ground.widened(path, read_config(path, "cpu"), vision_pointers=0).eval()
    more = ground.widened(path, read_config(path, "cpu"), vision_pointers=2).eval()
    batch = {
        **{key: torch.rand(1, *f.shape) for key, f in one.config.image_features.items()},
        "observation.state": torch.zeros(1, *one.config.robot_state_feature.shape),
        "observation.language.tokens": torch.ones(1, 4, dtype=torch.int64),
        "observation.language.attention_mask": torch.ones(1, 4, dtype=torch.bool),
    }
    assert more.config.vision_pointers == 2
    with torch.no_grad():
        tokens = [p.prefix.image_tokens(batch) for p in (one, more)]
    width = one.config.tokens_per_camera
    said = tokens[1].unflatten(1, (-1, width + 2))
    torch.testing.assert_close(said[:, :, :width].flatten(1, 2), tokens[0])
    assert not said[:, :, width:].any()
