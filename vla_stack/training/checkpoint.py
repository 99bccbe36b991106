"""Checkpoints that survive kill -9: a directory appears under its name only when every byte of it is on the disk.

    checkpoints/000500/pretrained_model/   LeRobot policy directory; holds the averaged weights if there is an average
                       training_state/     optimizer, raw weights, and state.json: step, loader, checksums of all files
    checkpoints/last -> 000500

Everything is safetensors or JSON. Random numbers need no state here: they are a function of (seed, step), see ``loop``.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vla_stack.errors import UserError, first_line
from vla_stack.policies.directory import write_manifest
from vla_stack.training.ema import Ema
from vla_stack.training.placement import gathered

PRETRAINED = "pretrained_model"
STATE = "training_state"
_STATE_FILE = f"{STATE}/state.json"
_OPTIMIZER_FILE = f"{STATE}/optimizer.safetensors"
_REPLACED = ".replaced-"
_RAW_FILE = f"{STATE}/model.safetensors"


def path(root: Path, step: int) -> Path:
    """Directory of the checkpoint after ``step`` steps."""
    return root / f"{step:06d}"


def commit(root: Path, step: int, fill: Callable[[Path], None], state: dict[str, Any], keep: int) -> Path:
    """Write checkpoint ``root/<step>`` as one atomic act and drop the oldest beyond ``keep``, and damaged later ones.

    Args:
        root: The run's ``checkpoints`` directory.
        step: Optimiser steps done.
        fill: Writes ``pretrained_model/`` and ``training_state/`` under the directory it is given.
        state: JSON data kept in ``state.json``.
        keep: Number of checkpoints to keep, this one included.

    Returns:
        The checkpoint's directory.

    Raises:
        UserError: Writing failed, on a full disk say; the checkpoints before it are as they were.
    """
    root.mkdir(parents=True, exist_ok=True)
    _settle(root)
    sweep(root)
    tmp, target = root / f".tmp-{step:06d}", path(root, step)
    try:
        (tmp / STATE).mkdir(parents=True)
        fill(tmp)
        write_manifest(tmp / PRETRAINED)
        files = {str(p.relative_to(tmp)): [p.stat().st_size, _crc(p)] for p in sorted(tmp.rglob("*")) if p.is_file()}
        (tmp / _STATE_FILE).write_text(json.dumps({"step": step, **state, "files": files}, indent=1))
        for written in (*tmp.rglob("*"), tmp):
            _fsync(written)
        if target.exists():  # damaged, or of the same step, as all of an offline training are
            os.rename(target, root / f"{_REPLACED}{target.name}")
        os.rename(tmp, target)
        link = root / ".tmp-last"
        link.symlink_to(target.name)
        os.replace(link, root / "last")
        _fsync(root)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(tmp, ignore_errors=True)
        _settle(root)
        left = sorted(p.name for p in _steps(root))
        kept = f"checkpoint {left[-1]} is intact" if left else "there is none before it"
        raise UserError(
            f"{target} cannot be written ({first_line(e)}); {kept}",
            f"free disk space, then: vla train --resume {root.parent}",
        ) from e
    _settle(root)
    steps = [int(p.name) for p in _steps(root)]
    # After a fall back there are damaged ones of later steps: they are no reason to drop what has just been written.
    later = [s for s in steps if s > step and _damage(path(root, s))]
    for old in (*[s for s in steps if s <= step][:-keep], *later):
        _discard(path(root, old))
    return target


def latest(root: Path) -> Path | None:
    """Newest intact checkpoint under ``root``; None if there is no checkpoint at all.

    Damaged ones are passed over with a warning.

    Raises:
        UserError: There are checkpoints and all of them are damaged.
    """
    _settle(root)
    checkpoints = _steps(root)
    for checkpoint in reversed(checkpoints):
        damage = _damage(checkpoint)
        if not damage:
            return checkpoint
        warnings.warn(f"checkpoint {checkpoint} is damaged ({damage}); trying the one before", stacklevel=2)
    if checkpoints:
        raise UserError(f"every checkpoint in {root} is damaged", f"delete {root} to train from the beginning")
    return None


def sweep(root: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for left in root.glob(".tmp-*"):
        left.unlink() if left.is_symlink() else shutil.rmtree(left)


def _settle(root: Path) -> None:
    """Drop what has been replaced, or put it back where a kill came before what replaces it had its name."""
    for old in root.glob(f"{_REPLACED}*"):
        target = root / old.name.removeprefix(_REPLACED)
        shutil.rmtree(old) if target.exists() else os.rename(old, target)


def state_of(
    policy: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None, keep: bool = True
) -> dict[str, dict[str, Tensor]]:
    """Optimiser and, where the policy directory holds averaged weights, the raw ones, by the file that they go to.

    Tensors of which every process has a part are gathered one after the other; all ask for them, and whoever is to
    ``keep`` them has them in the CPU's memory. All others are the policy's and the optimiser's own.
    """
    parameters = trainable(policy)

    def kept(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors:
            whole = gathered(tensor.detach())
            if keep:
                found[name] = whole.to("cpu", copy=True) if isinstance(tensor, DTensor) else whole
        return found

    slots = ((f"{key}/{name}", _own(v, p)) for name, p in parameters.items() for key, v in optimizer.state[p].items())
    state = {_OPTIMIZER_FILE: kept(slots)}
    if ema is not None:
        state[_RAW_FILE] = kept(iter(parameters.items()))
    return state


def save_state(directory: Path, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write what :func:`state_of` gave."""
    for file, tensors in state.items():
        _save(tensors, directory / file)


def load_state(directory: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, Any]:
    """Inverse of :func:`save_state`, on a policy that was loaded from the checkpoint's ``pretrained_model``.

    Returns:
        The content of ``state.json``.

    Raises:
        UserError: The run was trained with an average and the recipe asks for none, or the other way round.
    """
    if (directory / _RAW_FILE).exists() != (ema is not None):
        raise UserError(f"{directory} was written with ema {'off' if ema else 'on'}", "resume with the run's own ema")
    parameters = trainable(policy)
    for slot, value in load_file(directory / _OPTIMIZER_FILE).items():
        key, _, name = slot.partition("/")
        p = parameters[name]
        optimizer.state[p][key] = _placed(value, p, optimizer)
    if ema is not None:
        ema.restart()  # the policy directory's weights are the average
        raw = load_file(directory / _RAW_FILE)
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(_shared(raw[name], p))
    return json.loads((directory / _STATE_FILE).read_text())


def trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training changes, by name."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)


def _own(value: Tensor | int, parameter: Tensor) -> Tensor:
    """A slot as a tensor of its own: 8-bit AdamW counts steps in an int, and its parameters share a table."""
    value = torch.as_tensor(value)
    return value if value.shape == parameter.shape else value.clone()


def _placed(value: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | int:
    """A slot as the optimiser keeps it."""
    if not value.ndim:
        if not value.is_floating_point():
            return int(value)
        return value.to(parameter.device if optimizer.defaults["fused"] else "cpu")
    if value.dtype != parameter.dtype or value.shape != parameter.shape:  # quantised, or a table of its scales
        return value.to(parameter.device)
    # In the parameter's own memory layout: the fused update walks both side by side.
    return torch.empty_like(parameter).copy_(_shared(value, parameter))


def _shared(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor that every process has read, shared as a parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _steps(root: Path) -> list[Path]:
    return sorted((p for p in root.glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name))


def _damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        files = json.loads((checkpoint / _STATE_FILE).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"{_STATE_FILE} is missing or unreadable"
    for name, (size, crc) in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _crc(file) != crc:
            return f"{name} has a wrong checksum"
    return ""


def _discard(checkpoint: Path) -> None:
    """Delete; the rename first, so that a kill in between leaves no half checkpoint under a checkpoint's name."""
    trash = checkpoint.with_name(f".tmp-old-{checkpoint.name}")
    os.rename(checkpoint, trash)
    shutil.rmtree(trash)


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as f:
        while block := f.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _fsync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
