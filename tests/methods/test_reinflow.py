"""ReinFlow's learner: advantages over chunks, what an update may touch, and which way it moves the policy."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from small_vla import make_batch, make_config, make_policy, make_stats
from tiny_vlas import make_processors, make_vla, tiny_pi

from vla_stack.methods.advantages import Experience, advantages, following
from vla_stack.methods.reinflow.loss import Learner, mean_entry, minibatches, observe
from vla_stack.methods.reinflow.recipe import ReinFlow
from vla_stack.policies import flow
from vla_stack.policies.chain import NOISE_LIMIT, chain_log_prob, normal, sample_chain
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import OBS_STATE

GAMMA, DECAY = 0.9, 0.8


def test_advantages_over_chunks_are_those_of_the_aggregated_process() -> None:
    # Two episodes: of chunks of 3, 3 and 2 steps, terminated; of 3 and 1, truncated.
    rewards = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 1.0], [0.2, 0.1, 0.0], [0.5]]
    value, final = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9]), torch.tensor([0.0, 0.0, 9.0, 0.0, 0.4])
    last = torch.tensor([False, False, True, False, True])
    reward = torch.tensor([sum(GAMMA**i * r for i, r in enumerate(chunk)) for chunk in rewards])
    discount = torch.tensor([GAMMA**3, GAMMA**3, 0.0, GAMMA**3, GAMMA])
    advantage = advantages(reward, discount, last, value, following(value, final, last), DECAY)

    def brute(rows: list[int], bootstrap: float) -> list[float]:
        out = []
        for i in range(len(rows)):  # sum over n of lambda^n delta, each discounted by the steps that lie between
            total, weight = 0.0, 1.0
            for j, row in enumerate(rows[i:], i):
                after = float(value[rows[j + 1]]) if j + 1 < len(rows) else bootstrap
                discount = GAMMA ** len(rewards[row])
                total += weight * (float(reward[row]) + discount * after - float(value[row]))
                weight *= DECAY * discount
            out.append(total)
        return out

    # After a terminated episode nothing follows, and the next episode's value never leaks into this one's.
    expected = brute([0, 1, 2], 0.0) + brute([3, 4], 0.4)
    assert advantage.tolist() == pytest.approx(expected, abs=1e-6)


def test_undiscounted_steps_of_one_action_give_the_textbook_estimate() -> None:
    reward, value = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, 0.5, 0.7])
    discount, last = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([False, False, True])
    advantage = advantages(reward, discount, last, value, following(value, torch.zeros(3), last), 1.0)
    assert advantage.tolist() == pytest.approx([0.7, 0.5, 0.3])  # lambda = 1: return minus value


def deployed(learner: Learner, context, noise: torch.Tensor) -> torch.Tensor:
    """The chain without noise: how the policy acts where it is served."""
    std = torch.zeros(1, learner.config.denoising_steps, 1, 1)
    return sample_chain(learner.policy, context, noise, std, torch.Generator())


def make_data(learner: Learner, rows: int = 6, seed: int = 0) -> Experience:
    """Decisions of three episodes of two rows, on the learner's own policy."""
    policy, g = learner.policy, torch.Generator().manual_seed(seed)
    pre, _ = processors_of(policy)
    batch = pre(make_batch(rows))
    context, inputs = observe(policy, batch)
    noise = torch.randn(rows, policy.horizon, policy.noise_dim, generator=g)
    return Experience(
        context=context,
        inputs=inputs,
        state=batch[OBS_STATE],
        chain=learner.act(context, inputs, noise, g),
        executed=torch.tensor([4, 3] * (rows // 2)),
        reward=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
        discount=torch.tensor([0.9, 0.0] * (rows // 2)),
        last=torch.tensor([False, True] * (rows // 2)),
        final_inputs=torch.zeros_like(inputs),
        success=torch.tensor([True, False, True]),
        steps=21,
    )


def test_dimensions_that_a_robot_does_not_have_do_not_count() -> None:
    learner = make_learner(bc=1.0)
    data = make_data(learner)
    has = torch.arange(learner.policy.action_dim).expand(6, -1) < torch.tensor([5, 3] * 3)[:, None]
    data = replace(data, context=replace(data.context, has_dim=has))
    rows = torch.tensor([1, 0])
    counted = learner.counted(data, rows)
    assert counted.sum((1, 2)).tolist() == [3 * 3, 4 * 5] and not counted[0, :, 3:].any()


def processors_of(policy):
    if policy.name == "vla":
        return make_vla_pre_post_processors(policy.config, None)
    base = policy.base if policy.name == "moh" else policy
    if base.name == "vla":
        return make_moh_pre_post_processors(policy.config, make_stats())
    return make_processors(base)


def make_learner(policy=None, **options) -> Learner:
    policy = policy or make_policy()
    pre, _ = processors_of(policy)
    width = observe(policy, pre(make_batch(1)))[1].shape[-1]
    defaults = {"denoising_steps": 2, "epochs": 2, "minibatch": 3, "critic_warmup": 1}
    torch.manual_seed(2)
    return Learner(policy, width, ReinFlow(**{**defaults, **options}))


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in learner.state_dict().items()}


def changed(learner: Learner, before: dict[str, torch.Tensor]) -> set[str]:
    return {k.split(".")[0] for k, v in learner.state_dict().items() if not torch.equal(v, before[k])}


def test_warm_up_leaves_the_actor_bit_identical_and_updates_the_expert_afterwards() -> None:
    learner, g = make_learner(), torch.Generator().manual_seed(0)
    data, before = make_data(learner), snapshot(learner)
    learner.update(data, g, warmup=True)
    assert changed(learner, before) == {"value"}
    before = snapshot(learner)
    metrics = learner.update(data, g, warmup=False)
    assert changed(learner, before) == {"value", "noise", "policy"}
    moved = {k.split(".")[1] for k, v in learner.state_dict().items() if not torch.equal(v, before[k])}
    assert "expert" in moved and "prefix" not in moved, "the prefix is frozen"
    assert metrics["kl"] > 0


def test_the_first_ratio_is_one_and_unexecuted_steps_do_not_count() -> None:
    learner = make_learner()
    data = make_data(learner)
    old, rows = learner.log_probs(data), torch.arange(3)
    _, metrics = learner.actor_loss(data, rows, old[rows], torch.ones(3))
    assert metrics["ratio_off"] == 0.0
    counted = learner.counted(data, rows)
    assert counted.sum((1, 2)).tolist() == [4 * 5, 3 * 5, 4 * 5]
    entries = torch.randn(3, 3, 8, 5)
    spoilt = entries.clone()
    spoilt[:, :, 4:] = 1e6
    assert torch.equal(mean_entry(entries, counted), mean_entry(spoilt, counted))
    assert mean_entry(torch.ones_like(entries), counted).tolist() == [1.0, 1.0, 1.0]


def test_a_step_makes_good_chains_likelier_and_bad_ones_less() -> None:
    learner = make_learner()
    data = make_data(learner)
    old, advantage = learner.log_probs(data), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    for _ in range(3):
        learner.optimizer.zero_grad()
        loss, _ = learner.actor_loss(data, torch.arange(6), old, advantage)
        loss.backward()
        learner.optimizer.step()
    assert ((learner.log_probs(data) - old) * advantage).mean() > 0


def test_without_noise_it_acts_as_it_is_deployed() -> None:
    learner = make_learner()
    data = make_data(learner)
    noise = data.chain[:, 0]
    batch = make_vla_pre_post_processors(learner.policy.config, None)[0](make_batch(6))
    chain = deployed(learner, data.context, noise)
    learner.policy.config.num_inference_steps = 2
    assert torch.equal(chain[:, -1], learner.policy.predict_action_chunk(batch, noise))
    assert not torch.equal(chain[:, -1], data.chain[:, -1])


def test_schedules_and_the_distance_to_the_pretrained_policy() -> None:
    learner = make_learner(sigma_schedule="learn_decay", bc=1.0, sigma_low=0.05, sigma_high=0.15)
    for progress, high in ((0.0, 0.15), (0.35, 0.15), (1.0, 0.12)):  # ends at 0.7 high + 0.3 low
        learner.schedule(progress)
        assert learner.noise.high == pytest.approx(high)
    data, rows = make_data(learner), torch.arange(6)
    assert learner.distance(data, rows) == 0.0
    with torch.no_grad():
        learner.policy.expert.head.bias += 0.5
    moved = learner.distance(data, rows)
    moved.backward()
    assert moved > 0 and learner.policy.expert.head.bias.grad.any()
    fixed = make_learner(sigma_schedule="fixed")
    assert not any(p.requires_grad for p in fixed.noise.parameters())


def test_an_adapter_learns_as_the_native_policy_does(tmp_path) -> None:
    learner = make_learner(make_vla("smolvla", tmp_path))
    data, before = make_data(learner), snapshot(learner)
    rows = torch.arange(3)
    # Five of eight dimensions are the robot's: noise lies in the padding too, and counts nowhere.
    assert learner.counted(data, rows).sum((1, 2)).tolist() == [4 * 5, 3 * 5, 4 * 5]
    learner.update(data, torch.Generator().manual_seed(0), warmup=False)
    moved = {k for k, v in learner.state_dict().items() if not torch.equal(v, before[k])}
    assert any("lm_expert" in k for k in moved) and not any("vlm_with_expert.vlm." in k for k in moved)


@pytest.fixture
def tiny(tmp_path):
    """A folder for policies of LeRobot's kinds."""
    with tiny_pi(tmp_path):
        yield tmp_path


def make_kind(kind: str, folder):
    """A policy of a kind; ``moh-`` puts a mixture of horizons around it."""
    name = kind.removeprefix("moh-")
    base = make_policy() if name == "vla" else make_vla(name, folder)
    if not kind.startswith("moh-"):
        return base
    config = make_config() if base.name == "vla" else base.config
    horizons = (2, base.horizon)
    policy = MohPolicy(MohConfig(base=config, horizons=horizons, bidirectional=True, device="cpu", push_to_hub=False))
    policy.base.load_state_dict(base.state_dict())
    return policy.eval()


@pytest.mark.parametrize("kind", ["vla", "smolvla", "pi0", "pi05", "moh-vla", "moh-pi0"])
def test_after_an_update_stored_likelihoods_are_those_of_the_deployed_policy(kind: str, tiny) -> None:
    learner = make_learner(make_kind(kind, tiny), actor_lr=1e-2, bc=1.0, target_kl=math.inf)
    batch = processors_of(learner.policy)[0](make_batch(6))
    data, rows, before = make_data(learner), torch.arange(6), copy.deepcopy(learner.policy)
    old = learner.log_probs(data)
    learner.update(data, torch.Generator().manual_seed(0), warmup=False)
    new = learner.log_probs(data)
    assert (new - old).abs().max() > 1e-2, "the update has to move what is compared"

    std, counted = learner.std(data.inputs), learner.counted(data, rows)
    with torch.no_grad():
        now, then = (policy.encode(batch) for policy in (learner.policy, before))  # as a server would
        entries = chain_log_prob(learner.policy, now, data.chain, std, learner.config.limit)
        torch.testing.assert_close(mean_entry(entries, counted), new, atol=1e-5, rtol=1e-5)
        # The ratio that is optimised, and the features that noise and value read.
        loss, metrics = learner.actor_loss(data, rows, new, torch.ones(6))
        assert metrics["ratio_off"] < 1e-5
        torch.testing.assert_close(observe(learner.policy, batch)[1], data.inputs)
        chunks = [
            flow.euler(lambda x, t, p=p, c=c: p.velocity(c, x, t), data.chain[:, 0], 2)
            for p, c in ((learner.policy, now), (before, then))
        ]
        anchored = flow.mean_error((chunks[0] - chunks[1]).square(), counted)
    torch.testing.assert_close(learner.distance(data, rows).detach(), anchored, atol=1e-5, rtol=1e-4)


def test_the_state_token_of_pi0_is_made_anew_with_gradients(tiny) -> None:
    learner = make_learner(make_vla("pi0", tiny))
    data = make_data(learner)
    loss, _ = learner.actor_loss(data, torch.arange(6), learner.log_probs(data), torch.arange(6.0))
    loss.backward()
    policy = learner.policy
    assert policy.model.state_proj.weight.grad.any(), "only the state token reads it"
    assert all(p.grad is None for p in policy._vlm.parameters()), "images and text are frozen"
    again = policy.renewed(data.context, data.state)
    for pair, stored in zip(again.keys_values, data.context.keys_values, strict=True):
        assert torch.equal(pair[0], stored[0]) and torch.equal(pair[1], stored[1])


def test_a_bound_that_binds_holds_in_the_chain_and_in_its_likelihood() -> None:
    # Noise is cut at three standard deviations, so no transition is less likely than that: were the mean bounded in
    # one of the two paths alone, points would lie far outside.
    learner = make_learner(limit=0.3, sigma_low=0.01, sigma_high=0.02)
    data = make_data(learner)
    std = learner.std(data.inputs)
    assert (data.chain[:, 1:].abs() <= 0.3 + NOISE_LIMIT * std).all()
    assert (data.chain[:, 1:].abs() > 0.28).float().mean() > 0.2, "the bound has to bind"
    entries = chain_log_prob(learner.policy, data.context, data.chain, std, learner.config.limit)
    assert (entries[:, 1:] >= normal(NOISE_LIMIT * std, 0.0, std) - 1e-3).all()
    # The learner's own likelihood is that one.
    torch.testing.assert_close(
        learner.log_probs(data), mean_entry(entries, learner.counted(data, torch.arange(6))), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("n", "size"), [(1, 128), (2, 2), (3, 2), (5, 2), (7, 3), (129, 128), (300, 128), (6, 4)])
def test_no_minibatch_is_of_one_row_alone(n: int, size: int) -> None:
    batches = list(minibatches(n, size, torch.Generator().manual_seed(0)))
    assert torch.cat(batches).sort().values.tolist() == list(range(n))
    assert min(map(len, batches)) >= min(n, 2) and max(map(len, batches)) <= 1.5 * size


def test_an_iteration_of_one_row_leaves_the_policy_finite() -> None:
    learner = make_learner()
    data, one = make_data(learner), torch.tensor([1])
    fields = ("inputs", "state", "chain", "executed", "reward", "discount", "last", "final_inputs")
    data = replace(
        data, context=data.context.rows(one), success=data.success[:1], **{k: getattr(data, k)[one] for k in fields}
    )
    metrics = learner.update(data, torch.Generator().manual_seed(0), warmup=False)
    assert all(p.isfinite().all() for p in learner.parameters())
    assert all(math.isfinite(v) for v in metrics.values())


def test_rows_of_successful_episodes() -> None:
    assert make_data(make_learner()).succeeded.tolist() == [True, True, False, False, True, True]


def test_the_deployed_chunk_moves_to_where_the_reward_is() -> None:
    """A bandit: episodes of one decision, paid for the nearness of the first action to a point."""
    wanted, rows = 0.5, 48
    size = {"sigma_low": 0.3, "sigma_high": 0.6, "minibatch": 24, "target_kl": 9.0}
    learner = make_learner(denoising_steps=2, actor_lr=3e-3, critic_lr=1e-2, **size)
    pre, _ = processors_of(learner.policy)
    batch = pre(make_batch(rows))
    context, inputs = observe(learner.policy, batch)
    g, ends = torch.Generator().manual_seed(0), torch.ones(rows, dtype=torch.bool)
    noise = 0.1 * torch.randn(rows, learner.policy.horizon, learner.policy.noise_dim, generator=g)

    def distance(chain: torch.Tensor) -> torch.Tensor:
        return (chain[:, -1, 0] - wanted).square().mean(-1)

    before = distance(deployed(learner, context, noise)).mean()
    for k in range(8):
        chain = learner.act(context, inputs, noise, g)
        reward, nothing = -distance(chain), torch.zeros_like(inputs)
        one, state = torch.ones(rows, dtype=torch.long), batch[OBS_STATE]
        data = Experience(context, inputs, state, chain, one, reward, torch.zeros(rows), ends, nothing, ends, rows)
        learner.update(data, g, warmup=k < 1)
    after = distance(deployed(learner, context, noise)).mean()
    assert after < 0.8 * before, (after, before)
