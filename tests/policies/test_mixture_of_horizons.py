"""Mixture of horizons: what must hold exactly, on the native VLA in float64 and on tiny SmolVLA, pi0 and pi0.5."""

import math

import pytest
import torch
from small_vla import ACTIONS, make_batch, make_config, make_observations, make_policy, make_stats
from tiny_vlas import make_processors, make_vla, tiny_config, tiny_pi

from vla_stack.errors import UserError
from vla_stack.methods.imitation import loss as imitation
from vla_stack.methods.mixture_of_horizons import loss as method
from vla_stack.policies import flow
from vla_stack.policies import mixture_of_horizons as moh
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.registry import policy_class
from vla_stack.schema import ACTION

B = 4
HORIZONS = {"vla": (2, 5, 8), "smolvla": (2, 4, 6), "pi0": (2, 4, 6), "pi05": (2, 4, 6)}


class Case:
    """A mixture over one base, a batch for it, and the tolerance of its arithmetic."""

    def __init__(self, kind, folder):
        self.kind, self.folder, self.horizons, native = kind, folder, HORIZONS[kind], kind == "vla"
        self.dtype, self.atol = (torch.float64, 1e-12) if native else (torch.float32, 2e-5)
        base = make_policy() if native else make_vla(kind, folder)
        pre, _ = make_moh_pre_post_processors(self.config(), make_stats()) if native else make_processors(base)
        self.weights = base.state_dict()
        raw = make_batch(B, self.horizons[-1])
        batch = {**pre(raw), "action_is_pad": raw["action_is_pad"]}
        self.batch = {k: v.to(self.dtype) if _is_float(v) else v for k, v in batch.items()}
        self.policy = self.make()
        generator = torch.Generator().manual_seed(1)
        shape = (B, self.horizons[-1], self.policy.noise_dim)
        self.x = torch.randn(shape, generator=generator, dtype=self.dtype)
        self.t = torch.rand(B, generator=generator, dtype=self.dtype)
        with torch.no_grad():
            self.context = self.policy.encode(self.batch)

    def config(self, **options):
        base = make_config() if self.kind == "vla" else tiny_config(self.kind, self.folder)
        options = {"horizons": self.horizons, "bidirectional": True, **options}
        return MohConfig(base=base, device="cpu", push_to_hub=False, **options)

    def make(self, **options):
        """A mixture of these weights with another configuration."""
        torch.manual_seed(0)
        policy = MohPolicy(self.config(**options)).eval()
        policy.base.load_state_dict(self.weights)
        with torch.no_grad():
            for parameter in policy.gate.parameters():
                parameter.normal_(std=0.5)
        return policy.to(self.dtype)

    def mix(self, policy=None, **options):
        with torch.no_grad():
            return (policy or self.policy).mix(self.context, self.x, self.t, **options)

    def plain(self, h):
        """The base on the first ``h`` tokens."""
        with torch.no_grad():
            return self.policy.base.velocity(self.context, self.x[:, :h], self.t)

    def close(self, a, b):
        torch.testing.assert_close(a, b, atol=self.atol, rtol=self.atol)


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("tiny"), {}
    with tiny_pi(folder):
        yield lambda kind: made.setdefault(kind, Case(kind, folder))


@pytest.fixture
def case(cases, request):
    return cases(request.param)


@pytest.fixture
def native(cases):
    return cases("vla")


every_base = pytest.mark.parametrize("case", HORIZONS, indirect=True)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# --- Branches ---


@every_base
def test_a_branch_is_the_plain_policy_of_its_length(case):
    branches = case.mix().branches
    for n, h in enumerate(case.horizons):
        case.close(branches[:, n, :h], case.plain(h))
        assert (branches[:, n, h:] == 0).all()


def test_a_branch_is_the_policy_that_was_built_for_its_length(native):
    branches = native.mix().branches
    for n, h in enumerate(native.horizons):
        short = VlaPolicy(make_config(chunk_size=h, n_action_steps=1)).double().eval()
        weights = {k: v[:h] if k == "expert.positions" else v for k, v in native.weights.items()}
        short.load_state_dict(weights)
        with torch.no_grad():
            native.close(branches[:, n, :h], short.velocity(short.encode(native.batch), native.x[:, :h], native.t))


@every_base
@pytest.mark.parametrize("per_token", [False, True])
def test_packed_and_padded_layouts_are_the_same(case, per_token):
    t = case.t if not per_token else torch.rand(case.x.shape[:2], generator=seeded(), dtype=case.dtype)
    base, horizons = case.policy.base, case.policy.horizons
    with torch.no_grad():
        packed = moh.packed_states(base, horizons, case.context, case.x, t)
        case.close(packed, moh.padded_states(base, horizons, case.context.repeat(3), case.x, t))


@every_base
@pytest.mark.parametrize(("states", "copies"), [(moh.packed_states, 1), (moh.padded_states, 3)])
def test_what_lies_beyond_a_horizon_never_matters(case, states, copies):
    horizons, context = case.policy.horizons, case.context.repeat(copies)

    def branches(x):
        with torch.no_grad():
            return horizons.unpack(states(case.policy.base, horizons, context, x, case.t))

    before = branches(case.x)
    for n, h in enumerate(case.horizons[:-1]):
        for beyond in (torch.zeros_like(case.x), torch.full_like(case.x, 1e6)):
            x = torch.cat((case.x[:, :h], beyond[:, h:]), dim=1)
            case.close(branches(x)[:, : n + 1], before[:, : n + 1])


@every_base
def test_one_horizon_is_the_plain_policy(case):
    policy = case.make(horizons=case.horizons[-1:])
    mixture = case.mix(policy)
    assert (mixture.weights == 1).all() and (mixture.disagreement == 0).all()
    case.close(mixture.velocity, case.plain(case.horizons[-1]))
    value, terms = method.loss(policy, case.batch, seeded())
    plain, _ = imitation.loss(policy.base, case.batch, seeded(), draws=1)
    case.close(value, 2 * plain)
    assert terms["loss_balance"] == 0


@every_base
def test_equal_horizons_are_the_plain_policy_several_times(case):
    policy = case.make(horizons=case.horizons[-1:] * 3)
    case.close(case.mix(policy).velocity, case.plain(case.horizons[-1]))
    _, terms = method.loss(policy, case.batch, seeded())
    plain, _ = imitation.loss(policy.base, case.batch, seeded(), draws=1)
    case.close(terms["loss_mixture"] + terms["loss_individual"], 4 * plain.detach())


def test_causal_action_attention_is_refused_because_its_branches_agree(cases):
    case = cases("smolvla")
    with pytest.raises(UserError, match="action attention of policy 'smolvla' is causal.*bidirectional=true"):
        case.make(bidirectional=False)
    assert case.mix().disagreement.max() > 1e-3
    policy = case.make()
    policy.base.causal_actions = True
    assert case.mix(policy).disagreement.max() < case.atol


# --- Gate ---


@every_base
@pytest.mark.parametrize("fusion", ["gate", "mean", "last"])
def test_weights_sum_to_one_over_the_branches_that_have_a_step(case, fusion):
    weights, valid = case.mix(case.make(fusion=fusion)).weights, case.policy.horizons.valid
    case.close(weights.sum(1), torch.ones_like(weights[:, 0]))
    assert (weights[:, ~valid] == 0).all()
    only_last = slice(case.horizons[-2], None)
    assert (weights[:, -1, only_last] == 1).all()
    if fusion == "mean":
        case.close(weights, (valid.to(weights) / valid.sum(0)).expand_as(weights))
    elif fusion == "last":
        assert (weights[:, -1] == 1).all()
    else:
        assert ((weights[:, valid] > 0).all()) and weights[:, 0, 0].std() > 1e-3


def test_a_constant_on_all_scores_changes_nothing_and_has_no_gradient(native):
    shifted = native.make()
    with torch.no_grad():
        shifted.gate.score.bias += 3.0
    native.close(native.mix(shifted).velocity, native.mix().velocity)
    policy = native.make()
    method.loss(policy, native.batch, seeded())[0].backward()
    assert policy.gate.score.bias.grad.abs() < 1e-12
    assert policy.gate.score.weight.grad.abs().max() > 1e-6


def test_noise_of_the_gate_is_for_training_alone(native):
    quiet = native.mix().weights
    assert torch.equal(native.mix().weights, quiet)
    assert (native.mix(generator=seeded()).weights - quiet).abs().max() > 1e-2
    assert torch.equal(native.mix(native.make(gate_noise=False), generator=seeded()).weights, quiet)


def test_the_gate_is_computed_in_float32_under_autocast(native):
    policy, context = native.make().float(), native.policy.float().encode(_float32(native.batch))
    native.policy.double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixture = policy.mix(context, native.x.float(), native.t.float())
    assert mixture.weights.dtype == mixture.velocity.dtype == torch.float32


def test_the_head_is_computed_in_float32_under_autocast(native, monkeypatch):
    policy = native.make().float()
    context = policy.encode(_float32(native.batch))
    states, action_states = [], policy.base.action_states
    monkeypatch.setattr(
        policy.base, "action_states", lambda *a, **k: states.append(action_states(*a, **k)) or states[-1]
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        branches = policy.mix(context, native.x.float(), native.t.float()).branches
    head = policy.base.expert.head
    with torch.no_grad():
        exact = policy.horizons.unpack(torch.nn.functional.linear(states[0].float(), head.weight, head.bias))
    assert branches.dtype == torch.float32
    torch.testing.assert_close(branches, exact, atol=1e-6, rtol=1e-6)


def _float32(batch):
    return {k: v.float() if _is_float(v) else v for k, v in batch.items()}


def test_load_balance_of_equal_and_of_single_use():
    n, lengths, real = 3, (4, 4, 4), torch.ones(2, 4, dtype=torch.bool)
    equal = torch.full((2, n, 4), 1 / n)
    one = torch.zeros(2, n, 4)
    one[:, 1] = 1.0
    assert moh.load_balance(equal, lengths, real) == 0
    torch.testing.assert_close(moh.load_balance(one, lengths, real), torch.tensor(float(n)))


def test_load_balance_counts_intervals_between_horizons_and_real_steps():
    lengths, real = (2, 4, 6), torch.ones(2, 6, dtype=torch.bool)
    weights = torch.zeros(2, 3, 6)
    weights[:, 0, :2], weights[:, 1, 2:4], weights[:, 2, 4:] = 1.0, 1.0, 1.0
    # All on one of three branches, then on one of two; the last interval has a single branch and does not count.
    torch.testing.assert_close(moh.load_balance(weights, lengths, real), torch.tensor((3 + 2) / 2))
    real[1, 2:] = False
    weights[1, 1, 2:4], weights[1, 2, 2:4] = 0.0, 1.0
    torch.testing.assert_close(moh.load_balance(weights, lengths, real), torch.tensor((3 + 2) / 2))
    assert moh.load_balance(weights, lengths, torch.zeros_like(real)) == 0
    assert moh.load_balance(torch.ones(2, 1, 6), (6,), real) == 0


@every_base
def test_the_mixture_is_never_worse_than_its_branches_on_average(case):
    mixture = case.mix()
    u = torch.randn(mixture.velocity.shape, generator=seeded(), dtype=case.dtype)
    of_branches = ((mixture.branches - u[:, None]).square().sum(-1) * mixture.weights).sum(1)
    assert (of_branches >= (mixture.velocity - u).square().sum(-1) - case.atol).all()


# --- Loss ---


@every_base
def test_the_loss_is_that_of_the_paper(case):
    value, terms = method.loss(case.policy, case.batch, seeded(2))
    generator, actions = seeded(2), case.batch[ACTION]
    noise = flow.sample_noise((*actions.shape[:2], case.policy.noise_dim), generator, "cpu")
    t = flow.sample_time(B, generator, "cpu")
    x = flow.interpolate(actions, noise, t)
    branches, weights = case.policy.mix(case.policy.encode(case.batch), x, t, generator)
    branches, u = branches[..., :ACTIONS], noise[..., :ACTIONS] - actions
    fused = sum(weights[:, n, :, None] * branches[:, n] for n in range(3))
    mixture = (fused - u).square().mean()
    individual = sum((branches[:, n, :h] - u[:, :h]).square().mean() for n, h in enumerate(case.horizons))
    a, b, _ = case.horizons
    usage = [weights[:, :, :a].mean((0, 2)), weights[:, 1:, a:b].mean((0, 2))]
    balance = torch.stack([p.var() / p.mean() ** 2 for p in usage]).mean()
    for got, expected in (
        (terms["loss_mixture"], mixture),
        (terms["loss_individual"], individual),
        (terms["loss_balance"], balance),
        (value, mixture + individual + 1e-3 * balance),
    ):
        torch.testing.assert_close(got, expected.detach() if not got.requires_grad else expected, atol=1e-5, rtol=1e-5)
    assert 0 < terms["gate_entropy"] < 1
    assert [k for k in terms if k.startswith("usage")] == [f"usage_{h}" for h in case.horizons]


@every_base
def test_lerobots_training_loop_gets_the_same_loss(case):
    torch.manual_seed(5)
    value, logs = case.policy.forward(case.batch)
    expected, _ = method.loss(case.policy, case.batch, seeded(5))
    case.close(value, expected)
    assert logs["moh_loss"] == pytest.approx(expected.item(), rel=1e-5)


@every_base
def test_steps_past_the_end_of_an_episode_have_no_say(case, monkeypatch):
    policy, is_pad = case.make().train(), torch.zeros(B, case.horizons[-1], dtype=torch.bool)
    is_pad[1, 3:], is_pad[2, 1:], is_pad[3] = True, True, True
    batch, target = {**case.batch, "action_is_pad": is_pad}, flow.target

    def loss_and_gradients():
        policy.zero_grad()
        value, _ = method.loss(policy, batch, seeded())
        value.backward()
        return value.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]

    value, gradients = loss_and_gradients()
    monkeypatch.setattr(flow, "target", lambda a, e: torch.where(is_pad[..., None], 1e3, target(a, e)))
    changed, changed_gradients = loss_and_gradients()
    assert value > 0 and torch.equal(value, changed)
    assert all(torch.equal(a, b) for a, b in zip(gradients, changed_gradients, strict=True))


def test_each_branch_averages_over_its_own_real_steps(native):
    is_pad = torch.zeros(B, 8, dtype=torch.bool)
    is_pad[1:, 1:] = True
    batch = {**native.batch, "action_is_pad": is_pad}
    policy = native.make(horizons=(2, 8), gate_noise=False)
    _, terms = method.loss(policy, batch, seeded())
    generator, actions = seeded(), batch[ACTION]
    noise, t = flow.sample_noise(tuple(actions.shape), generator, "cpu"), flow.sample_time(B, generator, "cpu")
    with torch.no_grad():
        mixture = policy.mix(policy.encode(batch), flow.interpolate(actions, noise, t), t)
    error = (mixture.branches - (noise - actions)[:, None]).square()
    first = (error[0, 0, :2].sum() + error[1:, 0, 0].sum()) / ((2 + 3) * ACTIONS)
    second = (error[0, 1].sum() + error[1:, 1, 0].sum()) / ((8 + 3) * ACTIONS)
    torch.testing.assert_close(terms["loss_individual"], first + second)


def test_reweighting_alone_is_a_control():
    """Stride 3 and H = 30: the first three steps weigh fifteen times what the last three do, eleven in all."""
    c = imitation.step_emphasis(range(3, 31, 3))
    torch.testing.assert_close(c.mean(), torch.tensor(1.0))
    unscaled = c * 11 / 30
    torch.testing.assert_close(
        unscaled[[0, 2, 27, 29]], torch.tensor([1.0096, 1.0096, 0.0667, 0.0667]), atol=1e-4, rtol=0
    )


def test_every_parameter_but_the_gates_bias_is_trained(native):
    policy = native.make().train()
    method.loss(policy, native.batch, seeded())[0].backward()
    idle = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-12]
    assert idle == ["gate.score.bias"]


# --- One-step regression ---


def one_step(horizons, **options):
    config = MohConfig(base=make_config(head="regression"), horizons=horizons, device="cpu", **options)
    torch.manual_seed(0)
    policy = MohPolicy(config)
    weights = {k: v for k, v in make_policy().state_dict().items() if k in policy.base.state_dict()}
    policy.base.load_state_dict({**weights, "expert.head.bias": weights["expert.head.bias"] + 1.0}, strict=False)
    return policy.double().eval()


def test_one_step_branches_predict_actions_by_absolute_error(native):
    policy, actions = one_step((2, 5, 8)), native.batch[ACTION]
    value, terms = method.loss(policy, native.batch, seeded())
    with torch.no_grad():
        branches, weights = policy.mix(native.context, actions, torch.zeros_like(native.t))
        for n, h in enumerate((2, 5, 8)):
            states = policy.base.action_states(native.context, actions[:, :h], torch.zeros_like(native.t))
            native.close(branches[:, n, :h], policy.base.action_head(states))
    fused = (weights[..., None] * branches).sum(1)
    individual = sum((branches[:, n, :h] - actions[:, :h]).abs().mean() for n, h in enumerate((2, 5, 8)))
    native.close(terms["loss_mixture"], (fused - actions).abs().mean())
    native.close(terms["loss_individual"], individual)
    torch.manual_seed(0)
    native.close(policy.forward(native.batch)[0], value)
    single = one_step((8,))
    plain, _ = imitation.loss(single.base, native.batch, seeded())
    native.close(method.loss(single, native.batch, seeded())[0], 2 * plain)


def test_one_step_chunks_need_one_call_and_no_noise(native, monkeypatch):
    policy, calls = one_step((2, 5, 8), consensus_ratio=1.0, consensus_min_steps=2, consensus_min_active=1), []
    states = policy.base.action_states
    monkeypatch.setattr(policy.base, "action_states", lambda *a, **k: calls.append(1) or states(*a, **k))
    chunk, disagreement = policy.sample(native.batch, native.x)
    assert len(calls) == 1 and disagreement[:, :5].min() > 0
    assert torch.equal(policy.sample(native.batch, -native.x).chunk, chunk)
    assert policy.execute_steps(disagreement).shape == (B,)
    with pytest.raises(UserError, match="has no velocity"):
        policy.velocity(native.context, native.x, native.t)


# --- Inference ---


@every_base
def test_it_is_a_flow_policy_itself(case):
    policy = case.policy
    with torch.no_grad():
        states = policy.action_states(case.context, case.x, case.t)
        velocity = policy.velocity(case.context, case.x, case.t)
    assert states.shape == (B, policy.horizon, policy.state_width)
    case.close(policy.action_head(states), velocity)
    case.close(velocity, case.mix().velocity)
    with pytest.raises(ValueError, match="one whole chunk"):
        policy.action_states(case.context, case.x, case.t, blocks=(2, 2))


def test_sampling_starts_from_noise_of_the_bases_scale(native):
    config = native.config()
    config.base.noise_scale = 0.25
    policy = MohPolicy(config).eval().to(native.dtype)
    torch.manual_seed(3)
    chunk = policy.sample(native.batch).chunk
    torch.manual_seed(3)
    noise = 0.25 * torch.randn(native.x.shape, dtype=native.dtype)
    native.close(chunk, policy.sample(native.batch, noise).chunk)


@every_base
def test_a_chunk_takes_one_prefix_and_one_expert_call_a_step(case, monkeypatch):
    base, calls = case.policy.base, {"encode": 0, "action_states": 0}
    for name in calls:
        original = getattr(base, name)

        def counted(*args, name=name, original=original, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(base, name, counted)
    chunk, disagreement = case.policy.sample(case.batch, case.x)
    assert calls == {"encode": 1, "action_states": base.inference_steps}
    assert chunk.shape == (B, case.policy.horizon, ACTIONS) and disagreement.shape == chunk.shape[:2]
    assert disagreement.min() >= 0 and disagreement.max() > 1e-3


@every_base
def test_sampling_a_batch_is_sampling_its_rows(case):
    together = case.policy.sample(case.batch, case.x)
    for i in range(B):
        row = {k: v[i : i + 1] for k, v in case.batch.items() if isinstance(v, torch.Tensor)}
        alone = case.policy.sample(row, case.x[i : i + 1])
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[i], atol=10 * case.atol, rtol=10 * case.atol)


def test_disagreement_is_integrated_over_the_flow(native):
    """d_k is the sum over Euler steps of |dt| times the weighted L1 distance of the branches' velocities."""
    x, expected, steps = native.x, 0.0, native.policy.inference_steps
    for i in range(steps):
        with torch.no_grad():
            branches, weights = native.policy.mix(native.context, x, torch.full((B,), 1 - i / steps, dtype=x.dtype))
        v = (weights[..., None] * branches).sum(1)
        expected = expected + sum(weights[:, n] * (branches[:, n] - v).abs().sum(-1) for n in range(3)) / steps
        x = x - v / steps
    chunk, disagreement = native.policy.sample(native.batch, native.x)
    native.close(disagreement, expected)
    native.close(chunk, x)


def test_disagreement_is_over_the_dimensions_that_a_robot_has(native, monkeypatch):
    lacking = torch.zeros(B, ACTIONS, dtype=torch.bool)
    lacking[1, 2:], lacking[2] = True, True
    plain = native.policy.sample(native.batch, native.x).disagreement
    encode = native.policy.base.encode
    monkeypatch.setattr(native.policy.base, "encode", lambda batch: encode(native.batch))  # the rest stays the same
    masked = native.policy.sample({**native.batch, "action_dim_is_pad": lacking}, native.x).disagreement
    assert torch.equal(masked[0], plain[0]) and (masked[2] == 0).all()
    assert (masked[1, :5] < plain[1, :5]).all() and masked[1, :5].min() > 0


STRIDE_3 = tuple(range(3, 31, 3))


def listing(d, lengths, r, n, m, rule):
    """Dynamic inference of one chunk, step by step."""
    threshold, k = r * d[:n].mean(), n
    for step in range(n, len(d)):
        active = sum(h > step for h in lengths)
        if active < m or (rule == "code" and active == m):
            break
        if d[step] > threshold or (rule == "code" and d[step] == threshold):
            break
        k += 1
    return k


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_consensus_is_the_listing_for_every_sample(rule):
    d = torch.rand(200, 30, generator=seeded()) * torch.linspace(0.5, 1.5, 30)
    for r, n, m in ((1.0, 5, 5), (1.3, 5, 3), (2.0, 1, 2), (1.1, 8, 0)):
        steps = moh.consensus_steps(d, STRIDE_3, r, n, m, rule)
        assert steps.tolist() == [listing(row, STRIDE_3, r, n, m, rule) for row in d]


@pytest.mark.parametrize(("rule", "cap"), [("code", 15), ("paper", 18)])
def test_consensus_lies_between_its_bounds(rule, cap):
    d = torch.rand(50, 30, generator=seeded()) + 0.1
    steps = [moh.consensus_steps(d, STRIDE_3, r, rule=rule) for r in (0.0, 1.0, 1.2, 1.5, math.inf)]
    assert (steps[0] == 5).all() and (steps[-1] == cap).all()
    assert all((a <= b).all() for a, b in zip(steps[:-1], steps[1:], strict=True))
    assert (moh.consensus_steps(d, (30,), math.inf, rule=rule) == 5).all()


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_consensus_begins_after_given_steps(rule):
    """Each row as the listing, of which its given steps are no part; what branches say there has no say."""
    delay = torch.arange(200) % 8
    given = torch.arange(30) < delay[:, None]
    d = torch.rand(200, 30, generator=seeded()) * torch.linspace(0.5, 1.5, 30)
    for loud in (0.0, 1e3):
        noisy = torch.where(given, loud, d)
        steps = moh.consensus_steps(noisy, STRIDE_3, 1.2, 4, 3, rule, given)
        for k, row, length in zip(steps.tolist(), d, delay.tolist(), strict=True):
            assert k == length + listing(row[length:], [h - length for h in STRIDE_3], 1.2, 4, 3, rule)
    nothing = torch.zeros_like(given)
    plain = moh.consensus_steps(d, STRIDE_3, 1.2, 4, 3, rule)
    assert torch.equal(moh.consensus_steps(d, STRIDE_3, 1.2, 4, 3, rule, nothing), plain)
    assert (moh.consensus_steps(d, STRIDE_3, 1.2, 4, 3, rule, ~nothing) == 30).all()


# --- LeRobot ---


@pytest.fixture(scope="module")
def saved(cases, tmp_path_factory):
    path, case = tmp_path_factory.mktemp("moh"), cases("vla")
    policy = case.make(consensus_ratio=0.6, consensus_min_steps=2, consensus_min_active=1).float()
    for part in (policy, *make_moh_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(path)
    return policy, path


def test_a_directory_holds_all_of_it(saved):
    policy, path = saved
    loaded = policy_class("moh").from_pretrained(path)
    assert loaded.config == policy.config and loaded.config.base.type == "vla"
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), policy.parameters(), strict=True))
    served = load_policy(path)
    assert served.spec.robot.name == "test/arm"
    assert (served.spec.horizon, served.spec.extras["n_action_steps"]) == (8, 4)


def test_the_robot_is_told_how_much_to_execute(saved):
    served, observations, seeds = load_policy(saved[1]), make_observations(6), [3, 1, 4, 1, 5, 9]
    chunks = served.infer(observations, seeds)
    assert len(chunks.execute) == len(chunks) == 6 and len(set(chunks.execute)) > 1
    assert all(2 <= k <= 5 for k in chunks.execute)  # beyond step 5 a single branch is left
    alone = served.infer(observations[2:3], seeds[2:3])
    assert alone.execute == chunks.execute[2:3]
    served.policy.config.consensus_ratio = None
    assert served.infer(observations, seeds).execute is None


def test_select_action_follows_the_chunk_as_far_as_its_branches_agree(saved, native):
    policy, _ = saved
    pre, _ = make_moh_pre_post_processors(policy.config, make_stats())
    batch = pre({k: v for k, v in make_batch(1).items() if k != ACTION})
    noise = native.x[:1].float()
    chunk, disagreement = policy.sample(batch, noise)
    steps = int(policy.execute_steps(disagreement))
    policy.reset()
    taken = torch.stack([policy.select_action(batch, noise) for _ in range(steps + 1)], dim=1)
    torch.testing.assert_close(taken, torch.cat((chunk[:, :steps], chunk[:, :1]), dim=1))


def test_a_mixture_starts_from_a_trained_policy(native, tmp_path):
    base = make_policy()
    base.save_pretrained(tmp_path)
    config = native.config()
    config.base.pretrained_path = tmp_path
    policy = MohPolicy(config)
    assert all(torch.equal(a, b) for a, b in zip(policy.base.parameters(), base.parameters(), strict=True))
    assert config.base.pretrained_path is None  # a directory of the mixture needs no other one


def test_loading_a_mixture_reads_no_weights_of_its_base_s_backbone(cases, tmp_path):
    """They are part of its own; the language model's repository here has none."""
    policy = cases("smolvla").make()
    policy.config.base.load_vlm_weights = True
    with pytest.raises(OSError):
        MohPolicy(policy.config)
    policy.save_pretrained(tmp_path)
    loaded = policy_class("moh").from_pretrained(tmp_path)
    assert loaded.config.base.load_vlm_weights and not loaded.base.causal_actions
    weights = policy.state_dict()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, weights[name].to(value.dtype), msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizons": (5, 2, 8)}, r"horizons are \[5, 2, 8\], expected whole numbers in ascending order"),
        ({"horizons": (2, 6)}, "longest horizon is 6, the base 'vla' predicts 8 actions.*chunk_size=6"),
        ({"horizons": ()}, "ascending order"),
        ({"consensus_min_steps": 0}, "consensus_min_steps is 0, expected at least 1"),
        ({"consensus_max_steps": 0}, "consensus_max_steps is 0, expected at least 1"),
    ],
)
def test_horizons_that_do_not_fit_are_named(native, options, message):
    with pytest.raises(UserError, match=message):
        native.config(**options)


def test_a_base_without_a_flow_is_refused(native):
    for kind, chunk in (("act", {"chunk_size": 8, "n_action_steps": 1}), ("vla", {"head": "bins"})):
        base = make_config(**chunk) if kind == "vla" else policy_class(kind).config_class(device="cpu", **chunk)
        base.input_features, base.output_features = make_config().input_features, make_config().output_features
        with pytest.raises(UserError, match="mixture of horizons"):
            MohPolicy(MohConfig(base=base, horizons=(4, 8), device="cpu", push_to_hub=False))
