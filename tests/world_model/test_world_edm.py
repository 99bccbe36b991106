"""Diffusion: the identities of EDM, its sampler, guidance."""

from __future__ import annotations

import torch
from diffusers import EulerDiscreteScheduler

from vla_stack.world_model import edm

SIGMA = torch.tensor([0.01, 0.3, 1.0, 7.0, 80.0], dtype=torch.float64)


def test_coefficients_keep_unit_variance_and_weigh_the_network_evenly() -> None:
    s = edm.scaling(SIGMA)
    torch.testing.assert_close(edm.weight(SIGMA) * s.c_out**2, torch.ones_like(SIGMA))
    torch.testing.assert_close(s.c_in**2 * (SIGMA**2 + 1), torch.ones_like(SIGMA))
    assert edm.scaling(torch.tensor(0.0)).c_skip == 1


def test_the_estimate_is_that_of_a_v_prediction_scheduler() -> None:
    scheduler = EulerDiscreteScheduler(prediction_type="v_prediction", use_karras_sigmas=True)
    scheduler.set_timesteps(5)
    sigma = scheduler.sigmas[0]
    x, network = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    theirs = scheduler.step(network, scheduler.timesteps[0], x).pred_original_sample
    s = edm.scaling(sigma.double())
    torch.testing.assert_close(s.c_skip * x + s.c_out * network, theirs.double(), rtol=1e-5, atol=1e-5)


def test_a_perfect_denoiser_is_sampled_exactly() -> None:
    clean = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    sigmas = edm.schedule(5, 20.0, 0.01)
    assert (
        abs(sigmas[0] - 20.0) < 1e-9
        and sigmas[-1] == 0.0
        and sigmas == sorted(sigmas, reverse=True)
        and len(sigmas) == 6
    )
    drawn = edm.sample(lambda x, sigma: clean, torch.randn_like(clean), sigmas)
    torch.testing.assert_close(drawn, clean, atol=1e-4, rtol=0)


def test_no_guidance_is_the_conditional_pass_bit_for_bit() -> None:
    c, u = torch.randn(2, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(edm.guided(c, u, edm.guidance_scales(5, 1.0)), c)
    scales = edm.guidance_scales(5, 3.0)
    assert scales.tolist() == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert torch.equal(edm.guided(c, u, scales)[:, 0], c[:, 0])
