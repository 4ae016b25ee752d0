"""The base of a draft: what the draft reads of the frozen model, which runs, or lies in cached hidden states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.cached_outputs import BEGUN, MANIFEST, CachedHiddenStates
from megalight.data.cached_outputs import ENDS as RECORD_ENDS
from megalight.data.cached_outputs import ENDS as STORED_ENDS
from megalight.errors import ConfigurationError, DataError
from megalight.models.distillation import OUTPUT, SAVED, Teacher, check_tokenizer
from megalight.models.family import Family
from megalight.models.gpt import GPTConfig
from megalight.models.hidden import KEPT
from megalight.models.stored import StoredModel, open_model
from megalight.nn import Embedding, Linear, LMHead
from megalight.nn.canonical import parts
from megalight.parallel.frozen_model import FrozenModel, FrozenSubmodule
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.source import FillReport, FillRequest, SelectedSource, Source, Target, WrappedSource
from megalight.parallel.styles import Vocab, VocabHeadStyle
from megalight.types import BaseStates

BASE = "base"
"""Name of the base among the frozen models of a run, and first part of its canonical names."""

ENDS = "ends"


class Ends(nn.Module):
    """The base's embedding, and its output layer for the tokens that the draft predicts."""

    def __init__(self, config: GPTConfig, draft_vocab_size: int) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        output = Linear(config.hidden_size, draft_vocab_size)
        # The base's results have passed its final norm.
        self.head = LMHead(nn.Identity(), output, softcap=config.logit_softcap)


class Base(Teacher):
    """The forward pass of the base: ``hidden [T, h]``, normed, and ``auxiliary [T, n h]``.

    Args:
        known: its family.
        config: its configuration.
        layers: after how many layers the auxiliary hidden states lie, in the order in which the draft reads them.
    """

    submodule: Ends | None  # type: ignore[assignment]

    def __init__(self, known: Family, config: Any, layers: Sequence[int]) -> None:
        super().__init__(known, config, [f"layers.{after - 1}" for after in layers])

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """See :class:`~megalight.parallel.frozen_model.FrozenTask`."""
        found = super().forward_step(model, batch, carry)
        if getattr(model, "head", None) is None:
            return found
        # In the order of the draft: it is trained for one order of its inputs.
        auxiliary = torch.cat([found[KEPT + name] for name in self.places], -1)
        return {"hidden": found["hidden"], "auxiliary": auxiliary}


@dataclass(frozen=True)
class BaseModel:
    """What the LightningModule of a draft needs of its base.

    Args:
        folder: a checkpoint, a folder of runs, whose newest checkpoint is taken, a ``transformers`` folder, or a folder
            of ``megalight hidden-states``. Of the latter the base's ends are read, and batches bring its results.
        layout: the base's layout, over the same ranks.

    Raises:
        CheckpointError: the folder holds no complete model, or one with adapters.
        ConfigurationError: the base is no GPT.
    """

    folder: str | os.PathLike[str]
    layout: Layout = field(default_factory=Layout)
    config: GPTConfig = field(init=False, compare=False)
    files: Mapping[str, bytes] = field(init=False, compare=False, repr=False)
    states: CachedHiddenStates | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        """Read the base's configuration."""
        if holds_hidden_states(self.folder):
            if self.layout != Layout():
                raise ConfigurationError(
                    f"{self.folder} holds hidden states, so no base runs, and it has no layout; leave base_layout out."
                )
            object.__setattr__(self, "states", CachedHiddenStates(self.folder))
            object.__setattr__(self, "folder", Path(self.folder) / STORED_ENDS)
        # Once: a run may still be saving there.
        object.__setattr__(self, "folder", latest_checkpoint(self.folder))
        stored = self._open()
        if not isinstance(stored.config, GPTConfig):
            raise ConfigurationError(
                f"the base in {self.folder} is a {stored.family.name} model; drafts serve models of the family gpt."
            )
        object.__setattr__(self, "config", stored.config)
        object.__setattr__(self, "files", stored.files)

    def _open(self) -> StoredModel:
        return open_model(self.folder, whole=self.states is None)

    def check_tokenizer(self, data: Mapping[str, bytes]) -> None:
        """See :func:`~megalight.models.distillation.check_tokenizer`."""
        check_tokenizer(f"the base in {self.folder}", self.files, data)

    def task(self, layers: Sequence[int]) -> Base:
        """Return its forward pass."""
        return Base(self._open().family, self.config, layers)

    def head_source(self) -> Source:
        """Return the weight of its output layer under the name that it has in a draft."""
        output = "embed.word" if self.config.tie_embeddings else OUTPUT
        return SelectedSource(self._open().weights, {f"{SAVED}{OUTPUT}.weight": f"{SAVED}{output}.weight"})

    def frozen(self, task: Base, draft_ids: Sequence[int]) -> FrozenModel:
        """Return the declaration of the base for a run."""
        weights = self._open().weights
        with torch.device("meta"):
            names = [SAVED + part.name for part in parts(task.build_model())]
        word, config = f"{SAVED}embed.word.weight", task.config
        output = word if config.tie_embeddings else f"{SAVED}{OUTPUT}.weight"
        ends = {f"{BASE}.{ENDS}.embed.weight": word, f"{BASE}.{ENDS}.head.output_layer.weight": output}
        submodule = FrozenSubmodule(
            build=lambda: Ends(config, len(draft_ids) or config.vocab_size),
            name=ENDS,
            plan=ParallelizePlan({"embed": Vocab(), "head": VocabHeadStyle()}),
            source=SelectedRows(SelectedSource(weights, ends), {list(ends)[1]: tuple(draft_ids)} if draft_ids else {}),
        )
        if self.states is not None:

            def place(part: nn.Module | None) -> None:
                task.submodule = part  # type: ignore[assignment]

            return CachedBase(submodule, place)  # type: ignore[return-value]
        return FrozenModel(
            layout=self.layout,
            task=task,
            source=SelectedSource(weights, {name: name for name in names}),
            for_last_stage=True,
            submodule=submodule,
        )


@dataclass(frozen=True)
class SelectedRows(WrappedSource):
    """A source in which some tensors have only some of their rows. A tensor whose rows are chosen is read whole.

    Attributes:
        rows: name -> the rows that are left, in this order.
    """

    rows: Mapping[str, Sequence[int]]

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`~megalight.parallel.source.WrappedSource.before`."""
        return replace(request, targets=[self._whole(target) for target in request.targets])

    def read(self, passed: FillRequest) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.read`."""
        missing: list[str] = []
        # A tied base has one tensor for both ends, and a source reads a box once in a call. All ranks take part in
        # every call, also with nothing to read.
        for name in sorted(self.tensors):
            part = [target for target in passed.targets if target.name == name]
            missing += replace(passed, targets=part).to(self.source).missing
        return FillReport(tuple(dict.fromkeys(missing)), ())

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        for target, whole in zip(request.targets, passed.targets, strict=True):
            if target.name in self.rows:
                first, count = target.offset[0], target.data.shape[0]
                target.data.copy_(whole.data[list(self.rows[target.name][first : first + count])])
        return filled

    def _whole(self, target: Target) -> Target:
        if target.name not in self.rows:
            return target
        shape = tuple(self.source.tensors[target.name].shape)
        return Target(target.name, shape, (0,) * len(shape), torch.empty(shape, dtype=target.data.dtype))


# Cached hidden states in place of a base that runs


def holds_hidden_states(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds hidden states, perhaps not all yet."""
    folder = Path(path)
    return (folder / RECORD_ENDS).is_dir() and any((folder / name).is_file() for name in (MANIFEST, BEGUN))


@dataclass(frozen=True)
class CachedBase:
    """Declares it in the place of a :class:`~megalight.parallel.frozen_model.FrozenModel`: batches bring the results.

    Attributes:
        submodule: the base's ends, which the loss computes with.
        place: takes the ends on the ranks that hold them, and None on others.
    """

    submodule: FrozenSubmodule
    place: Callable[[nn.Module | None], None]

    def check(self, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> None:
        """Check nothing: there is no layout of its own."""

    def build(self, name: str, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
        """Place the ends, and return what takes the results out of micro-batches."""
        self.place(self.submodule.place(name, mesh, dtype, device))
        return lambda batches: replay(batches, dtype)


def replay(batches: Sequence[Any], dtype: torch.dtype) -> list[Carry]:
    """Return the results of the base for micro-batches that bring them: of all tokens, ``[T, ...]``.

    Raises:
        ConfigurationError: a batch brings none.
    """
    found = []
    for batch in batches:
        states = getattr(batch, "cached_outputs", None)
        if not isinstance(states, BaseStates):
            raise ConfigurationError(
                "a batch brings no hidden states of the base; train with a data module such as GPTDataModule or "
                "SFTDataModule, whose samples have numbers."
            )
        flat = states.each(lambda tensor: tensor.flatten(0, 1).to(dtype))
        found.append({"hidden": flat.hidden, "auxiliary": flat.auxiliary})
    return found


def serve(store: CachedHiddenStates, data: Any, layers: Sequence[int], stage: str) -> None:
    """Let batches bring hidden states.

    Args:
        store: where they are.
        data: the data of the run.
        layers: after how many layers of the base the draft reads them.
        stage: what the trainer does, such as ``fit``.

    Raises:
        ConfigurationError: the stage reads other samples than those of training and validation, the data has no
            numbered samples, or the draft reads other hidden states.
        DataError: the store was written for other samples, or has none for validation.
    """
    if stage not in ("fit", "validate"):
        raise ConfigurationError(
            f"{store.folder} holds hidden states of training and validation samples, and trainer.{stage} reads others; "
            "name the base itself by model.base."
        )
    if tuple(layers) != store.meta.layers:
        raise ConfigurationError(
            f"the draft reads hidden states after layers {list(layers)}, and {store.folder} holds those after "
            f"{list(store.meta.layers)}; set auxiliary_layers, or write the folder again with {store.meta.command}."
        )
    if not hasattr(data, "training_samples"):
        raise ConfigurationError(
            f"{store.folder} is read by numbers of samples, which {type(data).__name__} does not have; train with "
            "a data module such as GPTDataModule or SFTDataModule."
        )
    if stage == "fit":
        store.check(*data.training_samples())
    if data.validates and (validation := data.validation_samples()) is not None:
        if not store.has("validation"):
            raise DataError(
                f"{store.folder} has no validation samples, and the run validates; set trainer.limit_val_batches=0, or "
                f"write the folder again with {store.meta.command}."
            )
        samples, count = validation
        store.check(samples, count, "validation")
    data.cached_outputs = store
