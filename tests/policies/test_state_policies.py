"""Small policies on states: saved and loaded, their processors exact, their choice by hand."""

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies import make_pre_post_processors
from small_vla import ACTIONS, STATES, make_batch, make_observations, make_policy, make_stats

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PolicyProcessorPipeline
from vla_stack.policies import flow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_expo import ExpoConfig
from vla_stack.policies.configuration_state import StateFlowConfig, StateGaussianConfig
from vla_stack.policies.embodiment import Embodiment
from vla_stack.policies.modeling_expo import ExpoPolicy
from vla_stack.policies.modeling_state import StateFlowPolicy, StateGaussianPolicy
from vla_stack.policies.processor_embodiment import EmbodimentInputStep
from vla_stack.policies.processor_state import ActionRangeStep, observation_steps, state_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION, OBS_STATE, Dim, Observation, RobotSpec

HORIZON, LOW, HIGH = 3, np.array([-1.0, 0.0]), np.array([1.0, 4.0])
ROBOT = RobotSpec(
    "test/point",
    state=tuple(Dim(f"s_{i}", "m") for i in range(4)),
    action=tuple(Dim(f"a_{i}", "m", low, high) for i, (low, high) in enumerate(zip(LOW, HIGH, strict=True))),
    cameras=(),
    rate_hz=10.0,
)
FEATURES = {
    "input_features": {OBS_STATE: PolicyFeature(FeatureType.STATE, (4,))},
    "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (2,))},
}
COMMON = FEATURES | {"robot": ROBOT.to_json(), "device": "cpu", "push_to_hub": False}
SHAPE = {"chunk_size": HORIZON, "n_action_steps": 2, "hidden": (8,)}
MEAN, STD = np.arange(4.0), np.array([1.0, 2.0, 3.0, 0.01])


def gaussian(**options):
    return StateGaussianPolicy(StateGaussianConfig(**COMMON, **SHAPE, **options))


def state_flow():
    return StateFlowPolicy(StateFlowConfig(**COMMON, **SHAPE, num_inference_steps=2))


def expo(**options):
    options = {"samples": 3, "edits": 2, "num_critics": 4, "edit_hidden": (8,), "critic_hidden": (8,)} | options
    base = StateFlowConfig(**COMMON, **SHAPE, num_inference_steps=2)
    common = {"robot": ROBOT.to_json(), "device": "cpu", "push_to_hub": False, "n_action_steps": 2}
    return ExpoPolicy(ExpoConfig(base=base, feature_dim=4, **common, **options))


def save(policy, directory):
    base = policy.config.base if isinstance(policy, ExpoPolicy) else policy.config
    for part in (policy, *state_processors(base, MEAN, STD, LOW, HIGH)):
        part.save_pretrained(directory)
    return load_policy(directory)


def observations(n=4):
    rows = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
    return [Observation(row, {}, "") for row in rows]


@pytest.mark.parametrize("make", [gaussian, state_flow, expo])
def test_a_saved_policy_is_the_same_and_each_chunk_is_its_own_seeds(tmp_path, make):
    torch.manual_seed(0)
    made = make()
    policy = save(made, tmp_path)
    for name, tensor in policy.policy.state_dict().items():
        torch.testing.assert_close(tensor, made.state_dict()[name], rtol=0, atol=0)
    assert policy.spec.robot == ROBOT and policy.spec.horizon == HORIZON and policy.spec.extras["n_action_steps"] == 2
    seen = observations()
    chunks = policy.infer(seen, [1, 2, 3, 1]).actions
    assert chunks.shape == (4, HORIZON, 2) and (chunks >= LOW).all() and (chunks <= HIGH).all()
    alone = np.stack([policy.infer([o], [s]).actions[0] for o, s in zip(seen, [1, 2, 3, 1], strict=True)])
    np.testing.assert_allclose(chunks, alone, atol=1e-5)
    drawn = np.abs(policy.infer(seen, [9, 9, 9, 9]).actions - chunks).max() > 1e-3
    assert drawn != isinstance(made, StateGaussianPolicy)  # whose mode is given


def test_observations_are_clipped_deviations_and_actions_the_robots_range():
    pre, post = state_processors(gaussian().config, MEAN, STD, LOW, HIGH)
    state = torch.tensor([[0.0, 3.0, -1.0, 9.0]])
    assert pre({OBS_STATE: state})[OBS_STATE].tolist() == [[0.0, 1.0, -1.0, 5.0]]
    assert post(torch.tensor([[[-1.0, 0.0], [2.0, -2.0]]])).tolist() == [[[-1.0, 2.0], [1.0, 0.0]]]
    back = pre({OBS_STATE: state, ACTION: torch.tensor([[[0.5, 3.0]]])})[ACTION]
    assert back.tolist() == [[[0.5, 0.5]]]
    assert ActionRangeStep(**ActionRangeStep([0.0], [1.0], False).get_config()).to_command is False


def test_a_dimension_with_one_command_alone_is_no_action():
    """A gripper, say, that stays closed through all demonstrations."""
    bounds = [0.5, 0.0], [0.5, 1.0]
    to_action, to_command = (ActionRangeStep(*bounds, to_command=made) for made in (False, True))
    action = to_action({ACTION: torch.tensor([[[0.5, 0.75], [0.6, 0.25]]])})[ACTION]
    assert action.tolist() == [[[0.0, 0.5], [0.0, -0.5]]]
    assert to_command({ACTION: action})[ACTION].tolist() == [[[0.5, 0.75], [0.5, 0.25]]]


def test_noise_of_scale_one_explores_by_the_density_of_the_actor():
    torch.manual_seed(0)
    policy = gaussian(noise_scale=1.0)
    batch = {OBS_STATE: torch.randn(1, 4).expand(4000, 4)}
    mean, log_std = policy.actor(batch[OBS_STATE][:1])
    before = torch.atanh(policy.predict_action_chunk(batch).flatten(1).clamp(-1 + 1e-6, 1 - 1e-6))
    torch.testing.assert_close(before.mean(0), mean[0].detach(), atol=0.1, rtol=0)
    torch.testing.assert_close(before.std(0), log_std[0].exp().detach(), atol=0.1, rtol=0.05)


def test_the_candidate_of_the_largest_value_is_given():
    torch.manual_seed(0)
    policy = expo(subset=4)
    batch, noise = {OBS_STATE: torch.randn(5, 4)}, torch.randn(5, HORIZON, policy.noise_dim)
    of_base, of_edits, _ = noise.split(policy._widths, -1)
    context = policy.base.encode(batch)
    offered = policy.candidates(context, batch[OBS_STATE], of_base, of_edits)
    assert offered.shape == (5, 5, HORIZON * 2)
    for b in range(5):
        starts = of_base[b].unflatten(-1, (3, 2)).transpose(0, 1)
        for n in range(3):
            state = {OBS_STATE: batch[OBS_STATE][b : b + 1]}
            alone = policy.base.predict_action_chunk(state, starts[n][None]).flatten()
            torch.testing.assert_close(offered[b, n], alone, atol=1e-6, rtol=0)
        assert ((offered[b, 3:] - offered[b, :2]).abs() <= policy.config.beta + 1e-6).all()
        values = [policy.critics(torch.cat([batch[OBS_STATE][b], c])[None])[:, 0].min() for c in offered[b]]
        wanted = offered[b, int(torch.stack(values).argmax())].view(HORIZON, 2)
        torch.testing.assert_close(policy.predict_action_chunk(batch, noise)[b], wanted, atol=1e-6, rtol=0)


def test_each_observation_is_judged_by_a_subset_of_its_own():
    torch.manual_seed(0)
    policy = expo(num_critics=4, subset=2)
    offered, features = torch.randn(200, 2, HORIZON * 2), torch.randn(200, 4)
    values = policy.values(features, offered, torch.randn(200, HORIZON, policy._draws))
    seen = torch.cat([features[:, None].expand(-1, 2, -1), offered], -1)
    q = policy.critics(seen.flatten(0, 1)).unflatten(1, (200, 2))
    pairs = torch.stack([q[[i, j]].amin(0) for i in range(4) for j in range(i)])
    hit = torch.isclose(pairs, values, atol=1e-6).all(2)  # [pairs, observations]
    assert hit.any(0).all() and hit.any(1).all()  # every value is a pair's, and every pair is drawn


def test_a_base_may_be_any_flow_policy(tmp_path):
    base = make_policy()
    batch = make_vla_pre_post_processors(base.config, make_stats())[0](
        {OBS_STATE: torch.zeros(1, STATES), "task": ["go"]}
        | {f"observation.images.{c}": torch.rand(1, 3, 32, 32) for c in ("front", "wrist")}
    )
    width = base.observed(base.encode(batch), batch).shape[-1]
    config = ExpoConfig(
        base=base.config, feature_dim=width, samples=2, edits=1, num_critics=2, n_action_steps=4, device="cpu",
        robot=base.config.robot, edit_hidden=(8,), critic_hidden=(8,), push_to_hub=False,
    )  # fmt: skip
    policy = ExpoPolicy(config, base)
    for part in (policy, *make_pre_post_processors(config, dataset_stats=make_stats())):
        part.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert config.action_limit == 4.0 and loaded.spec.robot.cameras
    chunks = loaded.infer(make_observations(2), [1, 2]).actions
    assert chunks.shape == (2, 8, ACTIONS) and np.isfinite(chunks).all()
    policy = ExpoPolicy(ExpoConfig(**{**vars(config), "samples": 1, "edits": 0, "subset": 2}), base)
    noise = torch.randn(1, 8, policy.noise_dim)
    alone = flow.euler(lambda x, t: base.velocity(base.encode(batch), x, t), noise, base.inference_steps)
    torch.testing.assert_close(policy.predict_action_chunk(batch, noise), alone.clamp(-4.0, 4.0))


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="nothing to choose from"):
        expo(samples=1, edits=2)
    with pytest.raises(UserError, match="subset is 5"):
        expo(subset=5)
    with pytest.raises(UserError, match="n_action_steps is 9"):
        StateFlowConfig(**COMMON, **SHAPE | {"n_action_steps": 9})
    with pytest.raises(UserError, match="feature_dim is 3, without an encoder"):
        StateGaussianConfig(**COMMON, **SHAPE, feature_dim=3)


def test_of_an_encoder_s_steps_none_touches_actions():
    """Its own gripper, for one, has two commands; here actions are in [-1, 1] already when it would set them."""
    encoder, stats = make_policy(gripper="binary").config, make_stats()
    low, high = np.zeros(ACTIONS, np.float32), np.array([1.0, 1.0, 1.0, 1.0, 0.04], np.float32)
    stats[ACTION] |= {"min": low, "max": high}
    before, _ = make_vla_pre_post_processors(encoder, stats)
    features = {"input_features": FEATURES["input_features"], "output_features": encoder.output_features}
    config = StateGaussianConfig(encoder=encoder, feature_dim=32, device="cpu", **features)
    pre, post = state_processors(config, np.zeros(STATES), np.ones(STATES), low, high, before)
    batch = make_batch(1)
    batch[ACTION] = torch.tensor(high) * torch.linspace(0.0, 1.0, 8)[:, None]
    torch.testing.assert_close(post(pre(dict(batch))[ACTION]), batch[ACTION])


def test_an_encoder_of_several_robots_is_refused():
    one = Embodiment("one", ROBOT, {}, (False, False)).to_json()
    encoder = PolicyProcessorPipeline(steps=[EmbodimentInputStep(embodiments=[one], state_dim=4, action_dim=2)])
    with pytest.raises(UserError, match="several robots cannot be the encoder"):
        observation_steps(encoder)
