"""SmolVLA, pi0 and pi0.5 as flow policies: equal to LeRobot's own computation, and what that computation cannot do."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.common.vla_utils import pad_vector
from lerobot.policies.factory import get_policy_class, make_policy_config
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors.torch import load_file, save_file
from small_vla import ACTIONS, ROBOT, SIZE, make_batch, make_observations
from tiny_vlas import CHUNK, KINDS, MAX_DIM, make_processors, make_vla, save_vla, tiny_pi

from vla_stack.errors import UserError
from vla_stack.images import as_read
from vla_stack.methods.imitation import loss as imitation
from vla_stack.policies import flow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.registry import policy_class
from vla_stack.schema import ACTION, OBS_STATE, Continuation, image_key

B = 3
STATE_IN_WORDS = ("pi05", "observation.state")
each_kind = pytest.mark.parametrize("kind", KINDS)


class Case:
    """Our policy and LeRobot's of the same weights, and a preprocessed batch."""

    def __init__(self, kind, folder):
        self.ours, self.stock = make_vla(kind, folder), make_vla(kind, folder, stock=True)
        preprocess, _ = make_processors(self.ours)
        raw = make_batch(B, CHUNK)
        raw["action_is_pad"][1, 4:] = True
        self.batch = preprocess(raw) | {"action_is_pad": raw["action_is_pad"]}
        generator = torch.Generator().manual_seed(1)
        self.noise = torch.randn(B, CHUNK, MAX_DIM, generator=generator)
        self.t = torch.rand(B, generator=generator)
        with torch.no_grad():
            self.context = self.ours.encode(self.batch)

    def stock_inputs(self):
        """Arguments of LeRobot's inner model: images, words and, where it takes one, the state."""
        stock, batch = self.stock, self.batch
        prepare = getattr(stock, "prepare_images", None) or stock._preprocess_images
        inputs = (*prepare(batch), batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK])
        return inputs if stock.name == "pi05" else (*inputs, stock.prepare_state(batch))

    def velocity(self, x, t, **options):
        with torch.no_grad():
            return self.ours.velocity(self.context, x, t, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    with tiny_pi(path):
        yield path


@pytest.fixture(scope="module")
def cases(folder):
    made = {}
    return lambda kind: made.setdefault(kind, Case(kind, folder))


@pytest.fixture
def case(cases, request):
    return cases(request.param)


each_case = pytest.mark.parametrize("case", KINDS, indirect=True)


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# --- The same numbers as LeRobot's ---


@each_case
def test_sampling_equals_lerobots(case):
    theirs = case.stock.predict_action_chunk(dict(case.batch), noise=case.noise)
    assert theirs.std() > 0.1
    close(case.ours.predict_action_chunk(case.batch, noise=case.noise), theirs)
    sampled = flow.euler(lambda x, t: case.velocity(x, t), case.noise, case.ours.inference_steps)
    close(sampled[..., :ACTIONS], theirs)


@each_case
def test_velocity_equals_lerobots_denoising_step(case, monkeypatch):
    seen = []
    denoise = case.stock.model.denoise_step

    def record(*args, **kwargs):
        velocity = denoise(*args, **kwargs)
        seen.append((kwargs["x_t"], kwargs["timestep"], velocity))
        return velocity

    monkeypatch.setattr(case.stock.model, "denoise_step", record)
    case.stock.predict_action_chunk(dict(case.batch), noise=case.noise)
    assert len(seen) == case.ours.inference_steps
    for x, t, velocity in seen:
        close(case.velocity(x, t), velocity)


@each_case
def test_imitation_loss_and_gradients_equal_lerobots(case, monkeypatch):
    """At the same noise and times; steps past an episode's end count in neither."""
    monkeypatch.setattr(flow, "sample_noise", lambda shape, *_: case.noise.view(shape))
    monkeypatch.setattr(flow, "sample_time", lambda *_: case.t)
    case.ours.zero_grad()
    case.stock.zero_grad()
    ours, _ = imitation.loss(case.ours, case.batch, torch.Generator(), draws=1)
    ours.backward()

    actions = pad_vector(case.batch[ACTION], MAX_DIM)
    error = case.stock.model.forward(*case.stock_inputs(), actions, case.noise, case.t)[..., :ACTIONS]
    theirs = error[~case.batch["action_is_pad"]].mean()
    theirs.backward()

    close(ours, theirs)
    gradients = dict(case.stock.named_parameters())
    compared = 0
    for name, parameter in case.ours.named_parameters():
        if parameter.grad is not None:
            scale = gradients[name].grad.abs().max().clamp(min=1e-3)
            close(parameter.grad / scale, gradients[name].grad / scale, atol=1e-3)
            compared += 1
        elif gradients[name].grad is not None:  # what no action depends on has a gradient of zero, or is frozen
            assert gradients[name].grad.abs().max() == 0, name
    assert compared > 40


@each_case
def test_padded_steps_count_in_no_loss(case):
    def value():
        return imitation.loss(case.ours, batch, torch.Generator().manual_seed(2))[0]

    batch = dict(case.batch)
    with torch.no_grad():
        before = value()
        # The network reads padded actions, as neighbours on the path; the loss reads them nowhere.
        batch["action_is_pad"] = torch.ones_like(batch["action_is_pad"])
        assert value() == 0
    assert before > 0


# --- What LeRobot's computation cannot do ---


@each_case
def test_one_time_a_token(case):
    x = case.noise[..., :ACTIONS]
    same = case.velocity(x, case.t)
    close(case.velocity(x, case.t[:, None].expand(B, CHUNK)), same, atol=2e-5)
    clean = case.t[:, None].repeat(1, CHUNK)
    clean[:, :2] = 0.0
    assert (case.velocity(x, clean) - same).abs().max() > 1e-3


@each_case
def test_a_prefix_of_actions_is_kept(case):
    mask = torch.zeros(B, CHUNK, dtype=torch.bool)
    mask[:, :2] = True
    actions = torch.randn(B, CHUNK, ACTIONS, generator=torch.Generator().manual_seed(3))
    chunk = case.ours.predict_action_chunk(case.batch, noise=case.noise, prefix=flow.ActionPrefix(actions, mask))
    assert torch.equal(chunk[:, :2], actions[:, :2])
    assert (chunk[:, 2:] - case.ours.predict_action_chunk(case.batch, noise=case.noise)[:, 2:]).abs().max() > 1e-3


@each_case
@pytest.mark.parametrize("horizon", [1, 4, 9])
def test_any_horizon_equals_a_policy_of_that_horizon(case, horizon):
    """LeRobot's model takes other lengths when its chunk_size says so."""
    noise = torch.randn(B, horizon, MAX_DIM, generator=torch.Generator().manual_seed(4))
    config = case.stock.model.config
    config.chunk_size, before = horizon, config.chunk_size
    try:
        theirs = case.stock.predict_action_chunk(dict(case.batch), noise=noise)
    finally:
        config.chunk_size = before
    close(case.ours.predict_action_chunk(case.batch, noise=noise), theirs)


@each_case
def test_chunks_end_to_end_do_not_see_each_other(case):
    blocks = (2, 6, 3)
    x = torch.randn(B, sum(blocks), ACTIONS, generator=torch.Generator().manual_seed(6))
    valid = torch.ones(B, sum(blocks), dtype=torch.bool)
    valid[:, 6:8] = False  # the last two of the second chunk
    with torch.no_grad():
        together = case.ours.action_states(case.context, x, case.t, blocks, valid).split(blocks, dim=1)
        for part, own, real in zip(x.split(blocks, 1), together, valid.split(blocks, 1), strict=True):
            n = int(real[0].sum())
            alone = case.ours.action_states(case.context, part[:, :n], case.t)
            close(own[:, :n], alone, atol=2e-5)


@each_case
def test_invalid_tokens_are_not_read(case):
    valid = torch.ones(B, CHUNK, dtype=torch.bool)
    valid[:, 4:] = False
    x, other = case.noise[..., :ACTIONS], case.noise[..., :ACTIONS].clone()
    other[:, 4:] = 1e3
    with torch.no_grad():
        a, b = (case.ours.action_states(case.context, z, case.t, valid=valid)[:, :4] for z in (x, other))
    assert torch.equal(a, b)


@each_case
def test_contexts_are_repeated_and_shared(case):
    """One context, read twice and by several noises, is what it was; neither call leaves a trace in it."""
    cached = [z for kv in case.context.keys_values for z in kv]
    before = [z.clone() for z in cached]
    x = torch.randn(B * 2, CHUNK, ACTIONS, generator=torch.Generator().manual_seed(7))
    t = torch.rand(B * 2, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        repeated = case.ours.velocity(case.context.repeat(2), x, t)
        for i in range(2):
            close(case.velocity(x[i::2], t[i::2]), repeated[i::2], atol=2e-5)
    assert all(map(torch.equal, before, cached))
    assert case.ours.features(case.context).shape[0] == B


@each_case
def test_head_and_states_make_the_velocity(case):
    x = case.noise[..., :ACTIONS]
    with torch.no_grad():
        states = case.ours.action_states(case.context, x, case.t)
        assert states.shape == (B, CHUNK, case.ours.state_width)
        assert torch.equal(case.ours.action_head(states)[..., :ACTIONS], case.velocity(x, case.t))
    padded = torch.nn.functional.pad(x, (0, MAX_DIM - ACTIONS))
    assert torch.equal(case.velocity(padded, case.t)[..., :ACTIONS], case.velocity(x, case.t))


@each_case
def test_context_depends_on_every_input(case):
    """Images, words and state all reach the velocity."""
    x = case.noise[..., :ACTIONS]
    here = case.velocity(x, case.t)
    for key, value in case.batch.items():
        if not key.startswith("observation.") or key.endswith("mask") or (case.ours.name, key) == STATE_IN_WORDS:
            continue
        changed = value.roll(1, -1) if value.is_floating_point() else value.roll(1, 0)
        with torch.no_grad():
            there = case.ours.velocity(case.ours.encode({**case.batch, key: changed}), x, case.t)
        assert (there - here).abs().max() > 1e-3, key


@pytest.mark.parametrize("case", ["smolvla"], indirect=True)
def test_smolvla_reads_no_later_actions_unless_told_to(case):
    x, later = case.noise[..., :ACTIONS], case.noise[..., :ACTIONS].clone()
    later[:, 3:] += 1.0
    assert case.ours.causal_actions
    close(case.velocity(x, case.t)[:, :3], case.velocity(later, case.t)[:, :3], atol=1e-6)
    case.ours.causal_actions = False
    try:
        assert (case.velocity(x, case.t)[:, :3] - case.velocity(later, case.t)[:, :3]).abs().max() > 1e-3
    finally:
        case.ours.causal_actions = True


@each_kind
def test_gradients_reach_the_vision_encoder(folder, kind):
    options = {"freeze_vision_encoder": False, "train_expert_only": False}
    policy = make_vla(kind, folder, **options).train()
    batch = make_processors(policy)[0](make_batch(2, CHUNK))
    x, t = torch.zeros(2, CHUNK, ACTIONS), torch.full((2,), 0.5)
    policy.velocity(policy.encode(batch), x, t).square().sum().backward()
    names = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert any("vision" in name for name in names) and any("expert" in name for name in names)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_recomputed_activations_give_the_same_gradients(folder, kind):
    gradients = []
    for recompute in (False, True):
        policy = make_vla(kind, folder, gradient_checkpointing=recompute).train()
        batch = make_processors(policy)[0](make_batch(2, CHUNK))
        x, t = torch.zeros(2, CHUNK, ACTIONS), torch.full((2,), 0.5)
        policy.velocity(policy.encode(batch), x, t).square().sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        close(gradient, gradients[1][name], atol=1e-5 * float(gradient.abs().max().clamp(min=1)))


@each_kind
def test_half_precision(folder, kind):
    """bfloat16 weights as LeRobot places them: finite, and near float32."""
    exact = make_vla(kind, folder)
    half = make_vla(kind, folder, **({} if kind == "smolvla" else {"dtype": "bfloat16"}))
    half.load_state_dict(exact.state_dict())
    if kind == "smolvla":
        half.model.vlm_with_expert.vlm.to(torch.bfloat16)
    batch = make_processors(exact)[0](make_batch(2, CHUNK))
    noise = torch.randn(2, CHUNK, MAX_DIM, generator=torch.Generator().manual_seed(0))
    a, b = (p.predict_action_chunk(batch, noise=noise) for p in (exact, half))
    assert b.dtype == torch.float32
    assert (a - b).abs().mean() < 0.1 * a.abs().mean()


def test_diffusion_executes_the_start_of_a_chunk(monkeypatch):
    features = {OBS_STATE: PolicyFeature(FeatureType.STATE, (2,)), OBS_ENV_STATE: PolicyFeature(FeatureType.ENV, (2,))}
    config = make_policy_config(
        "diffusion",
        device="cpu",
        input_features=features,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (1,))},
        **{"n_obs_steps": 1, "horizon": 8, "n_action_steps": 3, "down_dims": (8, 16), "num_train_timesteps": 2},
    )
    policy = policy_class("diffusion")(config)
    chunks = iter(torch.arange(16.0).view(2, 1, 8, 1))
    monkeypatch.setattr(policy, "predict_action_chunk", lambda batch, **_: next(chunks))
    assert [policy.select_action({}).item() for _ in range(4)] == [0.0, 1.0, 2.0, 8.0]


# --- Directories ---


@each_kind
def test_a_frozen_policy_is_without_what_nothing_reads(folder, kind, tmp_path):
    path, observations = save_vla(make_vla(kind, folder), tmp_path), make_observations(2)
    plain, frozen = (load_policy(path, frozen=f) for f in (False, True))
    wanted = plain.infer(observations, [1, 2]).actions
    np.testing.assert_array_equal(frozen.infer(observations, [1, 2]).actions, wanted)
    whole, left = ({name for name, _ in p.policy.named_parameters()} for p in (plain, frozen))
    unread = {id(p) for module in plain.policy.unread() for p in module.parameters()}
    assert whole - left == {name for name, p in plain.policy.named_parameters() if id(p) in unread} and left < whole
    plans = [Continuation("rtc", plan, 2, 2) for plan in wanted]
    np.testing.assert_array_equal(*(p.infer(observations, [3, 4], plans).actions for p in (plain, frozen)))


@each_kind
def test_directories_are_lerobots(folder, kind, tmp_path):
    """What we save, LeRobot's class loads, and the other way round; the same chunks to the last bit."""
    ours = save_vla(make_vla(kind, folder), tmp_path / "ours")
    config = json.loads((ours / "config.json").read_text())
    assert config["type"] == kind
    served = load_policy(ours)
    with contextlib.redirect_stdout(None):
        stock = get_policy_class(kind).from_pretrained(ours)
    for (name, a), (_, b) in zip(served.policy.named_parameters(), stock.named_parameters(), strict=True):
        assert torch.equal(a, b), name

    observations, seeds = make_observations(2), [3, 4]
    chunk = served.infer(observations, seeds).actions
    assert chunk.shape == (2, CHUNK, ACTIONS) and np.isfinite(chunk).all()
    theirs = save_vla(stock, tmp_path / "theirs")
    np.testing.assert_array_equal(load_policy(theirs).infer(observations, seeds).actions, chunk)
    np.testing.assert_allclose(served.infer(observations[:1], seeds[:1]).actions[0], chunk[0], atol=1e-4)


@each_kind
def test_pictures_may_be_shrunk_before_they_travel(folder, kind, tmp_path):
    """What a policy reads of larger cameras is the same bits wherever it is made, and LeRobot's to a grey level."""
    vla = make_vla(kind, folder)
    for camera in ROBOT.cameras:
        vla.config.input_features[image_key(camera.name)] = PolicyFeature(FeatureType.VISUAL, (3, 2 * SIZE, 3 * SIZE))
    served, rng = load_policy(save_vla(vla, tmp_path)), np.random.default_rng(0)
    reads = served.spec.reads
    assert {(r.height, r.width) for r in reads.values()} == {(2 * SIZE // 3, SIZE)}
    large, small = [], []
    for o in make_observations(2):
        images = {c.name: rng.integers(0, 256, (2 * SIZE, 3 * SIZE, 3), np.uint8) for c in served.spec.robot.cameras}
        large.append(replace(o, images=images))
        small.append(replace(o, images={camera: as_read(image, reads[camera]) for camera, image in images.items()}))
    here = served.infer(large, [1, 2]).actions
    np.testing.assert_array_equal(served.infer(small, [1, 2]).actions, here)
    np.testing.assert_array_equal(served.infer([large[0], small[1]], [1, 2]).actions, here)

    prepare = getattr(served.policy, "prepare_images", None) or served.policy._preprocess_images
    ours = prepare(served.preprocess(large))[0]
    floats = served.preprocess(large)
    for camera in served.spec.robot.cameras:
        pixels = torch.from_numpy(np.stack([o.images[camera.name] for o in large]))
        floats[image_key(camera.name)] = pixels.permute(0, 3, 1, 2).float() / 255
    for mine, theirs in zip(ours, prepare(floats)[0], strict=True):
        assert mine.shape == theirs.shape and (mine - theirs).abs().max() <= 2 / 255  # of [-1, 1]: one grey level


@each_kind
@pytest.mark.parametrize("mode", ["rtc", "rtc_identity", "bid"])
def test_plans_are_continued(folder, kind, mode, tmp_path):
    """Real-time chunking is a function of the velocity: a chunk comes closer to the plan that it is to continue."""
    served = load_policy(save_vla(make_vla(kind, folder), tmp_path))
    observations = make_observations(2)
    plans, free = (served.infer(observations, seeds).actions for seeds in ([1, 2], [3, 4]))
    continued = served.infer(observations, [3, 4], [Continuation(mode, plan, 2, 2) for plan in plans]).actions
    assert continued.shape == free.shape and np.isfinite(continued).all()
    assert np.abs(continued - plans)[:, :2].mean() < np.abs(free - plans)[:, :2].mean()


@each_kind
def test_a_directory_without_its_weights_is_an_error(folder, kind, tmp_path):
    """LeRobot returns a random pi0 and prints a line."""
    path = save_vla(make_vla(kind, folder), tmp_path)
    weights = load_file(path / "model.safetensors")
    name = next(n for n in weights if n.endswith("action_in_proj.weight"))
    save_file({n: w for n, w in weights.items() if n != name}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors.*lacks .*action_in_proj\.weight"):
        load_policy(path)
    save_file(weights | {name: torch.zeros(2, 2)}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors does not fit.*action_in_proj\.weight"):
        load_policy(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_policy(path)
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        type(make_vla(kind, folder)).from_pretrained(path)


def test_smolvlas_backbone_is_not_looked_up_for_its_weights(folder, tmp_path):
    """A published directory says load_vlm_weights; its own weights hold the language model already."""
    path = save_vla(make_vla("smolvla", folder), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"load_vlm_weights": True}))
    policy = load_policy(path).policy
    assert policy.config.load_vlm_weights
    assert next(policy.model.vlm_with_expert.vlm.parameters()).dtype == torch.bfloat16
