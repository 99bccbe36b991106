"""A LeRobot policy directory, read so that whatever is wrong with it is said in one line, and nothing in it runs.

LeRobot's pipelines import any class that a processor file names and call it with any arguments; some of its policy
types and steps load code from a repository that the file names. Here a file chooses among our own types and steps,
those of packages that somebody installed to bring some, and those of LeRobot in :mod:`vla_stack.policies.registry`,
which map tensors to tensors. Others take ``--trust NAME``. Every check of a file stands in this file, and precedes what
reads it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import draccus
import safetensors
import torch
from draccus.utils import DraccusException
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

import vla_stack.policies.processor_state  # noqa: F401  registers our steps, and processor_vla's
from vla_stack.errors import UserError, first_line
from vla_stack.lerobot_core import (
    PreTrainedConfig,
    PreTrainedPolicy,
    ProcessorStepRegistry,
    lerobot_types,
    make_pre_post_processors,
)
from vla_stack.policies.directory import (
    CONFIG,
    GRAPHS,
    STATISTICS,
    WEIGHTS,
    check_manifest,
    digest,
    not_on_hub,
    read_json,
    resolve_policy,
)
from vla_stack.policies.onnx_files import check_graph, read_manifest, replaces_weights
from vla_stack.policies.onnx_policy import OnnxPolicy
from vla_stack.policies.registry import LEROBOTS, STEPS, is_extension, is_known, known_types, policy_class
from vla_stack.registry import POLICIES
from vla_stack.trust import check_trusted

PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
PEFT = "adapter_config.json"  # of LeRobot's training with PEFT, which saves the adapters without the policy
STATE_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")  # of a processor step: a name, no path
LARGEST_NUMBER = 100_000_000  # of a configuration's whole numbers, in place of a process that dies of its memory
LARGEST_HEADER, MOST_TENSORS = 1 << 24, 1 << 16  # bytes and names; the largest VLAs need 1 % of them
MEND = "mend that value, or use another checkpoint"


class PolicyDirectory:
    """A policy directory that may be read: found, whole by its manifest, and with a configuration that was checked.

    Args:
        name: Any name that :func:`~vla_stack.policies.directory.resolve_policy` knows.
        device: Torch device, or ``auto``.
        graphs: Its graphs are what computes, also where there are weights.

    Attributes:
        device: The device, by its own name.
        path: Where it lies.
        digests: SHA-256 of its files.
        config: Its configuration, for the device.
        exported: Whether its graphs are what computes.

    Raises:
        UserError: There is no such device or directory, or something in it is not as it has to be.
    """

    def __init__(self, name: str | Path, device: str = "cpu", graphs: bool = False) -> None:
        self.device = str(find_device(device))
        self.path = resolve_policy(name)
        self.digests = check_manifest(self.path)
        self.config = read_config(self.path, self.device)
        self.exported = graphs or replaces_weights(self.path)
        if self.exported:
            check_graph(read_manifest(self.path), self.path, self.digests.get(WEIGHTS, ""))

    @property
    def version(self) -> str:
        """Digits of the SHA-256 of its weights; of its graphs where there are none."""
        return self.digests[WEIGHTS][:16] if WEIGHTS in self.digests else digest(self.path, GRAPHS)

    @property
    def normalisation(self) -> str:
        """Digits of the SHA-256 of its statistics."""
        return digest(self.path, STATISTICS)

    def policy(self) -> Any:
        """The policy, in evaluation mode."""
        return OnnxPolicy(self.path, self.config) if self.exported else read_policy(self.path, self.config)

    def processors(self, embodiment: int | None = None) -> tuple[Any, Any]:
        """Pre- and post-processor, see :func:`read_processors`."""
        return read_processors(self.path, self.config, self.device, embodiment)


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
        _check_keys(tree := read_json(file), where)
        # What LeRobot's `from_pretrained` does, which leaves a file behind in the temporary directory at every call.
        kind = PreTrainedConfig.get_choice_class(tree.pop("type"))
        with draccus.config_type("json"):
            return draccus.decode(kind, tree | {"device": device})
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


def find_device(name: str) -> torch.device:
    """A torch device by its name; ``auto`` is a GPU where there is one, else the CPU.

    LeRobot's configurations would take another device in its place, or refuse the name as one of their own keys.

    Raises:
        UserError: There is no such device on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        remedy = "'cpu' runs anywhere, 'auto' takes a GPU where there is one"
        raise UserError(f"device '{name}' is not available: {reason}", remedy) from None
    return device


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


def _spoken(error: DraccusException) -> str:
    """A parser's complaint as one line: the key, and its innermost reason."""
    text = " ".join(str(error).split())
    keys = re.findall(r"`([\w.]+)`:", text)
    reason = re.sub(r".*`[\w.]+`: ", "", text)
    return f"'{'.'.join(keys)}': {reason}" if keys else reason


# What files may hold ----------------------------------------------------------------------------------------------


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


def check_type(tree: Any, where: str) -> None:
    """Refuse a configuration of a policy type that can run code of a repository; unknown types are the parser's.

    Raises:
        UserError: It is no extension's (:func:`is_extension`), neither registered here nor in ``LEROBOTS``, and not
            trusted.
    """
    if not isinstance(tree, dict):
        return
    kind = str(tree.get("type"))
    if kind not in (*LEROBOTS, *POLICIES.built_in()):
        if kind in lerobot_types() or (is_known(kind) and not is_extension(PreTrainedConfig.get_choice_class(kind))):
            check_trusted(kind, f"{where}: 'type' is")
    is_known(kind)  # which registers it with the parser
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
        elif not _is_step(name):
            raise UserError(f"{where} is '{name}', no processor step known here", "use the version that wrote it")
        elif name not in STEPS and not is_extension(ProcessorStepRegistry.get(name)):
            check_trusted(name, f"{where} is")
        if "state_file" in step:
            _check_state(file.parent, step["state_file"], where)


def _is_step(name: str) -> bool:
    """Whether there is such a processor step; LeRobot's seldom ones are imported where none of that name is known."""
    if name not in ProcessorStepRegistry.list():
        import lerobot.policies
        import lerobot.processor  # noqa: F401
    return name in ProcessorStepRegistry.list()


def _check_state(directory: Path, name: Any, where: str) -> None:
    if not isinstance(name, str) or not STATE_FILE.fullmatch(name):
        raise UserError(f"{where} keeps its state in {name!r}", "it has to be a .safetensors file of the same folder")
    if not (directory / name).is_file():
        raise UserError(f"{where}: {directory / name} is missing", "copy the whole pretrained_model folder")
    check_weights(directory / name)


def find_weights(source: str | Path, revision: str | None = None) -> Path:
    """The weights of a policy directory, or of a hub repository (downloaded once, then from the cache).

    Raises:
        UserError: The directory or repository has none, or the hub cannot be reached.
    """
    if Path(source).is_dir():
        if not (Path(source) / WEIGHTS).is_file() and (Path(source) / PEFT).is_file():
            raise UserError(
                f"{source} holds adapters alone ({PEFT})", "merge them into their base policy and save that"
            )
        if not (Path(source) / WEIGHTS).is_file():
            raise UserError(f"{source} holds no weights ({WEIGHTS} is missing)", "give a pretrained_model folder")
        return Path(source) / WEIGHTS
    try:
        return Path(hf_hub_download(str(source), WEIGHTS, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as e:
        raise UserError(*not_on_hub(source, WEIGHTS, e)) from None


def check_weights(file: Path) -> None:
    """Read the header of a safetensors file, whose size is bounded before memory is spent on it.

    Raises:
        UserError: It is no safetensors file, or cut short.
    """
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > min(LARGEST_HEADER, file.stat().st_size - 8):
                raise ValueError(f"its header would have {size} bytes")
            count = len(json.loads(f.read(size)))
        if count > MOST_TENSORS:
            raise ValueError(f"it names {count} tensors")
        with safetensors.safe_open(file, framework="pt"):
            pass
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{file} is damaged: {first_line(e)}", "copy it again, or use another checkpoint") from None
