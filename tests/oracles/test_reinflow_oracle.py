"""ReinFlow's chain, loss and advantages against ReinFlow/ReinFlow."""

import math
from types import SimpleNamespace

import pytest
import torch

from vla_stack.methods.advantages import advantages, following
from vla_stack.methods.reinflow import loss as reinflow
from vla_stack.methods.reinflow.loss import NoiseNet
from vla_stack.policies.chain import chain_log_prob

PAPER, GAMMA, DECAY = "ReinFlow", 0.99, 0.95
each_chain = pytest.mark.parametrize("steps", [1, 4])


@pytest.fixture(scope="module")
def theirs(oracle):
    return oracle("reinflow")


def stub(chain):
    """A policy whose velocities are those that their networks gave on this chain, against our time."""

    def velocity(context, x, t):
        steps = chain["velocity"].shape[1]
        assert torch.equal(x, chain["chain"][:, :-1].flatten(0, 1))
        torch.testing.assert_close(t, 1.0 - (torch.arange(steps) / steps).repeat(len(chain["chain"])))
        return -chain["velocity"].flatten(0, 1)

    return SimpleNamespace(velocity=velocity, action_dim=chain["chain"].shape[-1])


def entries(chain):
    return chain_log_prob(stub(chain), SimpleNamespace(repeat=lambda n: None), chain["chain"], chain["std"], limit=1.0)


@each_chain
def test_log_probabilities(theirs, agrees, steps):
    chain = theirs.part(f"{steps}.")
    everything = torch.ones(chain["chain"].shape[0], *chain["chain"].shape[2:], dtype=torch.bool)
    ours = reinflow.mean_entry(entries(chain), everything)
    agrees(PAPER, f"log-probability an entry, K = {steps}", ours, chain["log_prob"])
    agrees(
        PAPER,
        f"log-probability of the chain, K = {steps}",
        entries(chain).sum((1, 2, 3)),
        chain["log_prob_sum"],
    )


@each_chain
def test_loss(theirs, agrees, departs, monkeypatch, steps):
    chain, weight = theirs.part(f"{steps}."), 0.25
    b = len(chain["chain"])
    config = SimpleNamespace(limit=1.0, clip=0.01, denoising_steps=steps, entropy=weight, bc=0.0)
    learner = SimpleNamespace(
        config=config,
        policy=stub(chain),
        counted=lambda data, rows: torch.ones(b, *chain["chain"].shape[2:], dtype=torch.bool),
        std=lambda inputs: chain["std"],
        _anchor=[],
    )
    data = SimpleNamespace(inputs=torch.zeros(b, 1), chain=chain["chain"])
    monkeypatch.setattr(reinflow, "renewed", lambda *_: SimpleNamespace(repeat=lambda n: None))
    rows = torch.arange(b)
    loss, metrics = reinflow.Learner.actor_loss(learner, data, rows, chain["old"], chain["advantage"])
    config.entropy = 0.0
    plain, _ = reinflow.Learner.actor_loss(learner, data, rows, chain["old"], chain["advantage"])
    agrees(PAPER, f"clipped policy loss, K = {steps}", plain, chain["policy_loss"])
    constant = 0.5 * math.log(2.0 * math.pi * math.e)  # of each normal's entropy, which ours leaves out
    agrees(PAPER, f"entropy, K = {steps}", (plain - loss) / weight + constant, -chain["entropy_loss"])
    agrees(PAPER, f"share of clipped ratios, K = {steps}", metrics["clipped"], chain["clip_fraction"])
    what = f"KL that ends an iteration, K = {steps}: ours of the whole chain, theirs of an entry"
    departs(PAPER, what, metrics["kl"], chain["approx_kl"], least=1e-3)


def test_bounds_of_the_noise(theirs, agrees):
    net = NoiseNet(1, (3, 2), low=0.08, high=0.24)
    agrees(PAPER, "standard deviation of the noise", net.bounded(theirs["4.z"]), theirs["4.std_of_z"])


def gae(theirs, truncated):
    part = theirs.part("gae.")
    terminated = part["terminated"]
    last = terminated | (part["truncated"] if truncated else False)
    last[-1] = True  # the rollout ends, theirs bootstraps from the value that follows
    final = torch.zeros(len(last), dtype=torch.float64)
    final[-1] = part["last_value"].item()
    discount = GAMMA * (~terminated).double()
    after = following(part["value"], final, last)
    return advantages(part["reward"], discount, last, part["value"], after, DECAY)


def test_advantages(theirs, agrees):
    agrees(PAPER, "advantages where no episode is truncated", gae(theirs, truncated=False), theirs["gae.advantage"])


def test_their_advantages_leak_over_truncations(theirs, departs):
    what = "advantages: theirs go on over a truncation into the next episode"
    departs(PAPER, what, gae(theirs, truncated=True)[:3], theirs["gae.advantage"][:3], least=0.1)


def test_their_sampling_grid_is_not_their_scoring_grid(theirs, departs, agrees):
    what = "log-probability an entry: theirs while sampling (times 0 ... 1) and when scored (0 ... 1 - 1/K), K = 4"
    departs(PAPER, what, theirs["4.log_prob_sampling"], theirs["4.log_prob"], least=0.01)
    agrees(PAPER, "the same for K = 1", theirs["1.log_prob_sampling"], theirs["1.log_prob"])
