"""Judges and their calibration; the autoencoder's scale; limits of guards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from world_toys import record

from vla_stack.world_model import guards, heads_data
from vla_stack.world_model.clips import encode_all, open_recording
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import Encoder, Heads, HeadsConfig, strict_threshold
from vla_stack.world_model.heads_data import HeadsLoader, calibrate, imagine_rollouts, window_starts, with_other_tasks
from vla_stack.world_model.model import WorldConfig, WorldModel
from vla_stack.world_model.poses import Adapter, PoseScale, turned
from vla_stack.world_model.vae import Vae, VaeConfig, object_mask, ssim, to_planes


def test_a_judge_can_be_asked_frame_by_frame() -> None:
    torch.manual_seed(0)
    heads = Heads(HeadsConfig(width=8, judges=2), views=2, tasks=3, horizon=4)
    pictures = torch.randint(0, 255, (2, 5, 2, 16, 16, 3), dtype=torch.uint8)
    task = torch.tensor([0, 2])
    with torch.no_grad():
        whole, _ = heads.success(pictures, task)
        first, states = heads.success(pictures[:, :2], task)
        rest, _ = heads.success(pictures[:, 2:], task, states)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    assert not torch.equal(heads.success(pictures, task.flip(0))[0], whole)  # the instruction counts


def test_an_eye_sees_where_something_is() -> None:
    eye = Encoder(views=2, width=8, points=2)
    eye.maps = torch.nn.Conv2d(
        6, 2, 1
    )  # the first point is of what is bright in the first view, the second of the other
    eye.out = torch.nn.Identity()
    torch.nn.init.zeros_(eye.maps.bias)
    with torch.no_grad():
        eye.maps.weight.copy_(torch.eye(2).repeat_interleave(3, 1)[:, :, None, None] * 10)
    pictures = torch.zeros(1, 2, 11, 11, 3, dtype=torch.uint8)
    pictures[0, 0, 2, 10] = pictures[0, 1, 5, 0] = 255
    across, down, shown = eye(pictures)[0].unflatten(0, (3, 2))
    torch.testing.assert_close(across, torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(down, torch.tensor([-0.6, 0.0]))
    torch.testing.assert_close(shown, torch.full((2,), 30.0))


def test_a_turn_past_half_a_circle_leads_as_any_other_does() -> None:
    torch.manual_seed(0)
    adapter = Adapter(2)
    torch.nn.init.normal_(adapter.net[-1].weight, std=0.1)  # type: ignore[arg-type]
    pose, turn = torch.tensor([[0.4, 0.0, 0.2, 3.1, 1.0]]), torch.tensor([0, 0, 0, 0.1, 0])
    near, far = pose + turn, pose + turn - torch.tensor([0, 0, 0, 2 * torch.pi, 0])  # the same place
    there, here = adapter(pose, pose, far[None]), adapter(pose, pose, near[None])
    torch.testing.assert_close(there[..., :3], here[..., :3])
    torch.testing.assert_close(turned(there[..., 3] - here[..., 3]), torch.zeros(1, 1), atol=1e-5, rtol=0.0)


def test_calibration_makes_an_overconfident_judge_doubt() -> None:
    heads = Heads(HeadsConfig(width=8, judges=1), views=1, tasks=1, horizon=4)
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, generator=generator)
    labels = torch.rand(4000, generator=generator) < truth.sigmoid()
    heads.calibrate(5 * truth[None], labels)
    assert 4.0 < heads.temperature < 6.25 and abs(heads.offset) < 0.3
    # Judges that learnt with both outcomes weighing the same: what they say is too large by the log odds of a failure.
    rare = torch.rand(4000, generator=generator) < (truth - 3).sigmoid()
    heads.calibrate(truth[None], rare)
    told = heads.probability(truth[None])
    assert abs(float(told.mean() - rare.float().mean())) < 0.01 and -3.4 < heads.offset < -2.6
    failed, won = torch.linspace(0, 0.8, 100), torch.full((100,), 0.9)
    threshold = strict_threshold(torch.cat([won, failed]), torch.arange(200) < 100)
    assert int((failed > threshold).sum()) == 2 and threshold < 0.8
    assert strict_threshold(failed / 100, torch.zeros(100, dtype=torch.bool)) == 0.5  # nothing ever succeeded
    assert strict_threshold(torch.tensor([0.1, 0.9]), torch.tensor([True, True])) == 0.5


def test_latents_have_unit_variance_and_pictures_their_size() -> None:
    torch.manual_seed(0)
    vae = Vae(VaeConfig(channels=3, stem=2, widths=(8, 8)))
    pictures = torch.randint(0, 255, (20, 2, 16, 16, 3), dtype=torch.uint8)
    vae.standardise(pictures)
    with torch.no_grad():
        latents = vae.encode(pictures)
        assert vae.factor == 4 and latents.shape == (20, 2, 3, 4, 4)
        assert vae.pictures(latents).shape == pictures.shape
    torch.testing.assert_close(latents.mean((0, 1, 3, 4)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(latents.std((0, 1, 3, 4)), torch.ones(3), atol=1e-4, rtol=0)


def test_what_counts_as_an_object_and_as_similar() -> None:
    pictures = torch.full((1, 16, 16, 3), 128, dtype=torch.uint8)
    pictures[0, 2:4, 2:4] = torch.tensor([220, 50, 45], dtype=torch.uint8)
    assert object_mask(pictures).sum() == 4
    x = to_planes(pictures)
    assert abs(float(ssim(x, x)) - 1) < 1e-5 and ssim(x, -x) < 0.9


def test_another_instruction_makes_a_success_none() -> None:
    rng, task = np.random.default_rng(0), np.arange(600) % 3
    told, own = with_other_tasks(task, 3, rng.random(600) < 0.3, rng)
    assert (told[own] == task[own]).all() and (told[~own] != task[~own]).all() and 120 < (~own).sum() < 240
    assert {(int(a), int(b)) for a, b in zip(task[~own], told[~own], strict=True)} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    told, own = with_other_tasks(np.zeros(4, int), 1, np.ones(4, bool), rng)  # nothing else could have been said
    assert not told.any() and own.all()


def test_judges_learn_and_are_measured_on_frames_within_episodes(tmp_path: Path) -> None:
    recording = open_recording(record(tmp_path, episodes=20, frames=7))
    starts = window_starts(recording, 500, 4, np.random.default_rng(0))
    assert (starts + 4 <= recording.end[starts]).all() and not recording.held_out[starts].any()
    torch.manual_seed(0)
    dynamics = DynamicsConfig(history=2, future=2, width=8, blocks=1, heads=2, patch=2, members=2)
    config = WorldConfig(
        "", recording.tasks, PoseScale.of(recording.poses), VaeConfig(4, 2, (8,)), dynamics, HeadsConfig(8, 2, 4, 12)
    )
    model = WorldModel(config, recording.robot).eval()
    rollouts = imagine_rollouts(model, recording, 8, 0)
    assert rollouts["index"].shape == (8, 12) and (rollouts["length"] == 6).all()
    batches = HeadsLoader(model, recording, encode_all(model.vae, recording, torch.device("cpu")), rollouts, 40, 0)
    shown = [next(batches) for _ in range(6)]
    task, won = (np.concatenate([b[k] for b in shown]) for k in ("task", "success"))
    assert 0.15 < 1 - won.any(1).mean() and won.any() and set(task) == {0, 1}
    # The probe sees other moments than the judges, in training episodes, with the poses measured there.
    moments = shown[0]["measured"][:, None] == recording.states[None, :, :5]
    index = moments.all(-1).argmax(1)
    assert moments.all(-1).any(1).all() and not recording.held_out[index].any() and len(set(index)) > 60
    sharp = shown[0]["frames"][80:].astype(int) - recording.stacked(index[80:])  # the rest went through the autoencoder
    assert abs(sharp.mean()) < 3 and len(np.unique(np.abs(sharp).mean((1, 2, 3, 4)).round(1))) > 50  # each in its way
    # Episodes that are told to lift the other cube succeed nowhere: here only the second instruction is ever fulfilled.
    assert not won[task == 0].any()

    seen: dict[str, torch.Tensor] = {}

    def threshold(probability: torch.Tensor, labels: torch.Tensor) -> float:
        seen.update(probability=probability, labels=labels)
        return 0.4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads_data, "strict_threshold", threshold)
        limits, bank = calibrate(model, recording, 6, 0)
    # A decision an episode: each is judged by its own instruction, and once more by another, which it does not fulfil.
    # Then held-out episodes as they were recorded.
    episodes = len(np.unique(recording.start[recording.held_out]))
    assert seen["probability"].shape == seen["labels"].shape == (12 + episodes,) and not seen["labels"][6:12].any()
    assert seen["labels"][12:].tolist() == [
        bool(recording.success[recording.start == s].any()) for s in np.unique(recording.start[recording.held_out])
    ]
    assert limits.success == 0.4 and len(bank) == (~recording.held_out).sum()
    model.bank = bank
    readings = guards.neighbour_distance(
        model,
        guards.features(
            model, *(torch.from_numpy(a[recording.held_out]) for a in (recording.poses, recording.commands))
        ),
    )
    assert limits.distance <= float(readings.max()) + 1e-5 and limits.distance > float(readings.median())
