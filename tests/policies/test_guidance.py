"""Real-time chunking against its closed forms."""

import pytest
import torch

from vla_stack.policies import flow
from vla_stack.policies.guidance import Guide, guidance_weight, guided_euler, soft_mask


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curved(x, t):
    """A velocity field that mixes the steps of a chunk."""
    return torch.tanh(x.flip(1)) + t[:, None, None] * x


def test_soft_mask_of_the_paper():
    """§8 test 4 of asynchronous execution."""
    expected = torch.tensor([1, 1, 0.5706, 0.2871, 0.1145, 0.0258, 0, 0, 0, 0])
    mask = soft_mask(10, delay=2, execute=4)
    torch.testing.assert_close(mask, expected, atol=1e-4, rtol=0)
    assert (mask.diff() <= 0).all()


@pytest.mark.parametrize(
    "steps,beta,expected",
    [
        (5, 5.0, [5, 4.25, 2.1667, 2.1667, 4.25]),
        (10, 5.0, [5, 5, 4.25, 2.762, 2.1667, 2, 2.1667, 2.762, 4.25, 5]),
    ],
)
def test_guidance_weight(steps, beta, expected):
    weights = [guidance_weight(1.0 - i / steps, beta) for i in range(steps)]
    assert weights == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("jacobian", ["full", "identity"])
def test_without_weight_it_is_the_plain_sampler(jacobian):
    """§8 test 1: no weight anywhere."""
    noise = draw(3, 6, 2)
    guide = Guide(draw(3, 6, 2, seed=1), torch.zeros(3, 6))
    torch.testing.assert_close(guided_euler(curved, noise, guide, jacobian=jacobian), flow.euler(curved, noise))


def test_a_sample_without_a_guide_is_not_moved_by_its_neighbours():
    noise = draw(2, 6, 2)
    weights = torch.stack((torch.zeros(6), torch.ones(6)))
    both = guided_euler(curved, noise, Guide(draw(2, 6, 2, seed=1), weights))
    torch.testing.assert_close(both[0], flow.euler(curved, noise)[0])
    assert not torch.allclose(both[1], flow.euler(curved, noise)[1])


@pytest.mark.parametrize("jacobian", ["full", "identity"])
@pytest.mark.parametrize("steps,beta,left", [(5, 5.0, 0.0), (10, 5.0, 0.01063), (10, None, 0.0)])
def test_error_of_a_fixed_field_shrinks_as_derived(jacobian, steps, beta, left):
    """§8 test 2: with v without x, the error of slot i shrinks by the product over k of (1 - lambda_k W_i / n)."""
    noise, drift = draw(2, 6, 2), draw(2, 6, 2, seed=2)
    plain = flow.euler(lambda x, t: drift + 0.0 * x, noise, steps)
    weights = torch.tensor([1.0, 0.9, 0.5, 0.2, 0.05, 0.0], dtype=torch.float64).expand(2, 6)
    guide = Guide(plain + draw(2, 6, 2, seed=1), weights)
    chunk = guided_euler(lambda x, t: drift + 0.0 * x, noise, guide, steps, beta, jacobian)
    strength = [guidance_weight(1.0 - k / steps, steps if beta is None else beta) for k in range(steps)]
    shrunk = torch.stack([1.0 - weights * strength_k / steps for strength_k in strength]).prod(0)[..., None]
    torch.testing.assert_close(guide.actions - chunk, shrunk * (guide.actions - plain), atol=1e-9, rtol=1e-9)
    assert shrunk[0, 0].item() == pytest.approx(left, abs=1e-5) and (shrunk[:, 5] == 1.0).all()


def test_the_jacobian_is_the_network_s():
    """§8 test 3: where the field points at one chunk, its estimate is free of x, and only `identity` can push."""
    goal, noise = draw(2, 6, 2, seed=3), draw(2, 6, 2)

    def to_goal(x, t):
        return (x - goal) / t[:, None, None]

    guide = Guide(draw(2, 6, 2, seed=1), torch.ones(2, 6))
    torch.testing.assert_close(guided_euler(to_goal, noise, guide), flow.euler(to_goal, noise), atol=1e-12, rtol=0)
    pushed = guided_euler(to_goal, noise, guide, jacobian="identity")
    assert (pushed - goal).abs().max() > 0.1


def test_full_guidance_works_under_no_grad_and_leaves_no_graph():
    with torch.no_grad():
        chunk = guided_euler(curved, draw(1, 6, 2), Guide(draw(1, 6, 2, seed=1), torch.ones(1, 6)))
    assert not chunk.requires_grad
