"""The transformer: what reaches what, and what the loss counts."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from vla_stack.world_model.dynamics import Dynamics, DynamicsConfig, Remembered, loss, noised_history
from vla_stack.world_model.poses import PoseScale

SMALL: dict[str, Any] = {"history": 2, "future": 3, "width": 8, "blocks": 1, "heads": 2, "members": 2}
SCALE = PoseScale((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def random_model(**options: Any) -> Dynamics:
    """A model whose every weight counts; as built, its outputs are zero."""
    torch.manual_seed(0)
    model = Dynamics(DynamicsConfig(**SMALL | options), views=2, channels=3, size=4)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def inputs(model: Dynamics) -> tuple[torch.Tensor, Remembered, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    frames = model.config.frames
    latents = torch.randn(2, frames, 2, 3, 4, 4, generator=generator)
    tokens = SCALE.tokens(torch.rand(2, frames, 5, generator=generator), torch.zeros(2, frames))
    k = model.config.history
    return latents[:, k:], Remembered.clean(latents[:, :k], latents[:, k]), tokens, torch.full((2,), 1.5)


def test_tokens_of_all_views_come_back_as_the_same_pictures() -> None:
    model = random_model(members=1)
    x = torch.randn(2, model.config.frames, 2, 3, 4, 4)
    tokens = model._patches(x)
    assert tokens.shape == (2, model.config.frames, 2 * 4, 3 * 4)
    assert torch.equal(model._unpatched(tokens)[:, 0], x)
    assert torch.equal(tokens[:, :, :4].reshape(-1).sort()[0], x[:, :, 0].reshape(-1).sort()[0])  # no token spans views


def test_history_is_no_target_and_noise_of_none_leaves_it_as_it_is() -> None:
    model = random_model()
    outputs: list[torch.Tensor] = []
    forward = model.forward

    def keep(*args: Any) -> torch.Tensor:
        out = forward(*args)
        out.retain_grad()
        outputs.append(out)
        return out

    model.forward = keep  # type: ignore[method-assign]
    latents = torch.randn(2, model.config.frames, 2, 3, 4, 4)
    tokens = torch.zeros(2, model.config.frames, 11)
    value, _ = loss(model, latents, tokens, torch.ones(2, 4, dtype=torch.bool), torch.Generator().manual_seed(0))
    value.backward()
    grad = outputs[0].grad
    assert grad is not None and (grad[:, :, :2] == 0).all() and (grad[:, :, 2:] != 0).any()

    history, level = noised_history(latents[:, :2], 0.0, torch.Generator().manual_seed(0))
    assert torch.equal(history, latents[:, :2]) and (level == 0).all()


def test_frames_past_the_end_do_not_count() -> None:
    model, valid = random_model(), torch.tensor([[True, True, False, False]] * 2)
    latents = torch.randn(2, model.config.frames, 2, 3, 4, 4)
    tokens = torch.zeros(2, model.config.frames, 11)
    losses = []
    for scale in (1.0, 1.0):
        generator = torch.Generator().manual_seed(0)
        losses.append(loss(model, latents * scale, tokens, valid, generator)[0])
    assert losses[0] == losses[1]
    nothing = loss(model, latents, tokens, torch.zeros_like(valid), torch.Generator().manual_seed(0))[0]
    assert nothing == 0


@pytest.mark.parametrize("conditioning, follows", [("per_frame", True), ("mean", False)])
def test_only_poses_of_each_frame_can_be_followed_in_order(
    conditioning: Literal["per_frame", "mean"], follows: bool
) -> None:
    model = random_model(conditioning=conditioning)
    x, remembered, tokens, sigma = inputs(model)
    order = torch.tensor([0, 1, 2, 5, 3, 4])  # the same poses, other frames
    with torch.no_grad():
        one, other = (model.denoise(x, remembered, t, sigma) for t in (tokens, tokens[:, order]))
    assert torch.allclose(one, other, atol=1e-6) is not follows


def test_a_frames_pose_changes_its_own_picture_most() -> None:
    model = random_model()
    for block in model.blocks:  # type: ignore[assignment]
        torch.nn.init.normal_(block.out[1].weight, std=0.02)  # what frames tell each other is less than what they are
    x, remembered, tokens, sigma = inputs(model)
    moved = tokens.clone()
    moved[:, 4] += 0.5
    with torch.no_grad():
        one, other = (model.denoise(x, remembered, t, sigma) for t in (tokens, moved))
    change = (one - other).abs().mean((0, 1, 3, 4, 5, 6))
    assert int(change.argmax()) == 2  # frame 4 is the third denoised one


def test_views_see_each_other() -> None:
    model = random_model()
    x, remembered, tokens, sigma = inputs(model)
    with torch.no_grad():
        one = model.denoise(x, remembered, tokens, sigma)
        x[:, :, 1] += 1
        other = model.denoise(x, remembered, tokens, sigma)
    assert not torch.allclose(one[:, :, :, 0], other[:, :, :, 0])


def test_guidance_of_one_is_none_and_sampling_is_a_function_of_the_noise() -> None:
    model = random_model()
    x, remembered, tokens, sigma = inputs(model)
    with torch.no_grad():
        assert torch.equal(
            model.denoise(x, remembered, tokens, sigma, 1.0), model.denoise(x, remembered, tokens, sigma)
        )
        plain, guided = (model.denoise(x, remembered, tokens, sigma, g) for g in (1.0, 3.0))
    assert torch.equal(plain[:, :, 0], guided[:, :, 0]) and not torch.equal(plain[:, :, -1], guided[:, :, -1])
    chunks = [model.imagine(remembered, tokens, x)[0] for _ in range(2)]
    assert torch.equal(*chunks) and chunks[0].shape == x.shape


def test_members_doubt_what_they_guess_and_not_the_last_touches() -> None:
    model = random_model(steps=5, sigma_min=0.01)
    noise, remembered, tokens, _ = inputs(model)
    _, spread = model.imagine(remembered, tokens, noise)
    with torch.no_grad():
        first = model.denoise(20.0 * noise, remembered, tokens, torch.full((len(noise),), 20.0))
        last = model.denoise(noise, remembered, tokens, torch.full((len(noise),), 0.01))
    at_first, at_last = (x.std(1, correction=0)[:, 1:].mean((1, 2, 3, 4, 5)) for x in (first, last))
    assert (spread > 0.5 * at_first).all() and (at_last < 0.02 * at_first).all()
