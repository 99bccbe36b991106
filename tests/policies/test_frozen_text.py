"""Instructions read by a frozen sentence encoder: words that no demonstration had, and what a policy keeps of it."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors.torch import load_file
from small_vla import make_batch, make_config, make_observations, make_policy, make_stats
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, CLIPTextConfig, CLIPTextModel

from vla_stack.errors import UserError
from vla_stack.policies import sentence_encoder
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import write_manifest
from vla_stack.policies.onnx_export import export, export_beside
from vla_stack.policies.plain_policy import PlainPolicy, load_plain
from vla_stack.policies.prefix import read_text
from vla_stack.policies.processor_text import FrozenTextStep, frozen_step
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.policies.sentence_encoder import embed, shipped_encoder, vectors
from vla_stack.policies.sentence_source import read_encoder
from vla_stack.policies.text import TextEncoder
from vla_stack.policies.words import learn_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import renew

MINILM = shipped_encoder("minilm")


def save(policy, path: Path) -> Path:
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(path)
    write_manifest(path)
    return path


@pytest.fixture(scope="module")
def reading(tmp_path_factory) -> Path:
    """A saved policy on the shipped encoder, its graph beside it."""
    path = save(make_policy(text="frozen"), tmp_path_factory.mktemp("frozen") / "policy")
    export_beside(path)
    return path


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory) -> Path:
    """The directory of another encoder: a random one of two layers that knows few words."""
    path, words = (
        tmp_path_factory.mktemp("bert"),
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "pick", "up", "the", "cube", "red"],
    )
    words += [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    torch.manual_seed(0)
    sizes = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(path)
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(path / "tokenizer.json"))
    return path


def last(text: str) -> np.ndarray:
    vector = vectors(*MINILM, text)[-1]
    return vector / np.linalg.norm(vector)


def test_words_that_mean_the_same_are_near():
    for text, same, others in (
        ("pick up the {}", ("cup", "mug"), ("hammer", "banana", "car")),
        ("pick up the {}", ("spanner", "wrench"), ("banana", "cup", "duck")),
        ("put the apple on the {} shelf", ("bottom", "lower"), ("upper", "high")),
    ):
        a, b = (last(text.format(word)) for word in same)
        assert all(a @ b > a @ last(text.format(other)) for other in others), same


def test_vectors_are_of_words_in_their_context_whatever_their_spelling():
    plain = vectors(*MINILM, "put the cup left of the bowl")
    assert plain.shape == (7, 384) and np.isfinite(plain).all()
    assert np.array_equal(vectors(*MINILM, "Put the CUP, left of the bowl!\n"), plain)
    swapped = vectors(*MINILM, "put the bowl left of the cup")
    assert np.linalg.norm(plain[2] - swapped[6]) > 0.1 * np.linalg.norm(plain[2])  # "cup"
    assert vectors(*MINILM, " ?! ").shape == (1, 384)
    found, there = embed(*MINILM, ["pick up the cup", "press"], 6)
    assert found.shape == (2, 6, 384) and there.sum(1).tolist() == [4, 1] and not found[1, 1:].any()


def test_a_sentence_is_encoded_once(monkeypatch):
    step, observation = FrozenTextStep(16, "minilm"), {"observation.state": torch.zeros(2, 1)}

    def ask():
        task = ["stack the crimson bricks", "never said before"]
        found = step({"observation": dict(observation), "complementary_data": {"task": task}})["observation"]
        return found[OBS_LANGUAGE_TOKENS], found[OBS_LANGUAGE_ATTENTION_MASK]

    tokens, mask = ask()
    assert tokens.dtype == torch.float32 and tokens.shape == (2, 16, 384) and mask.sum(1).tolist() == [4, 3]
    monkeypatch.setattr(sentence_encoder, "session", None)  # which must not be asked for again
    again, _ = ask()
    assert torch.equal(again, tokens)


def test_too_long_an_instruction_is_named():
    with pytest.raises(UserError, match=r"instruction of 43 tokens \('pick up .*the policy reads 32.*max_tokens"):
        embed(*MINILM, ["pick up the " + "very " * 39 + "cube"], 32)


def test_a_policy_reads_the_vectors(reading):
    policy = load_policy(reading)
    assert policy.policy.config.text_width == 384
    texts = ("pick up the cup", "Pick up the CUP!", "pick up the banana")
    known, same, other = (policy.infer(make_observations(1, task=text), [0]).actions for text in texts)
    assert np.array_equal(known, same) and np.abs(other - known).mean() > 1e-3


def test_rows_that_are_alike_are_encoded_once(reading, monkeypatch):
    network = load_policy(reading).policy.prefix.text
    tokens, mask = (torch.from_numpy(x) for x in embed(*MINILM, ["pick up", "pick it", "pick up", "pick"], 8))
    asked = []
    monkeypatch.setattr(network, "forward", lambda t, m: (asked.append(len(t)), TextEncoder.forward(network, t, m))[1])
    text, seen, one = read_text(network, tokens, mask)
    assert asked == [3] and text.shape[1] == 2  # the longest has two words
    whole, mean = TextEncoder.forward(network, tokens, mask)
    assert torch.allclose(one, mean, atol=1e-5)
    assert torch.allclose(text[seen], whole[:, :2][seen], atol=1e-5)


def test_the_package_brings_the_encoder_and_a_policy_names_it(reading):
    steps = json.loads((reading / "policy_preprocessor.json").read_text())["steps"]
    (step,) = [s for s in steps if s["registry_name"] == "frozen_text_processor"]
    assert step["config"] == {"length": 32, "shipped": "minilm"} and "state_file" not in step
    assert sum(f.stat().st_size for f in reading.iterdir()) < 2 << 20


def test_without_torch_it_is_the_same_policy(reading):
    plain, seen = load_plain(reading, threads=1), make_observations(2, task="hoist the crimson cube")
    assert isinstance(plain, PlainPolicy)
    wanted = load_policy(reading).infer(seen, [1, 2]).actions
    np.testing.assert_allclose(plain.infer(seen, [1, 2]).actions, wanted, atol=1e-4)


def test_another_encoder_is_read_and_a_saved_policy_brings_it(small_bert, tmp_path):
    graph, content = read_encoder(str(small_bert))
    model = BertModel.from_pretrained(small_bert).eval()
    for text in ("pick up the red cube", "cubes", "up"):
        ids = torch.tensor([Tokenizer.from_str(content.decode()).encode(text).ids])
        with torch.no_grad():
            wanted = model(ids).last_hidden_state[0, 1:-1].numpy()
        got = vectors(graph, content, text)
        assert got.shape == wanted.shape and np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()
    own = tmp_path / "bert"
    shutil.copytree(small_bert, own)
    path = save(make_policy(text="frozen", text_encoder=str(own)), tmp_path / "policy")
    shutil.rmtree(own)
    read_encoder.cache_clear()
    (state,) = path.glob("policy_pre*frozen_text*.safetensors")
    assert load_file(state)["graph"].numpy().tobytes() == graph
    policy, seen = load_policy(path), make_observations(1)
    assert policy.policy.config.text_width == 40
    # Whoever continues from it stands on the same encoder; its graphs need the processors, which need torch.
    config = make_config(text="frozen", text_encoder=str(own), pretrained_path=path)
    assert frozen_step(config).graph == graph
    export(path, tmp_path / "out")
    assert load_plain(tmp_path / "out", threads=1) is None
    wanted = policy.infer(seen, [0]).actions
    np.testing.assert_allclose(load_policy(tmp_path / "out").infer(seen, [0]).actions, wanted, atol=1e-4)


def test_what_is_no_encoder_is_named(tmp_path, reading):
    with pytest.raises(UserError, match=r"no sentence encoder can be read from '.*nothing'.*minilm"):
        make_policy(text="frozen", text_encoder=str(tmp_path / "nothing"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    CLIPTextModel(CLIPTextConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "clip")
    with pytest.raises(UserError, match=r"no sentence encoder can be read from '.*clip'.*give a local directory"):
        read_encoder(str(tmp_path / "clip"))
    with pytest.raises(UserError, match="the sentence encoder cannot be run"):
        vectors(b"no graph", MINILM[1], "pick")
    chunk = (reading / "chunk.onnx").read_bytes()
    with pytest.raises(UserError, match="another graph"):
        vectors(chunk, MINILM[1], "pick")
    copy = tmp_path / "copy"
    shutil.copytree(reading, copy)
    file = copy / "policy_preprocessor.json"
    file.write_text(file.read_text().replace('"minilm"', '"maxilm"'))
    write_manifest(copy)
    with pytest.raises(UserError, match="no sentence encoder 'maxilm'.*minilm"):
        load_policy(copy)


def test_a_new_text_encoder_is_taught_what_the_old_one_gave(monkeypatch):
    """So that a policy goes on as before, and reads what it never read."""
    words = ("cup", "bowl", "hammer", "banana")
    texts = [f"{verb} the {c} {t}" for verb in ("lift", "grab") for c in ("red", "blue") for t in words]
    content = learn_tokenizer(texts, 320)
    torch.manual_seed(0)
    old, new = TextEncoder(320, 0, 32, 32, 2, 16, 2), TextEncoder(0, 384, 32, 32, 2, 16, 1)
    monkeypatch.setattr(renew, "STEPS", 150)
    monkeypatch.setattr(renew, "trange", lambda n, desc: range(n))
    step = FrozenTextStep(32, "minilm")
    assert renew.teach(new, step, old, content, texts) < 0.3
    x, there = (
        torch.from_numpy(a) for a in embed(*MINILM, ["lift the red mug", *(f"lift the red {w}" for w in words)], 4)
    )
    mug, *known = new(x, there)[0][:, -1].detach()
    assert np.argmin([(mug - one).norm().item() for one in known]) == 0  # a cup


def test_it_trains(tmp_path):
    policy = make_policy(text="frozen").train()
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    loss, _ = policy.forward(pre(make_batch(4)))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.prefix.text.words.parameters())
