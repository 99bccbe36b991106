"""`vla train` of a world model: stages, resuming, what it leaves; and which frames a clip is made of."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from world_toys import RECIPE, SIZE, record

from sim.so101 import SO101
from vla_stack import envs
from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.training import recipe as recipes
from vla_stack.world_model import heads_data, quality
from vla_stack.world_model import model as world
from vla_stack.world_model.clips import clip_batch, clip_index, done_frames, open_recording
from vla_stack.world_model.memory import history_chunks
from vla_stack.world_model.model import load
from vla_stack.world_model.tool import tool_of
from vla_stack.world_model.train import WorldTraining, _check_recording


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("world") / "data")


def train(root: Path, folder: Path, *overrides: str) -> Path:
    (folder.parent / "recipe.yaml").write_text(RECIPE)
    recipe = str(folder.parent / "recipe.yaml")
    assert main(["train", recipe, f"data.root={root}", f"output_dir={folder}", *overrides]) == 0
    return folder / "model"


def test_a_run_that_lost_its_last_checkpoints_ends_with_the_same_bits(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    folder = train(root, run)
    before = {part: load_file(folder / f"{part}.safetensors") for part in ("vae", "dynamics", "heads")}
    for lost in ("vae/checkpoints/000002", "dynamics/checkpoints", "heads"):
        shutil.rmtree(run / lost)
    for lost in ("latents.safetensors", "generated.safetensors"):
        (run / lost).unlink()
    assert main(["train", "--resume", str(run)]) == 0
    for part, weights in before.items():
        after = load_file(run / "model" / f"{part}.safetensors")
        assert all(torch.equal(weights[k], after[k]) for k in weights), part
    monkeypatch.setattr(world, "SHIPPED", tmp_path / "shipped")
    shutil.copytree(run / "model", tmp_path / "shipped" / "pick")
    assert world.resolve("shipped") == world.resolve("pick") == tmp_path / "shipped" / "pick"
    # Another dynamics network may stand on the same autoencoder; another autoencoder may not take its weights.
    other = train(root, tmp_path / "other", f"method.vae_from={run}", "method.dynamics.width=24")
    taken = load_file(other / "vae.safetensors")
    assert all(torch.equal(before["vae"][k], v) for k, v in taken.items())
    words = [f"data.root={root}", f"method.vae_from={run}", "method.vae.channels=8", f"output_dir={tmp_path / 'third'}"]
    assert main(["train", str(tmp_path / "recipe.yaml"), *words]) == 1
    assert "vae.safetensors does not fit this recipe" in capsys.readouterr().err
    model = load(run)
    assert model.config.limits.disagreement >= 0 and len(model.bank) and model.cameras == ("front", "wrist")


def test_what_later_stages_have_learnt_from_is_not_trained_further(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(WorldTraining, "_heads", lambda self: 1 / 0)  # the process dies after two stages
    with pytest.raises(ZeroDivisionError):
        train(root, run)
    with pytest.raises(UserError, match="its heads are not trained yet -- vla train --resume"):
        load(run)
    monkeypatch.undo()
    assert main(["train", "--resume", str(run)]) == 0
    imagined, before = (run / "generated.safetensors").read_bytes(), load_file(run / "model" / "dynamics.safetensors")
    assert main(["train", "--resume", str(run), "method.train_dynamics.steps=4"]) == 1
    assert f"remove {run / 'heads'}" in capsys.readouterr().err
    after = load_file(run / "model" / "dynamics.safetensors")
    assert load(run) and all(torch.equal(before[k], after[k]) for k in before)  # the model is as it was
    shutil.rmtree(run / "heads")
    assert main(["train", "--resume", str(run), "method.train_dynamics.steps=4"]) == 0
    assert (run / "generated.safetensors").read_bytes() != imagined  # by the new dynamics


def test_data_that_are_too_few_or_of_another_task_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    for name, episodes, frames, override, why in (
        ("few", 9, 4, "seed=0", "has 9 episodes, of which every 10th is kept"),
        ("short", 10, 2, "seed=0", "the longest training episode of .* has 2 frames"),
        ("other", 10, 4, "task=sim/stack-v0", "was recorded with 'pick up the red cube', sim/stack-v0 asks for"),
    ):
        data = record(tmp_path / name, episodes, frames)
        words = [f"data.root={data}", f"output_dir={tmp_path / 'run'}", override]
        assert main(["train", str(tmp_path / "r.yaml"), *words]) == 1 and not (tmp_path / "run").exists()
        assert re.search(why, capsys.readouterr().err)


def test_episodes_that_are_held_out_last_a_chunk_as_well(root: Path, tmp_path: Path) -> None:
    recording = open_recording(root)
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = recipes.load(tmp_path / "r.yaml", [f"data.root={root}"])
    _check_recording(recording, recipe)
    short = replace(recording, end=np.where(recording.held_out, recording.start + 2, recording.end))
    with pytest.raises(UserError, match="the longest held-out episode of .* has 2 frames"):
        _check_recording(short, recipe)


def test_guards_are_set_by_rollouts_of_episodes_that_last_a_chunk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = open_recording(root)
    held_out = recording.start >= 64  # the last two episodes; the first of them has fewer frames than a chunk
    recording = replace(recording, held_out=held_out, end=np.where(recording.start == 64, 66, recording.end))
    began: list[int] = []

    def imagine(model: object, recording: object, starts: np.ndarray, frames: int, seed: int) -> tuple[Tensor, Tensor]:
        began.extend(starts)
        return torch.zeros(len(starts), frames), torch.zeros(len(starts), frames // 2)

    monkeypatch.setattr(heads_data, "imagine_along", imagine)
    model: Any = SimpleNamespace(horizon=2, config=SimpleNamespace(heads=SimpleNamespace(rollout=6)))
    heads_data.imagine_rollouts(model, recording, 16, 0, held_out=True)
    assert began == [72] * 16


@pytest.mark.parametrize("future", [4, 6, 17])
def test_a_strip_shows_as_many_imagined_frames_as_recorded_ones(
    future: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, some = 40, np.zeros((40, 1, SIZE, SIZE, 3), np.uint8)
    recording: Any = SimpleNamespace(
        start=np.zeros(n, int), end=np.full(n, n), held_out=np.ones(n, bool), stacked=lambda frames: some[frames]
    )

    def imagine(model: object, recording: object, starts: np.ndarray, frames: int) -> tuple[np.ndarray, None]:
        whole = frames // future * future
        return np.zeros((len(starts), whole, 1, SIZE, SIZE, 3), np.uint8), None

    monkeypatch.setattr(quality, "imagine_along", imagine)
    monkeypatch.setattr(quality, "decode", lambda model, latents: latents)
    model: Any = SimpleNamespace(horizon=future, cameras=("front",))
    quality.write_strip(model, recording, tmp_path / "strip.png")
    assert (tmp_path / "strip.png").is_file()


@pytest.mark.parametrize(
    "wrong",
    [
        "generated=0",
        "dynamics.future=0",
        "dynamics.history=-1",
        "dynamics.members=0",
        "dynamics.steps=0",
        "dynamics.sigma_min=0",
        "dynamics.held=2",
        "vae.widths=[8, 0]",
        "heads.judges=0",
    ],
)
def test_sizes_that_no_model_has_are_refused(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    with pytest.raises(UserError, match=rf"'method\.{wrong.partition('=')[0]}' is .*, expected "):
        recipes.load(tmp_path / "r.yaml", [f"method.{wrong}"])


def test_a_clip_is_what_a_rollout_would_remember(root: Path) -> None:
    recording = open_recording(root)
    now = np.array([8 + 5, 8 + 7])  # of the second episode, whose frames are 8 to 15
    index = clip_index(now, recording, history=3, future=2)
    assert index.tolist() == [[9, 9, 11, 13, 14, 15], [9, 11, 13, 15, 15, 15]]
    n, offset = divmod(5, 2)
    assert index[0, :3].tolist() == [8 + offset + 2 * c for c in history_chunks(n, 3)]

    latents = torch.arange(recording.end.size).float().reshape(-1, 1, 1, 1, 1)
    batch = clip_batch(recording, latents, now, 3, 2, known=np.array([1, 2]))
    assert batch["valid"].tolist() == [[True, True, False], [True, False, False]]
    np.testing.assert_array_equal(batch["poses"][0, 4:], recording.poses[[14, 14]])  # held
    np.testing.assert_allclose(batch["time"][0], [-2, -2, -1, 0, 0.5, 1])
    fresh = clip_index(now, recording, 3, 2, np.array([True, False]))
    assert fresh.tolist() == [[13, 13, 13, 13, 14, 15], index[1].tolist()]  # a rollout that begins there
    np.testing.assert_array_equal(recording.before(np.array([8, 9])), [recording.states[8, :5], recording.commands[8]])
    assert recording.held_out.sum() == 8 and recording.held_out[-1]
    assert recording.success.tolist()[8:16] == [False] * 6 + [True] * 2


def frames_of(reward: list[float], won: list[bool]) -> SimpleNamespace:
    """Two episodes of four frames each."""
    columns = {"next.reward": np.array(reward, np.float32), "next.success": np.array(won)}
    return SimpleNamespace(columns=columns, num_frames=8, episode_from=np.array([0, 4]), episode_to=np.array([4, 8]))


@pytest.mark.parametrize(
    ("reward", "won", "done"),
    [
        ([0, 1, 1, 1, 0, 0, 0, 0], [3], [2, 3]),  # it went on after its success
        ([0, 0, 0, 1, 0, 0, 0, 0], [3], [3]),  # it ended with it
        ([0.1, 0.4, 0.9, 1.0, 0.1, 0.2, 0.1, 0.3], [3], [3]),  # progress is paid
        ([0, 0, 0, 0, 0, 0, 0, 0], [7], [7]),  # a person said so
        ([0, 0, 0, 0, 0, 0, 0, 0], [], []),
        ([0, 0, 0, 1, 0, 0, 0, 0], [], []),  # nobody saw what came of the last step
    ],
)
def test_in_which_frames_the_task_is_done(reward: list[float], won: list[int], done: list[int]) -> None:
    said = frames_of(reward, [frame in won for frame in range(8)])
    assert np.flatnonzero(done_frames(said)).tolist() == done  # type: ignore[arg-type]


def test_a_recording_without_any_success_is_told_of(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe, recording = recipes.load(tmp_path / "r.yaml", [f"data.root={root}"]), open_recording(root)
    _check_recording(recording, recipe)
    assert not capsys.readouterr().out
    _check_recording(replace(recording, success=np.zeros_like(recording.success)), recipe)
    assert "judges will learn that nothing ever does" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("method.dynamics.width=9", "'method.dynamics.width' 9 is no multiple of its 2 heads -- use 8"),
        ("method.train_heads.batch_size=3", "'method.train_heads.batch_size' is 3 -- use at least 4"),
        ("data.episodes=[0]", "'data.episodes' is not for a world model"),
        ("data.validation=0.2", "'data.validation' is not for a world model"),
    ],
)
def test_what_would_end_a_training_later_is_refused_first(wrong: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    with pytest.raises(UserError, match=re.escape(says)):
        recipes.load(tmp_path / "r.yaml", ["data.root=x", wrong])


def test_a_model_that_is_shipped_is_all_there(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import ship_world_model

    train(root, tmp_path / "run")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "README.md").write_text("what is said of it")
    (tmp_path / "toy" / "old.safetensors").touch()
    monkeypatch.setattr(ship_world_model, "SHIPPED", tmp_path)
    assert ship_world_model.main(str(tmp_path / "run"), "toy") == 0
    left = {path.name for path in (tmp_path / "toy").iterdir()}
    assert {"README.md", "recipe.yaml", "world_model.json", "vae.jsonl"} <= left and "old.safetensors" not in left
    assert f"root:\n  - {root.name}\n" in (tmp_path / "toy" / "recipe.yaml").read_text()
    load(tmp_path / "toy")


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert main(["train", str(tmp_path / "r.yaml")]) == 1
    assert "'data.root' is missing" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "r.yaml"), "method.dynamics.widht=3"]) == 1
    assert "'method.dynamics.width'" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds no world model"):
        load(tmp_path)
    for text in ("{", "[]", "3"):
        (tmp_path / "world_model.json").write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            load(tmp_path)


def test_an_arm_in_joint_space_is_learnt_and_imagined(tmp_path: Path) -> None:
    robot = SO101.spec("joint_abs", ("front", "wrist"), SIZE, 20.0)
    task = gym.make("sim/so101_pick-v0", cameras=()).unwrapped.task_variants  # type: ignore[attr-defined]
    root = record(tmp_path / "data", robot=robot, tasks=task[:1])
    recording = open_recording(root)
    assert recording.measured.shape == recording.commands.shape == (80, 5)
    assert np.ptp(recording.measured[:, :3], axis=0).min() > 0.1  # metres, and not the joints' radians
    train(root, tmp_path / "run", "task=sim/so101_pick-v0")
    rows = envs.make(f"imagined:{tmp_path / 'run'}", 2)
    assert rows.robot == robot
    first = rows.reset([0, 1], [3, 4])
    target = first[0].observation["agent_pos"] + np.float32(0.02)
    steps = [rows.step([0, 1], np.stack([target, target]))[0] for _ in range(3)]
    for step in (first[0], *steps):
        assert step.observation["agent_pos"].shape == (6,) and step.observation["pixels"]["wrist"].shape == (
            SIZE,
            SIZE,
            3,
        )
    tool = tool_of(robot)
    reached = tool.measured(steps[-1].observation["agent_pos"][None])[0]
    np.testing.assert_allclose(reached[:3], tool.commanded(target, reached)[:3], atol=0.02)  # an untrained adapter


def test_a_robot_without_a_simulator_begins_where_its_data_does(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(root, run, "task=")
    short = envs.make(f"imagined:{run}", 1, None, {"max_episode_steps": 2})
    still = short.reset([0], [0])[0].observation["agent_pos"]
    assert not short.step([0], still[None, :5])[0].truncated and short.step([0], still[None, :5])[0].truncated
    recording = open_recording(root)
    rows = envs.make(f"imagined:{run}", 1)
    for seed in range(5):
        first = rows.reset([0], [seed])[0].observation
        [row] = np.flatnonzero((recording.states == first["agent_pos"]).all(1))
        assert recording.held_out[row] and row == recording.start[row]
        np.testing.assert_array_equal(first["pixels"]["wrist"], recording.pictures["wrist"][row])
    action = recording.commands[0]
    ends = [rows.step([0], action[None])[0] for _ in range(8)]  # as long as the longest episode
    assert ends[-1].truncated or any(end.terminated or end.truncated for end in ends)
    shutil.copytree(run / "model", tmp_path / "alone")
    with pytest.raises(UserError, match="nothing says which data it is of -- give its first frames"):
        envs.make(f"imagined:{tmp_path / 'alone'}", 1)
    envs.make(f"imagined:{tmp_path / 'alone'}", 1, None, {"starts": str(root)})
    joints = record(tmp_path / "joints", robot=SO101.spec("joint_abs", ("front", "wrist"), SIZE, 10.0))
    with pytest.raises(UserError, match="joints has action .shoulder_pan.pos .*, the policy was trained on .tcp_x"):
        envs.make(f"imagined:{tmp_path / 'alone'}", 1, None, {"starts": str(joints)})
