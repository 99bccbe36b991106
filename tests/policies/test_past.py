"""A policy with a history: what it recalls is read, what it does not is not, and nobody's neighbours matter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_vla import ACTIONS, ROBOT, SIZE, STATES, make_batch, make_config, make_observations, make_policy, make_stats

from vla_stack.data.past import sampled
from vla_stack.errors import UserError
from vla_stack.history import History
from vla_stack.methods.imitation import loss as imitation
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.onnx_export import export
from vla_stack.policies.past import PAST_TOKENS
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION, ACTION_IS_PAD, OBS_STATE, PAST_AGE, Observation, PolicySpec, image_key, past_key

SIZES = ((OBS_STATE, STATES), (ACTION, ACTIONS))
CAMERAS = [image_key(c) for c in ("front", "wrist")]


@pytest.fixture(scope="module")
def policy():
    return make_policy(history=3)


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chunks(saved):
    return load_policy(saved)


def past_batch(policy, ages, n=2, seed=3):
    """A preprocessed training batch with earlier pictures."""
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    generator = torch.Generator().manual_seed(seed)
    shape = (n, len(ages), SIZE, SIZE, 3)
    pictures = {past_key(k): torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for k in CAMERAS}
    return pre({**make_batch(n), **pictures, PAST_AGE: torch.tensor([ages] * n, dtype=torch.float32)})


def velocity(policy, batch):
    generator = torch.Generator().manual_seed(1)
    noise, t = torch.randn(2, 8, ACTIONS, generator=generator), torch.full((2,), 0.5)
    return policy.velocity(policy.encode(batch), noise, t)


def test_shapes_and_masks(policy):
    context = policy.encode(past_batch(policy, [8.0, 4.0, 0.0]))
    each = 2 * policy.config.tokens_per_camera
    assert context.mask.shape[1] == each + 1 + len("pick up the red cube") + 1 + 3 * each
    assert context.mask[:, -3 * each : -each].all() and not context.mask[:, -each:].any()


def test_what_is_not_recalled_is_not_read(policy):
    batch = past_batch(policy, [8.0, 4.0, 0.0])
    other = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    other[past_key(CAMERAS[0])][:, 2] = 0
    assert torch.equal(velocity(policy, batch), velocity(policy, other))
    other[past_key(CAMERAS[0])][:, 1] = 0
    assert not torch.equal(velocity(policy, batch), velocity(policy, other))
    none = past_batch(policy, [0.0, 0.0, 0.0])
    forgetful = make_policy()
    forgetful.load_state_dict({k: v for k, v in policy.state_dict().items() if ".past." not in k})
    torch.testing.assert_close(velocity(policy, none), velocity(forgetful, none))


def test_age_and_place_are_read(policy):
    first = velocity(policy, past_batch(policy, [8.0, 4.0, 0.0]))
    assert not torch.allclose(first, velocity(policy, past_batch(policy, [16.0, 4.0, 0.0])), atol=1e-4)
    batch = past_batch(policy, [8.0, 8.0, 0.0])
    swapped = {**batch, **{past_key(k): batch[past_key(k)][:, [1, 0, 2]] for k in CAMERAS}}
    assert not torch.allclose(velocity(policy, batch), velocity(policy, swapped), atol=1e-4)


def test_kept_tokens_are_those_of_the_pictures(policy):
    batch = past_batch(policy, [8.0, 4.0, 2.0])
    tokens = []
    for slot in range(3):
        earlier = {**batch, **{k: batch[past_key(k)][:, slot] for k in CAMERAS}}
        tokens.append(policy.image_tokens(earlier))
    kept = {**{k: v for k, v in batch.items() if "past." not in k}, PAST_TOKENS: torch.stack(tokens, 1)}
    torch.testing.assert_close(velocity(policy, batch), velocity(policy, kept))


def test_training_reaches_the_encoders_through_the_past(policy):
    batch = past_batch(policy, [8.0, 4.0, 0.0])
    value, _ = imitation.loss(policy, batch, torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(value, [policy.prefix.past.first, policy.prefix.past.age.weight])
    assert all(g.abs().sum() > 0 for g in grads)


def episodes(n: int, length: int):
    """Observations of ``n`` episodes, each with its history as an agent has it."""
    histories, shown = [History((0, 4, 8)) for _ in range(n)], []
    for k in range(0, length, 4):
        now = [replace(o, step=k) for o in make_observations(n, seed=k)]
        shown.append([h.beside(o) for h, o in zip(histories, now, strict=True)])
    return shown


def test_a_row_depends_on_its_own_history_alone(chunks, saved):
    assert chunks.spec.history == (0, 4, 8)
    alone = load_policy(saved)
    for decision in episodes(4, 16):
        together = chunks.infer(decision, [1, 2, 3, 4]).actions
        for row in (0, 3):
            batch = chunks.recall(decision)
            one = alone.recall([decision[row]])
            assert all(torch.equal(batch[k][row], one[k][0]) for k in batch)
            # Four copies of a row are a batch of the same size: bit for bit the same chunk.
            copies = alone.infer([decision[row]] * 4, [row + 1] * 4).actions
            assert np.array_equal(together[row], copies[row])


def test_pictures_are_encoded_once(saved, monkeypatch):
    chunks, calls = load_policy(saved), []
    encode = chunks.policy.image_tokens
    monkeypatch.setattr(chunks.policy, "image_tokens", lambda batch: calls.append(1) or encode(batch))
    decisions = episodes(1, 24)
    for decision in decisions:
        chunks.infer(decision, [0])
    assert len(calls) == len(decisions)


def test_history_changes_the_chunk_and_leaves_the_commands_anchored(chunks):
    first, *_, last = (d[0] for d in episodes(1, 16))
    forgetful = replace(last, past=())
    a, b = (chunks.infer([o], [5]).actions for o in (last, forgetful))
    assert not np.array_equal(a, b)
    # The postprocessor adds the present state, not that of what was encoded last.
    again = chunks.infer([forgetful], [5]).actions
    assert np.array_equal(b, again) and np.array_equal(first.state, episodes(1, 4)[0][0].state)


def test_select_action_remembers_and_reset_forgets(policy, saved, chunks):
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    noise = torch.zeros(1, 8, ACTIONS)

    def play(steps: int) -> torch.Tensor:
        out = []
        for k in range(steps):
            raw = {k: v for k, v in make_batch(1, seed=k).items() if k != ACTION}
            out.append(policy.select_action(pre(raw), noise))
        return torch.cat(out)

    policy.reset()
    once = play(12)
    policy.reset()
    assert torch.equal(once, play(12))
    assert not torch.equal(once, play(12))  # a continued episode remembers the first
    policy.reset()


def test_select_action_recalls_what_the_engine_does(policy, chunks):
    """The same episode through LeRobot's door and through ours."""
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    policy.reset()
    got, wanted = [], []
    for decision in episodes(1, 16):
        batch = chunks.preprocess(decision) | chunks.recall(decision)
        wanted.append(policy.predict_action_chunk(batch, torch.zeros(1, 8, ACTIONS))[:, 0])
        plain = chunks.preprocess(decision)
        got.append(policy.select_action(plain, torch.zeros(1, 8, ACTIONS)))
        for _ in range(3):
            policy.select_action(plain, torch.zeros(1, 8, ACTIONS))
    torch.testing.assert_close(torch.cat(got), torch.cat(wanted))
    policy.reset()


def test_a_mixture_around_it_remembers_as_well():
    base = make_config(history=3)
    policy = MohPolicy(MohConfig(base=base, horizons=(5, 8), device="cpu", push_to_hub=False)).eval()
    policy.base.load_state_dict(make_policy(history=3).state_dict())
    pre, _ = make_moh_pre_post_processors(policy.config, make_stats())
    noise, now = torch.zeros(1, 8, ACTIONS), {k: v for k, v in make_batch(1).items() if k != ACTION}

    def play(steps: int) -> torch.Tensor:
        return torch.cat([policy.select_action(pre(now), noise) for _ in range(steps)])

    once = play(base.n_action_steps + 1)
    assert not torch.equal(once[0], once[-1])  # what is seen is the same, and by now it has been seen before
    policy.reset()
    assert torch.equal(once, play(base.n_action_steps + 1))


def test_what_has_no_history_says_so(policy, saved, tmp_path):
    with pytest.raises(UserError, match="reads 3 earlier observations, and the batch has none.*vla train"):
        policy.forward({k: v for k, v in past_batch(policy, [0.0] * 3).items() if "past" not in k})
    with pytest.raises(UserError, match="a policy with a history does not export"):
        export(saved, tmp_path / "onnx")
    with pytest.raises(UserError, match="history is 3.*without a backbone"):
        make_config(history=3, backbone="somewhere")
    config = make_config(history=3)
    config.input_features = {OBS_STATE: config.input_features[OBS_STATE]}
    with pytest.raises(UserError, match="history is 3, and the policy has no camera"):
        config.validate_features()


def remembered_colour(history: int):
    """Success of a policy that is shown a colour in the first frame alone, and asked which it was later on."""
    torch.manual_seed(0)
    config = make_config(history=history, head="regression", depth=1, use_relative_actions=False, chunk_size=2,
                         n_action_steps=1)  # fmt: skip
    policy = VlaPolicy(config)
    ones = {k: {"mean": np.zeros(n, np.float32), "std": np.ones(n, np.float32)} for k, n in SIZES}
    pre, post = make_vla_pre_post_processors(config, ones)
    rng, ages = np.random.default_rng(0), config.history_ages
    optimiser = torch.optim.AdamW(policy.parameters(), lr=2e-3)

    def picture(colour, first):
        """Grey, but for the first frame, which is red or blue: uint8 [..., h, w, 3]."""
        out = np.full((*np.shape(first), SIZE, SIZE, 3), 128, np.uint8)
        out[first & colour], out[first & ~colour] = (255, 0, 0), (0, 0, 255)
        return out

    for _ in range(120):
        frame, colour = rng.integers(1, 30, 32), rng.random(32) < 0.5
        batch = {k: torch.from_numpy(picture(colour, frame == 0)) for k in CAMERAS}
        if ages:
            back = sampled(frame, ages, rng)
            shown = picture(np.broadcast_to(colour[:, None], back.shape), back == frame[:, None])
            batch |= {past_key(k): torch.from_numpy(shown) for k in CAMERAS}
            batch |= {PAST_AGE: torch.from_numpy(back.astype(np.float32))}
        action = torch.from_numpy(np.where(colour, 1.0, -1.0).astype(np.float32))
        batch |= {OBS_STATE: torch.zeros(32, STATES), ACTION: action[:, None, None].expand(32, 2, ACTIONS)}
        batch[ACTION_IS_PAD] = torch.zeros(32, 2, dtype=torch.bool)
        loss, _ = policy.forward(pre({**batch, "task": ["do as you were shown"] * 32}))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return policy.eval(), pre, post, picture


@pytest.mark.parametrize(("history", "solves"), [(0, False), (2, True)])
def test_a_task_of_memory_is_solved_with_a_history_and_not_without(history, solves):
    policy, pre, post, picture = remembered_colour(history)
    spec = PolicySpec(ROBOT, 2, history=policy.config.history_ages)
    chunks, right = ChunkPolicy(policy, pre, post, spec), []
    colours = np.arange(8) % 2 == 0
    histories = [History(spec.history) for _ in colours]
    for k in range(25):
        images = picture(colours, np.full(8, k == 0))
        now = [
            h.beside(Observation(np.zeros(STATES, np.float32), {"front": i, "wrist": i}, "do as you were shown", k))
            for h, i in zip(histories, images, strict=True)
        ]
        said = chunks.infer(now, [0] * 8).actions[:, 0, 0]
        if k in (1, 5, 24):
            right.append(np.sign(said) == np.where(colours, 1, -1))
    assert (np.mean(right) == 1.0) if solves else (np.mean(right) == 0.5)
