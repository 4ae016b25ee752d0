"""Our linear layers, heads, attentions and experts as modules that ModelOpt can quantize."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from megalight.nn import InnerAttention, Linear
from megalight.nn.embedding_and_head import DistillationTarget, LMHead
from megalight.nn.moe import Experts, Grouped
from megalight.parallel.context.attention import ContextAttention
from megalight.parallel.tensor.embedding_and_head import VocabHead, VocabLinear
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.plugins.modelopt.presets import modelopt
from megalight.plugins.modelopt.quantizer_sites import STACKS

LINEARS: tuple[type[nn.Module], ...] = (nn.Linear, Linear, ColumnLinear, RowLinear, VocabLinear)
HEADS: tuple[type[nn.Module], ...] = (LMHead, VocabHead)
ATTENTIONS: tuple[type[nn.Module], ...] = (InnerAttention, ContextAttention)

Probe: TypeAlias = Callable[[Tensor, Tensor, Callable[[], Tensor]], None]
"""Called with an input, the output, and what computes the output again. Layers have some by name of the quantizer."""


@functools.cache
def register_layers() -> None:
    """Tell ModelOpt of our layers, once per process; it gives a layer the class of its quantized kind."""
    modules = modelopt("torch.quantization.nn.modules.quant_module")
    registry = modules.QuantModuleRegistry
    linear, head, attention = _quantized_linear(modules), _quantized_head(modules), _quantized_attention(modules)
    for kind in LINEARS:
        if kind not in registry:  # ModelOpt has nn.Linear itself
            registry.register({kind: kind.__name__})(linear)
    for kind in HEADS:
        registry.register({kind: kind.__name__})(head)
    registry.register({Experts: Experts.__name__})(_quantized_experts(modules))
    for kind in ATTENTIONS:
        registry.register({kind: kind.__name__})(attention)


# The base classes are there only once ModelOpt is imported, so each class is made in a function.


def _alone() -> Any:
    """Return ModelOpt's state of a module without groups: it would sync over all ranks of the world.

    ``Calibration`` knows the right ones.
    """
    return modelopt("torch.utils.distributed").ParallelState(-1, -1, -1)


def _quantized_linear(modules: Any) -> Any:
    base: Any = modules.QuantLinearConvBase

    class QuantizedLinear(base):  # type: ignore[misc]
        """Rounds its input and its weight, then runs as before."""

        probes: ClassVar[dict[str, Probe]] = {}

        def _setup(self) -> None:
            self.parallel_state = _alone()
            super()._setup()

        def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
            run: Any = super().forward
            y = run(x, *rest, **named)
            for probe in self.probes.values():
                probe(x, y, lambda: run(x, *rest, **named))
            return y

    return QuantizedLinear


def _quantized_head(modules: Any) -> Any:
    class QuantizedHead(modules.QuantModule):  # type: ignore[misc]
        """With labels, heads pass the weight of their output layer to the loss, past the layer's own forward."""

        def _setup(self) -> None:
            self.parallel_state = _alone()

        def forward(
            self,
            hidden: Tensor,
            labels: Tensor | None = None,
            *,
            normed: bool = False,
            target: DistillationTarget | None = None,
        ) -> Tensor | tuple[Tensor, Tensor | None]:
            if target is not None and labels is not None:
                return self.learn(hidden, labels, target, normed=normed)
            if labels is None:
                logits: Tensor = super().forward(hidden, normed=normed)
                return logits
            hidden = self._rounded(hidden, normed)
            with self.output_layer.quantize_weight():
                losses: Tensor = super().forward(hidden, labels, normed=True)
            return losses

        def learn(
            self, hidden: Tensor, labels: Tensor, target: DistillationTarget, *, normed: bool = False
        ) -> tuple[Tensor, Tensor | None]:
            hidden = self._rounded(hidden, normed)
            with self.output_layer.quantize_weight():
                found: tuple[Tensor, Tensor | None] = super().learn(hidden, labels, target, normed=True)
            return found

        def _rounded(self, hidden: Tensor, normed: bool) -> Tensor:
            output: Any = self.output_layer
            hidden = hidden if normed else self.norm(hidden)
            if output.probes:
                # They see the layer's own product, which losses pass by.
                with torch.no_grad():
                    output(hidden)
            rounded: Tensor = output.input_quantizer(hidden)
            return rounded

    return QuantizedHead


def _quantized_attention(modules: Any) -> Any:
    class QuantizedAttention(modules.QuantModule):  # type: ignore[misc]
        """Rounds keys and values, before they are stored."""

        def _setup(self) -> None:
            self.parallel_state = _alone()
            self.k_bmm_quantizer, self.v_bmm_quantizer = modules.TensorQuantizer(), modules.TensorQuantizer()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            mixed: Tensor = super().forward(q, self.k_bmm_quantizer(k), self.v_bmm_quantizer(v), *rest)
            return mixed

    return QuantizedAttention


def _quantized_experts(modules: Any) -> Any:
    class QuantizedExperts(modules.QuantModule):  # type: ignore[misc]
        """Rounds each expert's matrices by quantizers of their own, and the inputs of a stack by one for all experts.

        That is ModelOpt's rule for the fused experts of ``transformers``: engines have one scale of inputs for all.
        """

        # Scales of inputs are of activations that no router has weighted, as in engines.
        weigh_output = True
        probes: ClassVar[dict[str, Probe]] = {}

        def _setup(self) -> None:
            self.parallel_state = _alone()
            for stack in STACKS:
                many = nn.ModuleList(modules.TensorQuantizer() for _ in range(len(self)))
                setattr(self, f"{stack}_input_quantizer", modules.TensorQuantizer())
                setattr(self, f"{stack}_weight_quantizers", many)

        def iter_weights_for_calibration(self) -> Iterator[tuple[Tensor, nn.Module]]:
            # ModelOpt asks by this name
            for stack in STACKS:
                yield from zip(getattr(self, stack), getattr(self, f"{stack}_weight_quantizers"), strict=True)

        def stack(self, name: str) -> Tensor:
            many = getattr(self, f"{name}_weight_quantizers")
            return torch.stack([quantizer(weight) for quantizer, weight in zip(many, super().stack(name), strict=True)])

        def _product(self, x: Tensor, stack: str, copies: Grouped) -> Tensor:
            kind = f"{stack}_input_quantizer"
            quantizer: Any = getattr(self, kind)
            run = super()._product
            probe = self.probes.get(kind)
            if quantizer._if_calib or probe is not None:
                # rows after the last copy hold anything
                rows = slice(int(copies.offsets[-1]))
                quantizer(x[rows])
                # nothing is rounded meanwhile
                product: Tensor = run(x, stack, copies)
                if probe is not None:
                    probe(x[rows], product[rows], lambda: run(quantizer(x), stack, copies)[rows])
            else:
                product = run(quantizer(x), stack, copies)
            return product

    return QuantizedExperts
