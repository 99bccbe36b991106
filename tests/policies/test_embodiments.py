"""Several embodiments behind one set of weights: masks, padding, normalisation, and what is served."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from small_vla import SIZE, make_config

from vla_stack.errors import UserError
from vla_stack.policies.backends import load_with
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.continuation import continue_chunk
from vla_stack.policies.directory import choose_robot
from vla_stack.policies.embodiment import OBS_EMBODIMENT, Embodiment, relative_dims
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import (
    ACTION,
    ACTION_DIM_IS_PAD,
    OBS_STATE,
    Camera,
    Continuation,
    Dim,
    Observation,
    RobotSpec,
    image_key,
)

S, A, H = 6, 4, 8
BOTH = ("torch", "compile")


def robot(name: str, states: int, actions: int, cameras: tuple[str, ...], size: int = SIZE, **options) -> RobotSpec:
    dims = [Dim(f"j{i}.pos", "rad") for i in range(states)]
    views = tuple(Camera(c, size, size) for c in cameras)
    return RobotSpec(name, tuple(dims), tuple(dims[: actions - 1]) + (Dim("gripper.pos", "1"),), views, 10.0, **options)


BIG = Embodiment(
    "big", robot("r/big", S, A, ("left", "wrist")), {"front": "left", "wrist": "wrist"}, (True, True, True, False)
)
SMALL = Embodiment("small", robot("r/small", 3, 2, ("top",)), {"front": "top"}, (True, False))
STATS = {
    "big": {OBS_STATE: (2.0, 3.0, S), ACTION: (1.0, 2.0, A)},
    "small": {OBS_STATE: (-1.0, 0.5, 3), ACTION: (0.5, 0.25, 2)},
}


def stats() -> dict:
    return {
        name: {key: {"mean": np.full(n, m), "std": np.full(n, s)} for key, (m, s, n) in of.items()}
        for name, of in STATS.items()
    }


def config(**options):
    features = {image_key(c): PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for c in ("front", "wrist")}
    return make_config(
        input_features=features | {OBS_STATE: PolicyFeature(FeatureType.STATE, (S,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (A,))},
        embodiments=[BIG.to_json(), SMALL.to_json()],
        action_feature_names=None,
        robot=None,
        **options,
    )


@pytest.fixture(scope="module")
def policy() -> VlaPolicy:
    torch.manual_seed(0)
    policy = VlaPolicy(config())
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "modulation" in name or "film" in name:
                parameter.normal_(std=0.3)
    return policy.eval()


def raw(index: list[int], seed: int = 0) -> dict:
    """A training batch in the common layout."""
    g = torch.Generator().manual_seed(seed)
    n = len(index)
    batch = {
        OBS_STATE: torch.randn(n, S, generator=g),
        ACTION: torch.randn(n, H, A, generator=g),
        "action_is_pad": torch.zeros(n, H, dtype=torch.bool),
        OBS_EMBODIMENT: torch.tensor(index),
        "task": ["pick up the red cube"] * n,
    }
    for c in ("front", "wrist"):
        batch[image_key(c)] = torch.rand(n, 3, SIZE, SIZE, generator=g)
    for row, e in enumerate(index):
        if e == 1:
            batch[OBS_STATE][row, 3:] = 0.0
            batch[ACTION][row, :, 2:] = 0.0
            batch[image_key("wrist")][row] = 0.0
    return batch


@pytest.fixture(scope="module")
def processors():
    return make_vla_pre_post_processors(config(), stats())


def test_each_row_is_normalised_by_its_embodiment(processors):
    pre, _ = processors
    batch = raw([0, 1, 0])
    out = pre(batch)
    for row, (e, name) in enumerate(((BIG, "big"), (SMALL, "small"), (BIG, "big"))):
        s, a = len(e.robot.state), len(e.robot.action)
        state, action = batch[OBS_STATE][row, :s], batch[ACTION][row, :, :a]
        mean, std, _ = STATS[name][OBS_STATE]
        torch.testing.assert_close(out[OBS_STATE][row, :s], (state - mean) / std)
        mean, std, _ = STATS[name][ACTION]
        relative = action - state[:a] * torch.tensor(e.relative)
        torch.testing.assert_close(out[ACTION][row, :, :a], (relative - mean) / std)
        assert (out[OBS_STATE][row, s:] == 0).all() and (out[ACTION][row, :, a:] == 0).all()
    assert out[ACTION_DIM_IS_PAD].tolist() == [[False] * 4, [False, False, True, True], [False] * 4]
    assert out["observation.images.wrist_is_pad"].tolist() == [False, True, False]
    assert not out["observation.images.front_is_pad"].any()


def test_commands_come_back(processors):
    pre, post = processors
    batch = raw([1, 0])
    torch.testing.assert_close(post(pre(batch)[ACTION]), batch[ACTION], atol=1e-5, rtol=1e-5)


def test_padding_is_never_read(policy, processors):
    """Pictures of missing cameras and the noise of missing dimensions change nothing."""
    out = processors[0](raw([1, 0]))
    noise = torch.randn(2, H, A, generator=torch.Generator().manual_seed(1))
    chunk = policy.predict_action_chunk(out, noise)
    other = {**out, image_key("wrist"): out[image_key("wrist")].clone()}
    other[image_key("wrist")][0] = 1.0
    louder = noise.clone()
    louder[0, :, 2:] = 100.0
    assert torch.equal(policy.predict_action_chunk(other, louder)[0, :, :2], chunk[0, :, :2])
    other[image_key("wrist")][1] = 1.0
    assert not torch.allclose(policy.predict_action_chunk(other, noise)[1], chunk[1], atol=1e-4)


@pytest.mark.parametrize("mode", ["rtc", "rtc_identity", "bid"])
def test_nothing_has_to_agree_with_a_plan_where_a_robot_has_no_action(policy, processors, mode):
    """What is in the plan for dimensions that an embodiment lacks, and their noise, changes none of its actions."""
    batch = processors[0](raw([1]))
    noise, plan = torch.randn(2, 1, H, A, generator=torch.Generator().manual_seed(2))
    known = [Continuation(mode, np.zeros((6, 2), np.float32), 2, 3)]
    chunks = []
    for scale in (1.0, 5.0):
        loud, other = noise.clone(), plan.clone()
        loud[..., 2:] *= scale
        other[..., 2:] *= -scale
        chunks.append(continue_chunk(policy, batch, loud, other, known, [3], mode).chunk[..., :2])
    torch.testing.assert_close(*chunks)
    plain = policy.predict_action_chunk(batch, noise)[..., :2]
    assert not torch.allclose(chunks[0], plain, atol=1e-3)


def test_the_token_tells_embodiments_apart(policy, processors):
    out = processors[0](raw([0, 0]))
    noise = torch.randn(1, H, A).expand(2, -1, -1)
    same = {k: v[:1].expand(2, *v.shape[1:]) if isinstance(v, torch.Tensor) and v.ndim else v for k, v in out.items()}
    chunk = policy.predict_action_chunk({**same, OBS_EMBODIMENT: torch.tensor([0, 1])}, noise)
    assert not torch.allclose(chunk[0], chunk[1], atol=1e-4)


@pytest.mark.parametrize("task", ["go", "pick up the red cube"])
def test_what_is_observed_of_an_absent_camera_is_nothing(policy, processors, task):
    """Its place is not taken by the tokens behind it, of which there are as many as a sentence has."""
    out = processors[0]({**raw([1, 1]), "task": [task] * 2})
    without = {k: v for k, v in out.items() if k != image_key("wrist")}
    masked, absent = (policy.observed(policy.encode(batch), batch) for batch in (out, without))
    torch.testing.assert_close(absent, masked, atol=2e-3, rtol=2e-3)  # half precision


def test_an_absent_camera_equals_a_masked_one(policy, processors):
    out = processors[0](raw([1, 1]))
    noise = torch.randn(2, H, A)
    without = {k: v for k, v in out.items() if k != image_key("wrist")}
    torch.testing.assert_close(policy.predict_action_chunk(without, noise), policy.predict_action_chunk(out, noise))


def test_served_observations_equal_training_rows(processors, policy, tmp_path):
    for part in (policy, *processors):
        part.save_pretrained(tmp_path)
    overrides = {"embodiment_input_processor": {"serve": 1}}
    pre, post = make_pre_post_processors(policy.config, str(tmp_path), preprocessor_overrides=overrides)
    batch = raw([1, 1])
    live = {
        OBS_STATE: batch[OBS_STATE][:, :3],
        image_key("top"): batch[image_key("front")],
        "task": batch["task"],
    }
    served, trained = pre(live), processors[0]({k: v for k, v in batch.items() if k != ACTION})
    for key in (OBS_STATE, OBS_EMBODIMENT, image_key("front"), ACTION, ACTION_DIM_IS_PAD):
        assert torch.equal(served[key], trained[key]), key
    assert image_key("top") not in served and image_key("wrist") not in served
    assert post(torch.zeros(2, H, A)).shape == (2, H, 2)


def test_a_compiled_policy_does_not_read_padding_either(processors, policy, tmp_path, monkeypatch):
    for part in (policy, *processors):
        part.save_pretrained(tmp_path)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)  # which would take a minute
    picture = np.full((SIZE, SIZE, 3), 90, np.uint8)
    observations = [Observation(np.full(3, 0.3, np.float32), {"top": picture}, "pick up the red cube")] * 2
    plain, compiled = (load_with(b, tmp_path, "cpu", "small").infer(observations, [1, 2]).actions for b in BOTH)
    np.testing.assert_allclose(compiled, plain, atol=1e-5)


def test_a_batch_without_an_embodiment_is_refused(processors):
    batch = raw([0])
    del batch[OBS_EMBODIMENT]
    with pytest.raises(UserError, match="several robots"):
        processors[0](batch)


def test_gradients_leave_out_padding(policy, processors):
    out = processors[0](raw([1, 1]))
    policy.zero_grad()
    policy(out)[0].backward()
    assert (policy.expert.head.weight.grad[2:] == 0).all() and (policy.expert.head.weight.grad[:2] != 0).any()
    assert (policy.expert.embed.weight.grad[:, 2:] == 0).all()
    assert all((p.grad == 0).all() for p in policy.prefix.vision["wrist"].parameters())
    policy.zero_grad()


def test_select_names_what_there_is():
    both = [BIG.name, SMALL.name]
    assert choose_robot(both, "small", "run") == 1 and choose_robot([BIG.name], None, "run") == 0
    with pytest.raises(UserError, match="--embodiment: big, small"):
        choose_robot(both, None, "run")
    with pytest.raises(UserError, match="no embodiment 'tiny' -- it has big, small"):
        choose_robot(both, "tiny", "run")
    assert Embodiment.from_json(BIG.to_json()) == BIG


def test_relative_dimensions_of_a_robot():
    assert relative_dims(BIG.robot, ["gripper"]) == (True, True, True, False)
    assert relative_dims(robot("d", 3, 2, (), action_kind="delta"), []) == (False, False)
    unmeasured = replace(robot("m", 3, 2, ()), state=(Dim("j0.pos", "rad"),))
    assert relative_dims(unmeasured, []) == (False, False)


def test_horizons_disagree_on_real_dimensions_alone(policy, processors):
    """What branches predict for dimensions that a robot lacks is held to nothing, so it must not end a chunk early."""
    mixture = MohPolicy(MohConfig(base=config(), horizons=(2, 4, H), device="cpu")).eval()
    mixture.base.load_state_dict(policy.state_dict())
    out, noise = processors[0](raw([1, 0])), torch.randn(2, H, A, generator=torch.Generator().manual_seed(2))
    before = mixture.sample(out, noise).disagreement
    with torch.no_grad():
        mixture.base.expert.head.weight[2:] *= 50.0
    after = mixture.sample(out, noise).disagreement
    assert torch.equal(after[0], before[0]) and before[0].max() > 0
    assert not torch.allclose(after[1], before[1])
