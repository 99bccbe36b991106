"""A LeRobot policy directory, read so that whatever is wrong with it is said in one line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors
from draccus.utils import DraccusException
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from lerobot.configs import PreTrainedConfig
from lerobot.policies import PreTrainedPolicy, make_pre_post_processors

from vla_stack.errors import UserError
from vla_stack.policies.allowed import check_numbers, check_processor, check_type, read_json
from vla_stack.policies.registry import is_known, known_types, policy_class
from vla_stack.policies.weights import check_weights, find_weights, first_line, not_on_hub

CONFIG = "config.json"
PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
MEND = "mend that value, or use another checkpoint"


def read_config(source: str | Path, device: str) -> PreTrainedConfig:
    """The configuration of a policy directory or hub repository, for ``device``.

    Raises:
        UserError: There is none, it is no JSON, or one of its keys or values does not belong there.
    """
    where = f"{source}/{CONFIG}"
    if Path(source).is_dir() and not (Path(source) / CONFIG).is_file():
        remedy = "give a checkpoint's pretrained_model folder"
        raise UserError(f"{source} holds no policy ({CONFIG} is missing)", remedy)
    try:
        file = Path(source) / CONFIG if Path(source).is_dir() else Path(hf_hub_download(str(source), CONFIG))
        _check_keys(read_json(file), where)
        return PreTrainedConfig.from_pretrained(source, cli_overrides=[f"--device={device}"])
    except json.JSONDecodeError as e:
        raise UserError(f"{where} is damaged: {e}", "copy it again, or use another checkpoint") from None
    except UserError as e:
        raise UserError(e.message if where in e.message else f"{where}: {e.message}", e.remedy or MEND) from None
    except DraccusException as e:
        raise UserError(f"{where}: {_spoken(e)}", MEND) from None
    except (OSError, HFValidationError) as e:  # the latter: no repository can have that name
        raise UserError(*not_on_hub(source, CONFIG, e)) from None
    except (ValueError, TypeError, NotImplementedError) as e:  # what a configuration refuses in its own checks
        raise UserError(f"{where}: {first_line(e)}", MEND) from None


def read_policy(source: str | Path, config: PreTrainedConfig, **known: Any) -> PreTrainedPolicy:
    """The policy of a directory or hub repository, in evaluation mode.

    Args:
        source: The directory or repository.
        config: Its configuration.
        known: Further arguments of the policy's constructor.

    Raises:
        UserError: The weights are missing, damaged, or those of another model; a package is not installed.
    """
    file = find_weights(source)
    check_weights(file)
    try:
        with fetching(config.type):
            return policy_class(config.type).from_pretrained(source, config=config, strict=True, **known)
    except RuntimeError as e:
        if "loading state_dict" not in str(e):
            raise
        detail = " ".join(str(e).splitlines()[1].split())
        remedy = "config and weights must come from the same training"
        raise UserError(f"{file} does not fit its {CONFIG}: {detail}", remedy) from None


def read_processors(
    path: Path, config: PreTrainedConfig, device: str, embodiment: int | None = None
) -> tuple[Any, Any]:
    """Pre- and post-processor of a policy directory.

    Args:
        path: The directory.
        config: Its configuration.
        device: Torch device of the preprocessor's results.
        embodiment: Which of the policy's robots all samples are of; None for a policy of one, and in training.

    Raises:
        UserError: They are missing or cannot be read.
    """
    for name in PROCESSORS:
        if not (path / name).is_file():
            raise UserError(f"{path} holds no {name}", "copy the whole pretrained_model folder")
    try:
        for name in PROCESSORS:
            check_processor(path / name)
        overrides: dict[str, Any] = {"device_processor": {"device": device}}
        if embodiment is not None:
            overrides["embodiment_input_processor"] = {"serve": embodiment}
        return make_pre_post_processors(config, str(path), preprocessor_overrides=overrides)
    except (OSError, ValueError, KeyError, TypeError, ImportError, safetensors.SafetensorError) as e:
        remedy = "copy the whole pretrained_model folder, tokenizer included"
        raise UserError(f"{path}: the processors cannot be read: {first_line(e)}", remedy) from None


@contextmanager
def fetching(kind: str) -> Iterator[None]:
    """Says in one line that a file cannot be had which a policy type downloads when it is made: a tokenizer, say.

    Raises:
        UserError: Instead of any ``OSError``.
    """
    try:
        yield
    except OSError as e:
        remedy = "connect once (some repositories want `hf auth login`), or name local directories in policy.options"
        raise UserError(f"policy '{kind}' needs a file of the hub: {first_line(e)}", remedy) from None


def _check_keys(tree: Any, where: str) -> None:
    """The keys of a configuration, before a parser that names no alternative sees them."""
    if not isinstance(tree, dict):
        raise UserError(f"it holds a {type(tree).__name__}, a policy's configuration is a mapping of keys to values")
    check_numbers(tree, where)
    check_type(tree, where)
    if not is_known(str(tree.get("type"))):
        remedy = f"the types are {', '.join(known_types())}"
        raise UserError(f"'type' is {tree.get('type')!r}, no policy type known here", remedy)
    allowed = [f.name for f in fields(PreTrainedConfig.get_choice_class(tree["type"])) if f.init]
    for key in tree:
        if key != "type" and key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.0)[0]
            remedy = f"remove it (the nearest key is '{near}'), or use the version that wrote it"
            raise UserError(f"policy '{tree['type']}' has no key '{key}'", remedy)


def _spoken(error: DraccusException) -> str:
    """A parser's complaint as one line: the key, and its innermost reason."""
    text = " ".join(str(error).split())
    keys = re.findall(r"`([\w.]+)`:", text)
    reason = re.sub(r".*`[\w.]+`: ", "", text)
    return f"'{'.'.join(keys)}': {reason}" if keys else reason
