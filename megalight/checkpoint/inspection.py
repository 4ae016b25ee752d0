"""What a checkpoint holds: read it, check its checksums, and compare two of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import hypot, prod, sqrt
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalight.checkpoint.disk import index, publish
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.datafile import DataFile
from megalight.checkpoint.disk.files import CODES, TORCH_SUFFIX, FileRecord, PathLike, blocks, parse_json, read_file
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.checkpoint.disk.manifest import read
from megalight.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointReport:
    """What is in a checkpoint.

    Attributes:
        path: the folder.
        tensors: by canonical name.
        norms: Euclidean norm of each tensor, where they were asked for.
        files: size in bytes of every file.
        progress: counters at the top of ``common`` (``global_step``, ``epoch`` ...).
        saved_at: seconds since 1970.
        world_size: ranks that saved it.
        versions: of the software that saved it.
        scheme: in which form tensors were written.
        layout: the parallel layout that saved it, as text; empty if it is not known.
    """

    path: PathLike
    tensors: Mapping[str, TensorInfo]
    norms: Mapping[str, float]
    files: Mapping[str, int]
    progress: Mapping[str, int | float | str]
    saved_at: float
    world_size: int
    versions: Mapping[str, str]
    scheme: str
    layout: str

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(info.numel for info in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def describe(path: str | os.PathLike[str], *, norms: bool = False) -> CheckpointReport:
    """Read a checkpoint's metadata; with ``norms`` also all of its files, each verified.

    Raises:
        CheckpointError: it is missing, unfinished, torn or foreign.
    """
    path = publish.place(path)
    root = publish.resolve(path)
    manifest = manifests.read(root)
    # Sizes of files alone: reading them would take as long as loading the checkpoint.
    manifests.check_files(root, manifest)
    records = dict(manifest.files)

    def small(name: str) -> bytes:
        if name not in records:
            raise CheckpointError(f"checkpoint {path} is malformed: its manifest does not list {name}.")
        return read_file(root, name, records[name])

    tensors = index.from_json(parse_json(small(index.NAME), index.NAME), f"{path}/{index.NAME}")
    common = parse_json(small("common.json"), "common.json")
    found: dict[str, float] = {}
    if norms:
        # Norms read all data, so that everything else is verified as well.
        found = _norms(root, manifest, tensors)
        for name in records:
            if not name.startswith("data/"):
                small(name)
    return CheckpointReport(
        path=path,
        tensors=tensors,
        norms=found,
        files={name: record.size for name, record in records.items()},
        progress=_progress(common),
        saved_at=manifest.saved_at / 1e9,
        world_size=manifest.world_size,
        versions=manifest.versions,
        scheme=manifest.scheme,
        layout=_layout(common),
    )


def to_json(report: CheckpointReport) -> dict[str, Any]:
    """The report as plain JSON values."""
    return {
        "path": str(report.path),
        "format": report.scheme,
        "layout": report.layout,
        "world_size": report.world_size,
        "versions": dict(report.versions),
        "saved_at": report.saved_at,
        "progress": dict(report.progress),
        "elements": report.numel,
        "bytes": report.nbytes,
        "files": dict(report.files),
        "tensors": {
            name: {"shape": list(info.shape), "dtype": info.dtype, "shards": len(info.chunks)}
            | ({"norm": report.norms[name]} if name in report.norms else {})
            for name, info in sorted(report.tensors.items(), key=lambda item: _natural(item[0]))
        },
    }


def _layout(common: Any) -> str:
    known = common.get("megalight", {}) if isinstance(common, dict) else {}
    layout = known.get("layout", "") if isinstance(known, dict) else ""
    return layout if isinstance(layout, str) else ""


def _progress(common: Any) -> dict[str, int | float | str]:
    # Bookkeeping only: nested entries are state of callbacks and loops.
    pairs = common.get("$dict", common.items()) if isinstance(common, dict) else ()
    return {key: value for key, value in pairs if isinstance(key, str) and type(value) in (int, float, str)}


def _norms(root: PathLike, manifest: manifests.Manifest, tensors: Mapping[str, TensorInfo]) -> dict[str, float]:
    """Block by block, file by file, in float64."""
    squares = dict.fromkeys(tensors, 0.0)
    by_file: dict[str, list[tuple[TensorInfo, index.Chunk]]] = {}
    for info in tensors.values():
        for chunk in info.chunks:
            by_file.setdefault(chunk.file, []).append((info, chunk))
    for name, parts in sorted(by_file.items()):
        with DataFile(root, name, dict(manifest.files)) as file:
            # Block sums are checked below, as each block is read anyway.
            file.verify(())
            for info, chunk in sorted(parts, key=lambda part: part[1].start):
                for place in _places(info, chunk):
                    raw = np.frombuffer(file.block(*place), np.uint8)
                    # float64: squares of large float32 values overflow.
                    squares[info.name] += float(np.square(floats(raw, info.dtype)).sum())
    return {name: sqrt(square) for name, square in squares.items()}


def floats(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """The numbers in raw bytes, also of types that numpy lacks. A complex number counts as two."""
    if dtype == "bfloat16":
        # bfloat16 is the upper half of float32.
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype in _FLOAT8:
        # A table of all 256 values: numpy has no such types.
        return np.array([_FLOAT8[dtype](byte) for byte in range(256)])[raw]
    return raw.view("float32" if dtype == "complex64" else dtype).astype(np.float64)


def _minifloat(byte: int, mantissa: int, bias: int) -> float:
    """The value of a byte of sign, exponent and mantissa, as in IEEE 754; ``_FLOAT8`` handles patterns for NaN."""
    exponent, fraction = (byte & 0x7F) >> mantissa, (byte & ((1 << mantissa) - 1)) / (1 << mantissa)
    size = float(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return -size if byte & 0x80 else size


# IEEE 754 has infinities; `e4m3fn` has none, and one pattern for NaN.
def _e5m2(byte: int) -> float:
    if (byte & 0x7C) == 0x7C:
        return float("nan") if byte & 3 else float("-inf" if byte & 0x80 else "inf")
    return _minifloat(byte, 2, 15)


_FLOAT8: dict[str, Callable[[int], float]] = {
    "float8_e4m3fn": lambda byte: float("nan") if (byte & 0x7F) == 0x7F else _minifloat(byte, 3, 7),
    "float8_e5m2": _e5m2,
    "float8_e8m0fnu": lambda byte: float("nan") if byte == 0xFF else 2.0 ** (byte - 127),
}


def _places(info: TensorInfo, chunk: Chunk) -> Iterator[tuple[int, int, str]]:
    """Yield start, stop and checksum of each block of a chunk, in its file."""
    for (start, stop), digest in zip(blocks(prod(chunk.size) * CODES[info.dtype][1]), chunk.sums, strict=True):
        yield chunk.start + start, chunk.start + stop, digest


def render(report: CheckpointReport, depth: int | None = None) -> str:
    """The report as text: a tree of names, then totals. Below ``depth`` levels, branches are summed up."""
    rows = list(_rows(report, depth))
    width = max((len(row[0]) for row in rows), default=0)
    lines = [f"{left:<{width}}  {right}".rstrip() for left, right in rows]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.saved_at))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    progress = ", ".join(f"{key} {value}" for key, value in report.progress.items())
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    lines += [
        "",
        f"{report.path}: {len(report.tensors)} tensors, {report.numel:,} elements, "
        f"{_bytes(report.nbytes)} in {len(report.files)} files",
        f"saved {saved} by {ranks}{f' ({report.layout})' if report.layout else ''} as {report.scheme} with {versions}",
    ]
    return "\n".join([*lines, progress] if progress else lines)


def _rows(report: CheckpointReport, depth: int | None) -> Iterator[tuple[str, str]]:
    shown: tuple[str, ...] = ()
    summed: dict[tuple[str, ...], list[TensorInfo]] = {}
    for name, info in sorted(report.tensors.items(), key=lambda item: _natural(item[0])):
        # Grouped by the first levels of the name, which keeps the sorted order.
        parts = tuple(name.split("."))
        summed.setdefault(parts[:depth] if depth else parts, []).append(info)
    for parts, infos in summed.items():
        for level in range(len(parts) - 1):
            if parts[: level + 1] != shown[: level + 1]:
                yield "  " * level + parts[level], ""
        shown = parts
        name = "  " * (len(parts) - 1) + parts[-1]
        size = _bytes(sum(info.nbytes for info in infos))
        norms = [report.norms[info.name] for info in infos if info.name in report.norms]
        norm = f"  norm {hypot(*norms):.6g}" if norms else ""
        if len(infos) == 1 and infos[0].name == ".".join(parts):
            (info,) = infos
            yield name, f"{list(info.shape)!s:<18} {info.dtype:<9} {size:>10}{norm}"
        else:
            yield name, f"{len(infos)} tensors, {sum(info.numel for info in infos):,} elements, {size}{norm}"


def _natural(name: str) -> list[tuple[bool, int, str]]:
    # Numbers as numbers: layer 10 comes after layer 9.
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass(frozen=True)
class Damage:
    """Something in a checkpoint that differs from what was saved.

    Attributes:
        file: the file, relative to the checkpoint.
        tensor: canonical name of the tensor, or None if the file as a whole is damaged.
    """

    file: str
    tensor: str | None
    problem: str

    def __str__(self) -> str:
        return f"{self.tensor} in {self.file}: {self.problem}" if self.tensor else f"{self.file}: {self.problem}"


def verify(path: str | os.PathLike[str]) -> list[Damage]:
    """Read a whole checkpoint and return what is damaged; empty if nothing is.

    A tensor is named once per file, however many of its blocks differ.
    """
    root = publish.resolve(path)
    try:
        # Without the manifest nothing is known of the rest.
        manifest = manifests.read(root)
    except (CheckpointError, OSError) as error:
        return [Damage(manifests.NAME, None, str(error))]
    records = dict(manifest.files)
    found = [damage for name in records if not name.startswith("data/") for damage in _small(root, name, records)]
    if any(damage.file == index.NAME for damage in found) or index.NAME not in records:
        return [*found, Damage(index.NAME, None, "tensors cannot be verified without it.")]
    try:
        data = read_file(root, index.NAME, records[index.NAME])
        tensors = index.from_json(parse_json(data, index.NAME), index.NAME)
    except CheckpointError as error:
        return [*found, Damage(index.NAME, None, str(error))]
    by_file: dict[str, list[tuple[TensorInfo, Chunk]]] = {name: [] for name in records if name.startswith("data/")}
    for info in tensors.values():
        for chunk in info.chunks:
            by_file.setdefault(chunk.file, []).append((info, chunk))
    return found + [damage for name, parts in sorted(by_file.items()) for damage in _data(root, name, records, parts)]


def _small(root: PathLike, name: str, records: Mapping[str, FileRecord]) -> Iterator[Damage]:
    try:
        read_file(root, name, records[name])
    except CheckpointError as error:
        yield Damage(name, None, str(error))


def _data(
    root: PathLike, name: str, records: Mapping[str, FileRecord], parts: list[tuple[TensorInfo, Chunk]]
) -> Iterator[Damage]:
    try:
        with DataFile(root, name, records) as file:
            try:
                # What lies around the blocks: headers and gaps.
                file.verify(())
                if file.path.suffix == TORCH_SUFFIX:
                    file.verify_around((c.start, c.start + prod(c.size) * CODES[i.dtype][1]) for i, c in parts)
            except CheckpointError as error:
                yield Damage(name, None, str(error))
            # In the order of the file: disks read forward faster.
            for info, chunk in sorted(parts, key=lambda part: part[1].start):
                # Each tensor by itself, so that all damaged ones are named.
                try:
                    file.verify_blocks(_places(info, chunk))
                except CheckpointError as error:
                    yield Damage(name, info.name, str(error))
    except (CheckpointError, OSError) as error:
        yield Damage(name, None, str(error))


@dataclass(frozen=True)
class Difference:
    """One tensor that differs.

    Attributes:
        ours, theirs: shape and dtype; None where a checkpoint lacks the tensor.
        relative: ``||a - b|| / ||a||`` (Euclidean norms, in float64), or None if values cannot be compared.
    """

    name: str
    ours: str | None
    theirs: str | None
    relative: float | None

    def __str__(self) -> str:
        if self.theirs is None or self.ours is None:
            return (
                f"{self.name}: only in the {'first' if self.theirs is None else 'second'} ({self.ours or self.theirs})"
            )
        kinds = "" if self.ours == self.theirs else f"{self.ours} and {self.theirs}"
        values = "" if self.relative is None else f"values differ by {self.relative:.3g} of the norm"
        return f"{self.name}: {', '.join(filter(None, (kinds, values)))}"


class Compared(Protocol):
    """One side of a comparison."""

    @property
    def tensors(self) -> Mapping[str, TensorKind]:
        """Shape and dtype by canonical name."""

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a whole tensor: its shape, and a last dim of 1 (2 if it is complex)."""


class TensorKind(Protocol):
    """What a tensor is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """The dtype by torch's name."""


class DiffSource:
    """A checkpoint of ours. Every byte that is read is verified.

    Raises:
        CheckpointError: it is missing, unfinished or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = publish.place(path)
        self.tensors = describe(path).tensors

    def values(self, name: str) -> NDArray[np.float64]:
        """See :meth:`Compared.values`."""
        return _values(self._path, self.tensors[name])


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[Difference]:
    """Compare all tensors of two checkpoints, of any layouts. Every byte of both is verified.

    Raises:
        CheckpointError: one of them is missing, unfinished or damaged.
    """
    return differences(DiffSource(one), DiffSource(other))


def differences(one: Compared, other: Compared, prefix: str = "") -> list[Difference]:
    """Compare the tensors of two sides whose names begin with ``prefix``.

    Raises:
        CheckpointError: a file is damaged.
    """
    a, b = one.tensors, other.tensors
    found = []
    for name in sorted(name for name in a.keys() | b.keys() if name.startswith(prefix)):
        ours, theirs = _kind(a.get(name)), _kind(b.get(name))
        relative = None
        if name in a and name in b and a[name].shape == b[name].shape:
            relative = _relative(one.values(name), other.values(name))
        if relative is None or relative > 0 or ours != theirs:
            found.append(Difference(name, ours, theirs, relative))
    return found


def _kind(info: TensorKind | None) -> str | None:
    return None if info is None else f"{list(info.shape)} {info.dtype}"


def _relative(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    # NaN in the same place is no difference.
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return 0.0
    norm, distance = sqrt(float(np.square(one).sum())), sqrt(float(np.square(one - other).sum()))
    return distance / norm if norm else float("inf")


def _values(path: PathLike, info: TensorInfo) -> NDArray[np.float64]:
    """A whole tensor, from all its chunks."""
    root = publish.resolve(path)
    records: Mapping[str, FileRecord] = read(root).files
    pairs = 2 if info.dtype == "complex64" else 1
    whole = np.empty((*info.shape, pairs))
    for chunk in info.chunks:
        with DataFile(root, chunk.file, dict(records)) as file:
            file.verify(())
            parts = [floats(np.frombuffer(file.block(*place), np.uint8), info.dtype) for place in _places(info, chunk)]
        box = tuple(slice(low, low + extent) for low, extent in zip(chunk.offset, chunk.size, strict=True))
        # A chunk without elements has no bytes to join.
        whole[box] = np.concatenate(parts).reshape(*chunk.size, pairs) if parts else 0
    return whole
