"""One model split over one mesh of ranks.

A model is built for one device and changed in a fixed order; docs/parallelism-order.md explains why:

0. structural transforms (:class:`~megalight.parallel.transform.ModelTransform`),
1. split by the plan (:class:`ParallelModel`): each rank's modules hold its part,
2. cut into the stages of a pipeline (the same class),
3. places: dtype and device of parameters that have no memory yet, and the origin of their values,
4. recompute and precision (both: :meth:`ParallelModel.prepare`),
5. storage: that of the data-parallel engine of one training run (:mod:`megalight.parallel.run_engine`), or the
   parameters' own memory (:meth:`ParallelModel.fill`),
6. values: drawn or read from a source; the same two functions write them directly into that storage.

:meth:`ParallelModel.build` does all of it for a model that is not trained, or not yet. A later engine takes over the
values.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from megalight.errors import ConfigurationError, LayoutError
from megalight.nn.moe import Dispatcher
from megalight.ops.quantized_weight import stored_of
from megalight.parallel.apply import check_backends, check_overlap, split, warn_of_undeferred
from megalight.parallel.coupling import Coupling, couples
from megalight.parallel.data_parallel.unshard import Units
from megalight.parallel.initial_values import initialize, is_materialized, materialize, unknown
from megalight.parallel.layers import is_transformers, layers_of
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh
from megalight.parallel.pipeline.layout import Stage
from megalight.parallel.pipeline.stages import cut
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.parallel.shard import ShardSpec
from megalight.parallel.source import FillReport, Source, Target, clear_outside, parameter_targets, shard_targets
from megalight.parallel.transform import ModelTransform, apply_transforms, unknown_to

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValueOrigin:
    """The origin of a model's values.

    Attributes:
        seed: seed of initial values; None: the present values are kept.
        source: read after that.
        only: canonical names of the tensors that are drawn; None: all.
    """

    seed: int | None = None
    source: Source | None = None
    only: frozenset[str] | None = None


class ParallelModel:
    """This rank's part of a model, and the description of what it holds. The root is changed in place.

    Args:
        root: the single-device model, on meta or with values that are equal on all ranks.
        mesh: the mesh of ranks.
        layout: how it is split.
        name: the first part of the canonical name of every tensor (``model.layers.0...``).

    Attributes:
        plan: the plan that was used.
        specs: local name of each parameter and persistent buffer -> the part of the single-device model that it holds.
        pipeline_layout: the stages of the pipeline.
        coupling: lets data-parallel ranks agree on numbers of micro-batches, if they communicate in a forward pass;
            None: they do not.
        chunks: the stages on this rank, each a callable model, in model order; ``[root]`` without a pipeline.
        made: for each change of a transform, canonical names of the tensors that it made: in the whole model, and
            then on this rank.
        made_after_split: local names of those that transforms made on this rank, and give their values themselves.
        origin: the origin of the values, before rounding; None after they may have changed.
        pending: the values are still to be drawn or read.
        filled: values were drawn or read, once.
        shards: the modules whose parameters this rank holds a shard of; None: it holds all parameters whole.
        grafted: a part of the root that has a layout of its own, over the same ranks; None: there is none.
        outline: the single-device model without memory, for those who count its parameters; None: nobody made one.

    Raises:
        LayoutError: the model is split already, its sizes are not divisible, or a schedule would have no effect.
        ConfigurationError: ``tp > 1``, but no plan says what to split; or recompute of a layer or module that does not
            exist.
    """

    def __init__(
        self, root: nn.Module, mesh: ParallelMesh, layout: Layout | None = None, *, name: str = "model"
    ) -> None:
        self.root = root
        self.mesh = mesh
        self.layout = layout or Layout()
        self.name = name
        self.origin: ValueOrigin | None = None
        self.pending = self.filled = False
        self._refusals: list[RemovableHandle] = []
        self.device = torch.device("meta")
        self.shards: Units | None = None
        self.grafted: ParallelModel | None = None
        self.outline: nn.Module | None = None
        self.made = [
            frozenset(f"{name}.{each}" for each in made) for made in apply_transforms(root, self.layout.transforms)
        ]
        self.plan, self.specs, self.pipeline_layout = split(root, mesh, self.layout, f"{name}.")
        # Before the cut, because all stages run the same number of micro-batches, also those without experts.
        self.coupling = Coupling(mesh) if couples(self.specs.values(), mesh, root.modules()) else None
        self.chunks = [root]
        if self.layout.pipeline.schedule in ("zero_bubble", "combined") and mesh.global_rank == 0:
            warn_of_undeferred(root, self.layout.pipeline.schedule)
        # Cut after the split: plans name modules of the whole model, and tied weights are visible only there.
        if mesh.pp > 1:
            log.info("pipeline layout %s\n%s", self.pipeline_layout, self.pipeline_layout.draw())
            self.specs, self.chunks = cut(root, self.specs, self.pipeline_layout, mesh)
        self.made_after_split: set[str] = set()
        # Transforms of the split come last, because each rank makes tensors for its own layers only.
        for transform in self.layout.transforms:
            made = transform.change_split(self)
            self.specs |= made
            self.made_after_split |= made.keys()
            self.made.append(frozenset(piece.name for spec in made.values() for piece in spec.pieces))
        self._came_empty = not all(map(is_materialized, self.parameters()))

    @classmethod
    def build(
        cls,
        root: nn.Module,
        mesh: ParallelMesh,
        layout: Layout | None = None,
        *,
        name: str = "model",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        seed: int = 0,
        source: Source | None = None,
        fill: bool = True,
    ) -> ParallelModel:
        """Split, place and fill a model.

        Args:
            device: device of the parameters.
            dtype: dtype of the floating-point parameters and buffers; None: unchanged.
            seed: seed of the initial values, if the model is on meta.
            source: read after that; None: the initial values stay.
            fill: draw or read the values now. False: an engine will (:mod:`megalight.parallel.run_engine`), and until
                then the model refuses to run.

        Raises:
            LayoutError, ConfigurationError: as the constructor.
            CheckpointError: the source holds another model.
        """
        model = cls(root, mesh, layout, name=name)
        model.prepare(device, dtype, seed=seed, source=source)
        if fill:
            model.fill()
            model.transform_values()
        else:
            model._refuse_to_run()
        return model

    def prepare(
        self,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        *,
        seed: int = 0,
        source: Source | None = None,
        convert: Callable[[ParallelModel], object] = lambda model: None,
    ) -> None:
        """Do all that follows the split and comes before storage and values. All ranks of the mesh call this together.

        Args:
            device: device of the parameters.
            dtype: dtype of the floating-point parameters and buffers; None: unchanged.
            seed: seed of the initial values, as in :meth:`begin_from`.
            source: read after that.
            convert: converts layers to the precision of a run.

        Raises:
            ConfigurationError, LayoutError, BackendError: as :meth:`recompute` and :meth:`check_device`.
        """
        self.place(device, dtype)
        self.begin_from(seed, source)
        # After the split, because it wraps the parallel layers.
        self.recompute(self.layout.recompute)
        convert(self)
        self.check_device()

    def graft(self, other: ParallelModel) -> None:
        """Take over the tensors of a model with another layout of the same ranks; its modules are in the root already.

        Storage, values and checkpoints are then those of one model. Passes of the other are the caller's. It comes
        before :meth:`place`.
        """
        self.grafted = other
        self._came_empty |= other._came_empty
        self.specs = {**self.specs, **other.specs}

    def mesh_of(self, name: str) -> ParallelMesh:
        """Return the mesh of a tensor by its local name."""
        return self.mesh if self.grafted is None or name not in self.grafted.specs else self.grafted.mesh

    def check_same(self, mesh: ParallelMesh, layout: Layout) -> None:
        """Raise if this model is now wanted with another layout, or with another plan.

        Raises:
            LayoutError: says how the model was split.
        """
        before, after = self.layout.describe(self.mesh), layout.describe(mesh)
        kind = type(self.root).__name__
        if before != after:
            raise LayoutError(
                f"{kind} was split already ({before}) and cannot become another ({after}). Make a new module, and load "
                "a checkpoint of this one into it."
            )
        if layout.plan is not None and layout.plan != self.plan:
            raise LayoutError(
                f"{kind} was split by another plan already than the one that is asked for now. Leave plan out to go on "
                "with the model as it is, or make a new module, and load a checkpoint of this one into it."
            )

    # ------------------------------------------------------------------ storage and values

    def place(self, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
        """Move everything to a device. Parameters on meta get the device, but no memory yet; meta buffers become NaN.

        Args:
            dtype: dtype of floating-point parameters and buffers; None: unchanged. As with ``from_pretrained`` of
                ``transformers``, its buffers that are not saved (frequencies of angles), and those that it declares to
                stay in float32 (biases of routers), become no narrower.
        """
        if dtype is not None:
            # Before memory is made: buffers of a run are laid out by dtype.
            _cast(self.root, dtype)
        materialize(self.root, device, memory=False)
        self.device = torch.empty(0, device=device).device
        if self.grafted is not None:
            self.grafted.device = self.device

    def begin_from(self, seed: int, source: Source | None = None) -> None:
        """Set the origin of values; :meth:`fill` or the engine of a run then draws or reads them.

        Args:
            seed: seed of the initial values, which do not depend on the layout. A model that came with values keeps
                them, and only tensors that transforms made are drawn.
            source: read after that.
        """
        origin = ValueOrigin(None, source)
        # A model that was filled once keeps its values in a second run.
        if not self.filled and (self.empty or self.added):
            origin = ValueOrigin(seed, source, None if self.empty else self.added)
        self.origin = None if origin == ValueOrigin() else origin
        self.pending = self.origin is not None

    def fill(self) -> None:
        """Give parameters their own memory, and draw or read the pending values."""
        self.allocate()
        origin, pending = self.origin, self.pending
        self.pending, self.filled = False, True
        if origin is None or not pending:
            return
        if origin.seed is not None:
            # Drawn even if a source follows: it may lack tensors (`strict=False`), and modules compute some of their
            # buffers.
            initialize(self.root, self.specs, origin.seed, only=origin.only, later=self.made_after_split)
        if origin.source is not None:
            self.read(origin.source)

    def allocate(self) -> None:
        """Give parameters without memory their own, filled with NaN, except sharded ones."""
        for refusal in self._refusals:
            refusal.remove()
        self._refusals.clear()
        sharded = self._sharded
        for parameter in self.parameters():
            # Quantized values hold the values of some, which need no memory of their own.
            if id(parameter) not in sharded and not is_materialized(parameter) and stored_of(parameter) is None:
                parameter.data = unknown(parameter, self.device)

    def _refuse_to_run(self) -> None:
        """Refuse forward passes until there is memory: all elements of a parameter are one NaN."""

        def refuse(module: nn.Module, args: Any) -> None:
            raise ConfigurationError(
                f"{type(self.root).__name__} has no values yet. Make a megalight.Training over it first, or give "
                "fill=True to megalight.parallelize for a model that is not trained."
            )

        if self.pending:
            # Before the forward of each chunk, as there is no other moment at which all
            # users of the model pass.
            self._refusals += [chunk.register_forward_pre_hook(refuse) for chunk in self.chunks]

    def draw(self, seed: int) -> None:
        """Fill a model without memory with the initial values of the single-device model.

        The values do not depend on the layout. A model that came with values keeps them, and only tensors that
        transforms made are drawn.
        """
        self.begin_from(seed)
        self.fill()

    def read(
        self,
        source: Source,
        *,
        strict: bool = True,
        only_added: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> FillReport:
        """Fill the parameters and persistent buffers from a source; all ranks of the mesh call this together.

        Args:
            source: also kept, to fill masters that are wider than the parameters later.
            strict: every tensor of the model must be in the source, and the source has no others with this model's
                prefix. If the source has none of the tensors that a transform made, these keep their values.
            only_added: read only the tensors that transforms made.
            process_group: the ranks that call; None means the default group, or this process alone.

        Raises:
            CheckpointError: names or shapes differ.
        """
        self.check_readable()
        self.allocate()
        self.pending, self.filled = False, True
        # A source fills pieces only. Padding of a vocabulary would otherwise keep the NaN of fresh memory.
        self.clear_padding()
        self.origin = ValueOrigin(None, source)
        # Whole tensors are read in place. Of sharded ones, each rank reads its shard into flat memory.
        sharded = self._sharded
        whole = ((name, tensor) for name, tensor in self.tensors().items() if id(tensor) not in sharded)
        flat = [] if self.shards is None else self.shards.buckets
        shards = shard_targets([bucket.weights for bucket in flat], [bucket.shard for bucket in flat])
        targets: Iterator[Target] = chain(parameter_targets(whole, self.specs), shards)
        if only_added:
            targets = (target for target in targets if target.name in self.added)
        # A checkpoint from before a transform knows nothing of its tensors.
        elif lacking := unknown_to(source.tensors, self.made):
            targets = (target for target in targets if target.name not in lacking)
        filled = source.fill(targets, strict=strict, prefix=self.prefix, process_group=process_group)
        # Whole copies that were gathered before hold old values.
        if self.shards is not None:
            self.shards.expire()
        return filled

    def check_readable(self) -> None:
        """Refuse to read where weights are stored quantized.

        Raises:
            ConfigurationError: they are.
        """
        stored = [name for name, parameter in self.root.named_parameters() if stored_of(parameter) is not None]
        if stored:
            raise ConfigurationError(
                f"{stored[0]} and {len(stored) - 1} more weights are stored quantized, and cannot be read again. Load "
                "into a new module."
            )

    @property
    def empty(self) -> bool:
        """Whether parameters came without values, and have none yet."""
        return self._came_empty and not self.filled

    @property
    def added(self) -> frozenset[str]:
        """Canonical names of the tensors that transforms made."""
        return frozenset().union(*self.made)

    @property
    def _sharded(self) -> frozenset[int]:
        """The ids of the parameters of which this rank holds only a shard."""
        return frozenset() if self.shards is None else self.shards.sharded

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Make all parameters of this rank readable inside, also sharded ones. All ranks enter it together.

        Elsewhere, a sharded parameter has its values only while its unit computes; at other times it reads NaN. What
        all ranks write inside equally is kept, until wider masters overwrite it (``engine.refresh_masters()``).
        """
        with nullcontext() if self.shards is None else self.shards.full_parameters():
            yield

    def store(self, weights: Sequence[nn.Parameter], store: Callable[[nn.Parameter], None]) -> None:
        """Replace frozen weights by quantized values; all ranks of the mesh call this together.

        Sharded ones are gathered one unit after the other, and sharded quantized from then on.

        Args:
            weights: the same ones on all ranks that hold parts of them, in the same order.
            store: called with each weight while it has its values; stores it quantized.
        """
        held = self._sharded
        for weight in weights:
            if id(weight) not in held:
                store(weight)
        sharded = [weight for weight in weights if id(weight) in held]
        if sharded and self.shards is not None:
            self.shards.store(sharded, store)

    def unshard(self) -> None:
        """Give sharded parameters memory of their own again, for good."""
        if self.shards is not None:
            self.shards.unshard()
            self.shards = None

    def padded(self) -> dict[str, Tensor]:
        """Return, by local name, tensors with elements in no piece (a rounded-up vocabulary); no source fills these."""
        return {
            name: tensor.detach()
            for name, tensor in self.tensors().items()
            if sum(piece.numel for piece in self.specs[name].pieces) < tensor.numel()
        }

    def clear_padding(self) -> None:
        """Zero the padding of the :meth:`padded` tensors. Pieces keep their values: a source may not have them."""
        for name, tensor in self.padded().items():
            # A sharded one has no memory now: its shard was filled with its padding.
            if is_materialized(tensor):
                clear_outside(tensor.view(-1), ((piece.start, piece.stop) for piece in self.specs[name].pieces))

    def transform_values(self) -> bool:
        """Let transforms act on the values after these are set; return whether one may have changed them."""
        acting = [t for t in self.layout.transforms if type(t).with_values is not ModelTransform.with_values]
        replacing = [transform for transform in acting if not (transform.writes_in_place or transform.by_units)]
        if replacing and self._sharded:
            raise ConfigurationError(
                f"{type(replacing[0]).__name__} changes the values of whole parameters, and these are sharded by "
                "data_parallel.level='optim_grads_params'. Use level 'optim_grads' with it."
            )
        # What stores quantized weights comes first: the others read the weights that compute (lengths of rows, DoRA).
        for transform in sorted(acting, key=lambda each: not each.by_units):
            with nullcontext() if transform.by_units else self.full_parameters():
                transform.with_values(self)
        if acting:
            # Reading the origin again, for wider masters, would undo what transforms have done.
            self.origin = None
        return bool(acting)

    def recompute(self, options: RecomputeOptions) -> None:
        """Recompute these activations from now on, and no others.

        Raises:
            ConfigurationError: the model has no such layers or modules.
        """
        for chunk in self.chunks:
            apply_recompute(chunk, options, whole=self.mesh.pp == 1)
        if self.grafted is not None:  # after the others, which would undo it
            self.grafted.recompute(self.grafted.layout.recompute)

    def check_device(self) -> None:
        """Raise if layers or messages cannot work as asked for on these devices. All ranks of the mesh call this.

        Raises:
            BackendError: a backend that was named for a module cannot serve.
            LayoutError: an overlap backend cannot serve a layer, or a dispatcher the ranks of its experts.
            ConfigurationError: the device has a single queue, so nothing can run beside messages.
        """
        check_backends(self.root, self.device)
        check_overlap(self.root, self.device)
        # Every rank of a stage has the same layers, so ranks that share experts come here equally often.
        for module in self.root.modules():
            if isinstance(module, Dispatcher):
                module.connect()
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        if self.layout.pipeline.schedule == "combined" and self.device.type == "cuda" and queues == "1":
            raise ConfigurationError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 gives a GPU one queue, in which the messages of "
                "pipeline.schedule='combined' would block all other work. Set it to 8, or remove it."
            )

    # ------------------------------------------------------------------ what it holds

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave this description out of a pickled model, which is a single-device model.

        Raises:
            LayoutError: the rank holds only a part of the model.
        """
        if self.mesh.tp * self.mesh.pp * self.mesh.ep > 1:
            raise LayoutError(
                f"{type(self.root).__name__} holds only this rank's part ({self.mesh.describe()}), which cannot be "
                "pickled. Save a checkpoint with trainer.save_checkpoint, and load it into a new module."
            )
        # The object is pickled as None.
        return type(None), ()

    @property
    def prefix(self) -> str:
        """Prefix of canonical names."""
        return f"{self.name}."

    @property
    def token_multiple(self) -> int:
        """Packed token counts must be a multiple of this number."""
        return self.layout.token_multiple(self.mesh)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline's stages on this rank."""
        return self.pipeline_layout.of_rank(self.mesh.rank("pp"))

    @property
    def num_layers(self) -> int | None:
        """Number of layers of the whole model if this rank holds only a part of them; else None."""
        return self.pipeline_layout.num_layers or None

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by local name; tied ones come once."""
        # `keep_vars`: names are all that is needed, and detaching every tensor is not.
        persistent = set(self.root.state_dict(keep_vars=True))
        named: dict[str, Tensor] = dict(self.root.named_parameters())
        named.update({name: buffer for name, buffer in self.root.named_buffers() if name in persistent})
        return named

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Give ranks that hold the same buffers, and see different tokens, those of the first of them.

        All ranks call this together, between steps.
        """
        sent: dict[tuple[ProcessGroup, torch.dtype], list[Tensor]] = {}
        for name, buffer in self.root.named_buffers():
            axes = self.specs[name].data if name in self.specs else TOKEN_AXES
            if (group := self.mesh_of(name).group(*axes)) is not None:
                # `data`: what autograd has saved of a buffer stays good, as the values do where nothing has changed.
                sent.setdefault((group, buffer.dtype), []).append(buffer.data)
        for (group, _), buffers in sent.items():
            joined = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(joined, group_src=0, group=group)
            parts = torch.split(joined, [buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])

    def describe_new(self) -> None:
        """Describe tensors that were added or renamed after the split (by pruning), if this rank holds all of them."""
        if self.mesh.tp * self.mesh.pp * self.mesh.ep * self.mesh.etp == 1:
            for name, tensor in self.tensors().items():
                if name not in self.specs:
                    self.specs[name] = ShardSpec.replicated(self.prefix + name, tuple(tensor.shape))

    def layers(self) -> dict[int, nn.Module]:
        """Return the layers on this rank by global index."""
        return layers_of(self.root)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters on this rank; tied ones come once."""
        return list(self.root.parameters())

    def train(self, mode: bool = True) -> ParallelModel:
        """Set training mode (dropout, recompute) or evaluation mode."""
        self.root.train(mode)
        return self

    def eval(self) -> ParallelModel:
        """Set evaluation mode."""
        return self.train(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        """Copy the modules, but keep the mesh: process groups cannot be copied."""
        shadow = memo[id(self)] = object.__new__(type(self))
        shadow.__dict__.update(self.__dict__)
        shadow.root, shadow.chunks = copy.deepcopy((self.root, self.chunks), memo)
        return shadow


def _cast(root: nn.Module, dtype: torch.dtype) -> None:
    kept = [
        (module, local, buffer)
        for model in root.modules()
        if is_transformers(model)
        for module in model.modules()
        for local, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize > dtype.itemsize
        if local in (*module._non_persistent_buffers_set, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()))
    ]
    root.to(dtype=dtype)
    for module, local, buffer in kept:
        module._buffers[local] = buffer
