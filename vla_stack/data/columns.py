"""The columns of a dataset, read file by file: in memory, or in a nameless file beside it where they are many GB.

A mapped column is an array like any other; the kernel keeps in memory what is used and fits. ``release`` says that what
was read is not needed for now, so that a pass over everything takes no more memory than a part of it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vla_stack.data.features import NUMERIC
from vla_stack.errors import UserError

MAPPED = 1 << 30  # bytes of columns, from where on they are mapped
_READERS = 2  # files that are read at a time


class Columns(dict[str, NDArray[Any]]):
    """Column name -> [N, *shape], or [N] for scalars; empty until :func:`fill`.

    One that the dataset does not have is a :class:`~vla_stack.errors.UserError` that names it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._maps: list[mmap.mmap] = []
        self._files: dict[str, BinaryIO] = {}
        self.root: Path | None = None  # for messages

    def __missing__(self, name: str) -> NDArray[Any]:
        raise UserError(
            f"{self.root or 'the dataset'} has no column '{name}'", f"it has {', '.join(sorted(self)) or 'none'}"
        )

    def without(self, name: str) -> Columns:
        """The others of these columns, where they are."""
        rest = Columns()
        rest.update({other: column for other, column in self.items() if other != name})
        rest._maps, rest._files, rest.root = self._maps, self._files, self.root
        return rest

    def make(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], folder: Path | None) -> None:
        """Add a column, in memory or, if ``folder`` is given, in a file there."""
        if folder is None:
            self[name] = np.empty(shape, dtype)
            return
        file, size = _nameless(folder), int(np.prod(shape)) * dtype.itemsize
        file.truncate(size)
        self._files[name] = file
        self._maps.append(mmap.mmap(file.fileno(), size))
        self[name] = np.frombuffer(self._maps[-1], dtype).reshape(shape)

    def write(self, name: str, at: int, values: NDArray[Any]) -> None:
        """Set the rows from ``at`` on."""
        column = self[name]
        if (file := self._files.get(name)) is None:
            column[at : at + len(values)] = values
        else:  # through the mapping each page would be a fault
            data = memoryview(np.ascontiguousarray(values, column.dtype)).cast("B")
            offset = at * column.strides[0]
            while data:
                written = os.pwrite(file.fileno(), data, offset)
                data, offset = data[written:], offset + written

    def written(self) -> None:
        """Close the files; their mappings keep them."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def release(self) -> None:
        """Let go of the memory of mapped columns; what is read again comes from the file."""
        for part in self._maps:
            if hasattr(part, "madvise"):
                part.madvise(mmap.MADV_DONTNEED)


def fill(
    columns: Columns,
    features: Mapping[str, Mapping[str, Any]],
    frames: int,
    files: Sequence[Path],
    read: Callable[[Path], pa.Table],
    root: Path,
    first: Mapping[str, NDArray[Any]] | None = None,
) -> int:
    """Read the columns of some files, one after the other, into arrays of N = ``frames``; how many rows there are.

    Args:
        columns: Empty.
        features: LeRobot's features; columns are those with numbers.
        frames: N; what the files hold beyond is left out.
        files: Parquet files, in order.
        read: Reads one.
        root: Dataset folder.
        first: Column name -> its first rows, which the files hold what follows on.

    Raises:
        UserError: A file lacks a column, or one has empty values or another shape.
    """
    kinds = {name: feature for name, feature in features.items() if feature["dtype"] in NUMERIC}
    size = sum(frames * int(np.prod(ft["shape"])) * np.dtype(ft["dtype"]).itemsize for ft in kinds.values())
    columns.root, at = root, 0
    folder = root.parent if size >= MAPPED else None
    for name, values in (first or {}).items():
        columns.make(name, (frames, *values.shape[1:]), values.dtype, folder)
        columns.write(name, 0, values)
        at = len(values)
    for path, table in _tables(files, read):
        if missing := [name for name in kinds if name not in table.column_names]:
            raise UserError(
                f"{path} lacks the column '{missing[0]}'", "copy the file again: meta/info.json promises it"
            )
        table = table.slice(0, frames - at)
        for name, feature in kinds.items():
            values = _to_numpy(table[name], tuple(feature["shape"]), f"{root}: column '{name}'")
            if name not in columns:
                shape = (frames, *values.shape[1:])
                columns.make(name, shape, np.dtype(feature["dtype"]), folder)
            columns.write(name, at, values)
        at += table.num_rows
    columns.written()
    return at


def _tables(files: Sequence[Path], read: Callable[[Path], pa.Table]) -> Iterator[tuple[Path, pa.Table]]:
    with ThreadPoolExecutor(_READERS) as pool:
        jobs = [pool.submit(read, path) for path in files[:_READERS]]
        for i, path in enumerate(files):
            table = jobs.pop(0).result()
            if i + _READERS < len(files):
                jobs.append(pool.submit(read, files[i + _READERS]))
            yield path, table


def _nameless(folder: Path) -> BinaryIO:
    with suppress(OSError):
        return tempfile.TemporaryFile(dir=folder)  # type: ignore[return-value]
    return tempfile.TemporaryFile()  # type: ignore[return-value]


def _to_numpy(column: pa.ChunkedArray, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """A parquet column as one array, [N] for scalars, [N, *shape] otherwise."""
    if column.null_count:
        raise UserError(f"{where} has {column.null_count} empty values", "run `vla data check` to find their episodes")
    array = column.combine_chunks()
    if isinstance(array, pa.ExtensionArray):  # Array2D and the like, where the datasets library is loaded
        array = array.storage
    scalar = shape == (1,) and not pa.types.is_nested(array.type)
    count = len(array)
    while pa.types.is_nested(array.type):
        array = array.flatten()
    flat = _values(array)
    if not scalar and flat.size != count * int(np.prod(shape)):
        raise UserError(f"{where} does not hold {list(shape)} values in each row", "the file and meta/info.json differ")
    return flat.reshape(count if scalar else (count, *shape))


def _values(array: pa.Array) -> NDArray[Any]:
    """Of a flat array; where pyarrow need not convert them, without importing pandas for it."""
    if not len(array) or array.null_count or not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return array.to_numpy(zero_copy_only=False)
    size = array.type.bit_width // 8
    return np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype(), len(array), array.offset * size)
