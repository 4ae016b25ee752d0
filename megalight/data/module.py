"""Data modules: a loader that resumes at the trainer's step, and the base classes of data modules of token files.

:class:`ResumableDataModule` yields samples in an order in which the trainer's step count alone gives the position.
:class:`TokenDataModule` opens and checks corpora, splits them, and builds the loaders.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from megalight.data.blend import BlendPart, Data, Mixture, Samples, mix
from megalight.data.cached_outputs import CachedOutputDataset, Records
from megalight.data.corpus import SPLIT, SPLITS, Corpus, same_tokenizer, split_bounds
from megalight.data.sampler import GlobalBatchSampler, check_sizes
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.first_rank import only_first


class TokenLoader(DataLoader[Any]):
    """A ``DataLoader`` whose sampler asks the trainer for the position in the data when the first batch is taken.

    Lightning may create an iterator before it restores a checkpoint, to count the steps of a schedule. So nothing is
    read until the first batch is requested. The loader has no state of its own; the methods of a resumable loader
    tell Lightning so.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()  # a generator: the sampler is not asked before the first batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position follows from the trainer's step count."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""


log = logging.getLogger(__name__)
log.addFilter(only_first)


class ResumableDataModule(pl.LightningDataModule, ABC):
    """Yields samples in an order in which the trainer's step count alone gives the position.

    A subclass builds the samples of a split (:meth:`_build`), and says how they become a batch (``collate``).

    If the trainer has ``max_steps``, training reads ``max_steps * accumulate_grad_batches * global_batch_size`` samples
    and repeats the data as often as this takes. Otherwise an epoch is one pass over the data, in a new order each time.
    Validation and test read their split once, in order, to the end. Samples that are None fill up the last global
    batch.

    Args:
        global_batch_size: samples of a batch over all data-parallel ranks.
        seed: seed of the order of samples.
        num_workers: reader processes per loader. 0 reads in the training process.
        samples: upper limits of samples of each split. For training, the number of samples instead of what the trainer
            needs.

    Raises:
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    collate: Callable[[Sequence[Any]], Any]
    units: ClassVar[str]
    """What a split holds, for messages."""
    advice: ClassVar[str]
    """What to do about an empty split."""

    def __init__(
        self, *, global_batch_size: int, seed: int, num_workers: int, samples: tuple[int | None, int | None, int | None]
    ) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.samples = dict(zip(SPLITS, samples, strict=True))
        self._datasets: dict[str, Samples[Any] | None] = {}

    @abstractmethod
    def _build(self, name: str) -> Samples[Any] | None:
        """Build the samples of a split; None: it is empty.

        Raises:
            DataError: the training split is empty.
        """

    def serve(self, dataset: Samples[Any], name: str) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """Return what a loader reads of the samples of a split, and how it makes a batch of them."""
        return dataset, type(self).collate

    def setup(self, stage: str) -> None:
        """Build the samples of the splits that ``stage`` needs, or map them from the cache."""
        if stage == "fit":
            self._check_accumulation()
        wanted = {"fit": ("train", "validation"), "validate": ("validation",)}.get(stage, ("test",))
        for name in wanted:
            self._datasets[name] = self._build(name)
            if self._datasets[name] is not None:
                self._sampler(name)  # raises before training if global_batch_size does not divide
            elif stage == "fit":
                log.warning("the %s split holds no %s, so there is no %s. %s", name, self.units, name, self.advice)
            else:
                raise DataError(f"the {name} split holds no {self.units}, so there is nothing to read. {self.advice}")

    def _check_accumulation(self) -> None:
        """Refuse a change of the batches per step in an epoch that never comes."""
        later = [epoch for epoch in self._accumulation if epoch > 0]
        if later and self._whole_run and self.trainer is not None and self.trainer.limit_train_batches in (None, 1.0):
            raise ConfigurationError(
                f"GradientAccumulationScheduler changes the batches of a step in epoch {later[0]}, but with max_steps "
                "all of the run is epoch 0. Give max_epochs and max_steps=-1, or the length of an epoch by "
                "limit_train_batches, or accumulate_grad_batches in place of the callback."
            )

    @property
    def _whole_run(self) -> bool:
        """Whether one pass over the training data lasts for the whole run (``max_steps``)."""
        return self.samples["train"] is None and self.trainer is not None and self.trainer.max_steps > 0

    @property
    def _train_samples(self) -> int | None:
        if self._whole_run and self.trainer is not None:
            windows = [self.trainer.accumulate_grad_batches, *self._accumulation.values()]
            return self.trainer.max_steps * max(windows) * self.global_batch_size
        return self.samples["train"]

    @property
    def _accumulation(self) -> dict[int, int]:
        """Epoch -> batches of a step from there on, if a callback changes their number."""
        callbacks: list[pl.Callback] = getattr(self.trainer, "callbacks", [])
        found = (callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler))
        return next((callback.scheduling for callback in found), {})

    def _position(self) -> tuple[int, int]:
        """The current pass over the training data, and how many of its batches are done."""
        trainer = self.trainer
        if trainer is None:
            return 0, 0
        batches = self._sampler("train").num_batches
        if not self._whole_run:
            limit = 1.0 if trainer.limit_train_batches is None else trainer.limit_train_batches
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        if self._accumulation or not trainer.lightning_module.automatic_optimization:
            # Steps may have any number of batches, so Lightning's count of batches is the position.
            done: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
            return divmod(done, max(1, batches))
        per_step = trainer.accumulate_grad_batches
        # Every batch has the same size, so the step count gives the position, and no state need be saved.
        if self._whole_run:
            return 0, trainer.global_step * per_step
        # An epoch may be cut short by `limit_train_batches`, and its last step may have fewer batches.
        turn, step = divmod(trainer.global_step, max(1, math.ceil(batches / per_step)))
        return turn, step * per_step

    def _sampler(self, name: str) -> GlobalBatchSampler:
        dataset = self._datasets[name]
        size = 0 if dataset is None else len(dataset)
        limit = self._train_samples if name == "train" else self.samples[name]
        strategy = None if self.trainer is None else self.trainer.strategy
        ranks = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return GlobalBatchSampler(
            size if limit is None else min(size, limit),
            self.global_batch_size,
            rank=ranks["rank"],
            num_replicas=ranks["num_replicas"],
            start=self._position if name == "train" else None,
            # Evaluation reads every sample: the last batch is filled up, and the rows that
            # fill it have no loss.
            pad=name != "train",
            seed=self.seed,
        )

    def _loader(self, name: str) -> TokenLoader | list[Any]:
        dataset = self._datasets[name]
        if dataset is None:
            # `setup` has reported what is empty; Lightning would warn again without saying what.
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero", UserWarning)
            return []
        sampler = self._sampler(name)
        served, collate = self.serve(dataset, name)
        # Reading mapped files takes microseconds, so Lightning's advice to use many workers does not apply.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = self.trainer
        return TokenLoader(
            served,  # map-style by shape, not by inheritance
            batch_size=sampler.share,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
            # Workers keep their memory maps over epochs.
            persistent_workers=self.num_workers > 0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the settings with which the trainer's step count determines the position in the data.

        The position itself is not saved.
        """
        dataset = self._datasets.get("train")
        if dataset is None or self.trainer is None:
            return {}
        return {
            "global_batch_size": self.global_batch_size,
            "accumulate_grad_batches": self._accumulation or self.trainer.accumulate_grad_batches,
            "order": dataset.order,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare these settings with those in a checkpoint, if this run continues training.

        Raises:
            ConfigurationError: the batch size or the accumulation differs, so the position in the data is unknown.
        """
        mine = self.state_dict()
        for key in ("global_batch_size", "accumulate_grad_batches"):
            if mine and mine[key] != state_dict[key]:
                raise ConfigurationError(
                    f"{key} is {mine[key]}; the checkpoint was written with {state_dict[key]}, and its position in the "
                    f"data is counted in such batches. Resume with {key}={state_dict[key]}, or start a new run from "
                    "the weights of the checkpoint."
                )
        # A warning only: training goes on well with another order, but some samples may come twice.
        if mine and mine["order"] != state_dict["order"]:
            log.warning(
                "the order of the training data differs from that of the checkpoint (other data, seed, sequence length "
                "or number of passes), so samples may repeat"
            )

    def train_dataloader(self) -> TokenLoader | list[Any]:
        """Return the training batches of this rank, from the trainer's position on."""
        return self._loader("train")

    def val_dataloader(self) -> TokenLoader | list[Any]:
        """Return the validation batches of this rank, in order; an empty list if the split is empty."""
        return self._loader("validation")

    def test_dataloader(self) -> TokenLoader | list[Any]:
        """Return the test batches of this rank, in order; an empty list if the split is empty."""
        return self._loader("test")

    def predict_dataloader(self) -> TokenLoader | list[Any]:
        """Return the batches of the test split."""
        return self._loader("test")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy a batch to the device without making the host wait."""
        if hasattr(batch, "to"):
            return batch.to(device, non_blocking=True)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def is_separate(data: object, own: Mapping[str, object]) -> bool:
    """Return whether splits have data of their own (``own``, by split), in place of ``data``, which is divided.

    Raises:
        ConfigurationError: neither or both are given.
    """
    separate = any(value is not None for value in own.values())
    if (data is None) != separate:
        raise ConfigurationError(
            "give either data, which split divides, or some of train_data, val_data and test_data; "
            + ("neither was given." if data is None else "both were given.")
        )
    return separate


OTHER_WAYS = {
    "pairs": "A loss over preference pairs is yours to write: megalight.data.corpus.Corpus.open reads them, documents "
    "of two sequences, the preferred one first. To learn the preferred answers alone, prepare rows of 'prompt' and "
    "'completion'."
}
"""What to do with data that no data module reads, by kind."""

NO_DOCUMENTS = (
    "Documents (text files, or rows) are divided whole: give a larger share of split, more documents, or data of its "
    "own by val_data or test_data."
)
"""What to do about an empty split."""


class TokenDataModule(ResumableDataModule):
    """Reads token files and yields batches of samples.

    A subclass defines the data set of a split (:meth:`dataset`), and how samples become a batch (``collate``). A batch
    on each rank is ``[global_batch_size / data-parallel ranks, sequence_length]``. The constructor opens and checks all
    files, so mistakes show before anything starts.

    Args:
        global_batch_size: samples (rows) of a batch over all data-parallel ranks.
        sequence_length: tokens of a sample, at most.
        data: a data prefix, a list of prefixes, a list ``[weight, prefix, weight, prefix ...]``, or
            ``{prefix: weight}``. Weights are ratios of samples. It is divided into train, validation and test by
            ``split``.
        split: weights of train, validation and test; documents (conversations) are divided whole in this ratio.
        train_data: data for training only, in the forms of ``data``; give it instead of ``data``.
        val_data: data for validation only.
        test_data: data for testing only.
        tokenizer: a ``tokenizer.json`` file or its folder. Default: the tokenizer that was saved with the data.
        vocab_size: size of the vocabulary, against which ids are checked. Default: the tokenizer's. If the model has
            ``config.vocab_size``, ids are checked against that too.
        seed: seed of the order of samples.
        num_workers: reader processes per loader. 0 reads in the training process, which is cheap: files are mapped.
        cache_dir: folder for cached sample indices; by default the folder ``cache`` beside the data.
        train_samples: samples of a pass over the training data, instead of the number the trainer needs.
        val_samples: upper limit of validation samples.
        test_samples: upper limit of test samples.

    Attributes:
        eod_id: id of the end-of-document token, or None.
        pad_id: id that means only padding, or -1.
        cached_outputs: what a frozen model made of the samples, which batches then hold; None: there is no store.

    Raises:
        DataError: a file is missing or incomplete, an id is outside the vocabulary, or the data was made with another
            tokenizer.
        ConfigurationError: neither or both of ``data`` and per-split data are given.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    units: ClassVar = "documents"
    advice: ClassVar = NO_DOCUMENTS
    kinds: ClassVar[tuple[str, ...]] = ("text",)
    """Kinds of corpora (:attr:`~megalight.data.corpus.CorpusMeta.kind`) that this class reads."""
    mixed_in: ClassVar[tuple[str, ...]] = ()
    """Those of these kinds that are read only beside others."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        sequence_length: int,
        data: Data | None = None,
        split: str = SPLIT,
        train_data: Data | None = None,
        val_data: Data | None = None,
        test_data: Data | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | None = None,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        check_sizes(
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            num_workers=num_workers,
            seed=seed,
            train_samples=train_samples,
            val_samples=val_samples,
            test_samples=test_samples,
        )
        samples = (train_samples, val_samples, test_samples)
        super().__init__(global_batch_size=global_batch_size, seed=seed, num_workers=num_workers, samples=samples)
        self.sequence_length = sequence_length
        self.cache_dir = cache_dir
        self._corpora: dict[str, Corpus] = {}
        self.parts = self._open(data, split, dict(zip(SPLITS, (train_data, val_data, test_data), strict=True)))
        self._tokenizer_path = tokenizer
        self.vocab_size = vocab_size
        self.eod_id: int | None = None
        self.pad_id = -1
        self._check()
        self.cached_outputs: Records[Any, Any] | None = None

    def divide(self, corpus: Corpus, split: str) -> tuple[range, range, range]:
        """Return the sequences of a corpus for train, validation and test. Each is a document or a conversation."""
        # Whole: a part in two splits would be learned and tested at once.
        return split_bounds(split, len(corpus.data))

    @abstractmethod
    def dataset(self, part: BlendPart, name: str, num_samples: int | None) -> Samples[Any]:
        """Build the samples of one part of a split, which is mixed with the others.

        Args:
            name: ``train``, ``validation`` or ``test``.
            num_samples: number of samples needed. None: one pass.
        """

    def _open(self, data: Data | None, split: str, own: dict[str, Data | None]) -> dict[str, list[BlendPart]]:
        # Separate data need no division: each is wholly of its split.
        separate = is_separate(data, own)
        parts: dict[str, list[BlendPart]] = {}
        for number, name in enumerate(SPLITS):
            given = own[name] if separate else data
            mixture = Mixture((), ()) if given is None else Mixture.parse(given)
            weights = mixture.weights or (None,) * len(mixture.prefixes)
            parts[name] = []
            for prefix, weight in zip(mixture.prefixes, weights, strict=True):
                if prefix not in self._corpora:
                    self._corpora[prefix] = self._open_corpus(prefix)
                corpus = self._corpora[prefix]
                sequences = range(len(corpus.data)) if separate else self.divide(corpus, split)[number]
                parts[name].append(BlendPart(corpus, sequences, weight))
        return parts

    def _open_corpus(self, prefix: str) -> Corpus:
        corpus = Corpus.open(prefix)
        if corpus.kind not in self.kinds:
            raise DataError(
                f"{prefix} was prepared as {corpus.kind!r}; {type(self).__name__} reads data of the kinds "
                f"{', '.join(map(repr, self.kinds))}. "
                + OTHER_WAYS.get(corpus.kind, "Use the data module for such data, or prepare it again.")
            )
        return corpus

    def _check(self) -> None:
        kinds = {corpus.kind for corpus in self._corpora.values()}
        if kinds and kinds <= {*self.mixed_in}:
            main = " or ".join(repr(kind) for kind in self.kinds if kind not in self.mixed_in)
            raise DataError(
                f"{next(iter(self._corpora))} was prepared as {' and '.join(map(repr, sorted(kinds)))}, which "
                f"{type(self).__name__} only mixes in beside data of the kind {main}. Add such data, or take another "
                "data module (GPTDataModule trains on text)."
            )
        meta = same_tokenizer(self._corpora.values())
        if meta is not None:
            self.eod_id, self.pad_id = meta.eod_id, meta.pad_id
        # A tokenizer that is given wins, so the data must agree with it.
        if self._tokenizer_path is not None:
            for corpus in self._corpora.values():
                corpus.check_tokenizer(self.tokenizer)
            self.eod_id, self.pad_id = self.tokenizer.eod_id, self.tokenizer.safe_pad_id
        if self.vocab_size is None and self._tokenizer_path is not None:
            self.vocab_size = self.tokenizer.vocab_size
        elif self.vocab_size is None and meta is not None:
            self.vocab_size = meta.vocab_size
        if self.vocab_size is not None:
            self._check_vocabulary(self.vocab_size, "vocab_size" if self._tokenizer_path is None else "the tokenizer")

    def _check_vocabulary(self, vocab_size: int, owner: str) -> None:
        for corpus in self._corpora.values():
            corpus.check_vocabulary(vocab_size, owner)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data.

        Raises:
            DataError: none was given, and none was saved with the data.
        """
        if (path := self._find_tokenizer()) is not None:
            return Tokenizer.load(path)
        raise DataError("no tokenizer was saved with the data; give one with tokenizer=PATH.")

    def _find_tokenizer(self) -> str | None:
        paths = [self._tokenizer_path, *(corpus.tokenizer_path for corpus in self._corpora.values())]
        return next((path for path in paths if path is not None), None)

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files to save in every checkpoint: those of the tokenizer, if there is one."""
        return {} if self._find_tokenizer() is None else self.tokenizer.files()

    def setup(self, stage: str) -> None:
        """Build the sample indices of the splits that ``stage`` needs, or map them from the cache."""
        model_config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        vocab_size = getattr(model_config, "vocab_size", None)
        if isinstance(vocab_size, int):
            self._check_vocabulary(vocab_size, "the model")
        super().setup(stage)

    def serve(self, dataset: Samples[Any], name: str) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """Return the samples of a split, with what a frozen model made of them if that is stored."""
        if self.cached_outputs is None or not self.cached_outputs.has(name):
            return super().serve(dataset, name)
        cached_outputs: CachedOutputDataset[Any] = CachedOutputDataset(
            dataset, self.cached_outputs, type(self).collate, name
        )
        return cached_outputs, cached_outputs.collate

    def _build(self, name: str) -> Samples[Any] | None:
        dataset = mix(
            self.parts[name],
            lambda part, samples: self.dataset(part, name, samples),
            num_samples=self._train_samples if name == "train" else None,
            label=name,
            cache_dir=self.cache_dir,
        )
        if dataset is None and name == "train":
            raise DataError("the training split holds no documents; give it a larger share of split, or more data.")
        if dataset is not None:
            log.info("%s: %d samples of at most %d tokens", name, len(dataset), self.sequence_length)
        return dataset

    def training_samples(self) -> tuple[Samples[Any], int]:
        """Return the training samples, and how many of them a run reads. The first pass reads them in order."""
        if "train" not in self._datasets:
            self._datasets["train"] = self._build("train")
        dataset, limit = self._datasets["train"], self._train_samples
        assert dataset is not None
        return dataset, len(dataset) if limit is None else min(len(dataset), limit)

    def validation_samples(self) -> tuple[Samples[Any], int] | None:
        """Return the validation samples, and how many of them a run reads; None if it reads none."""
        if "validation" not in self._datasets:
            self._datasets["validation"] = self._build("validation")
        dataset, limit = self._datasets["validation"], self.samples["validation"]
        if dataset is None or limit == 0:
            return None
        return dataset, len(dataset) if limit is None else min(len(dataset), limit)

    @property
    def validates(self) -> bool:
        """Whether the run reads validation samples."""
        return self.trainer is None or bool(self.trainer.limit_val_batches)
