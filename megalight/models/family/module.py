"""The LightningModule of a model family: connects its configuration with data, checkpoints and Adam."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, get_args, get_type_hints

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.sampler import check_fits, check_vocabulary
from megalight.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.errors import CheckpointError, ConfigurationError
from megalight.hub import hub_name
from megalight.models.config import compare
from megalight.models.family import family
from megalight.models.loading import (
    BASE,
    KEYS,
    Keys,
    check_held,
    companions_of,
    initial_config,
    initial_source,
    shapes_of,
    unread_of,
)
from megalight.models.module import CANONICAL_PREFIX, Carry, MegalightModule
from megalight.models.transforms import LoRA, describe, rebuild
from megalight.models.transforms.saved import with_adapters
from megalight.optim import AdamConfig
from megalight.parallel.shard import ShardSpec
from megalight.parallel.source import Source
from megalight.parallel.transform import ModelTransform, apply_transforms

SETTINGS = "tokenizer_config.json"
"""Settings of a tokenizer, among them its chat template."""


class FamilyConfig(Protocol):
    """The part that all families' configurations have."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_sequence_length(self) -> int:
        """Length of the longest sequence of the model, in tokens."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from plain values; settings that they lack have their defaults."""


ConfigT = TypeVar("ConfigT", bound=FamilyConfig)


class FamilyModule(MegalightModule, Generic[ConfigT]):
    """A LightningModule that builds its model from a configuration.

    It writes the configuration to checkpoints, and refuses data and checkpoints that do not fit it.

    Args:
        config: the model, its plain values, or the name of a preset of the family. None: the configuration in
            ``weights``. If the constructor of a subclass annotates it with a class of its own
            (``config: OwnConfig | None``), all of these give that class.
        optimizer: settings of Adam, parameter groups and learning-rate schedule.
        seed: seed of the initial weights.
        weights: a checkpoint, a run's folder (its newest checkpoint), a ``transformers`` folder, or a name of the
            Hugging Face Hub (``Qwen/Qwen3-0.6B``, ``Qwen/Qwen3-0.6B@revision``) to start from. None: random initial
            weights. A run that resumes reads its own checkpoint instead.
        weights_keys: what happens if the names in ``weights`` are not those of the model. ``strict``: an error.
            ``log``: tensors that the folder lacks keep their initial values, those that the model lacks are skipped,
            and the log names each of them. ``ignore``: the same without the log. Shapes that differ are always an
            error.

    Attributes:
        family: the family's name in checkpoints.
        adapter_weights: a checkpoint whose adapters a new run begins with. The callback ``Adapters`` sets it.

    Raises:
        ConfigurationError: neither ``config`` nor ``weights`` is given, the folder holds a model of another family, or
            ``weights_keys`` is unknown or has no ``weights``.
        CheckpointError: ``config`` is None and the folder ``weights`` does not exist.
    """

    family: ClassVar[str]

    def __init__(
        self,
        config: ConfigT | str | None = None,
        optimizer: AdamConfig | None = None,
        seed: int = 1234,
        weights: str | os.PathLike[str] | None = None,
        weights_keys: Keys = "strict",
    ) -> None:
        super().__init__(seed)
        if weights_keys not in KEYS:
            raise ConfigurationError(f"weights_keys={weights_keys!r} is not known; give one of {', '.join(KEYS)}.")
        if weights_keys != "strict" and weights is None:
            raise ConfigurationError(
                f"weights_keys={weights_keys!r} says how names in the folder weights are compared, and there is no "
                "such folder. Give weights, or leave weights_keys out."
            )
        self.weights = None if weights is None else _newest(weights)
        self.weights_keys = weights_keys
        self.adapter_weights: str | os.PathLike[str] | None = None
        # After `weights`, which it may read.
        self.config: ConfigT = self._config(config)
        self.optimizer = optimizer or AdamConfig()
        self._companions: dict[str, bytes] | None = None

    def output_step(self, carry: Carry, batch: Any) -> Tensor:
        """Return the cross entropy of each label in nats, ``[b, s]``. It is 0 if the loss mask is 0."""
        return carry["losses"][: batch.labels.numel()].view(batch.labels.shape)

    def _config(self, config: ConfigT | Mapping[str, Any] | str | None) -> ConfigT:
        known = family(self.family)
        presets, kind = known.presets, _own_config(type(self), known.config)
        if config is None and self.weights is None:
            raise ConfigurationError(
                f"{type(self).__name__} needs a configuration: give config (or the name of a preset: "
                f"{', '.join(presets)}), or weights, a folder of transformers."
            )
        found: ConfigT
        if isinstance(config, str):
            if "/" in config or os.path.isdir(config):
                raise ConfigurationError(
                    f"config={config!r} is no preset. To start from a checkpoint, a folder of transformers or a name "
                    "of the Hugging Face Hub, give it as weights, and leave config out."
                )
            found = presets[config]
            found = found if isinstance(found, kind) else kind.from_dict(found.to_dict())
        elif isinstance(config, Mapping):  # of a subclass whose argument has no type, on the command line
            found = kind.from_dict(config)
        else:
            found = initial_config(str(self.weights), known, kind) if config is None else config
            if config is None and self.weights_keys == "strict":
                check_held(found, shapes_of(str(self.weights)), self.weights)
        # Checked here, because the command line cannot check an argument without a type.
        if not isinstance(found, known.config):
            raise ConfigurationError(
                f"{type(self).__name__} needs a {known.config.__name__}, and config is a {type(found).__name__}. Pass "
                f"a {known.config.__name__}; a subclass annotates its argument: config: {known.config.__name__}."
            )
        return found

    def initial_weights(self) -> Source | None:
        """Return the folder ``weights`` as a source, with the adapters of ``adapter_weights``."""
        known = family(self.family)
        base = None
        if self.weights is not None:
            base = initial_source(self.weights, known, self.config, self.weights_keys)
        return base if self.adapter_weights is None else with_adapters(base, self.adapter_weights)

    def build_model(self) -> nn.Module:
        """Build the whole model for one device."""
        return family(self.family).model(self.config)

    def setup(self, stage: str) -> None:
        """Check the data before anything is built."""
        # With our strategy it was checked before; another strategy first comes here.
        self.check_data(getattr(self.trainer, "datamodule", None))

    def check_data(self, datamodule: Any) -> None:
        """Refuse data that does not fit the model. ``MegatronStrategy`` calls this before it starts processes.

        Raises:
            DataError: sequences are too long for the model, or the tokenizer has more tokens than the vocabulary.
        """
        length = getattr(datamodule, "sequence_length", None)
        if length is not None:
            check_fits(length, self.config.max_sequence_length)
        vocabulary = getattr(datamodule, "vocab_size", None)
        if vocabulary is not None:
            check_vocabulary(vocabulary, self.config.vocab_size)

    def configure_optimizers(self) -> Any:
        """Make Adam and its schedule, which advances once per optimizer step.

        A schedule that needs the length of the run uses the trainer's ``max_steps`` or its own ``steps``. We do not use
        ``estimated_stepping_batches``: it would create the data loader before the checkpoint restores its position.
        """
        # a rank may have only some parameters, so a rule without a match is no mistake there
        part = getattr(self.trainer.strategy, "holds_part", False)
        split = getattr(self.trainer.strategy, "parallel_model", None)
        named = _whole_names(self.named_parameters(), {} if split is None else split.specs)
        optimizer, scheduler = self.optimizer.build(named, self.trainer.max_steps, part)
        if scheduler is None:
            return optimizer
        steps, warmup = self.trainer.max_steps, getattr(self.optimizer.schedule, "warmup", 0)
        if 0 < steps <= warmup:
            rank_zero_info(
                f"the run (max_steps={steps}) ends within the warm-up of the learning rate (warmup={warmup})"
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def check_model(self, model: nn.Module) -> None:
        """Refuse optimizer rules for parameters that the model does not have."""
        # With the name that parameters have in the module: rules match these.
        self.optimizer.check((f"model.{name}", parameter) for name, parameter in model.named_parameters())

    def describe_model(self) -> dict[str, Any]:
        """Return family, configuration and transforms, so that a checkpoint can be used without its recipe."""
        return {
            "family": self.family,
            "config": self.config.to_dict(),
            "transforms": describe(self.transforms),
            BASE: self.saves_base,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write :meth:`describe_model`. Strategies of Megalight write it also if a subclass does not call this."""
        checkpoint["model"] = self.describe_model()

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return files to save in every checkpoint: tokenizer and settings from the folder ``weights``, if it has any.

        There are none if the data comes with another tokenizer: they would be of the wrong one. The chat template is
        that of the data, if it has one: the model learns conversations as it writes them. Tensors of the folder that
        the model does not read, and exports keep, are in a file of their own.
        """
        # Once: reading the folder in every save would cost a rank time.
        if self._companions is None:
            found = {} if self.weights is None else companions_of(self.weights)
            provide = getattr(getattr(self.trainer, "datamodule", None), "checkpoint_files", dict)
            data: Mapping[str, bytes] = provide()
            # By identity, not by file: two folders may hold the same tokenizer.
            identities = {
                Tokenizer.from_json(files[TOKENIZER].decode()).identity for files in (found, data) if TOKENIZER in files
            }
            unread: dict[str, bytes] = {}
            # Adapters alone are merged with the folder, which has them.
            if self.weights is not None and self.saves_base:
                unread = unread_of(self.weights, family(self.family), self.config)
            self._companions = unread | (_with_template(found, data) if len(identities) < 2 else {})
        return self._companions

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint belongs to this model."""
        self.check_checkpoint(checkpoint)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model. ``MegatronStrategy`` calls this before it starts processes.

        Raises:
            CheckpointError: the model differs. The message names the differing settings, or the other family.
        """
        described = checkpoint.get("model", {})
        found, family = described.get("config"), described.get("family", self.family)
        if found is None:
            raise CheckpointError(
                f"the checkpoint does not say which model it holds; it was not written by {type(self).__name__}."
            )
        if family != self.family:
            raise CheckpointError(f"the checkpoint is of the family {family}, but this model is of {self.family}.")
        with suppress(ConfigurationError):
            # Files of older releases lack settings that came later, which had their defaults then.
            found = type(self.config).from_dict(found).to_dict()
        differences = sorted(compare(self.config.to_dict(), found, "the checkpoint"))
        if differences:
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(differences)}. Use the configuration it was trained "
                "with (megalight inspect shows it), or another checkpoint."
            )
        self._take_transforms(rebuild(described.get("transforms", [])))

    def _take_transforms(self, found: list[ModelTransform]) -> None:
        """Use the checkpoint's transforms if this module has none and its model has no values yet."""
        # As values of files, where a tuple is a list.
        if describe(found) == describe(self.transforms):
            return
        if self.transforms or (self.model is not None and not all(p.is_meta for p in self.model.parameters())):
            ours, theirs = (", ".join(map(repr, transforms)) or "none" for transforms in (self.transforms, found))
            raise CheckpointError(
                f"the checkpoint's model has these transforms: {theirs}; this module's has: {ours}. "
                f"{_way_on(self.transforms, found)}"
            )
        self.transforms = found
        # The model is still on meta, so it can change.
        if self.model is not None:
            apply_transforms(self.model, found)


def _way_on(ours: Sequence[ModelTransform], theirs: Sequence[ModelTransform]) -> str:
    """Return what to do where a module and a checkpoint have different transforms."""
    added = [transform.given_by or repr(transform) for transform in ours if transform not in theirs]
    resume = "Use those that it was trained with"
    if added and all(transform in ours for transform in theirs):
        resume = f"Leave out {' and '.join(dict.fromkeys(added))}"
    # A run begins without adapters from weights that have them inside.
    merge = "merge its adapters (megalight merge) and " if any(isinstance(each, LoRA) for each in theirs) else ""
    return f"{resume}, or {merge}begin a new run from its weights (the module's weights, in place of ckpt_path)."


def _own_config(module: type[Any], known: type[Any]) -> type[Any]:
    """Return the subclass of the family's configurations that a user's constructor annotates, or else the family's."""
    try:
        hint = get_type_hints(module.__init__).get("config")
    except NameError:  # of a class inside a function, or one that only type checkers import
        return known
    kinds = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, known)]
    return kinds[0] if kinds else known


def _newest(weights: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the newest checkpoint in a run's folder or the folder of a name, and say so; or the path itself."""
    found = latest_checkpoint(weights)
    if found == publish.place(weights):
        return weights
    what = "its files are in" if hub_name(weights) else "the newest checkpoint in it is"
    rank_zero_info(f"weights={os.fspath(weights)}: {what} {found}")
    return str(found)


def _with_template(files: Mapping[str, bytes], data: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a tokenizer with the chat template of another copy of it, if that has one."""
    template = json.loads(data.get(SETTINGS, b"{}")).get("chat_template")
    if template is None or TOKENIZER not in files:
        return dict(files)
    settings = {**json.loads(files.get(SETTINGS, b"{}")), "chat_template": template}
    # Folders of transformers also have it in a file of its own.
    return {**files, SETTINGS: json.dumps(settings, indent=2).encode(), CHAT_TEMPLATE: template.encode()}


def _whole_names(
    named: Iterable[tuple[str, nn.Parameter]], specs: Mapping[str, ShardSpec]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Give parameters that several pipeline stages hold their name in the whole model.

    A stage may know only another one: a tied head, or the embedding of multi-token prediction. Rules that go by the
    name would then train the copies of one weight differently.
    """
    for name, parameter in named:
        spec = specs.get(name.removeprefix(CANONICAL_PREFIX))
        pieces = () if spec is None else spec.pieces
        shared = any(axis.startswith("pp") for piece in pieces for axis in piece.partial)
        yield pieces[0].name if shared else name, parameter
