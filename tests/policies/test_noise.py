"""Noise without torch is torch's: a policy served in either way gives the same chunks."""

import numpy as np
import pytest
import torch

from vla_stack.policies.noise import randn


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 4), (17, 1), (12, 5), (50, 14)])  # fewer than 16, blocks, a rest
def test_noise_of_a_seed_is_torchs(shape):
    for seed in (0, 1, 2**31 + 5, 2**40 + 7, 2**62 - 1):
        wanted = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).numpy()
        got = randn(seed, *shape)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=1e-6)
