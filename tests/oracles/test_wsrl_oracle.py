"""Soft actor-critic and Cal-QL against zhouzypaul/wsrl: networks of their weights, on their draws."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vla_stack.methods import cal_ql
from vla_stack.methods.cal_ql import CalQlRecipe
from vla_stack.methods.replay_buffer import Batch
from vla_stack.methods.sac import Sac, SacRecipe
from vla_stack.methods.wsrl import Wsrl
from vla_stack.policies.gaussian import log_density
from vla_stack.training import recipe as recipes

PAPER, GAMMA, DRAWS = "WSRL, Cal-QL, SAC", 0.99, 3
PRESET = Path(__file__).parents[2] / "vla_stack" / "configs" / "rl_wsrl_published.yaml"
ARMS = {
    "cal_ql": CalQlRecipe(draws=DRAWS),
    "cql": CalQlRecipe(draws=DRAWS, calibrate=False),
    "no_importance": CalQlRecipe(draws=DRAWS, calibrate=False, importance=False),
    "single": CalQlRecipe(draws=DRAWS, max_backup=False),
}


@pytest.fixture(scope="module")
def theirs(oracle):
    return oracle("wsrl")


@pytest.fixture(scope="module")
def published():
    method = recipes.load(PRESET).method
    assert isinstance(method, Wsrl)
    return replace(method.sac, actor=(6, 6), critic=(6, 6), num_critics=4)


def load(ensemble, weights):
    """Weights of flax into ours. Their critics share the last layer, ours have one each."""
    parts = {i: weights.part(f"network.Dense_{i}.") for i in range(2)}
    norms = {i: weights.part(f"network.LayerNorm_{i}.") for i in range(2)}
    for i in range(2):
        ensemble.weights[i].data[:] = parts[i]["kernel"]
        ensemble.biases[i].data[:] = parts[i]["bias"][..., None, :]
        ensemble.scales[i].data[:] = norms[i]["scale"][..., None, :]
        ensemble.shifts[i].data[:] = norms[i]["bias"][..., None, :]
    ensemble.weights[2].data[:], ensemble.biases[2].data[:] = weights["last.kernel"], weights["last.bias"]


class Weights(dict):
    def part(self, prefix):
        return {k.removeprefix(prefix): v for k, v in self.items() if k.startswith(prefix)}


def make(theirs, recipe):
    agent = Sac(recipe, 3, 2)
    for name in ("critic", "target"):
        w = theirs.part(f"{name}.")
        load(getattr(agent, name), Weights(w, **{"last.kernel": w["Dense_0.kernel"], "last.bias": w["Dense_0.bias"]}))
    w = theirs.part("actor.")
    last = {f"last.{p}": torch.cat([w[f"Dense_0.{p}"], w[f"Dense_1.{p}"]], -1) for p in ("kernel", "bias")}
    load(agent.actor.net, Weights(w, **last))
    return agent


def batch(theirs):
    discount = GAMMA * theirs["masks"]
    columns = ("observations", "actions", "rewards", "next_observations")
    obs, actions, reward, after = (theirs[name] for name in columns)
    return Batch(obs, actions, reward, after, discount, theirs["mc_returns"], torch.zeros(len(obs), dtype=torch.long))


@pytest.fixture
def drawing(monkeypatch):
    """Let torch's draws be given ones: of normals, of uniforms, and of subsets of the critics."""

    def install(agent, normal=(), uniform=(), subsets=()):
        normals, uniforms, chosen = iter(normal), iter(uniform), iter(subsets)
        monkeypatch.setattr(torch, "randn", lambda *shape, **_: next(normals))
        monkeypatch.setattr(torch, "rand", lambda *shape, **_: (next(uniforms) + 1.0) / 2.0)
        agent.draw = lambda generator=None: next(chosen)

    return install


def test_networks(theirs, published, agrees, departs):
    agent, b = make(theirs, published), batch(theirs)
    mean, log_std = agent.actor(b.obs)
    agrees(PAPER, "mean of the policy", mean, theirs["policy.mean"])
    agrees(PAPER, "standard deviation of the policy, clipped at 10", log_std.exp(), theirs["policy.std"])
    agrees(PAPER, "critics, with layer norm", agent.critic(torch.cat([b.obs, b.actions], -1)), theirs["q"])
    before = theirs["policy.before"]
    ours = log_density(before, (before - mean) / log_std.exp(), log_std)
    agrees(PAPER, "log-density of the squashed Gaussian", ours, theirs["policy.log_prob"])
    assert (theirs["policy.std"] == 10.0).any()
    other = make(theirs, replace(published, log_std=SacRecipe().log_std, norm_eps=SacRecipe().norm_eps))
    what = "standard deviation: bounds of ours by default (e⁻²⁰, e²) and theirs (10⁻⁵, 10)"
    departs(PAPER, what, other.actor(b.obs)[1].exp(), theirs["policy.std"], least=1.0)


@pytest.mark.parametrize("arm", ARMS)
def test_critic_loss(theirs, published, agrees, drawing, arm):
    agent, b, t = make(theirs, published), batch(theirs), theirs.part(f"{arm}.")
    drawing(
        agent,
        normal=[t["noise.0"], t["noise.1"], t["noise.2"]],
        uniform=[t["uniform.0"].transpose(0, 1)],
        subsets=[t["subset.0"].long(), t["subset.1"].long()],
    )
    recipe = replace(ARMS[arm], weight=1.0)
    y = cal_ql.max_backup(agent, b, DRAWS) if recipe.max_backup else agent.sac_target(b)
    agrees(PAPER, f"mean target of the critics, `{arm}`", y.mean(), t["target_qs"])
    q = agent.critic(torch.cat([b.obs, b.actions], -1))
    agrees(PAPER, f"temporal difference, `{arm}`", (q - y).square().mean(), t["td_loss"])
    term = cal_ql.term(agent, b, q, agent.draw(), recipe)
    agrees(PAPER, f"conservative term, `{arm}`", term, t["cql_diff"])


def test_soft_actor_critic(theirs, published, agrees, drawing):
    agent, b = make(theirs, replace(published, lr_temperature=1.0)), batch(theirs)
    drawing(agent, normal=[theirs["sac.noise.0"]], subsets=[theirs["sac.subset.0"].long()])
    y = agent.sac_target(b)
    agrees(PAPER, "mean target of the online half", y.mean(), theirs["sac.target_qs"])
    q = agent.critic(torch.cat([b.obs, b.actions], -1))
    agrees(PAPER, "critics' loss of the online half", (q - y).square().mean(), theirs["sac.loss"])


def test_actor_and_temperature(theirs, published, agrees):
    agent, b = make(theirs, published), batch(theirs)
    # What their policy drew, before squashing; the temperature of theirs is the softplus of its parameter.
    actions, alpha = theirs["actor.actions"], theirs["actor.temperature"].item()
    q = agent.critic(torch.cat([b.obs, actions], -1)).amin(0)
    agrees(PAPER, "actor's loss", (alpha * theirs["actor.log_probs"] - q).mean(), theirs["actor.loss"], bound=2e-5)
    agrees(PAPER, "target entropy", agent.target_entropy, theirs["target_entropy"])
    mean, log_std = agent.actor(b.next_obs)
    noise = theirs["temperature.noise"]
    log_p = log_density(mean + log_std.exp() * noise, noise, log_std)
    gap = -(log_p.mean() + agent.target_entropy)  # what our step multiplies with alpha's own derivative
    agrees(PAPER, "temperature's loss", alpha * gap, theirs["temperature.loss"], bound=1e-4)
