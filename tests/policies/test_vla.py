"""The native VLA: caching, masks, conditioning, errors, and the LeRobot side of it."""

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from small_vla import ACTIONS, SIZE, make_batch, make_config, make_policy, make_stats

from vla_stack.errors import UserError
from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.policies.transformer import attention
from vla_stack.policies.vision import ImageEncoder
from vla_stack.policies.words import hash_words
from vla_stack.schema import ACTION, OBS_STATE, SchemaError, image_key


@pytest.fixture(scope="module")
def batch(processors):
    return processors[0](make_batch(4))


@pytest.fixture(scope="module")
def noise():
    return torch.randn(4, 8, ACTIONS, generator=torch.Generator().manual_seed(1))


def test_preset_tiny_is_small():
    features = {image_key(c): PolicyFeature(FeatureType.VISUAL, (3, 64, 64)) for c in ("front", "wrist")}
    config = type(make_config())(
        device="cpu",
        input_features=features | {OBS_STATE: PolicyFeature(FeatureType.STATE, (12,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (5,))},
    )
    assert sum(p.numel() for p in VlaPolicy(config).parameters()) < 5_000_000


def test_it_is_a_flow_policy(policy, batch, noise):
    contract: FlowPolicy = policy
    context = contract.encode(batch)
    assert contract.velocity(context, noise, torch.rand(4)).shape == (4, contract.horizon, contract.action_dim)
    assert contract.features(context).shape == (4, policy.config.width)


def test_time_per_token_equals_time_per_sample(policy, batch, noise):
    context, t = policy.encode(batch), torch.tensor([0.1, 0.4, 0.7, 1.0])
    torch.testing.assert_close(
        policy.velocity(context, noise, t), policy.velocity(context, noise, t[:, None].expand(4, 8))
    )


def test_a_token_s_own_time_matters(policy, batch, noise):
    context, t = policy.encode(batch), torch.full((4, 8), 0.5)
    other = t.clone()
    other[:, 3] = 0.0
    assert not torch.allclose(policy.velocity(context, noise, t), policy.velocity(context, noise, other), atol=1e-4)


def test_cached_prefix_equals_joint_attention(policy, batch, noise):
    """One transformer over prefix and actions, prefix rows masked from actions, gives the same velocity."""
    context = policy.encode(batch)
    expert, t = policy.expert, torch.full((4,), 0.6)
    condition = expert.time(t[:, None])
    x = expert.embed(noise) + expert.positions
    for block, (k, v) in zip(expert.blocks, context.keys_values, strict=True):
        y, gate = block.norm1(x, condition)
        q2, k2, v2 = block.attention.project(y)
        n, h = k.shape[2], x.shape[1]
        allowed = torch.zeros(4, 1, n + h, n + h, dtype=torch.bool)
        allowed[..., :n, :n] = allowed[..., n:, :n] = context.mask[:, None, None, :]
        allowed[..., n:, n:] = True
        q = torch.cat((torch.randn_like(k), q2), 2)  # whatever the prefix asks, the actions' rows do not change
        joint = torch.nn.functional.scaled_dot_product_attention(
            q, torch.cat((k, k2), 2), torch.cat((v, v2), 2), attn_mask=allowed
        )
        x = x + gate * block.attention.out(joint[:, :, n:].transpose(1, 2).flatten(2))
        y, gate = block.norm2(x, condition)
        x = x + gate * block.mlp(y)
    torch.testing.assert_close(expert.head(expert.norm(x, condition)[0]), policy.velocity(context, noise, t))


def test_prefix_is_encoded_once_a_chunk(policy, batch, monkeypatch):
    calls = []
    encode = policy.encode
    monkeypatch.setattr(policy, "encode", lambda b: calls.append(1) or encode(b))
    policy.predict_action_chunk(batch)
    assert len(calls) == 1


def test_every_action_reads_every_other(policy, batch, noise):
    """Attention among actions is bidirectional: the last token moves the first one's velocity."""
    context, t = policy.encode(batch), torch.full((4,), 0.5)
    other = noise.clone()
    other[:, -1] += 3.0
    moved = policy.velocity(context, other, t) - policy.velocity(context, noise, t)
    assert moved[:, 0].abs().max() > 1e-5


def test_repeated_context_shares_gradients(policy, batch, noise):
    context = policy.encode(batch)
    twice = policy.velocity(context.repeat(2), noise.repeat_interleave(2, 0), torch.full((8,), 0.5))
    once = policy.velocity(context, noise, torch.full((4,), 0.5))
    torch.testing.assert_close(twice[::2], once)
    torch.testing.assert_close(twice[1::2], once)
    state = policy.prefix.state.weight
    torch.testing.assert_close(
        torch.autograd.grad(twice.sum(), state, retain_graph=True)[0], 2 * torch.autograd.grad(once.sum(), state)[0]
    )


def test_padding_words_are_not_read(policy, processors):
    config = make_config(max_tokens=48)
    pre, _ = make_vla_pre_post_processors(config, make_stats())
    longer = make_policy(max_tokens=48)
    longer.load_state_dict({**policy.state_dict(), "prefix.text.positions": longer.prefix.text.positions.clone()})
    with torch.no_grad():
        longer.prefix.text.positions[:32] = policy.prefix.text.positions
    raw = {k: v for k, v in make_batch(2).items() if k != ACTION}
    noise = torch.randn(2, 8, ACTIONS)
    a, b = (p.predict_action_chunk(f(dict(raw)), noise) for p, f in ((policy, processors[0]), (longer, pre)))
    torch.testing.assert_close(a, b)


def test_instruction_changes_the_chunk(policy, processors, noise):
    raw = {**make_batch(4), "task": ["pick up the red cube"] * 4}
    red = policy.predict_action_chunk(processors[0](raw), noise)
    blue = policy.predict_action_chunk(processors[0]({**raw, "task": ["pick up the blue cube"] * 4}), noise)
    assert (red - blue).abs().max() > 1e-3


def test_word_order_reaches_the_network(policy, processors, noise):
    raw = make_batch(4)
    chunks = [
        policy.predict_action_chunk(processors[0]({**raw, "task": [task] * 4}), noise)
        for task in ("stack red on blue", "stack blue on red")
    ]
    assert (chunks[0] - chunks[1]).abs().max() > 1e-4


def test_words_hash_alike_everywhere():
    assert hash_words("Pick up, the RED cube!", 2048, 6) == (933, 541, 1925, 1957, 595, 0)
    with pytest.raises(UserError, match="7 words.*reads 6"):
        hash_words("one two three four five six seven", 2048, 6)


def test_bfloat16_attention_equals_the_fused_kernel():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator) for n in (3, 5, 5))
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])[:, None, None]
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask).float()
    torch.testing.assert_close(low, attention(q, k, v, mask), atol=0.03, rtol=0.03)


def test_missing_camera_is_named(policy, processors):
    raw = make_batch(2)
    del raw[image_key("wrist")]
    with pytest.raises(SchemaError, match=r"camera 'wrist' is missing; the batch has \['front'\]"):
        policy.encode(processors[0](raw))


def test_wrong_image_size_is_named(policy, processors):
    raw = {**make_batch(2), image_key("front"): torch.rand(2, 3, 48, 64)}
    with pytest.raises(SchemaError, match=f"camera 'front' is 48x64, the policy was trained with {SIZE}x{SIZE}"):
        policy.encode(processors[0](raw))


def test_a_stem_of_patches_reads_every_pixel_of_whole_patches():
    torch.manual_seed(0)
    encoder = ImageEncoder((12, 18), (8, 8), 2, 1, 16, stem="patches")  # 18 pixels are four patches and two more
    images = torch.rand(1, 3, 12, 18, requires_grad=True)
    encoder(images, torch.randn(1, 16)).square().sum().backward()
    read = images.grad[0].abs().sum(0) > 0
    assert read[:, :16].all() and not read[:, 16:].any()


def test_uint8_and_float_images_are_the_same(policy, processors):
    pixels = torch.randint(0, 256, (2, SIZE, SIZE, 3), dtype=torch.uint8)
    raw = {**make_batch(2), image_key("front"): pixels}
    as_float = {**raw, image_key("front"): pixels.permute(0, 3, 1, 2).float() / 255}
    a, b = (policy.encode(processors[0](x)).summary for x in (raw, as_float))
    torch.testing.assert_close(a, b)


def test_state_too_short_for_relative_actions():
    config = make_config()
    config.input_features[OBS_STATE] = PolicyFeature(FeatureType.STATE, (3,))
    with pytest.raises(UserError, match="relative actions need each one measured"):
        VlaPolicy(config)


def test_forward_is_the_masked_flow_matching_loss(policy, processors):
    raw = make_batch(4)
    raw["action_is_pad"][1:, 5:] = True
    raw["action_is_pad"][3] = True
    batch = processors[0](raw)
    torch.manual_seed(0)
    losses, _ = policy.forward(batch, reduction="none")
    torch.manual_seed(0)
    mean, logs = policy.forward(batch)
    torch.manual_seed(0)
    noise = torch.randn(4, 8, ACTIONS)
    t = (torch.rand(4) ** (2 / 3)) * 0.999 + 0.001
    x = t[:, None, None] * noise + (1 - t[:, None, None]) * batch[ACTION]
    error = (policy.velocity(policy.encode(batch), x, t) - (noise - batch[ACTION])) ** 2
    expected = torch.stack([error[0].mean(), error[1, :5].mean(), error[2, :5].mean(), torch.tensor(0.0)])
    torch.testing.assert_close(losses, expected)
    assert mean.item() == pytest.approx(expected.mean().item(), rel=1e-5) == logs["flow_loss"]


def test_directory_round_trip_is_bit_equal(policy, processors, saved, batch, noise):
    loaded = get_policy_class("vla").from_pretrained(saved)
    pre, post = make_pre_post_processors(loaded.config, str(saved))
    assert loaded.config == policy.config
    raw = {k: v for k, v in make_batch(4).items() if k != ACTION}
    chunks = [
        p[1](q.predict_action_chunk(p[0](dict(raw)), noise)) for q, p in ((policy, processors), (loaded, (pre, post)))
    ]
    assert torch.equal(*chunks)


def test_missing_weights_raise(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    with pytest.raises(UserError, match="has no model.safetensors"):
        VlaPolicy.from_pretrained(tmp_path)


def test_select_action_keeps_commands_of_a_moving_robot(policy, processors):
    """Commands of one chunk stay those of predict_action_chunk although the post-processor adds a newer state."""
    pre, post = processors
    raw = {k: v for k, v in make_batch(3).items() if k != ACTION}
    noise = torch.randn(3, 8, ACTIONS)
    chunk = post(policy.predict_action_chunk(pre(dict(raw)), noise))
    policy.reset()
    for i in range(policy.config.n_action_steps):
        moved = {**raw, OBS_STATE: raw[OBS_STATE] + 0.37 * i}
        torch.testing.assert_close(post(policy.select_action(pre(moved), noise=noise)), chunk[:, i])
    policy.reset()


def test_prefix_is_kept_through_the_policy(policy, processors, noise):
    batch = processors[0](make_batch(4))
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, :3] = True
    chunk = policy.predict_action_chunk(batch, noise, prefix=flow.ActionPrefix(batch[ACTION], mask))
    assert torch.equal(chunk[:, :3], batch[ACTION][:, :3])


def test_every_parameter_is_trained(processors):
    policy = make_policy()
    policy.forward(processors[0](make_batch(4)))[0].backward()
    idle = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # The gate of the final norm has nothing to gate.
    assert idle == []
    grouped = sum(len(g["params"]) for g in policy.get_optim_params())
    assert grouped == len(list(policy.parameters()))
