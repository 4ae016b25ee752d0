"""Look into a checkpoint: names, shapes, sizes, norms, versions. Imports no torch, so that it starts at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import hypot, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.checkpoint.disk import index, publish
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk.datafile import DataFile
from megalight.checkpoint.disk.files import CODES, PathLike, blocks, parse_json, read_file
from megalight.checkpoint.disk.index import TensorInfo
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
                nbytes = prod(chunk.size) * CODES[info.dtype][1]
                for (start, stop), digest in zip(blocks(nbytes), chunk.sums, strict=True):
                    raw = np.frombuffer(file.block(chunk.start + start, chunk.start + stop, digest), np.uint8)
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
