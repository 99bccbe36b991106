"""RAVL's target and its diversity term, against values known by hand."""

from __future__ import annotations

import math

import torch

from vla_stack.methods import ravl
from vla_stack.methods.replay_buffer import Batch
from vla_stack.methods.sac import Sac, SacRecipe
from vla_stack.policies.critics import Ensemble


def batch(obs: torch.Tensor, actions: torch.Tensor, reward: float = 0.0, discount: float = 0.5) -> Batch:
    n = len(obs)
    fill = torch.full((n,), math.nan)
    rest = (torch.full((n,), reward), obs.roll(1, 0), torch.full((n,), discount), fill, torch.arange(n))
    return Batch(obs, actions, *rest)


def test_similarity_counts_ordered_pairs() -> None:
    def of(*rows: tuple[float, float]) -> float:
        return float(ravl.similarity(torch.tensor(rows, dtype=torch.float32)[:, None]))

    assert math.isclose(of((1, 0), (2, 0), (3, 0)), 3.0, abs_tol=1e-6)  # N(N-1) cosines of 1, over N-1
    assert math.isclose(of((1, 0), (0, 5)), 0.0, abs_tol=1e-6)
    assert math.isclose(of((1, 0), (-4, 0)), -2.0, abs_tol=1e-6)


def test_term_is_of_the_gradient_by_actions_alone_and_pushes_critics_apart() -> None:
    recipe = SacRecipe(num_critics=2, subset=2, critic=(), actor=(4,))
    agent = Sac(recipe, obs=2, actions=2, seed=0)
    with torch.no_grad():  # linear critics: the gradient by actions is their last two weights
        agent.critic.weights[0].copy_(torch.tensor([[9.0, -9.0, 3.0, 0.0], [5.0, 5.0, 1.0, 1.0]])[..., None])
    part = batch(torch.randn(3, 2), torch.randn(3, 2))
    value = ravl.term(agent, part, torch.empty(0), None, weight=0.5)
    assert math.isclose(float(value), 0.5 * 2 * math.cos(math.pi / 4), rel_tol=1e-6)
    (gradient,) = torch.autograd.grad(value, [agent.critic.weights[0]])
    with torch.no_grad():
        agent.critic.weights[0] -= 0.1 * gradient
    assert ravl.term(agent, part, torch.empty(0), None, weight=0.5) < value


def test_target_is_the_minimum_of_all_and_goes_on_where_a_rollout_is_cut() -> None:
    recipe = ravl.RavlRecipe()
    agent = Sac(recipe.sac, obs=3, actions=2, seed=1)
    cut, done = (batch(torch.randn(4, 3), torch.rand(4, 2), 1.0, d) for d in (0.9, 0.0))
    state = agent.generator.get_state()
    y = agent.sac_target(cut)
    agent.generator.set_state(state)
    with torch.no_grad():
        actions, log_p = agent.actor.sample(cut.next_obs, agent.generator)
        values = agent.target(torch.cat([cut.next_obs, actions], -1))
    assert values.shape == (10, 4)
    torch.testing.assert_close(y, 1.0 + 0.9 * (values.min(0).values - agent.temperature.detach() * log_p))
    torch.testing.assert_close(agent.sac_target(done), torch.ones(4))  # success ends it
    metrics = ravl.update(agent, ravl.blend(cut, done), recipe)
    assert all(torch.isfinite(v) for v in metrics.values()) and "term" in metrics


def test_critics_may_have_inputs_of_their_own() -> None:
    net, x = Ensemble(3, 4, (8,)), torch.randn(5, 4)
    torch.testing.assert_close(net(x.expand(3, 5, 4)), net(x))
    own = torch.randn(3, 5, 4)
    torch.testing.assert_close(net(own)[1], net(own[1])[1])
