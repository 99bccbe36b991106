"""``vla data import`` of a LeRobot dataset: its degrees and percent as radians and ratios, and what robot they are of.

LeRobot's tools record an arm in degrees and a gripper in percent, or all in percent of each joint's calibrated range
(``use_degrees=false``), and the dataset does not say which. Drivers here speak SI units, so a policy that learnt from
such numbers fits no robot. The new dataset has them in SI units and says so in ``meta/robot.json``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vla_stack.data import digests
from vla_stack.data import stats as statistics
from vla_stack.data.building import built
from vla_stack.data.dataset import Dataset, open_dataset, read_parquet
from vla_stack.data.digests import write_json, write_parquet
from vla_stack.data.edit import update_stats
from vla_stack.data.features import arrow_column
from vla_stack.data.layout import ROBOT, STAGING, read_json
from vla_stack.errors import UserError
from vla_stack.lerobot_units import UNITS, dimension_names, factors, unit_of
from vla_stack.schema import ACTION, OBS_STATE, Camera, Dim, RobotSpec

TICKS = 4095  # of a turn of Feetech's motors, which are those that LeRobot's drive_mode turns round
TURN = 2.01 * np.pi  # rad, farther than which no joint is from its middle
OVER = 0.05  # of its range, by which a gripper may be beyond its calibrated ends


@dataclass(frozen=True)
class Imported:
    """A dataset as it was written.

    Attributes:
        episodes: How many.
        robot: What its numbers mean.
        low: Least value of each dimension of the action, SI units.
        high: Largest value.
    """

    episodes: int
    robot: RobotSpec
    low: NDArray[np.float32]
    high: NDArray[np.float32]


def import_lerobot(
    source: Path,
    target: Path,
    units: Mapping[str, str] | None = None,
    calibration: Mapping[str, Path] | None = None,
) -> Imported:
    """Write a dataset of LeRobot's anew, in SI units; the new one is there whole or not at all.

    Args:
        source: A LeRobotDataset v3 without ``meta/robot.json``.
        target: The new dataset's folder.
        units: Feature -> unit in :data:`~vla_stack.lerobot_units.UNITS`, where it is not that of
            :func:`~vla_stack.lerobot_units.unit_of`.
        calibration: Of a dataset in percent of the joints' ranges (-100 to 100): what the names of an arm's joints
            begin with in the dataset, nothing where there is one arm, -> its calibration file.

    Raises:
        UserError: The dataset says already what its numbers mean, names a feature whose unit is unknown, or holds
            values that cannot be in these units; the target exists.
    """
    units = units or {}
    if target.exists():
        raise UserError(f"{target} exists", "import into a new folder")
    dataset = open_dataset(source)
    if (source / ROBOT).exists():
        raise UserError(f"{source / ROBOT} says what the dataset's numbers mean", "it can be trained on as it is")
    scale = {arm + joint: by for arm, file in (calibration or {}).items() for joint, by in _ranges(file).items()}
    found: dict[str, NDArray[np.float32]] = {}
    dims: dict[str, tuple[Dim, ...]] = {}
    for key in (OBS_STATE, ACTION):
        if key not in dataset.columns:
            raise UserError(f"{source} has no '{key}'", "both are needed to tell what the numbers mean")
        if (names := dimension_names(dataset.features[key])) is None:
            raise UserError(f"{source}: '{key}' does not name its dimensions", "write their names into meta/info.json")
        dims[key] = tuple(_dim(name, units) for name in names)
        factor = factors(names, units)
        for i, dim in enumerate(dims[key] if calibration else ()):
            if dim.unit == "rad" and dim.name not in units:
                if dim.name not in scale:
                    files = ", ".join(map(str, calibration.values())) if calibration else ""
                    remedy = (
                        "give the arm's own file; of two arms, --calibration left_=A.json --calibration right_=B.json"
                    )
                    raise UserError(f"{files} has no '{dim.name.removesuffix('.pos')}'", remedy)
                factor[i] = scale[dim.name]
        found[key] = (dataset.columns[key] * factor).astype(np.float32)
        _check(dims[key], found[key], source, scaled=bool(calibration))
    cameras = tuple(Camera(name, *dataset.image_size(name)) for name in dataset.cameras)
    name = f"lerobot/{dataset.info.get('robot_type') or 'robot'}"
    robot = RobotSpec(name, dims[OBS_STATE], dims[ACTION], cameras, dataset.fps)
    with built(target, "importing") as work:
        kept = shutil.ignore_patterns(STAGING, Path(digests.DIGESTS).name, "chunk_stats")
        shutil.copytree(source, work, dirs_exist_ok=True, ignore=kept)
        for path in dict.fromkeys(dataset.data_file(e) for e in range(dataset.num_episodes)):
            table = read_parquet(path)
            rows = table["index"].to_numpy()
            for key, values in found.items():
                table = _with(table, key, arrow_column(values[rows], dataset.features[key]))
            write_parquet(work, path.relative_to(source).as_posix(), table)
        _write_stats(work, dataset, found)
        write_json(work, ROBOT, robot.to_json())
        digests.seal(work)
    return Imported(dataset.num_episodes, robot, found[ACTION].min(0), found[ACTION].max(0))


def _dim(name: str, units: Mapping[str, str]) -> Dim:
    unit = UNITS[unit_of(name, units)][1]
    if unit == "ratio":
        return Dim(name, unit, 0.0, 1.0, kind="gripper")
    return Dim(name, unit, kind="angle" if unit == "rad" else "position")


def _ranges(calibration: Path) -> dict[str, float]:
    """Factor to radians of each joint of a calibration file, whose values are percent of half its range.

    LeRobot puts zero in the middle of the range, in degrees as in percent.
    """
    joints = read_json(calibration)
    try:
        half = {n: (c["range_max"] - c["range_min"]) * np.pi / TICKS for n, c in joints.items() if n != "gripper"}
        turned = {n: -1.0 if joints[n].get("drive_mode") else 1.0 for n in half}
        return {f"{name}.pos": turned[name] * half[name] / 100 for name in half}
    except (AttributeError, KeyError, TypeError):
        raise UserError(
            f"{calibration} is no calibration of LeRobot's",
            "it lies in ~/.cache/huggingface/lerobot/calibration and has range_min and range_max of each joint",
        ) from None


def _check(dims: Sequence[Dim], values: NDArray[np.float32], source: Path, scaled: bool) -> None:
    """Refuse values that are not in the units that they are taken to be in."""
    for dim, low, high in zip(dims, values.min(0), values.max(0), strict=True):
        if dim.unit == "rad" and max(-low, high) > TURN:
            reads, unit = f"{np.rad2deg(low):.0f} to {np.rad2deg(high):.0f} degrees", "rad"
        elif dim.kind == "gripper" and (low < -OVER or high > 1 + OVER):
            reads, unit = f"{100 * low:.0f} to {100 * high:.0f} percent", "deg"
        else:
            continue
        how = f"say what it is, e.g. --unit {dim.name}={unit}" + " or another --calibration" * scaled
        raise UserError(f"{source}: '{dim.name}' would be from {reads}", how)


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def _write_stats(work: Path, dataset: Dataset, found: Mapping[str, NDArray[np.float32]]) -> None:
    """Statistics of the columns, of each episode and of all."""
    for path in sorted((work / "meta" / "episodes").glob("*/*.parquet")):
        table = read_parquet(path)
        for key, values in found.items():
            spans = [(dataset.episode_from[e], dataset.episode_to[e]) for e in table["episode_index"].to_pylist()]
            rows = [statistics.column_stats(values[a:b]) for a, b in spans]
            for name in rows[0]:
                if (column := f"stats/{key}/{name}") in table.column_names:
                    kind = table[column].type
                    table = _with(table, column, pa.array([r[name].tolist() for r in rows], kind))
        write_parquet(work, path.relative_to(work).as_posix(), table)
    update_stats(work, dict(found))
