"""Lightning data modules of data sets that are streamed and tokenized on the fly, and resume exactly in any layout."""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from megalight.data.chat.conversations import conversations
from megalight.data.chat.dataset import PackOptions, TooLong
from megalight.data.chat.dataset import collate as collate_chat
from megalight.data.chat.template import ChatTemplate, TrainOn, encode, read_template
from megalight.data.gpt.dataset import GPTSample, SampleOptions
from megalight.data.gpt.dataset import collate as collate_text
from megalight.data.sampler import check_replicas, check_sizes
from megalight.data.streaming.streams import (
    ChatStream,
    OnBad,
    Row,
    Rows,
    Stream,
    StreamOrder,
    StreamReader,
    StreamStates,
    TextStream,
)
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, integer, nearest
from megalight.first_rank import only_first
from megalight.hub import commit_of, hub_name
from megalight.imports import require
from megalight.types import TokenBatch

log = logging.getLogger(__name__)
log.addFilter(only_first)

AHEAD = 4
"""Batches that a trainer may have fetched before it has trained on them."""


class StreamLoader:
    """Batches of this rank, in the order of the streams, from the trainer's position on.

    Args:
        reader: makes the reader of a number of batches that starts at given states.
        batches: number of batches of the whole run.
        position: returns the batch with which an iteration starts, and the states in front of it (None: the start).
        collate: makes a batch of samples.
        num_workers: reader processes. 0 reads in this process.
        kept: batches of which the states are kept.
    """

    def __init__(
        self,
        reader: Callable[[int, StreamStates | None], StreamReader],
        batches: int,
        position: Callable[[], tuple[int, StreamStates | None]],
        collate: Callable[[Sequence[GPTSample]], TokenBatch],
        num_workers: int,
        kept: int,
    ) -> None:
        self.states: dict[int, StreamStates] = {}
        self._reader, self._batches, self._position = reader, batches, position
        self._collate, self._num_workers, self._kept = collate, num_workers, kept

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[TokenBatch]:
        # A generator: the trainer's position is not asked before the first batch.
        first, states = self._position()
        found = DataLoader(
            self._reader(self._batches - first, states),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_same,
        )
        parts = iter(found)
        for batch in range(first, self._batches):
            # Each worker gives the samples of its streams, in their order.
            given = [next(parts) for _ in range(max(1, self._num_workers))]
            self.states[batch + 1] = StreamStates.merged(states for _, states in given)
            self.states.pop(batch + 1 - self._kept, None)
            yield self._collate([sample for samples, _ in given for sample in samples])

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module saves the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""


def _same(item: Any) -> Any:
    return item


class StreamDataModule(pl.LightningDataModule, ABC):
    """Streams rows that are tokenized on the fly, and resumes exactly in any layout.

    Sample ``b`` of every global batch comes from stream ``b``, which has rows of its own
    (:mod:`megalight.data.streaming.streams`). So the batches do not depend on the number of ranks and workers. A run
    resumes with the commit of the data set that it began with.

    Args:
        dataset: a data set of the Hugging Face Hub (``owner/name``, ``owner/name@revision``), or a folder of files that
            ``datasets`` reads.
        tokenizer: a ``tokenizer.json`` file, its folder, or a name of the Hub.
        global_batch_size: samples of a batch over all data-parallel ranks.
        sequence_length: tokens of a sample.
        subset: the configuration of the data set, if it has several.
        train_split: the split to train on.
        val_split: the split for validation, which is read in its order.
        val_samples: number of validation samples; those behind the end of the split carry no loss.
        shuffle_window: rows that are shuffled together; a resume reads up to so many again. 1: the order of the data.
        on_bad: what happens with a row that cannot be used (no text, no conversation, nothing to learn): ``raise``, or
            ``skip``.
        vocab_size: size of the vocabulary, against which ids are checked. Default: the tokenizer's.
        seed: seed of the order of rows.
        num_workers: processes per rank that read and tokenize; each has streams of its own. 0: the training process.

    Raises:
        DataError: the data set cannot be read.
        HubError: the Hub has no such name, refuses it, or does not answer.
        ConfigurationError: the trainer has no ``max_steps`` (in ``setup``), or only one of ``val_split`` and
            ``val_samples`` is given.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    collate: ClassVar[Any]

    def __init__(
        self,
        *,
        dataset: str,
        tokenizer: str,
        global_batch_size: int,
        sequence_length: int,
        subset: str | None = None,
        train_split: str = "train",
        val_split: str | None = None,
        val_samples: int | None = None,
        shuffle_window: int = 1000,
        on_bad: OnBad = "raise",
        vocab_size: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            num_workers=num_workers,
            seed=seed,
            val_samples=val_samples,
        )
        integer("shuffle_window", shuffle_window)
        if (val_split is None) != (val_samples is None):
            raise ConfigurationError(
                f"val_split is {val_split!r} and val_samples is {val_samples}; give both, since the length of a stream "
                "is not known, or neither."
            )
        self.dataset, self.subset, self.train_split, self.val_split = dataset, subset, train_split, val_split
        self.global_batch_size, self.sequence_length = global_batch_size, sequence_length
        self.val_samples, self.shuffle_window = val_samples, shuffle_window
        self.on_bad, self.seed, self.num_workers = on_bad, seed, num_workers
        self.tokenizer = Tokenizer.load(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size if vocab_size is None else vocab_size
        self.eod_id, self.pad_id = self.tokenizer.eod_id, self.tokenizer.safe_pad_id
        self.commit: str | None = None
        name = hub_name(dataset)
        if name is not None:
            self.commit = commit_of(name, "dataset")
        self._rows = {split: self._open(split) for split in (train_split, val_split) if split is not None}
        self._loader: StreamLoader | None = None
        self._resumed: tuple[int, StreamStates] | None = None

    @abstractmethod
    def stream(self, *arguments: Any) -> Stream:
        """Make the stream of a cursor."""

    @abstractmethod
    def encode(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the tokens of a row, and which of them count in the loss."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what else the samples depend on."""

    def _open(self, split: str) -> Rows:
        datasets = require("datasets", "reading data sets by name")
        name = hub_name(self.dataset)
        path = self.dataset if name is None else name.repository
        try:
            found: Rows = datasets.load_dataset(
                path, name=self.subset, split=split, revision=self.commit, streaming=True
            )
        except (ValueError, OSError, RuntimeError, KeyError) as error:
            raise DataError(
                f"data set {self.dataset!r} (subset {self.subset!r}, split {split!r}) cannot be read: "
                f"{str(error).strip().splitlines()[0]} Correct dataset, subset, train_split or val_split."
            ) from error
        return found

    def setup(self, stage: str) -> None:
        """Check what the position in the data depends on."""
        self._share()
        if stage != "fit" or self.trainer is None:
            return
        if self.trainer.max_steps <= 0:
            raise ConfigurationError(
                f"max_steps is {self.trainer.max_steps}; {type(self).__name__} needs it, as the length of a stream is "
                "not known. Set trainer.max_steps."
            )
        callbacks: list[pl.Callback] = getattr(self.trainer, "callbacks", [])
        if any(isinstance(each, GradientAccumulationScheduler) for each in callbacks):
            raise ConfigurationError(
                f"GradientAccumulationScheduler changes the batches of a step, and {type(self).__name__} finds its "
                "position by the count of steps. Use accumulate_grad_batches."
            )

    def _share(self) -> range:
        """Return the streams of this rank."""
        strategy = None if self.trainer is None else self.trainer.strategy
        ranks = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        check_replicas(self.global_batch_size, ranks["num_replicas"])
        share = self.global_batch_size // ranks["num_replicas"]
        return range(ranks["rank"] * share, (ranks["rank"] + 1) * share)

    def _order(self, split: str, window: int) -> StreamOrder:
        return StreamOrder(self._rows[split], self.dataset, self.global_batch_size, window, self.seed)

    def _make(self, cursor: Any, start: int) -> Stream:
        return self.stream(cursor, self.encode, self.dataset, self.on_bad, start)

    def _position(self) -> tuple[int, StreamStates | None]:
        """Return how many batches are done, and where all streams of this rank are then."""
        trainer = self.trainer
        done = 0 if trainer is None else trainer.global_step * trainer.accumulate_grad_batches
        if done == 0:
            return 0, None
        if self._loader is not None and done in self._loader.states:
            return done, self._loader.states[done]
        if self._resumed is None or self._resumed[0] != done:
            raise ConfigurationError(
                f"the run resumes at batch {done}, and the checkpoint holds no position of {type(self).__name__} "
                "there. Start a new run from its weights (the module's weights, in place of ckpt_path)."
            )
        return self._resumed

    def train_dataloader(self) -> StreamLoader:
        """Return the training batches of this rank, from the trainer's position on."""
        trainer = self.trainer
        steps, accumulated = (0, 1) if trainer is None else (trainer.max_steps, trainer.accumulate_grad_batches)
        share = self._share()
        order = self._order(self.train_split, self.shuffle_window)
        self._loader = StreamLoader(
            partial(StreamReader, order, self._make, share),
            steps * accumulated,
            self._position,
            type(self).collate,
            min(self.num_workers, len(share)),
            accumulated + AHEAD,
        )
        return self._loader

    def val_dataloader(self) -> StreamLoader | list[Any]:
        """Return the validation batches of this rank, in order; an empty list if there is no split for them."""
        if self.val_split is None or self.val_samples is None:
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero", UserWarning)
            return []
        share = self._share()
        return StreamLoader(
            partial(StreamReader, self._order(self.val_split, 1), self._make, share, passes=1),
            math.ceil(self.val_samples / self.global_batch_size),
            lambda: (0, None),
            type(self).collate,
            min(self.num_workers, len(share)),
            1,
        )

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files to save in every checkpoint: those of the tokenizer."""
        return self.tokenizer.files()

    def _facts(self) -> dict[str, Any]:
        """Return all that the samples of a batch depend on."""
        return {
            "global_batch_size": self.global_batch_size,
            "accumulate_grad_batches": 1 if self.trainer is None else self.trainer.accumulate_grad_batches,
            "sequence_length": self.sequence_length,
            "dataset": self.dataset.partition("@")[0],
            "subset": self.subset,
            "train_split": self.train_split,
            "shards": self._rows[self.train_split].num_shards,
            "shuffle_window": self.shuffle_window,
            "on_bad": self.on_bad,
            "seed": self.seed,
            "tokenizer": self.tokenizer.identity,
            **self.facts(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all streams, of all ranks, and what it depends on. All ranks call this together."""
        if self.trainer is None or self._loader is None:
            return {}
        done, states = self._position()
        parts: list[Any] = [states]
        if states is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            parts = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, states)
        whole = None if states is None else StreamStates.merged(parts).to_dict()
        return {"batches": done, "commit": self.commit, "facts": self._facts(), "states": whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the position of a checkpoint, which may be of another number of ranks or workers.

        Raises:
            ConfigurationError: the samples of a batch would be others.
        """
        if not state_dict:
            return
        if self.commit != state_dict["commit"]:
            name = hub_name(self.dataset)
            if name is None or name.revision is not None:
                raise ConfigurationError(
                    f"dataset is {self.dataset!r}; the checkpoint has read the commit {state_dict['commit']}. Resume "
                    "with that revision, or start a new run from the weights of the checkpoint."
                )
            log.warning("%s has changed; the run goes on with its commit %s", self.dataset, state_dict["commit"])
            self.commit = state_dict["commit"]
            self._rows = {split: self._open(split) for split in self._rows}
        mine, saved = self._facts(), state_dict["facts"]
        for key, value in mine.items():
            if value != saved.get(key):
                raise ConfigurationError(
                    f"{key} is {value!r}; the checkpoint was written with {saved.get(key)!r}, and its position in the "
                    f"data set is counted so. Resume with {key}={saved.get(key)!r}, or start a new run from the "
                    "weights of the checkpoint."
                )
        if state_dict["states"] is not None:
            self._resumed = state_dict["batches"], StreamStates.from_dict(state_dict["states"])


class StreamingDataModule(StreamDataModule):
    """Streams text for pre-training: documents are tokenized on the fly, concatenated, and cut to samples.

    Args:
        text_key: the column of the text.
        append_eod: whether to end each document with the end-of-document token of the tokenizer.
        document_mask: whether attention stays inside documents, and positions restart at each.
        eod_mask_loss: whether positions whose input is the end-of-document token carry no loss.
        options: those of :class:`StreamDataModule`, which also says what it raises.

    Raises:
        DataError: the tokenizer has no end-of-document token.
    """

    collate = staticmethod(collate_text)

    def __init__(
        self,
        *,
        text_key: str = "text",
        append_eod: bool = True,
        document_mask: bool = False,
        eod_mask_loss: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if append_eod and self.eod_id is None:
            raise DataError(
                f"the tokenizer {options['tokenizer']!r} has no known end-of-document token; take another, or set "
                "append_eod to false."
            )
        self.text_key, self.append_eod = text_key, append_eod
        self.options = SampleOptions(
            sequence_length=self.sequence_length,
            document_mask=document_mask,
            eod_id=self.eod_id,
            eod_mask_loss=eod_mask_loss,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
        )
        self._plain = self.tokenizer.for_plain_text()

    def encode(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """See :meth:`StreamDataModule.encode`."""
        text = row.get(self.text_key)
        if not isinstance(text, str):
            if self.text_key in row:
                raise DataError(f"{self.text_key!r} is {text!r}, which is no text.")
            raise DataError(
                f"there is no column {self.text_key!r}, only {', '.join(map(repr, row))}; name one with text_key."
                f"{nearest(self.text_key, row)}"
            )
        ids = self._plain.encode(text)
        if ids and self.append_eod and self.eod_id is not None:
            ids.append(self.eod_id)
        return np.asarray(ids, np.int64), np.ones(len(ids), np.uint8)

    def stream(self, *arguments: Any) -> Stream:
        """See :meth:`StreamDataModule.stream`."""
        return TextStream(*arguments, options=self.options)

    def facts(self) -> dict[str, Any]:
        """See :meth:`StreamDataModule.facts`."""
        return {"text_key": self.text_key, "append_eod": self.append_eod}


class StreamingSFTDataModule(StreamDataModule):
    """Streams conversations for fine-tuning. Only what the assistant wrote counts in the loss.

    Rows have the shapes of :mod:`megalight.data.chat.conversations`. They are packed in the order of their stream.

    Args:
        chat_template: a Jinja file. None: the tokenizer's own template.
        train_on: ``all``: every message of the assistant counts. ``last``: only the last of each conversation.
        packing: whether a row of the batch holds several conversations.
        too_long: what happens with a conversation of more than ``sequence_length + 1`` tokens: ``cut_end``,
            ``cut_start``, ``drop`` or ``raise``.
        options: those of :class:`StreamDataModule`, which also says what it raises.

    Raises:
        DataError: there is no chat template.
    """

    collate = staticmethod(collate_chat)

    def __init__(
        self,
        *,
        chat_template: str | None = None,
        train_on: TrainOn = "all",
        packing: bool = True,
        too_long: TooLong = "cut_end",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if chat_template is not None:
            self.tokenizer.chat_template = read_template(chat_template)
        self._template = ChatTemplate.of(self.tokenizer)
        self.train_on = train_on
        self.options = PackOptions(
            sequence_length=self.sequence_length,
            packing=packing,
            too_long=too_long,
            pad_id=self.pad_id,
            vocab_size=self.vocab_size,
        )

    def encode(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """See :meth:`StreamDataModule.encode`."""
        found = conversations(row, "the row")
        if len(found) != 1:
            raise DataError("it is a preference pair, which has another loss.")
        ids, loss = encode(self.tokenizer, *self._template.spans(found[0], self.train_on))
        if not loss.any():
            raise DataError("the conversation has no token of the assistant to learn from.")
        return np.asarray(ids, np.int64), loss

    def stream(self, *arguments: Any) -> Stream:
        """See :meth:`StreamDataModule.stream`."""
        return ChatStream(*arguments, options=self.options)

    def facts(self) -> dict[str, Any]:
        """See :meth:`StreamDataModule.facts`."""
        options = self.options
        template = self.tokenizer.chat_template
        return {
            "train_on": self.train_on,
            "packing": options.packing,
            "too_long": options.too_long,
            "template": template,
        }
