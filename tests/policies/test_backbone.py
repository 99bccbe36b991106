"""The preset `base`: parity with transformers, masks, adapters, directories that need no other, errors."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_backbone import MAKERS, SIDE, make_base, make_smolvlm
from small_vla import ACTIONS, STATES, make_batch, make_observations, make_stats
from transformers import AutoModelForImageTextToText, DynamicCache

from vla_stack.errors import UserError
from vla_stack.policies.backbone import fit
from vla_stack.policies.backbone_text import IGNORED, image_text_pairs
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import MohConfig, base_config
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_text import prompts
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.policies.reading import read_config, read_policy
from vla_stack.policies.tokenizer_source import read_tokenizer
from vla_stack.policies.transformer import attention
from vla_stack.policies.words import tokenizer
from vla_stack.schema import ACTION, OBS_STATE, SchemaError, image_key

WRIST = image_key("wrist")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module", params=list(MAKERS))
def directory(request, directories):
    return directories[request.param]


@pytest.fixture(scope="module")
def policy(directory):
    return make_base(directory)


@pytest.fixture(scope="module")
def batch(policy):
    return preprocess(policy, make_batch(3))


@pytest.fixture(scope="module")
def noise():
    return torch.randn(3, 8, ACTIONS, generator=torch.Generator().manual_seed(1))


def preprocess(policy, raw):
    return make_vla_pre_post_processors(policy.config, make_stats())[0](dict(raw))


def without_wrist(batch):
    return {k: v for k, v in batch.items() if k != WRIST}


# --- Parity with transformers ------------------------------------------------------------------------------------


@torch.no_grad()
def test_keys_and_values_are_those_of_transformers(policy, directory, batch):
    """The model that transformers loads, run over the same tokens as one fully connected block, caches the same."""
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    text = model.model.get_submodule(policy.prefix.family.text_path.removeprefix("model."))
    words, word_mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    images = []
    for camera in ("front", "wrist"):
        pixels = batch[image_key(camera)] * 2 - 1  # of the backbone's size already
        pixels = pixels[:, None] if model.config.model_type == "smolvlm" else pixels
        images.append(model.get_image_features(pixels).pooler_output)
    state = policy.prefix.state(batch[OBS_STATE].clamp(-5, 5))[:, None]
    tokens = torch.cat((*images, state, text.get_input_embeddings()(words)), 1)
    mask = torch.cat((torch.ones(tokens.shape[0], tokens.shape[1] - words.shape[1], dtype=torch.bool), word_mask), 1)
    cache = DynamicCache(config=text.config)
    block = mask[:, None, None].expand(-1, 1, mask.shape[1], -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    text(inputs_embeds=tokens, attention_mask=block, position_ids=positions, past_key_values=cache, use_cache=True)
    context = policy.encode(batch)
    assert torch.equal(context.mask, mask) and not mask.all()
    assert len(context.keys_values) == text.config.num_hidden_layers
    for (k, v), layer in zip(context.keys_values, cache.layers, strict=True):
        keep = mask[:, None, :, None].expand_as(k)
        torch.testing.assert_close(k[keep], layer.keys[keep], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(v[keep], layer.values[keep], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_expert_continues_the_positions_of_the_prefix(policy, batch, noise):
    """Its queries and keys are turned by the backbone's own rotary embedding, from the count of valid tokens on."""
    context, block = policy.encode(batch), policy.expert.blocks[0]
    positions = context.mask.sum(1, keepdim=True) + torch.arange(8)
    cos, sin = policy.prefix.text.rotary_emb(noise, positions)
    ours = policy.expert.rotary(positions)
    torch.testing.assert_close(ours[0][:, 0], cos)
    torch.testing.assert_close(ours[1][:, 0], sin)
    condition = policy.expert.time(torch.full((3, 1), 0.5))
    (k, v), x = context.keys_values[0], policy.expert.embed(noise)
    mask = torch.nn.functional.pad(context.mask, (0, 8), value=True)[:, None]
    turned = block(x, condition, k, v, mask, ours)
    assert not torch.allclose(turned, block(x, condition, k, v, mask, None), atol=1e-3)


@torch.no_grad()
def test_fewer_layers_are_the_first_ones(policy, directory, batch):
    short = make_base(directory, backbone_layers=2)
    short.prefix.state.load_state_dict(policy.prefix.state.state_dict())
    pairs = zip(short.encode(batch).keys_values, policy.encode(batch).keys_values, strict=False)
    assert len(short.expert.blocks) == 2
    for (k, v), (k_all, v_all) in pairs:
        torch.testing.assert_close(k, k_all)
        torch.testing.assert_close(v, v_all)


@pytest.mark.parametrize("rows", [1, 5])
def test_shared_key_heads_equal_copied_ones(rows):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((6, 5), (2, 7), (2, 7)))
    mask = torch.rand(2, 1, rows, 7, generator=generator) > 0.3
    mask[..., 0] = True
    copied = attention(q, *(x.repeat_interleave(3, 1) for x in (k, v)), mask)
    torch.testing.assert_close(attention(q, k, v, mask), copied)


# --- Contract of a flow policy -----------------------------------------------------------------------------------


@torch.no_grad()
def test_a_chunk_among_blocks_equals_it_alone(policy, batch, noise):
    context, t = policy.encode(batch), torch.tensor([0.2, 0.5, 0.9])
    packed = policy.action_states(context, torch.cat((noise[:, :3], noise, noise[:, :5]), 1), t, blocks=(3, 8, 5))
    for states, h in zip(packed.split((3, 8, 5), 1), (3, 8, 5), strict=True):
        torch.testing.assert_close(states, policy.action_states(context, noise[:, :h], t), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_time_per_token(policy, batch, noise):
    context, t = policy.encode(batch), torch.tensor([0.1, 0.4, 0.7])
    per_sample = policy.velocity(context, noise, t)
    torch.testing.assert_close(per_sample, policy.velocity(context, noise, t[:, None].expand(3, 8)))
    clean = t[:, None].expand(3, 8).clone()
    clean[:, 3] = 0.0
    assert not torch.allclose(per_sample, policy.velocity(context, noise, clean), atol=1e-4)


def test_repeated_context_shares_gradients(policy, batch, noise):
    context = policy.encode(batch)
    twice = policy.velocity(context.repeat(2), noise.repeat_interleave(2, 0), torch.full((6,), 0.5))
    once = policy.velocity(context, noise, torch.full((3,), 0.5))
    torch.testing.assert_close(twice[::2], once, atol=1e-5, rtol=1e-5)
    weight = policy.prefix.text.layers[0].self_attn.v_proj.weight
    gradients = [torch.autograd.grad(y.sum(), weight, retain_graph=True)[0] for y in (twice, once)]
    torch.testing.assert_close(gradients[0], 2 * gradients[1], atol=1e-4, rtol=1e-4)
    assert policy.features(context).shape == (3, 32)


@pytest.mark.slow
@torch.no_grad()
def test_sampling_is_one_graph(directory, noise):
    """No host synchronisation and no shape that depends on data: the whole chunk is captured without a break."""
    policy = make_base(directory, backbone_layers=2, num_inference_steps=2, backbone_dtype="bfloat16")
    batch = preprocess(policy, make_batch(3))
    sample = torch.compile(policy.predict_action_chunk, fullgraph=True, backend="eager")
    assert torch.equal(sample(batch, noise), policy.predict_action_chunk(batch, noise))


# --- Cameras, state, text ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_masked_camera_has_no_influence(policy, batch, noise):
    lacking = torch.ones(3, dtype=torch.bool)
    other = {**batch, WRIST: torch.rand_like(batch[WRIST])}
    chunks = [
        policy.predict_action_chunk(b, noise)
        for b in ({**batch, f"{WRIST}_is_pad": lacking}, {**other, f"{WRIST}_is_pad": lacking}, without_wrist(batch))
    ]
    assert torch.equal(chunks[0], chunks[1])
    torch.testing.assert_close(chunks[0], chunks[2], atol=1e-5, rtol=1e-5)
    assert (policy.predict_action_chunk(batch, noise) - policy.predict_action_chunk(other, noise)).abs().max() > 1e-3


@torch.no_grad()
def test_a_missing_camera_leaves_no_gap_and_no_other_shape(policy, batch):
    """Its slot stays, masked, and what follows is where it would be in a policy that never had the camera."""
    context, full = policy.encode(without_wrist(batch)), policy.encode(batch)
    assert context.mask.shape == full.mask.shape
    n = policy.prefix.family.tokens_per_image
    tokens, mask = policy.prefix.tokens(without_wrist(batch))
    keep = torch.cat((torch.arange(n), torch.arange(2 * n, tokens.shape[1])))
    alone = policy.prefix.run(tokens[:, keep], mask[:, keep])
    real = mask[:, None, keep, None].expand_as(alone.keys_values[-1][0])
    torch.testing.assert_close(alone.keys_values[-1][0][real], context.keys_values[-1][0][:, :, keep][real])


def test_no_camera_at_all_is_named(policy, batch):
    with pytest.raises(SchemaError, match=r"none of the policy's cameras \(front, wrist\)"):
        policy.encode({k: v for k, v in without_wrist(batch).items() if k != image_key("front")})


def test_images_keep_their_shape_on_a_black_square():
    image = torch.zeros(1, 3, 24, 48)
    image[..., 24:] = 1.0
    out = fit(image, SIDE)
    assert out.shape == (1, 3, SIDE, SIDE)
    assert (out[..., :8, :] == -1).all() and (out[..., 24:, :] == -1).all()
    assert (out[..., 8:24, :14] == 0).all() and (out[..., 8:24, 18:] == 1).all()
    assert torch.equal(fit(out, SIDE), out)


def test_state_in_the_prompt(directory, noise):
    policy = make_base(directory, state_input="prompt", max_tokens=80)
    stats = make_stats()
    stats[OBS_STATE] |= {"q01": np.full(STATES, -2.0, np.float32), "q99": np.full(STATES, 2.0, np.float32)}
    pre = make_vla_pre_post_processors(policy.config, stats)[0]
    state = torch.tensor([[-9.0, -2.0, -1.0, 0.0, 0.02, 2.0, 9.0]])
    raw = {k: v[:1] for k, v in make_batch(1).items()} | {OBS_STATE: state}
    batch = pre(dict(raw))
    step = pre.steps[-1]
    ids, mask = (batch[f"observation.language.{k}"][0] for k in ("tokens", "attention_mask"))
    text = tokenizer(step.content).decode(ids[mask].tolist())
    assert text == "Task: pick up the red cube, State: 0 0 64 128 129 255 255;\nAction: "
    other = pre(raw | {OBS_STATE: state + 0.5})
    chunks = [policy.predict_action_chunk(b, noise[:1]) for b in (batch, other)]
    assert (chunks[0] - chunks[1]).abs().max() > 1e-3


def test_bins_of_the_prompt_cover_the_range():
    state = torch.linspace(-1, 1, 1001)[None]
    numbers = [int(w) for w in prompts(["x"], state)[0].split("State: ")[1].split(";")[0].split()]
    assert sorted(set(numbers)) == list(range(256)) and numbers == sorted(numbers)


def test_long_prompt_is_named(policy):
    raw = {**make_batch(1), "task": ["pick up " + "very " * 10 + "red cubes"]}
    with pytest.raises(UserError, match="instruction of .* tokens .*the policy reads 40"):
        preprocess(policy, raw)


# --- Training ----------------------------------------------------------------------------------------------------


def gradients(policy, batch):
    policy.train()
    torch.manual_seed(0)
    policy.forward(batch)[0].backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("options", [{}, {"train_backbone": "lora", "freeze_vision": False}])
def test_checkpointing_changes_no_gradient(directory, batch, options):
    plain = gradients(make_base(directory, **options), batch)
    saving = gradients(make_base(directory, gradient_checkpointing=True, **options), batch)
    assert plain.keys() == saving.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(saving[name], gradient, msg=name)


@pytest.mark.parametrize(
    "mode, trains",
    [("expert_only", lambda n: ".backbone." not in n), ("lora", lambda n: ".backbone." not in n or "lora_" in n)],
)
def test_training_changes_only_what_it_should(directory, batch, mode, trains):
    policy = make_base(directory, train_backbone=mode)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        policy.train().forward(batch)[0].backward()
        optimizer.step()
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if trains(name)}
    assert any("backbone" in name for name in changed) == (mode == "lora")


def test_vision_is_trained_only_where_it_is_not_frozen(directory, batch):
    for frozen in (True, False):
        policy = make_base(directory, freeze_vision=frozen)
        idle = [n for n, g in gradients(policy, batch).items() if g is None or not g.abs().sum() > 0]
        vision = [n for n, p in policy.named_parameters() if "vision" in n and p.requires_grad]
        assert idle == [] and bool(vision) != frozen


@torch.no_grad()
def test_bfloat16_is_close_and_holds_half_the_bytes(directory, batch, noise):
    exact = make_base(directory, train_backbone="lora")
    half = make_base(directory, train_backbone="lora", backbone_dtype="bfloat16")
    types = {name: p.dtype for name, p in half.named_parameters() if "backbone" in name}
    assert {t for n, t in types.items() if "lora_" in n} == {torch.float32}
    assert {t for n, t in types.items() if "lora_" not in n} == {torch.bfloat16}
    assert half.prefix.text.rotary_emb.inv_freq.dtype == torch.float32
    assert half.encode(batch).keys_values[0][0].dtype == torch.bfloat16
    a, b = (p.predict_action_chunk(batch, noise) for p in (exact, half))
    assert b.dtype == torch.float32
    assert (a - b).abs().mean() < 0.05 * a.abs().mean()
    assert all(torch.isfinite(g).all() for g in gradients_enabled(half, batch).values())


def gradients_enabled(policy, batch):
    with torch.enable_grad():
        return gradients(policy, batch)


# --- Saved policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"train_backbone": "lora", "backbone_dtype": "bfloat16"},
        {"keep_language_head": True, "state_input": "prompt", "max_tokens": 80},
        {"backbone_layers": 2, "head": "gaussian"},
    ],
)
def test_saved_policy_needs_no_backbone_directory(directories, directory, tmp_path, options):
    source = tmp_path / "backbone"
    shutil.copytree(directory, source)
    policy = make_base(source, **options)
    stats = make_stats()
    for s in stats.values():
        s |= {"q01": s["mean"] - s["std"], "q99": s["mean"] + s["std"]}
    parts = (policy, *make_vla_pre_post_processors(policy.config, stats))
    for part in parts:
        part.save_pretrained(tmp_path / "policy")
    raw = {k: v for k, v in make_batch(2).items() if k != ACTION}
    noise = torch.randn(2, 8, ACTIONS)
    expected = parts[2](policy.predict_action_chunk(parts[1](dict(raw)), noise))
    shutil.rmtree(source)
    loaded = load_policy(tmp_path / "policy")
    actual = loaded.postprocessor(loaded.policy.predict_action_chunk(loaded.preprocessor(dict(raw)), noise))
    assert torch.equal(actual, expected)
    assert loaded.infer(make_observations(2), [0, 1]).actions.shape == (2, 8, ACTIONS)
    types = {n: p.dtype for n, p in policy.named_parameters()}
    assert {n: p.dtype for n, p in loaded.policy.named_parameters()} == types


# --- Served policies ---------------------------------------------------------------------------------------------


def unrounded(policy):
    """Linear layers of prefix and expert that are not in bfloat16."""
    layers = [(n, m.weight) for n, m in policy.named_modules() if isinstance(m, torch.nn.Linear)]
    return {n for n, weight in layers if weight.dtype != torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        {"train_backbone": "expert_only"},
        {"train_backbone": "full", "keep_language_head": True},
        {"train_backbone": "expert_only", "head": "gaussian"},
        {"train_backbone": "lora"},
    ],
)
def test_a_frozen_policy_rounds_once_what_autocast_rounds_at_every_call(directory, tmp_path, batch, noise, options):
    policy = make_base(directory, backbone_dtype="bfloat16", **options)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    plain, frozen = (load_policy(tmp_path, frozen=f).policy for f in (False, True))
    linear = {n for n, m in frozen.named_modules() if isinstance(m, torch.nn.Linear)}
    outside = {n for n in linear if n.startswith("expert.head") or n == "prefix.backbone.lm_head"}
    assert unrounded(frozen) == outside and unrounded(plain) > outside
    wanted, chunk = (p.predict_action_chunk(batch, noise) for p in (plain, frozen))
    moved = [(c - noise).flatten(1) for c in (chunk, wanted)]
    if options["train_backbone"] != "lora":  # 1e-5 at full depth (test_unrolled.py); this one is 16 wide
        assert torch.cosine_similarity(*moved).min() > 0.9998
        return
    assert any("lora_" in n for n in plain.state_dict()) and not any("lora_" in n for n in frozen.state_dict())
    assert torch.cosine_similarity(*moved).min() > 0.999


def test_a_frozen_policy_in_float32_stays_in_it(directory, tmp_path, batch, noise):
    policy = make_base(directory, train_backbone="lora")
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    frozen = load_policy(tmp_path, frozen=True).policy
    assert {p.dtype for p in frozen.parameters()} == {torch.float32}
    assert not any("lora_" in name for name in frozen.state_dict())
    wanted = policy.predict_action_chunk(batch, noise)
    torch.testing.assert_close(frozen.predict_action_chunk(batch, noise), wanted, atol=1e-4, rtol=1e-4)


def test_a_frozen_mixture_of_horizons_is_a_frozen_base(directory, tmp_path, batch, noise):
    base = make_base(directory, train_backbone="expert_only", backbone_dtype="bfloat16")
    policy = MohPolicy(MohConfig(base=base.config, horizons=(2, 5, 8), device="cpu", push_to_hub=False)).eval()
    policy.base.load_state_dict(base.state_dict())
    for part in (policy, *make_moh_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    frozen = load_policy(tmp_path, frozen=True).policy
    assert unrounded(frozen) == {"base.expert.head", "gate.score", "gate.spread"}
    moved = [(p.predict_action_chunk(batch, noise) - noise).flatten(1) for p in (frozen, policy)]
    assert torch.cosine_similarity(*moved).min() > 0.9999


@pytest.mark.parametrize("steps", [("expert_only", "lora", "full"), ("full", "lora", "expert_only")])
def test_stages_of_training_follow_each_other(directory, tmp_path, batch, noise, steps):
    """Each stage starts with the actions of the one before, whatever of the backbone it trains."""
    policy = make_base(directory, train_backbone=steps[0], keep_language_head=True)
    expected = policy.predict_action_chunk(batch, noise)
    for mode in steps[1:]:
        policy.save_pretrained(tmp_path / mode)
        config = type(policy.config).from_pretrained(tmp_path / mode)
        config.train_backbone, config.keep_language_head = mode, False
        policy = type(policy).from_pretrained(tmp_path / mode, config=config)
        torch.testing.assert_close(policy.predict_action_chunk(batch, noise), expected, atol=1e-5, rtol=1e-5)
        if mode == "lora":
            with torch.no_grad():
                for name, p in policy.named_parameters():
                    if "lora_B" in name:
                        p.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
            moved = policy.predict_action_chunk(batch, noise)
            assert (moved - expected).abs().max() > 1e-3
            expected = moved


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize(
    "options", [{"train_backbone": "full"}, {}, {"lora_rank": 2}], ids=["merged", "kept", "another_rank"]
)
def test_adapters_add_what_they_added_whatever_alpha_the_next_stage_has(
    directory, tmp_path, batch, noise, options, mixed
):
    policy = make_base(directory, train_backbone="lora", lora_alpha=4, lora_rank=4)
    if mixed:
        base, config = policy, MohConfig(base=policy.config, horizons=(4, 8), device="cpu", push_to_hub=False)
        policy = MohPolicy(config).eval()
        policy.base.load_state_dict(base.state_dict())
    policy.save_pretrained(tmp_path)
    config = read_config(tmp_path, "cpu")
    native = replace(base_config(config), lora_alpha=64, **options)
    again = read_policy(tmp_path, replace(config, base=native) if mixed else native)
    expected = policy.predict_action_chunk(batch, noise)
    for _ in range(2):
        torch.testing.assert_close(again.predict_action_chunk(batch, noise), expected, atol=1e-5, rtol=1e-5)
        again.load_state_dict(again.state_dict())  # its own weights stay what they are


SERVE = """
import json, sys, numpy
from safetensors.torch import load_file
from vla_stack.policies.chunk_policy import load_policy
policy, raw = load_policy(sys.argv[1]), load_file(sys.argv[2])
noise, raw["task"] = raw.pop("noise"), json.loads(sys.argv[4])
chunk = policy.policy.predict_action_chunk(policy.preprocessor(raw), noise)
numpy.save(sys.argv[3], policy.postprocessor(chunk).numpy())
"""


@pytest.mark.slow
def test_another_process_predicts_the_same_bits(directories, tmp_path):
    source = shutil.copytree(directories["paligemma"], tmp_path / "backbone")
    policy = make_base(source, train_backbone="lora", backbone_dtype="bfloat16")
    parts = (policy, *make_vla_pre_post_processors(policy.config, make_stats()))
    for part in parts:
        part.save_pretrained(tmp_path / "policy")
    raw = {k: v for k, v in make_batch(2).items() if k != ACTION} | {"noise": torch.randn(2, 8, ACTIONS)}
    tensors = {k: v.contiguous() for k, v in raw.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, tmp_path / "raw.safetensors")
    noise = raw.pop("noise")
    expected = parts[2](policy.predict_action_chunk(parts[1](dict(raw)), noise))
    shutil.rmtree(source)
    files = [str(tmp_path / name) for name in ("policy", "raw.safetensors", "chunk.npy")]
    subprocess.run([sys.executable, "-c", SERVE, *files, json.dumps(raw["task"])], check=True)
    assert np.array_equal(np.load(files[2]), expected.numpy())


def test_a_configuration_made_twice_loads_the_backbone_twice(directories):
    policy = make_base(directories["smolvlm"])
    again = type(policy)(policy.config)
    weight = "prefix.backbone.model.text_model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(again.state_dict()[weight], policy.state_dict()[weight])


# --- Language ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_language_loss_is_that_of_transformers(directory):
    policy = make_base(directory, keep_language_head=True, train_backbone="expert_only")
    backbone = policy.config.backbone_config
    ids, labels = image_text_pairs(
        read_tokenizer(str(directory)), backbone, ["what is it?", "where?"], ["a cube", "up"]
    )
    images = torch.randint(0, 256, (2, SIDE, SIDE, 3), dtype=torch.uint8)
    per_image = policy.prefix.family.tokens_per_image
    assert ((ids == 3).sum(1) == per_image).all()
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    if smolvlm := model.config.model_type == "smolvlm":
        logits = model(input_ids=ids, pixel_values=pixels[:, None]).logits
    else:
        kinds = (labels != IGNORED).long()
        logits = model(input_ids=ids, pixel_values=pixels, token_type_ids=kinds).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(policy.language_loss(images, ids, labels), expected)
    answer = policy_text(directory, labels[0][labels[0] != IGNORED])
    assert answer == (" a cube<end_of_utterance>" if smolvlm else "a cube<eos>")


def policy_text(directory, ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(read_tokenizer(str(directory)).decode()).decode(ids.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_language_loss_trains_adapters(directory, checkpointing):
    options = {"keep_language_head": True, "train_backbone": "lora", "gradient_checkpointing": checkpointing}
    policy = make_base(directory, **options).train()
    ids, labels = image_text_pairs(read_tokenizer(str(directory)), policy.config.backbone_config, ["what?"], ["a cube"])
    policy.language_loss(torch.zeros(1, 40, 60, 3, dtype=torch.uint8), ids, labels).backward()
    adapters = [p for n, p in policy.named_parameters() if "lora_B" in n]
    assert adapters and all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters)


def test_language_loss_without_a_head_says_so(policy):
    with pytest.raises(UserError, match="no language head.*keep_language_head"):
        policy.language_loss(torch.zeros(1, SIDE, SIDE, 3, dtype=torch.uint8), *torch.zeros(2, 1, 4).long())


# --- Errors ------------------------------------------------------------------------------------------------------


def test_backbone_that_cannot_be_found(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot load the backbone 'nobody/nothing'.*local directory"):
        make_base("nobody/nothing")


def test_backbone_of_another_family(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="is a 'bert'.*smolvlm and paligemma"):
        make_base(tmp_path)


def test_backbone_with_positions_that_the_expert_cannot_follow(directories, tmp_path):
    config = json.loads((directories["smolvlm"] / "config.json").read_text())
    config["text_config"]["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="rotary positions 'dynamic'.*default, linear, llama3 are"):
        make_base(tmp_path)


def test_backbone_without_a_tokenizer_is_named(directories, tmp_path):
    policy = make_base(directories["smolvlm"])
    policy.config.backbone = str(tmp_path)
    with pytest.raises(UserError, match="cannot read tokenizer.json of the pretrained model"):
        make_vla_pre_post_processors(policy.config, make_stats())


def test_backbone_without_weights(directories, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(directories["smolvlm"] / name, tmp_path)
    with pytest.raises(UserError, match="cannot load the backbone"):
        make_base(tmp_path)


def test_backbone_with_missing_weights(tmp_path):
    make_smolvlm(tmp_path, layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lacks the weights 'model.text_model.layers.2"):
        make_base(tmp_path)


def test_too_many_layers(directories):
    with pytest.raises(UserError, match="backbone_layers is 9.*has 3"):
        make_base(directories["smolvlm"], backbone_layers=9)


def test_adapters_that_fit_nowhere(directories):
    with pytest.raises(UserError, match=r"lora_targets \(qkv\) fit no layer"):
        make_base(directories["smolvlm"], train_backbone="lora", lora_targets=("qkv",))
