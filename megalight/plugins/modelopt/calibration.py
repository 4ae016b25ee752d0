"""Calibration over all ranks: the largest magnitude that each quantizer sees, or a scale for each input feature.

Inputs are multiplied by such scales, and the columns of the weights are divided by them. Formulas, options and the
dtype of scales (float32) are those of ModelOpt's own functions, which know one device; sums over tokens and features
are taken over ranks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.engine import DataParallelEngine
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.plugins.modelopt.presets import Preset
from megalight.plugins.modelopt.quantizer_sites import (
    KEYS_AND_VALUES,
    Site,
    amaxes,
    features_spec,
    matrix_spec,
    places,
    rounds,
    row_weights,
    rows_are_split,
    sites,
)


def uncalibrated(model: ParallelModel) -> list[str]:
    """Return the quantizers of this rank whose ``amax`` is not known. The host waits for the device."""
    found = list(amaxes(model.root))
    if not found:
        return []
    known = torch.stack([amax.isfinite().all() for _, amax in found]).tolist()
    return [place.name for (place, _), good in zip(found, known, strict=True) if not good]


def needs_calibration(model: ParallelModel) -> bool:
    """Return whether any quantizer of this rank keeps an ``amax``."""
    return next(amaxes(model.root), None) is not None


class Calibration:
    """Collects magnitudes between :meth:`begin` and :meth:`finish`; the forward passes between them round nothing.

    All ranks call both together. Inputs are watched in the forward passes, weights are read at the end, where sharded
    ones must be whole (:meth:`~megalight.parallel.model.ParallelModel.full_parameters`).

    Args:
        model: a model with :class:`~megalight.plugins.modelopt.quantizers.Quantizers`, and with values.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model = model

    def begin(self) -> None:
        """Watch the inputs from now on."""
        for place in places(self.model.root):
            # Those without an `amax` too: what later layers see must not be rounded.
            place.quantizer.disable_quant()
        for place, _ in amaxes(self.model.root):
            if place.matrix is None:
                place.quantizer.enable_calib()

    def abandon(self) -> None:
        """Forget what was seen since :meth:`begin`, and round again."""
        for place, _ in amaxes(self.model.root):
            if place.matrix is None:
                place.quantizer._calibrator.reset()
                place.quantizer.disable_calib()
        for place in places(self.model.root):
            place.quantizer.enable_quant()

    @torch.no_grad()
    def finish(self) -> list[str]:
        """Agree on each ``amax`` over the ranks, and round from now on.

        Returns:
            the quantizers of this rank that saw no data, or values that are not finite.
        """
        activations = list[Tensor]()
        for place, amax in amaxes(self.model.root):
            if place.matrix is None:
                _take(place.quantizer, amax)
                activations.append(amax)
        # Tensor-parallel ranks see other features (row), heads or tokens (column), the others see other tokens.
        # These are all ranks of a stage, also those with other experts: a stack has one quantizer of inputs.
        agree(activations, self.model.mesh, ("tp", "cp", "dp"), dist.ReduceOp.MAX)
        self.read_weights()
        for place in places(self.model.root):
            place.quantizer.enable_quant()
        return [
            place.name for place, amax in amaxes(self.model.root) if not bool((amax.isfinite() & (amax >= 0)).all())
        ]

    @torch.no_grad()
    def read_weights(self) -> None:
        """Set the ``amax`` of weights by what they are now."""
        dense, experts = list[Tensor](), list[Tensor]()
        for place, amax in amaxes(self.model.root):
            if place.matrix is None:
                continue
            scale = getattr(rounds(place.matrix.weight_quantizer)[0][1], "_pre_quant_scale", None)
            # The first of several quantizers multiplies by itself.
            times = 1 if scale is None or place.part in ("", ".0") else scale
            read(place.quantizer, place.matrix.weight * times)
            height, width = place.blocks
            # Blocks of a row lie on one rank each.
            if not width and not (height and rows_are_split(matrix_spec(self.model, place.matrix))):
                (dense if place.matrix.index is None else experts).append(amax)
        # Replicas hold the same weights.
        agree(dense, self.model.mesh, ("tp",), dist.ReduceOp.MAX)
        agree(experts, self.model.mesh, ("etp",), dist.ReduceOp.MAX)


def read(quantizer: Any, weight: Tensor) -> None:
    """Set the ``amax`` of one quantizer by this rank's part of a weight."""
    rounds = quantizer._if_quant
    quantizer.disable_quant()
    quantizer.enable_calib()
    quantizer(weight.detach())
    _take(quantizer, quantizer.amax)
    if rounds:
        quantizer.enable_quant()


def _take(quantizer: Any, amax: Tensor) -> None:
    """Move what a quantizer has seen to its ``amax``; -1: nothing."""
    seen = quantizer._calibrator.compute_amax()
    amax.copy_(torch.full_like(amax, -1) if seen is None else seen.to(amax).view_as(amax))
    quantizer._calibrator.reset()
    quantizer.disable_calib()


def agree(found: Sequence[Tensor], mesh: ParallelMesh, axes: Sequence[str], operation: Any) -> None:
    """Reduce each tensor over the ranks of these axes in place, in one message per axis."""
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not found or not axes:
        return
    flat = torch.cat([tensor.flatten() for tensor in found])
    for axis in axes:
        dist.all_reduce(flat, operation, mesh.group(axis))
    for tensor, part in zip(found, torch.split(flat, [tensor.numel() for tensor in found]), strict=True):
        tensor.copy_(part.view_as(tensor))


AWQ = "awq_lite"
SCALES = 1e-4, 1e4
"""Smallest and largest scale of a feature before all are centered."""


class Search:
    """Finds what each quantizer holds. The values of weights change in :meth:`finish`.

    SmoothQuant (https://arxiv.org/abs/2211.10438) divides each feature of the inputs by its largest magnitude to the
    power ``alpha``. AWQ (https://arxiv.org/abs/2306.00978) tries several powers of their mean magnitude, and takes the
    one whose rounded weights change the outputs least; this takes a second pass over the batches. All experts of a
    stack share the scales of their inputs.

    Layers whose preset has no such method get their ``amax`` alone.

    Args:
        model: a model with :class:`~megalight.plugins.modelopt.quantizers.Quantizers`, and with values.
        presets: those of all layers of the model, also on other ranks.
        fold: change the weights. If not, their quantizers divide them in each forward pass.
        engine: what trains the model; None: nothing does. Its masters change with the weights, in their own dtype.

    Attributes:
        reads_again: whether :meth:`finish` runs the batches.

    Raises:
        ConfigurationError: layers have adapters.
    """

    def __init__(
        self,
        model: ParallelModel,
        presets: Iterable[Preset],
        fold: bool = True,
        engine: DataParallelEngine | None = None,
    ) -> None:
        self.model, self.fold, self.engine = model, fold, engine
        self.reads_again = any(preset.algorithm["method"] == AWQ for preset in presets)
        self._calibration = Calibration(model)
        self._searched = [_Searched.of(model, site) for site in sites(model.root) if site.method is not None]
        adapted = [each.site.path for each in self._searched if _adapted(each.layer)]
        if adapted:
            raise ConfigurationError(
                f"the preset rescales the input features of {adapted[0]}, which has adapters that would see other "
                "inputs then. Quantize the model without adapters (megalight merge), and train them after."
            )

    def begin(self) -> None:
        """Watch the inputs from now on, and let forward passes round nothing."""
        self._calibration.begin()
        for each in self._searched:
            # What calibration finds is multiplied even if nothing is rounded, and it is NaN until then.
            del each.site.quantizer._pre_quant_scale
        self._probe({each.site.name: each.watch for each in self._searched})

    def abandon(self) -> None:
        """End what :meth:`begin` has begun, without a result: another search may begin."""
        self._probe({})
        for each in self._searched:
            each.site.quantizer.pre_quant_scale = torch.full_like(each.scales, torch.nan)
        self._calibration.abandon()

    @torch.no_grad()
    def finish(self, passes: Callable[[], object]) -> list[str]:
        """Search, and round from now on. Sharded parameters are whole meanwhile.

        Args:
            passes: runs all batches forward.

        Returns:
            the quantizers of this rank that found no finite values.
        """
        self._probe({})
        with self.model.full_parameters():
            return self._finish(passes)

    def _finish(self, passes: Callable[[], object]) -> list[str]:
        unseen = self._calibration.finish()
        self._add_up()
        self._smooth([each for each in self._searched if each.method["method"] != AWQ])
        if self.reads_again:
            self._awq([each for each in self._searched if each.method["method"] == AWQ], passes)
        for each in self._searched:
            each.site.quantizer.pre_quant_scale = each.scales.to(each.site.matrices[0].weight.dtype)
        self._divide()
        self._calibration.read_weights()
        self._limit_inputs()
        return unseen + [each.site.name for each in self._searched if not bool(each.scales.isfinite().all())]

    def _probe(self, probes: Mapping[str, Callable[..., None]]) -> None:
        for each in self._searched:
            each.layer.probes = {
                other.site.kind: probes[other.site.name]
                for other in self._searched
                if other.layer is each.layer and other.site.name in probes
            }

    def _add_up(self) -> None:
        """Sum what the ranks have seen of each feature."""
        for axes, group in _by(self._searched, lambda each: each.token_axes):
            agree([total for each in group for total in (each.total, each.count)], self.model.mesh, axes, _SUM)
            agree([each.largest for each in group], self.model.mesh, axes, _MAX)

    def _smooth(self, searched: Sequence[_Searched]) -> None:
        for axes, group in _by(searched, lambda each: each.row_axes):
            for each in group:
                each.weights = torch.stack([matrix.weight.abs().amax(0) for matrix in each.site.matrices]).amax(0)
            agree([each.weights for each in group], self.model.mesh, axes, _MAX)
        for each in searched:
            alpha = each.method.get("alpha", 1.0)
            scales = (each.weights.pow(1 - alpha) / each.largest.float().pow(alpha)).clamp(*SCALES)
            # a feature that is always 0 needs no scale
            each.scales = torch.where(each.largest > 0, scales, 1.0).float()

    def _awq(self, searched: Sequence[_Searched], passes: Callable[[], object]) -> None:
        for axes, group in _by(searched, lambda each: each.row_axes):
            for each in group:
                each.weigh()
            agree([total for each in group for total in (each.weights, each.rows)], self.model.mesh, axes, _SUM)
        for each in searched:
            step = each.method.get("alpha_step", 0.1)
            alphas = torch.arange(0, 1.0 + step, step).tolist()
            means, weights = (each.total / each.count).float(), (each.weights / each.rows).float()
            tiny = torch.finfo(torch.float32).tiny
            each.tried = torch.stack([means.pow(a) / (weights.pow(1 - a) + tiny) for a in alphas]).clamp(*SCALES)
        for axes, group in _by(searched, lambda each: each.feature_axes):
            # of all features, also those on other ranks
            ends = [torch.stack([each.tried.amax(1), each.tried.amin(1).neg()]) for each in group]
            agree(ends, self.model.mesh, axes, _MAX)
            for each, (most, least) in zip(group, ends, strict=True):
                each.tried /= (most * -least).sqrt()[:, None]
        for each in searched:
            each.losses = each.total.new_zeros(len(each.tried))
        # Keys and values alone are rounded meanwhile.
        layers = [place.quantizer for place in places(self.model.root) if place.kind not in KEYS_AND_VALUES]
        for quantizer in layers:
            quantizer.disable_quant()
        self._probe({each.site.name: each.compare for each in searched})
        passes()
        self._probe({})
        for quantizer in layers:
            quantizer.enable_quant()
        for axes, group in _by(searched, lambda each: each.all_axes):
            agree([each.losses for each in group], self.model.mesh, axes, _SUM)
        for each in searched:
            each.scales = 1 / each.tried[each.losses.argmin()]

    def _divide(self) -> None:
        """Divide the weights by the scales of their inputs."""
        if not self.fold:
            for each in self._searched:
                for matrix in each.site.matrices:
                    first = rounds(matrix.weight_quantizer)[0][1]
                    first.pre_quant_scale = (1 / each.scales)[None].to(matrix.weight.dtype)
            return
        factors = [(each.site.matrices[0].whole, 1 / each.scales) for each in self._searched]
        if self.engine is not None:
            self.engine.rescale(factors)
            return
        for parameter, factor in factors:
            parameter.copy_(parameter * factor)

    def _limit_inputs(self) -> None:
        """Set ``amax`` of scaled inputs."""
        for axes, group in _by(self._searched, lambda each: each.feature_axes):
            found = [(each.site.quantizer, each.limit()) for each in group]
            agree([amax for _, amax in found], self.model.mesh, axes, _MAX)
            for quantizer, amax in found:
                if quantizer.is_enabled and quantizer.amax is not None:
                    quantizer.amax.copy_(amax)


_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


@dataclass(eq=False)
class _Searched:
    """A site, and what is known of its features on this rank.

    Attributes:
        layer: the module.
        rows_here: for each row of a matrix, whether this rank counts it; None: it counts all.
        token_axes: ranks along them see other tokens, or all the same.
        row_axes: ranks along them hold other rows, or other experts.
        feature_axes: ranks along them hold other features.
        sum_error: along this axis, outputs are terms of a sum.
        total: sum of magnitudes of each feature ``[in]``; and
        count: number of tokens; and
        largest: largest magnitudes ``[in]``.
    """

    model: ParallelModel
    site: Site
    layer: Any
    rows_here: Tensor | None
    token_axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    feature_axes: tuple[str, ...]
    sum_error: str | None
    total: Tensor
    count: Tensor
    largest: Tensor
    weights: Tensor
    rows: Tensor
    tried: Tensor
    losses: Tensor
    scales: Tensor

    @classmethod
    def of(cls, model: ParallelModel, site: Site) -> _Searched:
        weight = site.matrices[0].weight
        spec = matrix_spec(model, site.matrices[0])
        # Statistics of narrow dtypes are float32, and those of float64 are as exact as the model.
        zeros = torch.zeros(weight.shape[1], dtype=torch.promote_types(weight.dtype, torch.float32)).to(weight.device)
        mine = row_weights(spec)
        split = features_spec(model, site).pieces[0].size != features_spec(model, site).pieces[0].shape
        tensor, others = ("etp", ("ep", "edp")) if site.stacked else ("tp", ("cp", "dp"))
        return cls(
            model,
            site,
            model.root.get_submodule(site.path),
            None if mine is None else zeros.new_tensor(mine),
            token_axes=others if split else (tensor, *others),
            row_axes=("ep",) * site.stacked + (tensor,) * (mine is not None),
            feature_axes=(tensor,) if split else (),
            sum_error=tensor if split and site.stacked else None,
            total=zeros,
            count=zeros.new_zeros(1),
            largest=zeros.clone(),
            **dict.fromkeys(("weights", "rows", "tried", "losses", "scales"), zeros),
        )

    @property
    def method(self) -> Mapping[str, Any]:
        """How its scales are found."""
        assert self.site.method is not None
        return self.site.method

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have terms of the error."""
        return ("etp", "ep", "edp") if self.site.stacked else ("tp", "cp", "dp")

    def watch(self, x: Tensor, y: Tensor, again: Callable[[], Tensor]) -> None:
        """Note an input ``[..., in]``."""
        magnitudes = x.detach().abs().reshape(-1, x.shape[-1])
        if len(magnitudes):
            self.total += magnitudes.sum(0, dtype=self.total.dtype)
            self.count += len(magnitudes)
            torch.maximum(self.largest, magnitudes.amax(0).to(self.largest), out=self.largest)

    def weigh(self) -> None:
        """Sum each column's magnitudes, relative to the largest of their blocks, over the rows of this rank."""
        mine = self.total.new_ones(len(self.site.matrices[0].weight)) if self.rows_here is None else self.rows_here
        self.weights, self.rows = torch.zeros_like(self.total), mine.sum().mul(len(self.site.matrices)).reshape(1)
        for matrix in self.site.matrices:
            _, quantizer = rounds(matrix.weight_quantizer)[0]
            blocks = matrix.weight.abs().view(len(matrix.weight), -1, quantizer.block_sizes[-1])
            relative = blocks / (blocks.amax(-1, keepdim=True) + torch.finfo(blocks.dtype).tiny)
            self.weights += mine @ relative.flatten(1).to(mine)

    def compare(self, x: Tensor, y: Tensor, again: Callable[[], Tensor]) -> None:
        """Note by how much each scale changes an output."""
        inputs = self.site.quantizer
        first = [rounds(matrix.weight_quantizer)[0][1] for matrix in self.site.matrices]
        for number, scales in enumerate(self.tried):
            inputs.pre_quant_scale = (1 / scales).to(x.dtype)
            for matrix, quantizer in zip(self.site.matrices, first, strict=True):
                quantizer.pre_quant_scale = scales[None].to(matrix.weight.dtype)
                if quantizer.amax is not None:
                    read(quantizer, matrix.weight)
                quantizer.enable_quant()
            whole = [quantizer.amax for quantizer in first if quantizer.amax is not None and quantizer.amax.ndim == 0]
            # one number for a weight that several ranks hold
            agree(whole, self.model.mesh, ("etp" if self.site.stacked else "tp",), _MAX)
            error = (again() - y).to(self.losses.dtype)
            if self.sum_error is not None:
                agree([error], self.model.mesh, (self.sum_error,), _SUM)
            squares = error.reshape(-1, error.shape[-1]).square().sum(0)
            # A layer that joins its outputs has those of all ranks.
            if self.rows_here is not None and len(squares) == len(self.rows_here):
                squares = squares * self.rows_here
            self.losses[number] += squares.sum()
            for quantizer in (inputs, *first):
                del quantizer._pre_quant_scale
            for quantizer in first:
                quantizer.disable_quant()

    def limit(self) -> Tensor:
        """Return the largest magnitude of scaled inputs."""
        return (self.largest.float().to(self.site.matrices[0].weight.dtype) * self.scales).amax()


def _by(
    searched: Sequence[_Searched], axes: Callable[[_Searched], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[_Searched]]]:
    """Group by axes, so that ranks exchange few messages, in the same order on all of them."""
    groups: dict[tuple[str, ...], list[_Searched]] = {}
    for each in searched:
        groups.setdefault(axes(each), []).append(each)
    return sorted(groups.items())


def _adapted(layer: Any) -> bool:
    return getattr(layer, "adapter", None) is not None or bool(len(getattr(layer, "adapters", ())))
