"""What computes a policy does not change what it answers."""

import numpy as np
import pytest
import torch
from small_vla import make_config, make_observations, make_policy, make_stats

from vla_stack.errors import UserError
from vla_stack.policies.backends import load_with
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import Continuation


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    policy = make_policy(max_delay=3)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(path)
    return path


@pytest.fixture
def compiled(directory, monkeypatch):
    """A policy as if compiled, which itself would take a minute; its parts refuse what would be compiled anew."""

    def compile_(function, dynamic):
        assert dynamic is False

        def compiled(*args):
            assert not any(
                isinstance(value, (str, list)) for arg in args if isinstance(arg, dict) for value in arg.values()
            )
            return function(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    return load_with("compile", directory, "cpu", batch_sizes=(1, 4))


def test_a_compiled_policy_is_given_whole_batches_and_answers_the_same(directory, compiled, monkeypatch):
    plain, seen = load_with("torch", directory, "cpu"), []
    predict = compiled.policy.predict_action_chunk
    monkeypatch.setattr(
        compiled.policy, "predict_action_chunk", lambda b, noise, **o: seen.append(len(noise)) or predict(b, noise, **o)
    )
    observations = make_observations(5)
    for n in (1, 2, 4, 5):  # more than the largest goes as it is
        wanted = plain.infer(observations[:n], range(n)).actions
        np.testing.assert_allclose(compiled.infer(observations[:n], range(n)).actions, wanted, atol=1e-5)
    assert seen == [1, 4, 4, 5]
    plans = [Continuation("prefix", a[1:], 2, 2) for a in wanted[:3]]
    got = compiled.infer(observations[:3], range(3), plans).actions
    np.testing.assert_allclose(got, plain.infer(observations[:3], range(3), plans).actions, atol=1e-5)


def test_of_a_mixture_of_horizons_prefix_and_branches_are_compiled(tmp_path, monkeypatch):
    config = MohConfig(base=make_config(max_delay=3), horizons=(2, 5, 8), device="cpu", push_to_hub=False)
    policy = MohPolicy(config).eval()
    policy.base.load_state_dict(make_policy(max_delay=3).state_dict())
    for part in (policy, *make_moh_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    ran = []
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: lambda *args: ran.append(f.__name__) or f(*args))
    observations, chunks = make_observations(2), load_with("compile", tmp_path, "cpu")
    plain = load_with("torch", tmp_path, "cpu").infer(observations, range(2)).actions
    np.testing.assert_allclose(chunks.infer(observations, range(2)).actions, plain, atol=1e-5)
    assert ran == ["encode", *["mix"] * 3]
    ran.clear()
    for mode in ("prefix", "rtc", "bid"):
        chunks.infer(observations, range(2), [Continuation(mode, a[1:], 2, 2) for a in plain])
    assert ran == ["encode", *["mix"] * 3] * 3


def test_a_directory_that_the_backend_does_not_take_is_named(directory, tmp_path):
    with pytest.raises(UserError, match="holds no exported graphs.*vla export"):
        load_with("onnx", directory, "cpu")
    (tmp_path / "onnx.json").write_text("{}")
    with pytest.raises(UserError, match="is an exported policy, 'compile' needs its weights"):
        load_with("compile", tmp_path, "cpu")
