"""Weights in 8 or 4 bits with scales, as published models store them: widened box by box while they are read.

- FP8 with a scale per block of ``128 x 128`` (DeepSeek, Kimi, Qwen): ``X`` in ``float8_e4m3fn`` and ``X_scale_inv``. A
  value is the stored number times the scale of its block.
- FP8 of ModelOpt (``hf_quant_config.json``): ``X`` and ``X_scale``: one number, one for each row, or for each block.
- MXFP4 (GPT-OSS, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): ``X_blocks``
  ``[..., rows, groups, 16]`` and ``X_scales`` ``[..., rows, groups]``. A group has 32 numbers of 4 bits along a row,
  the first of each pair in the low bits, and one power of two. ``transformers`` has the widened weight with columns
  before rows, and so it is shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from megalight.checkpoint.boxes import read_box
from megalight.checkpoint.disk.datafile import OpenFile
from megalight.checkpoint.disk.files import PathLike, TensorEntry
from megalight.checkpoint.foreign.transformers_folder import CONFIG, json_of
from megalight.errors import CheckpointError

FP8 = "_scale_inv"
FP8_MODELOPT = "_scale"
UNUSED = (".input_scale", ".k_scale", ".v_scale")
"""Scales of what is not a weight: activations keep their dtype, and keys and values get scales of their own."""
BLOCKS, SCALES = "_blocks", "_scales"
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8")
QUANT_CONFIG = "hf_quant_config.json"
METHODS = (None, "fp8", "mxfp4", "modelopt")

GROUP = 32
"""Numbers of MXFP4 that share a scale."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits (E2M1)."""

SLAB = 4 << 20
"""Elements that are widened at a time, at least one row of blocks."""

Open = Callable[[str], OpenFile]


class StoredTensor(Protocol):
    """A tensor of a folder, and how it is read."""

    @property
    def file(self) -> str:
        """The file that holds it; scales may be in another."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the widened tensor."""

    @property
    def dtype(self) -> str:
        """The dtype of what is read."""

    def read(self, files: Open, offset: Sequence[int], data: Tensor) -> None:
        """Fill ``data``, of any dtype, device and strides, with the box that begins at ``offset``."""


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is stored as it is."""

    file: str
    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredTensor.shape`."""
        return self.entry.shape

    @property
    def dtype(self) -> str:
        """See :attr:`StoredTensor.dtype`."""
        return self.entry.dtype

    def read(self, files: Open, offset: Sequence[int], data: Tensor) -> None:
        """See :meth:`StoredTensor.read`."""
        kind = getattr(torch, self.entry.dtype)
        read_box(files(self.file), self.entry.start, kind, self.entry.shape, offset, data)


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in FP8 with a scale per block."""

    values: PlainTensor
    scales: PlainTensor
    block: tuple[int, int]
    dtype: str = "bfloat16"

    @property
    def file(self) -> str:
        """See :attr:`StoredTensor.file`."""
        return self.values.file

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`StoredTensor.shape`."""
        return self.values.shape

    def read(self, files: Open, offset: Sequence[int], data: Tensor) -> None:
        """See :meth:`StoredTensor.read`; blocks that the box does not touch are not read."""
        wide, (height, width) = _wide(data), self.block
        columns = torch.arange(offset[1], offset[1] + data.shape[1]) // width
        # A whole number of blocks, so that a scale serves all of its rows at once; or a part of a large one.
        step = max(1, SLAB // data.shape[1])
        step = step // height * height or step
        # slabs begin where blocks do, so that no row of scales is read for two of them
        start = offset[0] // height * height if step >= height else offset[0]
        edges = range(start, offset[0] + len(data), step)
        for edge in edges:
            low, high = max(edge, offset[0]), min(edge + step, offset[0] + len(data))
            values = torch.empty(high - low, data.shape[1], dtype=getattr(torch, self.values.dtype))
            self.values.read(files, (low, offset[1]), values)
            rows = torch.arange(low, high) // height
            # Only scales of touched blocks: a box may be a small part of a large matrix.
            scales = torch.empty(int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1, dtype=wide)
            self.scales.read(files, (int(rows[0]), int(columns[0])), scales)
            spread = scales[:, columns - columns[0]][rows - rows[0]]
            data[low - offset[0] : high - offset[0]].copy_(spread.mul_(values.to(wide)))

    @property
    def of_rows(self) -> RowScales | None:
        """The scales of each row; None: blocks do not divide the columns."""
        (rows, columns), (height, width) = self.shape, self.block
        return None if columns % width else RowScales(self.scales, height, (rows, columns // width))


@dataclass(frozen=True)
class RowScales:
    """The scales of a matrix in FP8, repeated for each row."""

    scales: PlainTensor
    height: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def file(self) -> str:
        """See :attr:`StoredTensor.file`."""
        return self.scales.file

    def read(self, files: Open, offset: Sequence[int], data: Tensor) -> None:
        """See :meth:`StoredTensor.read`."""
        rows = torch.arange(offset[0], offset[0] + len(data)) // self.height
        found = torch.empty(int(rows[-1] - rows[0]) + 1, data.shape[1], dtype=torch.float32)
        self.scales.read(files, (int(rows[0]), offset[1]), found)
        data.copy_(found[rows - rows[0]])


@dataclass(frozen=True)
class Microscaled:
    """Matrices in MXFP4."""

    blocks: PlainTensor
    scales: PlainTensor
    dtype: str = "bfloat16"

    @property
    def file(self) -> str:
        """See :attr:`StoredTensor.file`."""
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., columns, rows]``; see the top of this file."""
        *lead, rows, groups = self.scales.shape
        return (*lead, groups * GROUP, rows)

    def read(self, files: Open, offset: Sequence[int], data: Tensor) -> None:
        """See :meth:`StoredTensor.read`; groups that the box does not touch are not read."""
        *lead, column, row = offset
        columns, rows = data.shape[-2:]
        # A group is the smallest unit, as its scale holds for all of its numbers.
        first, last = column // GROUP, -(-(column + columns) // GROUP)
        step = max(1, SLAB // ((last - first) * GROUP))
        table = torch.tensor(FP4, dtype=_wide(data))
        for index in product(*(range(extent) for extent in data.shape[:-2])):
            place = tuple(a + b for a, b in zip(lead, index, strict=True))
            for low in range(0, rows, step):
                high = min(low + step, rows)
                box = (*(1 for _ in index), high - low, last - first)
                packed, powers = torch.empty(*box, GROUP // 2, dtype=torch.uint8), torch.empty(box, dtype=torch.uint8)
                self.blocks.read(files, (*place, row + low, first, 0), packed)
                self.scales.read(files, (*place, row + low, first), powers)
                # the format's own dtype makes exact powers of two, also below the normal numbers, and NaN of 255
                scale = powers.view(torch.float8_e8m0fnu).to(table.dtype).unsqueeze(-1)
                # The first of a pair is in the low bits.
                pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
                values = (table[pairs.int()] * scale).view(high - low, -1)
                cut = values[:, column - first * GROUP :][:, :columns]
                # Transposed at last: it is stored with rows first, and shown with columns first.
                data[index][:, low:high].copy_(cut.t())


def quantization_of(folder: PathLike) -> Mapping[str, Any]:
    """Return how the weights of a folder are packed: ``quantization_config``, or what older releases of ModelOpt wrote.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found: Mapping[str, Any] | None = json_of(folder / CONFIG).get("quantization_config")
    if found is None and (folder / QUANT_CONFIG).is_file():
        return {"quant_method": "modelopt"}
    return found or {}


def stored(
    entries: Mapping[str, tuple[str, TensorEntry]], quantized: Mapping[str, Any], where: str
) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name, with packed ones in place of their parts.

    Args:
        entries: name -> file and header entry.
        quantized: how they are packed; see :func:`quantization_of`.
        where: the folder, for messages.

    Raises:
        CheckpointError: scales are missing or of a wrong shape, or weights are packed in another way, or integers.
    """
    method = quantized.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"{where} has weights packed by {method!r}; those packed by fp8, mxfp4 and modelopt (FP8) are widened. "
            "Save the model without quantization."
        )
    plain = {name: PlainTensor(file, entry) for name, (file, entry) in entries.items()}
    found: dict[str, StoredTensor] = {}
    for name, tensor in plain.items():
        base = next((name.removesuffix(end) for end in (FP8, SCALES, FP8_MODELOPT) if name.endswith(end)), None)
        if base is not None and (base in plain or base + BLOCKS in plain):
            continue  # scales come with their values
        if method is not None and name.endswith(UNUSED):
            continue
        if tensor.dtype in EIGHT_BITS:
            scales = plain.get(name + FP8) or plain.get(name + FP8_MODELOPT)
            found[name] = _block_scaled(name, tensor, scales, _block(quantized, where), where)
        elif name.endswith(BLOCKS) and tensor.dtype == "uint8":
            base = name.removesuffix(BLOCKS)
            found[base] = _microscaled(name, tensor, plain.get(base + SCALES), where)
        elif tensor.dtype in INTEGERS and name.endswith("weight"):
            raise CheckpointError(
                f"{name} in {where} is in {tensor.dtype}, as quantized weights are, and its numbers are no weights "
                "without their scales. Save the model without quantization."
            )
        else:
            found[name] = tensor
    return found


def _block(quantized: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return rows and columns of a block."""
    match quantized.get("weight_block_size"):
        case None:
            return 128, 128
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise CheckpointError(
                f"quantization_config.weight_block_size in {where}/config.json is {other!r}; it must be two positive "
                "numbers, rows and columns of a block, such as [128, 128]. Correct the file, or download it again."
            )


def _block_scaled(
    name: str, values: PlainTensor, scales: PlainTensor | None, block: tuple[int, int], where: str
) -> BlockScaled:
    if scales is None:
        raise CheckpointError(
            f"{name} in {where} is in {values.dtype} and has no {name.rpartition('.')[2]}{FP8} or {FP8_MODELOPT}; only "
            "weights with scales are widened."
        )
    shape = scales.shape
    match shape, values.shape:
        case ((() | (1,)), (int(rows), int(columns))):
            block, shape = (rows, columns), (1, 1)
        case (((int(count),) | (int(count), 1)), (int(rows), int(columns))) if count == rows:
            block, shape = (1, columns), (rows, 1)
        case (int(high), 1, int(wide), 1), _:
            shape = (high, wide)
    expected = tuple(-(-n // size) for n, size in zip(values.shape, block, strict=False))
    if len(values.shape) != 2 or shape != expected or scales.dtype in INTEGERS:
        raise CheckpointError(
            f"the scales of {name} in {where} are {scales.dtype} {list(scales.shape)}; float {list(expected)} is "
            f"expected for {list(values.shape)} in blocks of {list(block)}."
        )
    return BlockScaled(values, replace(scales, entry=replace(scales.entry, shape=expected)), block)


def _microscaled(name: str, blocks: PlainTensor, scales: PlainTensor | None, where: str) -> Microscaled:
    if scales is None or scales.dtype != "uint8" or blocks.shape != (*scales.shape, GROUP // 2):
        shape = None if scales is None else list(scales.shape)
        raise CheckpointError(
            f"{name} in {where} has shape {list(blocks.shape)} and scales {shape}; MXFP4 has a scale (uint8) for each "
            f"{GROUP // 2} bytes."
        )
    return Microscaled(blocks, scales)


def _wide(data: Tensor) -> torch.dtype:
    """Products are rounded once, to float32 or to what is asked for if that is wider."""
    return torch.promote_types(data.dtype, torch.float32)
