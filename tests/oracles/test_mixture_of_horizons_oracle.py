"""Mixtures of horizons against Timsty1/MixtureOfHorizons: a checkpoint in its layout, and its rules on given states."""

import json
import re
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_vlas import tiny_options, tiny_pi

from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.methods.mixture_of_horizons.loss import loss as moh_loss
from vla_stack.policies import flow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.mixture_of_horizons import Horizons, Mixture, consensus_steps, fusion_weights, vote_steps
from vla_stack.policies.modeling_moh import Prediction
from vla_stack.policies.moh_checkpoint import Checkpoint, import_checkpoint
from vla_stack.schema import ACTION, OBS_STATE, Observation, image_key

PAPER, STEPS, STRIDE_3 = "Mixture of horizons", 3, tuple(range(3, 31, 3))
CAMERAS, HORIZONS, DEPTH = ("a", "b"), (2, 4, 6), 3
FLOAT32 = 1e-4  # of three layers with weights that make every part count, and of three steps of large velocities
each_kind = pytest.mark.parametrize("kind", ["pi05", "pi0"])
each_text = pytest.mark.parametrize("text", ["mask", "mask_padded"])


def write_checkpoint(oracle, folder):
    """Weights in their names and shapes, each by its name, and statistics as openpi writes them."""
    layout = {}
    for name, shape in json.loads(oracle.source["layout"]).items():
        layers = re.search(r"(language_model|gemma_expert\.model)\.layers\.0\.", name)
        for i in range(DEPTH if layers else 1):
            layout[name.replace(".layers.0.", f".layers.{i}.") if layers else name] = shape
    weights = {}
    for name, shape in layout.items():
        draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        std = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        weights[name] = torch.from_numpy(std * draw).float()
    tied = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    weights["paligemma_with_expert.paligemma.lm_head.weight"] = weights[tied].clone()
    save_file(weights, folder / "model.safetensors")
    identity = {"mean": [0.0] * 32, "std": [1.0] * 32, "q01": [-1.0] * 32, "q99": [1.0] * 32}
    tree = {"norm_stats": {"state": identity, "actions": identity}}
    (folder / "norm_stats.json").write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def imported(oracle, tmp_path_factory):
    """Policies of checkpoints in their layout, once a kind."""
    folder, made = tmp_path_factory.mktemp("moh"), {}
    with tiny_pi(folder):

        def get(kind):
            if kind not in made:
                theirs, path = oracle(f"moh_{kind}"), folder / kind
                path.mkdir()
                write_checkpoint(theirs, path)
                options = {
                    "num_inference_steps": STEPS,
                    "tokenizer_max_length": tiny_options(kind, folder)["tokenizer_max_length"],
                }
                of = Checkpoint(path / "model.safetensors", path / "norm_stats.json", HORIZONS, CAMERAS, options)
                made[kind] = import_checkpoint(of, path / "policy"), theirs, path / "policy"
            return made[kind]

        yield get


def batch(theirs, text):
    pictures = theirs["images"].float() / 255.0
    return {
        **{image_key(c): pictures[:, i] for i, c in enumerate(CAMERAS)},
        OBS_STATE: theirs["state"],
        "observation.language.tokens": theirs["tokens"],
        "observation.language.attention_mask": theirs[text],
    }


@each_kind
@each_text
def test_velocity_and_chunk_of_a_checkpoint(imported, agrees, kind, text):
    policy, theirs, _ = imported(kind)
    b, padding = batch(theirs, text), "padded text" if text == "mask_padded" else "text without padding"
    with torch.no_grad():
        velocity = policy.velocity(policy.encode(b), theirs["noise"], torch.ones(2))
    agrees(PAPER, f"fused velocity, {kind}, {padding}", velocity, theirs[f"{text}.velocity_at_noise"], FLOAT32)
    chunk, disagreement = policy.sample(b, theirs["noise"])
    agrees(PAPER, f"sampled chunk, {kind}, {padding}", chunk, theirs[f"{text}.chunk"], FLOAT32)
    ours = [
        consensus_steps(disagreement, HORIZONS, ratio, 1, active) for ratio in (0.5, 1.0, 1.5, 3.0) for active in (0, 1)
    ]
    agrees(PAPER, f"executed steps, {kind}, {padding}", torch.stack(ours, 1), theirs[f"{text}.replan"], bound=0.0)


@each_kind
@each_text
def test_losses_of_a_checkpoint(imported, agrees, monkeypatch, kind, text):
    policy, theirs, _ = imported(kind)
    monkeypatch.setattr(flow, "sample_noise", lambda *_: theirs["noise"])
    monkeypatch.setattr(flow, "sample_time", lambda *_: theirs["t"])
    monkeypatch.setattr(policy.config, "gate_noise", False)
    data = {**batch(theirs, text), ACTION: theirs["actions"], "action_is_pad": torch.zeros(2, 6, dtype=torch.bool)}
    with torch.no_grad():
        value, terms = moh_loss(policy, data, torch.Generator())
    padding = "padded text" if text == "mask_padded" else "text without padding"
    agrees(PAPER, f"loss, {kind}, {padding}", value, theirs[f"{text}.loss"], FLOAT32)
    agrees(
        PAPER,
        f"loss of the branches, {kind}, {padding}",
        terms["loss_individual"],
        theirs[f"{text}.individual"],
        FLOAT32,
    )
    agrees(PAPER, f"loss of the mixture, {kind}, {padding}", terms["loss_mixture"], theirs[f"{text}.mixture"], FLOAT32)
    agrees(PAPER, f"load balance, {kind}, {padding}", terms["loss_balance"], theirs[f"{text}.balance"], FLOAT32)


@each_kind
def test_their_positions_count_the_padding(imported, agrees, departs, monkeypatch, kind):
    policy, theirs, _ = imported(kind)
    monkeypatch.setattr(policy.base, "padded_positions", False)
    whole, padded = (policy.sample(batch(theirs, text), theirs["noise"]).chunk for text in ("mask", "mask_padded"))
    agrees(
        PAPER, f"chunk by positions of real tokens, {kind}, text without padding", whole, theirs["mask.chunk"], FLOAT32
    )
    what = f"chunk by positions of real tokens, {kind}, padded text: theirs count the padding"
    departs(PAPER, what, padded[1], theirs["mask_padded.chunk"][1], least=1e-3)


@each_kind
def test_an_imported_directory_is_served(imported, kind):
    policy, theirs, path = imported(kind)
    served = load_policy(path)
    assert served.policy.config.padded_positions and served.policy.base.padded_positions
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), served.policy.parameters(), strict=True))
    pictures = {c: theirs["images"][0, i].permute(1, 2, 0).numpy() for i, c in enumerate(CAMERAS)}
    seen = [Observation(np.full(32, x, np.float32), pictures, "open the drawer") for x in (0.0, 0.7)]
    words = served.preprocess(seen)["observation.language.tokens"]
    assert torch.equal(words[0], words[1])  # theirs have no state in the text
    chunks = served.infer(seen, [1, 1]).actions
    assert chunks.shape == (2, 6, 32) and (np.abs(chunks[0] - chunks[1]).max() > 1e-4) == (kind == "pi0")


def test_files_that_are_no_checkpoint_of_theirs_are_refused(imported, tmp_path):
    stats = imported("pi0")[2].parent / "norm_stats.json"
    scores = {
        f"{name}.{part}": torch.zeros(1)
        for name in ("gate_out_proj", "gate_noise_layer")
        for part in ("weight", "bias")
    }
    cases = {
        "it lacks gate_out_proj.weight": {"time_mlp_in.weight": torch.zeros(1)},
        "it lacks time_mlp_in.weight and action_time_mlp_in.weight": scores,
        "one-step policy": {"action_query_embedding": torch.zeros(1)},
    }
    for message, weights in cases.items():
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            import_checkpoint(Checkpoint(tmp_path / "model.safetensors", stats), tmp_path / "out")
    with pytest.raises(UserError, match="is no safetensors file"):
        import_checkpoint(Checkpoint(tmp_path / "model.pt", stats), tmp_path / "out")
    (tmp_path / "norm_stats.json").write_text("{}")
    save_file({**scores, "time_mlp_in.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no statistics of openpi"):
        import_checkpoint(Checkpoint(tmp_path / "model.safetensors", tmp_path / "norm_stats.json"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- Rules, on given states of the action transformer ---


def mixture(theirs, states):
    """Branches and weights of states [n, h, d], by their two linear layers."""
    valid = Horizons(STRIDE_3).valid
    action, gate = ((theirs[f"{name}.weight"], theirs[f"{name}.bias"]) for name in ("action", "gate"))
    branches = torch.where(valid[..., None], torch.nn.functional.linear(states.float(), *action), 0.0)
    scores = torch.nn.functional.linear(states.float(), *gate)[None, ..., 0]
    return Mixture(branches[None], fusion_weights(scores, valid, "gate"))


def test_dynamic_inference_at_the_published_horizons(oracle, agrees):
    theirs = oracle("moh_consensus")
    for case, states in enumerate(theirs["states"]):
        parts, steps = [mixture(theirs, s) for s in states], len(states)
        chunk = -sum(m.velocity[0] for m in parts) / steps
        agrees(PAPER, "chunk of given states, horizons 3 … 30", chunk, theirs["chunk"][case])
        d = sum(m.disagreement for m in parts) / steps
        ours = [consensus_steps(d, STRIDE_3, r, 5, m) for r in (0.8, 1.0, 1.1, 1.2, 1.4) for m in (3, 5)]
        agrees(PAPER, "executed steps, horizons 3 … 30", torch.cat(ours), theirs["replan"][case], bound=0.0)


def test_votes_of_one_step_branches(oracle, agrees):
    theirs = oracle("moh_regression")
    for case, states in enumerate(theirs["states"]):
        m = mixture(theirs, states)
        agrees(PAPER, "fused actions of one-step branches", m.velocity[0], theirs["fused"][case])
        bounds = ((1, 20), (5, 20), (3, 8), (5, 30))
        ours = torch.cat([vote_steps(m.distance, STRIDE_3, 1.0, low, high) for low, high in bounds])
        agrees(PAPER, "executed steps by votes", ours, theirs["replan"][case], bound=0.0)


def test_losses_of_one_step_branches(oracle, agrees):
    theirs = oracle("moh_regression")
    for case, states in enumerate(theirs["states"]):
        target, m = theirs["target"][None], mixture(theirs, states)
        given = torch.zeros(1, 30, dtype=torch.bool)
        policy = SimpleNamespace(
            encode=lambda b: SimpleNamespace(repeat=lambda n: None),
            predict=lambda *_, p=Prediction(m, target, torch.abs, given): p,
            config=SimpleNamespace(horizons=STRIDE_3),
            horizons=Horizons(STRIDE_3),
        )
        value, terms = moh_loss(policy, {ACTION: target, "action_is_pad": given}, torch.Generator())
        agrees(PAPER, "loss of one-step branches", value, theirs["loss"][case])
        agrees(PAPER, "its load balance", terms["loss_balance"], theirs["balance"][case], FLOAT32)


def test_the_verb_imports_a_checkpoint(imported, tmp_path, capsys):
    policy, theirs, path = imported("pi05")
    files = [str(path.parent / name) for name in ("model.safetensors", "norm_stats.json")]
    given = ["--horizons", *map(str, HORIZONS), "--cameras", *CAMERAS, "--out", str(tmp_path / "moh")]
    assert main(["policy", "import", files[0], "--stats", files[1], *given]) == 0
    assert str(tmp_path / "moh") in capsys.readouterr().out
    weights = load_policy(tmp_path / "moh").policy.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in policy.state_dict().items())
    assert main(["policy", "import", files[0], *given]) == 1
    assert "import needs --stats" in capsys.readouterr().err
