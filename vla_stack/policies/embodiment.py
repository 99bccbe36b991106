"""Several embodiments behind one set of weights.

State and action are padded with zeros to the largest embodiment, as in pi0 (Black et al. 2024, section IV) and RDT (Liu
et al. 2024); padded entries are masked on the way in and count in no loss. A camera that an embodiment lacks is a
masked slot. A learnt token in the prefix says whose numbers these are, since two embodiments may share pictures,
instruction and sizes and differ in what an action means (one arm, commanded in task space or by its joints). The
alternative, own input and output projections for each embodiment (HPT, Wang et al. 2024; GR00T N1, 2025), separates
embodiments more, but the layers of a pretrained expert no longer fit and each new robot starts with untrained ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from vla_stack.schema import RobotSpec

OBS_EMBODIMENT = "observation.embodiment"  # int64 [b], index into VlaConfig.embodiments


@dataclass(frozen=True)
class Embodiment:
    """One robot of a policy that drives several.

    Attributes:
        name: What ``--embodiment`` calls it.
        robot: What it measures and accepts.
        cameras: Camera slot of the policy -> camera of the robot.
        relative: One a dimension of ``robot.action``: learnt relative to the state at the chunk's start.
    """

    name: str
    robot: RobotSpec
    cameras: dict[str, str]
    relative: tuple[bool, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, as ``VlaConfig.embodiments`` holds it."""
        return {**asdict(self), "robot": self.robot.to_json(), "relative": list(self.relative)}

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> Embodiment:
        """Inverse of :meth:`to_json`."""
        return cls(d["name"], RobotSpec.from_json(d["robot"]), dict(d["cameras"]), tuple(map(bool, d["relative"])))


def relative_dims(robot: RobotSpec, exclude: Sequence[str]) -> tuple[bool, ...]:
    """Which action dimensions are learnt relative to the state, by LeRobot's rule: substrings of names are excluded.

    None are where actions are deltas already, or where not each of them is measured.
    """
    possible = robot.action_kind == "absolute" and len(robot.state) >= len(robot.action)
    return tuple(possible and not any(part.lower() in d.name.lower() for part in exclude) for d in robot.action)


def has_dims(sizes: Sequence[int], width: int) -> Bool[Tensor, "e width"]:
    """True on the first ``sizes[i]`` of ``width`` entries."""
    return torch.arange(width) < torch.tensor(sizes)[:, None]
