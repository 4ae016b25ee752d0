"""The Lightning data module of prompts, which may bring each prompt in several steps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalight.data.chat.template import read_template
from megalight.data.corpus import SPLIT, SPLITS, split_bounds
from megalight.data.module import ResumableDataModule, is_separate
from megalight.data.sampler import check_sizes
from megalight.data.text_files import Format, find
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import Environment, PromptBatch, Reward, RLTask
from megalight.rl.prompts import SUFFIXES, PromptDataset, PromptWriter, Row, RowSource, TaskDataset, read_rows

log = logging.getLogger(__name__)

Source = str | list[str] | RowSource
"""Rows: a file, a directory, a glob or a list of them, or what makes rows without files."""


class PromptDataModule(ResumableDataModule):
    """Reads prompts, and knows the rewards of answers to them. A batch is a :class:`PromptBatch` for ``GRPOModule``.

    Rows are JSON lines, or rows of ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` files, also packed by gzip. A prompt
    is a text, or a list of messages; rows of fine-tuning (``messages``, ShareGPT's, Alpaca's) are read without their
    last answer. Rewards see the whole row.

    The number of prompts in a run and the position after a resume are as in
    :class:`~megalight.data.gpt.module.GPTDataModule`. At the end of validation, batches may have fewer prompts, or
    none.

    Args:
        tokenizer: the policy's: a ``tokenizer.json`` file or its folder.
        rewards: name -> reward: a class with its arguments, such as :class:`~megalight.rl.rewards.FinalAnswer`, or a
            function of an answer and a row by its import path. Logs show their values by name.
        global_batch_size: prompts of a batch over all data-parallel ranks.
        steps_per_batch: steps on the same answers. From the second on, the policy is another than the one that drew
            them, as far as the clip of the loss allows.
        reward_weights: name -> factor of the reward in the sum; 1 where there is none. 0: it is only logged.
        reward_timeout: seconds that a reward may take for one answer, after which the run stops with the reward's name;
            see :class:`~megalight.rl.environment.Environment`. None: no limit.
        data: rows, which are divided into train, validation and test by ``split``: a file, a directory, a glob, a list
            of them, or a :class:`~megalight.rl.prompts.RowSource`.
        split: weights of train, validation and test; rows are divided in this ratio, in their order.
        train_data: rows for training only, in the forms of ``data``; give it instead of ``data``.
        val_data: rows for validation only.
        test_data: rows for testing only.
        column: where rows hold the prompt. Default: ``prompt``, or their conversation.
        chat: whether a prompt that is a text is a user's message. If not, it is read as it stands.
        chat_template: a Jinja file. Default: the tokenizer's own template. It is saved with the tokenizer.
        system: a system message before the messages of each prompt.
        begin: text with which each answer begins, as part of the prompt, such as ``<think>``.
        max_prompt_tokens: prompts with more tokens are left out. Default: those that leave no room for an answer in
            the model's ``max_sequence_length``.
        format: format of all files; ``auto``: by the suffix.
        seed: seed of the order of prompts.
        train_samples: prompts of a pass over the training data, instead of the number the trainer needs.
        val_samples: upper limit of validation prompts.
        test_samples: upper limit of test prompts.

    Attributes:
        vocab_size: size of the tokenizer's vocabulary.

    Raises:
        DataError: a file is missing; in ``setup``: a row has no prompt or lacks what a reward needs, or no prompt is
            left.
        ConfigurationError: neither or both of ``data`` and per-split data are given, or rewards are wrong; in
            ``setup``: ``steps_per_batch`` without ``max_steps``, or with ``accumulate_grad_batches``.
        LayoutError: ``global_batch_size`` is not a multiple of the number of data-parallel ranks (in ``setup``).
    """

    units: ClassVar = "prompts"
    advice: ClassVar = "Give a larger share of split, more rows, or rows of its own by val_data or test_data."

    def __init__(
        self,
        *,
        tokenizer: str,
        rewards: dict[str, Reward],
        global_batch_size: int,
        steps_per_batch: int = 1,
        reward_weights: dict[str, float] | None = None,
        reward_timeout: float | None = None,
        data: Source | None = None,
        split: str = SPLIT,
        train_data: Source | None = None,
        val_data: Source | None = None,
        test_data: Source | None = None,
        column: str | None = None,
        chat: bool = False,
        chat_template: str | None = None,
        system: str | None = None,
        begin: str = "",
        max_prompt_tokens: int | None = None,
        format: Format = "auto",
        seed: int = 1234,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        check_sizes(
            global_batch_size=global_batch_size,
            seed=seed,
            train_samples=train_samples,
            val_samples=val_samples,
            test_samples=test_samples,
        )
        for name, value in (("max_prompt_tokens", max_prompt_tokens), ("steps_per_batch", steps_per_batch)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1.")
        samples = (train_samples, val_samples, test_samples)
        # All rows are in memory, so there is nothing for workers to read.
        super().__init__(global_batch_size=global_batch_size, seed=seed, num_workers=0, samples=samples)
        own = dict(zip(SPLITS, (train_data, val_data, test_data), strict=True))
        is_separate(data, own)
        self.steps_per_batch = steps_per_batch
        self.data = data
        self.own = own
        self.split = split
        self.format: Format = format
        self.max_prompt_tokens = max_prompt_tokens
        self.tokenizer = Tokenizer.load(tokenizer)
        if chat_template is not None:
            self.tokenizer.chat_template = read_template(chat_template)
        self.writer = PromptWriter(tokenizer=self.tokenizer, column=column, chat=chat, system=system, begin=begin)
        self.vocab_size = self.tokenizer.vocab_size
        self.environment = Environment(self.tokenizer, rewards, reward_weights, reward_timeout=reward_timeout)
        split_bounds(split, 1)  # refuses weights that are none
        for source in (data, *own.values()):
            if source is not None and not isinstance(source, RowSource):
                find(_listed(source), format, SUFFIXES)  # refuses what is not there
        self._read: dict[str, PromptDataset] = {}

    def setup(self, stage: str) -> None:
        """Read the prompts of the splits that ``stage`` needs."""
        # GRPOModule samples answers in this hook, and Lightning warns that it runs the module's.
        warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer`")
        super().setup(stage)

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, which every checkpoint gets."""
        return self.tokenizer.files()

    def _build(self, name: str) -> TaskDataset | ReusedTasks | None:
        source = self.own[name] if self.data is None else self.data
        if source is None and name == "train":
            raise DataError("there are no prompts to train on; give train_data.")
        if source is None:
            return None
        prompts = self._prompts(name, source)
        whole = range(len(prompts))
        part = whole if self.data is None else split_bounds(self.split, len(prompts))[SPLITS.index(name)]
        places = self._fitting(name, prompts, np.arange(part.start, part.stop, dtype=np.int64))
        if not len(places):
            if name == "train":
                raise DataError(f"the training split holds no prompts. {self.advice}")
            return None
        train = name == "train"
        log.info("%s: %d prompts of at most %d tokens", name, len(places), int(prompts.lengths[places].max()))
        if not train:
            return TaskDataset(prompts, places)
        times, samples = self._times(), self._train_samples
        if times == 1:
            return TaskDataset(prompts, places, num_samples=samples, seed=self.seed)
        assert samples is not None
        tasks = TaskDataset(prompts, places, num_samples=-(-samples // times) + self.global_batch_size, seed=self.seed)
        return ReusedTasks(tasks, self.global_batch_size, times)

    def _times(self) -> int:
        """Return how often a batch of prompts comes."""
        trainer = self.trainer
        if self.steps_per_batch > 1 and trainer is not None:
            if not self._whole_run:
                raise ConfigurationError(
                    f"steps_per_batch={self.steps_per_batch} needs the length of the run in steps; give the trainer "
                    "max_steps, and leave train_samples out."
                )
            if trainer.accumulate_grad_batches > 1 or self._accumulation:
                raise ConfigurationError(
                    f"steps_per_batch={self.steps_per_batch} with accumulate_grad_batches: a step would add up the "
                    "same answers. Raise global_batch_size instead."
                )
        return self.steps_per_batch

    def _prompts(self, name: str, source: Source) -> PromptDataset:
        key = name if self.data is None else ""  # data that splits share is read once
        if key not in self._read:
            rows = _rows(source, self.format)
            for place, row in rows:
                self.environment.check(place, row)
            self._read[key] = PromptDataset(self.writer, rows)
            ends = {*self.environment.ends, *self.writer.ends(self._read[key].chats)}
            if not ends:
                log.warning("the tokenizer has no token that ends a text, so every answer has the longest length")
            self.environment.ends = tuple(sorted(ends))
        return self._read[key]

    def _fitting(self, name: str, prompts: PromptDataset, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of prompts that are not too long.

        Raises:
            DataError: none is left.
        """
        config = getattr(getattr(self.trainer, "lightning_module", None), "config", None)
        longest, reason = self.max_prompt_tokens, "max_prompt_tokens"
        room = getattr(config, "max_sequence_length", None)
        if isinstance(room, int) and (longest is None or longest >= room):
            longest, reason = room - 1, f"an answer needs room in the model's max_sequence_length={room}"
        if longest is None:
            return places
        kept = places[prompts.lengths[places] <= longest]
        if len(kept) < len(places):
            said = f"{len(places) - len(kept)} of {len(places)} prompts have more than {longest} tokens ({reason})"
            if not len(kept):
                raise DataError(f"{name}: {said}, so none is left; give shorter prompts, or raise it.")
            log.warning("%s: %s, and are left out", name, said)
        return kept

    def serve(self, dataset: Any, name: str) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """Return tasks, and what makes a batch of them."""
        return dataset, self._batch

    def _batch(self, tasks: Sequence[RLTask | Use | None]) -> PromptBatch:
        found = [each if isinstance(each, Use) else Use(each, 0) for each in tasks if each is not None]
        return PromptBatch([each.task for each in found], self.environment, not any(each.number for each in found))


def _listed(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _rows(source: Source, form: Format) -> list[tuple[str, Row]]:
    if isinstance(source, RowSource):
        return [(f"{type(source).__name__} row {number}", row) for number, row in enumerate(source.rows())]
    return read_rows(_listed(source), form)


class Use(NamedTuple):
    """A task in a batch.

    Attributes:
        number: how many batches had it before, of those that share its answers.
    """

    task: RLTask
    number: int


class ReusedTasks:
    """Tasks in global batches, each of which comes several times in a row.

    Args:
        tasks: the tasks of a run.
        batch: tasks of a global batch.

    Attributes:
        order: hash of everything that the order depends on.
    """

    def __init__(self, tasks: TaskDataset, batch: int, times: int) -> None:
        self.tasks, self.batch, self.times = tasks, batch, times
        self.order = f"{tasks.order}/{times}"

    def __len__(self) -> int:
        return len(self.tasks) // self.batch * self.batch * self.times

    def __getitem__(self, index: int | None) -> Use | None:
        """Return task ``index``; None stays None, and fills up a batch."""
        if index is None:
            return None
        batch, place = divmod(index, self.batch)
        first, number = divmod(batch, self.times)
        task = self.tasks[first * self.batch + place]
        assert task is not None
        return Use(task, number)
