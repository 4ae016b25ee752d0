"""``transformers`` folders (``config.json`` and safetensors files) as a source of weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.boxes import host_buffer, in_threads
from megalight.checkpoint.disk.datafile import OpenFile
from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign.transformers_folder import (
    CONFIG,
    IMAGE_PROCESSOR,
    PROCESSOR,
    file_of,
    files_of,
    header,
    is_folder,
    json_of,
)
from megalight.checkpoint.loading import compare
from megalight.checkpoint.ranks import Ranks
from megalight.errors import CheckpointError
from megalight.models.hugging_face.quantized_weights import (
    BlockScaled,
    Open,
    PlainTensor,
    StoredTensor,
    quantization_of,
    stored,
)
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.parallel.source import FillReport, Target

log = logging.getLogger(__name__)

GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

LENIENT = "weights_keys='log' of a module (--weights-keys log of commands)"
"""What lets a module start from a folder with other tensors; for messages."""

COMPANIONS = (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    IMAGE_PROCESSOR,
    PROCESSOR,
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
    "chat_template.json",
    "video_preprocessor_config.json",
)
"""Files that go with the weights of a model, in a folder and in our checkpoints. None of them is code."""


UNREAD = "unread.safetensors"
"""Tensors of the folder that training began with which no run reads, in checkpoints: for folders that are exported."""

ROWS = 1024
"""Rows of a tensor and its copy that are compared at a time, which bounds the memory."""


@dataclass(frozen=True)
class FolderTensor:
    """A canonical tensor inside a folder.

    Attributes:
        shape: shape of the canonical tensor.
        dtype: torch's name of its dtype.
        stored: the stored tensor.
        place: which part of the stored tensor it is.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: StoredTensor
    place: TensorMapping


class Folder:
    """A folder that ``save_pretrained`` wrote, as a :class:`~megalight.parallel.source.Source`.

    The constructor reads the headers. A fill reads only the bytes of its boxes: its part of a fused weight, its columns
    of a transposed weight.

    Args:
        path: the folder, or its address in remote storage.
        weights: names and layouts of its tensors.
        prefix: added before every canonical name.
        strict: whether a tensor that has no counterpart in ``weights`` is an error. If not, it is skipped.
        remedy: what a user does about names and shapes that differ, if it is known why they do.

    Attributes:
        tensors: canonical name -> shape, dtype and place.
        skipped: the folder's names of tensors without a counterpart.
        bytes_read: bytes that this process has read so far.

    Raises:
        CheckpointError: a file is missing or incomplete, or holds tensors of another model.
    """

    def __init__(
        self, path: str | os.PathLike[str], weights: WeightMap, prefix: str, *, strict: bool = True, remedy: str = ""
    ) -> None:
        self.path = place(path)
        self.bytes_read = 0
        self._weights = weights
        self._prefix = prefix
        self._remedy = remedy
        files = files_of(self.path)
        entries = {entry.key: (name, entry) for name in files for entry in header(self.path, name)}
        self._total = sum(entry.nbytes for _, entry in entries.values())
        self.tensors: dict[str, FolderTensor] = {}
        # Packed weights appear here under the name and the shape of what they stand for.
        tensors = stored(entries, quantization_of(self.path) if is_folder(path) else {}, str(self.path))
        unknown: list[str] = []
        try:
            places = weights.ours(tensors, None if strict else unknown)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error} {remedy or f'{LENIENT} skips such tensors.'}") from error
        self.skipped = tuple(sorted(unknown))
        for name, theirs in places.items():
            found = tensors[theirs.name]
            self.tensors[prefix + name] = FolderTensor(theirs.shape(found.shape), found.dtype, found, theirs)
        self._check_fused()
        self._check_copies(tensors)

    def scales(self) -> Folder:
        """Return the scales of weights in FP8 as a source: ``[out, n]`` for a weight with ``n`` of them in each row."""
        found = copy(self)
        found.tensors = {
            name: FolderTensor(kept.place.shape(scales.shape), scales.dtype, scales, kept.place)
            for name, kept in self.tensors.items()
            if isinstance(kept.stored, BlockScaled) and not kept.place.transposed
            if (scales := kept.stored.of_rows) is not None
        }
        return found

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> FillReport:
        """Read this rank's boxes; see :meth:`megalight.parallel.source.Source.fill`.

        The format has no checksums, so only names, shapes and file sizes are checked, not values.
        """
        ranks, where = Ranks(process_group), str(self.path)
        boxes = [target for target in targets if target.data.numel()]
        asked = {target.name: target.shape for target in boxes}
        # Before any byte is read: an error is raised on all ranks, and no memory has changed.
        filled = compare(
            ranks,
            where,
            self.tensors,
            asked,
            strict=strict,
            prefix=prefix,
            label=self.label,
            lenient=LENIENT,
            remedy=self._remedy,
        )
        # group boxes by file, so that a job in a thread opens only one file
        by_file: dict[str, list[Target]] = {}
        for target in boxes:
            if target.name in self.tensors:
                by_file.setdefault(self.tensors[target.name].stored.file, []).append(target)
        counts: list[int] = []
        strange: list[str] = []
        read = partial(self._read, strange)
        # A failure on one rank is raised on all of them, instead of leaving them at the next collective.
        ranks.together(f"reading {where}", lambda: counts.extend(in_threads(read, sorted(by_file.items()))))
        self.bytes_read += sum(counts)
        warn_not_finite(where, map(self.label, strange))
        log.info(
            "read %.3f GiB of the %.3f GiB of weights in %s on rank %d",
            sum(counts) / 2**30,
            self._total / 2**30,
            where,
            ranks.rank,
        )
        return filled

    def _read(self, strange: list[str], file: str, targets: Sequence[Target]) -> int:
        """Fill boxes from one file (scales may be in others), and return the number of bytes read.

        Names of tensors with values that are not finite are added to ``strange``.
        """
        buffer, opened = host_buffer().numpy(), dict[str, OpenFile]()
        with ExitStack() as stack:

            def files(name: str) -> OpenFile:
                if name not in opened:
                    opened[name] = stack.enter_context(OpenFile(self.path / name, f"{self.path}/{name}", buffer))
                # Opened once per job, as a weight and its scales often share a file.
                return opened[name]

            for target in targets:
                kept = self.tensors[target.name]
                kept.place.read(partial(kept.stored.read, files), target.offset, target.data)
                if not is_finite(target.data):
                    strange.append(target.name)
        return sum(each.count for each in opened.values())

    def _check_copies(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Check that weights are equal which the files hold twice, and the model once."""
        with ExitStack() as stack:
            files = cache(lambda name: stack.enter_context(OpenFile(self.path / name, f"{self.path}/{name}")))
            for copy, original in self._weights.twice(tensors):
                pair = tensors[copy], tensors[original]
                if pair[0].shape != pair[1].shape or not all(_equal_rows(files, *pair)):
                    raise CheckpointError(
                        f"{self.path}: {copy} differs from {original}, and the configuration says that they are one "
                        f"weight. To use both, as transformers does, set tie_word_embeddings to false in {CONFIG}; "
                        f"else remove {copy} from the files."
                    )

    def _check_fused(self) -> None:
        """Check that the parts of each fused tensor cover all its rows, and those of a stack all its entries."""
        last: dict[str, int] = {}
        for kept in self.tensors.values():
            if kept.place.rows is not None:
                # Fused parts know their rows. The largest end must be that of the stored tensor.
                last[kept.place.name] = max(last.get(kept.place.name, 0), kept.place.rows.stop)
        for kept in self.tensors.values():
            theirs, shape = kept.place, kept.stored.shape
            rows = last.get(theirs.name)
            for expected, found, what in (
                (theirs.stack, shape, "stacked tensors"),
                (rows, theirs.fused(shape), "output features"),
            ):
                if expected and found[:1] != (expected,):
                    raise CheckpointError(
                        f"{theirs.name} in {self.path} has {found[0] if found else 0} {what}; the configuration asks "
                        f"for {expected}. Is it of another model?"
                    )

    def label(self, name: str) -> str:
        """Name a tensor in messages, with its name in the folder."""
        try:
            return f"{name!r} ({self._weights.theirs(name.removeprefix(self._prefix)).name})"
        except CheckpointError:
            return repr(name)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity."""
    # The sum is finite if all are, but for very large values: one pass, without a tensor of as many booleans.
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


def warn_not_finite(where: str, names: Iterable[str]) -> None:
    """Name the tensors whose values are not finite, if there are any."""
    if found := sorted(set(names)):
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        log.warning("%s holds NaN or infinity in %s%s: the model computes NaN.", where, ", ".join(found[:5]), more)


def _equal_rows(files: Open, one: StoredTensor, other: StoredTensor) -> Iterator[bool]:
    """Yield whether two tensors of one shape are equal, for ``ROWS`` rows after another.

    They are compared in the narrower of their dtypes.
    """
    count, *rest = one.shape
    dtype = min((getattr(torch, each.dtype) for each in (one, other)), key=lambda kind: kind.itemsize)
    for row in range(0, count, ROWS):
        found = torch.empty(2, min(ROWS, count - row), *rest, dtype=dtype)
        for each, data in zip((one, other), found, strict=True):
            each.read(files, [row] + [0] * len(rest), data)
        yield torch.equal(*found)


def unread(path: str | os.PathLike[str], weights: WeightMap) -> dict[str, Tensor]:
    """Return the tensors of a folder that a model does not read and its exports keep, by the names in their tables."""
    folder, found = place(path), dict[str, Tensor]()
    if not weights.kept:  # of most models: no header is read for them
        return found
    entries = {entry.key: (name, entry) for name in files_of(folder) for entry in header(folder, name)}
    with ExitStack() as stack:
        files = cache(lambda name: stack.enter_context(OpenFile(folder / name, f"{folder}/{name}")))
        for spelled, name in weights.unread(entries).items():
            file, entry = entries[name]
            found[spelled] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            PlainTensor(file, entry).read(files, (0,) * len(entry.shape), found[spelled])
    return found


def companions(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files of a folder that go with its weights: configuration, tokenizer, settings for generation.

    A chat template inside ``tokenizer_config.json`` is also returned as a file of its own, as newer folders have it.
    """
    folder = place(path)
    files = {name: file_of(folder / name) for name in COMPANIONS if (folder / name).is_file()}
    if TOKENIZER_CONFIG in files and CHAT_TEMPLATE not in files:
        template = json_of(folder / TOKENIZER_CONFIG).get("chat_template")
        if isinstance(template, str):
            files[CHAT_TEMPLATE] = template.encode()
    return files
