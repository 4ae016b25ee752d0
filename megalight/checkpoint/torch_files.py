"""The format ``fsdp_dtensor`` on disk: files that torch's own Distributed Checkpoint (DCP) reads, beside our index.

Each chunk is stored as ``torch.save`` stores a tensor: its elements inside a small zip archive. The index says where
the elements lie, so that Megalight reads them alone, and unpickles nothing. ``.metadata`` is DCP's own index, a pickle:
it is written for torch, and never read here.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megalight.checkpoint import pickles
from megalight.checkpoint.checksum import blocks, checksum
from megalight.checkpoint.files import TORCH_METADATA, TORCH_SUFFIX, FileRecord, write_all, write_file
from megalight.checkpoint.index import Chunk, TensorInfo
from megalight.checkpoint.memory import dtype_name
from megalight.checkpoint.writer import Writer


@dataclass(frozen=True)
class TorchChunk(Chunk):
    """A chunk inside an archive of ``torch.save``; ``archive``: where that starts in the file, and its bytes."""

    archive: tuple[int, int]


class TorchWriter(Writer):
    """Writes files that ``torch.distributed.checkpoint.load`` reads, and our index."""

    suffix = TORCH_SUFFIX

    def _write(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        results, position, frames = [], 0, bytearray()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for item in items:
                assert item.tensor_data is not None
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                archive = archived(tensor)
                first, last = elements_of(io.BytesIO(archive))
                data = memoryview(archive)[first:last]
                sums = tuple(checksum(data[start:stop]) for start, stop in blocks(len(data)))
                write_all(descriptor, archive)
                frames += archive[:first] + archive[last:]
                chunk = TorchChunk(
                    tuple(item.tensor_data.chunk.offsets),
                    tuple(item.tensor_data.chunk.sizes),
                    name,
                    item.index.fqn,
                    position + first,
                    sums,
                    (position, len(archive)),
                )
                dtype = dtype_name(item.tensor_data.properties.dtype)
                info = TensorInfo(item.index.fqn, tuple(item.tensor_data.size), dtype, (chunk,))
                results.append(WriteResult(item.index, len(data), info))
                position += len(archive)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.records[name] = FileRecord(position, checksum(bytes(frames)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, as for every format, and the same for DCP."""
        super().finish(metadata, results)
        paths = {name: torch_path(name) for name in metadata.state_dict_metadata}
        keys = {name: ".".join(path) for name, path in paths.items()}
        infos = [result.storage_data for rank in results for result in rank]
        theirs = Metadata(
            {keys[name]: stored for name, stored in metadata.state_dict_metadata.items()},
            planner_data={keys[name]: path for name, path in paths.items()},
            storage_data={
                MetadataIndex(keys[info.name], torch.Size(chunk.offset)): _StorageInfo(chunk.file, *chunk.archive)
                for info in infos
                for chunk in info.chunks
            },
            storage_meta=StorageMeta(),
        )
        self.records[TORCH_METADATA] = write_file(self.directory / TORCH_METADATA, pickles.dumps(theirs))


def torch_path(name: str) -> tuple[str, ...]:
    """Return the keys that lead to a canonical tensor in torch's nested ``state_dict``.

    They are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``, which go by the parameter's name:
    ``model.X`` is ``["model"]["X"]``, and ``optimizer.exp_avg.model.X`` is ``["optimizer"]["state"]["X"]["exp_avg"]``.
    """
    kind, found, parameter = name.partition("model.")
    if not found:
        return (name,)
    first, _, state = kind.removesuffix(".").partition(".")
    return (
        ("optimizer", "state", parameter, state)
        if first == "optimizer"
        else (kind.removesuffix(".") or "model", parameter)
    )


def archived(tensor: Tensor) -> bytes:
    """Return what ``torch.save`` writes for the tensor, without the rest of the memory that it is a view of."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), buffer)
    return buffer.getvalue()


def elements_of(archive: io.BufferedIOBase) -> tuple[int, int]:
    """Return the first byte of a tensor's elements in an archive of ``torch.save``, and the byte behind the last."""
    with zipfile.ZipFile(archive) as opened:
        (info,) = (info for info in opened.infolist() if info.filename.endswith("/data/0"))
    # a local header has 30 bytes, and then a name and padding, whose lengths stand at its end
    archive.seek(info.header_offset + 26)
    name, padding = (int.from_bytes(archive.read(2), "little") for _ in range(2))
    first = info.header_offset + 30 + name + padding
    return first, first + info.file_size
