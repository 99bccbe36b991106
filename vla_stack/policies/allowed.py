"""What the files of a policy directory may name, checked before LeRobot reads them.

LeRobot's pipelines import any class that a processor file names and call it with any arguments; some of its policy
types and steps load code from a repository that the file names. Here a file chooses among our own types and steps,
those of packages that somebody installed to bring some, and those of LeRobot below, which map tensors to tensors.
Others take ``--trust NAME``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.processor import ProcessorStepRegistry

from vla_stack.errors import UserError
from vla_stack.policies.registry import is_extension, is_known
from vla_stack.policies.weights import STATE_FILE, check_weights
from vla_stack.registry import POLICIES
from vla_stack.trust import check_trusted

LARGEST_CONFIG = 1 << 20  # bytes of a JSON file that describes a policy; the largest known have some thousand
LARGEST_NUMBER = 100_000_000  # of a configuration's whole numbers, in place of a process that dies of its memory
LEROBOTS = ("act", "multi_task_dit", "tdmpc", "vqbet")  # policy types that we add nothing to
STEPS = (
    *("to_batch_processor", "to_batch_processor_action", "to_batch_processor_observation"),
    *("to_batch_processor_complementary_data", "device_processor", "rename_observations_processor"),
    *("normalizer_processor", "unnormalizer_processor", "observation_processor", "tokenizer_processor"),
    *("relative_actions_processor", "absolute_actions_processor", "image_crop_resize_processor"),
    *("map_tensor_to_delta_action_dict", "map_delta_action_to_robot_action"),
    *("torch2numpy_action_processor", "numpy2torch_action_processor"),
    *("smolvla_new_line_processor", "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"),
)


def read_json(file: Path) -> Any:
    """A JSON file of a policy directory.

    Raises:
        UserError: It is larger or nested deeper than any configuration.
        json.JSONDecodeError: It is no JSON.
    """
    if file.stat().st_size > LARGEST_CONFIG:
        raise UserError(f"{file} has {file.stat().st_size} bytes, a configuration at most {LARGEST_CONFIG}")
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise UserError(f"{file} is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{file} is no text ({e.reason})") from None


def check_type(tree: Any, where: str) -> None:
    """Refuse a configuration of a policy type that can run code of a repository; unknown types are the parser's.

    Raises:
        UserError: It is no extension's (:func:`is_extension`), neither registered here nor in ``LEROBOTS``, and not
            trusted.
    """
    if not isinstance(tree, dict):
        return
    kind = str(tree.get("type"))
    if kind not in (*LEROBOTS, *POLICIES.built_in()) and is_known(kind):
        if not is_extension(PreTrainedConfig.get_choice_class(kind)):
            check_trusted(kind, f"{where}: 'type' is")
    for key in ("base", "encoder"):  # a policy around another one has that one's configuration in its own
        check_type(tree.get(key), where)


def check_numbers(tree: Any, where: str) -> None:
    """Refuse whole numbers that no configuration has, wherever they stand in it."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            check_numbers(value, where)
    elif isinstance(tree, int) and abs(tree) > LARGEST_NUMBER:
        raise UserError(f"{where}: a value is {tree}, expected at most {LARGEST_NUMBER}")


def check_processor(file: Path) -> None:
    """Refuse a processor file with a step that is not known, or whose state lies elsewhere.

    Raises:
        UserError: A step is not in the registry, neither an extension's nor in ``STEPS``, and not trusted; a state file
            is missing, outside the directory or damaged.
        json.JSONDecodeError: It is no JSON.
    """
    tree = read_json(file)
    steps = tree.get("steps") if isinstance(tree, dict) else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise UserError(f"{file} is no description of a processor", "copy the whole pretrained_model folder")
    for i, step in enumerate(steps):
        where = f"{file}: step {i}"
        name, path = step.get("registry_name"), step.get("class")
        if not isinstance(name if "registry_name" in step else path, str):
            raise UserError(f"{where} names no step", "copy the whole pretrained_model folder")
        if "registry_name" not in step:
            check_trusted(str(path), f"{where} is the class")
        elif name not in ProcessorStepRegistry.list():
            raise UserError(f"{where} is '{name}', no processor step known here", "use the version that wrote it")
        elif name not in STEPS and not is_extension(ProcessorStepRegistry.get(name)):
            check_trusted(name, f"{where} is")
        if "state_file" in step:
            _check_state(file.parent, step["state_file"], where)


def _check_state(directory: Path, name: Any, where: str) -> None:
    if not isinstance(name, str) or not STATE_FILE.fullmatch(name):
        raise UserError(f"{where} keeps its state in {name!r}", "it has to be a .safetensors file of the same folder")
    if not (directory / name).is_file():
        raise UserError(f"{where}: {directory / name} is missing", "copy the whole pretrained_model folder")
    check_weights(directory / name)
