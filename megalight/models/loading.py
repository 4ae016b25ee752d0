"""Models from folders: the whole model of a checkpoint on a single device, and the initial weights of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save
from torch import nn
from torch.distributed import ProcessGroup

from megalight import checkpoint
from megalight.checkpoint import Checkpoint
from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign.single_file import WEIGHTS, read
from megalight.checkpoint.foreign.transformers_folder import files_of, header, is_folder, read_config
from megalight.checkpoint.loading import SavedCheckpoint, compare
from megalight.checkpoint.ranks import Ranks, alone
from megalight.checkpoint.sources import ExcludingSource, FullPrecision, LenientSource, report
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.config import compare as compare_configs
from megalight.models.family import Family, WeightConversion, family, family_of_transformers, warn_of_differences
from megalight.models.gpt.config import GPTConfig, MultiTokenConfig
from megalight.models.hugging_face.folder import COMPANIONS, LENIENT, UNREAD, Folder, companions, unread
from megalight.models.transforms import activate, rebuild
from megalight.nn.canonical import canonical_tensors, parts
from megalight.nn.init import Initializer, draw, initializers
from megalight.parallel.initial_values import compute_buffers
from megalight.parallel.layers import depths_of
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.layout import balanced, compose
from megalight.parallel.pipeline.stages import check_protocol
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.source import FillReport, FillRequest, Source, TensorMetadata, WrappedSource
from megalight.parallel.transform import ModelTransform, apply_transforms

SEED = 1234
"""Seed of initial values, unless a module has another one."""

Keys: TypeAlias = Literal["strict", "log", "ignore"]

KEYS: tuple[Keys, ...] = ("strict", "log", "ignore")

PREFIX = "model."
"""Prefix of the canonical names of a model's weights in a checkpoint."""

BASE = "base"
"""Entry of a checkpoint's ``model``: whether it holds all weights, or only those that transforms added."""


def saved_model(
    opened: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    base: str | os.PathLike[str] | None = None,
    mesh: ParallelMesh | None = None,
    adapter: str | None = None,
) -> ParallelModel:
    """Build the model that a checkpoint describes, with its transforms, and read its weights.

    Args:
        opened: the checkpoint, saved in any layout.
        device: device of the weights.
        dtype: dtype of the weights. None: the widest saved dtype.
        base: the folder with the initial weights of the training, for a checkpoint that holds only adapters.
        mesh: the ranks over which the model is divided; all call this together. None: this process holds it whole.
        adapter: name of the adapter that computes. None: the one that was trained last.

    Raises:
        LayoutError: the model cannot be divided so.
        ConfigurationError: the checkpoint has no such adapter.
        CheckpointError: the checkpoint is incomplete or does not describe its model, or ``base`` is missing.
        MegalightError: its family or a transform is not known here.
    """
    described = description(opened)
    known = family(described["family"])
    config = saved_config(described, opened.path)
    if holds_base(opened.common):
        check_held(config, (stored.shape for stored in opened.tensors.values()), opened.path)
    # In the widest dtype that was saved, as a narrower one would round weights.
    model = _room(known, config, serving(described), device, dtype or widest(opened), mesh)
    if adapter is not None:
        # Before weights are read: a wrong name raises at once.
        activate(model.root, adapter)
    source = without_training_parts(opened, described)
    with _readers(mesh) as group:
        whole = holds_base(opened.common)
        if not whole:
            if base is None:
                raise needs_base(opened, "name the weights that training began with by base (--base)")
            # The base first: the checkpoint then fills what the base lacks.
            model.read(initial_source(base, known, config), process_group=group)
        model.read(source, only_added=not whole, process_group=group)
    return model


def transformers_model(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mesh: ParallelMesh | None = None,
    keys: Keys = "strict",
) -> ParallelModel:
    """Build the model in a ``transformers`` folder, and read its weights.

    Args:
        folder: a folder that ``save_pretrained`` wrote.
        device: device of the weights.
        dtype: dtype of the weights. None: the widest dtype in the folder.
        mesh: as of :func:`saved_model`.
        keys: as of :func:`whole_source`.

    Raises:
        LayoutError: the model cannot be divided so.
        CheckpointError: a file is missing or incomplete, or holds tensors of another model.
        ConfigurationError: no family can read such models.
    """
    known = family_of_transformers(read_config(folder))
    config = initial_config(folder, known)
    source = whole_source(folder, known, config, keys)
    model = _room(known, config, (), device, dtype or widest(source), mesh)
    with _readers(mesh) as group:
        model.read(source, process_group=group)
    return model


def _room(
    known: Family,
    config: Any,
    transforms: Iterable[ModelTransform],
    device: torch.device | str,
    dtype: torch.dtype,
    mesh: ParallelMesh | None,
) -> ParallelModel:
    """Allocate a model, or this rank's part of one, whose weights are read next."""
    with torch.device("meta"):
        root = known.model(config)
    # A process that holds the whole model has nothing to split.
    plan = ParallelizePlan() if mesh is None else known.plan(root)
    mesh = mesh or ParallelMesh()
    options = Layout.on(
        mesh,
        plan=plan,
        # Experts on tensor-parallel ranks exist only together with sequence parallelism.
        sequence_parallel=mesh.tp > 1,
        pipeline_layout=_uneven(root, mesh.pp),
        transforms=tuple(transforms),
    )
    model = ParallelModel(root, mesh, options)
    model.place(device, dtype)
    compute_buffers(root)
    return model


def _uneven(root: nn.Module, pp: int) -> str | None:
    """Return a layout of layers that do not divide evenly over stages. None: they do, or there are too few of them."""
    if pp == 1:
        return None
    layers = check_protocol(root)
    if layers % pp == 0 or layers + 2 < pp:
        return None
    return compose(balanced(layers, pp, len(depths_of(root))))


def _readers(mesh: ParallelMesh | None) -> AbstractContextManager[ProcessGroup | None]:
    """Return the ranks that read together: this process alone, or all."""
    return alone() if mesh is None else nullcontext(None)


def description(opened: Checkpoint) -> Mapping[str, Any]:
    """Return a checkpoint's description of its model: ``family``, ``config`` and, if there are any, ``transforms``.

    Raises:
        CheckpointError: it has no such description.
    """
    return described_model(opened.common, opened.path)


def described_model(entries: Mapping[str, Any], path: object) -> Mapping[str, Any]:
    """Do the same for the entries of the checkpoint at ``path``."""
    described = entries.get("model")
    if not isinstance(described, Mapping) or not {"family", "config"} <= described.keys():
        raise CheckpointError(
            f"checkpoint {path} does not say which model it holds (no 'model' with 'family' and 'config' in its "
            "common part); use one that a module of a model family saved."
        )
    return described


def saved_config(described: Mapping[str, Any], path: object, kind: type[Any] | None = None) -> Any:
    """Return the configuration in the description of the model of a checkpoint at ``path``.

    Args:
        kind: class of the configuration; None: that of the family.

    Raises:
        ConfigurationError: the class does not have such settings, or refuses a value.
    """
    kind = kind or family(described["family"]).config
    try:
        return kind.from_dict(described["config"])
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{kind.__name__} cannot take the configuration in {path}: {error} If a module with a configuration class "
            "of its own has saved it, read it with that module, whose constructor annotates the argument: "
            "config: OwnConfig | None = None."
        ) from error


def holds_base(common: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with these entries holds all weights of its model."""
    # Older checkpoints say nothing, and hold everything.
    return bool(common.get("model", {}).get(BASE, True))


def needs_base(opened: SavedCheckpoint, step: str) -> CheckpointError:
    """Make the error for a checkpoint that holds only adapters, if no base is given."""
    return CheckpointError(f"checkpoint {opened.path} holds only adapters; {step}.")


def initial_config(folder: str | os.PathLike[str], known: Family, kind: type[Any] | None = None) -> Any:
    """Return the model's configuration in a folder of initial weights: our checkpoint or a ``transformers`` folder.

    Args:
        kind: class of the configuration in our checkpoint; None: that of the family. A user's may have more fields.

    Raises:
        CheckpointError: there is no such folder.
        ConfigurationError: the model is of another family, or has options that are not supported here.
    """
    if not checkpoint.is_complete(folder):
        # Ours says its family and its configuration. Of a foreign folder, the family must read both.
        return _weights(known).config_of(folder)
    described = description(checkpoint.open(folder))
    if described["family"] != known.name:
        raise ConfigurationError(f"{folder} holds a {described['family']} model, not one of the family {known.name}.")
    return saved_config(described, folder, kind)


def initial_source(folder: str | os.PathLike[str], known: Family, config: Any, keys: Keys = "strict") -> Source:
    """Open a folder of initial weights as a source by canonical name; see :func:`initial_config`.

    Args:
        folder: the folder with the weights.
        known: family of the model to fill.
        config: configuration of the model to fill. Differences from the folder's configuration are logged.
        keys: what tensors that only the model or only the folder has mean to a strict fill: ``strict``: an error;
            ``log`` and ``ignore``: see :class:`~megalight.checkpoint.sources.LenientSource`.

    Raises:
        CheckpointError: there is no such folder, or its checkpoint has adapters, which must be merged first.
        ConfigurationError: as in :func:`initial_config`.
    """
    if not checkpoint.is_complete(folder):
        found = _weights(known).source(folder, config, PREFIX, strict=keys == "strict")
        return (
            found if keys == "strict" else LenientSource(found, str(folder), keys == "log", found.skipped, found.label)
        )
    opened = checkpoint.open(folder)
    described = description(opened)
    # Adapters are modules of their own, which the model to fill does not have.
    if serving(described):
        raise CheckpointError(f"checkpoint {opened.path} has adapters; merge them first (megalight merge).")
    differences = compare_configs(config.to_dict(), initial_config(folder, known, type(config)).to_dict(), "the folder")
    warn_of_differences(os.fspath(folder), tuple(differences))
    source = without_training_parts(FullPrecision(opened), described)
    return source if keys == "strict" else LenientSource(source, str(folder), keys == "log")


def whole_source(folder: str | os.PathLike[str], known: Family, config: Any, keys: Keys = "strict") -> Source:
    """Open a ``transformers`` folder as a source of all tensors of its model, and of no others.

    Args:
        folder: the folder.
        known: family of the model.
        config: its configuration.
        keys: what tensors mean that only the model or only the folder has. ``strict``: an error;
            ``log`` and ``ignore``: the first get the initial values of the seed that modules have by default, the
            second are skipped; ``log`` logs both.

    Raises:
        CheckpointError: as in :func:`initial_source`; names or shapes differ.
        ConfigurationError: as in :func:`initial_config`.
    """
    if keys == "strict":
        check_held(config, shapes_of(folder), folder)
    source = initial_source(folder, known, config, keys)
    with torch.device("meta"):
        model = known.model(config)
    if isinstance(source, LenientSource):
        return completed(source, model, PREFIX, widest(source), SEED)
    shapes = {PREFIX + name: tuple(tensor.shape) for name, tensor in canonical_tensors(model).items()}
    where, label = str(folder), getattr(source, "label", repr)
    with alone() as group:
        compare(Ranks(group), where, source.tensors, shapes, strict=True, prefix=PREFIX, label=label, lenient=LENIENT)
    return source


def fp8_scales(folder: str | os.PathLike[str]) -> Folder:
    """Return the scales of the weights that a ``transformers`` folder holds in FP8, by canonical name.

    Raises:
        CheckpointError: a file is missing or incomplete.
    """
    known = family_of_transformers(read_config(folder))
    config = initial_config(folder, known)
    return _weights(known).source(folder, config, PREFIX, strict=False).scales()


def shapes_of(folder: str | os.PathLike[str]) -> Iterator[Sequence[int]]:
    """Yield the shapes of all tensors in a folder of initial weights, as its files have them.

    Raises:
        CheckpointError: there is no such folder, or a file is damaged.
    """
    if checkpoint.is_complete(folder):
        yield from (stored.shape for stored in checkpoint.open(folder).tensors.values())
        return
    root = place(folder)
    for name in files_of(root):
        yield from (entry.shape for entry in header(root, name))


def refuse_keys(keys: Keys, path: object) -> None:
    """Refuse to compare names in another way where a checkpoint describes its own model.

    Raises:
        ConfigurationError: ``keys`` is not ``strict``.
    """
    if keys != "strict":
        raise ConfigurationError(
            f"weights_keys={keys!r} says how names in a folder of transformers are compared, and {path} is no such "
            "folder: a checkpoint holds the tensors of the model that it describes. Leave it out."
        )


def serving(described: Mapping[str, Any]) -> list[ModelTransform]:
    """Return the transforms of a described model without those that serve training alone."""
    return [found for found in rebuild(described.get("transforms", ())) if found.training_only is None]


def training_parts(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what names of a described model's tensors begin with that served training alone."""
    found = [transform.training_only for transform in rebuild(described.get("transforms", ()))]
    return tuple(PREFIX + beginning for beginning in found if beginning is not None)


def without_training_parts(source: Source, described: Mapping[str, Any]) -> Source:
    """Return the weights of a described model without tensors that served training alone."""
    beginnings = training_parts(described)
    return ExcludingSource(source, beginnings) if beginnings else source


def companions_of(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files that go with weights, from a checkpoint or a ``transformers`` folder; empty if it is neither."""
    if is_folder(path):
        return companions(path)
    if not checkpoint.is_complete(path):
        return {}
    opened = checkpoint.open(path)
    return {name: opened.file(name) for name in COMPANIONS if name in opened.files}


def unread_of(path: str | os.PathLike[str], known: Family, config: Any) -> dict[str, bytes]:
    """Return the file of tensors that the model does not read and its exports keep; empty if there are none.

    Args:
        path: a checkpoint, which has it as a file, or a ``transformers`` folder.
        known: family of the model.
        config: its configuration.
    """
    if is_folder(path):
        found = unread(path, _weights(known).map(config))
        return {UNREAD: save(found)} if found else {}
    opened = checkpoint.open(path) if checkpoint.is_complete(path) else None
    return {UNREAD: opened.file(UNREAD)} if opened and UNREAD in opened.files else {}


def _weights(known: Family) -> WeightConversion:
    if known.weights is None:
        raise ConfigurationError(
            f"models of the family {known.name} cannot start from weights of transformers; give a checkpoint of ours."
        )
    return known.weights


def widest(source: Source) -> torch.dtype:
    """Return the widest dtype of the weights in a source."""
    # Only the weights: optimizer state is wider, and is not read here.
    names = {stored.dtype for name, stored in source.tensors.items() if name.startswith(PREFIX)}
    found: torch.dtype = max((getattr(torch, name) for name in names), key=lambda dtype: dtype.itemsize)
    return found


# Single-file checkpoints, which modules write under Lightning's own strategies


def single_file_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Family, nn.Module]:
    """Build the model that a single-file checkpoint describes, and load its weights.

    Args:
        path: the file.
        device: device of the weights.
        dtype: dtype of the weights. None keeps the saved dtypes.

    Raises:
        CheckpointError: the file is not a checkpoint, does not describe its model, or lacks weights of it.
    """
    entries = read(path)
    described = described_model(entries, path)
    known = family(described["family"])
    # On meta: the values come from the file, and `assign` puts its tensors in place without a copy.
    with torch.device("meta"):
        model = known.model(saved_config(described, path))
        # Before the weights are loaded, because they have names for tensors that transforms made.
        apply_transforms(model, rebuild(described.get("transforms", ())))
    weights = {name.removeprefix(PREFIX): value for name, value in entries[WEIGHTS].items() if name.startswith(PREFIX)}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the model that it describes: {error}") from error
    return known, model.to(device, dtype)


# Sources that lack some names of a model, or have others


@dataclass(frozen=True)
class InitialTensor:
    """A tensor that gets its initial value.

    Attributes:
        shape: global shape.
        dtype: torch's name of the dtype to store it in; it is drawn in float32.
        initializer: its distribution.
    """

    shape: tuple[int, ...]
    dtype: str
    initializer: Initializer


@dataclass(frozen=True)
class CompletedSource(WrappedSource):
    """A source with the names of a model: initial values stand in for what it lacks, and others are not shown.

    Attributes:
        drawn: canonical name -> tensor that ``source`` lacks.
        hidden: names of ``source`` that the model does not have.
        seed: seed of the initial values.
    """

    drawn: Mapping[str, InitialTensor]
    hidden: frozenset[str]
    seed: int

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The tensors of the model."""
        shown = {name: stored for name, stored in self.source.tensors.items() if name not in self.hidden}
        return {**shown, **self.drawn}

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`~megalight.parallel.source.WrappedSource.before`."""
        stored = [target for target in request.targets if target.name not in self.drawn]
        return replace(request, targets=stored, strict=False)

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        for box in request.targets:
            if box.name in self.drawn:
                initializer, size = self.drawn[box.name].initializer, tuple(box.data.shape)
                box.data.copy_(draw(initializer, box.name, box.shape, box.offset, size, self.seed, box.data.device))
        return FillReport(filled.missing, tuple(name for name in filled.unexpected if name not in self.hidden))


def completed(lenient: LenientSource, model: nn.Module, prefix: str, dtype: torch.dtype, seed: int) -> Source:
    """Return the weights of a whole model from a source whose names need not be those of the model.

    Args:
        lenient: the source, and whether the names that differ are logged.
        model: the one-device model, on any device.
        prefix: before the canonical names of its tensors in the source.
        dtype: dtype of tensors that the source lacks.
        seed: seed of their values.

    Raises:
        CheckpointError: shapes differ; the source lacks a tensor that has no initial value, such as a buffer.
    """
    shapes = {prefix + name: tuple(tensor.shape) for name, tensor in canonical_tensors(model).items()}
    given = {name: initializer for name, _, _, initializer in initializers(model)}
    stated = {prefix + part.name: given[part.parameter] for part in parts(model) if part.parameter in given}
    stored, where, label = lenient.source.tensors, lenient.where, lenient.label
    with alone() as group:  # names are those of the whole model, on every rank
        compared = compare(Ranks(group), where, stored, shapes, strict=False, prefix=prefix, label=label)
    missing, extra = compared.missing, compared.unexpected
    if lost := [name for name in missing if name not in stated]:
        raise CheckpointError(
            f"{where} lacks {', '.join(map(label, lost))}, which has no initial value to take its place."
        )
    if lenient.say:
        report(where, label, missing, [*map(label, extra), *map(repr, lenient.skipped)])
    kind = str(dtype).removeprefix("torch.")
    drawn = {name: InitialTensor(shapes[name], kind, stated[name]) for name in missing}
    return CompletedSource(lenient.source, drawn, frozenset(extra), seed)


# The size of a model against the tensors of its files


def check_held(config: Any, shapes: Iterable[Sequence[int]], where: object) -> None:
    """Check that files with tensors of these shapes can hold the model, before any of it is built.

    A configuration of a few bytes can describe any number of layers and experts, and all modules are built before
    shapes are compared. Real files hold at least a matrix for each.

    Args:
        config: the model's configuration.
        shapes: of all tensors. Those with more than two dims are stacks of matrices.
        where: the files, for messages.

    Raises:
        CheckpointError: they hold fewer matrices than the model has layers, or experts in them.
    """
    needed, held = blocks(config), sum(prod(shape[:-2]) for shape in shapes)
    if needed > held:
        raise CheckpointError(
            f"{where} describes a model of {needed} layers and experts, and holds {held} tensors or matrices, fewer "
            "than one for each. The configuration is of another model, or tensors are missing: copy both again."
        )


def blocks(config: Any) -> int:
    """Count the layers of a model and its parts; a layer of experts counts once for each."""
    if not is_dataclass(config):
        return 0
    inner = sum(blocks(getattr(config, each.name)) for each in fields(config))
    if isinstance(config, MultiTokenConfig):
        return config.num_layers * max(1, len(config.pattern))
    if isinstance(config, GPTConfig) and config.moe is not None:
        sparse = sum(map(config.has_experts, range(config.num_layers)))
        return inner + config.num_layers + sparse * (config.moe.num_experts - 1)
    return inner + int(getattr(config, "num_layers", 0))
