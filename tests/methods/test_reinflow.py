"""ReinFlow's learner: advantages over chunks, what an update may touch, and which way it moves the policy."""

import pytest
import torch
from small_vla import make_batch, make_policy
from tiny_vlas import make_processors, make_vla

from vla_stack.methods.reinflow import Learner, ReinFlowConfig, mean_entry, observe
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.training.experience import Experience, advantages, following

GAMMA, DECAY = 0.9, 0.8


def test_advantages_over_chunks_are_those_of_the_aggregated_process() -> None:
    # Two episodes: of chunks of 3, 3 and 2 steps, terminated; of 3 and 1, truncated.
    rewards = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 1.0], [0.2, 0.1, 0.0], [0.5]]
    value, final = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9]), torch.tensor([0.0, 0.0, 9.0, 0.0, 0.4])
    last = torch.tensor([False, False, True, False, True])
    reward = torch.tensor([sum(GAMMA**i * r for i, r in enumerate(chunk)) for chunk in rewards])
    follow = torch.tensor([GAMMA**3, GAMMA**3, 0.0, GAMMA**3, GAMMA])
    gain = advantages(reward, follow, last, value, following(value, final, last), DECAY)

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
    assert gain.tolist() == pytest.approx(expected, abs=1e-6)


def test_undiscounted_steps_of_one_action_give_the_textbook_estimate() -> None:
    reward, value = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, 0.5, 0.7])
    follow, last = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([False, False, True])
    gain = advantages(reward, follow, last, value, following(value, torch.zeros(3), last), 1.0)
    assert gain.tolist() == pytest.approx([0.7, 0.5, 0.3])  # lambda = 1: return minus value


def make_data(learner: Learner, rows: int = 6, seed: int = 0) -> Experience:
    """Decisions of three episodes of two rows, on the learner's own policy."""
    policy, g = learner.policy, torch.Generator().manual_seed(seed)
    pre, _ = processors_of(policy)
    context, inputs = observe(policy, pre(make_batch(rows)))
    noise = torch.randn(rows, policy.horizon, policy.noise_dim, generator=g)
    return Experience(
        context=context,
        inputs=inputs,
        chain=learner.act(context, inputs, noise, g),
        executed=torch.tensor([4, 3] * (rows // 2)),
        reward=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
        follow=torch.tensor([0.9, 0.0] * (rows // 2)),
        last=torch.tensor([False, True] * (rows // 2)),
        final_inputs=torch.zeros_like(inputs),
        success=torch.tensor([True, False, True]),
        steps=21,
    )


def processors_of(policy):
    return make_vla_pre_post_processors(policy.config, None) if policy.name == "vla" else make_processors(policy)


def make_learner(policy=None, **options) -> Learner:
    policy = policy or make_policy()
    pre, _ = processors_of(policy)
    width = observe(policy, pre(make_batch(1)))[1].shape[-1]
    defaults = {"denoising_steps": 2, "epochs": 2, "minibatch": 3, "critic_warmup": 1}
    torch.manual_seed(2)
    return Learner(policy, width, ReinFlowConfig(**{**defaults, **options}))


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
    old, gain = learner.log_probs(data), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    for _ in range(3):
        learner.optimizer.zero_grad()
        loss, _ = learner.actor_loss(data, torch.arange(6), old, gain)
        loss.backward()
        learner.optimizer.step()
    assert ((learner.log_probs(data) - old) * gain).mean() > 0


def test_without_noise_it_acts_as_it_is_deployed() -> None:
    learner = make_learner()
    data = make_data(learner)
    noise, g = data.chain[:, 0], torch.Generator().manual_seed(0)
    batch = make_vla_pre_post_processors(learner.policy.config, None)[0](make_batch(6))
    chain = learner.act(data.context, data.inputs, noise, g, explore=False)
    learner.policy.config.num_inference_steps = 2
    assert torch.equal(chain[:, -1], learner.policy.predict_action_chunk(batch, noise))
    assert not torch.equal(chain[:, -1], data.chain[:, -1])


def test_schedules_and_the_distance_to_the_pretrained_policy() -> None:
    learner = make_learner(sigma="learn_decay", bc=1.0, sigma_low=0.05, sigma_high=0.15)
    for progress, high in ((0.0, 0.15), (0.35, 0.15), (1.0, 0.12)):  # ends at 0.7 high + 0.3 low
        learner.schedule(progress)
        assert learner.noise.high == pytest.approx(high)
    data = make_data(learner)
    counted = learner.counted(data, torch.arange(6))
    assert learner.distance(data.context, data.chain[:, 0], counted) == 0.0
    with torch.no_grad():
        learner.policy.expert.head.bias += 0.5
    moved = learner.distance(data.context, data.chain[:, 0], counted)
    moved.backward()
    assert moved > 0 and learner.policy.expert.head.bias.grad.any()
    fixed = make_learner(sigma="fixed")
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


def test_rows_of_successful_episodes() -> None:
    assert make_data(make_learner()).succeeded.tolist() == [True, True, False, False, True, True]


def test_the_deployed_chunk_moves_to_where_the_reward_is() -> None:
    """A bandit: episodes of one decision, paid for the nearness of the first action to a point."""
    wanted, rows = 0.5, 48
    size = {"sigma_low": 0.3, "sigma_high": 0.6, "minibatch": 24, "target_kl": 9.0}
    learner = make_learner(denoising_steps=2, actor_lr=3e-3, critic_lr=1e-2, **size)
    pre, _ = processors_of(learner.policy)
    context, inputs = observe(learner.policy, pre(make_batch(rows)))
    g, ends = torch.Generator().manual_seed(0), torch.ones(rows, dtype=torch.bool)
    noise = 0.1 * torch.randn(rows, learner.policy.horizon, learner.policy.noise_dim, generator=g)

    def distance(chain: torch.Tensor) -> torch.Tensor:
        return (chain[:, -1, 0] - wanted).square().mean(-1)

    before = distance(learner.act(context, inputs, noise, g, explore=False)).mean()
    for k in range(8):
        chain = learner.act(context, inputs, noise, g)
        reward, nothing = -distance(chain), torch.zeros_like(inputs)
        one = torch.ones(rows, dtype=torch.long)
        data = Experience(context, inputs, chain, one, reward, torch.zeros(rows), ends, nothing, ends, rows)
        learner.update(data, g, warmup=k < 1)
    after = distance(learner.act(context, inputs, noise, g, explore=False)).mean()
    assert after < 0.8 * before, (after, before)
