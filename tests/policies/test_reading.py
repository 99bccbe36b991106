"""Damaged policy directories: one line that names the file, the key and what to do."""

import json
import os
import tempfile

import pytest
from safetensors.torch import load_file, save_file

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import WEIGHTS
from vla_stack.policies.reading import read_config


@pytest.fixture
def directory(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) and caught.value.remedy
    return str(caught.value).replace(str(path), "DIR")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"widht": 32}, "policy 'vla' has no key 'widht' -- remove it (the nearest key is 'width')"),
        ({"type": "vlaa"}, "'type' is 'vlaa', no policy type known here -- the types are act, "),
        ({"width": "wide"}, "'width': Couldn't parse 'wide' into an int"),
        ({"vision_channels": [8, "x"]}, "'vision_channels.1': Couldn't parse 'x' into an int"),
        ({"normalization_mapping": {"STATE": "HUH"}}, "'normalization_mapping': "),
        ({"input_features": {"observation.state": {"type": "FOO", "shape": [1]}}}, "'input_features."),
        ({"n_action_steps": 900}, "n_action_steps is 900, it must lie in 1 ... chunk_size=8"),
    ],
)
def test_configuration(directory, change, says):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    assert refusal(directory).startswith(f"DIR/config.json: {says}")


@pytest.mark.parametrize("text", ["", "{'a': 1}", '{"type": "vla", "width": 3'])
def test_configuration_that_is_no_json(directory, text):
    (directory / "config.json").write_text(text)
    assert refusal(directory).startswith("DIR/config.json is damaged: Expecting ")


def test_configuration_that_is_no_mapping(directory):
    (directory / "config.json").write_text("[1]")
    assert refusal(directory).startswith("DIR/config.json: it holds a list")


def test_weights_cut_short(directory):
    weights = directory / WEIGHTS
    whole = weights.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert refusal(directory).startswith("DIR/model.safetensors is damaged: ")


def test_adapters_without_their_policy(directory):
    (directory / WEIGHTS).unlink()
    (directory / "adapter_config.json").write_text("{}")
    assert refusal(directory) == (
        "DIR holds adapters alone (adapter_config.json) -- merge them into their base policy and save that"
    )


def test_weights_of_another_policy(directory):
    weights = load_file(directory / WEIGHTS)
    first = next(iter(weights))
    for change in ({first: weights[first][:1]}, {first: None}, {"of_another": weights[first].clone()}):
        changed = {k: v.contiguous() for k, v in (weights | change).items() if v is not None}
        save_file(changed, directory / WEIGHTS)
        text = refusal(directory)
        assert text.startswith("DIR/model.safetensors does not fit its config.json: ")
        assert first in text or "of_another" in text


@pytest.mark.parametrize("name", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_processors(directory, name):
    (directory / name).write_text("{")
    assert "processors cannot be read" in refusal(directory)
    steps = {"name": "policy_preprocessor", "steps": [{"registry_name": "of_another_project", "config": {}}]}
    (directory / name).write_text(json.dumps(steps))
    assert "of_another_project" in refusal(directory)
    (directory / name).unlink()
    assert refusal(directory).startswith(f"DIR holds no {name}")


def test_statistics_cut_short(directory):
    file = next(directory.glob("policy_preprocessor*normalizer*.safetensors"))
    file.write_bytes(file.read_bytes()[:50])
    assert refusal(directory).startswith(f"DIR/{file.name} is damaged: its header would have ")


@pytest.mark.parametrize("name", ["nobody/nothing", "no/such/directory"])
def test_a_repository_that_cannot_be_had(name):
    """The hub is off in tests; a name with two slashes cannot be one of its."""
    with pytest.raises(UserError, match=rf"'{name}' is no directory.*config\.json.*local directory"):
        read_config(name, "cpu")


def test_loading_leaves_nothing_in_the_temporary_directory(directory, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    load_policy(directory)
    assert not os.listdir(tempfile.tempdir)
