"""Sub-words: learnt from the data, saved with the policy, alike everywhere; and an encoder that reads their order."""

import json
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from small_vla import make_batch, make_config, make_observations, make_policy, make_stats

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.directory import write_manifest
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_text import LEVELS, HashTokenizerStep, TokenizerStep, share_of
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.policies.words import PAD, learn_tokenizer, token_ids, tokenizer

COLOURS, THINGS = ("red", "green", "blue"), ("cube", "cup", "bowl")
SENTENCES = [f"{verb} the {c} {t}" for verb in ("pick up", "grab") for c in COLOURS for t in THINGS]
SENTENCES += [f"put the {a} left of the {b}" for a in THINGS for b in THINGS if a != b]
META = SimpleNamespace(tasks=pd.DataFrame({"task_index": range(len(SENTENCES))}, index=SENTENCES))
CONTENT = learn_tokenizer(SENTENCES, 320)


@pytest.fixture(scope="module")
def learnt(policy):
    return make_vla_pre_post_processors(policy.config, make_stats(), META)


def pieces(text: str, share: float = 1.0) -> list[str]:
    return tokenizer(CONTENT, share).encode(text).tokens


def test_a_tokenizer_follows_from_the_sentences_alone():
    assert learn_tokenizer(reversed(SENTENCES * 2), 320) == CONTENT
    assert tokenizer(CONTENT).get_vocab_size() <= 320
    assert pieces("Pick up, the RED cube!") == ["Ġpick", "Ġup", "Ġthe", "Ġred", "Ġcube"]


def test_no_text_is_out_of_vocabulary():
    alone = learn_tokenizer((), 257)
    for text in (
        "pick up the crimson mug",
        "nimm die Tasse",
        "カップを取って",
        "\x00\udcff".encode(errors="ignore").decode(),
    ):
        for content in (CONTENT, alone):
            ids = token_ids(content, text)
            assert len(set(ids)) > 1 or not text.strip("\x00")
            assert all(PAD < i < tokenizer(content).get_vocab_size() for i in ids)


def test_unseen_words_share_pieces_with_known_ones():
    assert {"Ġcube", "Ġcup"} <= {*pieces("cubes"), *pieces("cupboard")}
    assert len(set(pieces("reddish")) & set(pieces("red"))) == 1
    for known, typo in (("grab", "grabb"), ("bowl", "bowls"), ("green", "greeen")):
        learnt = {piece for i in range(LEVELS + 1) for piece in pieces(known, i / LEVELS)}
        assert set(pieces(typo)) <= learnt | {piece for word in ("the", "cubes") for piece in pieces(word, 0.0)}
        assert set(pieces(typo)) & learnt


def test_training_splits_finer_and_inference_does_not():
    step = TokenizerStep(32, dropout=0.5, content=CONTENT)
    observation = {"observation.state": torch.zeros(2, 1)}

    def split(**beside):
        out = step({"observation": dict(observation), "complementary_data": {"task": [SENTENCES[0]] * 2, **beside}})
        return out["observation"][OBS_LANGUAGE_TOKENS]

    plain = split()[0]
    varied = torch.stack([split(index=torch.tensor([i, i + 1])) for i in range(256)])
    assert torch.equal(varied[:, 0], varied[:, 1])  # a batch is split in one way
    varied = varied[:, 0]
    assert len(varied.unique(dim=0)) > 8
    assert torch.equal(varied[7], split(index=torch.tensor([7, 0]))[1])
    assert (varied == plain).all(1).float().mean() >= 0.45
    shares = [share_of(i, 0.5) for i in range(1 << 14)]
    assert {share_of(i, 0.0) for i in range(100)} == {1.0}
    assert 0.49 < np.mean(np.array(shares) == 1.0) < 0.51 and len(set(shares)) == LEVELS + 1
    texts = {tokenizer(CONTENT).decode(row.tolist(), skip_special_tokens=True) for row in varied}
    assert texts == {" " + SENTENCES[0]}


def test_too_long_an_instruction_is_named(learnt):
    with pytest.raises(UserError, match=r"instruction of \d+ tokens \('pick up .*the policy reads 32.*max_tokens"):
        learnt[0]({**make_batch(1), "task": ["pick up the " + "very " * 40 + "red cube"]})
    step = TokenizerStep(5, dropout=0.5, content=CONTENT)  # what fits whole is not split until it does not
    ids, _ = step.encode([SENTENCES[0]], 0.0)
    assert tuple(ids[0].tolist()) == token_ids(CONTENT, SENTENCES[0])


def test_order_changes_the_context(policy, learnt):
    swapped = ["put the cup left of the bowl", "put the bowl left of the cup"]
    batch = learnt[0]({**make_batch(2), "task": swapped})
    ids = batch[OBS_LANGUAGE_TOKENS]
    assert torch.equal(ids[0].sort().values, ids[1].sort().values)
    x, mean = policy.prefix.text(ids, batch[OBS_LANGUAGE_ATTENTION_MASK])
    assert (mean[0] - mean[1]).norm() > 0.02 * mean[0].norm()
    # The token "cup" itself knows where it stands, not only which words are near.
    cup = token_ids(CONTENT, "cup")[0]
    first, second = (x[i][ids[i] == cup][0] for i in range(2))
    assert (first - second).norm() > 0.1 * first.norm()


def test_a_saved_policy_brings_its_tokenizer(policy, learnt, tmp_path):
    for part in (policy, *learnt):
        part.save_pretrained(tmp_path)
    write_manifest(tmp_path)
    steps = json.loads((tmp_path / "policy_preprocessor.json").read_text())["steps"]
    (state,) = [s["state_file"] for s in steps if s["registry_name"] == "text_tokenizer_processor"]
    assert state.endswith(".safetensors") and state in json.loads((tmp_path / "manifest.json").read_text())["files"]
    raw = make_batch(2)
    by_lerobot, _ = make_pre_post_processors(policy.config, str(tmp_path))
    for key in (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK):
        assert torch.equal(by_lerobot(dict(raw))[key], learnt[0](dict(raw))[key])
    served = load_policy(tmp_path).preprocess(make_observations(1))
    assert torch.equal(served[OBS_LANGUAGE_TOKENS][0], learnt[0](dict(raw))[OBS_LANGUAGE_TOKENS][0])
    # Whoever continues from it, on whatever sentences, means the same by a token.
    config = make_config(pretrained_path=tmp_path)
    step = next(s for s in make_vla_pre_post_processors(config, make_stats())[0].steps if isinstance(s, TokenizerStep))
    assert step.content == tokenizer_content(learnt)


@pytest.mark.parametrize("made_first", [False, True], ids=["processors first", "policy first"])
def test_a_mixture_reads_words_as_the_weights_do_that_it_starts_from(policy, learnt, tmp_path, made_first):
    for part in (policy, *learnt):
        part.save_pretrained(tmp_path)
    base = make_config(pretrained_path=tmp_path)
    config = MohConfig(base=base, horizons=(4, 8), device="cpu", push_to_hub=False)
    if made_first:
        MohPolicy(config)
    other = SimpleNamespace(tasks=pd.DataFrame({"task_index": [0]}, index=["grasp the mug"]))
    assert tokenizer_content(make_moh_pre_post_processors(config, make_stats(), other)) == CONTENT


def test_the_tokenizer_of_a_repository_s_weights_is_downloaded(policy, learnt, tmp_path, monkeypatch):
    for part in (policy, *learnt):
        part.save_pretrained(tmp_path)
    asked = []

    def snapshot(repository, allow_patterns):
        asked.append((repository, [any(fnmatch(file.name, p) for p in allow_patterns) for file in tmp_path.iterdir()]))
        if repository == "someone/other":
            raise FileNotFoundError("not there")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    made = make_vla_pre_post_processors(make_config(pretrained_path=Path("someone/policy")), make_stats(), META)
    assert tokenizer_content(made) == CONTENT
    with pytest.raises(UserError, match="'someone/other' is no directory here, and its tokenizer cannot be had"):
        make_vla_pre_post_processors(make_config(pretrained_path=Path("someone/other")), make_stats())
    assert [(repository, sum(fits)) for repository, fits in asked] == [("someone/policy", 1), ("someone/other", 1)]


def test_weights_without_their_tokenizer_get_no_other_one(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        make_vla_pre_post_processors(make_config(pretrained_path=tmp_path), make_stats(), META)


def tokenizer_content(processors) -> bytes:
    return next(s.content for s in processors[0].steps if isinstance(s, TokenizerStep))


def test_lerobot_hands_the_instructions_over(policy):
    pre, _ = make_pre_post_processors(policy.config, dataset_stats=make_stats(), dataset_meta=META)
    assert tokenizer_content((pre,)) == learn_tokenizer(SENTENCES, policy.config.vocabulary)


def test_a_vocabulary_holds_every_byte():
    with pytest.raises(UserError, match="vocabulary is 64.*257"):
        make_config(vocabulary=64)


def test_hashed_words_still_work():
    policy, batch = make_policy(text="hash"), make_batch(2)
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    assert policy.predict_action_chunk(pre(batch)).shape == (2, 8, 5)


@pytest.mark.parametrize("step", [HashTokenizerStep(), TokenizerStep(content=CONTENT)], ids=["hash", "bpe"])
def test_tokens_lie_where_the_state_does(step):
    """The step stands behind the one that moves a batch to the policy's device."""
    state = torch.zeros(1, 1, device="meta")
    out = step({"observation": {"observation.state": state}, "complementary_data": {"task": ["grab the cup"]}})
    for key in (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK):
        assert out["observation"][key].device == state.device
