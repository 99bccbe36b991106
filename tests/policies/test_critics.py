"""An ensemble is its networks; subsets and Polyak averages are exact."""

import torch
from torch import nn

from vla_stack.policies.critics import Ensemble, polyak, sample_critics


def one_by_one(ensemble: Ensemble, member: int) -> nn.Sequential:
    """The member as ordinary layers."""
    layers: list[nn.Module] = []
    for i, (w, b) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
        linear = nn.Linear(w.shape[1], w.shape[2]).double()
        linear.weight.data, linear.bias.data = w[member].T.clone(), b[member, 0].clone()
        layers.append(linear)
        if i < len(ensemble.weights) - 1:
            if ensemble.scales:
                norm = nn.LayerNorm(w.shape[2]).double()
                norm.weight.data = ensemble.scales[i][member, 0].clone()
                norm.bias.data = ensemble.shifts[i][member, 0].clone()
                layers.append(norm)
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def test_ensemble_equals_the_loop_over_its_networks():
    g = torch.Generator().manual_seed(0)
    for layer_norm in (True, False):
        ensemble = Ensemble(3, 5, (8, 6), layer_norm=layer_norm, generator=g).double()
        for p in (*ensemble.scales, *ensemble.shifts):
            p.data += 0.3 * torch.randn(p.shape, generator=g, dtype=torch.float64)
        x = torch.randn(7, 5, generator=g, dtype=torch.float64, requires_grad=True)
        together = ensemble(x)
        apart = torch.stack([one_by_one(ensemble, i)(x)[:, 0] for i in range(3)])
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
        ours, theirs = (torch.autograd.grad(q.sum(), x)[0] for q in (together, apart))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_networks_evaluate_alone_and_do_not_share_gradients():
    ensemble = Ensemble(4, 3, (8,), generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([2, 0])
    torch.testing.assert_close(ensemble(x, chosen), ensemble(x)[chosen])
    ensemble(x, chosen).sum().backward()
    assert all((p.grad[[1, 3]] == 0).all() for p in ensemble.parameters())
    assert all((p.grad[chosen] != 0).any() for p in ensemble.weights)


def test_several_actions_an_observation_are_judged_as_each_alone():
    g = torch.Generator().manual_seed(0)
    for hidden in ((), (8,), (8, 6)):
        ensemble = Ensemble(4, 5, hidden, generator=g).double()
        obs, actions = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((7, 3), (7, 6, 2)))
        apart = torch.stack([ensemble(torch.cat([obs, actions[:, j]], -1)) for j in range(6)], -1)
        torch.testing.assert_close(ensemble.judge(obs, actions), apart, rtol=0, atol=1e-12)
        some = torch.tensor([2, 0])
        torch.testing.assert_close(ensemble.judge(obs, actions, some), apart[some], rtol=0, atol=1e-12)


def test_critics_are_drawn_without_replacement():
    g = torch.Generator().manual_seed(0)
    pairs = {tuple(sorted(sample_critics(3, 2, g).tolist())) for _ in range(100)}
    assert pairs == {(0, 1), (0, 2), (1, 2)}
    assert sample_critics(2, 2, g) is None


def test_target_is_the_geometric_mixture_after_n_steps():
    g = torch.Generator().manual_seed(0)
    target, source = (Ensemble(2, 3, (4,), generator=g).double() for _ in range(2))
    first = [p.clone() for p in target.parameters()]
    tau, n = 0.005, 50
    for _ in range(n):
        polyak(target, source, tau)
    kept = (1 - tau) ** n
    for p, p0, s in zip(target.parameters(), first, source.parameters(), strict=True):
        torch.testing.assert_close(p, kept * p0 + (1 - kept) * s, rtol=0, atol=1e-12)
