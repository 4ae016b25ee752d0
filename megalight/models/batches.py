"""Batches of a model: their samples, cut into micro-batches, and packed to sequences of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from megalight.errors import ConfigurationError
from megalight.types import PackedSequences, TokenBatch

SCALARS = (str, bytes, int, float)


class Loaded(NamedTuple):
    """What the data loaders say about a batch.

    Attributes:
        full: their batch sizes.
        last: the sizes of a last batch that is smaller.
        form: ``list``: the batch is a list of samples (``collate_fn=list``). ``columns``: no list in it is one of
            samples (torch's default collation). None: not known.
    """

    full: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    form: Literal["list", "columns"] | None = None


def loaded(trainer: Any) -> Loaded:
    """Return what the loaders of the trainer's stage say. ``trainer`` may be None."""
    if trainer is None:
        return Loaded()
    loaders = trainer.val_dataloaders
    if trainer.training or trainer.testing:
        loaders = trainer.train_dataloader if trainer.training else trainer.test_dataloaders
    full, last, forms = set[int](), set[int](), set[Any]()
    for loader in tree_leaves(loaders):
        batches = loader if getattr(loader, "batch_size", None) else getattr(loader, "batch_sampler", None)
        size, collate = getattr(batches, "batch_size", None), getattr(loader, "collate_fn", None)
        forms.add("list" if collate is list else "columns" if collate is default_collate else None)
        if isinstance(size, int) and size > 0:
            full.add(size)
            try:
                last.add(len(loader.sampler) % size)
            except (AttributeError, NotImplementedError, TypeError):  # a stream has no length
                continue
    return Loaded(frozenset(full), frozenset(last), forms.pop() if len(forms) == 1 else None)


def count_samples(batch: Any, told: Loaded = Loaded()) -> int:  # noqa: B008  (it cannot be changed)
    """Return the number of samples of a batch. If it is not certain, the first dim of the first tensor; 0: none.

    Args:
        batch: nested tensors, a list of samples, or an object with a length.
        told: what the data loaders say.
    """
    if told.form == "list" and isinstance(batch, list):
        return len(batch)
    found = list(_lengths(batch, "batch", told.form))
    numbers = _numbers(found, told)
    return numbers[0] if len(numbers) == 1 else found[0].number if found else 0


def weights(sizes: Sequence[int]) -> list[float]:
    """Return each micro-batch's fraction of all samples. The fractions are equal if samples cannot be counted."""
    # Samples that cannot be counted are taken to be equally many.
    if not all(sizes):
        return [1 / len(sizes)] * len(sizes)
    return [size / sum(sizes) for size in sizes]


def split_batch(batch: Any, size: int, told: Loaded = Loaded()) -> list[Any]:  # noqa: B008  (it cannot be changed)
    """Cut a batch into micro-batches of ``size`` samples. The last one may have fewer.

    Every tensor whose dim 0 is the number of samples is cut along it, and so are lists of samples, and lists of strings
    or numbers. Objects are cut by their own ``split(size)``. Everything else (0-dim tensors, ``[1, n]`` masks, class
    weights, None) is part of every micro-batch.

    Args:
        batch: nested tensors, a list of samples, or an object with ``split``.
        size: samples of a micro-batch.
        told: what the data loaders say: the number of samples, where tensors have different first dims.

    Raises:
        ConfigurationError: it is not certain which dim or list is the samples, or an object cannot be cut.
    """
    # Before the containers: a batch with its own `split` may be a tuple.
    if _splits(batch):
        return list(batch.split(size))
    if told.form == "list" and isinstance(batch, list):
        return _slices(batch, size)
    found = list(_lengths(batch, "batch", told.form))
    numbers = _numbers(found, told)
    if numbers and max(numbers) <= size:
        return [batch]
    if len(numbers) != 1:
        _refuse(size, [next(each for each in found if each.number == number) for number in numbers[:2]], batch)
    parts = _cut(batch, numbers[0], size, "batch", told.form)
    assert parts is not None  # the number is the length of something in it
    return parts


class _Length(NamedTuple):
    """What may be the number of samples: the first dim of a tensor, or the length of a list."""

    number: int
    place: str
    is_list: bool = False


def _lengths(value: Any, path: str, form: str | None) -> Iterator[_Length]:
    if isinstance(value, Tensor):
        if value.ndim:
            yield _Length(len(value), f"{path} has the shape {[*value.shape]}")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _lengths(each, f"{path}[{key!r}]", form)
    elif isinstance(value, tuple | list) and not _splits(value):
        if _is_column(value):
            yield _Length(len(value), f"{path} has {len(value)} entries")
            return
        if _may_be_samples(value, path, form) and _alike(value):
            yield _Length(len(value), f"{path} is a list of {len(value)}", True)
        for index, each in enumerate(value):
            yield from _lengths(each, f"{path}[{index}]", form)
    elif hasattr(value, "__len__") and not isinstance(value, SCALARS):
        yield _Length(len(value), f"{path} has {len(value)} samples")


def _numbers(found: Sequence[_Length], told: Loaded) -> list[int]:
    """Return what may be the number of samples. One: it is certain."""
    for sizes in (told.full, told.last):
        if hits := [*dict.fromkeys(each.number for each in found if each.number in sizes)]:
            return hits
    if told.full:  # a last batch, whose size is not known
        found = [each for each in found if each.number <= max(told.full)]
    elif any(not each.is_list for each in found):
        found = [each for each in found if not each.is_list]
    numbers = dict.fromkeys(each.number for each in found)
    # A dim of 1 is broadcast to all samples.
    return [number for number in numbers if number != 1] or [*numbers]


def _cut(value: Any, number: int, size: int, path: str, form: str | None) -> list[Any] | None:
    """Cut what has ``number`` samples. None: it has none, and is part of every micro-batch."""
    if isinstance(value, Tensor):
        return list(torch.split(value, size)) if value.ndim and len(value) == number else None
    if value is None or isinstance(value, SCALARS):
        return None
    if _splits(value):
        return list(value.split(size)) if not hasattr(value, "__len__") or len(value) == number else None
    if isinstance(value, Mapping):
        columns = [_cut(each, number, size, f"{path}[{key!r}]", form) for key, each in value.items()]
        rows = _rows(columns, [*value.values()], path, math.ceil(number / size))
        return None if rows is None else [dict(zip(value, row, strict=True)) for row in rows]
    if isinstance(value, tuple | list):
        if _is_column(value):
            return _slices(value, size) if len(value) == number else None
        if _is_samples(value, number, size, path, form):
            return _slices(value, size)
        columns = [_cut(each, number, size, f"{path}[{index}]", form) for index, each in enumerate(value)]
        rows = _rows(columns, value, path, math.ceil(number / size))
        # A named tuple takes its entries as arguments.
        plain = type(value) in (tuple, list)
        return None if rows is None else [type(value)(row) if plain else type(value)(*row) for row in rows]
    raise ConfigurationError(
        f"{path}, of type {type(value).__name__}, cannot be cut into micro-batches; give it a split(size) method, or "
        "define split_batch(batch, size) in the LightningModule."
    )


def _rows(columns: list[list[Any] | None], whole: Sequence[Any], path: str, count: int) -> list[list[Any]] | None:
    """Turn parts of each entry into the entries of each part."""
    if all(column is None for column in columns):
        return None
    for column in columns:
        if column is not None and len(column) != count:
            raise ConfigurationError(
                f"an entry of {path} is split into {len(column)} micro-batches, and others {count}."
            )
    pairs = list(zip(columns, whole, strict=True))
    return [[each if column is None else column[index] for column, each in pairs] for index in range(count)]


def _slices(value: Any, size: int) -> list[Any]:
    return [value[start : start + size] for start in range(0, len(value), size)]


def _splits(value: Any) -> bool:
    return hasattr(value, "split") and not isinstance(value, Tensor | str | bytes)


def _is_column(value: Sequence[Any]) -> bool:
    """Return whether it is a list of texts or numbers, which has an entry for each sample."""
    return bool(value) and all(isinstance(each, SCALARS) for each in value)


def _may_be_samples(value: Any, path: str, form: str | None) -> bool:
    # A function that returns several things returns a tuple.
    return form != "columns" and not hasattr(value, "_fields") and (path != "batch" or isinstance(value, list))


def _is_samples(value: Any, number: int, size: int, path: str, form: str | None) -> bool:
    """Return whether the entries of a list are the samples, and not tensors of all samples."""
    if len(value) != number or not _may_be_samples(value, path, form):
        return False
    lengths = [list(_lengths(each, f"{path}[{index}]", form)) for index, each in enumerate(value)]
    leading = [next((each for each in lengths if each.number == number), None) for lengths in lengths]
    if not any(leading):
        return True
    if not _alike(value):
        return False
    if all(leading):
        assert leading[0] is not None
        _refuse(size, [_Length(number, f"{path} is a list of {number}", True), leading[0]], value)
    return True


def _alike(value: Sequence[Any]) -> bool:
    """Return whether all entries are of one form, as samples are."""

    def form(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.dtype, each.ndim
        return type(each), tuple(each) if isinstance(each, Mapping) else len(each) if isinstance(each, tuple) else 0

    return len({form(each) for each in value}) == 1


def _refuse(size: int, places: Sequence[_Length], batch: Any) -> NoReturn:
    what = ", and ".join(each.place for each in places) or f"a {type(batch).__name__} has no dim of samples"
    raise ConfigurationError(
        f"micro_batch_size={size} cannot cut this batch, because it is not certain what its samples are: {what}. "
        "Return a dict or tuple of tensors from collate_fn, or a list of samples with collate_fn=list; or set "
        "micro_batch_size=None; or define split_batch(batch, size) in the LightningModule."
    )


IGNORED = -100
"""Label of a token without a loss."""


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the losses ``[T]`` of the tokens of a mask. Losses behind it belong to padding."""
    weights = mask.reshape(-1)
    return (losses[: weights.numel()] * weights).sum()


def skips(batch: TokenBatch, multiple: int) -> bool:
    """Return whether the last layer and the head skip tokens without a loss.

    They need all tokens of the micro-batch on each rank: numbers of tokens are multiples of 1 then.
    """
    return batch.rows is not None and multiple == 1


def pack(rows: Tensor, sequences: PackedSequences, filler: int) -> Tensor:
    """Flatten rows ``[b, s]``, or packed ``[tokens]``, to ``[T]``, with ``filler`` in the dummy sequence of padding."""
    flat = rows.reshape(-1)
    missing = sequences.num_tokens - len(flat)
    return F.pad(flat, (0, missing), value=filler) if missing else flat
