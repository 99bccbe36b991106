"""The transformer: what reaches what, and what the loss counts."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from vla_stack.world_model.dynamics import Dynamics, DynamicsConfig, Remembered, loss, noised_history
from vla_stack.world_model.poses import PoseScale, Waves

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


def with_gradient(
    model: Dynamics, latents: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and its gradient by what the network says of all frames, [B, members, F, V, C, h, w]."""
    outputs: list[torch.Tensor] = []
    forward = model.forward

    def keep(*args: Any) -> torch.Tensor:
        out = forward(*args)
        out.retain_grad()
        outputs.append(out)
        return out

    model.forward = keep  # type: ignore[method-assign]
    value, _ = loss(model, latents, tokens, valid, torch.Generator().manual_seed(0))
    value.backward()
    model.forward = forward  # type: ignore[method-assign]
    grad = outputs[0].grad
    assert grad is not None
    return value.detach(), grad


def test_tokens_of_all_views_come_back_as_the_same_pictures() -> None:
    model = random_model(members=1)
    x = torch.randn(2, model.config.frames, 2, 3, 4, 4)
    tokens = model._patches(x)
    assert tokens.shape == (2, model.config.frames, 2 * 4, 3 * 4)
    assert torch.equal(model._unpatched(tokens), x)
    assert torch.equal(tokens[:, :, :4].reshape(-1).sort()[0], x[:, :, 0].reshape(-1).sort()[0])  # no token spans views


@pytest.mark.parametrize("source", [0, 1, 2])
def test_every_position_can_be_copied_from_the_current_frame_and_from_each_remembered_one(source: int) -> None:
    torch.manual_seed(0)
    model = Dynamics(DynamicsConfig(**SMALL), views=2, channels=3, size=4)  # as built, all outputs are zero
    x, remembered, tokens, sigma = inputs(model)
    corner = (2 * 3 + source) * 4 + 1  # of the outputs after members and channels, top right in each patch
    with torch.no_grad():
        model.project.bias[corner] = 1.0
        out = model(x, remembered, tokens, sigma, torch.ones(2, dtype=torch.bool))
    seen = [*remembered.history.unbind(1), remembered.anchor][source]  # [B, V, C, h, w]
    expected = torch.zeros_like(seen)
    expected[..., ::2, 1::2] = seen[..., ::2, 1::2]
    torch.testing.assert_close(out, expected[:, None, None].expand_as(out))


def test_history_is_no_target_and_noise_of_none_leaves_it_as_it_is() -> None:
    model = random_model()
    latents = torch.randn(2, model.config.frames, 2, 3, 4, 4)
    tokens = torch.zeros(2, model.config.frames, 11)
    _, grad = with_gradient(model, latents, tokens, torch.ones(2, 4, dtype=torch.bool))
    assert grad is not None and (grad[:, :, :2] == 0).all() and (grad[:, :, 2:] != 0).any()

    history, level = noised_history(latents[:, :2], 0.0, torch.Generator().manual_seed(0))
    assert torch.equal(history, latents[:, :2]) and (level == 0).all()


def test_frames_past_the_end_do_not_count() -> None:
    model, valid = random_model(members=1), torch.tensor([[True, True, False, False], [True, True, True, True]])
    latents, tokens = torch.randn(2, model.config.frames, 2, 3, 4, 4), torch.zeros(2, model.config.frames, 11)
    value, grad = with_gradient(model, latents, tokens, valid)
    reached = grad[:, 0, model.config.history :].abs().sum((2, 3, 4, 5)) > 0
    assert torch.equal(reached, valid) and value > 0
    nothing = loss(model, latents, tokens, torch.zeros_like(valid), torch.Generator().manual_seed(0))[0]
    assert nothing == 0


@pytest.mark.parametrize("conditioning, follows", [("per_frame", True), ("mean", False)])
def test_only_poses_of_each_frame_can_be_followed_in_order(
    conditioning: Literal["per_frame", "mean"], follows: bool
) -> None:
    model = random_model(conditioning=conditioning)
    x, remembered, _, sigma = inputs(model)
    poses = torch.rand(2, 6, 5, generator=torch.Generator().manual_seed(2))
    times = torch.tensor([-2.0, -1.0, 0.0, 1 / 3, 2 / 3, 1.0]).expand(2, -1)
    order = torch.tensor([0, 1, 2, 5, 3, 4])  # the same poses, other frames
    with torch.no_grad():
        one, other = (model.denoise(x, remembered, SCALE.tokens(p, times), sigma) for p in (poses, poses[:, order]))
    assert torch.allclose(one, other, atol=1e-4) is not follows  # sums in another order are not the same bits


def test_a_frames_pose_changes_its_own_picture_most() -> None:
    model = random_model()
    for block in model.blocks:  # type: ignore[assignment]
        torch.nn.init.normal_(block.out.weight, std=0.02)  # what frames tell each other is less than what they are
    x, remembered, tokens, sigma = inputs(model)
    moved = tokens.clone()
    moved[:, 4] += 0.5
    with torch.no_grad():
        one, other = (model.denoise(x, remembered, t, sigma) for t in (tokens, moved))
    change = (one - other).abs().mean((0, 1, 3, 4, 5, 6))
    assert int(change.argmax()) == 2  # frame 4 is the third denoised one


@pytest.mark.parametrize("conditioning", ["per_frame", "mean", "flat"])
def test_who_is_not_told_poses_does_not_know_them(conditioning: Literal["per_frame", "mean", "flat"]) -> None:
    model = random_model(conditioning=conditioning)
    x, remembered, tokens, sigma = inputs(model)
    with torch.no_grad():
        both = [[model(x, remembered, t, sigma, told) for t in (tokens, -tokens)] for told in torch.eye(2).bool()]
    for told, (one, other) in enumerate(both):
        assert not torch.equal(one[told], other[told]) and torch.equal(one[1 - told], other[1 - told])


def test_waves_are_of_places_and_ways_and_as_exact_in_half_the_bits() -> None:
    waves, tokens = Waves(now=2, count=5), torch.rand(2, 6, 11, generator=torch.Generator().manual_seed(1))
    out = waves(tokens)
    assert out.shape == (2, 6, waves.size)
    assert torch.equal(out[..., :11], tokens) and (out[:, 2, 11:21] == 0).all()  # at the current frame there is no way
    torch.testing.assert_close(out[:, 5, 11:21], 2 * (tokens[:, 5, :-1] - tokens[:, 2, :-1]))
    torch.testing.assert_close(out[..., 21:31] ** 2 + out[..., 31:] ** 2, torch.ones(2, 6, 10))  # sines, cosines
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(waves(tokens), out)
    later = tokens.clone()
    later[..., -1] += 1
    assert torch.equal(waves(later)[..., 11:], out[..., 11:])  # time has none


@pytest.mark.parametrize("past", [False, True])
def test_views_see_each_other(past: bool) -> None:
    model = random_model()  # of one block
    x, remembered, tokens, sigma = inputs(model)
    with torch.no_grad():
        one = model.denoise(x, remembered, tokens, sigma)
        if past:
            remembered.history[:, 0, 1] += 1  # what the second camera showed long ago
        else:
            x[:, :, 1] += 1
        other = model.denoise(x, remembered, tokens, sigma)
    assert ((one - other)[:, :, :, 0].flatten(3).abs().amax(-1) > 1e-3).all()


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
