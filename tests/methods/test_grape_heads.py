"""The same loss through networks: every head, two passes against one, and LoRA (specification, section 6)."""

import copy
import math

import pytest
import torch
from small_vla import make_batch, make_policy, make_stats
from tiny_vlas import CHUNK, KINDS, make_processors, make_vla, tiny_pi

from vla_stack.methods.grape import loss as grape
from vla_stack.methods.grape.likelihood import score, shared_draws
from vla_stack.policies import flow
from vla_stack.policies.chain import sample_chain
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.training.checkpoint import trainable
from vla_stack.training.lora import add_lora
from vla_stack.training.recipe import LoraRecipe

LOG2 = math.log(2)
NATIVE = ("flow", "gaussian", "bins", "chain")
PAIR, SIDE, DECISION = (torch.tensor(x) for x in ([0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 1]))
N = len(PAIR)


class Case:
    """A policy and decisions of two pairs of unequal lengths, the last actions of each not executed."""

    def __init__(self, kind, folder):
        if kind in KINDS:
            self.policy, horizon = make_vla(kind, folder), CHUNK
            preprocess = make_processors(self.policy)[0]
        else:
            self.policy, horizon = make_policy(head="flow" if kind == "chain" else kind, depth=1), 8
            preprocess = make_vla_pre_post_processors(self.policy.config, make_stats())[0]
        raw = make_batch(N, horizon)
        raw["action_is_pad"][:, 4:] = True
        self.batch = preprocess(raw) | {"action_is_pad": raw["action_is_pad"]}
        self.batch |= {"pair": PAIR, "side": SIDE, "decision": DECISION}
        if kind == "chain":
            noise = torch.randn(N, horizon, 5, generator=torch.Generator().manual_seed(3))
            std, g = torch.full((1, 3, 1, 1), 0.1), torch.Generator().manual_seed(4)
            with torch.no_grad():
                self.batch["chain"] = sample_chain(self.policy, self.policy.encode(self.batch), noise, std, g)
        self.reference = grape.Reference(trainable(self.policy))

    def loss(self, batch=None, **options):
        g = torch.Generator().manual_seed(1)
        return grape.loss(self.policy, batch or self.batch, g, self.reference, **{"beta": 0.3, "draws": 2, **options})

    def gradient(self, batch=None, **options):
        self.policy.zero_grad()
        value, _ = self.loss(batch, **options)
        value.backward()
        return value.detach(), {n: p.grad.clone() for n, p in self.policy.named_parameters() if p.grad is not None}

    def moved(self):
        """Itself with other weights than the reference."""
        g = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in trainable(self.policy).values():
                p += 0.02 * torch.randn(p.shape, generator=g)
        return self


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    with tiny_pi(path):
        yield path


@pytest.fixture(scope="module", params=(*NATIVE, *KINDS))
def case(request, folder):
    return Case(request.param, folder)


@pytest.fixture
def moved(case):
    weights = copy.deepcopy(case.policy.state_dict())
    yield case.moved()
    case.policy.load_state_dict(weights)


def test_log_two_at_the_reference(case):
    for beta in (0.1, 100.0):
        value, logs = case.loss(beta=beta, proximal=1.0)
        assert value.item() == pytest.approx(3 * LOG2, rel=1e-5)
        assert logs["ratio_winner"] == logs["ratio_loser"] == 0.0


def test_winners_are_raised_and_losers_lowered(case):
    """A step along the gradient opens the margin, and the reference stays what it was."""
    before = {n: v.clone() for n, v in case.reference.values.items()}
    _, gradient = case.gradient()
    parameters = trainable(case.policy)
    size = torch.cat([g.flatten() for g in gradient.values()]).norm()
    kept = {n: parameters[n].detach().clone() for n in gradient}
    with torch.no_grad():
        for n, g in gradient.items():
            parameters[n] -= 1e-2 * g / size
    value, logs = case.loss()
    with torch.no_grad():
        for n, v in kept.items():
            parameters[n].copy_(v)
    assert value < LOG2 and logs["gap"] > 0
    assert all(torch.equal(v, before[n]) for n, v in case.reference.values.items())
    assert not any(v.requires_grad for v in case.reference.values.values())


def test_two_passes_are_one(moved):
    options = {"proximal": 0.5, "sft": 0.2}
    value, gradient = moved.gradient(**options)
    split, parts = moved.gradient(micro=4, **options)
    torch.testing.assert_close(split, value)
    assert parts.keys() == gradient.keys()
    largest = max(g.abs().max() for g in gradient.values()).item()
    for n, g in gradient.items():
        torch.testing.assert_close(parts[n], g, rtol=1e-3, atol=1e-5 * largest)


def test_what_was_not_executed_is_not_scored(moved):
    draws = shared_draws(moved.policy, moved.batch["action"], PAIR, DECISION, 2, torch.Generator().manual_seed(0))
    whole = {**moved.batch, "action_is_pad": torch.zeros_like(moved.batch["action_is_pad"])}
    with torch.no_grad():
        scored, all_of_it = (score(moved.policy, batch, draws).log_prob for batch in (moved.batch, whole))
    assert not torch.isclose(scored, all_of_it).any()
    if moved.policy.name == "vla" and moved.policy.head is not None:
        other = {**moved.batch, "action": moved.batch["action"].clone()}
        other["action"][:, 4:] = math.nan
        with torch.no_grad():
            assert torch.equal(score(moved.policy, other, draws).log_prob, scored)


def test_equal_trajectories_have_no_margin(moved):
    rows = torch.tensor([0, 1, 0, 1])
    batch = {k: v[rows] if torch.is_tensor(v) else v for k, v in moved.batch.items()}
    batch = {k: [v[i] for i in rows] if isinstance(v, list) else v for k, v in batch.items()}
    batch |= {"pair": torch.zeros(4, dtype=torch.long), "side": torch.tensor([0, 0, 1, 1])}
    batch["decision"] = torch.tensor([0, 1, 0, 1])
    value, gradient = moved.gradient(batch)
    _, one_sided = moved.gradient()
    assert value.item() == pytest.approx(LOG2, rel=1e-6)
    largest = max(g.abs().max() for g in one_sided.values())
    assert max(g.abs().max() for g in gradient.values()) < 1e-4 * largest


def test_filtered_imitation_is_the_winners_error(moved):
    value, logs = moved.loss(preference=0.0, sft=1.0)
    g = torch.Generator().manual_seed(1)
    draws = shared_draws(moved.policy, moved.batch["action"], PAIR, DECISION, 2, g)
    with torch.no_grad(), moved.reference.active(moved.policy):
        spread = score(moved.policy, moved.batch, draws).spread
    error = score(moved.policy, moved.batch, draws, spread=spread).error
    torch.testing.assert_close(value, error[SIDE == 0].mean())


def test_dropout_is_off(case):
    case.policy.train()
    case.loss()
    assert not case.policy.training


@pytest.mark.parametrize("kind", ["gaussian", "chain"])
def test_log_ratios_are_squared_errors(kind, folder):
    """Of a Gaussian with the reference's width, and of a chain of one sigma: test 9 of the specification."""
    case = Case(kind, folder)
    with torch.no_grad():
        before = score(case.policy, case.batch, None if kind == "gaussian" else _draws(case))
        policy, valid, action = case.moved().policy, flow.valid_entries(case.batch), case.batch["action"]
        after = score(policy, case.batch, None if kind == "gaussian" else _draws(case), spread=before.spread)

        def squares():
            context = policy.encode(case.batch)
            if kind == "gaussian":
                off = (action - policy.head.distribution(policy.query_states(context)).mean) / before.spread
                return torch.where(valid, off.square(), 0.0).sum((1, 2))
            chain, total = case.batch["chain"], 0.0
            for k in range(3):
                v = policy.velocity(context, chain[:, k], torch.full((N,), 1 - k / 3))
                off = (chain[:, k + 1] - chain[:, k] + v / 3) / 0.1
                total = total + torch.where(valid, off.square(), 0.0).sum((1, 2))
            return total

        new = squares()
        with case.reference.active(policy):
            old = squares()
    torch.testing.assert_close(after.log_prob - before.log_prob, 0.5 * (old - new), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gaussian", "bins", "chain", "lora"])
def test_half_precision_scores_the_policy_with_its_own_weights(kind, folder):
    case = Case("smolvla" if kind == "lora" else kind, folder)
    if kind == "lora":
        add_lora(case.policy, LoraRecipe(rank=2, train="(?!)"))
        case.reference = grape.Reference(trainable(case.policy))
    case.moved()
    with torch.no_grad():
        _, exact = case.loss()
        with torch.autocast("cpu", torch.bfloat16):
            _, half = case.loss()
    for name in ("ratio_winner", "ratio_loser"):
        assert half[name].item() == pytest.approx(exact[name].item(), rel=0.2)


def _draws(case):
    return shared_draws(case.policy, case.batch["action"], PAIR, DECISION, 1, torch.Generator().manual_seed(0))


def test_under_lora_the_reference_is_the_adapters_alone(folder):
    case = Case("smolvla", folder)
    frozen = {n: p.detach().clone() for n, p in case.policy.named_parameters()}
    add_lora(case.policy, LoraRecipe(rank=2, train="(?!)"))
    case.reference = grape.Reference(trainable(case.policy))
    kept = sum(v.numel() for v in case.reference.values.values())
    assert all("lora_" in n for n in case.reference.values) and kept < 0.2 * sum(v.numel() for v in frozen.values())
    assert case.loss()[0].item() == pytest.approx(LOG2, rel=1e-5)
    case.moved()
    value, gradient = case.gradient()
    assert value.item() != pytest.approx(LOG2, rel=1e-4) and all("lora_" in n for n in gradient)
    with case.reference.active(case.policy):
        now = dict(case.policy.named_parameters())
        assert all(
            torch.equal(now[n.replace(".weight", ".base_layer.weight") if n not in now else n], v)
            for n, v in frozen.items()
            if "proj" not in n
        )
