"""Episodes that are held out: which they are, that nothing is learnt from them, and that checks are comparable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training_fakes import record, tiny_config

from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.methods.imitation.loss import loss
from vla_stack.schema import Dim, Observation, RobotSpec
from vla_stack.training.build import build
from vla_stack.training.loop import Trainer
from vla_stack.training.placement import Local
from vla_stack.training.recipe import DataRecipe, PolicyRecipe, Recipe, SourceRecipe
from vla_stack.training.sources import open_sources
from vla_stack.training.validation import HeldOut, held_out_by, hold_out, split, without_dropout

FIELDS = ("width", "expert_width", "depth", "heads", "head_dim", "vision_channels", "chunk_size", "n_action_steps")


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("data") / "ten", episodes=10, frames=8)


def of(recipe: Recipe, *roots: Path, **data: Any) -> Recipe:
    options = {name: getattr(tiny_config(), name) for name in FIELDS}
    given = {"root": tuple(map(str, roots)), "validation": 0.3} | data
    return replace(recipe, data=DataRecipe(**given), policy=PolicyRecipe(options=options))


def trainer(recipe: Recipe, run_dir: Path) -> Trainer:
    run_dir.mkdir(exist_ok=True)
    return Trainer(recipe, build(recipe, loss, torch.device("cpu")), Local("cpu"), run_dir)


def test_a_split_is_of_the_episodes_alone_and_leaves_some_of_either() -> None:
    train, held_out = split(range(10), 0.3)
    assert len(held_out) == 3 and sorted(train + held_out) == list(range(10))
    assert split(range(9, -1, -1), 0.3) == (train, held_out)
    assert [len(split(range(n), s)[1]) for n, s in ((2, 0.01), (2, 0.99), (7, 0.99), (40, 0.1))] == [1, 1, 6, 4]
    with pytest.raises(ValueError, match="1 episodes cannot be split"):
        split([4], 0.5)


def test_nothing_is_learnt_of_what_is_held_out(tmp_path: Path, recipe: Recipe, ten: Path) -> None:
    """Neither weights nor statistics: all is as if the training episodes had been named."""
    train, held_out = split(range(10), 0.3)
    runs = [of(recipe, ten), of(recipe, ten, episodes=train, validation=0.0)]
    for one, name in zip(runs, ("a", "b"), strict=True):
        made = trainer(one, tmp_path / name)
        made.run(held_out=made.parts.held_out)
    folders = [next((tmp_path / name / "checkpoints").glob("*12/pretrained_model")) for name in ("a", "b")]
    for file in [p.name for p in folders[0].glob("*.safetensors")]:
        a, b = (load_file(folder / file) for folder in folders)
        assert all(torch.equal(a[k], b[k]) for k in a), file
    seen = [set(np.unique(batch["episode_index"])) for batch in trainer(runs[0], tmp_path / "c").parts.held_out]
    assert set.union(*seen) == set(held_out)


def test_the_loss_lies_in_the_metrics_and_two_checks_differ_by_the_weights(
    tmp_path: Path, recipe: Recipe, ten: Path
) -> None:
    made = trainer(of(recipe, ten), tmp_path / "run")
    first, again = made.validate(made.parts.held_out), made.validate(made.parts.held_out)
    assert first == again and set(first) == {"loss", "flow_loss"}
    made.run(held_out=made.parts.held_out)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = {r["step"]: r["validation/loss"] for r in records if "validation/loss" in r}
    assert list(logged) == [4, 8, 12]  # with each checkpoint
    assert logged[12] == made.validate(made.parts.held_out)["loss"] != first["loss"]
    assert [r["step"] for r in records if "loss" in r] == [2, 4, 6, 8, 10, 12]
    raw = made.validate
    with made.ema.applied():  # what it measures is the average, which now stands where the raw weights do
        assert raw(made.parts.held_out)["loss"] != logged[12]


def test_a_check_draws_all_frames_alike(tmp_path: Path, recipe: Recipe, ten: Path) -> None:
    """Whatever training draws by: values of frames, of which there are none here, are not even read."""
    plain = of(recipe, ten)
    sources, held_out = hold_out(open_sources(plain.data, tiny_config()), 0.3)
    worth = replace(plain, data=replace(plain.data, progress=str(tmp_path / "values"), opening_weight=5.0))
    checks = [HeldOut(one, held_out, tiny_config(), loss) for one in (plain, worth)]
    for a, b in zip(*checks, strict=True):
        assert np.array_equal(a["action"], b["action"])


def test_resume_keeps_the_split_and_the_run(tmp_path: Path, ten: Path) -> None:
    options = {name: getattr(tiny_config(), name) for name in FIELDS} | {"vision_channels": [4, 8]}
    flat = [
        "imitation",
        f"data.root={ten}",
        "data.validation=0.2",
        f"policy.options={json.dumps(options)}",
        "method={batch_size: 4, save_every: 2, log_every: 2, optimizer: {final_lr_ratio: 1.0}}",
        "device=cpu",
        "threads=1",
    ]
    assert main(["train", *flat, f"output_dir={tmp_path / 'a'}", "method.steps=4"]) == 0
    assert main(["train", *flat, f"output_dir={tmp_path / 'b'}", "method.steps=2"]) == 0
    assert main(["train", "--resume", str(tmp_path / "b"), "method.steps=4"]) == 0
    logged = [
        [
            (r["step"], r["validation/loss"])
            for r in map(json.loads, (tmp_path / run / "metrics.jsonl").open())
            if "validation/loss" in r
        ]
        for run in "ab"
    ]
    assert logged[0] == logged[1] and [step for step, _ in logged[0]] == [2, 4]


def test_what_a_run_held_out_is_known_when_its_dataset_has_grown(
    tmp_path: Path, recipe_file: Path, ten: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = record(tmp_path / "data", episodes=4, frames=8), tmp_path / "run"
    command = ["train", str(recipe_file), f"data.root={root}", "data.validation=0.2", f"output_dir={run}"]
    assert main([*command, "method.steps=1"]) == 0
    held_out = split(range(4), 0.2)[1]
    record(root, episodes=2, frames=8, seed=1)
    grown = open_dataset(root)
    assert grown.num_episodes == 6 and held_out != split(range(6), 0.2)[1]
    assert held_out_by(run, grown) == held_out
    assert held_out_by(run, open_dataset(ten)) is None and held_out_by(tmp_path / "nothing", grown) is None

    resumed = ["train", "--resume", str(run), "method.steps=2"]
    assert main(resumed) == 1
    assert f"{run} held out the episodes [2] of {root}, of {root} as it is now" in capsys.readouterr().err
    assert main([*resumed, "data.episodes=[0, 1, 2, 3]"]) == 0
    assert held_out_by(run, grown) == held_out
    (run / "held_out.json").unlink()  # as of a run before there was this file
    assert held_out_by(run, grown) is None


def test_each_dataset_of_a_mixture_holds_some_out(tmp_path: Path, recipe: Recipe, ten: Path) -> None:
    other = record(tmp_path / "other", episodes=4, frames=6, seed=1, task="push it")
    both = of(recipe, ten, other)
    made = trainer(both, tmp_path / "run")
    seen = {(int(s), int(e)) for b in made.parts.held_out for s, e in zip(b["source"], b["episode_index"], strict=True)}
    ours = {(number, e) for number, count in enumerate((10, 4)) for e in split(range(count), 0.3)[1]}
    assert seen <= ours and {s for s, _ in seen} == {0, 1}
    assert made.validate(made.parts.held_out) == made.validate(made.parts.held_out)
    assert next(iter(made.parts.loader))["action"].shape[0] == 4


def test_one_episode_cannot_be_held_out(tmp_path: Path, ten: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "imitation", f"data.root={ten}", "data.episodes=[3]", f"output_dir={tmp_path / 'a'}"]
    assert main([*command, "data.validation=0.5"]) == 1
    assert "has one episode to train on, and 'data.validation' is set" in capsys.readouterr().err
    assert main([*command, "data.validation=1.0"]) == 1
    assert "'data.validation'" in capsys.readouterr().err


def test_a_check_drops_nothing_and_leaves_the_policy_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    net[3].eval()
    with without_dropout(net):
        assert net.training and [m.training for m in net] == [True, False, False, False]
    assert [m.training for m in net] == [True, True, True, False]


def won(root: Path, episodes: int, won: set[int]) -> Path:
    """A dataset some of whose episodes succeeded; the success lies in the last frame alone, as the recorder has it."""
    dims = (Dim("x", "m"),)
    spec = RobotSpec("test/arm", dims, dims, (), rate_hz=10)
    with EpisodeRecorder(root, spec) as recorder:
        for episode in range(episodes):
            for step in range(5):
                state = np.array([step], np.float32)
                recorder.add_frame(Observation(state, {}, "push", step, step * 10**8), state)
            recorder.save_episode(success=episode in won)
    return root


def parts_of(share: float, *recipes: SourceRecipe, **data: Any) -> tuple[list[set[int]], list[set[int]]]:
    """Episodes of each source that are trained on, and that are held out."""
    sources = open_sources(DataRecipe(sources=recipes, **data), tiny_config())
    train, held_out = hold_out(sources, share)
    return [set(s.recipe.episodes or ()) for s in train], [set(s.recipe.episodes or ()) for s in held_out]


def test_what_is_held_out_has_frames_to_train_on(tmp_path: Path) -> None:
    root = str(won(tmp_path / "some", 12, {0, 4, 9}))
    for interventions, usable in (("succeeded", {0, 4, 9}), ("rac", set(range(12)))):
        (train,), (held_out,) = parts_of(0.34, SourceRecipe(root), interventions=interventions)
        assert held_out < usable and held_out | train == set(range(12)) and not held_out & train, interventions
    for number, (few, what) in enumerate((({3}, "one"), (set(), "no"))):
        one = SourceRecipe(str(won(tmp_path / f"few{number}", 4, few)))
        with pytest.raises(UserError, match=rf"{what} episode to train on, and 'data.validation' is set"):
            parts_of(0.3, one, interventions="succeeded")


def test_two_sources_of_one_dataset_hold_out_the_same(tmp_path: Path, ten: Path) -> None:
    """However the folder is written: what one of them holds out the other one is not trained on."""
    link = tmp_path / "again"
    link.symlink_to(ten)
    first, both = SourceRecipe(str(ten), episodes=tuple(range(6))), SourceRecipe(str(link))
    train, held_out = parts_of(0.3, first, both)
    assert not set.union(*train) & set.union(*held_out)
    assert held_out == [held_out[1] & set(range(6)), set(split(range(10), 0.3)[1])]

    rest = min(held_out[1])
    with pytest.raises(UserError, match=r"all of its episodes to train on held out, and 'data.validation' is set"):
        parts_of(0.3, SourceRecipe(str(ten), episodes=(rest,)), both)
    trained = SourceRecipe(str(ten), episodes=tuple(sorted(train[1])[:2]))
    assert parts_of(0.3, trained, both) == ([set(sorted(train[1])[:2]), train[1]], [held_out[1]])


def test_what_a_run_held_out_of_a_dataset_is_of_all_its_sources(tmp_path: Path, ten: Path) -> None:
    noted = [{"root": str(ten), "held_out": [7, 2]}, {"root": str(tmp_path), "held_out": [1]}]
    (tmp_path / "held_out.json").write_text(json.dumps([*noted, {"root": str(ten), "held_out": [4]}]))
    assert held_out_by(tmp_path, open_dataset(ten)) == (2, 4, 7)


def test_a_run_that_held_out_otherwise_goes_on_so(tmp_path: Path) -> None:
    """As runs did that began when failed episodes were held out, too."""
    root = won(tmp_path / "some", 12, {0, 4, 9})
    sources = open_sources(DataRecipe((str(root),), interventions="succeeded"), tiny_config())
    before = split(range(12), 0.34)[1]
    assert hold_out(sources, 0.34)[1][0].recipe.episodes != before
    (tmp_path / "held_out.json").write_text(json.dumps([{"root": str(root), "held_out": before}]))
    assert hold_out(sources, 0.34, tmp_path)[1][0].recipe.episodes == before
    assert hold_out(sources, 0.2, tmp_path) == hold_out(sources, 0.2)


def test_a_check_drops_no_channels_and_no_attention_either() -> None:
    """As convolutions and LeRobot's ACT do; what was switched off below such a module stays so."""
    x = torch.ones(2, 3, 4)
    attention = nn.MultiheadAttention(4, 1, dropout=0.5)
    attention.out_proj.eval()
    net = nn.ModuleList([nn.Dropout1d(0.5), nn.AlphaDropout(0.5), attention])
    with without_dropout(net):
        assert all(torch.equal(layer(x), x) for layer in net[:2])
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
    assert all(m.training for m in net) and not attention.out_proj.training
