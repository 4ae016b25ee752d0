"""The base class for users: a LightningModule with a model for one device, which any strategy can run.

Write ``build_model``, ``forward_step``, ``loss_step`` and ``loss_tokens``. With the default ``training_step`` and
``validation_step`` the module runs under every Lightning strategy. ``MegatronStrategy`` calls the four methods itself,
for each micro-batch and model chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from megalight.errors import ConfigurationError
from megalight.models.batches import loaded, split_batch
from megalight.nn.aux_losses import KeptAuxLosses, collecting, end_step
from megalight.nn.init import initialize
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.source import Source, model_targets
from megalight.parallel.step import share_of_batch
from megalight.parallel.transform import ModelTransform, apply_transforms, unknown_to
from megalight.types import Loss, Totals, inverse, mean

# Metrics


class Ratio(Metric):
    """Sum of numerators divided by sum of denominators, in float64. It is 0 if the denominators are 0; NaN stays NaN.

    Unlike torchmetrics' ``MeanMetric`` it does not drop NaN, which would hide that a model diverged, and it does not
    copy values to the host.
    """

    full_state_update = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # float64: over a whole validation set, float32 would no longer count single tokens.
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add the sum and the count of one batch, both 0-dim."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Return the quotient so far."""
        return mean(self.total, self.count)


# Frozen dataclasses as batches


def keep_batches(plugin: Any) -> None:
    """Let a precision plugin leave batches that are frozen dataclasses, such as ``TokenBatch``, as they are.

    Lightning's plugins of 16 and 64 bits refuse them, as they set each field. Masks and counts must keep their dtype,
    since sums of ones end at 256 in bfloat16; the model's layers make their activations in its own dtype.
    """
    # On the instance, once: a plugin serves every stage of its Trainer. No lambda, as spawned ranks get it by pickle.
    if not isinstance(plugin.convert_input, partial):
        plugin.convert_input = partial(_converted, plugin.convert_input)


def _converted(convert: Any, batch: Any) -> Any:
    options = getattr(batch, "__dataclass_params__", None)
    return batch if options is not None and options.frozen else convert(batch)


# Checks of the methods that a user's module overrides


GIVEN = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
"""Kinds of parameters that callers give by place."""


def check_signatures(module: object, known: type) -> None:
    """Refuse a module that overrides a public method of Megalight with one that cannot be called like it.

    Args:
        module: an instance of a user's class, or of ours.
        known: a base of it whose methods others call as they are declared there: Lightning looks at what a step takes.

    Raises:
        ConfigurationError: the message says what the method must take.
    """
    for name, declared in _declared(type(module)).items():
        if hasattr(known, name):
            continue
        own = getattr(module, name)
        if getattr(own, "__func__", None) is not declared:  # to ask for a signature takes longer than all the rest
            _check(type(module).__name__, name, own, inspect.signature(declared))


def _declared(kind: type) -> dict[str, FunctionType]:
    """Return the public methods of our own classes among the bases, each from the most derived one."""
    found: dict[str, FunctionType] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "megalight":
            for name, method in vars(base).items():
                if isinstance(method, FunctionType) and not name.startswith("_"):
                    found.setdefault(name, method)
    return found


def _check(kind: str, name: str, own: object, declared: inspect.Signature) -> None:
    write = f"write def {name}{_plain(declared)}"
    if not callable(own):
        raise ConfigurationError(f"{kind}.{name} is a {type(own).__name__}, and it is called as a method; {write}.")
    try:
        takes = inspect.signature(own)
    except ValueError:  # a function in C does not say
        return
    for given in _calls(declared):
        try:
            takes.bind(*given)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind}.{name}{_plain(takes)} is called as {name}({', '.join(given)}), which it does not take "
                f"({error}); {write}."
            ) from error


def _calls(declared: inspect.Signature) -> Iterator[list[str]]:
    """Yield what the method may be given: all of its arguments, and those without a default."""
    taken = [parameter for parameter in list(declared.parameters.values())[1:] if parameter.kind in GIVEN]
    yield [parameter.name for parameter in taken]
    yield [parameter.name for parameter in taken if parameter.default is inspect.Parameter.empty]


def _plain(signature: inspect.Signature) -> str:
    """Return a signature without types."""
    empty = inspect.Parameter.empty
    plain = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


# The module


Carry: TypeAlias = dict[str, Tensor]

CANONICAL_PREFIX = "model."
"""Prefix of the canonical names of a model's tensors in checkpoints. Optimizer state has other prefixes."""


class MegalightModule(pl.LightningModule):
    """A LightningModule with a one-device model that strategies can divide into stages, shard and replicate.

    Args:
        seed: seed of the initial weights. They are the same in every parallel layout.

    Attributes:
        model: the model, or this process's part of it. None before ``configure_model``.
        token_multiple: numbers of packed tokens are padded to a multiple of this, which sequence parallelism needs. The
            strategy sets it; it is 1 on one device.
        transforms: changes of the model's structure, in this order. Callbacks can add theirs before the model is built.
        saves_base: whether checkpoints hold all weights, or only those that transforms added.
        varying_carry: whether the carry of ``forward_step`` can change its names or shapes between micro-batches of
            equal shapes. If so, pipeline stages send its shapes before every carry.

    Logs:
        train_loss: mean loss of the global batch.
        train_<name>: an auxiliary loss, or a metric of ``Loss.metrics``.
        val_loss: mean loss over the whole validation data.
        val_<name>: an auxiliary loss or a metric over the whole validation data.
        test_loss: mean loss over the whole test data.
        test_<name>: an auxiliary loss or a metric over the whole test data.
    """

    varying_carry = False

    def __init__(self, seed: int = 1234) -> None:
        super().__init__()
        self.seed = seed
        self.model: nn.Module | None = None
        self.transforms: list[ModelTransform] = []
        self.saves_base = True
        self.token_multiple = 1

    def build_model(self) -> nn.Module:
        """Build the whole one-device model. Do not read weight values: it must work under ``torch.device("meta")``."""
        raise NotImplementedError(f"{type(self).__name__} must define build_model() and return the one-device model.")

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """Run one chunk of the model on one micro-batch.

        Args:
            model: the chunk. Without a pipeline it is the whole model.
            batch: the micro-batch.
            carry: the result of the previous chunk. None on the first chunk.

        Returns:
            named tensors for the next chunk or, on the last chunk, for :meth:`loss_step`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward_step(model, batch, carry).")

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        """Return the *sum* of the losses of one micro-batch, from the result of the last chunk."""
        raise NotImplementedError(f"{type(self).__name__} must define loss_step(carry, batch).")

    def output_step(self, carry: Carry, batch: Any) -> Any:
        """Return the prediction for a batch, from the result of the last chunk. Default: all of that result."""
        return carry

    def loss_tokens(self, batch: Any) -> Tensor:
        """Return how many tokens (or samples) of ``batch`` count in the loss, 0-dim. Called before any forward."""
        raise NotImplementedError(f"{type(self).__name__} must define loss_tokens(batch).")

    def aux_loss_counts(self, batch: Any) -> Mapping[str, Tensor]:
        """Return what counts in auxiliary losses of :meth:`loss_step` that are sums: name -> 0-dim. Default: none.

        Such a loss is divided by its count over the whole global batch, like the main one. All batches have the same
        names. Auxiliary losses without a count are means over their micro-batch. Called before any forward.
        """
        return {}

    def plan(self, model: nn.Module) -> ParallelizePlan:
        """Return the model's parallel plan. Default: the plan registered for its class, or else full replication."""
        return plan_for(model) or ParallelizePlan()

    def frozen_models(self) -> Mapping[str, FrozenModel]:
        """Return models that run beside this one untrained, by name: a teacher, a reference policy. Default: none.

        If there are any, :meth:`forward_step` and :meth:`loss_step` get :class:`~megalight.types.WithResults` in place
        of the batch. Only strategies of Megalight run these models.
        """
        return {}

    def check_model(self, model: nn.Module) -> None:
        """Refuse settings that do not fit the whole model, before it is split. Default: no check."""

    def split_batch(self, batch: Any, size: int) -> Sequence[Any]:
        """Divide one rank's share of a global batch into micro-batches of ``size`` samples.

        Default: :func:`~megalight.models.batches.split_batch`.

        Raises:
            ConfigurationError: it is not certain which dim or list is the samples, or an object cannot be cut.
        """
        return split_batch(batch, size, loaded(self._trainer))

    def context_share(self, batch: Any, rank: int, size: int) -> Any:
        """Return share ``rank`` of ``size`` of every sequence of a micro-batch, for context parallelism (``cp > 1``).

        Labels and masks are divided like the tokens, and padding has no loss. All steps above then get the share.
        Default: the batch's own ``context_share(rank, size, multiple)``.

        Raises:
            ConfigurationError: the batch has no such method.
            DataError: its sequences are too short to be divided.
        """
        return share_of_batch(type(self).__name__, batch, rank, size, self.token_multiple)

    def initial_weights(self) -> Source | None:
        """Return the source of the initial weights of a new run. Default: None, which means random weights.

        All ranks call it together. A run that resumes from a checkpoint does not call it.
        """
        return None

    def configure_model(self) -> None:
        """Build the model once. Strategies that split it build it on the meta device and fill it themselves.

        Raises:
            ConfigurationError: a method of the user's class does not take what it is called with.
        """
        if self._trainer is not None:
            keep_batches(self._trainer.precision_plugin)
        if self.model is not None:
            return
        check_signatures(self, pl.LightningModule)
        # Under a strategy that splits, this runs on meta, and nothing below draws.
        self.model = self.build_model()
        made = apply_transforms(self.model, self.transforms)
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            initialize(self.model, self.seed, CANONICAL_PREFIX)
            # Initial values first: a source may be older than some transforms.
            source = self.initial_weights()
            if source is not None:
                named = [frozenset(CANONICAL_PREFIX + name for name in names) for names in made]
                lacking = unknown_to(source.tensors, named)
                targets = model_targets(self.model, CANONICAL_PREFIX)
                source.fill((t for t in targets if t.name not in lacking), prefix=CANONICAL_PREFIX)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch, for strategies without micro-batches.

        Called by hand, outside of ``fit``, it logs nothing.

        Raises:
            ConfigurationError: this process holds a stage of a pipeline only.
        """
        # Lightning's name of the hook that runs. The trainer is not asked: CUDA graphs watch steps for that.
        by_hand = self._current_fx_name != "training_step"
        if by_hand and self._trainer is not None and getattr(self._trainer.strategy, "holds_part", False):
            raise ConfigurationError(
                "training_step cannot be called by hand here: this process holds a part of the model only. Load the "
                "whole model with megalight.strategies.load_weights(module, checkpoint) into a new module first."
            )
        # Losses of layers are kept with their gradients, to be added to this step's loss.
        with collecting(KeptAuxLosses()) as aux_losses:
            loss = self._loss(batch)
        aux_losses.values = self.whole_aux_losses(aux_losses.values)
        counts = self.aux_loss_counts(batch)
        for name, value in loss.aux_losses.items():
            # Sums with a count become means here. Those without one are means already.
            aux_losses.attach(name, value * inverse(counts[name].to(value)) if name in counts else value, loss.sum)
        # the mean over this rank's batch: other strategies average over ranks, whatever their numbers of tokens
        objective = loss.sum * inverse(self.loss_tokens(batch).to(loss.sum))
        metrics = {name: mean(total, count) for name, (total, count) in loss.metrics.items()}
        if not by_hand:
            for name, value in {"loss": objective, **aux_losses.values, **metrics}.items():
                self.log(f"train_{name}", value.detach(), batch_size=1)
        # A single tensor for `backward`. Each term is logged by itself above.
        return torch.stack([objective, *aux_losses.values.values()]).sum()

    def whole_aux_losses(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the layers' losses of all tokens. A strategy that gives layers a share of them replaces this."""
        return values

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """End the counts of layers over the step. Strategies with ``ends_steps`` do it themselves."""
        strategy = self.trainer.strategy
        if self.model is not None and not getattr(strategy, "ends_steps", False):
            # Other strategies average gradients. Counts are sums.
            end_step(self.model, lambda counts: cast(Tensor, strategy.reduce(counts, reduce_op="sum")))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to ``val_loss``, the mean over all tokens of the validation set."""
        self.log_totals("val", self._totals(batch), dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to ``test_loss``, the mean over all tokens of the test set."""
        self.log_totals("test", self._totals(batch), dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return :meth:`output_step` of a batch."""
        assert self.model is not None
        return self.output_step(self.forward_step(self.model, batch), batch)

    def log_totals(self, stage: str, totals: Totals, dataloader_idx: int = 0, reduced: bool = False) -> None:
        """Log ``{stage}_{name}`` as Sum(sum) / Sum(count) over the evaluation, separately for each data loader.

        Args:
            reduced: the totals are sums over all ranks already.
        """
        if not hasattr(self, "_means"):
            self._means = nn.ModuleDict()  # Lightning logs only metrics that are submodules
        for name, (total, count) in totals.items():
            key = f"{stage}_{name}/{dataloader_idx}"
            if key not in self._means:
                # The module may have been moved before this metric was made.
                self._means[key] = Ratio(sync_on_compute=not reduced).to(self.device)
            ratio = cast(Ratio, self._means[key])
            if ratio.total.device != total.device:
                # Lightning moves the metrics that it logs to the host when a loop ends.
                ratio.to(total.device)
            ratio.update(total, count)
            self.log(
                f"{stage}_{name}",
                ratio,
                on_step=False,
                on_epoch=True,
                prog_bar=name == "loss",
                batch_size=1,
                metric_attribute=f"_means.{key}",  # Lightning's own search misses metrics that are made later
            )

    def on_validation_epoch_start(self) -> None:
        """Reset the totals of the previous evaluation."""
        # At the start and not at the end: Lightning reads the metrics after the end.
        self._forget("val")

    def on_test_epoch_start(self) -> None:
        """Reset the totals of the previous evaluation."""
        self._forget("test")

    def teardown(self, stage: str) -> None:
        """Leave the module without metrics, as it was: a summary of the next run would list them, a copy hold them."""
        self._modules.pop("_means", None)

    def _forget(self, stage: str) -> None:
        for key, ratio in getattr(self, "_means", {}).items():
            if key.startswith(f"{stage}_"):
                cast(Ratio, ratio).reset()

    def _loss(self, batch: Any) -> Loss:
        if self.model is None:
            raise ConfigurationError("the model is not built; call configure_model() before a step.")
        return self.loss_step(self.forward_step(self.model, batch), batch)

    def _totals(self, batch: Any) -> Totals:
        loss = self._loss(batch)
        return {"loss": (loss.sum.detach(), self.loss_tokens(batch)), **loss.metrics}
