"""No file of a policy directory names a program: what it may name is checked before LeRobot reads it."""

import json
import struct
import sys

import pytest
from lerobot.processor import ProcessorStepRegistry

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import LARGEST as LARGEST_CONFIG
from vla_stack.policies.directory import WEIGHTS
from vla_stack.policies.reading import LARGEST_HEADER, LARGEST_NUMBER, MOST_TENSORS
from vla_stack.policies.registry import LEROBOTS, STEPS
from vla_stack.trust import VARIABLE, check_module, trust


@pytest.fixture
def directory(saved, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def add_step(directory, step, name="policy_preprocessor.json"):
    tree = json.loads((directory / name).read_text())
    tree["steps"].insert(0, step)
    (directory / name).write_text(json.dumps(tree))


def refusal(directory) -> str:
    with pytest.raises(UserError) as caught:
        load_policy(directory)
    return str(caught.value)


@pytest.mark.parametrize("file", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_a_class_in_a_processor_file_is_not_imported(directory, tmp_path, file, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_step.py").write_text("raise SystemExit('imported')")
    add_step(directory, {"class": "evil_step.Step", "config": {}}, file)
    text = refusal(directory)
    assert f"{file}: step 0 is the class 'evil_step.Step'" in text and "--trust evil_step.Step" in text
    assert "evil_step" not in sys.modules


def test_a_trusted_class_is_loaded(directory, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "good_step.py").write_text(
        "from lerobot.processor import IdentityProcessorStep\nclass Step(IdentityProcessorStep): pass\n"
    )
    add_step(directory, {"class": "good_step.Step", "config": {}})
    trust(["good_step.Step"])
    assert type(load_policy(directory).preprocessor.steps[0]).__name__ == "Step"


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"registry_name": "action_tokenizer_processor", "config": {"action_tokenizer_name": "./x"}}, "can run code"),
        ({"registry_name": "reward_classifier_processor", "config": {}}, "can run code"),
        ({"registry_name": "of_nobody", "config": {}}, "'of_nobody', no processor step known here"),
        ({"registry_name": ["normalizer_processor"], "config": {}}, "names no step"),
        ({"config": {}}, "names no step"),
        ({"registry_name": "normalizer_processor", "state_file": "../x.safetensors"}, "keeps its state in"),
        ({"registry_name": "normalizer_processor", "state_file": "/etc/passwd"}, "keeps its state in"),
        ({"registry_name": "normalizer_processor", "state_file": "of_nobody.safetensors"}, "is missing"),
        ("subprocess.Popen", "is no description of a processor"),
    ],
)
def test_steps_that_are_refused(directory, step, says):
    add_step(directory, step)
    assert says in refusal(directory)


def test_a_type_that_loads_code_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    for change in ({"type": "pi0_fast"}, {"type": "moh", "base": {"type": "groot"}}):
        (directory / "config.json").write_text(json.dumps(config | change))
        assert "config.json: 'type' is" in refusal(directory) and "--trust" in refusal(directory)


def test_what_is_allowed_exists():
    from lerobot.configs import PreTrainedConfig

    assert set(STEPS) <= set(ProcessorStepRegistry.list()) and set(LEROBOTS) <= set(
        PreTrainedConfig.get_known_choices()
    )


def test_files_are_bounded_before_they_are_read(directory):
    config = (directory / "config.json").read_text()
    for text, says in (
        (config + " " * LARGEST_CONFIG, "a configuration at most"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(json.loads(config) | {"width": LARGEST_NUMBER + 1}), "expected at most"),
    ):
        (directory / "config.json").write_text(text)
        assert says in refusal(directory)
    (directory / "config.json").write_text(config)
    for header, says in (
        (struct.pack("<Q", 2**63), "its header would have"),
        (struct.pack("<Q", LARGEST_HEADER + 1) + b" " * (LARGEST_HEADER + 9), "its header would have"),
        (
            struct.pack("<Q", len(many := json.dumps(dict.fromkeys(range(MOST_TENSORS + 1), 0)).encode())) + many,
            "names",
        ),
        (struct.pack("<Q", 8) + b"[[[[[[[[", "is damaged"),
    ):
        (directory / WEIGHTS).write_bytes(header)
        assert "model.safetensors is damaged: " in refusal(directory) and says in refusal(directory)


def test_environments_of_files(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    for env_id in ("sim/pick-v0", "sim:sim/pick-v0", "CartPole-v1", "imagined:outputs/run"):
        check_module(env_id, "x")
    with pytest.raises(UserError, match="--trust antigravity"):
        check_module("antigravity:CartPole-v1", "x")
    trust(["antigravity"])
    check_module("antigravity:CartPole-v1", "x")
