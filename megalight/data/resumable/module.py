"""The base class of data modules that resume at the sample where a run stopped."""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from megalight.data.blend import Samples
from megalight.data.loader import TokenLoader
from megalight.data.sampler import GlobalBatchSampler
from megalight.data.splits import SPLITS
from megalight.errors import ConfigurationError, DataError
from megalight.first_rank import only_first

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
