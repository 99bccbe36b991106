"""Columns of a dataset: LeRobot feature descriptions from a robot's description, and their parquet types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from vla_stack.data.layout import ROBOT, read_json
from vla_stack.errors import UserError
from vla_stack.schema import (
    ACTION,
    CAPTURE_TIME,
    DONE,
    JOINT_COMMAND,
    OBS_STATE,
    REWARD,
    SUCCESS,
    RobotSpec,
    SchemaError,
    image_key,
)

Features = dict[str, dict[str, Any]]
ImageMode = Literal["video", "image"]
INDEX_FEATURES: Features = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
NUMERIC = ("float32", "float64", "int64", "int32", "int16", "int8", "uint16", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class Column:
    """An extra value recorded with every frame.

    Attributes:
        dtype: numpy name of its type, one of ``NUMERIC``.
        shape: ``(n,)``; ``(1,)`` is a scalar, as in LeRobot.
        names: Names of its entries, if they have any.
    """

    dtype: str
    shape: tuple[int] = (1,)
    names: tuple[str, ...] | None = None

    def feature(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape), "names": list(self.names) if self.names else None}


def robot_features(
    spec: RobotSpec, image_mode: ImageMode, joints: tuple[str, ...], extra: Mapping[str, Column]
) -> Features:
    """LeRobot features of everything that a recorder of this robot writes, in column order.

    Raises:
        UserError: An extra column has a name that is taken or that LeRobot would mistake, or a type it cannot store.
    """
    images: Features = {
        image_key(c.name): {
            "dtype": image_mode,
            "shape": [c.height, c.width, 3],
            "names": ["height", "width", "channels"],
        }
        for c in spec.cameras
    }
    fixed = {
        OBS_STATE: Column("float32", (len(spec.state),), tuple(d.name for d in spec.state)),
        ACTION: Column("float32", (len(spec.action),), tuple(d.name for d in spec.action)),
        CAPTURE_TIME: Column("float64"),
        REWARD: Column("float32"),
        DONE: Column("bool"),
        SUCCESS: Column("bool"),
    }
    if joints:
        fixed[JOINT_COMMAND] = Column("float32", (len(joints),), joints)
    for name, column in extra.items():
        if name in fixed or name in INDEX_FEATURES or name in images or name == "task" or "/" in name:
            raise UserError(f"extra column '{name}' has a reserved name", "give it another one, without '/'")
        if name.startswith(("action", "observation")):
            raise UserError(
                f"extra column '{name}' would be taken for a policy's input or output",
                "use a prefix other than 'action' and 'observation', e.g. 'command.'",
            )
        if column.dtype not in NUMERIC or len(column.shape) != 1:
            raise UserError(
                f"extra column '{name}' is {column.dtype}{list(column.shape)}",
                f"use one of {', '.join(NUMERIC)} and a shape such as (1,)",
            )
    columns = {name: c.feature() for name, c in (*fixed.items(), *extra.items())}
    return images | columns | {k: dict(v) for k, v in INDEX_FEATURES.items()}


def arrow_type(feature: Mapping[str, Any]) -> pa.DataType:
    """Parquet type of a feature: scalars flat, vectors as fixed-size lists, images as encoded bytes."""
    if feature["dtype"] == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.bool_() if feature["dtype"] == "bool" else pa.from_numpy_dtype(np.dtype(feature["dtype"]))
    (size,) = feature["shape"]
    return kind if size == 1 else pa.list_(kind, size)


def arrow_column(values: np.ndarray, feature: Mapping[str, Any]) -> pa.Array:
    """One column of an episode: ``values`` is [T, n], or [T] for a scalar."""
    (size,) = feature["shape"]
    flat = pa.array(values.reshape(-1))
    return flat if size == 1 else pa.FixedSizeListArray.from_arrays(flat, size)


def read_robot_spec(root: str | Path) -> RobotSpec:
    """The robot that a dataset was recorded on, from ``meta/robot.json``.

    Raises:
        UserError: The dataset has no such file: it was not recorded with this project.
        SchemaError: The file is malformed.
    """
    path = Path(root) / ROBOT
    if not path.exists():
        raise UserError(
            f"{path} is missing: the dataset does not say what its numbers mean on a robot",
            "write it once with RobotSpec.to_json(): units, limits and control rate of each dimension",
        )
    try:
        return RobotSpec.from_json(read_json(path))
    except SchemaError as e:
        raise SchemaError(f"{path}: {e}") from e
