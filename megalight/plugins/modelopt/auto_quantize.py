"""Search for a format of each layer: the least harm within a number of bits per weight (ModelOpt's ``auto_quantize``).

A layer's score in a format is the sum of ``(g * d)^2`` over its outputs. ``g`` is the gradient of the loss with respect
to an output, and ``d`` is the change of that output by the format. The score approximates the second-order change of
the loss, with the Fisher information in place of the Hessian.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.checkpoint.ranks import Ranks
from megalight.errors import ConfigurationError, DataError
from megalight.nn.moe import Experts
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.plugins.modelopt.calibration import Search, agree
from megalight.plugins.modelopt.layers import ATTENTIONS
from megalight.plugins.modelopt.presets import Preset, modelopt
from megalight.plugins.modelopt.quantizer_sites import (
    STACKS,
    check_blocks,
    matrices,
    matrix_spec,
    row_weights,
    rows_are_split,
    share_tokens,
)
from megalight.plugins.modelopt.quantizers import (
    KINDS,
    UNQUANTIZED,
    apply_rules,
    convert,
    empty,
    put,
    quantizers_of,
    take_nothing,
)

BITS = 16
"""Bits of a weight without quantization, as ModelOpt counts."""
LOWER_BOUNDS = (None, 0.99, 0.9)
"""Shares of the budget that must be used, in turn: ModelOpt's solver at times finds nothing without one."""
_SUM = dist.ReduceOp.SUM


@dataclass(frozen=True)
class LayerFormat:
    """What was found for one layer.

    Attributes:
        preset: the format, or ``none``.
        numel: number of its weights in the whole model.
        scores: of each format.
    """

    preset: str
    numel: int
    scores: Mapping[str, float]


@dataclass(eq=False)
class _SearchedLayer:
    """A layer on this rank.

    Attributes:
        module: that layer.
        rows: whether this rank counts each of its output features; None: it counts all, or none.
        counts: whether this rank counts its outputs.
        partial: slices of output features whose gradient here is a term of a sum over these axes.
        axes: ranks along them have terms of the score.
        sum_change: along this axis, outputs are terms of a sum.
        held: format -> its quantizers.
        scores: format -> score.
    """

    module: Any
    rows: Tensor | None
    counts: bool
    partial: list[tuple[slice, tuple[str, ...]]]
    axes: tuple[str, ...]
    sum_change: str | None
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)


class FormatSearch:
    """Calibrates each format, and scores it in each layer. All ranks call each method together.

    Formats of neighbors do not count: one layer is rounded at a time. All experts of a layer have one format.

    Args:
        model: with values, and without quantizers. Its layers get some that do nothing after the search.
        formats: two or more presets, or one: each layer may also stay as it is.
        exclude: globs over paths of layers that stay as they are.

    Raises:
        ConfigurationError: a preset is given twice, no layer is named, or a layer cannot be rounded in this layout.
    """

    def __init__(self, model: ParallelModel, formats: Sequence[Preset], exclude: Sequence[str] = ()) -> None:
        self.model = model
        self.formats = {preset.name: preset for preset in formats}
        if len(self.formats) < len(formats):
            raise ConfigurationError(f"formats {[preset.name for preset in formats]} name one twice; give each once.")
        self.bits = dict(sorted(((preset.name, preset.bits) for preset in formats), key=lambda pair: pair[::-1]))
        layers = {
            path: module
            for path, module in model.root.named_modules()
            if type(module) in KINDS and type(module) not in ATTENTIONS
        }
        named = [
            path
            for path in layers
            if any(preset.names(f"{path}.weight_quantizer") for preset in formats)
            and not any(fnmatch.fnmatch(path, glob) for glob in exclude)
        ]
        convert(model.root, named)
        specs = {matrix.path: matrix_spec(model, matrix) for matrix in matrices(model.root)}
        self._layers = {path: self._layer(layers[path], specs[path]) for path in named}
        # Layers that keep their dtype count in the mean number of bits.
        self._numel = {path: self._count(path, module) for path, module in layers.items()}

    def _count(self, path: str, module: Any) -> int:
        """Return the number of weights of a layer in the whole model; a tied output layer has none of its own."""
        stacked = isinstance(module, Experts)
        held = [self.model.specs.get(f"{path}.{name}") for name in (STACKS if stacked else ("weight",))]
        pieces = {piece.name: prod(piece.shape) for spec in held if spec is not None for piece in spec.pieces}
        return sum(pieces.values()) * (self.model.mesh.size("ep") if stacked else 1)

    def _layer(self, module: Any, spec: ShardSpec) -> _SearchedLayer:
        mesh = self.model.mesh
        if isinstance(module, Experts):
            split = "etp" if mesh.size("etp") > 1 else None
            return _SearchedLayer(module, None, mesh.rank("etp") == 0, [], ("etp", "ep", "edp"), split)
        mine = row_weights(spec)
        partial_rows = list[tuple[slice, tuple[str, ...]]]()
        rows, counts = None, mesh.rank("tp") == 0
        if mine is not None and not getattr(module, "gather_output", False):
            rows, counts = module.weight.new_tensor(mine), True
            for piece in spec.pieces:
                start = piece.start // spec.shape[1]
                # Heads of keys that several ranks hold: each has the gradient of its own queries.
                if piece.partial:
                    partial_rows.append((slice(start, start + piece.size[0]), piece.partial))
        elif isinstance(module, RowLinear):
            counts |= module.shared.sequence_parallel
        elif not isinstance(module, ColumnLinear):
            # ranks along `tp` have other tokens
            counts |= "tp" in spec.pieces[0].partial
        assert rows_are_split(spec) or not partial_rows
        return _SearchedLayer(module, rows, counts, partial_rows, ("tp", "cp", "dp"), None)

    @torch.no_grad()
    def calibrate(self, passes: Callable[[], object]) -> None:
        """Calibrate each format by passes over all batches.

        Raises:
            DataError: a layer saw no data, or values that are not finite.
        """
        for layer in self._layers.values():
            layer.held[UNQUANTIZED] = take_nothing(layer.module)
        try:
            for name in self.bits:
                self._calibrate(self.formats[name], passes)
        finally:
            self._round_nothing()

    def _calibrate(self, preset: Preset, passes: Callable[[], object]) -> None:
        for path, layer in self._layers.items():
            if preset.names(f"{path}.weight_quantizer"):
                apply_rules(layer.module, preset)
                layer.held[preset.name] = quantizers_of(layer.module)
            else:
                put(layer.module, layer.held[UNQUANTIZED])
        for matrix in matrices(self.model.root):
            share_tokens(self.model, matrix)
            check_blocks(self.model, matrix)
        empty(self.model)
        search = Search(self.model, [preset], fold=False)
        search.begin()
        try:
            passes()
            missing = search.finish(passes)
        except BaseException:
            # It watches layers, which outlive it.
            search.abandon()
            raise
        self._check(missing)

    def _round_nothing(self) -> None:
        for layer in self._layers.values():
            put(layer.module, layer.held[UNQUANTIZED])

    def _check(self, missing: list[str]) -> None:
        """Raise on all ranks if one has quantizers that found nothing."""
        found = Ranks().together("calibrating", lambda: missing)
        told = Ranks().first("calibrating", lambda: [name for part in found for name in part])
        if told:
            raise DataError(
                f"calibration gave no data, or values that are not finite, to {len(told)} quantizers "
                f"({', '.join(told[:3])}). Give at least one batch; a layer that its model does not call cannot be "
                "quantized (exclude)."
            )

    def score(self, passes: Callable[[], object]) -> None:
        """Score each format by passes that also run backward."""
        parameters = [parameter for parameter in self.model.root.parameters() if parameter.requires_grad]
        weights = {id(getattr(self._layers[each.path].module, each.parameter)) for each in matrices(self.model.root)}
        frozen = [parameter for parameter in parameters if id(parameter) in weights]
        hooks = [
            layer.module.register_forward_hook(partial(self._try, layer), with_kwargs=True)
            for layer in self._layers.values()
        ]
        for layer in self._layers.values():
            kind = torch.promote_types(next(layer.module.parameters()).dtype, torch.float32)
            zero = torch.zeros((), dtype=kind, device=self.model.device)
            layer.scores = {name: zero.clone() for name in layer.held if name != UNQUANTIZED}
        for parameter in frozen:
            # gradients of activations are enough
            parameter.requires_grad_(False)
        try:
            with self.model.full_parameters():
                passes()
        finally:
            for hook in hooks:
                hook.remove()
            # A pass that failed in a format has left it there.
            self._round_nothing()
            for parameter in frozen:
                parameter.requires_grad_(True)
            for parameter in parameters:
                parameter.grad = None
        groups: dict[tuple[str, ...], list[Tensor]] = {}
        for layer in self._layers.values():
            groups.setdefault(layer.axes, []).extend(layer.scores.values())
        for axes, scores in sorted(groups.items()):
            agree(scores, self.model.mesh, axes, _SUM)

    def _try(self, layer: _SearchedLayer, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        """Note what each format changes in an output, until its gradient comes."""
        # In a pass that is recomputed later, there is no graph yet.
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        changes = {}
        with torch.no_grad():
            for name in layer.scores:
                put(module, layer.held[name])
                changes[name] = module.forward(*args, **kwargs) - output
            put(module, layer.held[UNQUANTIZED])
            if isinstance(module, Experts):
                # rows after the last copy hold anything
                changes = {name: change[: int(args[0].offsets[-1])] for name, change in changes.items()}
            if layer.sum_change is not None:
                for change in changes.values():
                    agree([change], self.model.mesh, (layer.sum_change,), _SUM)
        output.register_hook(partial(self._add, layer, changes))  # type: ignore[no-untyped-call]

    def _add(self, layer: _SearchedLayer, changes: Mapping[str, Tensor], gradient: Tensor) -> None:
        for rows, axes in layer.partial:
            term = gradient[..., rows].contiguous()
            agree([term], self.model.mesh, axes, _SUM)
            gradient = gradient.clone()
            gradient[..., rows] = term
        for name, change in changes.items():
            score = layer.scores[name]
            product = (gradient[: len(change)].to(score) * change.to(score)).clamp(-1e10, 1e10).square()
            score += float(layer.counts) * (product if layer.rows is None else product * layer.rows).sum()

    def choose(self, effective_bits: float) -> dict[str, LayerFormat]:
        """Return the choice for each layer of the whole model, by path; the same on every rank.

        Args:
            effective_bits: mean number of bits of the weights of all linear layers, at most, also of those that keep
                their dtype.

        Raises:
            ConfigurationError: no format is that narrow.
        """
        own = dict[str, tuple[int, dict[str, float]]]()
        for path, numel in self._numel.items():
            scores = self._layers[path].scores if path in self._layers else {}
            own[path] = numel, {name: float(score) for name, score in scores.items()}
        parts = Ranks().together("joining scores", lambda: own)

        def solve() -> dict[str, tuple[str, int, dict[str, float]]]:
            # Ranks of a stage have equal scores, and stages have other layers.
            layers = {path: found for part in parts for path, found in part.items()}
            return self._solve(dict(sorted(layers.items())), effective_bits)

        return {path: LayerFormat(*found) for path, found in Ranks().first("choosing formats", solve).items()}

    def _solve(
        self, layers: Mapping[str, tuple[int, dict[str, float]]], effective_bits: float
    ) -> dict[str, tuple[str, int, dict[str, float]]]:
        formats = {
            path: [*(name for name in self.bits if name in scores), UNQUANTIZED] for path, (_, scores) in layers.items()
        }
        harm, cost = list[list[float]](), list[list[float]]()
        for path, (numel, scores) in layers.items():
            least, row = float("inf"), []
            for name in formats[path]:
                # More bits are never worse.
                least = min(least, scores.get(name, 0.0))
                row.append(least)
            harm.append(row)
            cost.append([numel * self.bits.get(name, BITS) / BITS for name in formats[path]])
        # The solver's tolerances are absolute, and scores may be of any size.
        largest = max(map(max, harm)) or 1.0
        harm = [[score / largest for score in row] for row in harm]
        budget = sum(numel for numel, _ in layers.values()) * effective_bits / BITS
        solver = modelopt("torch.opt.searcher").LPS
        for share in LOWER_BOUNDS:
            limits = {"size": (None if share is None else share * budget, budget)}
            chosen, status = solver("formats", limits, {"size": cost}, harm)()
            if status == "Optimal":
                break
        else:
            raise ConfigurationError(
                f"no choice of {', '.join(self.bits)} has {effective_bits} bits per weight or less over all layers. "
                "Raise effective_bits, or exclude fewer layers."
            )
        return {path: (formats[path][int(place)], *layers[path]) for path, place in zip(layers, chosen, strict=True)}
