"""EXPO's on-the-fly policy, target, edit loss and temperature against the authors' learner, read in a public fork."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_stack.methods.expo import Expo, ExpoLearner
from vla_stack.methods.replay_buffer import Batch, ReplayBuffer, Source, Transition
from vla_stack.methods.sac import SacRecipe

PAPER, GAMMA, SAMPLES, EDITS, BETA, ALPHA = "EXPO", 0.99, 4, 3, 0.1, 0.3
SAC = SacRecipe(actor=(6,), critic=(6,), num_critics=3, layer_norm=False, target_entropy=-0.5, temperature=ALPHA,
                entropy_backup=False, actor_q="mean", lr_actor=1.0, lr_temperature=1.0)  # fmt: skip


@pytest.fixture(scope="module")
def theirs(oracle):
    return oracle("expo")


@pytest.fixture
def learner(theirs, monkeypatch):
    """Ours with their weights; base samples, noise and subsets of critics are theirs."""
    store = ReplayBuffer(4, 3, 2, 1, GAMMA)
    zero = np.zeros(1, int)
    step = (np.zeros((1, 3)), np.zeros((1, 2)), np.zeros(1), zero == 1, zero == 0, np.zeros((1, 3)), zero, zero)
    store.add(Transition(*step, np.full(1, Source.OFFLINE)))
    made = ExpoLearner(Expo(sac=SAC, horizon=1, samples=SAMPLES, edits=EDITS, beta=BETA), store, store, 0)
    for net, name in ((made.agent.target, "target"), (made.agent.critic, "critic"), (made.agent.actor.net, "edit")):
        for i in range(2):
            net.weights[i].data[:], net.biases[i].data[:] = theirs[f"{name}.w{i + 1}"], theirs[f"{name}.b{i + 1}"]
    monkeypatch.setattr(made.base, "sample", lambda obs, g: theirs["base"].flatten(0, 1))
    subsets = iter(theirs["subsets"])
    monkeypatch.setattr(made.agent, "draw", lambda g=None: next(subsets).long())
    return made


def batch(theirs):
    obs, actions, reward, after = (theirs[k] for k in ("observations", "actions", "rewards", "next_observations"))
    return Batch(obs, actions, reward, after, GAMMA * theirs["masks"], reward, torch.zeros(len(obs), dtype=torch.long))


def test_on_the_fly_policy_and_target(theirs, learner, agrees, monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: theirs["edit.noise"])
    chosen, choose = [], learner.on_the_fly
    monkeypatch.setattr(learner, "on_the_fly", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    y = learner.target(batch(theirs))
    agrees(PAPER, "chosen actions, three edits of four samples", chosen[0], theirs["chosen"])
    agrees(PAPER, "target of the critics", y, theirs["target"])
    of_base = ((theirs["chosen"][:, None] - theirs["base"]).abs().amax(-1) < 1e-6).any(1)
    assert of_base.any() and not of_base.all()  # both kinds are chosen


def test_edit_loss_and_its_gradient(theirs, learner, agrees, monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: theirs["loss.noise"])
    loss, log_y = learner.edit_loss(batch(theirs))
    agrees(PAPER, "edit policy's loss", loss, theirs["edit_loss"])
    last = learner.agent.actor.net.biases[1]
    agrees(PAPER, "its gradient", torch.autograd.grad(loss, last)[0], theirs["edit_grad.b2"])
    scaled = -(log_y.mean() - 2 * np.log(BETA))
    agrees(PAPER, "entropy of an edit, β counted", scaled, theirs["entropy"])


def test_entropy_target(theirs, learner, agrees, departs, monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: theirs["loss.noise"])
    learner.edit_step(batch(theirs))
    ours = learner.agent.log_temperature.grad  # by log alpha; theirs by alpha
    agrees(PAPER, "temperature's gradient, their target adjusted by β", ours, theirs["temperature.adjusted"])
    what = "temperature's gradient: their default target leaves β out, and no edit reaches it"
    departs(PAPER, what, ours, theirs["temperature.default"], least=1.0)
    most = 2 * np.log(2 * BETA)  # entropy of a uniform edit
    assert theirs["target_entropy.default"].item() > most > theirs["target_entropy.adjusted"].item()


def test_without_edits_it_is_the_best_of_the_samples(theirs, learner, monkeypatch):
    learner.method = replace(learner.method, edits=0)
    monkeypatch.setattr(torch, "randn", None)
    chosen = learner.on_the_fly(theirs["next_observations"], learner.base, learner.agent.generator)
    assert ((chosen[:, None] - theirs["base"]).abs().amax(-1) == 0).any(1).all()
