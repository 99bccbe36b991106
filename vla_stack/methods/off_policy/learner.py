"""What the actor-learner loop needs of a method, and a learner's whole state as tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.methods.off_policy.deployed import Seen
from vla_stack.methods.replay_buffer import ReplayBuffer, Source

STATE, FACTS = "learner.safetensors", "learner.json"


class Learner(Protocol):
    """A method between its buffer and its networks.

    Attributes:
        store: Its buffer of online experience.
        offline: Stored episodes.
        modules: All networks.
        acting: The ones that acting needs: what is published to actors elsewhere.
        optimizers: Of the networks.
        rng: Source of its batches.
        pretrained: Offline steps done.
        horizon: Steps of a chunk.
        agent: Has the generators of noise: ``generator`` of updates and ``explorer`` of acting.
    """

    store: ReplayBuffer
    offline: ReplayBuffer
    modules: dict[str, nn.Module]
    acting: dict[str, nn.Module]
    optimizers: dict[str, Any]
    rng: np.random.Generator
    pretrained: int
    horizon: int
    agent: Any

    @property
    def pretrain_steps(self) -> int: ...
    @property
    def source(self) -> Source: ...
    def pretrain(self) -> dict[str, Tensor]: ...
    def random_in(self, source: Source) -> bool: ...
    def network(self, seen: Seen, source: Source | None = None) -> PreTrainedPolicy: ...
    def update(self) -> dict[str, Tensor]: ...


class Keeps(Protocol):
    """Has :meth:`state_dict` and its inverse."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Saved(Protocol):
    """What of a learner is saved; see :class:`Learner`."""

    @property
    def store(self) -> Keeps: ...

    modules: dict[str, nn.Module]
    optimizers: dict[str, Any]
    rng: np.random.Generator
    pretrained: int
    agent: Any


def weights(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters by ``module.name``; not copied."""
    return {f"{m}.{name}": p.detach() for m, module in modules.items() for name, p in module.state_dict().items()}


@torch.no_grad()
def load_weights(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Inverse of :func:`weights`, in place."""
    for name, p in weights(modules).items():
        p.copy_(tensors[name])


def save(learner: Saved, directory: Path) -> None:
    """Write weights, optimisers, buffer and random numbers to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"module.{name}": t.cpu().contiguous() for name, t in weights(learner.modules).items()}
    tensors |= {f"store.{name}": t for name, t in learner.store.state_dict().items()}
    for which, optimizer in learner.optimizers.items():
        for i, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{which}.{i}.{key}": t.cpu().contiguous() for key, t in slots.items()}
    for name in ("generator", "explorer"):
        tensors[f"generator.{name}"] = getattr(learner.agent, name).get_state()
    save_file(tensors, directory / STATE)
    facts = {"pretrained": learner.pretrained, "rng": learner.rng.bit_generator.state}
    (directory / FACTS).write_text(json.dumps(facts))


def load(learner: Saved, directory: Path) -> None:
    """Inverse of :func:`save`, for a learner of the same recipe."""
    tensors = load_file(directory / STATE)

    def under(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}

    load_weights(learner.modules, under("module."))
    learner.store.load_state_dict(under("store."))
    for which, optimizer in learner.optimizers.items():
        state: dict[int, dict[str, Tensor]] = {}
        for name, t in under(f"optimizer.{which}.").items():
            i, key = name.split(".")
            state.setdefault(int(i), {})[key] = t
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for name, t in under("generator.").items():
        getattr(learner.agent, name).set_state(t)
    facts = json.loads((directory / FACTS).read_text())
    learner.pretrained, learner.rng.bit_generator.state = facts["pretrained"], facts["rng"]
