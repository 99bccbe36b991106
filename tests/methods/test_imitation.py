"""The imitation loss against closed forms, on a policy whose velocity is a table."""

import pytest
import torch

from vla_stack.methods.imitation import loss as imitation
from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy
from vla_stack.schema import ACTION, image_key

B, H, A = 3, 4, 2


class Recorder(FlowPolicy):
    """A policy that answers with a learnable tensor and remembers what it was asked."""

    horizon, action_dim, noise_dim, inference_steps = H, A, A, 1

    def __init__(self, draws: int) -> None:
        self.answer = torch.randn(B * draws, H, A, generator=torch.Generator().manual_seed(5)).requires_grad_()

    def encode(self, batch):
        self.images = batch[image_key("front")]
        return self

    def repeat(self, n):
        return self

    def velocity(self, context, x, t):
        self.x, self.t = x.detach(), t
        return self.answer

    def features(self, context):
        raise NotImplementedError


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    is_pad = torch.tensor([[False] * 4, [False, False, True, True], [True] * 4])
    images = torch.rand(B, 3, 8, 8, generator=generator)
    return {ACTION: torch.randn(B, H, A, generator=generator), "action_is_pad": is_pad, image_key("front"): images}


def noise_of(policy: Recorder, actions: torch.Tensor) -> torch.Tensor:
    t = flow.per_token(policy.t)[..., None]
    return (policy.x - (1 - t) * actions) / t


@pytest.mark.parametrize("draws", [1, 3])
def test_loss_is_the_masked_mean_squared_velocity_error(batch, draws):
    policy = Recorder(draws)
    loss, metrics = imitation.loss(policy, batch, torch.Generator().manual_seed(1), draws=draws)
    actions = batch[ACTION].repeat_interleave(draws, 0)
    valid = ~batch["action_is_pad"].repeat_interleave(draws, 0)
    error = (policy.answer - (noise_of(policy, actions) - actions)) ** 2
    assert loss.item() == pytest.approx(error[valid].mean().item(), rel=1e-3)
    assert metrics["flow_loss"].item() == loss.item() and not metrics["flow_loss"].requires_grad


def test_padding_has_exactly_no_gradient(batch):
    policy = Recorder(2)
    imitation.loss(policy, batch, torch.Generator().manual_seed(1), draws=2)[0].backward()
    is_pad = batch["action_is_pad"].repeat_interleave(2, 0)
    assert (policy.answer.grad[is_pad] == 0).all()
    assert (policy.answer.grad[~is_pad] != 0).all()


def test_dimensions_that_an_embodiment_lacks_count_for_nothing(batch):
    batch["action_is_pad"][:] = False
    batch["action_dim_is_pad"] = torch.tensor([[False, True], [False, False], [False, True]])
    policy = Recorder(1)
    loss, _ = imitation.loss(policy, batch, torch.Generator().manual_seed(1), draws=1)
    loss.backward()
    lacking = batch["action_dim_is_pad"][:, None].expand(B, H, A)
    assert (policy.answer.grad[lacking] == 0).all() and (policy.answer.grad[~lacking] != 0).all()
    error = (policy.answer - (noise_of(policy, batch[ACTION]) - batch[ACTION])) ** 2
    assert loss.item() == pytest.approx(error[~lacking].mean().item(), rel=1e-3)


def test_a_batch_of_padding_costs_nothing(batch):
    batch["action_is_pad"][:] = True
    policy = Recorder(2)
    loss, _ = imitation.loss(policy, batch, torch.Generator().manual_seed(1), draws=2)
    loss.backward()
    assert loss.item() == 0.0 and (policy.answer.grad == 0).all()


def test_the_generator_decides_everything(batch):
    state = torch.random.get_rng_state()
    seeds = (1, 1, 2)
    losses = [imitation.loss(Recorder(2), batch, torch.Generator().manual_seed(s))[0].item() for s in seeds]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(state, torch.random.get_rng_state())
